"""Production routers side by side, as router replicas are: each has its share of the requests, and all the reports.

Owns:      the routers; the limits of what they know: reports and page events come late, in batches, and not always.
Never:     tells a router what another decided; that shows only in what the replicas report.
Invariant: a decision ends at the router that made it. The numbers of a replica's page events grow by one an event, lost
           ones included, so that a loss shows as a gap; then one snapshot is asked for. Each router is sent all events.
           Comparing routers changes nothing: with or without it the run is the same.

    every period: replica ──report, page events──(delay)──> router.update, router.apply ──gap──> ask ──> apply_snapshot

Requests go to the routers in turn. Each hears at a period of its own, evenly shifted against the others', as routers
that were not started together do. With one router there is nothing to compare, and nothing is.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random

import numpy as np

from benchmarks.sim_load import Events
from benchmarks.sim_replica import SimReplica
from routing.policies import Candidates, PolicyChoice, Turn, estimated_ttft
from routing.router import Router
from routing.types import Decision, IndexEvent, IndexSnapshot, Reason, ReplicaView, RouteOutcome, RouteQuery

SILENT_S = 1.0  # as deployments/fleet/fleet.py


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How late and how incomplete a router's information is."""

    period_s: float = 0.1  # between two reports, and two batches of page events
    delay_s: float = 0.02  # from a replica to a router
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
        self._sent = dict.fromkeys(self._replicas, 0)  # of the page events of each replica
        self._said: dict[str, tuple[float, ReplicaView]] = {}  # the last report of each replica, and when it was heard
        self._limits = limits
        self._events = events
        self._rng = rng
        self._asked: set[str] = set()

    def start(self, late_s: float = 0.0) -> None:
        """Report every replica to the router now, and then every period; its periods begin ``late_s`` later."""
        self._router.update(self._views(self._events.now_s))
        self._events.after(late_s + self._limits.period_s, self._report)

    def _report(self) -> None:
        heard_s = self._events.now_s + self._limits.delay_s
        views = self._views(heard_s)
        self._events.at(heard_s, lambda: self._router.update(views))
        for replica_id in self._said:
            replica = self._replicas[replica_id]
            batch = replica.pool.events[self._sent[replica_id] :]
            self._sent[replica_id] += len(batch)
            if batch and self._rng.random() < self._limits.event_loss:
                self.num_lost += 1
            elif batch:
                self._events.at(heard_s, partial(self._apply, replica_id, batch))
        self._events.after(self._limits.period_s, self._report)

    def _views(self, heard_s: float) -> list[ReplicaView]:
        """Return the reports that come at ``heard_s``; of a replica that stands still the last one, silent in time."""
        for replica in self._replicas.values():
            if replica.joins_s <= self._events.now_s and not replica.is_still:
                self._said[replica.replica_id] = heard_s, replica.view(heard_s)
        return [
            replace(view, silent=True, healthy=False) if heard_s - said_s >= SILENT_S else view
            for said_s, view in self._said.values()
        ]

    def _apply(self, replica_id: str, batch: Sequence[IndexEvent]) -> None:
        if not self._router.apply(replica_id, batch) and replica_id not in self._asked:
            self._asked.add(replica_id)
            self._events.after(self._limits.delay_s, lambda: self._take_snapshot(replica_id))

    def _take_snapshot(self, replica_id: str) -> None:
        """Take what the replica holds now; the events before it are not sent."""
        pool = self._replicas[replica_id].pool
        self._sent[replica_id] = len(pool.events)
        snapshot = IndexSnapshot(seq=len(pool.events), keys=np.array(pool.cached_keys(), dtype=np.uint64))
        self._events.after(self._limits.delay_s, lambda: self._heal(replica_id, snapshot))

    def _heal(self, replica_id: str, snapshot: IndexSnapshot) -> None:
        self._asked.discard(replica_id)
        self.num_snapshots += 1
        self._router.apply_snapshot(replica_id, snapshot)


SAMPLE_S = 10.0  # between two comparisons of the indexes: long against a report, short against a trace
SAMPLED_REPLICAS = 8  # at most, evenly spaced: a comparison walks the whole index once a replica and router


@dataclass(frozen=True, slots=True, kw_only=True)
class Routed:
    """A decision, and the router that made it."""

    decision: Decision
    router: int
    decision_s: float  # CPU time of this thread, so that other load does not count


