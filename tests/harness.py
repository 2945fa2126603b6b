"""A scheduler, or a whole engine, over a fake device: what unit and property tests drive."""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from replicas.cache.host_pages import TierCounters
from replicas.cache.kv import KvCache
from replicas.config import CacheConfig, Hardware, ModelConfig, ParallelConfig, RopeConfig, SchedulerConfig
from replicas.disagg.roles import PdTransferTerms
from replicas.engine.engine import Engine, Executor
from replicas.launch import EngineSettings, load_engine
from replicas.memory.sizing import PoolSize, WindowPool
from replicas.request import Req
from replicas.resolve import resolve
from replicas.scheduler import decode
from replicas.scheduler.plan import DoneStep, StepPlan, StepResult
from replicas.scheduler.scheduler import Scheduler
from replicas.text.tokenizer import Tokenizer
from replicas.types import FinishReason, GenerateRequest, SamplingParams, TokenDelta
from tests.embedded import MODEL
from tests.fake_kv_bytes import FakeKvBytes
from tests.fake_transfer_service import FakeWire
from tests.fakes import FakeDevice, continuation


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def pool_of(num_pages: int, page_size: int, windows: WindowPool | None = None) -> PoolSize:
    """A pool whose bytes do not matter."""
    return PoolSize(num_pages=num_pages, page_size=page_size, cell_bytes=1, windows=windows)


class Bench:
    """Scheduler, pools and fake device; `step` runs one step and checks every invariant."""

    def __init__(
        self,
        *,
        num_pages: int = 64,
        page_size: int = 4,
        max_running: int = 8,
        context_len: int = 128,
        prefix_cache: str = "radix",
        sessions: bool = True,
        window: int | None = None,
        **scheduler: object,
    ) -> None:
        """``window``: the tokens that the model sees; None: all."""
        self.clock = Clock()
        self.kv = KvCache(
            size=pool_of(num_pages, page_size),
            max_requests=max_running,
            context_len=context_len,
            cache=CacheConfig(prefix_cache=prefix_cache, sessions=sessions),
            clock=self.clock,
        )
        self.kv.window = window
        config = replace(SchedulerConfig(chunked_prefill_size=16), **scheduler)  # type: ignore[arg-type]
        self.scheduler = Scheduler(self.kv, config, max_running=max_running, clock=self.clock)
        self.device = FakeDevice(
            num_slots=(num_pages + 1) * page_size, num_rows=max_running + 1, row_len=context_len + 4, window=window
        )
        self.plans: list[StepPlan] = []
        self.reqs: list[Req] = []

    def submit(self, prompt: Sequence[int], *, max_new_tokens: int = 4, **request: Any) -> Req:
        rid = f"r{len(self.reqs)}"
        req = choice_of(rid, prompt, now_s=self.clock(), max_new_tokens=max_new_tokens, **request)
        self.reqs.append(req)
        self.scheduler.submit(req)
        return req

    def step(self) -> StepPlan | None:
        self.clock.now_s += 0.01
        plan = self.scheduler.schedule()
        if plan is not None:
            self.scheduler.apply(plan, self.device.execute(plan))
            self.plans.append(plan)
        self.scheduler.check()
        if not self.scheduler.has_work:
            self.kv.check_idle()
        return plan

    def run(self, max_steps: int = 2000) -> None:
        """Step until nothing is left to do: every answer is the oracle's, and no page is held."""
        for _ in range(max_steps):
            if self.scheduler.has_work:
                self.step()
        assert not self.scheduler.has_work, f"still busy after {max_steps} steps: {self.scheduler.last.refusals}"
        for req in self.reqs:
            assert req.finish is not None
            made = req.output_ids.tolist()
            assert made == continuation(req.ids[: req.prompt_len].tolist(), len(made), window=self.kv.window), req.rid
            assert req.finish.reason is not FinishReason.LENGTH or len(made) == req.sampling.max_new_tokens
        pool = self.kv.store.stats()
        assert pool.free_pages + pool.evictable_pages == pool.num_pages
        assert self.kv.store.failed_checks == 0, "held pages were called lost"


def retract(scheduler: Scheduler, req: Req) -> None:
    """Retract a running request, as when pages run out."""
    decode.retract(req, scheduler.queues, scheduler.kv, scheduler.counters)


class _NeverSlow(TierCounters):
    """Counters of tiers whose loads seem to take no time."""

    def loaded(self, num_pages: int, load_s: float, *, num_wrong: int) -> None:
        super().loaded(num_pages, load_s, num_wrong=num_wrong)
        self.load_s_per_page = 0.0


def load_always(kv: KvCache) -> None:
    """From now on load what is on the host, however long that takes: which is quicker, to load or to compute, is not
    for a busy machine to decide in a test."""
    tiers = kv.store.tiers
    if tiers is not None and not isinstance(tiers.counters, _NeverSlow):
        tiers.counters = _NeverSlow(**asdict(tiers.counters) | {"load_s_per_page": 0.0})


def to_host(kv: KvCache) -> None:
    """Have every page that nothing uses leave the device pool, as when pages are short, and `load_always`."""
    store = kv.store
    load_always(kv)
    store.make_room(store.allocator.num_free + store.cache.evictable_pages, "a test")


