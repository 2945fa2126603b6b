"""A replica and a process that serves metrics, as a router sees them."""

from dataclasses import dataclass

from deployments.channel.frames import ReplicaReport
from deployments.dispatch.leases import ReplicaInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A process that serves its metrics over HTTP."""

    address: str  # host:port, as other nodes reach it
    role: str  # unified, prefill, decode, router, observatory
    process_id: str  # the replica label of its series
    node_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GoneReplica:
    """A replica that has left the fleet."""

    replica_id: str
    role: str
    died: bool  # its connection had ended, it was silent, or it had failed; else Serve has stopped it


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenReplica:
    """A member of the fleet, or one that has left and drains, as a router sees it."""

    replica_id: str
    role: str
    state: str  # starting, accepting, draining, released, silent, unhealthy
    info: ReplicaInfo | None  # None while starting
    report: ReplicaReport | None  # the last; None before the first
    report_age_s: float | None  # how old its statistics are; None before the first
    why: str = ""  # it is silent or unhealthy
