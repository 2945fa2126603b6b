"""Simulated engines behind the production router, on one clock, so that what the router predicts can be held against
what comes, on any machine."""

import functools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from benchmarks.sim_engine import TOKEN, Build, StepTime, TimedEngine
from benchmarks.sim_load import Events
from benchmarks.workloads import Conversation, Workload
from deployments.record.timeline import before_first_s
from replicas.config import SchedulerConfig
from replicas.request import Req, stage_times
from routing.router import Router
from routing.types import Decision, Ending, IndexEvent, ReplicaView, RouteOutcome, RouteQuery
from tests.harness import choice_of

PAGE_SIZE = 16
REPORT_PERIOD_S, WAY_S = 0.1, 0.002


# about what SmolLM2 takes on two cores (docs/performance.md, Mixed steps)
BUILD = Build(
    step=StepTime(base_s=0.012, prompt_token_s=0.00076, row_s=0.0015),
    page_size=PAGE_SIZE,
    pool_pages=12_000 // PAGE_SIZE,
    max_running=64,
    context_len=8_192,
    scheduler=SchedulerConfig(chunked_prefill_size=512),
    way_s=WAY_S,
)


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
        self.replicas = {name: TimedEngine(name, BUILD, self.events, Random(0)) for name in ("r0", "r1")}
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

    def _tell(self, replica: TimedEngine) -> None:
        view, changes = replica.report(), replica.cache_events()
        self.events.after(WAY_S, lambda: self._hear(view, changes))
        self.events.after(REPORT_PERIOD_S, functools.partial(self._tell, replica))

    def _hear(self, view: ReplicaView, changes: list[IndexEvent]) -> None:
        self._views[view.replica_id] = view
        self.router.update(self._views.values())
        self.router.apply(view.replica_id, changes)
