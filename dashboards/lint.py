"""Checks boards and rules as text, as if somebody had written them by hand.

Owns:      what a query may name: series of the catalogue, ``up``, recorded series, and labels that they have, in
           matchers as well as in by, without, on, ignoring and group_left.
Never:     asks a server (check.py does), or trusts that query.py built what it reads.
Needs:     promql_parser (extra ``test``).
"""

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import promql_parser as promql

from dashboards.catalog import METRICS
from dashboards.metric import OPEN, Metric
from dashboards.query import TARGET_LABELS

LABEL_VALUES = re.compile(r"label_values\((?P<series>.+), (?P<label>\w+)\)")
VARIABLE = re.compile(r"\$\{?\w+\}?")
DURATION = "$__rate_interval"


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong where."""

    where: str
    query: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}" + (f"\n    {self.query}" if self.query else "")


@dataclass(frozen=True, slots=True)
class Known:
    """Series that queries may name."""

    labels: Mapping[str, frozenset[str]]  # series name -> its labels
    values: Mapping[str, Mapping[str, tuple[str, ...]]]  # series name -> label -> values, where they are known

    @classmethod
    def of_catalog(cls, recorded: Mapping[str, frozenset[str]] | None = None) -> "Known":
        """The catalogue's, Prometheus' own, and ``recorded`` ones of rules."""
        labels = {name: _labels(metric, name) for metric in METRICS for name in metric.series_names}
        values = {name: metric.labels for metric in METRICS for name in metric.series_names}
        return cls(labels={**labels, "up": TARGET_LABELS, **(recorded or {})}, values=values)


def _labels(metric: Metric, series: str) -> frozenset[str]:
    bound = {"le"} if series.endswith("_bucket") else set()
    return TARGET_LABELS | set(metric.label_names) | bound


def check_board(document: Any, known: Known) -> list[Problem]:
    """A board's JSON: queries of panels and variables, places and ids of panels."""
    title = document["title"]
    found = []
    for panel in document["panels"]:
        for target in panel.get("targets", []):
            found += check_query(f"{title} / {panel['title']} [{target['refId']}]", target["expr"], known)
    for variable in document["templating"]["list"]:
        if variable["type"] == "query":
            found += _check_variable(f"{title} / variable {variable['name']}", variable["query"], known)
    return found + check_places(document)


def check_rules(document: Any, known: Known) -> list[Problem]:
    """The content of a rules file."""
    return [
        problem
        for group in document["groups"]
        for rule in group["rules"]
        for problem in check_query(f"rule {rule.get('alert') or rule['record']}", rule["expr"], known)
    ]


def check_query(where: str, text: str, known: Known) -> list[Problem]:
    """One expression."""
    plain = VARIABLE.sub(lambda found: "1m" if found.group() == DURATION else "x", text)
    try:
        parsed = promql.parse(plain)
    except ValueError as error:
        return [Problem(where, text, f"does not parse: {error}")]
    return [Problem(where, text, what) for what in dict.fromkeys(_faults(parsed, text, known))]


def check_places(document: Any) -> list[Problem]:
    """Panels that lie over each other, stick out of the grid, or have an id that another one has."""
    title, panels = document["title"], document["panels"]
    found = []
    for one, other in itertools.combinations(panels, 2):
        if one["id"] == other["id"]:
            found.append(Problem(title, "", f"{one['title']!r} and {other['title']!r} have the same id {one['id']}"))
        if _overlap(one["gridPos"], other["gridPos"]):
            found.append(Problem(title, "", f"{one['title']!r} and {other['title']!r} lie over each other"))
    wide = [panel["title"] for panel in panels if panel["gridPos"]["x"] + panel["gridPos"]["w"] > 24]
    return found + [Problem(title, "", f"{each!r} sticks out of the 24 columns") for each in wide]


def _overlap(one: Mapping[str, int], other: Mapping[str, int]) -> bool:
    return all(
        one[start] < other[start] + other[size] and other[start] < one[start] + one[size]
        for start, size in (("x", "w"), ("y", "h"))
    )


def _check_variable(where: str, text: str, known: Known) -> list[Problem]:
    found = LABEL_VALUES.fullmatch(text)
    if found is None:
        return [Problem(where, text, "is not label_values(series, label)")]
    return check_query(where, f"count by ({found['label']}) ({found['series']})", known)


def _faults(parsed: promql.Expr, text: str, known: Known) -> Iterator[str]:
    """Faults of names; the expression itself has parsed."""
    for node in _nodes(parsed):
        if isinstance(node, promql.VectorSelector):
            yield from _selector_faults(node, known)
        elif isinstance(node, promql.AggregateExpr) and node.modifier is not None:
            yield from _unknown(node.modifier.labels, node.expr, known, "by or without")
        elif isinstance(node, promql.BinaryExpr) and node.modifier is not None:
            matching = node.modifier.matching
            for side in (node.lhs, node.rhs):
                yield from _unknown(matching.labels if matching else [], side, known, "on or ignoring")
            yield from _unknown(node.modifier.group_labels or [], node, known, "group_left")


def _nodes(expression: promql.Expr) -> list[Any]:
    found: list[Any] = []

    def visit(node: promql.Expr) -> bool:
        found.append(node.vector_selector if isinstance(node, promql.MatrixSelector) else node)
        return True

    promql.walk(expression, visit)
    return list({id(node): node for node in found}.values())


def _selector_faults(selector: promql.VectorSelector, known: Known) -> Iterator[str]:
    name = selector.name
    if name is None or name not in known.labels:
        yield f"there is no series {name}; the catalogue is dashboards/catalog.py"
        return
    for matcher in selector.matchers.matchers:
        if matcher.name not in known.labels[name]:
            yield f"{name} has no label {matcher.name}; it has {sorted(known.labels[name])}"
            continue
        values = known.values.get(name, {}).get(matcher.name, OPEN)
        if values and (strange := set(matcher.value.split("|")) - set(values)):
            yield f"{name}: {matcher.name} is never {sorted(strange)}; it is one of {sorted(values)}"


def _unknown(labels: list[str], inside: Any, known: Known, clause: str) -> Iterator[str]:
    names = [each.name for each in _nodes(inside) if isinstance(each, promql.VectorSelector)]
    has = frozenset[str]().union(*(known.labels.get(name or "", frozenset()) for name in names))
    if names and (strange := set(labels) - has):
        yield f"{clause}: no series inside has labels {sorted(strange)}; there are {sorted(has)}"
