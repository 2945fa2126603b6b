"""Decode, prefill and attention on a GPU, models with random weights, as shares of what the device itself can do.

    python -m benchmarks gpu [--quick] [--json FILE] [--shape NAME] [--what STEP ...] [--attention NAME ...] [--kv fp8]
    python -m benchmarks gpu attention
    python -m benchmarks gpu ten-minutes | report FILE   all that a GPU can show: benchmarks/gpu/ten_minutes.py

Needs no Ray. Limits are measured first: bytes a second of a large copy (read and written), bf16 operations a second of
a square product. A decode step reads the weights (of an embedding that is not also the head, only a few rows) and the
K and V of its contexts once: the limit is those bytes over the first. ``decode drawn``: the same, temperature 1 and
top-p 0.9. A prefill multiplies every token with all weights: the limit is 2 x parameters x tokens over the second.
``served``: the same engine through `EngineLoop`, a batch of prompts of the first context at once, greedy. Its step is
that of steady decode, from the last request's first token to the first request's last: steps overlap, and the host's
work for every token is included.
``served edited``: the same with penalties, a bias and logprobs, which overlap like the others.

`attention`: one layer by FlashInfer's FA2, by its FA3, by the one of them that is chosen, and by Triton, where they
differ. Llama-8B's heads in bf16, pages of 16; the forward alone, planning left out.

`elementwise`: the operations between the products of a layer in one launch each, beside PyTorch's. `ranks`: a decode
step of two ranks on two GPUs, from CUDA graphs and without. `operations`: the copies and launches of a decode step
beside its graph, counted on a GPU that is not there (tests/gpu/fake_cuda.py).

``--quick``: small shapes and a small pool on whatever device there is, to see that the benchmark itself works.
"""

import argparse
import gc
import math
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks import harness
from benchmarks.driver import runner_of
from benchmarks.gpu import ten_minutes
from benchmarks.gpu.random_model import SHAPES, TINY, Shape, start_engine
from benchmarks.harness import Part, Row, say, timed
from benchmarks.limits import ModelCost
from replicas.attention.base import AttentionBackend
from replicas.attention.choice import missing
from replicas.config import Attention
from replicas.engine.loop import EngineLoop
from replicas.errors import InvalidConfig
from replicas.kernels import gpu
from replicas.runner.model_runner import ModelRunner
from replicas.scheduler.plan import DecodePlan, ExtendPlan, ExtendRow, SampleRow, TableWrite
from replicas.types import GenerateRequest, SamplingParams, TokenDelta

REPEATS = 10
NUM_SERVED = 128  # tokens of each request through `EngineLoop`
SERVED_S = 300.0  # a batch that takes longer hangs
GREEDY = SamplingParams(temperature=0.0)
DRAWN = SamplingParams(temperature=1.0, top_p=0.9)
EDITED = {"repetition_penalty": 1.1, "frequency_penalty": 0.2, "logit_bias": ((1, 1.0),)}
HEADS = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}  # of the attention cases


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the device can do, measured."""

    bytes_per_s: float
    flop_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A step of attention: requests as (prefix, new tokens)."""

    name: str
    lengths: tuple[tuple[int, int], ...]


CASES = (
    Case(name="prefill 8k", lengths=((0, 8192),)),
    Case(name="128 over 32k", lengths=((32_768, 128),)),
    Case(name="16 x 512", lengths=((0, 512),) * 16),
)
TINY_CASES = (Case(name="tiny", lengths=((32, 9),)),)


