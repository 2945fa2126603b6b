"""A simulated replica that is the production engine but for its device: real scheduler, pages, statistics and reports;
a step takes what a formula says.

Owns:      the simulated engines; how long a step takes.
Invariant: as sim_replica.py. What a replica stores, evicts, retracts and starts is what the production scheduler does
           with those requests at those times.

    submit ──(way)──> between two steps ──> Scheduler ──plan──> a step of StepTime ──tokens──> first token, last token
"""

import functools
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random

import numpy as np
import numpy.typing as npt

from benchmarks.sim_cluster import Cluster, Setup
from benchmarks.sim_load import Events, SimRequest
from benchmarks.sim_replica import SimJob, SimPool, SimReplica, Speed
from deployments.channel.frames import LENGTH, CacheChanges, ReplicaReport, decode, encode
from deployments.dispatch.leases import ReplicaInfo
from deployments.fleet.fleet import view_of
from kvtransfer.pages import PageKey
from replicas.cache.kv import KvCache
from replicas.config import SchedulerConfig
from replicas.engine.loop import STATS_PERIOD_S
from replicas.engine.stepping import StepClock, snapshot
from replicas.request import Req
from replicas.scheduler.plan import ExtendPlan, StepPlan, StepResult
from replicas.scheduler.scheduler import Scheduler
from replicas.types import EngineStats, GenerateRequest, SamplingParams
from routing.types import IndexEvent, KeysRemoved, KeysStored, ReplicaView

TOKEN = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """How long a step takes: a sum over what it runs, and a spread around it."""

    base_s: float
    prompt_token_s: float
    row_s: float  # each running request
    spread: float = 0.0  # standard deviation of the logarithm of a step's duration over that sum

    def of(self, plan: StepPlan, rng: Random) -> float:
        num_prompt, num_rows = (
            (plan.num_prompt_tokens, plan.num_decode) if isinstance(plan, ExtendPlan) else (0, len(plan.rows))
        )
        mean_s = self.base_s + self.prompt_token_s * num_prompt + self.row_s * num_rows
        return mean_s * rng.lognormvariate(-(self.spread**2) / 2, self.spread) if self.spread else mean_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """What an engine is made with."""

    step: StepTime
    page_size: int
    pool_pages: int
    max_running: int
    context_len: int
    scheduler: SchedulerConfig
    way_s: float = 0.002  # from the router to the engine
    pace: Sequence[float] = (1.0,)  # by which steps are longer in each ``pace_s`` of time, and at the last from then on
    pace_s: float = math.inf
    knows_tenants: bool = True  # False: every request has the same tenant

    def step_s(self, plan: StepPlan, now_s: float, rng: Random) -> float:
        """Return how long a step takes that begins now."""
        return self.step.of(plan, rng) * self.pace[min(int(now_s / self.pace_s), len(self.pace) - 1)]


class TimedEngine:
    """An engine as `EngineLoop` drives it, without a device: commands, statistics, a step, its tokens."""

    def __init__(self, name: str, build: Build, events: Events, rng: Random) -> None:
        chunk = build.scheduler.chunked_prefill_size
        assert chunk is not None
        self.kv = KvCache(
            num_pages=build.pool_pages, page_size=build.page_size, max_requests=build.max_running,
            context_len=build.context_len, record_events=True, clock=lambda: events.now_s,
        )  # fmt: skip
        self.scheduler = Scheduler(self.kv, build.scheduler, max_running=build.max_running, clock=lambda: events.now_s)
        self.answers: dict[int, npt.NDArray[np.int32]] = {}  # by seed: what a request is answered; without an entry 7s
        self.first: dict[Req, Callable[[], None]] = {}  # called with the first token
        self.ended: dict[Req, Callable[[], None]] = {}  # and with the last
        self._info = ReplicaInfo(
            replica_id=name, node_id="simulated", pid=0, model_path="", architecture="", dtype="",
            context_len=build.context_len, vocab_size=0, max_prompt_tokens=build.context_len, tp=1,
            page_size=build.page_size, attention="", kernels="", products="", num_threads=1, pool="",
        )  # fmt: skip
        self._build, self._events, self._rng = build, events, rng
        self._times = StepClock(chunk_size=chunk)
        self._commands: deque[Callable[[], None]] = deque()
        self._in_step = False
        self._stats = self._snapshot()

    def command(self, do: Callable[[], None]) -> None:
        """Do it between two steps."""
        self._commands.append(do)
        if not self._in_step:
            self._go_on()

    def report(self) -> ReplicaView:
        """Return what a fleet makes of its report, a way later."""
        said = ReplicaReport(stats=self._stats, error=None, num_open=0)
        return view_of(self._info, said, as_of_s=self._stats.time_s + self._build.way_s, hangs=False)

    def cache_events(self) -> list[IndexEvent]:
        """Return what its cache stored and removed since the last call, as the channel brings it."""
        message = decode(encode(CacheChanges.of(self.kv.store.drain_events()))[LENGTH.size :])
        assert isinstance(message, CacheChanges)
        return message.events()

    def _snapshot(self) -> EngineStats:
        return snapshot(self.scheduler, self.kv.store, self._times, now_s=self._events.now_s)

    def _go_on(self) -> None:
        while self._commands:
            self._commands.popleft()()
        if self._events.now_s - self._stats.time_s >= STATS_PERIOD_S or not self.scheduler.has_work:
            self._stats = self._snapshot()
        plan = self.scheduler.schedule()
        if plan is not None:
            self._in_step = True
            step_s = self._build.step_s(plan, self._events.now_s, self._rng)
            self._events.after(step_s, functools.partial(self._end, plan, step_s))

    def _end(self, plan: StepPlan, step_s: float) -> None:
        self._in_step = False
        if isinstance(plan, ExtendPlan):
            self._times.record(step_s, plan.num_prompt_tokens, is_extend=True, is_mixed=plan.num_decode > 0)
        else:
            self._times.record(step_s, 0, is_extend=False)
        tokens = [
            self.answers[row.params.seed][row.num_output] if row.params.seed in self.answers else TOKEN
            for row in plan.sampling
        ]
        for token in self.scheduler.apply(plan, StepResult(token_ids=np.array(tokens, dtype=np.int32))):
            if token.req in self.first:
                self.first.pop(token.req)()
            if token.req.finish is not None:
                self.ended.pop(token.req)()
        self._go_on()


