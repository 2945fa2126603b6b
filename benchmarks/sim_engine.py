"""Simulated replicas: the production engine but for its device. Scheduler, pages, statistics and reports are real; a
step takes what a formula says.

Owns:      the simulated engines; how long a step takes.
Never:     sees another replica or the router.
Invariant: what a replica stores, evicts, retracts and starts is what the production scheduler does with those requests
           at those times. Steps that differ in nothing but their number are taken at once, and change nothing else.

    submit ──(way)──> between two steps ──> Scheduler ──plan──> a step of StepTime ──tokens──> first token, last token
                                               └─ each running request makes tokens within its last page, and nothing
                                                  waits: as many steps at once, until a command comes or a page is full
"""

import functools
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from random import Random

import numpy as np
import numpy.typing as npt

from benchmarks.sim_load import Events, SimRequest
from deployments.channel.frames import LENGTH, CacheChanges, ReplicaReport, decode, encode
from deployments.dispatch.leases import ReplicaInfo
from deployments.fleet.fleet import view_of
from kvtransfer.pages import page_keys
from kvtransfer.types import PdTicket, PeerAddress
from replicas.cache.kv import KvCache
from replicas.cache.quarantine import Detained
from replicas.config import SchedulerConfig
from replicas.disagg.roles import ask_grant, fetch_for, fetched, give_up
from replicas.engine.loop import IDLE_WAIT_S, STATS_PERIOD_S
from replicas.engine.stepping import StepClock, snapshot
from replicas.memory.sizing import PoolSize
from replicas.request import Leg, Req
from replicas.scheduler.plan import ExtendPlan, StepPlan, StepResult
from replicas.scheduler.precedence import StepTimes
from replicas.scheduler.scheduler import Scheduler
from replicas.types import EngineStats, GenerateRequest, PdLeg, PdTransfer, SamplingParams
from routing.fetch import SLOWED
from routing.types import IndexEvent, PageFetch, ReplicaView

TOKEN = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """How long a step takes: a sum over what it runs, and a spread around it."""

    base_s: float
    prompt_token_s: float
    row_s: float  # each running request
    spread: float = 0.0  # standard deviation of the logarithm of a step's duration over that sum

    def of(self, num_prompt: int, num_rows: int, rng: Random) -> float:
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
    token_bytes: int = 0  # K and V of a token
    link_bytes_per_s: float = 0.0  # of each replica, to all others, each way; 0: they fetch nothing

    @property
    def is_even(self) -> bool:
        """Whether steps that run the same take the same time."""
        return not self.step.spread and len(self.pace) == 1

    def step_s(self, num_prompt: int, num_rows: int, now_s: float, rng: Random) -> float:
        """Return how long a step takes that begins now."""
        return self.step.of(num_prompt, num_rows, rng) * self.pace[min(int(now_s / self.pace_s), len(self.pace) - 1)]


@dataclass(slots=True, eq=False)
class _Alike:
    """Decode steps under way that differ in nothing but their number."""

    began_s: float
    step_s: float
    num: int

    def cut(self, now_s: float) -> bool:
        """Let the step that runs now be the last. Returns: whether another one was to come."""
        before, begun = self.num, max(1, math.ceil((now_s - self.began_s) / self.step_s - 1e-9))
        self.num = min(before, begun)
        return self.num < before

    @property
    def end_s(self) -> float:
        return self.began_s + self.num * self.step_s