def step_rows(options: argparse.Namespace) -> Iterator[Row]:
    """Measure every step of every shape. Raises: SystemExit without a GPU, unless it is a check."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not options.quick:
        raise SystemExit("no GPU is here; --quick checks the benchmark itself on a CPU")
    limits = measure_limits(device, size=256 if options.quick else 8192)
    _free(device)
    yield Row.of("limits of the device", "copy", [limits.bytes_per_s / 1e9], "GB/s")
    yield Row.of("limits of the device", "product", [limits.flop_per_s / 1e12], "TFLOP/s")
    batches, contexts, prompt = ((1, 4), (16, 64), 64) if options.quick else ((1, 16, 64, 256), (1024, 8192), 8192)
    batches = (options.batch,) if options.batch else batches
    for shape in (TINY,) if options.quick else SHAPES:
        if options.shape not in (None, shape.name):
            continue
        for attention in options.attention or ("auto",):
            try:
                yield from _of_shape(shape, attention, options, limits, batches, contexts, prompt)
            except InvalidConfig as error:  # a library that is not here
                yield Row(section=shape.name, name=attention, value=None, note=str(error))
            _free(device)


def _of_shape(
    shape: Shape, attention: Attention, options: argparse.Namespace, limits: Limits, batches: Sequence[int],
    contexts: Sequence[int], prompt: int,
) -> Iterator[Row]:  # fmt: skip
    """Measure the steps of one shape by one backend. Raises: InvalidConfig where that cannot run here."""
    engine = start_engine(
        shape, max_running=max(batches), max_len=max(contexts) + 2 * NUM_SERVED, kv_dtype=options.kv,
        attention=attention,
    )  # fmt: skip
    say(f"{shape.name}: attention {engine.started.attention.name}, {engine.started.attention.why}")
    if attention != "auto":
        shape = replace(shape, name=f"{shape.name} by {attention}")
    runner = runner_of(engine)
    cases = [("decode", batch, context) for context in contexts for batch in batches]
    cases += [("decode drawn", batch, contexts[0]) for batch in batches] + [("prefill", 1, prompt)]
    for what, batch, context in cases:
        if options.what and what not in options.what:
            continue
        if batch * context > runner.pool_size.num_tokens - batch * runner.pool.page_size:
            say(f"{shape.name} {what} batch {batch} context {context}: the pool is too small")
            continue
        yield from measure(shape, runner, limits, what, batch, context)
    if not options.what or "served" in options.what:
        loop = EngineLoop(engine)
        loop.start()
        yield from serve(shape, runner, loop, limits, batches, contexts[0])
        yield from serve(shape, runner, loop, limits, batches[-1:], contexts[0], edited=True)
        loop.stop()


def _free(device: torch.device) -> None:
    gc.collect()  # the model and its runner know each other
    if device.type == "cuda":
        torch.cuda.empty_cache()


def measure_limits(device: torch.device, *, size: int) -> Limits:
    """Time a copy of 16 x size^2 bytes, and a product of size^3, random numbers."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    source = torch.randn(4 * size * size, device=device)
    target, a = torch.empty_like(source), torch.randn(size, size, device=device).to(dtype)
    copy_s, product_s = _median_s(lambda: target.copy_(source), device), _median_s(lambda: a @ a, device)
    return Limits(bytes_per_s=2 * source.nbytes / copy_s, flop_per_s=2 * size**3 / product_s)


def measure(shape: Shape, runner: ModelRunner, limits: Limits, what: str, batch: int, context: int) -> list[Row]:
    """Time REPEATS steps after two that warm up; every step is waited for, so nothing overlaps.

    The table is written by a step before them, as it was when such requests came.
    """
    plan: DecodePlan | ExtendPlan
    if what == "prefill":
        plan, least_s = prefill_plan(runner, context), 2 * ModelCost.of(shape.model_config()).layer_params * context
        least_s /= limits.flop_per_s
    else:
        plan = decode_plan(runner, batch, context, GREEDY if what == "decode" else DRAWN)
        runner.launch(plan).result()
        plan, least_s = replace(plan, table_writes=()), least_decode_s(shape, runner, limits, batch, context)
    steps, hosts = [], []
    for _ in range(REPEATS + 2):
        started_s = time.perf_counter()
        pending = runner.launch(plan)
        hosts.append(time.perf_counter() - started_s)
        pending.result()
        steps.append(time.perf_counter() - started_s)
    made = context if what == "prefill" else batch
    return _rows(shape, what, batch, context, steps[2:], hosts[2:], least_s=least_s, made=made)


def _rows(
    shape: Shape, what: str, batch: int, context: int, steps: Sequence[float], hosts: Sequence[float], *,
    least_s: float, made: int,
) -> list[Row]:  # fmt: skip
    """Return a step's line: until its tokens are on the host, of it what `launch` took, and its share of the limit."""
    name, step_s = f"{what}, batch {batch}, context {context}", statistics.median(steps)
    say(f"{shape.name}, {name}: {1e3 * step_s:.3f} ms")
    rows = [Row.of(shape.name, name, [1e3 * each for each in steps], "ms", figure="step")]
    if hosts:
        rows.append(Row.of(shape.name, name, [1e3 * each for each in hosts], "ms", figure="host"))
    rows.append(Row.of(shape.name, name, [100 * least_s / step_s], "%", figure="of the limit"))
    return [*rows, Row.of(shape.name, name, [made / step_s], "tokens/s", figure="rate")]


