"""The CPU kernels against the machine's limits, in one run.

Shapes are SmolLM2-135M's: 30 layers, 9 query and 3 KV heads of 64, hidden 576, MLP 1536; pages of 16, shuffled. Work
walks over more memory than the caches hold, as a step does; products run as in the model, as stages of one program.
Their limits: of one row the time to read the weights, from 256 rows on multiply-adds in registers; between them
the time to read or, where that is longer, to do the operations at the rate of PyTorch's product of 2048 x 2048, which a
kernel can beat.
"""

import argparse
import statistics
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import harness
from benchmarks.harness import Part, Row, Table, timed
from benchmarks.limits import FORMATS, Limits
from replicas.attention.cpu import CpuAttention
from replicas.kernels import bf16, bf16_tiles, elementwise
from replicas.kernels.team import Program, team
from replicas.kernels.weight_formats import WeightFormat
from replicas.layers.linear import Matmul
from tests.attention_steps import Step, make_step

NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 30, 9, 3, 64
LINEARS = {"qkv": (960, 576), "o": (576, 576), "gate and up": (3072, 576), "down": (576, 1536), "head": (49152, 576)}
ROWS = (1, 8, 32, 256, 1024)
RUNS = 5
TOKEN_BYTES = 2 * NUM_KV_HEADS * HEAD_DIM * 4  # K and V of a layer in float32
MAX_KV_BYTES = 1.8e9
WEIGHT_BYTES = 100e6  # copies of a weight to walk over


def limit_rows(options: argparse.Namespace) -> list[Row]:
    """Measure attention and what is between products, in float32, the machine's limits first."""
    torch.set_num_threads(options.threads)
    limits = Limits(options.threads)
    rows: list[Row] = []
    for _ in range(1 if options.quick else 3):
        limits.sample()  # one sample in a busy moment would spoil every share
    for part in (decode_rows, extend_rows, elementwise_rows):
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
        target = ">= 70 %" if context == 1100 else None
        name, micros = f"batch {batch} x {context:,}, pages of {page_size}", f"{1e6 * statistics.median(times):.1f} us"
        table.add(name, rates, "GB/s", limit=limits.median_bandwidth / 1e9, target=target, note=micros)
    table.add("one token of context", [1e6 * t for t in attention_s(decode_step(1, 1), threads)], "us", target="< 30")
    return table.rows


def decode_step(batch: int, context: int, *, page_size: int = 16) -> Step:
    """Return ``batch`` requests of ``context`` tokens, the new one included; fewer layers where memory is too small."""
    layers = min(NUM_LAYERS, max(1, int(MAX_KV_BYTES / (batch * context * TOKEN_BYTES))))
    return make_step([(context - 1, 1)] * batch, num_layers=layers, page_size=page_size)


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


def product_rows(options: argparse.Namespace) -> list[Row]:
    """Measure products by weights of each format, as stages of a program; float32 beside PyTorch's BLAS."""
    torch.set_num_threads(options.threads)
    limits, rows = Limits(options.threads), list[Row]()
    for name, (n, k) in list(LINEARS.items())[: 1 if options.quick else None]:
        limits.sample()
        table, weight = Table(f"products, {name}, {n} x {k}"), torch.randn(n, k)
        products = {
            format_: _products(weight, each.table if name == "head" else each.weights, each.dtype)
            for format_, each in FORMATS.items()
        }
        for m in ROWS[: 3 if name == "head" else None]:
            exact = 0.0
            for format_, each in FORMATS.items():
                used = products[format_] if m <= 32 else products[format_][:8]  # arithmetic binds: fewer weights do
                times = _program_s(used, torch.randn(m, k), options.threads)
                flops, num_bytes = 2 * m * n * k * len(used), sum(product.num_bytes for product in used)
                rates, note = [flops / t / 1e9 for t in times], f"{num_bytes / statistics.median(times) / 1e9:.1f} GB/s"
                median = statistics.median(rates)
                if format_ == "float32":
                    exact, (limit, target) = median, _limit(limits, m, num_bytes / flops)
                    table.add(f"{m:,} rows, float32", rates, "GFLOP/s", limit=limit, target=target, note=note)
                    table.rows += _beside_blas(table.section, m, median, weight, len(used)) if m >= 32 else []
                else:
                    by_dots = bf16_tiles.way() == "dots" and bf16.serves(each.weights, each.dtype)
                    dots = statistics.median(limits.dots) / 1e9 if by_dots and m >= 256 else None
                    share = None if dots is None else ">= 85 %"
                    table.add(f"{m:,} rows, {format_}", rates, "GFLOP/s", limit=dots, target=share, note=note)
                    least = f">= {each.least if m == 1 else 1:g} x"
                    table.add(f"{m:,} rows, {format_} / float32", [median / exact], "x", target=least)
        rows += table.rows
    limits.sample()
    return limits.rows() + rows


def _products(weight: Tensor, format_: WeightFormat, dtype: torch.dtype) -> list[Matmul]:
    """Return as many products by copies of ``weight`` as do not fit the caches."""
    products = [Matmul(format_=format_)]
    products[0].prepare(lambda: weight, None, dtype=dtype)
    for _ in range(int(WEIGHT_BYTES / products[0].num_bytes)):
        products.append(Matmul(format_=format_))
        products[-1].prepare(lambda: weight, None, dtype=dtype)
    return products


def _program_s(products: Sequence[Matmul], x: Tensor, threads: int) -> list[float]:
    """Return the seconds of each run of a program of all ``products`` of x."""
    out = torch.empty(len(x), products[0].shape[0])
    program = Program([stage for each in products for stage in each.stages(x, out, team(threads))], team(threads))
    return timed(lambda: program.run(len(x)), RUNS)


def _limit(limits: Limits, num_rows: int, bytes_a_flop: float) -> tuple[float, str | None]:
    """Return what the machine allows a product in fp32, GFLOP/s, and the share that is asked."""
    reading = limits.median_bandwidth / bytes_a_flop / 1e9
    if num_rows == 1:
        return reading, ">= 80 %"
    if num_rows >= 256:
        return limits.median_peak / 1e9, ">= 75 %"
    return min(limits.median_flops / 1e9, reading), None


def _beside_blas(section: str, num_rows: int, ours: float, weight: Tensor, copies: int) -> list[Row]:
    """Measure `F.linear` on as many weights; the share is ours of the better one's."""
    weights, x = [weight.clone() for _ in range(copies)], torch.randn(num_rows, weight.shape[1])
    times = timed(lambda: [F.linear(x, each) for each in weights], RUNS)
    blas = 2 * x.numel() * len(weight) * copies / statistics.median(times) / 1e9
    more = {"limit": max(ours, blas), "target": ">= 90 % of the better", "note": f"F.linear {blas:.0f}"}
    return [Row.of(section, f"{num_rows:,} rows, float32 beside F.linear", [ours], "GFLOP/s", **more)]


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


PARTS = {
    "limits": Part(about="attention, norms", measure=limit_rows),
    "products": Part(about="products by weights of each format, beside PyTorch's", measure=product_rows),
}


def main(argv: Sequence[str] | None = None) -> None:
    harness.run("kernels", __doc__, PARTS, argv)
