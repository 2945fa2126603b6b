"""Keeps the router's index in step with each replica's cache: events as they come, a snapshot when some were missed.

Owns:      which replicas' snapshots are awaited; which events were reported and have not arrived.
Never:     blocks a request: until a snapshot has arrived, the router goes by its own decisions.
Invariant: at most one snapshot of a replica is awaited at a time, and the replica is asked again until one has arrived
           that the router could use; none is awaited of a replica that has been forgotten.
Thread:    the router's event loop.

    attached ──> ask ──> snapshot ──> events, each following the last      a gap ──> ask again

The number of an event shows that the one before it was lost. No event follows the last one: it is found missing by the
report, which carries the number of the cache's last event, if the router's index does not reach it soon.
"""

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from deployments.dispatch.leases import Leases, ReplicaCalls
from replicas.errors import MantaError
from routing.router import Router
from routing.types import IndexEvent, IndexSnapshot

log = logging.getLogger(__name__)

ASK_AGAIN_S = 0.5  # after a call that failed, or a snapshot that left events missing
SNAPSHOT_LATE_S = 10.0  # after the call has returned, until the snapshot counts as lost
# Statistics may be taken a step later than the events sent with them; those come before the next report. One more, as
# attaching sends a report of its own.
REPORTS_UNTIL_LOST = 2


class CacheSync:
    """The snapshots and events that the index of one `Router` still needs."""

    def __init__(self, router: Router, leases: Leases) -> None:
        self._router = router
        self._leases = leases
        self._asking: dict[str, _Asking] = {}  # by replica
        self._behind: dict[str, _Behind] = {}  # by replica; none whose snapshot is awaited
        self.num_snapshots = 0  # that have arrived
        self.num_gaps = 0

    def on_events(self, replica_id: str, events: Sequence[IndexEvent], router_id: str) -> None:
        follows = self._router.apply(replica_id, events)
        self._catch_up(replica_id)
        if not follows and replica_id not in self._asking:
            log.info("cache events of replica %s do not follow the last; asking for a snapshot", replica_id)
            self.num_gaps += 1
            self.ask(replica_id, router_id)

    def on_report(self, replica_id: str, seq: int, router_id: str) -> None:
        """Note that event ``seq`` has happened there: the index must soon have it."""
        if replica_id in self._asking:
            return
        behind = self._behind.get(replica_id)
        if behind is None:
            if seq > self._router.applied(replica_id):
                self._behind[replica_id] = _Behind(seq)
            return
        behind.num_reports += 1
        if behind.num_reports >= REPORTS_UNTIL_LOST:
            log.info("cache event %d of replica %s has not come; asking for a snapshot", behind.seq, replica_id)
            self.num_gaps += 1
            self.ask(replica_id, router_id)

    def on_snapshot(self, replica_id: str, snapshot: IndexSnapshot) -> None:
        self.num_snapshots += 1
        complete = self._router.apply_snapshot(replica_id, snapshot)
        self._catch_up(replica_id)
        asking = self._asking.get(replica_id)
        if asking is None:
            return
        if complete:
            del self._asking[replica_id]
        asking.arrived.set()

    def ask(self, replica_id: str, router_id: str) -> None:
        """Have ``replica_id`` send a snapshot; ask again until one has arrived that leaves no event missing."""
        if replica_id not in self._asking:
            self._behind.pop(replica_id, None)
            arrived = asyncio.Event()
            task = asyncio.create_task(self._ask(replica_id, router_id, arrived))
            self._asking[replica_id] = _Asking(arrived, task)

    def forget(self, replica_id: str) -> None:
        self._behind.pop(replica_id, None)
        asking = self._asking.pop(replica_id, None)
        if asking is not None:
            asking.task.cancel()

    @property
    def asking(self) -> frozenset[str]:
        """The replicas whose snapshot is awaited."""
        return frozenset(self._asking)

    def check(self) -> None:
        """Raises AssertionError if a replica counts as behind that is not, or whose snapshot is awaited."""
        assert not self._behind.keys() & self._asking.keys()
        for replica_id, behind in self._behind.items():
            assert behind.seq > self._router.applied(replica_id)

    def _catch_up(self, replica_id: str) -> None:
        behind = self._behind.get(replica_id)
        if behind is not None and self._router.applied(replica_id) >= behind.seq:
            del self._behind[replica_id]

    async def _ask(self, replica_id: str, router_id: str, arrived: asyncio.Event) -> None:
        """Ask until `on_snapshot` has found a snapshot complete, or the replica is forgotten."""
        while self._wanted(replica_id, arrived):
            arrived.clear()
            wait_s = SNAPSHOT_LATE_S
            try:
                await self._leases.call(replica_id, ReplicaCalls.send_snapshot, router_id)
            except MantaError as error:
                log.info("replica %s sends no snapshot yet: %s", replica_id, error)
                wait_s = ASK_AGAIN_S
            except Exception:
                log.exception("asking replica %s for a snapshot failed; trying again", replica_id)
                wait_s = ASK_AGAIN_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await arrived.wait()
            if arrived.is_set() and self._wanted(replica_id, arrived):
                log.info("the snapshot of replica %s leaves events missing; asking for another", replica_id)
                await asyncio.sleep(ASK_AGAIN_S)

    def _wanted(self, replica_id: str, arrived: asyncio.Event) -> bool:
        asking = self._asking.get(replica_id)
        return asking is not None and asking.arrived is arrived


class _Asking:
    """A snapshot that is awaited."""

    def __init__(self, arrived: asyncio.Event, task: "asyncio.Task[None]") -> None:
        self.arrived = arrived
        self.task = task  # referenced here: the event loop alone would let it go


@dataclass(slots=True)
class _Behind:
    """An event that was reported and has not arrived."""

    seq: int
    num_reports: int = 0  # since