def least_decode_s(shape: Shape, runner: ModelRunner, limits: Limits, batch: int, context: int) -> float:
    """Return the least time of a step that reads the weights and ``batch`` contexts once."""
    cell_bytes = runner.pool.page_bytes / runner.pool.page_size
    weights = runner.weight_bytes - (0 if shape.tied else shape.embedding_bytes(runner.pool.dtype))
    return (weights + batch * context * cell_bytes) / limits.bytes_per_s


def serve(
    shape: Shape, runner: ModelRunner, loop: EngineLoop, limits: Limits, batches: Sequence[int], context: int, *,
    edited: bool = False,
) -> Iterator[Row]:  # fmt: skip
    """Measure ``served`` or ``served edited`` for each batch that the pool holds."""
    what, random = "served edited" if edited else "served", np.random.default_rng(edited)
    params = SamplingParams(temperature=0.0, max_new_tokens=NUM_SERVED, ignore_eos=True)
    if edited:
        params = replace(params, **EDITED)
    for batch in batches:
        if batch * (context + NUM_SERVED + runner.pool.page_size) > runner.pool_size.num_tokens:
            continue
        ended, told_s = threading.Semaphore(0), list[list[float]]()

        def sink(
            deltas: list[TokenDelta], ended: threading.Semaphore = ended, told_s: list[list[float]] = told_s
        ) -> None:
            now_s = time.perf_counter()
            for delta in deltas:
                told_s[int(delta.rid.rpartition(" ")[2])].extend([now_s] * len(delta.token_ids))
                if delta.finish is not None:
                    ended.release()

        for i in range(batch):
            told_s.append([])
            ids = random.integers(0, shape.vocab_size, context).astype(np.int32)  # no prefix is shared
            request = GenerateRequest(rid=f"{what} {batch} {i}", token_ids=ids, sampling=params)
            loop.submit(replace(request, return_logprobs=edited, top_logprobs=5 * edited), sink)
        for _ in range(batch):
            if not ended.acquire(timeout=SERVED_S):
                raise SystemExit(f"{shape.name}: a batch of {batch} is not done after {SERVED_S} s: {loop.error}")
        step_s = steady_step_s(told_s)
        if step_s is None:
            say(f"{shape.name}, {what}, batch {batch}: a request ended before the last one began")
            continue
        least_s = least_decode_s(shape, runner, limits, batch, context)
        yield from _rows(shape, what, batch, context, [step_s], [], least_s=least_s, made=batch)


def steady_step_s(told_s: Sequence[Sequence[float]]) -> float | None:
    """Return the seconds of a step while all requests decode; None if they never all did.

    Args: told_s: of each request, when each of its tokens came.
    """
    begin_s, end_s = max(each[0] for each in told_s), min(each[-1] for each in told_s)
    steps = sum(begin_s < at_s <= end_s for each in told_s for at_s in each) / len(told_s)
    return (end_s - begin_s) / steps if steps > 1 else None


def decode_plan(runner: ModelRunner, batch: int, context: int, params: SamplingParams) -> DecodePlan:
    """Return ``batch`` requests at the end of ``context`` tokens each, on pages of their own that hold zeros."""
    page_size = runner.pool.page_size
    per_request = math.ceil(context / page_size) * page_size
    slots = page_size + np.arange(batch * per_request, dtype=np.int32).reshape(batch, per_request)
    return DecodePlan(
        table_writes=tuple(TableWrite(b + 1, 0, slots[b, :context]) for b in range(batch)),
        rows=np.arange(1, batch + 1, dtype=np.int32),
        token_ids=np.ones(batch, np.int32),
        seq_lens=np.full(batch, context, np.int32),
        slots=slots[:, context - 1].copy(),
        sampling=tuple(_sampling(context, params) for _ in range(batch)),
    )


