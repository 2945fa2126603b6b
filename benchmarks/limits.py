"""What this machine can do at best, measured now, and what a forward pass must at least read and compute.

Shares of these limits are comparable between machines and busy hours; absolute numbers are not.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba import carray
from numba.core import cgutils, types

from benchmarks.harness import Row, timed
from replicas.config import ModelConfig
from replicas.kernels import simd
from replicas.kernels.bf16_tiles import emit_dots
from replicas.kernels.simd import VEC, W
from replicas.kernels.team import Kernel, kernel, struct, team
from replicas.kernels.weight_formats import NUMBER_BYTES, WeightFormat

READ_BYTES = 256 << 20  # far beyond any cache
GEMM_SIZE = 2048
RUNS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One way in which weights lie in memory, as it is compared with float32."""

    settings: dict[str, Any]  # of a model
    weights: WeightFormat
    table: WeightFormat  # of the vocabulary's
    least: float = 1.0  # times as fast as float32 it has to be, in a step of one request

    @property
    def dtype(self) -> torch.dtype:
        """Of the model."""
        return torch.bfloat16 if self.settings.get("dtype") == "bfloat16" else torch.float32


FORMATS = {
    "float32": Format(settings={}, weights="float32", table="float32"),
    "bfloat16": Format(settings={"dtype": "bfloat16"}, weights="bfloat16", table="bfloat16"),
    "int8": Format(settings={"quantization": "int8"}, weights="int8", table="int8"),
    "int4": Format(settings={"quantization": "int4"}, weights="q4_1", table="q8_0", least=2.2),
    "int4, bf16": Format(
        settings={"quantization": "int4", "dtype": "bfloat16"}, weights="q4_1", table="q8_0", least=2.2
    ),
}
SUMS = 12 if simd.compiles_for("avx512f") else 6  # vectors in registers: each waits 4 steps for itself, two units work
FMA_ROUNDS = 1 << 20  # 3 to 10 ms
PeakArgs = struct("PeakArgs", "rounds memory")


def _in_registers(emit: Callable[[Any, Any, Any], Any]) -> Any:
    """Make ``f(rounds, memory)``: ``sum = emit(builder, sum, x)`` in `SUMS` vectors at once, which lie at memory; the
    first gets their sum."""

    @simd.op(types.void, types.int64, types.int64)
    def repeat(builder: Any, rounds: Any, memory: Any) -> None:
        x = simd.emit_load(builder, memory)
        starts = [simd.emit_load(builder, simd.add_bytes(builder, memory, 4 * W * i)) for i in range(SUMS)]
        places = [cgutils.alloca_once_value(builder, start) for start in starts]
        with cgutils.for_range(builder, rounds, intp=simd.I64):
            for place in places:
                builder.store(emit(builder, builder.load(place), x), place)
        total = ir.Constant(VEC, [0.0] * W)
        for place in places:
            total = builder.fadd(total, builder.load(place))
        simd.emit_store(builder, memory, total)

    return repeat


_multiply_add = _in_registers(lambda builder, total, x: simd.emit_fma(builder, total, x, x))
_dots = _in_registers(lambda builder, total, x: emit_dots(builder, total, x, x))


@kernel(PeakArgs)
def _peak(pointer: Any) -> None:
    a = carray(pointer, 1)[0]
    _multiply_add(a.rounds, a.memory)


@kernel(PeakArgs)
def _peak_dots(pointer: Any) -> None:
    a = carray(pointer, 1)[0]
    _dots(a.rounds, a.memory)


def peak_flops(num_threads: int, work: Kernel = _peak, flops: int = 2 * W) -> float:
    """Measure arithmetic that needs no memory, by kernels' widest vectors: operations a second, median.

    Args: work: multiply-adds in fp32, or dots of bf16. flops: of one of its instructions.
    """
    memory = torch.zeros(SUMS * W)
    arguments = PeakArgs(rounds=FMA_ROUNDS, memory=memory.data_ptr())
    seconds = timed(lambda: team(num_threads).run(work, arguments), RUNS)
    return flops * SUMS * FMA_ROUNDS * num_threads / statistics.median(seconds)


