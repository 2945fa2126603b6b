"""Records of a run -> the numbers that it is judged by. Pure.

Invariant: everything but ``decision_us`` depends on the run's arguments alone.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchmarks.sim_cluster import Record
from benchmarks.sim_routers import Apart


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Of all requests."""

    mean: float
    p50: float
    p90: float
    p99: float

    @staticmethod
    def of(values: Sequence[float]) -> "Spread":
        p50, p90, p99 = np.percentile(values, [50, 90, 99])
        return Spread(mean=float(np.mean(values)), p50=float(p50), p90=float(p90), p99=float(p99))


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How a policy did."""

    policy: str
    requests: int
    hit_ratio: float  # prompt tokens that were cached where the request went, of all prompt tokens
    ttft_s: Spread
    objective_s: float
    goodput_rps: float  # requests whose first token came within the objective, a second from first arrival to last end
    imbalance: float  # prompt tokens computed by the busiest replica over the mean of all; 1 is even
    decisions: dict[str, int]  # by reason
    decision_us: Spread  # CPU time on this machine
    apart: Apart | None = None  # how far several routers were; None for one

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def summarise(
    policy: str, records: Sequence[Record], *, num_replicas: int, objective_s: float, apart: Apart | None = None
) -> Result:
    """The result of a run of at least one request."""
    computed: Counter[str] = Counter()
    for record in records:
        computed[record.replica_id] += record.input_len - record.cached_tokens
    begin_s, end_s = min(record.arrival_s for record in records), max(record.ended_s for record in records)
    good = sum(record.ttft_s <= objective_s for record in records)
    return Result(
        policy=policy,
        requests=len(records),
        hit_ratio=sum(record.cached_tokens for record in records) / sum(record.input_len for record in records),
        ttft_s=Spread.of([record.ttft_s for record in records]),
        objective_s=objective_s,
        goodput_rps=good / (end_s - begin_s),
        imbalance=max(computed.values()) * num_replicas / computed.total(),
        decisions=dict(Counter(record.reason for record in records).most_common()),
        decision_us=Spread.of([record.decision_s * 1e6 for record in records]),
        apart=apart,
    )
