"""Production routers side by side, as router replicas are: each has its share of the requests, and all the reports.

Owns:      the routers, what carries reports to them, and how far apart they are found to be.
Never:     tells a router what another decided; that shows only in what the replicas report.
Invariant: a decision ends at the router that made it. Comparing changes nothing: with or without it the same run.

Requests go to the routers in turn. Each hears at a period of its own, evenly shifted against the others', as routers
that were not started together do. With one router there is nothing to compare, and nothing is.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from benchmarks.sim_events import Events
from benchmarks.sim_replica import SimReplica
from benchmarks.sim_reports import Limits, Outbox, Reports
from benchmarks.sim_soonest import SOONEST, SoonestRouter
from routing.router import Router
from routing.types import Decision, Reason, RouteOutcome, RouteQuery

SAMPLE_S = 10.0  # between two comparisons of the indexes: long against a report, short against a trace
SAMPLED_REPLICAS = 8  # at most, evenly spaced: a comparison walks the whole index once a replica and router


@dataclass(frozen=True, slots=True, kw_only=True)
class Routed:
    """A decision, and who made it."""

    decision: Decision
    router: int
    decision_s: float  # CPU time of this thread, so that other load does not count


@dataclass(frozen=True, slots=True, kw_only=True)
class Apart:
    """How far apart several routers were."""

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
        outboxes = [Outbox(replica, num) for replica in replicas]
        self._reports = [
            Reports(
                router,
                outboxes,
                limits=limits,
                events=events,
                rng=Random(f"{seed}/reports{names[number]}"),
                number=number,
            )
            for number, router in enumerate(self.all)
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
        """The next router's decision."""
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
        """After a run, which goes on here until the last reports have come. None for one router."""
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
