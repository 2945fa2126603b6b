"""PromQL made from the catalogue: an unknown metric, label or label value cannot be written down.

Owns:      the text of every query of boards and rules.
Never:     asks a server.
Invariant: a Query's ``labels`` are the labels of its result, so that legends, joins and rules can be checked when they
           are built. A ratio is of two sums (ratios are never averaged) and has no value while nothing happened.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dashboards.catalog import CATALOG
from dashboards.metric import IDENTITY, OPEN, Kind, Metric, Process

TARGET_LABELS = frozenset({"job", "instance", "node"})  # that Prometheus and http_sd put on every series
BOARD_WINDOW = "$__rate_interval"
WINDOW = re.compile(r"\$__rate_interval|\d+[smhd]")


class QueryError(ValueError):
    """A query that the catalogue does not allow; raised while boards or rules are built."""


@dataclass(frozen=True, slots=True)
class Query:
    """A PromQL expression."""

    text: str
    labels: frozenset[str]  # of its result
    metrics: frozenset[str]  # names in the catalogue that it reads

    def __str__(self) -> str:
        return self.text

    @property
    def disaggregated(self) -> bool:
        """Whether it reads what exists only where prefill and decode are apart."""
        return any(CATALOG[name].disaggregated for name in self.metrics)


@dataclass(frozen=True, slots=True)
class Match:
    """Label values that a query is about, or leaves out."""

    values: tuple[str, ...]
    leave_out: bool = False

    def text(self, label: str) -> str:
        operator = {(False, False): "=", (False, True): "!=", (True, False): "=~", (True, True): "!~"}
        return f'{label}{operator[len(self.values) > 1, self.leave_out]}"{"|".join(self.values)}"'


Where = Mapping[str, "str | Match"]
ANY: Where = {}


def one_of(*values: str) -> Match:
    return Match(values)


def none_of(*values: str) -> Match:
    return Match(values, leave_out=True)


@dataclass(frozen=True, slots=True)
class Kit:
    """Makes queries over one window, of a board (narrowed by its variables) or of a rule (over everything)."""

    window: str = BOARD_WINDOW
    scoped: bool = True
    ago: str = ""  # look so far back: gauges only

    def __post_init__(self) -> None:
        for duration in filter(None, (self.window, self.ago)):
            if not WINDOW.fullmatch(duration):
                raise QueryError(f"window {duration!r}: wanted {BOARD_WINDOW} or a duration such as 5m")

    def gauge(self, name: str, *, by: Sequence[str] = (), where: Where = ANY, over: str = "sum") -> Query:
        """``over`` (sum, max, min, count) of a gauge."""
        metric = _metric(name, Kind.GAUGE)
        past = f" offset {self.ago}" if self.ago else ""
        return self._aggregate(over, by, metric, self._series(metric, metric.full_name, where) + past)

    def rate(self, name: str, *, by: Sequence[str] = (), where: Where = ANY) -> Query:
        """A counter's sum of increase per second."""
        return self._counter("rate", name, by, where)

    def increase(self, name: str, *, by: Sequence[str] = (), where: Where = ANY) -> Query:
        """A counter's sum of increase over the window."""
        return self._counter("increase", name, by, where)

    def quantile(self, share: float, name: str, *, by: Sequence[str] = (), where: Where = ANY) -> Query:
        """A histogram's quantile, over everything that ``by`` does not keep apart."""
        if not 0 < share < 1:
            raise QueryError(f"quantile {share} of {name}: wanted a number between 0 and 1")
        buckets = self._buckets("rate", name, by, where)
        return Query(f"histogram_quantile({share:g}, {buckets.text})", frozenset(by), buckets.metrics)

    def heatmap(self, name: str, *, where: Where = ANY) -> Query:
        """A histogram's buckets, cumulative; Grafana's heatmap takes the differences."""
        return self._buckets("increase", name, (), where)

    def mean(self, name: str, *, by: Sequence[str] = (), where: Where = ANY) -> Query:
        """A histogram's sum over its count."""
        metric = _metric(name, Kind.HISTOGRAM)
        both = [
            self._aggregate("sum", by, metric, f"rate({self._series(metric, full, where)}[{self.window}])")
            for full in metric.series_names[1:]
        ]
        return ratio(*both)

    def _counter(self, function: str, name: str, by: Sequence[str], where: Where) -> Query:
        metric = _metric(name, Kind.COUNTER)
        series = self._series(metric, metric.full_name, where)
        return self._aggregate("sum", by, metric, f"{function}({series}[{self.window}])")

    def _buckets(self, function: str, name: str, by: Sequence[str], where: Where) -> Query:
        metric = _metric(name, Kind.HISTOGRAM)
        series = self._series(metric, metric.series_names[0], where)
        return self._aggregate("sum", (*by, "le"), metric, f"{function}({series}[{self.window}])")

    def _series(self, metric: Metric, full_name: str, where: Where) -> str:
        matchers = [_match(metric, label, value) for label, value in where.items()]
        if self.scoped:
            narrowed = IDENTITY if metric.process is Process.REPLICA else ("model",)
            matchers += [f'{label}=~"${label}"' for label in narrowed if label not in where]
        return full_name + (f"{{{','.join(matchers)}}}" if matchers else "")

    def _aggregate(self, function: str, by: Sequence[str], metric: Metric, inner: str) -> Query:
        if function not in ("sum", "max", "min", "count"):
            raise QueryError(f"{function} of {metric.name}: wanted sum, max, min or count")
        allowed = {*metric.label_names, *TARGET_LABELS} | ({"le"} if metric.buckets else set())
        if unknown := set(by) - allowed:
            raise QueryError(f"{metric.name} has no labels {sorted(unknown)}; it has {sorted(allowed)}")
        clause = f" by ({', '.join(by)}) " if by else ""
        return Query(f"{function}{clause}({inner})", frozenset(by), frozenset({metric.name}))


