"""A replica as a router sees it, and the view of it that the routing router takes.

Pure. Owns: which number of a report is which of a view.
"""

from dataclasses import dataclass

from deployments.channel.frames import ReplicaReport
from deployments.dispatch.leases import ReplicaInfo
from routing.types import ReplicaView


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A process that serves its metrics over HTTP."""

    address: str  # host:port, as other nodes reach it
    role: str  # unified, prefill, decode, router, observatory
    process_id: str  # the replica label of its series
    node_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenReplica:
    """A member of the fleet as a router sees it."""

    replica_id: str
    role: str
    state: str  # starting, accepting, draining, unhealthy
    info: ReplicaInfo | None  # None while starting
    report: ReplicaReport | None  # the last; None before the first
    report_age_s: float | None  # how old its statistics are; None before the first


def view_of(info: ReplicaInfo, report: ReplicaReport, *, heard_s: float, hangs: bool) -> ReplicaView:
    """Make the view. ``heard_s``: when the report arrived. ``hangs``: none has followed for too long, or the replica's
    step does not end.
    """
    stats = report.stats
    return ReplicaView(
        replica_id=info.replica_id,
        time_s=heard_s - report.age_s,  # requests sent while a long step ran are not in its statistics
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        num_receiving=stats.num_preallocating + stats.num_receiving,
        queued_uncached_tokens=stats.waiting_uncached_tokens,
        pool_utilization=stats.pool.utilization,
        pool_pages=stats.pool.num_pages,
        page_size=stats.pool.page_size,
        prefill_tokens_per_s=stats.prefill_tokens_per_s,
        decode_step_s=stats.decode_step_s,
        max_running_requests=stats.max_running_requests,
        healthy=report.error is None and not hangs,
        role=info.role,
        page_bytes=info.page_bytes,
    )
