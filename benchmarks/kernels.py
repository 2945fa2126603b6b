"""`python -m benchmarks.kernels [--json OUT] [--threads N]`: the CPU kernels against the machine's limits, in one run.

Shapes are SmolLM2-135M's: 30 layers, 9 query and 3 KV heads of 64, hidden 576, MLP 1536; pages of 16, shuffled. Work
walks over more memory than the caches hold, as a step does. A share above 100 % of the GEMM rate means that the kernel
beats PyTorch's product of 2048 x 2048 matrices, which is the limit that the rows are measured against.
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

from benchmarks.limits import Limits
from benchmarks.report import Row, publish
from replicas.attention.cpu import CpuAttention
from replicas.kernels import elementwise
from replicas.kernels.linear import LinearKernel
from replicas.kernels.team import team
from tests.attention_steps import Step, make_step

NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 30, 9, 3, 64
LINEARS = {"qkv": (960, 576), "o": (576, 576), "gate and up": (3072, 576), "down": (576, 1536)}
ROWS = (1, 8, 32, 256, 1024)
RUNS = 5
TOKEN_BYTES = 2 * NUM_KV_HEADS * HEAD_DIM * 4  # K and V of a layer in float32
MAX_KV_BYTES = 1.8e9
WEIGHT_BYTES = 100e6  # copies of a weight to walk over


def main(argv: Sequence[str] | None = None) -> None:
    run_alone(measure, "python -m benchmarks.kernels", __doc__, argv)


def run_alone(
    measure: Callable[[int], list[Row]], prog: str, description: str | None, argv: Sequence[str] | None
) -> None:
    """The command line of a measurement that is told the number of threads and nothing else."""
    parse = argparse.ArgumentParser(prog=prog, description=description)
    parse.add_argument("--json", metavar="OUT", help="also write JSON here")
    parse.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parse.parse_args(argv)
    publish(measure(options.threads), json_path=options.json)


def measure(threads: int) -> list[Row]:
    """All rows, the machine's limits first."""
    torch.set_num_threads(threads)
    limits = Limits(threads)
    rows: list[Row] = []
    for _ in range(3):
        limits.sample()  # one sample in a busy moment would spoil every share
    for part in (decode_rows, shared_rows, kv_dtype_rows, extend_rows, linear_rows, elementwise_rows):
        limits.sample()
        rows += part(limits, threads)
    limits.sample()
    return [*limits.rows(), *rows, *start_rows()]


def decode_rows(limits: Limits, threads: int) -> list[Row]:
    """Bytes of K and V read a second, and what one layer costs beside them."""
    section, rows = "decode attention, a layer", []
    shapes = [(batch, context, 16) for batch in (1, 8, 32) for context in (128, 1100, 4000)]
    shapes += [(batch, 1100, page_size) for page_size in (1, 64) for batch in (1, 32)]
    for batch, context, page_size in shapes:
        times = attention_s(decode_step(batch, context, page_size=page_size), threads)
        rates = [batch * context * TOKEN_BYTES / t / 1e9 for t in times]
        name, micros = f"batch {batch} x {context:,}, pages of {page_size}", f"{1e6 * statistics.median(times):.1f} us"
        limit = limits.median_bandwidth / 1e9
        rows.append(Row.of(section, name, rates, "GB/s", limit=limit, target=">= 70 %", note=micros))
    times = attention_s(decode_step(1, 1), threads)
    rows.append(Row.of(section, "one token of context", [1e6 * t for t in times], "us", target="< 30"))
    return rows


def shared_rows(limits: Limits, threads: int) -> list[Row]:
    """A prefix that all requests have in common, read for each and read once."""
    section, rows = "decode over a shared prefix and 64 tokens of one's own, a layer", []
    for batch, shared in ((2, 128), (2, 1024), (8, 128), (8, 1024), (32, 1024)):
        step = decode_step(batch, shared + 64, shared=[(list(range(batch)), shared)])
        together = attention_s(step, threads)
        step.batch.prefix_groups = ()
        apart = statistics.median(attention_s(step, threads))
        rates = [4 * batch * NUM_HEADS * HEAD_DIM * (shared + 64) / t / 1e9 for t in together]
        note = f"{1e6 * statistics.median(together):.0f} us; each by itself {1e6 * apart:.0f} us"
        name = f"{batch} requests, {shared:,} shared"
        rows.append(Row.of(section, name, rates, "GFLOP/s", limit=limits.median_flops / 1e9, note=note))
    return rows


def kv_dtype_rows(limits: Limits, threads: int) -> list[Row]:
    """The same decode step over pools of narrower numbers; the share is that of the bytes which are then read."""
    section, rows = "decode attention by cache.kv_dtype, batch 32 x 1,100 tokens, a layer", []
    exact = 0.0
    for kv_dtype, token_bytes in (("float32", 1536), ("bfloat16", 768), ("int8", 408), ("fp8", 408)):
        times = attention_s(decode_step(32, 1100, kv_dtype=kv_dtype), threads)
        median = statistics.median(times)
        exact = exact or median
        rates = [32 * 1100 * token_bytes / t / 1e9 for t in times]
        note = f"{1e6 * median:.0f} us, {exact / median:.2f} x"
        rows.append(Row.of(section, kv_dtype, rates, "GB/s", limit=limits.median_bandwidth / 1e9, note=note))
    return rows