def ratio(part: Query, whole: Query) -> Query:
    """``part`` / ``whole`` per label set of ``whole``; no value where the whole is 0.

    A part that has more labels than the whole (the tiers of all hits) is divided by the whole it belongs to.
    """
    if not whole.labels <= part.labels:
        raise QueryError(f"{part} has not all the labels of {whole}: {sorted(whole.labels - part.labels)} are missing")
    on = "" if part.labels == whole.labels else f" on ({', '.join(sorted(whole.labels))}) group_left ()"
    return _both(part, f"/{on}", Query(f"({whole.text} > 0)", whole.labels, whole.metrics))


def complement(share: Query) -> Query:
    """1 - share."""
    return Query(f"1 - {share.text}", share.labels, share.metrics)


def compare(query: Query, operator: str, bound: "float | Query") -> Query:
    """Only what is ``operator`` (>, <, >=, <=, ==) ``bound``: a number, or a query with the same labels."""
    if operator not in (">", "<", ">=", "<=", "=="):
        raise QueryError(f"{operator!r} is no comparison")
    if isinstance(bound, Query):
        if query.labels != bound.labels:
            raise QueryError(f"{query} has labels {sorted(query.labels)}, {bound} has {sorted(bound.labels)}")
        return _both(query, operator, bound)
    return Query(f"{query.text} {operator} {bound:g}", query.labels, query.metrics)


def absent(query: Query) -> Query:
    """1 while there is no such series."""
    return Query(f"absent({query.text})", frozenset(), query.metrics)


def both(left: Query, right: Query, *, on: Sequence[str]) -> Query:
    """What of ``left`` has a match in ``right``."""
    return _joined(left, "and", right, on)


def without(left: Query, right: Query, *, on: Sequence[str]) -> Query:
    """What of ``left`` has no match in ``right``."""
    return _joined(left, "unless", right, on)


def up(job: str) -> Query:
    """Prometheus' own series: whether the last scrape of a target succeeded."""
    return Query(f'up{{job="{job}"}}', TARGET_LABELS, frozenset())


def _joined(left: Query, word: str, right: Query, on: Sequence[str]) -> Query:
    for side in (left, right):
        if unknown := set(on) - side.labels:
            raise QueryError(f"{side} has no labels {sorted(unknown)} to join on; it has {sorted(side.labels)}")
    return _both(left, f"{word} on ({', '.join(on)})", right)


def _both(left: Query, between: str, right: Query) -> Query:
    return Query(f"({left.text} {between} {right.text})", left.labels, left.metrics | right.metrics)


def _metric(name: str, kind: Kind) -> Metric:
    metric = CATALOG.get(name)
    if metric is None:
        raise QueryError(f"{name} is not in the catalogue (dashboards/catalog.py); names are without the prefix")
    if metric.kind is not kind:
        raise QueryError(f"{name} is a {metric.kind.value}; this function takes a {kind.value}")
    return metric


def _match(metric: Metric, label: str, value: "str | Match") -> str:
    match = value if isinstance(value, Match) else Match((value,))
    if label not in metric.label_names:
        raise QueryError(f"{metric.name} has no label {label}; it has {sorted(metric.label_names)}")
    known = metric.labels.get(label, OPEN)
    if known and (unknown := set(match.values) - set(known)):
        raise QueryError(f"{metric.name}: {label} is never {sorted(unknown)}; it is one of {sorted(known)}")
    return match.text(label)
