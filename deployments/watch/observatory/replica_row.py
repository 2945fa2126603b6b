"""One replica as the state shows it.

Pure.
"""

from collections.abc import Sequence
from typing import Any

from deployments.channel.frames import ReplicaReport
from deployments.fleet.seen import SeenReplica
from deployments.watch.observatory.figures import short
from deployments.watch.observatory.serve_details import Listed
from replicas.types import EngineStats, PoolStats

SERVE_STATES = {"RUNNING": "starting", "STOPPING": "draining"}  # of a replica that no router sees; else starting
_RATES = ("prefill_tokens_per_s", "cached_tokens_per_s", "decode_tokens_per_s")
_NOTHING = dict.fromkeys(
    (
        "running", "running_limit", "waiting", "preallocating", "receiving", "handing_off", "queued_tokens",
        "prefill_tokens_per_s", "decode_step_s", "report_age_s", "cache_nodes",
    )
)  # fmt: skip


def counters_of(stats: EngineStats) -> tuple[int, int, int]:
    """What `Rates` are made of."""
    return (stats.prefill_tokens, stats.cached_tokens, stats.decode_tokens)


def row_of(
    seen: SeenReplica, *, node: str, age_s: float | None, rates: Sequence[float] | None
) -> dict[str, Any]:
    """Of a replica that a router sees. Before its first report the numbers are null and there are no pools."""
    row = _bare(seen.replica_id, seen.role, node, seen.state)
    if seen.info is not None:
        row["page_size"] = seen.info.page_size
        row["attention"] = seen.info.attention
        row["attention_why"] = seen.info.attention_why
    if seen.report is not None and age_s is not None:
        row.update(_reported(seen.report, age_s))
    if rates is not None:
        row["rates"] = {name: short(rate) for name, rate in zip(_RATES, rates, strict=True)}
    return row


def row_of_listed(listed: Listed, *, node: str) -> dict[str, Any]:
    """Of a replica that Serve has and no router sees: it is being started, or leaves."""
    return _bare(listed.replica_id, listed.role, node, SERVE_STATES.get(listed.state, "starting"))


def used_ratio(seen: SeenReplica) -> float | None:
    """Share of its pool that a new request cannot have."""
    return None if seen.report is None else round(seen.report.stats.pool.utilization, 4)


def _bare(replica_id: str, role: str, node: str, state: str) -> dict[str, Any]:
    return {
        "id": replica_id,
        "role": role,
        "node": node,
        "state": state,
        "error": None,
        **_NOTHING,
        "pools": [],
        "page_size": None,
        "attention": None,
        "attention_why": None,
        "rates": dict.fromkeys(_RATES, 0.0),
    }


def _reported(report: ReplicaReport, age_s: float) -> dict[str, Any]:
    stats = report.stats
    return {
        "error": report.error,
        "running": stats.num_running,
        "running_limit": stats.max_running_requests,
        "waiting": stats.num_waiting,
        "preallocating": stats.num_preallocating,
        "receiving": stats.num_receiving,
        "handing_off": stats.num_handing_off,
        "queued_tokens": stats.waiting_uncached_tokens,
        "prefill_tokens_per_s": short(stats.prefill_tokens_per_s),
        "decode_step_s": short(stats.decode_step_s),
        "report_age_s": round(age_s, 1),
        "pools": [_pool(stats.pool)],
        "cache_nodes": stats.cache_nodes,
        "page_size": stats.pool.page_size,
    }


def _pool(pool: PoolStats) -> dict[str, Any]:
    """In tokens; the states sum to the capacity."""
    size = pool.page_size
    return {
        "tier": "L1",
        "capacity": pool.total_tokens,
        "free": pool.free_pages * size,
        "evictable": pool.evictable_pages * size,
        "protected": pool.protected_pages * size,
        "reserved": pool.reserved_pages * size,
        "quarantined": pool.quarantined_pages * size,
    }
