"""The CPU kernels against the machine's limits, in one run, and what narrow numbers cost in accuracy.

Shapes are SmolLM2-135M's: 30 layers, 9 query and 3 KV heads of 64, hidden 576, MLP 1536; pages of 16, shuffled. Work
walks over more memory than the caches hold, as a step does; int8 products run as in the model, as stages of one
program. A product's limit is the time to read its weights or, where that is longer, to do the operations at the rate
of PyTorch's product of 2048 x 2048 matrices; a kernel that beats that has more than 100 %.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from benchmarks import accuracy, harness
from benchmarks.harness import Part, Row, Table, timed
from benchmarks.limits import GEMM_SIZE, Limits
from replicas.attention.cpu import CpuAttention
from replicas.kernels import elementwise
from replicas.kernels.linear import LinearKernel
from replicas.kernels.program import Program
from replicas.kernels.team import team
from replicas.layers.int8 import Int8Matmul, describe
from tests.attention_steps import Step, make_step

NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 30, 9, 3, 64
LINEARS = {"qkv": (960, 576), "o": (576, 576), "gate and up": (3072, 576), "down": (576, 1536)}
ROWS = (1, 8, 32, 256, 1024)
INT8_ROWS = (1, 8, 32, 512)
RUNS = 5
TOKEN_BYTES = 2 * NUM_KV_HEADS * HEAD_DIM * 4  # K and V of a layer in float32
MAX_KV_BYTES = 1.8e9
WEIGHT_BYTES = 100e6  # copies of a weight to walk over
READY = """
from replicas.attention import cpu_decode, cpu_extend
from replicas.kernels import elementwise, int8, int8_tiles, linear, program, widened
for kernel in (
    cpu_decode.decode, cpu_extend.extend, linear.few_rows, linear.many_rows, elementwise.rms_norm_rows,
    elementwise.silu_mul_rows, elementwise.rotate_rows, elementwise.argmax_rows, program._run_stages,
    int8.product if int8_tiles.cpu_has_vnni() else widened.product,
):
    kernel.address
"""


def limit_rows(options: argparse.Namespace) -> list[Row]:
    """Measure attention and products of float32, the machine's limits first."""
    torch.set_num_threads(options.threads)
    limits = Limits(options.threads)
    rows: list[Row] = []
    for _ in range(1 if options.quick else 3):
        limits.sample()  # one sample in a busy moment would spoil every share
    for part in (decode_rows, shared_rows, kv_dtype_rows, extend_rows, linear_rows, elementwise_rows):
        limits.sample()
        rows += part(limits, options.threads, quick=options.quick)
    limits.sample()
    return limits.rows() + rows


def decode_rows(limits: Limits, threads: int, *, quick: bool) -> list[Row]:
    """Measure the bytes of K and V read a second, and what one layer costs beside them."""
    table = Table("decode attention, a layer")
    shapes = [(batch, context, 16) for batch in (1, 8, 32) for context in (128, 1100, 4000)]
    shapes += [(batch, 1100, page_size) for page_size in (1, 64) for batch in (1, 32)]
    for batch, context, page_size in shapes[:2] if quick else shapes:
        times = attention_s(decode_step(batch, context, page_size=page_size), threads)
        rates = [batch * context * TOKEN_BYTES / t / 1e9 for t in times]
        name, micros = f"batch {batch} x {context:,}, pages of {page_size}", f"{1e6 * statistics.median(times):.1f} us"
        table.add(name, rates, "GB/s", limit=limits.median_bandwidth / 1e9, target=">= 70 %", note=micros)
    table.add("one token of context", [1e6 * t for t in attention_s(decode_step(1, 1), threads)], "us", target="< 30")
    return table.rows


def shared_rows(limits: Limits, threads: int, *, quick: bool) -> list[Row]:
    """Measure a prefix that all requests have in common, read for each and read once."""
    table = Table("decode over a shared prefix and 64 tokens of one's own, a layer")
    shapes = ((2, 128), (2, 1024), (8, 128), (8, 1024), (32, 1024))
    for batch, shared in shapes[:1] if quick else shapes:
        step = decode_step(batch, shared + 64, shared=[(list(range(batch)), shared)])
        together = attention_s(step, threads)
        step.batch.prefix_groups = ()
        apart = statistics.median(attention_s(step, threads))
        rates = [4 * batch * NUM_HEADS * HEAD_DIM * (shared + 64) / t / 1e9 for t in together]
        note = f"{1e6 * statistics.median(together):.0f} us; each by itself {1e6 * apart:.0f} us"
        name = f"{batch} requests, {shared:,} shared"
        table.add(name, rates, "GFLOP/s", limit=limits.median_flops / 1e9, note=note)
    return table.rows