class TimedEngine:
    """An engine as `EngineLoop` drives it, without a device: commands, statistics, a step, its tokens."""

    def __init__(self, name: str, build: Build, events: Events, rng: Random) -> None:
        chunk = build.scheduler.chunked_prefill_size
        assert chunk is not None
        self.kv = KvCache(
            size=PoolSize(num_pages=build.pool_pages, page_size=build.page_size, cell_bytes=1),
            max_requests=build.max_running,
            context_len=build.context_len, record_events=True, clock=lambda: events.now_s,
        )  # fmt: skip
        self.scheduler = Scheduler(self.kv, build.scheduler, max_running=build.max_running, clock=lambda: events.now_s)
        self.answers: dict[int, npt.NDArray[np.int32]] = {}  # by seed: what a request is answered; without an entry 7s
        self.first: dict[Req, Callable[[], None]] = {}  # called with the first token
        self.ended: dict[Req, Callable[[], None]] = {}  # and with the last
        self.num_under_way = 0  # prompt tokens of the step under way
        self.times = StepClock(chunk_size=chunk)
        self._info = ReplicaInfo(
            replica_id=name, node_id="simulated", pid=0, model_path="", architecture="", dtype="",
            context_len=build.context_len, vocab_size=0, max_prompt_tokens=build.context_len, tp=1,
            page_size=build.page_size, attention="", kernels="", products="", num_threads=1, pool="",
            page_bytes=build.token_bytes * build.page_size, fetches=build.link_bytes_per_s > 0,
        )  # fmt: skip
        self._build, self._events, self._rng = build, events, rng
        self.sends_until_s = 0.0  # pages to another replica; steps are longer meanwhile
        self.granted: Callable[[Req], None] = lambda req: None  # called with each that may fetch
        self._commands: deque[Callable[[], None]] = deque()
        self._in_step = False
        self._alike: _Alike | None = None
        self._ends_s = 0.0  # the step under way, or the last
        self._stats = self._snapshot()
        self._view: tuple[EngineStats, ReplicaView] | None = None  # the last report, and what it was made of

    def command(self, do: Callable[[], None]) -> None:
        """Do it between two steps."""
        self._commands.append(do)
        if not self._in_step:
            self._go_on()
        elif self._alike is not None and self._alike.cut(self._events.now_s):
            self._at_end_of(self._alike)

    def report(self) -> ReplicaView:
        """Return what a fleet makes of its report, a way later; the same object where nothing was new."""
        alike_is_new = self._alike is not None and self._stats.time_s < self._alike.began_s
        if alike_is_new or (not self._in_step and self._events.now_s - self._stats.time_s >= IDLE_WAIT_S):
            self._stats = self._snapshot()
        if self._view is None or self._view[0] is not self._stats:
            said = ReplicaReport(stats=self._stats, error=None, num_open=0)
            view = view_of(self._info, said, as_of_s=self._stats.time_s + self._build.way_s, hangs=False)
            self._view = self._stats, view
        return self._view[1]

    def step_rest_s(self) -> float:
        """Return for how long the step under way still runs."""
        rest_s = (self._alike.end_s if self._alike is not None else self._ends_s) - self._events.now_s
        return max(0.0, rest_s if self._alike is None else rest_s % self._alike.step_s)

    def cache_events(self) -> list[IndexEvent]:
        """Return what its cache stored and removed since the last call, as the channel brings it."""
        changes = self.kv.store.drain_events()
        if not changes:
            return []
        message = decode(encode(CacheChanges.of(changes))[LENGTH.size :])
        assert isinstance(message, CacheChanges)
        return message.events()

    def _snapshot(self) -> EngineStats:
        return snapshot(self.scheduler, self.kv.store, self.times, now_s=self._events.now_s)

    def _go_on(self) -> None:
        while self._commands:
            self._commands.popleft()()
        now_s, scheduler = self._events.now_s, self.scheduler
        if now_s - self._stats.time_s >= STATS_PERIOD_S or not scheduler.has_work:
            self._stats = self._snapshot()
        if num := self._num_alike():
            step_s = self._build.step_s(0, len(scheduler.queues.running), now_s, self._rng)
            self._in_step, self._alike = True, _Alike(now_s, step_s, num)
            self._at_end_of(self._alike)
            return
        plan = scheduler.schedule()
        for req in scheduler.queues.away.take_granted():
            self.granted(req)
        if plan is not None:
            self._in_step = True
            num_prompt = self.num_under_way = plan.num_prompt_tokens if isinstance(plan, ExtendPlan) else 0
            num_rows = plan.num_decode if isinstance(plan, ExtendPlan) else len(plan.rows)
            step_s = self._build.step_s(num_prompt, num_rows, now_s, self._rng)
            step_s *= 1 + SLOWED * (now_s < self.sends_until_s)
            self._ends_s = now_s + step_s
            self._events.at(self._ends_s, functools.partial(self._end, plan, step_s))

    def _end(self, plan: StepPlan, step_s: float) -> None:
        self._in_step, self.num_under_way = False, 0
        if isinstance(plan, ExtendPlan):
            self.times.record(step_s, plan.num_prompt_tokens, is_extend=True, num_decode=plan.num_decode)
        else:
            self.times.record(step_s, 0, is_extend=False, num_decode=len(plan.rows))
        if self.times.prefill_tokens_per_s:
            self.scheduler.queues.waiting.step_times = StepTimes(
                1.0 / self.times.prefill_tokens_per_s, self.times.decode_step_s, *self.times.costs
            )
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

    def _num_alike(self) -> int:
        """Count the next steps in which each running request makes a token that is not its last and needs no page, and
        nothing else can happen unless a command comes."""
        queues = self.scheduler.queues
        waiting = (queues.waiting, queues.prealloc, queues.away, queues.begun, queues.paused)
        if not (queues.running and self._build.is_even) or any(len(each) for each in waiting):
            return 0
        size, left = self._build.page_size, math.inf
        for req in queues.running:
            assert req.holding is not None
            left = min(left, req.max_remaining - 1, -req.holding.kv_len % size)
        return int(left)

    def _at_end_of(self, alike: _Alike) -> None:
        num = alike.num
        self._events.at(max(alike.end_s, self._events.now_s), lambda: self._end_alike(alike, num))

    def _end_alike(self, alike: _Alike, num: int) -> None:
        """Give each running request its tokens, unless a command has cut the steps since that was scheduled."""
        if alike is not self._alike or num != alike.num:
            return
        self._in_step, self._alike = False, None
        scheduler = self.scheduler
        for req in scheduler.queues.running:
            assert req.holding is not None
            answer = self.answers.get(req.sampling.seed or 0)
            made = TOKEN if answer is None else answer[req.num_output : req.num_output + num]
            self.kv.extend(req, req.holding.kv_len + num)
            req.ids[req.num_tokens : req.num_tokens + num] = made
            req.num_tokens += num
            req.computed_len += num
            scheduler.queues.waiting.shares.charge(req, num)
        scheduler.counters["decode_tokens"] += num * len(scheduler.queues.running)
        for _ in range(num):
            scheduler._ratio.decode_step()
        for _ in range(min(num, 12)):  # by then its smoothed duration is theirs
            self.times.record(alike.step_s, 0, is_extend=False, num_decode=len(scheduler.queues.running))
        self._go_on()


