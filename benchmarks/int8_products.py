"""`python -m benchmarks.int8_products [--json OUT] [--threads N]`: int8 products against the machine's limits.

Shapes are SmolLM2-135M's. Products run as in the model, as stages of one program, over more weights than the caches
hold. The limit is the time to read the weights or, where that is longer, to do the operations at the rate of PyTorch's
int8 product of 2048 x 2048 matrices; a kernel that beats that has more than 100 %.
"""

import statistics
from collections.abc import Sequence

import torch

from benchmarks.kernels import LINEARS, WEIGHT_BYTES, run_alone, timed
from benchmarks.limits import GEMM_SIZE, Limits
from benchmarks.report import Row
from replicas.kernels.program import Program
from replicas.kernels.team import team
from replicas.layers.int8 import Int8Matmul, describe

SHAPES = LINEARS | {"head": (49152, 576)}
ROWS = (1, 8, 32, 512)
MANY = 64  # rows from which fewer weights do: arithmetic binds
FEW_WEIGHTS = 16


def main(argv: Sequence[str] | None = None) -> None:
    run_alone(measure, "python -m benchmarks.int8_products", __doc__, argv)


def measure(threads: int) -> list[Row]:
    """All rows, the limits first."""
    torch.set_num_threads(threads)
    limits, rates, rows = Limits(threads), [int_mm_rate()], []
    limits.sample()
    for name, (n, k) in SHAPES.items():
        rows += product_rows(name, n, k, limits.median_bandwidth, max(rates), threads)
        rates.append(int_mm_rate())
        limits.sample()
    memory = limits.rows()[0]
    most = Row.of(memory.section, "int8 GEMM 2048^3", [rate / 1e9 for rate in rates], "GOP/s", note=describe())
    return [memory, most, *rows]


def product_rows(name: str, n: int, k: int, bandwidth: float, int_mm: float, threads: int) -> list[Row]:
    """One shape: operations a second, and in the note the bytes of weights read a second."""
    weight, rows = torch.randn(n, k), []
    products = [_prepared(weight) for _ in range(max(1, int(WEIGHT_BYTES / (n * k))))]
    for m in ROWS:
        used = products if m < MANY else products[:FEW_WEIGHTS]
        x, out = torch.randn(m, k), torch.empty(m, n)
        program = Program([stage for each in used for stage in each.stages(x, out, team(threads))], team(threads))
        times = timed(lambda program=program, m=m: program.run(m))  # type: ignore[misc]
        ops, num_bytes = 2 * m * n * k * len(used), sum(each.num_bytes for each in used)
        limit = ops / max(ops / int_mm, num_bytes / bandwidth) / 1e9
        rates, note = [ops / t / 1e9 for t in times], f"{num_bytes / statistics.median(times) / 1e9:.1f} GB/s"
        rows.append(Row.of(f"int8 product, {name}", f"{m:,} rows", rates, "GOP/s", limit=limit, note=note))
    return rows


def _prepared(weight: torch.Tensor) -> Int8Matmul:
    matmul = Int8Matmul()
    matmul.prepare(weight, None)
    return matmul


def int_mm_rate() -> float:
    """Operations a second of `torch._int_mm` on square matrices."""
    a, b = (torch.randint(-127, 128, (GEMM_SIZE, GEMM_SIZE), dtype=torch.int8) for _ in range(2))
    return 2 * GEMM_SIZE**3 / statistics.median(timed(lambda: torch._int_mm(a, b)))


if __name__ == "__main__":
    main()