def model_config(**changes: Any) -> ModelConfig:
    """Make the smallest model, but for vocabulary and context, with ``changes``."""
    model = ModelConfig(
        path=MODEL,
        architecture="LlamaForCausalLM",
        vocab_size=1000,
        hidden_size=8,
        intermediate_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        rms_norm_eps=1e-5,
        rope=RopeConfig(),
        context_len=128,
        tie_embeddings=True,
        attention_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        eos_ids=(),
        dtype="float32",
    )
    return replace(model, **changes)


def fake_engine(
    *,
    execute: Callable[[StepPlan], StepResult] | None = None,
    num_pages: int = 64,
    page_size: int = 4,
    max_running: int = 8,
    record_events: bool = False,
    prefix_cache: str = "radix",
    clock: Callable[[], float] = time.monotonic,
    wire: FakeWire | None = None,
    window: int | None = None,
    **scheduler: object,
) -> tuple[Engine, FakeDevice]:
    """Make a real engine (tokenizer, scheduler, pools) over a fake device. Context 128, no end-of-text id.

    Args: execute: runs a step at once, in place of the device's `launch`.
          wire: what its KV transfers go over; None: it takes part in none. window: the tokens that the model sees.
    """
    device = FakeDevice(
        num_slots=(num_pages + 1) * page_size, num_rows=max_running + 1, row_len=132, window=window
    )
    config = resolve(
        model_config(),
        Hardware(device="cpu", num_cpus=2, available_memory_bytes=1 << 30),
        cache=CacheConfig(page_size=page_size),
        scheduler=replace(SchedulerConfig(chunked_prefill_size=16), **scheduler),  # type: ignore[arg-type]
    )
    kv = KvCache(
        size=pool_of(num_pages, page_size),
        max_requests=max_running,
        context_len=128,
        cache=CacheConfig(prefix_cache=prefix_cache),
        record_events=record_events,
        clock=clock,
    )
    kv.window = window
    engine = Engine(
        config,
        kv=kv,
        max_running=max_running,
        executor=Executor(
            launch=device.launch if execute is None else at_once(execute),
            kv_bytes=FakeKvBytes(device, page_size=page_size),
        ),
        tokenizer=_tokenizer(),
        clock=clock,
        transfer=wire and (wire.join(device, page_size=page_size), PdTransferTerms(fingerprint="fake")),
    )
    return engine, device


def at_once(execute: Callable[[StepPlan], StepResult]) -> Callable[[StepPlan], DoneStep]:
    """Make a launch that runs the step to its end."""
    return lambda plan: DoneStep(execute(plan))


@functools.cache
def _tokenizer() -> Tokenizer:
    """Load the tokenizer once: it takes half a second and never changes."""
    return Tokenizer(MODEL)


def ask(rid: str, prompt: Sequence[int], **sampling: object) -> GenerateRequest:
    """Make a greedy request."""
    params = replace(SamplingParams(temperature=0.0, max_new_tokens=8), **sampling)  # type: ignore[arg-type]
    return GenerateRequest(rid=rid, token_ids=np.array(prompt, dtype=np.int32), sampling=params)


def choice_of(rid: str, prompt: Sequence[int], *, now_s: float = 0.0, max_new_tokens: int = 8, **request: Any) -> Req:
    """Make a greedy request in the scheduler's form; ``request``: other fields of `GenerateRequest`."""
    asked = replace(ask(rid, prompt, max_new_tokens=max_new_tokens), **request)
    return Req.make(asked, index=0, now_s=now_s, eos_ids=frozenset())


def finish_all(engine: Engine) -> list[TokenDelta]:
    """Step until idle. Returns: all deltas, in order."""
    deltas = []
    for _ in range(10_000):
        if not engine.has_work:
            return deltas
        deltas += engine.step()
    raise AssertionError(f"still busy: {engine.open_rids}")


def small_engine(
    model: str | Path, *, page: int = 16, tokens: int = 2048, chunk: int = 64, running: int = 8, tp: int = 1,
    context: int = 256, cache: Mapping[str, Any] | None = None, scheduler: Mapping[str, Any] | None = None, **more: Any,
) -> Engine:  # fmt: skip
    """Load ``model`` on one thread; ``cache``, ``scheduler`` and ``more`` are settings beside those that are named."""
    return load_engine(
        EngineSettings(
            model=str(model),
            cache=CacheConfig(page_size=page, max_total_tokens=tokens, **(cache or {})),
            scheduler=SchedulerConfig(chunked_prefill_size=chunk, max_running_requests=running, **(scheduler or {})),
            parallel=ParallelConfig(tp=tp),
            num_threads=1,
            context_len=context,
            **more,
        )
    )


def embedded_engine(overlap: Literal["on", "off"] = "off", *, tp: int = 1, model: str = MODEL) -> Engine:
    """Load the embedded model, or ``model``, into a pool of 256 pages; prompts are computed in chunks of 64 tokens."""
    return small_engine(model, tokens=4096, tp=tp, context=512, scheduler={"overlap": overlap})


@contextlib.contextmanager
def one_at_a_time(make: Callable[..., Engine]) -> Iterator[Callable[..., Engine]]:
    """Give what makes engines: the one before ends when another is asked for."""
    made: dict[object, Engine] = {}

    def of(*args: Any, **options: Any) -> Engine:
        key = (args, tuple(sorted(options.items())))
        if key not in made:
            end()
            made[key] = make(*args, **options)
        return made[key]

    def end() -> None:
        while made:
            made.popitem()[1].close()

    yield of
    end()
