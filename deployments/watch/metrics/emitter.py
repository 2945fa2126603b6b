"""The metrics of one process: its entries of dashboards/catalog.py, with its identity on every series.

Owns:      one `CollectorRegistry`; nothing of the client's global one is touched or shown.
Never:     declares a metric: a name that is not in the catalogue, or belongs to another process, raises.
Invariant: a metric has one source: events (counter, gauge, histogram), a `Tally`, or a function called at each scrape.
           Series of labels whose values are known exist from the start, with 0; of others from their first use.
           If a function fails, its last answer is shown and no other metric is affected.
Thread:    the client's objects may be used on any; a `Tally` has one writer; functions run on the scrape's thread.
"""

import dataclasses
import importlib.metadata
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from dashboards.catalog import CATALOG, OPEN, Kind, Metric, Process
from deployments.places import VERSION
from replicas.types import Tally, TallyCounts

log = logging.getLogger(__name__)

disable_created_metrics()  # type: ignore[no-untyped-call]  # they add an unused series to each counter and histogram

Value = float | TallyCounts  # TallyCounts: of a histogram
Read = Callable[[], Iterable[tuple[str, Mapping[str, str], Value]]]  # (name, own labels, value)
FAMILIES: dict[Kind, type[CounterMetricFamily] | type[GaugeMetricFamily] | type[HistogramMetricFamily]] = {
    Kind.COUNTER: CounterMetricFamily,
    Kind.GAUGE: GaugeMetricFamily,
    Kind.HISTOGRAM: HistogramMetricFamily,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The labels that every series of a process has."""

    model: str  # as requests name it
    role: str  # unified, prefill, decode, router, observatory
    replica: str  # the process, whatever its role

    @property
    def values(self) -> tuple[str, str, str]:
        return (self.model, self.role, self.replica)


class Emitter:
    """The metrics of one process, each bound to its source."""

    def __init__(
        self,
        process: Process,
        identity: Identity,
        *,
        disaggregated: bool = False,
        gpu: bool = False,
        objectives: Mapping[str, float] | None = None,
    ) -> None:
        """``disaggregated``: whether prefill and decode are apart; ``gpu``: whether this process computes on one; what
        needs either may not be emitted otherwise. ``objectives``: histogram -> one bound more that its buckets have."""
        self.registry = CollectorRegistry()
        self.identity = identity
        self._process = process
        self._disaggregated = disaggregated
        self._gpu = gpu
        self._catalog = dict(CATALOG)
        for name, bound in (objectives or {}).items():
            metric = CATALOG[name]
            self._catalog[name] = dataclasses.replace(metric, buckets=tuple(sorted({*metric.buckets, bound})))
        self._made: dict[str, Counter | Gauge | Histogram] = {}
        self._told: set[str] = set()  # names read from a tally or a function

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """The metrics that this process emits, once everything is bound."""
        return tuple(metric for metric in self._catalog.values() if self._refusal(metric) is None)

    @property
    def bound(self) -> set[str]:
        """The names of the metrics that have a source."""
        return {*self._made, *self._told}

    def counter(self, name: str, **labels: str) -> Counter:
        """Return the series of counter ``name`` with these labels, made once. Raises: KeyError, ValueError."""
        found = self._child(name, Kind.COUNTER, labels)
        assert isinstance(found, Counter)
        return found

    def gauge(self, name: str, **labels: str) -> Gauge:
        """Return the series of gauge ``name``; made and refused as by `counter`."""
        found = self._child(name, Kind.GAUGE, labels)
        assert isinstance(found, Gauge)
        return found

    def histogram(self, name: str, **labels: str) -> Histogram:
        """Return the series of histogram ``name``, as `counter` does. It takes 1-2 us; for each token use `tally`."""
        found = self._child(name, Kind.HISTOGRAM, labels)
        assert isinstance(found, Histogram)
        return found

    def tally(self, name: str) -> Tally:
        """Return the values of histogram ``name``, which has no labels: `Tally.add` is several times as quick."""
        metric = self._of(name, Kind.HISTOGRAM)
        assert not metric.labels, f"{name} has labels: use histogram()"
        tally = Tally(metric.buckets)
        self.tell([name], lambda: [(name, {}, tally.read())])
        return tally

    def tell(self, names: Iterable[str], read: Read) -> None:
        """Have ``read`` give the values of metrics ``names`` at each scrape. Raises: KeyError, ValueError."""
        metrics = [self._of(name) for name in names]
        for metric in metrics:
            if metric.name in self.bound:
                raise ValueError(f"{metric.name} has a source already; a metric has one")
        self._told |= {metric.name for metric in metrics}
        self.registry.register(_Told(metrics, self.identity, read))

    def _child(self, name: str, kind: Kind, labels: Mapping[str, str]) -> object:
        metric = self._of(name, kind)
        made = self._made.get(name)
        if made is None:
            if name in self._told:
                raise ValueError(f"{name} has a source already; a metric has one")
            made = self._made[name] = self._make(metric)
        return made.labels(*self.identity.values, *_own(metric, labels))

    def _make(self, metric: Metric) -> Counter | Gauge | Histogram:
        made: Counter | Gauge | Histogram
        if metric.kind is Kind.HISTOGRAM:
            made = Histogram(
                metric.full_name, metric.help, metric.label_names, registry=self.registry, buckets=metric.buckets
            )
        else:
            kind = Counter if metric.kind is Kind.COUNTER else Gauge
            made = kind(metric.full_name, metric.help, metric.label_names, registry=self.registry)
        if OPEN not in metric.labels.values():
            for values in itertools.product(*metric.labels.values()):
                made.labels(*self.identity.values, *values)
        return made

    def _of(self, name: str, kind: Kind | None = None) -> Metric:
        metric = self._catalog.get(name)
        if metric is None:
            raise KeyError(f"{name} is not in dashboards/catalog.py: enter it there, or use a name that is")
        refusal = self._refusal(metric)
        if refusal is not None:
            raise ValueError(refusal)
        if kind is not None and metric.kind is not kind:
            raise ValueError(f"{name} is a {metric.kind}, not a {kind}")
        return metric

    def _refusal(self, metric: Metric) -> str | None:
        if metric.process not in (self._process, Process.EVERY):
            return f"{metric.name} is the {metric.process}'s to emit; this is a {self._process}"
        if metric.disaggregated and not self._disaggregated:
            return f"{metric.name} is emitted only where prefill and decode are apart"
        if metric.gpu and not self._gpu:
            return f"{metric.name} is emitted only by a replica on a GPU"
        return None


class _Told(Collector):
    """Metrics whose values a function gives at each scrape."""

    def __init__(self, metrics: list[Metric], identity: Identity, read: Read) -> None:
        self._metrics = {metric.name: metric for metric in metrics}
        self._identity = identity
        self._read = read
        self._last: list[Family] = list(self.describe())  # answer
        self._failing = False

    def describe(self) -> Iterator[Family]:
        """Return the names without reading values: `CollectorRegistry` wants no name twice."""
        return iter([_family(metric) for metric in self._metrics.values()])

    def collect(self) -> Iterator[Family]:
        try:
            self._last = self._ask()
            self._failing = False
        except Exception:
            if not self._failing:  # once, not with each scrape
                log.exception("metrics from %s on are told as they were before", next(iter(self._metrics)))
            self._failing = True
        return iter(self._last)

    def _ask(self) -> list[Family]:
        families = {name: _family(metric) for name, metric in self._metrics.items()}
        for name, labels, value in self._read():
            metric = self._metrics[name]
            values = [*self._identity.values, *_own(metric, labels)]
            family = families[name]
            if isinstance(family, HistogramMetricFamily):
                assert isinstance(value, TallyCounts), f"{name}: a histogram's value is a tally"
                assert value.bounds == metric.buckets, f"{name}: counted in {value.bounds}, not in {metric.buckets}"
                family.add_metric(values, _cumulative(value), value.total)
            else:
                assert isinstance(family, CounterMetricFamily | GaugeMetricFamily)
                assert not isinstance(value, TallyCounts), f"{name} is no histogram"
                family.add_metric(values, value)
        return list(families.values())


def _family(metric: Metric) -> Family:
    return FAMILIES[metric.kind](metric.full_name, metric.help, labels=metric.label_names)


def _own(metric: Metric, labels: Mapping[str, str]) -> list[str]:
    """Return the values of a metric's labels, in its order. Raises: ValueError for other labels or bad values."""
    if labels.keys() != metric.labels.keys():
        raise ValueError(f"{metric.name} has the labels {list(metric.labels)}, not {list(labels)}")
    for label, value in labels.items():
        if metric.labels[label] != OPEN and value not in metric.labels[label]:
            raise ValueError(f"{metric.name}: {label} = {value!r}; it can be {', '.join(metric.labels[label])}")
    return [labels[label] for label in metric.labels]


def _cumulative(value: TallyCounts) -> list[tuple[str, float]]:
    """Return (upper bound, count up to it), as a histogram's series are."""
    bounds = [*map(floatToGoString, value.bounds), "+Inf"]
    return list(zip(bounds, map(float, itertools.accumulate(value.counts)), strict=True))


def emitter_of(
    process: Process,
    identity: Identity,
    *,
    disaggregated: bool,
    gpu: bool = False,
    objectives: Mapping[str, float] | None = None,
) -> Emitter:
    """Return an emitter with what every process emits; the rest is to be bound to it."""
    emitter = Emitter(process, identity, disaggregated=disaggregated, gpu=gpu, objectives=objectives)
    tell_build(emitter)
    own = ProcessCollector(registry=None)  # reads /proc; elsewhere it has nothing to tell
    names = [name for name in CATALOG if name.startswith("process_")]
    emitter.tell(names, lambda: _process_figures(own, names))
    return emitter


def tell_build(emitter: Emitter) -> None:
    emitter.gauge("build_info", version=VERSION, ray=importlib.metadata.version("ray")).set(1)


def _process_figures(own: ProcessCollector, names: list[str]) -> Iterator[tuple[str, Mapping[str, str], Value]]:
    for family in own.collect():
        for sample in family.samples:
            if sample.name in names:
                yield sample.name, {}, sample.value
