"""What a router hears of the replicas: late, in batches, and not always.

Owns:      the information limits of the live system.
Never:     decides; lets a router see a replica in any other way.
Invariant: the numbers of a replica's page events grow by one an event, lost ones included, so that a loss shows as
           a gap; after a gap the replica is asked for a snapshot, once at a time. Every router is sent every event.

    every period: replica ──report, page events──(delay)──> router.update, router.apply ──gap──> ask ──> apply_snapshot
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

import numpy as np

from benchmarks.sim_events import Events
from benchmarks.sim_replica import SimReplica
from routing.router import Router
from routing.types import IndexEvent, IndexSnapshot, KeysRemoved, KeysStored


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How late and how incomplete a router's information is."""

    period_s: float = 0.1  # between two reports, and two batches of page events
    delay_s: float = 0.02  # from a replica to a router
    event_loss: float = 0.0  # share of the batches of page events that never arrive


class Outbox:
    """A replica's page events, numbered once, kept for each router until it has fetched them."""

    def __init__(self, replica: SimReplica, num_routers: int = 1) -> None:
        self.replica = replica
        self._seq = 0  # of the last event numbered
        self._waiting: list[list[IndexEvent]] = [[] for _ in range(num_routers)]

    def take(self, router: int) -> list[IndexEvent]:
        """What router number ``router`` has not fetched yet."""
        for stored, keys in self.replica.pool.drain():
            self._seq += 1
            event = (KeysStored if stored else KeysRemoved)(seq=self._seq, keys=np.array(keys, dtype=np.uint64))
            for waiting in self._waiting:
                waiting.append(event)
        batch, self._waiting[router] = self._waiting[router], []
        return batch

    def snapshot(self, router: int) -> IndexSnapshot:
        """What the replica holds now, and the number of the last event that is in it; those before are not sent."""
        self.take(router)
        return IndexSnapshot(seq=self._seq, keys=np.array(self.replica.pool.cached_keys(), dtype=np.uint64))


class Reports:
    """Carries reports and page events from the replicas to one router."""

    def __init__(
        self,
        router: Router,
        outboxes: Sequence[Outbox],
        *,
        limits: Limits,
        events: Events,
        rng: Random,
        number: int = 0,
    ) -> None:
        """``number`` is the router's own, from 0."""
        self.num_lost = 0  # batches
        self.num_snapshots = 0
        self._router = router
        self._number = number
        self._outboxes = {outbox.replica.replica_id: outbox for outbox in outboxes}
        self._limits = limits
        self._events = events
        self._rng = rng
        self._asked: set[str] = set()

    def start(self, late_s: float = 0.0) -> None:
        """The router hears of every replica now, and then every period; its periods begin ``late_s`` later."""
        self._router.update([outbox.replica.view(self._events.now_s) for outbox in self._outboxes.values()])
        self._events.after(late_s + self._limits.period_s, self._report)

    def _report(self) -> None:
        heard_s = self._events.now_s + self._limits.delay_s
        views = [outbox.replica.view(heard_s) for outbox in self._outboxes.values()]
        self._events.at(heard_s, lambda: self._router.update(views))
        for replica_id, outbox in self._outboxes.items():
            batch = outbox.take(self._number)
            if batch and self._rng.random() < self._limits.event_loss:
                self.num_lost += 1
            elif batch:
                self._events.at(heard_s, partial(self._apply, replica_id, batch))
        self._events.after(self._limits.period_s, self._report)

    def _apply(self, replica_id: str, batch: Sequence[IndexEvent]) -> None:
        if not self._router.apply(replica_id, batch) and replica_id not in self._asked:
            self._asked.add(replica_id)
            self._events.after(self._limits.delay_s, lambda: self._take_snapshot(replica_id))

    def _take_snapshot(self, replica_id: str) -> None:
        snapshot = self._outboxes[replica_id].snapshot(self._number)
        self._events.after(self._limits.delay_s, lambda: self._heal(replica_id, snapshot))

    def _heal(self, replica_id: str, snapshot: IndexSnapshot) -> None:
        self._asked.discard(replica_id)
        self.num_snapshots += 1
        self._router.apply_snapshot(replica_id, snapshot)