def prefill_plan(runner: ModelRunner, num_tokens: int) -> ExtendPlan:
    """Return one prompt of ``num_tokens`` in one step."""
    slots = runner.pool.page_size + np.arange(num_tokens, dtype=np.int32)
    ids = np.arange(num_tokens, dtype=np.int32) % 100
    row = ExtendRow(row=1, token_ids=ids, prefix_len=0, slots=slots, sample=True)
    return ExtendPlan(table_writes=(TableWrite(1, 0, slots),), rows=(row,), sampling=(_sampling(num_tokens, GREEDY),))


def _sampling(position: int, params: SamplingParams) -> SampleRow:
    none = np.empty(0, np.int32)
    return SampleRow(
        params=params, position=position, num_output=0, stop_ids=frozenset(), prompt_ids=none, output_ids=none
    )


def _median_s(work: Callable[[], object], device: torch.device, repeats: int = REPEATS) -> float:
    def waited() -> None:
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()

    return statistics.median(timed(waited, repeats))


def elementwise_rows(options: argparse.Namespace) -> Iterator[Row]:
    """Measure Llama-8B's rows of 4,096 and 14,336; without a GPU PyTorch's alone, to see that it works."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    weight = torch.ones(4096, device=device, dtype=dtype)
    for num in (1, 4) if options.quick else (1, 64, 8192):
        x, gate_up = (torch.randn(num, size, device=device, dtype=dtype) for size in (4096, 2 * 14_336))
        term = torch.zeros_like(x)
        ways: dict[str, dict[str, Callable[[], object]]] = {
            "add and norm": {"pytorch": lambda x=x, term=term: F.rms_norm(x.add_(term), (4096,), weight, 1e-5)},
            "silu x up": {"pytorch": lambda y=gate_up: F.silu(y[:, :14_336]).mul_(y[:, 14_336:])},
        }
        if gpu.serves(x):
            ways["add and norm"]["fused"] = lambda x=x, term=term: gpu.add_rms_norm(x, term, weight, 1e-5)
            ways["silu x up"]["fused"] = lambda y=gate_up: gpu.silu_mul(y)
        for name, by_way in ways.items():
            for way, work in by_way.items():
                work()
                taken = [1e6 * _median_s(work, device)]
                yield Row.of("between products", f"{name}, {num} tokens", taken, "us", figure=way)


def rank_rows(options: argparse.Namespace) -> Iterator[Row]:
    """Measure decode on two ranks, with graphs and without. Raises: SystemExit without two GPUs, unless it checks."""
    if torch.cuda.device_count() < 2 and not (options.quick and not torch.cuda.is_available()):
        raise SystemExit("two GPUs are wanted, and fewer are here")
    shape, batches, context = (TINY, (1, 4), 16) if options.quick else (SHAPES[0], (1, 16, 64), 1024)
    for way, graphs in (("graphs", True), ("eager", False)):
        engine = start_engine(shape, max_running=max(batches), max_len=2 * context, tp=2, cuda_graphs=graphs)
        for batch in batches:
            plan = decode_plan(runner_of(engine), batch, context, GREEDY)
            engine.steps.launch(plan).result()
            plan, times = replace(plan, table_writes=()), []
            for _ in range(REPEATS + 2):
                started_s = time.perf_counter()
                engine.steps.launch(plan).result()
                times.append(1e3 * (time.perf_counter() - started_s))
            yield Row.of("two ranks", f"decode, batch {batch}, context {context}", times[2:], "ms", figure=way)
        engine.close()
        del engine
        _free(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def operation_rows(options: argparse.Namespace) -> Iterator[Row]:
    """Count the device's operations between two replays of decode steps. Raises: SystemExit with a GPU."""
    if torch.cuda.is_available():
        raise SystemExit("counted where no GPU is seen: CUDA_VISIBLE_DEVICES= python -m benchmarks gpu operations")
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
    import pytest

    from tests.gpu import fake_cuda, flashinfer_stand_in

    shape, num = replace(TINY, head_dim=64, num_layers=1), 8
    backends: tuple[Attention, ...] = ("flashinfer", "triton")
    for attention in backends:
        with pytest.MonkeyPatch.context() as patch:
            fake = fake_cuda.install(patch)
            flashinfer_stand_in.install(patch)
            engine = start_engine(shape, max_running=2, max_len=64, attention=attention)
            for name, params in (("greedy", GREEDY), ("drawn", DRAWN)):
                params = replace(params, max_new_tokens=num, ignore_eos=True)
                with fake.noting() as noted:
                    for rid in ("a", "b"):
                        engine.submit(GenerateRequest(rid=rid, token_ids=np.arange(2, dtype=np.int32), sampling=params))
                    while engine.has_work:
                        engine.step()
                between = noted[1:-1]  # two replays
                note = ", ".join(statistics.mode(tuple(each) for each in between))
                counts = [len(each) for each in between]
                yield Row.of("between two replays", f"{name} by {attention}", counts, "operations", note=note)
            engine.close()


