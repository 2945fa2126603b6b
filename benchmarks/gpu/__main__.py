"""Decode and prefill of models with random weights, as shares of what the device itself can do. Needs no Ray.

    python -m benchmarks.gpu [--tiny] [--json FILE]

Limits are measured first: bytes a second of a large copy (read and written), bf16 operations a second of a square
product. A decode step reads the weights (of an embedding that is not also the head, only a few rows) and the K and V of
its contexts once: the limit is those bytes over the first. ``decode drawn``: the same, temperature 1 and top-p 0.9.
A prefill multiplies every token with all weights: the limit is 2 x parameters x tokens over the second.
``--tiny``: small shapes and a small pool on whatever device there is, to see that the benchmark itself works.
"""

import argparse
import gc
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.cost import ModelCost
from benchmarks.gpu.random_model import SHAPES, TINY, Shape, make_runner
from replicas.runner.model_runner import ModelRunner
from replicas.scheduler.plan import DecodePlan, ExtendPlan, ExtendRow, SampleRow, TableWrite
from replicas.types import SamplingParams

REPEATS = 10
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
    what: str  # decode, decode drawn, prefill
    batch: int
    context: int
    step_s: float  # median, until the tokens are on the host
    host_s: float  # median time that `launch` took: what the host does for a step
    share: float  # of the limit
    tokens_per_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path)
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
    for shape in (TINY,) if args.tiny else SHAPES:
        runner = make_runner(shape, device, max_running=max(batches), max_len=max(contexts) + 64)
        cases = [("decode", batch, context) for context in contexts for batch in batches]
        cases += [("decode drawn", batch, contexts[0]) for batch in batches] + [("prefill", 1, prompt)]
        for what, batch, context in cases:
            if batch * context > runner.pool_size.num_tokens - batch * runner.pool.page_size:
                print(f"{shape.name} {what} batch {batch} context {context}: the pool is too small")
                continue
            rows.append(measure(shape, runner, limits, what, batch, context))
            print(describe(rows[-1]), flush=True)
        del runner
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
        cell_bytes = runner.pool.page_bytes / runner.pool.page_size
        weights = runner.weight_bytes - (0 if shape.tied else shape.embedding_bytes(runner.pool.dtype))
        least_s = (weights + batch * context * cell_bytes) / limits.bytes_per_s
        return Row(
            model=shape.name, what=what, batch=batch, context=context, step_s=step_s, host_s=host_s,
            share=least_s / step_s, tokens_per_s=batch / step_s,
        )  # fmt: skip
    least_s = 2 * ModelCost.of(shape.model_config()).layer_params * context / limits.flop_per_s
    return Row(
        model=shape.name, what=what, batch=batch, context=context, step_s=step_s, host_s=host_s,
        share=least_s / step_s, tokens_per_s=context / step_s,
    )  # fmt: skip


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
