"""What a metric is: its name, kind, labels with the values they can have, and which process emits it.

Invariant: names follow Prometheus' conventions (base units, ``_total`` on counters alone), and a label's closed set of
values is known, so that series exist from the first scrape.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

PREFIX = "manta_"
OPEN: tuple[str, ...] = ()  # a label whose values are known only when the system runs
NO_LABELS: Mapping[str, tuple[str, ...]] = MappingProxyType({})
IDENTITY = ("model", "role", "replica")  # on every series, besides its own labels
UNITS = {"seconds", "bytes", "tokens", "pages", "requests", "replicas", "ratio", "info", ""}


class Kind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Process(StrEnum):
    """Who emits it. ``role`` of its series: unified, prefill or decode; router; observatory."""

    REPLICA = "replica"
    ROUTER = "router"
    OBSERVATORY = "observatory"
    EVERY = "every"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One entry of the catalogue."""

    name: str  # without PREFIX; a counter's ends in _total
    kind: Kind
    help: str  # one sentence
    process: Process
    unit: str = ""
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: NO_LABELS)  # own label -> values, or OPEN
    buckets: tuple[float, ...] = ()  # upper bounds of a histogram, rising, +Inf left out
    disaggregated: bool = False  # emitted only where prefill and decode are apart

    def __post_init__(self) -> None:
        assert re.fullmatch(r"[a-z][a-z0-9_]*[a-z0-9]", self.name), self.name
        assert self.name.endswith("_total") == (self.kind is Kind.COUNTER), f"{self.name}: _total is for counters"
        assert bool(self.buckets) == (self.kind is Kind.HISTOGRAM), f"{self.name}: buckets are for histograms"
        assert list(self.buckets) == sorted(set(self.buckets)), f"{self.name}: bounds must rise"
        assert self.unit in UNITS, f"{self.name}: unit {self.unit!r} is none of {sorted(UNITS)}"
        assert not set(self.labels) & set(IDENTITY), f"{self.name}: {IDENTITY} are on every series"
        assert self.help.endswith("."), f"{self.name}: help is a sentence"
        if self.unit:
            assert f"_{self.unit}" in f"_{self.name}", f"{self.name}: its unit, {self.unit}, is part of the name"

    @property
    def full_name(self) -> str:
        """As on the wire and in PromQL; a histogram's series add _bucket, _sum and _count."""
        return PREFIX + self.name

    @property
    def label_names(self) -> tuple[str, ...]:
        """IDENTITY, then its own."""
        return (*IDENTITY, *self.labels)

    @property
    def series_names(self) -> tuple[str, ...]:
        """The names that PromQL may use."""
        if self.kind is not Kind.HISTOGRAM:
            return (self.full_name,)
        return tuple(f"{self.full_name}_{part}" for part in ("bucket", "sum", "count"))