@dataclass(frozen=True, slots=True, kw_only=True)
class Apart:
    """How far the indexes and decisions of several routers were apart."""

    routers: int
    samples: int
    pages_mean: float  # share of the pages that some router believes in and not all do: over the samples
    pages_max: float
    pages_at_end: float  # once the last reports have come
    decisions: float  # share that the next router would have made differently; two draws are no difference


class Routers:
    """One or more routers over the same replicas."""

    def __init__(
        self,
        policy: str,
        replicas: Sequence[SimReplica],
        *,
        num: int,
        page_size: int,
        limits: Limits,
        events: Events,
        seed: int,
    ) -> None:
        """Raises ValueError for an unknown policy, or no router."""
        if num < 1:
            raise ValueError(f"{num} routers were wanted; take at least one")
        names = ["", *(f" {number}" for number in range(1, num))]
        rngs = [Random(f"{seed}/router{name}") for name in names]
        self.all = [_router(policy, rng, lambda: events.now_s, page_size) for rng in rngs]
        self._reports = [
            Reports(router, replicas, limits=limits, events=events, rng=Random(f"{seed}/reports{name}"))
            for router, name in zip(self.all, names, strict=True)
        ]
        self._limits = limits
        self._events = events
        step = -(-len(replicas) // SAMPLED_REPLICAS)
        self._sampled = [replica.replica_id for replica in replicas[::step]]
        self._num_chosen = 0
        self._num_different = 0
        self._samples: list[float] = []

    def start(self) -> None:
        for number, reports in enumerate(self._reports):
            reports.start(late_s=number / len(self.all) * self._limits.period_s)
        if len(self.all) > 1:
            self._events.after(SAMPLE_S, self._sample)

    def choose(self, query: RouteQuery) -> Routed:
        """Return the next router's decision."""
        number = self._num_chosen % len(self.all)
        self._num_chosen += 1
        began_s = time.thread_time()
        decision = self.all[number].choose(query)
        decision_s = time.thread_time() - began_s
        if len(self.all) > 1:
            self._num_different += self._differs(decision, query, (number + 1) % len(self.all))
        return Routed(decision=decision, router=number, decision_s=decision_s)

    def done(self, routed: Routed, outcome: RouteOutcome) -> None:
        self.all[routed.router].done(routed.decision, outcome)

    @property
    def num_open(self) -> int:
        return sum(router.num_open for router in self.all)

    def apart(self) -> Apart | None:
        """Return how far they are apart, once the last reports of a run have come. None for one router."""
        if len(self.all) == 1:
            return None
        last_s = self._events.now_s + 2 * (self._limits.period_s + self._limits.delay_s)
        self._events.run(until=lambda: self._events.now_s > last_s)
        samples = self._samples or [0.0]
        return Apart(
            routers=len(self.all),
            samples=len(self._samples),
            pages_mean=sum(samples) / len(samples),
            pages_max=max(samples),
            pages_at_end=self._pages_apart(),
            decisions=self._num_different / max(1, self._num_chosen),
        )

    def check(self) -> None:
        for router in self.all:
            router.check()

    def _differs(self, decision: Decision, query: RouteQuery, other: int) -> bool:
        same = self.all[other].explain_only(query)
        both_drawn = decision.reason == same.reason == Reason.TIE
        return decision.replica_id != same.replica_id and not both_drawn

    def _sample(self) -> None:
        self._samples.append(self._pages_apart())
        self._events.after(SAMPLE_S, self._sample)

    def _pages_apart(self) -> float:
        num_common = num_any = 0
        for replica_id in self._sampled:
            held = [router.held(replica_id) for router in self.all]
            num_common += len(set.intersection(*held))
            num_any += len(set.union(*held))
        return 1 - num_common / num_any if num_any else 0.0


def _router(policy: str, rng: Random, clock: Callable[[], float], page_size: int) -> Router:
    if policy == SOONEST:
        return SoonestRouter(rng, clock, page_size)
    return Router(policy, rng, clock, page_size=page_size)


SOONEST = "soonest"


class SoonestRouter(Router):
    """`estimated_ttft` without ``behind_s``: the soonest first token, whatever that costs waiting requests. Never
    served."""

    def __init__(self, rng: Random, clock: Callable[[], float], page_size: int) -> None:
        super().__init__("estimated_ttft", rng, clock, page_size)
        self.policy = SOONEST
        self._policy = soonest


def soonest(query: RouteQuery, candidates: Candidates, turn: Turn) -> PolicyChoice:
    """Choose as `estimated_ttft` does where no request waits."""
    selfish = replace(candidates.terms, behind_s=np.zeros(len(candidates)))
    return estimated_ttft(query, replace(candidates, terms=selfish), turn)
