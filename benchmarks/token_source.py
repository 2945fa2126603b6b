"""An engine without a model, for measuring what stands around one: real scheduler, prefix cache and detokeniser over
steps that compute nothing.

Owns:      the pace of the steps: a request's ``seed`` is the tokens a second that it wants, 0 all that can be had. A
           step waits for the slowest pace among its requests; prefill waits for nobody.
Invariant: every token is WORD, so that whoever reads an answer counts its tokens by counting that.
Thread:    the engine's.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from replicas.cache.kv import KvCache
from replicas.config import CacheConfig, SchedulerConfig, resolve
from replicas.engine.engine import Engine, Executor
from replicas.runner.device import measure_hardware
from replicas.runner.weights import load_model_config
from replicas.scheduler.plan import DecodePlan, DoneStep, PendingStep, StepPlan, StepResult
from replicas.text.tokenizer import Tokenizer
from replicas.types import GenerateRequest, SamplingParams

WORD = " the"
MAX_RUNNING = 64


class PacedSteps:
    """Launches steps that compute nothing and take the time they should."""

    def __init__(
        self,
        token: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._token = token
        self._clock = clock
        self._sleep = sleep
        self._last_due_s = 0.0

    def launch(self, plan: StepPlan) -> PendingStep:
        made = StepResult(token_ids=np.full(len(plan.sampling), self._token, dtype=np.int32))
        tokens_per_s = 0
        if isinstance(plan, DecodePlan):
            tokens_per_s = min((row.params.seed for row in plan.sampling if row.params.seed), default=0)
        if not tokens_per_s:
            return DoneStep(made)
        self._last_due_s = max(self._last_due_s + 1 / tokens_per_s, self._clock())
        return PacedStep(made, self._last_due_s, self._clock, self._sleep)


@dataclass(frozen=True, slots=True)
class PacedStep:
    """A step that is over at ``due_s``."""

    made: StepResult
    due_s: float
    clock: Callable[[], float]
    sleep: Callable[[float], None]

    def result(self) -> StepResult:
        left_s = self.due_s - self.clock()
        if left_s > 0:
            self.sleep(left_s)
        return self.made


def paced_engine(model: str, *, record_events: bool = True) -> Engine:
    """An engine with the tokenizer and the shape of ``model``, and none of its weights."""
    shape = load_model_config(model, dtype=None, context_len=None)
    config = resolve(
        shape,
        measure_hardware(),
        cache=CacheConfig(page_size=16),
        scheduler=SchedulerConfig(max_running_requests=MAX_RUNNING),
    )
    tokenizer = Tokenizer(config.model.path)
    [token] = tokenizer.encode(WORD)
    kv = KvCache(
        num_pages=MAX_RUNNING * shape.context_len // config.cache.page_size,  # nobody ever waits for a page
        page_size=config.cache.page_size,
        max_requests=MAX_RUNNING,
        context_len=shape.context_len,
        record_events=record_events,
    )
    executor = Executor(launch=PacedSteps(int(token)).launch)
    return Engine(config, kv=kv, max_running=MAX_RUNNING, executor=executor, tokenizer=tokenizer)


def request(rid: str, *, max_new_tokens: int, tokens_per_s: int, number: int) -> GenerateRequest:
    """``number`` makes its prompt its own."""
    sampling = SamplingParams(max_new_tokens=max_new_tokens, temperature=0, seed=tokens_per_s, ignore_eos=True)
    return GenerateRequest(rid=rid, token_ids=np.array(prompt(number), dtype=np.int32), sampling=sampling)


def prompt(number: int) -> list[int]:
    """[32] token ids."""
    return [1000 + (number * 37 + i * i) % 20_000 for i in range(32)]
