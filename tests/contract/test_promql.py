"""Every expression of boards and rules parses, and names only series, labels and label values of the catalogue.

Names are looked up in selectors, in by, without, on, ignoring and group_left, and in the legends of panels.
"""

import re
from collections.abc import Iterator
from typing import Any

import promql_parser as promql
import pytest
import yaml

from dashboards.board import NARROWING, Needs, Panel, Shape
from dashboards.catalog import CATALOG, IDENTITY, METRICS, OPEN
from dashboards.files import BOARD_FILES, BOARDS, RULES
from tests.rule_cases import CASES, RECORDED
from tests.scraped import committed_board, panels

TARGET_LABELS = frozenset({"job", "instance", "node"})  # that Prometheus and http_sd put on every series
BY_SERIES = {name: metric for metric in METRICS for name in metric.series_names}
# an alert has the labels of its expression's result too: a board may show those that name a process
LABELS = {"up": TARGET_LABELS, "ALERTS": TARGET_LABELS | {*IDENTITY, "alertname", "alertstate", "severity"}} | {
    name: TARGET_LABELS | set(metric.label_names) | ({"le"} if name.endswith("_bucket") else set())
    for name, metric in BY_SERIES.items()
}
PANELS = [panel for board in BOARDS for panel in board.panels]
RULE_LIST = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
VARIABLE = re.compile(r"\$\{?(\w+)\}?")


def parse(text: str) -> Any:
    """Grafana's variables are not PromQL: a duration or a value stands for each."""
    return promql.parse(VARIABLE.sub(lambda found: "1m" if found[1] == "__rate_interval" else "x", text))


def nodes(expression: Any) -> list[Any]:
    found: list[Any] = []

    def visit(node: Any) -> bool:
        found.append(node.vector_selector if isinstance(node, promql.MatrixSelector) else node)
        return True

    promql.walk(expression, visit)
    return list({id(node): node for node in found}.values())


def names(expression: Any) -> set[str]:
    return {node.name for node in nodes(expression) if isinstance(node, promql.VectorSelector)}


def faults(text: str) -> list[str]:
    """What of ``text`` is not in the catalogue."""
    try:
        parsed = parse(text)
    except ValueError as error:
        return [f"does not parse: {error}"]
    return [fault for node in nodes(parsed) for fault in (*selector_faults(node), *clause_faults(node))]


def selector_faults(node: Any) -> Iterator[str]:
    if not isinstance(node, promql.VectorSelector):
        return
    if node.name not in LABELS:
        yield f"there is no series {node.name}"
        return
    for matcher in node.matchers.matchers:
        if matcher.name not in LABELS[node.name]:
            yield f"{node.name} has no label {matcher.name}"
        known = BY_SERIES[node.name].labels.get(matcher.name, OPEN) if node.name in BY_SERIES else OPEN
        if known and (strange := set(matcher.value.split("|")) - set(known)):
            yield f"{node.name}: {matcher.name} is never {sorted(strange)}"


def clause_faults(node: Any) -> Iterator[str]:
    clauses: list[tuple[list[str], Any]] = []
    if isinstance(node, promql.AggregateExpr) and node.modifier is not None:
        clauses.append((node.modifier.labels, node.expr))
    elif isinstance(node, promql.BinaryExpr) and node.modifier is not None:
        matching = node.modifier.matching.labels if node.modifier.matching else []
        clauses += [(matching, node.lhs), (matching, node.rhs), (node.modifier.group_labels or [], node)]
    for labels, inside in clauses:
        has = {label for name in names(inside) for label in LABELS.get(name, ())}
        if has and (strange := set(labels) - has):
            yield f"no series inside has labels {sorted(strange)}"


def result_labels(node: Any) -> set[str]:
    """Labels that the result of an expression has."""
    if isinstance(node, promql.VectorSelector):
        return set(LABELS[node.name])
    if isinstance(node, promql.AggregateExpr):
        return set(node.modifier.labels) if node.modifier else set()
    if isinstance(node, promql.BinaryExpr):
        return result_labels(node.rhs if isinstance(node.lhs, promql.NumberLiteral) else node.lhs)
    if isinstance(node, promql.Call) and node.func.name in ("histogram_quantile", "absent"):
        return result_labels(node.args[1]) - {"le"} if node.func.name == "histogram_quantile" else set()
    assert isinstance(node, promql.ParenExpr), f"{node}: teach this function what labels it has"
    return result_labels(node.expr)


