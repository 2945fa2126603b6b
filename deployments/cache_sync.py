"""Keeps the router's index in step with each replica's cache: events as they come, a snapshot when some were missed.

Owns:      which replicas' snapshots are on their way.
Never:     blocks a request: until a snapshot has come, the router goes by its own decisions.
Invariant: at most one snapshot a replica is being asked for; none for a replica that has been forgotten.
Thread:    the router's event loop.

    attached ──> ask ──> SNAPSHOT ──> EVENTS, each following the last      a gap ──> ask again
"""

import asyncio
import contextlib
import logging
from collections.abc import Sequence

from deployments.leases import Leases
from replicas.errors import MantaError
from routing.router import Router
from routing.types import CacheEvent, IndexSnapshot

log = logging.getLogger(__name__)

ASK_AGAIN_S = 0.5  # after a call that failed
SNAPSHOT_LATE_S = 10.0  # the call has returned and the snapshot has not come


class CacheSync:
    """Feeds one `Router`'s index."""

    def __init__(self, router: Router, leases: Leases) -> None:
        self._router = router
        self._leases = leases
        self._asking: dict[str, _Asking] = {}  # by replica
        self.num_snapshots = 0  # that have come
        self.num_gaps = 0

    def on_events(self, replica_id: str, events: Sequence[CacheEvent], router_id: str) -> None:
        if not self._router.apply(replica_id, events) and replica_id not in self._asking:
            log.info("cache events of replica %s do not follow the last; asking for a snapshot", replica_id)
            self.num_gaps += 1
            self.ask(replica_id, router_id)

    def on_snapshot(self, replica_id: str, snapshot: IndexSnapshot) -> None:
        self._router.apply_snapshot(replica_id, snapshot)
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
        asking = self._asking.pop(replica_id, None)
        if asking is not None:
            asking.task.cancel()

    @property
    def asking(self) -> frozenset[str]:
        """Replicas whose snapshot has not come."""
        return frozenset(self._asking)

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
