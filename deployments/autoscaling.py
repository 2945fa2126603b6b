"""How many replicas there should be: a pure rule over the replicas' load, and Ray Serve's hook around it.

Owns:      the rule. Serve owns when it is called, the delays before a change, and the bounds.
Never:     imports Ray (Serve hands the policy a context), blocks, or does I/O: it runs in Serve's controller.
Invariant: the target lies within the bounds; it is never below what holds the running requests, as far as the bounds
           allow; asked again with the replicas it wanted and the same load, it answers the same (no oscillation).

    queued uncached tokens / prefill rate / TTFT objective ─┐
    pages in use / pages a replica, at most pool_high       ├─ the largest, rounded up: replicas needed
    running + waiting / slots a replica, at most running_high ┘
    fewer only when they would be loaded to at most ``slack`` of that
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from replicas.types import EngineStats

MOST = 1e6  # replicas; caps a quotient whose divisor is nearly 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """The limits that the replicas should keep to."""

    ttft_s: float = 5.0  # prompt tokens that wait should be computed within this
    pool_high: float = 0.85  # share of a pool that requests may hold (PressureLevel.HIGH begins there)
    running_high: float = 0.9  # share of a replica's slots that requests may take
    slack: float = 0.7  # fewer replicas only if they would be loaded to at most this share of the limits


@dataclass(frozen=True, slots=True, kw_only=True)
class Signals:
    """The load of all replicas together, and the capacity of one."""

    num_replicas: int  # that there are, or are being started
    queued_tokens: float  # prompt tokens that wait and no cache holds
    num_requests: float  # running and waiting
    num_running: float
    used_pages: float  # that a new request cannot have
    prefill_tokens_per_s: float  # of one replica; 0 until measured
    slots: float  # requests that one replica can run at once
    pool_pages: float  # of one replica


def decide(signals: Signals, objective: Objective, *, least: int, most: int) -> int:
    """Return the replicas wanted, in [least, most]."""
    needed = load(signals, objective)
    now = signals.num_replicas
    up, down = _ceil(needed), _ceil(needed / objective.slack)
    target = up if up > now else min(now, down)
    return min(max(target, holding(signals), least), most)


def load(signals: Signals, objective: Objective) -> float:
    """Return how many replicas the load fills up to the limits, as a fraction; the tightest of the three counts."""
    return max(loads(signals, objective).values())


def loads(signals: Signals, objective: Objective) -> dict[str, float]:
    """Return `load` by its three reasons: the queue, the KV pools, the running slots."""
    return {
        "queue": _per(signals.queued_tokens, signals.prefill_tokens_per_s * objective.ttft_s),
        "kv_pool": _per(signals.used_pages, signals.pool_pages * objective.pool_high),
        "slots": _per(signals.num_requests, signals.slots * objective.running_high),
    }


def holding(signals: Signals) -> int:
    """Return the fewest replicas in which the running requests and their pages fit."""
    return _ceil(max(_per(signals.used_pages, signals.pool_pages), _per(signals.num_running, signals.slots)))


def _per(amount: float, of_one: float) -> float:
    return min(amount / of_one, MOST) if of_one > 0 else 0.0


def _ceil(value: float) -> int:
    return math.ceil(value - 1e-9)  # 3.0000000000000004 replicas are 3


class Context(Protocol):
    """The part of Ray Serve's ``AutoscalingContext`` that is read here."""

    target_num_replicas: int
    capacity_adjusted_min_replicas: int
    capacity_adjusted_max_replicas: int

    @property
    def aggregated_metrics(self) -> Mapping[str, Mapping[Any, float]] | None:
        """Values over the look-back period: name -> replica -> value."""
        ...


class TtftPolicy:
    """The policy that Serve calls at each look of its controller; its arguments are those of `Objective`."""

    def __init__(self, **objective: float) -> None:
        self.objective = Objective(**objective)

    def __call__(self, context: Context) -> tuple[int, dict[str, Any]]:
        """Return the replicas wanted, and no state. Before the first report, as many as there are."""
        signals = signals_of(context.target_num_replicas, context.aggregated_metrics or {})
        if signals is None:
            return context.target_num_replicas, {}
        least, most = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        return decide(signals, self.objective, least=least, most=most), {}


def replica_stats(stats: EngineStats) -> dict[str, float]:
    """Return the load that one replica reports to Serve (its ``record_autoscaling_stats`` hook), without what gives way
    to every request, batch requests."""
    pool = stats.pool
    return {
        "queued_tokens": float(stats.waiting_uncached_tokens),
        "num_waiting": stats.num_waiting + _waiting_for_room(stats),
        "num_running": float(stats.num_running - stats.num_offline_running),
        "used_pages": float(
            pool.protected_pages + pool.reserved_pages + pool.quarantined_pages - stats.offline_pages
        ),
        "prefill_tokens_per_s": stats.prefill_tokens_per_s,
        "slots": float(stats.max_running_requests),
        "pool_pages": float(pool.num_pages),
    }


def _waiting_for_room(stats: EngineStats) -> float:
    """Return how many of the decode legs that wait for row and pages more decode replicas would help.

    A request that holds a row and pages either runs, or waits for the prefill side's queue and the transfer. More
    decode replicas would not help the latter, nor the requests that wait behind them: only the share that runs counts.
    """
    holding = stats.num_running + stats.num_receiving
    return stats.num_preallocating * (stats.num_running / holding if holding else 1.0)


def signals_of(num_replicas: int, metrics: Mapping[str, Mapping[Any, float]]) -> Signals | None:
    """Sum what `replica_stats` reported for each replica; None before the first report."""
    if not metrics.get("slots"):
        return None

    def total(name: str) -> float:
        return sum(metrics.get(name, {}).values())

    def each(name: str) -> float:
        measured = [value for value in metrics.get(name, {}).values() if value > 0]
        return sum(measured) / len(measured) if measured else 0.0

    return Signals(
        num_replicas=num_replicas,
        queued_tokens=total("queued_tokens"),
        num_requests=total("num_running") + total("num_waiting"),
        num_running=total("num_running"),
        used_pages=total("used_pages"),
        prefill_tokens_per_s=each("prefill_tokens_per_s"),
        slots=each("slots"),
        pool_pages=each("pool_pages"),
    )
