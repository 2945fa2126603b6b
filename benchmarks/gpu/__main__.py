"""Decode and prefill of models with random weights, as shares of what the device itself can do. Needs no Ray.

    python -m benchmarks.gpu [--tiny] [--json FILE] [--model NAME] [--what STEP] [--batch N]

Limits are measured first: bytes a second of a large copy (read and written), bf16 operations a second of a square
product. A decode step reads the weights (of an embedding that is not also the head, only a few rows) and the K and V of
its contexts once: the limit is those bytes over the first. ``decode drawn``: the same, temperature 1 and top-p 0.9.
A prefill multiplies every token with all weights: the limit is 2 x parameters x tokens over the second.
``served``: the same engine through `EngineLoop`, a batch of prompts of the first context at once, greedy; its step is
the time of all over the tokens of each, prefill and the host's work for every token included, against decode's limit.
``--tiny``: small shapes and a small pool on whatever device there is, to see that the benchmark itself works.
"""

import argparse
import gc
import json
import math
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.gpu.random_model import SHAPES, TINY, Shape, runner_of, start_engine
from benchmarks.limits import ModelCost
from replicas.engine.engine import Engine
from replicas.engine.loop import EngineLoop
from replicas.runner.model_runner import ModelRunner
from replicas.scheduler.plan import DecodePlan, ExtendPlan, ExtendRow, SampleRow, TableWrite
from replicas.types import GenerateRequest, SamplingParams, TokenDelta

REPEATS = 10
NUM_SERVED = 64  # tokens of each request through `EngineLoop`
SERVED_S = 300.0  # a batch that takes longer hangs
GREEDY = SamplingParams(temperature=0.0)
DRAWN = SamplingParams(temperature=1.0, top_p=0.9)  # whole rows are sorted


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of the device, measured."""

    bytes_per_s: float
    flop_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measurement."""

    model: str
    what: str  # decode, decode drawn, prefill, served
    batch: int
    context: int
    step_s: float  # median, until the tokens are on the host
    host_s: float  # median time that `launch` took: what the host does for a step; 0 for served
    share: float  # of the limit
    tokens_per_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--model", help="this one alone, as in llama-8b")
    parser.add_argument("--what", help="these steps alone: decode, decode drawn, prefill, served")
    parser.add_argument("--batch", type=int, help="of so many requests alone")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not args.tiny:
        raise SystemExit("no GPU is here; --tiny checks the benchmark itself on a CPU")
    limits = measure_limits(device, size=256 if args.tiny else 8192)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # of the limits' tensors
    print(f"copy {limits.bytes_per_s / 1e9:,.0f} GB/s, product {limits.flop_per_s / 1e12:,.1f} TFLOP/s")
    rows = []
    batches, contexts, prompt = ((1, 4), (16, 64), 64) if args.tiny else ((1, 16, 64, 256), (1024, 8192), 8192)
    if args.batch:
        batches = (args.batch,)
    for shape in (TINY,) if args.tiny else SHAPES:
        if args.model not in (None, shape.name):
            continue
        engine = start_engine(shape, max_running=max(batches), max_len=max(contexts) + 2 * NUM_SERVED)
        print(f"{shape.name}: attention {engine.started.attention.name}, {engine.started.attention.why}")
        runner = runner_of(engine)
        cases = [("decode", batch, context) for context in contexts for batch in batches]
        cases += [("decode drawn", batch, contexts[0]) for batch in batches] + [("prefill", 1, prompt)]
        for what, batch, context in cases:
            if args.what not in (None, what):
                continue
            if batch * context > runner.pool_size.num_tokens - batch * runner.pool.page_size:
                print(f"{shape.name} {what} batch {batch} context {context}: the pool is too small")
                continue
            rows.append(measure(shape, runner, limits, what, batch, context))
            print(describe(rows[-1]), flush=True)
        if args.what in (None, "served"):
            rows += serve(shape, engine, limits, batches, contexts[0])
        del engine, runner
        gc.collect()  # the model and its runner know each other
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"limits": asdict(limits), "rows": [asdict(row) for row in rows]}, indent=1))