def kv_dtype_rows(limits: Limits, threads: int, *, quick: bool) -> list[Row]:
    """Measure the same decode step over narrower pools; the share is that of the bytes which are then read."""
    batch = 4 if quick else 32
    table, exact = Table(f"decode attention by cache.kv_dtype, batch {batch} x 1,100 tokens, a layer"), 0.0
    for kv_dtype, token_bytes in (("float32", 1536), ("bfloat16", 768), ("int8", 408), ("fp8", 408)):
        times = attention_s(decode_step(batch, 1100, kv_dtype=kv_dtype), threads)
        median = statistics.median(times)
        exact = exact or median
        rates = [batch * 1100 * token_bytes / t / 1e9 for t in times]
        note = f"{1e6 * median:.0f} us, {exact / median:.2f} x"
        table.add(kv_dtype, rates, "GB/s", limit=limits.median_bandwidth / 1e9, note=note)
    return table.rows


def decode_step(
    batch: int,
    context: int,
    *,
    page_size: int = 16,
    shared: Sequence[tuple[list[int], int]] = (),
    kv_dtype: str = "float32",
) -> Step:
    """Return ``batch`` requests of ``context`` tokens, the new one included; fewer layers where memory is too small."""
    layers = min(NUM_LAYERS, max(1, int(MAX_KV_BYTES / (batch * context * TOKEN_BYTES))))
    lengths = [(context - 1, 1)] * batch
    return make_step(lengths, num_layers=layers, page_size=page_size, shared=shared, kv_dtype=kv_dtype)


def extend_rows(limits: Limits, threads: int, *, quick: bool) -> list[Row]:
    """Measure the multiply-adds of the causal half a second."""
    table = Table("extend attention, a layer")
    cases = ([(0, 256)], [(0, 512)], [(0, 1024)], [(1024, 256)], [(1024, 1024)], [(1024, 64)] * 8)
    for lengths in cases[:1] if quick else cases:
        times = attention_s(make_step(lengths, num_layers=NUM_LAYERS), threads)
        flops = sum(4 * NUM_HEADS * HEAD_DIM * (prefix * new + new * (new + 1) / 2) for prefix, new in lengths)
        name = f"{len(lengths)} x {lengths[0][1]:,} new tokens over {lengths[0][0]:,}"
        rates = [flops / t / 1e9 for t in times]
        table.add(name, rates, "GFLOP/s", limit=limits.median_flops / 1e9, target=">= 70 %")
    return table.rows


def attention_s(step: Step, threads: int) -> list[float]:
    """Return the seconds a layer of each run; a run is a step of all layers."""
    heads = {"num_heads": NUM_HEADS, "num_kv_heads": NUM_KV_HEADS, "head_dim": HEAD_DIM}
    backend = CpuAttention(step.pool, dtype=torch.float32, num_threads=threads, **heads)

    def run() -> None:
        backend.begin(step.batch)
        for layer in range(step.num_layers):
            backend.forward(layer, step.q, step.k, step.v)

    return [t / step.num_layers for t in timed(run, RUNS)]


def linear_rows(limits: Limits, threads: int, *, quick: bool) -> list[Row]:
    """Measure our product and PyTorch's, by rows; one row of input is bound by memory, many by arithmetic."""
    rows = []
    for name, (n, k) in list(LINEARS.items())[: 1 if quick else None]:
        table, weights = Table(f"linear, {name}"), [torch.randn(n, k) for _ in range(int(WEIGHT_BYTES / (4 * n * k)))]
        for m in ROWS:
            used, x = (weights if m <= 32 else weights[:8]), torch.randn(m, k)
            kernels = [LinearKernel(weight, team(threads)) for weight in used]
            ours = timed(lambda kernels=kernels, x=x: [kernel(x) for kernel in kernels], RUNS)
            theirs = timed(lambda used=used, x=x: [F.linear(x, weight) for weight in used], RUNS)
            flops, num_bytes = 2 * m * n * k * len(used), 4 * n * k * len(used)
            limit = flops / max(flops / limits.median_flops, num_bytes / limits.median_bandwidth) / 1e9
            note = f"F.linear {flops / statistics.median(theirs) / 1e9:.0f}"
            table.add(f"{m:,} rows", [flops / t / 1e9 for t in ours], "GFLOP/s", limit=limit, note=note)
        rows += table.rows
    return rows