def decode_step(
    batch: int,
    context: int,
    *,
    page_size: int = 16,
    shared: Sequence[tuple[list[int], int]] = (),
    kv_dtype: str = "float32",
) -> Step:
    """``batch`` requests of ``context`` tokens, the new one included; fewer layers where all would not fit memory."""
    layers = min(NUM_LAYERS, max(1, int(MAX_KV_BYTES / (batch * context * TOKEN_BYTES))))
    return make_step(
        [(context - 1, 1)] * batch, num_layers=layers, page_size=page_size, shared=shared, kv_dtype=kv_dtype
    )


def extend_rows(limits: Limits, threads: int) -> list[Row]:
    """Multiply-adds of the causal half a second."""
    section, rows = "extend attention, a layer", []
    for lengths in ([(0, 256)], [(0, 512)], [(0, 1024)], [(1024, 256)], [(1024, 1024)], [(1024, 64)] * 8):
        times = attention_s(make_step(lengths, num_layers=NUM_LAYERS), threads)
        flops = sum(4 * NUM_HEADS * HEAD_DIM * (prefix * new + new * (new + 1) / 2) for prefix, new in lengths)
        name = f"{len(lengths)} x {lengths[0][1]:,} new tokens over {lengths[0][0]:,}"
        rates = [flops / t / 1e9 for t in times]
        rows.append(Row.of(section, name, rates, "GFLOP/s", limit=limits.median_flops / 1e9, target=">= 70 %"))
    return rows


def attention_s(step: Step, threads: int) -> list[float]:
    """Seconds a layer of each run; a run is a step of all layers."""
    backend = CpuAttention(
        step.pool,
        dtype=torch.float32,
        num_heads=NUM_HEADS,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        num_threads=threads,
    )
    num_layers = step.num_layers

    def run() -> None:
        backend.begin(step.batch)
        for layer in range(num_layers):
            backend.forward(layer, step.q, step.k, step.v)

    return [t / num_layers for t in timed(run)]


def linear_rows(limits: Limits, threads: int) -> list[Row]:
    """Our product and PyTorch's, by rows; one row of input is bound by memory, many by arithmetic."""
    rows = []
    for name, (n, k) in LINEARS.items():
        weights = [torch.randn(n, k) for _ in range(int(WEIGHT_BYTES / (4 * n * k)))]
        for m in ROWS:
            used, x = (weights if m <= 32 else weights[:8]), torch.randn(m, k)
            kernels = [LinearKernel(weight, team(threads)) for weight in used]
            ours = timed(lambda kernels=kernels, x=x: [kernel(x) for kernel in kernels])
            theirs = timed(lambda used=used, x=x: [F.linear(x, weight) for weight in used])
            flops, num_bytes = 2 * m * n * k * len(used), 4 * n * k * len(used)
            bound_s = max(flops / limits.median_flops, num_bytes / limits.median_bandwidth)
            limit, rates = flops / bound_s / 1e9, [flops / t / 1e9 for t in ours]
            note = f"F.linear {flops / statistics.median(theirs) / 1e9:.0f}"
            rows.append(Row.of(f"linear, {name}", f"{m:,} rows", rates, "GFLOP/s", limit=limit, note=note))
    return rows


def elementwise_rows(limits: Limits, threads: int) -> list[Row]:
    """What one block spends between its products: two norms, SiLU, rope."""
    section, rows = f"norm, SiLU, rope of a block, {threads} threads", []
    weight = torch.ones(576)
    for m in ROWS:
        hidden, gate_up, heads = torch.randn(m, 576), torch.randn(m, 3072), torch.randn(m, 12, HEAD_DIM)
        angle = torch.randn(m, 1, HEAD_DIM)

        times = [
            sum(
                statistics.median(timed(work))
                for work in (
                    lambda x=hidden: elementwise.rms_norm(x, weight, 1e-5),
                    lambda x=heads, angle=angle: elementwise.rotate(x, angle, angle),
                    lambda x=hidden: elementwise.rms_norm(x, weight, 1e-5),
                    lambda x=gate_up: elementwise.silu_mul(x),
                )
            )
            for _ in range(RUNS)
        ]
        rows.append(Row.of(section, f"{m:,} rows", [1e6 * t for t in times], "us"))
    return rows


def start_rows() -> list[Row]:
    """Seconds to import and ready all kernels in a fresh process, without and with numba's cache on disk."""
    program = (
        "from replicas.attention import cpu_decode, cpu_extend\n"
        "from replicas.kernels import argmax, elementwise, int8, int8_tiles, linear, program, widened\n"
        "for k in (cpu_decode.decode, cpu_extend.extend, linear.few_rows, linear.many_rows, elementwise.rms_norm_rows,"
        " elementwise.silu_mul_rows, elementwise.rotate_rows, argmax.argmax_rows, program._run_stages,"
        " int8.product if int8_tiles.cpu_has_vnni() else widened.product): k.address\n"
    )
    section, rows = "start of all kernels, beside importing torch and numba", []
    with tempfile.TemporaryDirectory() as folder:
        for name, runs in (("compiled", 1), ("from the cache", RUNS)):
            seconds = [
                _process_s(program, {"NUMBA_CACHE_DIR": folder}) - _process_s("import torch, numba", {})
                for _ in range(runs)
            ]
            rows.append(Row.of(section, name, seconds, "s"))
    return rows


def _process_s(program: str, extra: dict[str, str]) -> float:
    started_s = time.perf_counter()
    subprocess.run([sys.executable, "-c", program], check=True, env=os.environ | extra)
    return time.perf_counter() - started_s


def timed(work: Callable[[], object]) -> list[float]:
    """Seconds of each of RUNS runs, after a warm-up."""
    times = []
    for _ in range(RUNS + 1):
        started_s = time.perf_counter()
        work()
        times.append(time.perf_counter() - started_s)
    return times[1:]


if __name__ == "__main__":
    main()
