"""Schedulers and page pools of engines behind the production router, on one simulated clock: steps take what a formula
says, so that what the router predicts can be held against what comes, on any machine."""

import functools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from benchmarks.sim_load import Events
from benchmarks.workloads import Conversation, Workload
from deployments.channel.frames import LENGTH, CacheChanges, ReplicaReport, decode, encode
from deployments.dispatch.timeline import before_first_s
from deployments.fleet.fleet import view_of
from replicas.cache.kv import KvCache
from replicas.config import SchedulerConfig
from replicas.engine.loop import STATS_PERIOD_S
from replicas.engine.stepping import StepClock, snapshot
from replicas.request import Req, stage_times
from replicas.scheduler.plan import ExtendPlan, StepPlan, StepResult
from replicas.scheduler.scheduler import Scheduler
from replicas.types import EngineStats
from routing.router import Router
from routing.types import Decision, Ending, IndexEvent, ReplicaView, RouteOutcome, RouteQuery
from tests.harness import choice_of
from tests.unit.deployments.sample_values import info

PAGE_SIZE, POOL_TOKENS, CHUNK, MAX_RUNNING, CONTEXT_LEN = 16, 12_000, 512, 64, 8_192
REPORT_PERIOD_S, WAY_S = 0.1, 0.002
TOKEN = 7  # of which answers consist


def step_s(plan: StepPlan) -> float:
    """About what SmolLM2 takes on two cores (docs/performance.md, Mixed steps)."""
    is_extend = isinstance(plan, ExtendPlan)
    num_prompt, num_rows = (plan.num_prompt_tokens, plan.num_decode) if is_extend else (0, len(plan.rows))
    return 0.012 + 0.00076 * num_prompt + 0.0015 * num_rows


class TimedReplica:
    """An engine as `EngineLoop` drives it, without a device: commands, statistics, a step, its tokens."""

    def __init__(self, name: str, events: Events) -> None:
        self.kv = KvCache(
            num_pages=POOL_TOKENS // PAGE_SIZE, page_size=PAGE_SIZE, max_requests=MAX_RUNNING,
            context_len=CONTEXT_LEN, record_events=True, clock=lambda: events.now_s,
        )  # fmt: skip
        self.scheduler = Scheduler(
            self.kv, SchedulerConfig(chunked_prefill_size=CHUNK), max_running=MAX_RUNNING, clock=lambda: events.now_s
        )
        self.first: dict[Req, Callable[[], None]] = {}  # called with the first token
        self.ended: dict[Req, Callable[[], None]] = {}  # and with the last
        self._name, self._events = name, events
        self._times = StepClock(chunk_size=CHUNK)
        self._commands: deque[Callable[[], None]] = deque()
        self._in_step = False
        self._stats = self._snapshot()

    def command(self, do: Callable[[], None]) -> None:
        """Do it between two steps."""
        self._commands.append(do)
        if not self._in_step:
            self._go_on()

    def report(self) -> ReplicaView:
        """What the fleet makes of its report, WAY_S later."""
        said = ReplicaReport(stats=self._stats, error=None, num_open=0)
        return view_of(info(self._name), said, as_of_s=self._stats.time_s + WAY_S, hangs=False)

    def cache_events(self) -> list[IndexEvent]:
        """What its cache stored and removed since the last call, over the channel."""
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
            self._events.after(step_s(plan), functools.partial(self._end, plan))

    def _end(self, plan: StepPlan) -> None:
        self._in_step = False
        is_extend = isinstance(plan, ExtendPlan)
        self._times.record(step_s(plan), plan.num_prompt_tokens if is_extend else 0, is_extend=is_extend)
        sampled = np.full(len(plan.sampling), TOKEN, dtype=np.int32)
        for token in self.scheduler.apply(plan, StepResult(token_ids=sampled)):
            if token.req in self.first:
                self.first.pop(token.req)()
            if token.req.finish is not None:
                self.ended.pop(token.req)()
        self._go_on()


@dataclass(slots=True)
class Asked:
    """A request, and what came of it."""

    decision: Decision
    ttft_s: float = 0.0  # once it has ended


class TimedFleet:
    """A router before two replicas, and clients, each a message of WAY_S away."""

    def __init__(self) -> None:
        self.events, self._rng = Events(), Random(0)
        self.router = Router("estimated_ttft", Random(0), lambda: self.events.now_s, page_size=PAGE_SIZE)
        self.replicas = {name: TimedReplica(name, self.events) for name in ("r0", "r1")}
        self._views = {name: replica.report() for name, replica in self.replicas.items()}
        self._hear(self._views["r0"], [])
        for number, replica in enumerate(self.replicas.values()):
            self.events.after(0.031 * (1 + number), functools.partial(self._tell, replica))

    def run(self, workload: Workload, *, at_once: int, think_s: float) -> list[Asked]:
        """Have ``at_once`` clients hold the conversations, thinking ``think_s`` on average before each turn."""
        asked: list[Asked] = []
        left, num_ended = deque(workload.conversations), 0

        def next_one() -> None:
            if left:
                turn(left.popleft(), [], 0)

        def turn(conversation: Conversation, history: list[int], number: int) -> None:
            if number == len(conversation.turns):
                next_one()
                return
            mine = conversation.turns[number]
            prompt = [*history, *mine.token_ids]

            def ended() -> None:
                nonlocal num_ended
                num_ended += 1
                turn(conversation, [*prompt, *[TOKEN] * mine.max_new_tokens], number + 1)

            thinks_s = self._rng.expovariate(1 / think_s) if think_s else 0.0
            self.events.after(thinks_s, lambda: asked.append(self.ask(prompt, mine.max_new_tokens, ended)))

        for _ in range(at_once):
            next_one()
        self.events.run(lambda: num_ended == workload.num_requests)
        return asked

    def ask(self, token_ids: Sequence[int], max_new_tokens: int, ended: Callable[[], None]) -> Asked:
        asked = Asked(self.router.choose(RouteQuery(rid="r", token_ids=token_ids, max_new_tokens=max_new_tokens)))
        decision, replica = asked.decision, self.replicas[asked.decision.replica_id]

        def arrive(arrived_s: float) -> None:
            req = choice_of(f"r{decision.number}", token_ids, now_s=arrived_s, max_new_tokens=max_new_tokens)
            replica.first[req] = lambda: self.events.after(WAY_S, begin)
            replica.ended[req] = lambda: self.events.after(WAY_S, functools.partial(end, req))
            replica.scheduler.submit(req)

        def begin() -> None:
            asked.ttft_s = self.events.now_s - decision.time_s

        def end(req: Req) -> None:
            engine_s = before_first_s(stage_times(req, self.events.now_s))
            outcome = RouteOutcome(
                ending=Ending.OK, cached_tokens=req.cached_tokens, ttft_s=asked.ttft_s, engine_s=engine_s
            )
            self.router.done(decision, outcome)
            ended()

        sent_s = self.events.now_s
        self.events.after(WAY_S, lambda: replica.command(functools.partial(arrive, sent_s + WAY_S)))
        return asked

    def _tell(self, replica: TimedReplica) -> None:
        view, changes = replica.report(), replica.cache_events()
        self.events.after(WAY_S, lambda: self._hear(view, changes))
        self.events.after(REPORT_PERIOD_S, functools.partial(self._tell, replica))

    def _hear(self, view: ReplicaView, changes: list[IndexEvent]) -> None:
        self._views[view.replica_id] = view
        self.router.update(self._views.values())
        self.router.apply(view.replica_id, changes)