def needs_apart(query: str) -> bool:
    """Whether all that the expression reads exists only where prefill and decode are apart."""
    return all(name in BY_SERIES and BY_SERIES[name].disaggregated for name in names(parse(query)))


def test_every_query_of_a_committed_board_names_only_the_catalogue() -> None:
    found = []
    for uid in BOARD_FILES:
        document = committed_board(uid)
        found += [target["expr"] for panel in panels(document) for target in panel["targets"]]
        found += [each["target"]["expr"] for each in document["annotations"]["list"]]
        for variable in document["templating"]["list"][1:-1]:
            series = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"])
            assert series is not None, variable["query"]
            assert series[2] == NARROWING[variable["name"]][1]
            found.append(f"count by ({series[2]}) ({series[1]})")
    assert len(found) >= 100
    assert [(query, fault) for query in found for fault in faults(query)] == []


def test_a_mark_names_only_labels_of_its_events() -> None:
    marks = {events for board in BOARDS for events in board.annotations}
    assert len(marks) == 5
    for events in marks:
        assert set(re.findall(r"\{\{(\w+)\}\}", events.title)) <= result_labels(parse(events.query)), events


def test_every_rule_and_every_series_of_its_tests_names_only_the_catalogue() -> None:
    found = [rule["expr"] for rule in RULE_LIST]
    found += [name for case in CASES for name in case.series] + [name for each in RECORDED.values() for name in each[0]]
    assert [(query, fault) for query in found for fault in faults(query)] == []


def test_a_summary_names_only_labels_of_its_alert() -> None:
    for rule in RULE_LIST:
        shown = set(re.findall(r"\$labels\.(\w+)", rule.get("annotations", {}).get("summary", "")))
        assert shown <= result_labels(parse(rule["expr"])), rule


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel.title)
def test_a_panel_is_whole(panel: Panel) -> None:
    """It says what it shows and what to do, its legends name labels of its results, and it says what it needs."""
    assert panel.queries
    assert 1 <= panel.width <= 24
    assert panel.shows.endswith(".")
    assert panel.act.endswith(".")
    assert bool(panel.columns) == (panel.shape is Shape.TABLE)
    for query in panel.queries.values():
        assert set(panel.columns) <= result_labels(parse(query))
    for legend, query in panel.queries.items():
        assert set(re.findall(r"\{\{\s*(\w+)\s*\}\}", legend)) <= result_labels(parse(query)), (legend, query)
    assert all(map(needs_apart, panel.queries.values())) == (panel.needs is Needs.APART)


def test_every_metric_is_on_a_board() -> None:
    """A metric that no board shows need not be emitted."""
    queries = [query for panel in PANELS for query in panel.queries.values()]
    shown = {BY_SERIES[name].name for query in queries for name in names(parse(query)) if name in BY_SERIES}
    assert shown == set(CATALOG)
    assert {metric for metric, _, _ in NARROWING.values()} <= shown


@pytest.mark.parametrize(
    "text",
    [
        'sum by (role) (rate(manta_scheduler_tokens_total{kind="decode",replica=~"$replica"}[$__rate_interval]))',
        "histogram_quantile(0.9, sum by (le, stage) (rate(manta_request_stage_duration_seconds_bucket[5m])))",
        "sum by (replica) (manta_cache_nodes) / on (replica) group_left (node) manta_replica_info",
    ],
)
def test_a_right_query_has_no_faults(text: str) -> None:
    assert faults(text) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sum(rate(manta_scheduler_token_total[5m]))", "there is no series manta_scheduler_token_total"),
        ("sum(rate(manta_scheduler_tokens_total[5m])", "does not parse"),
        ("manta_request_prompt_tokens", "there is no series manta_request_prompt_tokens"),  # a histogram has parts
        ('manta_cache_nodes{teir="L1"}', "has no label teir"),
        ('manta_kv_pool_tokens{state=~"free|fre"}', "state is never ['fre']"),
        ("sum by (replic) (manta_cache_nodes)", "no series inside has labels ['replic']"),
        ("manta_cache_nodes / on (replic) manta_transfer_peers", "no series inside has labels ['replic']"),
        ("manta_cache_nodes * on (replica) group_left (nod) manta_replica_info", "no series inside has labels ['nod']"),
        ('label_replace(manta_cache_node, "a", "$1", "replica", "(.*)")', "there is no series manta_cache_node"),
    ],
)
def test_a_fault_is_found_and_named(text: str, said: str) -> None:
    assert any(said in fault for fault in faults(text)), faults(text)
