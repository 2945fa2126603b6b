"""Keeps the router's index in step with each replica's cache: events as they come, a snapshot when some were missed.

Owns:      which replicas' snapshots are on their way; how far each replica's events have been heard, and told of.
Never:     blocks a request: until a snapshot has come, the router goes by its own decisions.
Invariant: at most one snapshot a replica is being asked for; none for a replica that has been forgotten.
Thread:    the router's event loop.

    attached ──> ask ──> SNAPSHOT ──> EVENTS, each following the last      a gap ──> ask again

An event that is lost shows in the number of the next. The last one has no next: there the report tells, which carries
the number that the cache has reached.
"""

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from deployments.leases import Leases
from replicas.errors import MantaError
from routing.router import Router
from routing.types import CacheEvent, IndexSnapshot

log = logging.getLogger(__name__)

ASK_AGAIN_S = 0.5  # after a call that failed
SNAPSHOT_LATE_S = 10.0  # the call has returned and the snapshot has not come
# Statistics may be taken a step later than the events sent with them; those come before the next report. One more, as
# attaching sends a report of its own.
REPORTS_UNTIL_LOST = 2


class CacheSync:
    """Feeds one `Router`'s index."""

    def __init__(self, router: Router, leases: Leases) -> None:
        self._router = router
        self._leases = leases
        self._asking: dict[str, _Asking] = {}  # by replica
        self._heard: dict[str, int] = {}  # by replica: number of the last event, or that of the snapshot
        self._behind: dict[str, _Behind] = {}  # by replica
        self.num_snapshots = 0  # that have come
        self.num_gaps = 0

    def on_events(self, replica_id: str, events: Sequence[CacheEvent], router_id: str) -> None:
        if events:
            self._hear(replica_id, events[-1].seq)
        if not self._router.apply(replica_id, events) and replica_id not in self._asking:
            log.info("cache events of replica %s do not follow the last; asking for a snapshot", replica_id)
            self.num_gaps += 1
            self.ask(replica_id, router_id)

    def on_report(self, replica_id: str, seq: int, router_id: str) -> None:
        """Event ``seq`` has happened there: it must be heard of soon."""
        behind = self._behind.get(replica_id)
        if behind is None:
            if seq > self._heard.get(replica_id, 0) and replica_id not in self._asking:
                self._behind[replica_id] = _Behind(seq)
            return
        behind.num_reports += 1
        if behind.num_reports >= REPORTS_UNTIL_LOST and replica_id not in self._asking:
            log.info("cache event %d of replica %s has not come; asking for a snapshot", behind.seq, replica_id)
            self.num_gaps += 1
            self.ask(replica_id, router_id)

    def on_snapshot(self, replica_id: str, snapshot: IndexSnapshot) -> None:
        self._router.apply_snapshot(replica_id, snapshot)
        self._hear(replica_id, snapshot.seq)
        self.num_snapshots += 1
        asking = self._asking.pop(replica_id, None)
        if asking is not None:
            asking.arrived.set()

    def ask(self, replica_id: str, router_id: str) -> None:
        """Have ``replica_id`` send a snapshot, and ask again until it comes."""
        if replica_id not in self._asking:
            arrived = asyncio.Event()
            task = asyncio.create_task(self._ask(replica_id, router_id, arrived))
            self._asking[replica_id] = _Asking(arrived, task)

    def forget(self, replica_id: str) -> None:
        self._heard.pop(replica_id, None)
        self._behind.pop(replica_id, None)
        asking = self._asking.pop(replica_id, None)
        if asking is not None:
            asking.task.cancel()

    @property
    def asking(self) -> frozenset[str]:
        """Replicas whose snapshot has not come."""
        return frozenset(self._asking)

    def check(self) -> None:
        """Raises AssertionError if a replica counts as behind that is not."""
        for replica_id, behind in self._behind.items():
            assert behind.seq > self._heard.get(replica_id, 0)

    def _hear(self, replica_id: str, seq: int) -> None:
        heard = self._heard[replica_id] = max(self._heard.get(replica_id, 0), seq)
        behind = self._behind.get(replica_id)
        if behind is not None and heard >= behind.seq:
            del self._behind[replica_id]

    async def _ask(self, replica_id: str, router_id: str, arrived: asyncio.Event) -> None:
        while not arrived.is_set():
            wait_s = SNAPSHOT_LATE_S
            try:
                await self._leases.send_snapshot(replica_id, router_id)
            except MantaError as error:
                log.info("replica %s sends no snapshot yet: %s", replica_id, error)
                wait_s = ASK_AGAIN_S
            except Exception:
                log.exception("asking replica %s for a snapshot failed; trying again", replica_id)
                wait_s = ASK_AGAIN_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await arrived.wait()


class _Asking:
    """One snapshot on its way."""

    def __init__(self, arrived: asyncio.Event, task: "asyncio.Task[None]") -> None:
        self.arrived = arrived
        self.task = task  # referenced here: the event loop alone would let it go


@dataclass(slots=True)
class _Behind:
    """An event that a report told of before it came."""

    seq: int
    num_reports: int = 0  # since