@dataclass(slots=True)
class Limits:
    """The machine's limits on CPU threads, sampled through the run."""

    num_threads: int
    bandwidth: list[float] = field(default_factory=list)  # bytes/s of summing 256 MiB of float32
    flops: list[float] = field(default_factory=list)  # 1/s of a 2048 x 2048 x 2048 product in fp32
    peak: list[float] = field(default_factory=list)  # 1/s of multiply-adds in registers
    dots: list[float] = field(default_factory=list)  # 1/s of bf16 dot products in registers, where the CPU has them

    def sample(self) -> None:
        source = torch.ones(READ_BYTES // 4)
        left, right, out = (torch.randn(GEMM_SIZE, GEMM_SIZE) for _ in range(3))
        self.bandwidth.append(READ_BYTES / self._median_s(source.sum))
        self.flops.append(2 * GEMM_SIZE**3 / self._median_s(lambda: torch.mm(left, right, out=out)))
        self.peak.append(peak_flops(self.num_threads))
        if simd.compiles_for("avx512bf16"):
            self.dots.append(peak_flops(self.num_threads, _peak_dots, 4 * W))

    def rows(self) -> list[Row]:
        section = f"limits of the machine, {self.num_threads} threads, {simd.instruction_set()}"
        rows = [
            Row.of(section, "memory read", [each / 1e9 for each in self.bandwidth], "GB/s"),
            Row.of(section, "fp32 multiply-adds in registers", [each / 1e9 for each in self.peak], "GFLOP/s"),
            Row.of(section, "fp32 GEMM 2048^3", [each / 1e9 for each in self.flops], "GFLOP/s"),
        ]
        if self.dots:
            rows.append(Row.of(section, "vdpbf16ps in registers", [each / 1e9 for each in self.dots], "GFLOP/s"))
        return rows

    @property
    def median_bandwidth(self) -> float:
        return statistics.median(self.bandwidth)

    @property
    def median_flops(self) -> float:
        return statistics.median(self.flops)

    @property
    def median_peak(self) -> float:
        return statistics.median(self.peak)

    def _median_s(self, work: Callable[[], object]) -> float:
        before = torch.get_num_threads()
        torch.set_num_threads(self.num_threads)
        try:
            return statistics.median(timed(work, RUNS))
        finally:
            torch.set_num_threads(before)


@dataclass(frozen=True, slots=True)
class ModelCost:
    """What one token costs on the whole model."""

    layer_params: int  # weights of the products of all blocks
    head_params: int
    attention_width: int  # query heads x head_dim x layers
    weight_bytes: float  # read once a step

    @staticmethod
    def of(model: ModelConfig, format_: str = "float32") -> "ModelCost":
        """``format_``: of `FORMATS`."""
        qkv = model.hidden_size * (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
        out = model.num_heads * model.head_dim * model.hidden_size
        layer_params = model.num_layers * (qkv + out + 3 * model.hidden_size * model.intermediate_size)
        head_params = model.vocab_size * model.hidden_size
        width = model.num_layers * model.num_heads * model.head_dim
        weights, table = FORMATS[format_].weights, FORMATS[format_].table
        num_bytes = NUMBER_BYTES[weights] * layer_params + NUMBER_BYTES[table] * head_params
        return ModelCost(layer_params, head_params, width, num_bytes)

    def prefill_flops(self, num_tokens: int) -> float:
        """Count the products of all tokens, the head once, causal scores and their sum over values."""
        attention = 4 * self.attention_width * num_tokens * (num_tokens + 1) / 2
        return 2 * self.layer_params * num_tokens + 2 * self.head_params + attention

    def decode_limit_s(self, batch: int, bandwidth: float, flops: float) -> float:
        return max(self.weight_bytes / bandwidth, 2 * (self.layer_params + self.head_params) * batch / flops)
