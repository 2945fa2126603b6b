"""What the router hears of the replicas: late, in batches, and not always.

Owns:      the information limits of the live system.
Never:     decides; lets the router see a replica in any other way.
Invariant: the numbers of a replica's page events grow by one an event, lost ones included, so that a loss shows as
           a gap; after a gap the replica is asked for a snapshot, once at a time.

    every period: replica ──report, page events──(delay)──> router.update, router.apply ──gap──> ask ──> apply_snapshot
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

import numpy as np

from benchmarks.sim_events import Events
from benchmarks.sim_pool import Change
from benchmarks.sim_replica import SimReplica
from routing.router import Router
from routing.types import CacheEvent, IndexSnapshot, PagesRemoved, PagesStored


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How late and how incomplete the router's information is."""

    period_s: float = 0.1  # between two reports, and two batches of page events
    delay_s: float = 0.02  # from a replica to the router
    event_loss: float = 0.0  # share of the batches of page events that never arrive


class Reports:
    """Carries reports and page events from the replicas to one router."""

    def __init__(
        self, router: Router, replicas: Sequence[SimReplica], *, limits: Limits, events: Events, rng: Random
    ) -> None:
        self.num_lost = 0  # batches
        self.num_snapshots = 0
        self._router = router
        self._replicas = {replica.replica_id: replica for replica in replicas}
        self._limits = limits
        self._events = events
        self._rng = rng
        self._seq = dict.fromkeys(self._replicas, 0)  # of the last event that the replica numbered
        self._asked: set[str] = set()

    def start(self) -> None:
        """The router hears of every replica now, and then every period."""
        self._router.update([replica.view(self._events.now_s) for replica in self._replicas.values()])
        self._events.after(self._limits.period_s, self._report)

    def _report(self) -> None:
        heard_s = self._events.now_s + self._limits.delay_s
        views = [replica.view(heard_s) for replica in self._replicas.values()]
        self._events.at(heard_s, lambda: self._router.update(views))
        for replica_id, replica in self._replicas.items():
            batch = self._number(replica_id, replica.pool.drain())
            if batch and self._rng.random() < self._limits.event_loss:
                self.num_lost += 1
            elif batch:
                self._events.at(heard_s, partial(self._apply, replica_id, batch))
        self._events.after(self._limits.period_s, self._report)

    def _number(self, replica_id: str, changes: Sequence[Change]) -> list[CacheEvent]:
        first = self._seq[replica_id] + 1
        self._seq[replica_id] += len(changes)
        return [
            (PagesStored if stored else PagesRemoved)(seq=seq, keys=np.array(keys, dtype=np.uint64))
            for seq, (stored, keys) in enumerate(changes, start=first)
        ]

    def _apply(self, replica_id: str, batch: Sequence[CacheEvent]) -> None:
        if not self._router.apply(replica_id, batch) and replica_id not in self._asked:
            self._asked.add(replica_id)
            self._events.after(self._limits.delay_s, lambda: self._take_snapshot(replica_id))

    def _take_snapshot(self, replica_id: str) -> None:
        """At the replica: what it holds now, and the number of the last event that is in it."""
        pool = self._replicas[replica_id].pool
        self._number(replica_id, pool.drain())  # not sent: all of it is in the snapshot
        keys = np.array(pool.cached_keys(), dtype=np.uint64)
        snapshot = IndexSnapshot(seq=self._seq[replica_id], keys=keys)
        self._events.after(self._limits.delay_s, lambda: self._heal(replica_id, snapshot))

    def _heal(self, replica_id: str, snapshot: IndexSnapshot) -> None:
        self._asked.discard(replica_id)
        self.num_snapshots += 1
        self._router.apply_snapshot(replica_id, snapshot)