def elementwise_rows(limits: Limits, threads: int, *, quick: bool) -> list[Row]:
    """Measure what one block spends between its products: two norms, SiLU, rope."""
    table, weight = Table(f"norm, SiLU, rope of a block, {threads} threads"), torch.ones(576)
    for m in ROWS[:2] if quick else ROWS:
        hidden, gate_up, heads = torch.randn(m, 576), torch.randn(m, 3072), torch.randn(m, 12, HEAD_DIM)
        angle = torch.randn(m, 1, HEAD_DIM)
        works: list[Callable[[], object]] = [
            lambda x=hidden: elementwise.rms_norm(x, weight, 1e-5),  # type: ignore[misc]
            lambda x=heads, angle=angle: elementwise.rotate(x, angle, angle),  # type: ignore[misc]
            lambda x=hidden: elementwise.rms_norm(x, weight, 1e-5),  # type: ignore[misc]
            lambda x=gate_up: elementwise.silu_mul(x),  # type: ignore[misc]
        ]
        times = [sum(statistics.median(timed(work, RUNS)) for work in works) for _ in range(RUNS)]
        table.add(f"{m:,} rows", [1e6 * t for t in times], "us")
    return table.rows


def int8_rows(options: argparse.Namespace) -> list[Row]:
    """Measure int8 products, operations a second, and in the note the bytes of weights read a second."""
    threads = options.threads
    torch.set_num_threads(threads)
    limits, rates, rows = Limits(threads), [_int_mm_rate()], list[Row]()
    limits.sample()
    shapes = LINEARS | {"head": (49152, 576)}
    for name, (n, k) in list(shapes.items())[: 1 if options.quick else None]:
        table, weight = Table(f"int8 product, {name}"), torch.randn(n, k)
        products = [Int8Matmul() for _ in range(max(1, int(WEIGHT_BYTES / (n * k))))]
        for each in products:
            each.prepare(weight, None)
        for m in INT8_ROWS:
            used = products if m < 64 else products[:16]  # arithmetic binds: fewer weights do
            x, out = torch.randn(m, k), torch.empty(m, n)
            program = Program([stage for each in used for stage in each.stages(x, out, team(threads))], team(threads))
            times = timed(lambda program=program, m=m: program.run(m), RUNS)  # type: ignore[misc]
            ops, num_bytes = 2 * m * n * k * len(used), sum(each.num_bytes for each in used)
            limit = ops / max(ops / max(rates), num_bytes / limits.median_bandwidth) / 1e9
            note = f"{num_bytes / statistics.median(times) / 1e9:.1f} GB/s"
            table.add(f"{m:,} rows", [ops / t / 1e9 for t in times], "GOP/s", limit=limit, note=note)
        rows += table.rows
        rates.append(_int_mm_rate())
        limits.sample()
    memory = limits.rows()[0]
    most = Row.of(memory.section, "int8 GEMM 2048^3", [rate / 1e9 for rate in rates], "GOP/s", note=describe())
    return [memory, most, *rows]


def _int_mm_rate() -> float:
    """Return the operations a second of `torch._int_mm` on square matrices."""
    a, b = (torch.randint(-127, 128, (GEMM_SIZE, GEMM_SIZE), dtype=torch.int8) for _ in range(2))
    return 2 * GEMM_SIZE**3 / statistics.median(timed(lambda: torch._int_mm(a, b), RUNS))


def start_rows(options: argparse.Namespace) -> list[Row]:
    """Measure a fresh process that imports and readies all kernels, without and with numba's cache on disk."""
    table = Table("start of all kernels, beside importing torch and numba")

    def seconds(program: str, **extra: str) -> float:
        started_s = time.perf_counter()
        subprocess.run([sys.executable, "-c", program], check=True, env=os.environ | extra)
        return time.perf_counter() - started_s

    with tempfile.TemporaryDirectory() as folder:
        for name, runs in (("compiled", 1), ("from the cache", 1 if options.quick else RUNS)):
            took = [seconds(READY, NUMBA_CACHE_DIR=folder) - seconds("import torch, numba") for _ in range(runs)]
            table.add(name, took, "s")
    return table.rows


PARTS = {
    "limits": Part(about="attention, products, norms in float32", measure=limit_rows),
    "int8": Part(about="int8 products", measure=int8_rows),
    "start": Part(about="compiling all kernels, and reading them from numba's cache", measure=start_rows),
    "kv_dtypes": Part(about="perplexity and answers by cache.kv_dtype", measure=accuracy.kv_dtype_rows),
    "accuracy": Part(about="perplexity and answers of int8 weights", measure=accuracy.int8_rows),
}


def main(argv: Sequence[str] | None = None) -> None:
    harness.run("kernels", __doc__, PARTS, argv)