class SimJob:
    """A request at a simulated replica: what it needs there, and what came of it."""

    __slots__ = ("came_s", "fetch", "num_sent", "req", "request", "sent_s", "token_ids", "ttft_s")

    def __init__(self, request: SimRequest, *, now_s: float, objective_s: float, build: Build) -> None:
        self.request = request
        self.fetch: PageFetch | None = None
        self.num_sent = 0  # bytes
        self.sent_s = 0.0  # from the first page to the last
        self.token_ids = request.token_ids()
        self.came_s = now_s
        self.ttft_s = 0.0  # once it has its first token
        sampling = SamplingParams(
            temperature=0.0, max_new_tokens=request.output_len, seed=request.number, ignore_eos=True
        )
        asked = GenerateRequest(
            rid=str(request.number), token_ids=self.prompt, sampling=sampling, objective_s=objective_s,
            cache_salt=request.tenant, tenant=request.tenant if build.knows_tenants else "",
        )  # fmt: skip
        self.req = Req.make(asked, index=0, now_s=now_s + build.way_s, eos_ids=frozenset())

    @property
    def prompt(self) -> npt.NDArray[np.int32]:
        return self.token_ids[: self.request.input_len]


class SimReplica:
    """One simulated replica of the model."""

    def __init__(
        self, replica_id: str, build: Build, events: Events, rng: Random, ended: Callable[["SimReplica", SimJob], None]
    ) -> None:
        """``ended``: the last token is there. ``rng`` draws the spread of steps."""
        self.replica_id = replica_id
        self.engine = TimedEngine(replica_id, build, events, rng)
        self.engine.granted = self._order
        self.others: Mapping[str, SimReplica] = {}  # by id
        self.fetched: Callable[[SimJob, int, float, bool], None] = lambda job, num_bytes, took_s, failed: None
        self.began: Callable[[SimJob], None] = lambda job: None
        self._links_free_s = [0.0, 0.0]  # out, in
        self._fetching: dict[Req, SimJob] = {}
        self._followers: dict[Req, list[Req]] = {}  # parked, by the one whose fetch they wait for
        self._build, self._events, self._ended = build, events, ended
        self._without_first: dict[SimJob, None] = {}  # at the engine or on their way to it

    def submit(self, job: SimJob) -> None:
        """Send ``job`` to the engine. Raises: ValueError if it can never run."""
        build, num_tokens = self._build, len(job.token_ids)
        if num_tokens > min(build.context_len, build.pool_pages * build.page_size):
            raise ValueError(
                f"request {job.request.number} needs {num_tokens} tokens; a context has {build.context_len} and a pool "
                f"{build.pool_pages * build.page_size}: raise --pool-tokens"
            )
        self._without_first[job] = None
        self._events.after(build.way_s, lambda: self.engine.command(lambda: self._arrive(job)))

    def true_ttft_s(self, job: SimJob) -> float:
        """Return when ``job`` would have its first token if it came now: the oracle's figure, which no report holds.
        Prompts go one after the other; what those before it store by then counts as cached."""
        engine, size = self.engine, self._build.page_size
        keys = page_keys(job.prompt, size, job.request.tenant)
        ahead, shared = -engine.num_under_way, engine.kv.cache.peek_len(job.prompt, job.request.tenant)
        for other in self._without_first:
            held = other.req.computed_len or engine.kv.cache.peek_len(other.prompt[:-1], other.request.tenant)
            ahead += other.request.input_len - held
            theirs = page_keys(other.prompt, size, other.request.tenant)
            same = sum(1 for _ in takewhile(bool, (a == b for a, b in zip(keys, theirs, strict=False))))
            shared = max(shared, same * size)
        num = ahead + job.request.input_len - min(shared, (job.request.input_len - 1) // size * size)
        step, chunk = self._build.step, self._build.scheduler.chunked_prefill_size or num
        step_s = step.base_s + step.row_s * len(engine.scheduler.queues.running)
        return engine.step_rest_s() + num * step.prompt_token_s + math.ceil(num / chunk) * step_s

    def _arrive(self, job: SimJob) -> None:
        """The job is at the engine, between two steps; it has waited there since it arrived."""
        engine = self.engine
        engine.answers[job.request.number] = job.token_ids[job.request.input_len :]
        engine.first[job.req] = functools.partial(self._begun, job)
        engine.ended[job.req] = functools.partial(self._through, job)
        if job.fetch is None:
            first = fetch_for(job.req, self._fetching, engine.kv)
            if first is None:
                engine.scheduler.submit(job.req)
            else:
                engine.scheduler.park(job.req)
                self._followers.setdefault(first, []).append(job.req)
            return
        ticket = PdTicket(
            room=job.request.number, generation=0, prefill=PeerAddress(host="", port=0, incarnation=""),
            end_len=job.fetch.end_tokens, within_s=job.fetch.within_s,
        )  # fmt: skip
        job.req.leg = Leg(kv_transfer=PdTransfer(leg=PdLeg.FETCH, ticket=ticket))
        self._fetching[job.req] = job
        ask_grant(engine.scheduler, job.req)

    def _order(self, req: Req) -> None:
        """The job has its pages: ask the donor, whose cache answers between two of its steps."""
        job = self._fetching[req]
        assert job.fetch is not None
        donor, ordered_s, give_up_s = self.others[job.fetch.donor_id], self._events.now_s, job.fetch.within_s
        first = req.holding.prefix_len if req.holding is not None else 0
        self._events.after(
            self._build.way_s, lambda: donor.engine.command(lambda: self._lent(job, donor, first, ordered_s))
        )
        self._events.after(give_up_s, lambda: self.engine.command(lambda: self._came(job, first, None, ordered_s)))

    def _lent(self, job: SimJob, donor: "SimReplica", first: int, ordered_s: float) -> None:
        assert job.fetch is not None
        now_s, build = self._events.now_s, self._build
        pages, receipt = donor.engine.kv.store.lend(job.prompt[: job.fetch.end_tokens], job.req.salt, job.req.rid)
        end_len = len(pages) * build.page_size
        num_bytes = max(end_len - first, 0) * build.token_bytes
        begins_s = max(now_s, donor._links_free_s[0], self._links_free_s[1])
        done_s = begins_s + num_bytes / build.link_bytes_per_s
        late = done_s > ordered_s + job.fetch.within_s
        if late:
            done_s = max(now_s, ordered_s + job.fetch.within_s)
        donor._links_free_s[0] = max(donor._links_free_s[0], done_s)
        self._links_free_s[1] = max(self._links_free_s[1], done_s)
        job.sent_s = max(done_s - begins_s, 0.0)
        job.num_sent = int(job.sent_s * build.link_bytes_per_s) if late else num_bytes
        donor.engine.sends_until_s = max(donor.engine.sends_until_s, done_s)
        release = functools.partial(donor.engine.kv.store.release_quarantined, receipt)
        self._events.at(done_s, lambda: donor.engine.command(release))
        if not late:
            came = functools.partial(self._came, job, first, end_len if num_bytes else None, ordered_s)
            self._events.at(done_s, lambda: self.engine.command(came))

    def _came(self, job: SimJob, first: int, end_len: int | None, ordered_s: float) -> None:
        """The pages are here, or (None) will not come; whichever is first."""
        if self._fetching.pop(job.req, None) is None:
            return
        took_s = job.sent_s if end_len is not None else self._events.now_s - ordered_s  # as a replica's report tells it
        if end_len is None:
            give_up(self.engine.scheduler, job.req)
            assert isinstance(job.req.leg, Leg)
            assert isinstance(job.req.leg.detained, Detained)
            self.engine.kv.store.release_quarantined(job.req.leg.detained)
            job.req.leg.detained = None
        else:
            fetched(self.engine.scheduler, job.req, end_len)
        self.engine.scheduler.wait(job.req)
        for each in self._followers.pop(job.req, ()):
            self.engine.scheduler.unpark(each)
        self.fetched(job, job.num_sent, took_s, end_len is None)

    def _begun(self, job: SimJob) -> None:
        del self._without_first[job]
        job.ttft_s = self._events.now_s - job.came_s
        self.began(job)

    def _through(self, job: SimJob) -> None:
        del self.engine.answers[job.request.number]
        self._ended(self, job)