def attention_rows(options: argparse.Namespace) -> Iterator[Row]:
    """Measure a layer by each backend. Raises: SystemExit without a GPU."""
    if not torch.cuda.is_available():
        raise SystemExit("no GPU is here")
    for case, by_backend in attention_s(TINY_CASES if options.quick else CASES, HEADS, repeats=20).items():
        for name, seconds in by_backend.items():
            yield Row.of("a layer of attention", case, [1e6 * seconds], "us", figure=name)


def attention_s(cases: Sequence[Case], heads: Mapping[str, int], *, repeats: int) -> dict[str, dict[str, float]]:
    """Return the seconds of a layer's forward, by case and backend."""
    from replicas.attention.triton_paged import TritonAttention
    from tests.attention_steps import Step
    from tests.gpu.device_steps import device_step

    backends: dict[str, Callable[[Step], AttentionBackend]] = {}
    if (reason := missing("flashinfer")) is not None:
        say(f"Triton alone: flashinfer {reason}")
    else:
        from replicas.attention.flashinfer import FlashInferAttention

        backends = {
            name: partial(_flashinfer, FlashInferAttention, heads, prefill)
            for name, prefill in (("fa2", "fa2"), ("fa3", "fa3"), ("chosen", None))
        }
    backends["triton"] = lambda step: TritonAttention(step.pool, **heads)
    found: dict[str, dict[str, float]] = {case.name: {} for case in cases}
    for case in cases:
        for name, make in backends.items():
            step = device_step(list(case.lengths), dtype=torch.bfloat16, device="cuda", page_size=16, **heads)
            backend = make(step)
            backend.begin(step.batch)

            def forward(backend: AttentionBackend = backend, step: Step = step) -> None:
                backend.forward(0, step.q, step.k, step.v)

            torch.cuda.synchronize()
            found[case.name][name] = _median_s(forward, torch.device("cuda"), repeats)
    return found


def _flashinfer(make: Any, heads: Mapping[str, int], prefill: str | None, step: Any) -> AttentionBackend:
    """Return FlashInfer's backend of a step, with this kind of prefill."""
    backend: AttentionBackend = make(step.pool, dtype=torch.bfloat16, prefill=prefill, **heads)
    return backend


def _add_options(parse: argparse.ArgumentParser) -> None:
    parse.add_argument("--shape", help="this one alone, as in llama-8b")
    parse.add_argument("--what", action="append", help="these steps alone: decode, decode drawn, prefill, served")
    parse.add_argument("--attention", action="append", help="by these backends in turn, as in flashinfer and triton")
    parse.add_argument("--kv", choices=("fp8",), help="K and V in 8 bits, in place of the model's dtype")
    parse.add_argument("--batch", type=int, help="this number of requests alone")


PARTS = {
    "steps": Part(about="decode, prefill and the engine's loop", measure=step_rows),
    "elementwise": Part(about="what lies between a layer's products, fused and by PyTorch", measure=elementwise_rows),
    "operations": Part(about="the device's, between two replays of decode", measure=operation_rows, asked=True),
    "attention": Part(about="one layer by FA2, FA3 and Triton", measure=attention_rows, asked=True),
    "ranks": Part(about="decode of two ranks, from CUDA graphs and without", measure=rank_rows, asked=True),
}


def main(argv: Sequence[str] | None = None) -> int | None:
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in ("ten-minutes", "report"):
        return ten_minutes.main(argv)
    harness.run("gpu", __doc__, PARTS, argv, options=_add_options)
    return None


if __name__ == "__main__":
    sys.exit(main())