def measure_limits(device: torch.device, *, size: int) -> Limits:
    """A copy of 16 x size^2 bytes, and a product of size^3, random numbers."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    source = torch.randn(4 * size * size, device=device)
    target, a = torch.empty_like(source), torch.randn(size, size, device=device).to(dtype)
    copy_s = _median_s(lambda: target.copy_(source), device)
    product_s = _median_s(lambda: a @ a, device)
    return Limits(bytes_per_s=2 * source.nbytes / copy_s, flop_per_s=2 * size**3 / product_s)


def measure(shape: Shape, runner: ModelRunner, limits: Limits, what: str, batch: int, context: int) -> Row:
    """The median of REPEATS steps after two that warm up; every step is waited for, so nothing overlaps. The table is
    written by a step before them, as it was when such requests came."""
    plan: DecodePlan | ExtendPlan
    if what == "prefill":
        plan = prefill_plan(runner, context)
    else:
        plan = decode_plan(runner, batch, context, GREEDY if what == "decode" else DRAWN)
        runner.launch(plan).result()
        plan = replace(plan, table_writes=())
    steps, hosts = [], []
    for _ in range(REPEATS + 2):
        started_s = time.perf_counter()
        pending = runner.launch(plan)
        hosts.append(time.perf_counter() - started_s)
        pending.result()
        steps.append(time.perf_counter() - started_s)
    step_s, host_s = statistics.median(steps[2:]), statistics.median(hosts[2:])
    if what != "prefill":
        least_s = least_decode_s(shape, runner, limits, batch, context)
        return Row(
            model=shape.name, what=what, batch=batch, context=context, step_s=step_s, host_s=host_s,
            share=least_s / step_s, tokens_per_s=batch / step_s,
        )  # fmt: skip
    least_s = 2 * ModelCost.of(shape.model_config()).layer_params * context / limits.flop_per_s
    return Row(
        model=shape.name, what=what, batch=batch, context=context, step_s=step_s, host_s=host_s,
        share=least_s / step_s, tokens_per_s=context / step_s,
    )  # fmt: skip


def least_decode_s(shape: Shape, runner: ModelRunner, limits: Limits, batch: int, context: int) -> float:
    """Of a step that reads the weights and ``batch`` contexts once."""
    cell_bytes = runner.pool.page_bytes / runner.pool.page_size
    weights = runner.weight_bytes - (0 if shape.tied else shape.embedding_bytes(runner.pool.dtype))
    return (weights + batch * context * cell_bytes) / limits.bytes_per_s


def serve(shape: Shape, engine: Engine, limits: Limits, batches: Sequence[int], context: int) -> list[Row]:
    """``served`` for each batch that the pool holds; the engine ends with it."""
    runner, loop, rows = runner_of(engine), EngineLoop(engine), []
    loop.start()
    random = np.random.default_rng(0)
    for batch in batches:
        if batch * (context + NUM_SERVED + runner.pool.page_size) > runner.pool_size.num_tokens:
            continue
        ended = threading.Semaphore(0)

        def sink(deltas: list[TokenDelta], ended: threading.Semaphore = ended) -> None:
            for delta in deltas:
                if delta.finish is not None:
                    ended.release()

        params = SamplingParams(temperature=0.0, max_new_tokens=NUM_SERVED, ignore_eos=True)
        started_s = time.perf_counter()
        for i in range(batch):
            ids = random.integers(0, shape.vocab_size, context).astype(np.int32)  # nobody shares a prefix
            loop.submit(GenerateRequest(rid=f"{batch} {i}", token_ids=ids, sampling=params), sink)
        for _ in range(batch):
            if not ended.acquire(timeout=SERVED_S):
                raise SystemExit(f"{shape.name}: a batch of {batch} is not done after {SERVED_S} s: {loop.error}")
        step_s = (time.perf_counter() - started_s) / NUM_SERVED
        least_s = least_decode_s(shape, runner, limits, batch, context)
        row = Row(
            model=shape.name, what="served", batch=batch, context=context, step_s=step_s, host_s=0.0,
            share=least_s / step_s, tokens_per_s=batch / step_s,
        )  # fmt: skip
        rows.append(row)
        print(describe(rows[-1]), flush=True)
    loop.stop()
    return rows


def decode_plan(runner: ModelRunner, batch: int, context: int, params: SamplingParams) -> DecodePlan:
    """``batch`` requests at the end of ``context`` tokens each, on pages of their own that hold zeros."""
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
    """One prompt of ``num_tokens`` in one step."""
    slots = runner.pool.page_size + np.arange(num_tokens, dtype=np.int32)
    ids = np.arange(num_tokens, dtype=np.int32) % 100
    row = ExtendRow(row=1, token_ids=ids, prefix_len=0, slots=slots, sample=True)
    return ExtendPlan(table_writes=(TableWrite(1, 0, slots),), rows=(row,), sampling=(_sampling(num_tokens, GREEDY),))


def describe(row: Row) -> str:
    return (
        f"{row.model:14} {row.what:12} batch {row.batch:4} context {row.context:6}: {row.step_s * 1e3:9.3f} ms, "
        f"{row.share:5.0%} of the limit, {row.tokens_per_s:10,.0f} tokens/s, host {row.host_s * 1e3:7.3f} ms"
    )


def _sampling(position: int, params: SamplingParams) -> SampleRow:
    none = np.empty(0, np.int32)
    return SampleRow(
        params=params, position=position, num_output=0, stop_ids=frozenset(),
        prompt_ids=none, output_ids=none,
    )  # fmt: skip


def _median_s(work: Callable[[], object], device: torch.device) -> float:
    times = []
    for _ in range(REPEATS + 2):
        if device.type == "cuda":
            torch.cuda.synchronize()
        started_s = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started_s)
    return statistics.median(times[2:])


if __name__ == "__main__":
    main()