class EnginePool(SimPool):
    """The pages of a simulated engine, as they are told to routers; what is cached is what was told."""

    def __init__(self, engine: TimedEngine, capacity: int) -> None:
        super().__init__(capacity)
        self._engine = engine
        self._told: dict[PageKey, None] = {}

    def drain(self) -> None:
        """Take in what the engine stored and removed since the last call."""
        for event in self._engine.cache_events():
            self.events.append(event)
            if isinstance(event, KeysStored):
                self._told |= dict.fromkeys(event.keys.tolist())
            elif isinstance(event, KeysRemoved):
                for key in event.keys.tolist():
                    del self._told[key]

    def cached_keys(self) -> tuple[PageKey, ...]:
        return tuple(self._told)

    def check(self) -> None:
        self._engine.scheduler.check()


class EngineReplica(SimReplica):
    """A simulated replica whose engine is the production one."""

    def __init__(
        self, replica_id: str, *, build: Build, events: Events, rng: Random, ended: Callable[[SimReplica, SimJob], None]
    ) -> None:
        self._engine = TimedEngine(replica_id, build, events, rng)
        pool = EnginePool(self._engine, build.pool_pages)
        super().__init__(
            replica_id,
            speed=Speed(prefill_tokens_per_s=math.nan),
            pool=pool,
            page_size=build.page_size,
            events=events,
            rng=rng,
            ended=ended,
        )
        self._told, self._build = pool, build

    def submit(self, job: SimJob) -> None:
        """Send ``job`` to the engine. Raises: ValueError if it can never run."""
        if (
            job.num_pages > self.pool.capacity
            or job.request.input_len + job.request.output_len > self._build.context_len
        ):
            raise ValueError(
                f"request {job.request.number} needs {job.num_pages} pages and "
                f"{job.request.input_len + job.request.output_len} tokens; there are {self.pool.capacity} and "
                f"{self._build.context_len}"
            )
        job.came_s = self._events.now_s
        self._events.after(self._build.way_s, lambda: self._engine.command(lambda: self._arrive(job)))

    def view(self, time_s: float) -> ReplicaView:
        self._told.drain()
        return self._engine.report()

    def _arrive(self, job: SimJob) -> None:
        """The job is at the engine, between two steps; it has waited there since it arrived."""
        request = job.request
        sampling = SamplingParams(
            temperature=0.0, max_new_tokens=request.output_len, seed=request.number, ignore_eos=True
        )
        token_ids = request.token_ids()
        asked = GenerateRequest(
            rid=str(request.number), token_ids=token_ids[: request.input_len], sampling=sampling,
            objective_s=self._speed.objective_s, cache_salt=request.tenant,
            tenant=request.tenant if self._build.knows_tenants else "",
        )  # fmt: skip
        req = Req.make(asked, index=0, now_s=job.came_s + self._build.way_s, eos_ids=frozenset())
        self._engine.answers[request.number] = token_ids[request.input_len :]
        self._engine.first[req] = functools.partial(self._begun, job, req)
        self._engine.ended[req] = functools.partial(self._through, job)
        self._engine.scheduler.submit(req)

    def _begun(self, job: SimJob, req: Req) -> None:
        job.cached_tokens = req.cached_tokens
        job.ttft_s = self._events.now_s - job.came_s

    def _through(self, job: SimJob) -> None:
        del self._engine.answers[job.request.number]
        self._ended(self, job)


class EngineCluster(Cluster):
    """One run of one policy over simulated engines."""

    def __init__(
        self, policy: str, requests: Sequence[SimRequest], setup: Setup, build: Build,
        progress: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """``setup``: the number of replicas, the routers and what they know; the rest of it is ``build``'s."""
        self._build = build
        size = build.page_size
        super().__init__(
            policy, requests, replace(setup, page_size=size, pool_tokens=build.pool_pages * size), progress
        )

    def _replica(self, index: int, setup: Setup) -> SimReplica:
        rng = Random(f"{setup.seed}/replica {index}")
        return EngineReplica(f"r{index:04}", build=self._build, events=self.events, rng=rng, ended=self._ended)
