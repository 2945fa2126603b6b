"""One simulated run: the production router in front of simulated replicas, a list of requests through it.

Owns:      what is put together, the record of every request.
Never:     chooses; that is `routing.router.Router`, the class that the live system runs, or the oracle.
Invariant: every request is recorded once, after its last token; the same arguments give the same records (the CPU time
           that decisions took aside). A router hears of a replica only by reports and page events, which come late.

    every period: replica ──report, page events──(delay)──> router.report, router.apply
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

from benchmarks.sim_engine import Build, SimJob, SimReplica
from benchmarks.sim_load import Events, SimRequest
from routing.router import Router
from routing.types import Decision, Ending, IndexEvent, ReplicaView, RouteOutcome, RouteQuery

ORACLE = "oracle"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The replicas that are simulated, and what a router learns of them."""

    num_replicas: int
    build: Build
    objective_s: float = 5.0  # for the first token
    period_s: float = 0.1  # between two reports, and two batches of page events
    delay_s: float = 0.02  # from a replica to the router
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The course of one request that has ended."""

    number: int
    replica_id: str
    reason: str
    arrival_s: float
    ttft_s: float
    ended_s: float
    input_len: int
    cached_tokens: int
    decision_s: float  # CPU time that choosing took here: of this thread, so that other load does not count


class Cluster:
    """One run of one policy over simulated replicas."""

    def __init__(
        self, policy: str, requests: Sequence[SimRequest], setup: Setup, progress: Callable[[], None] = lambda: None
    ) -> None:
        """``progress`` is called when a request has ended. Raises ValueError for an unknown policy or no room."""
        if setup.build.pool_pages < 1 or setup.num_replicas < 1:
            raise ValueError(
                f"{setup.num_replicas} replicas of {setup.build.pool_pages} pages were wanted: take at least one "
                "replica and one page"
            )
        self.events = Events()
        self.records: list[Record] = []
        self._requests, self._setup, self._progress = requests, setup, progress
        self._followers: dict[int, list[SimRequest]] = {}
        self._open: dict[int, tuple[Decision | None, float]] = {}  # by request; no decision: routed by the oracle
        self.replicas = [
            SimReplica(f"r{index:04}", setup.build, self.events, Random(f"{setup.seed}/replica {index}"), self._ended)
            for index in range(setup.num_replicas)
        ]
        self._by_id = {replica.replica_id: replica for replica in self.replicas}
        for replica in self.replicas:
            replica.others, replica.fetched, replica.began = self._by_id, self._fetched, self._began
        self.num_fetched = 0  # tokens that came from other replicas
        self.num_failed = 0  # fetches
        self._told: dict[str, ReplicaView] = {}  # the last report of each replica
        self.router: Router | None = None
        if policy != ORACLE:
            rng = Random(f"{setup.seed}/router")
            self.router = Router(policy, rng, lambda: self.events.now_s, page_size=setup.build.page_size)
            self.router.update([replica.engine.report() for replica in self.replicas])
            self.events.after(setup.period_s, self._report)

    def run(self) -> list[Record]:
        """Run every request from its arrival to its last token."""
        for request in self._requests:
            if request.after is None:
                self._schedule(request, request.arrival_s)
            else:
                self._followers.setdefault(request.after, []).append(request)
        self.events.run(until=lambda: len(self.records) == len(self._requests))
        return self.records

    def check(self) -> None:
        """Raises AssertionError if a request or a page is lost, or counted twice."""
        assert len({record.number for record in self.records}) == len(self.records)
        for replica in self.replicas:
            replica.engine.scheduler.check()
        if self.router is not None:
            assert self.router.num_open == len(self._open)
            self.router.check()

    def _report(self) -> None:
        for replica in self.replicas:
            view, changes = replica.engine.report(), replica.engine.cache_events()
            if changes or self._told.get(replica.replica_id) is not view:
                self._told[replica.replica_id] = view
                self.events.after(self._setup.delay_s, partial(self._hear, view, changes))
        self.events.after(self._setup.period_s, self._report)

    def _hear(self, view: ReplicaView, changes: list[IndexEvent]) -> None:
        assert self.router is not None
        self.router.report(view)
        if changes:
            assert self.router.apply(view.replica_id, changes), "an event is missing"

    def _schedule(self, request: SimRequest, time_s: float) -> None:
        self.events.at(time_s, lambda: self._arrive(request))

    def _arrive(self, request: SimRequest) -> None:
        setup = self._setup
        job = SimJob(request, now_s=self.events.now_s, objective_s=setup.objective_s, build=setup.build)
        decision, began_s = None, time.thread_time()
        if self.router is None:
            replica = min(self.replicas, key=lambda replica: replica.true_ttft_s(job))  # the first of equals
        else:
            query = RouteQuery(
                rid=str(request.number), token_ids=job.prompt, salt=request.tenant, objective_s=setup.objective_s,
                max_new_tokens=request.output_len, tenant=job.req.asked.tenant,
            )  # fmt: skip
            decision = self.router.choose(query)
            replica, job.fetch = self._by_id[decision.replica_id], decision.fetch
        self._open[request.number] = decision, time.thread_time() - began_s
        replica.submit(job)

    def _began(self, job: SimJob) -> None:
        decision, _ = self._open[job.request.number]
        if self.router is not None and decision is not None:
            self.events.after(self._setup.build.way_s, partial(self.router.began, decision, job.ttft_s))

    def _fetched(self, job: SimJob, num_bytes: int, took_s: float, failed: bool) -> None:
        """A fetch has ended; its router hears of it a little later."""
        self.num_fetched += 0 if failed else num_bytes // self._setup.build.token_bytes
        self.num_failed += failed
        router, (decision, _) = self.router, self._open[job.request.number]
        if router is not None and decision is not None:
            told = partial(router.fetched, decision, num_bytes, took_s, failed=failed)
            self.events.after(self._setup.build.way_s, told)

    def _ended(self, replica: SimReplica, job: SimJob) -> None:
        request, cached = job.request, job.req.cached_tokens
        decision, decision_s = self._open.pop(request.number)
        if self.router is not None and decision is not None:
            self.router.done(decision, RouteOutcome(ending=Ending.OK, cached_tokens=cached, ttft_s=job.ttft_s))
        self.records.append(
            Record(
                number=request.number,
                replica_id=replica.replica_id,
                reason=decision.reason.value if decision else ORACLE,
                arrival_s=job.came_s,
                ttft_s=job.ttft_s,
                ended_s=self.events.now_s,
                input_len=request.input_len,
                cached_tokens=cached,
                decision_s=decision_s,
            )
        )
        for follower in self._followers.get(request.number, ()):
            self._schedule(follower, self.events.now_s + follower.arrival_s)
        self._progress()
