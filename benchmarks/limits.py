"""What this machine can do at best, measured now, and what a forward pass must at least read and compute.

Shares of these limits are comparable between machines and busy hours; absolute numbers are not.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from benchmarks.harness import Row, timed
from replicas.config import ModelConfig

READ_BYTES = 256 << 20  # far beyond any cache
GEMM_SIZE = 2048
RUNS = 5


@dataclass(slots=True)
class Limits:
    """The machine's limits on CPU threads, sampled through the run."""

    num_threads: int
    bandwidth: list[float] = field(default_factory=list)  # bytes/s of summing 256 MiB of float32
    flops: list[float] = field(default_factory=list)  # 1/s of a 2048 x 2048 x 2048 product in fp32

    def sample(self) -> None:
        source = torch.ones(READ_BYTES // 4)
        left, right, out = (torch.randn(GEMM_SIZE, GEMM_SIZE) for _ in range(3))
        self.bandwidth.append(READ_BYTES / self._median_s(source.sum))
        self.flops.append(2 * GEMM_SIZE**3 / self._median_s(lambda: torch.mm(left, right, out=out)))

    def rows(self) -> list[Row]:
        section = f"limits of the machine, {self.num_threads} threads"
        return [
            Row.of(section, "memory read", [each / 1e9 for each in self.bandwidth], "GB/s"),
            Row.of(section, "fp32 GEMM 2048^3", [each / 1e9 for each in self.flops], "GFLOP/s"),
        ]

    @property
    def median_bandwidth(self) -> float:
        return statistics.median(self.bandwidth)

    @property
    def median_flops(self) -> float:
        return statistics.median(self.flops)

    def _median_s(self, work: Callable[[], object]) -> float:
        before = torch.get_num_threads()
        torch.set_num_threads(self.num_threads)
        try:
            return statistics.median(timed(work, RUNS))
        finally:
            torch.set_num_threads(before)


@dataclass(frozen=True, slots=True)
class ModelCost:
    """What one token costs on the whole model in fp32."""

    layer_params: int  # weights of the products of all blocks
    head_params: int
    attention_width: int  # query heads x head_dim x layers
    weight_bytes: int  # read once a step

    @staticmethod
    def of(model: ModelConfig) -> "ModelCost":
        qkv = model.hidden_size * (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
        out = model.num_heads * model.head_dim * model.hidden_size
        layer_params = model.num_layers * (qkv + out + 3 * model.hidden_size * model.intermediate_size)
        head_params = model.vocab_size * model.hidden_size
        width = model.num_layers * model.num_heads * model.head_dim
        return ModelCost(layer_params, head_params, width, 4 * (layer_params + head_params))

    def prefill_flops(self, num_tokens: int) -> float:
        """Count the products of all tokens, the head once, causal scores and their sum over values."""
        attention = 4 * self.attention_width * num_tokens * (num_tokens + 1) / 2
        return 2 * self.layer_params * num_tokens + 2 * self.head_params + attention

    def decode_limit_s(self, batch: int, bandwidth: float, flops: float) -> float:
        return max(self.weight_bytes / bandwidth, 2 * (self.layer_params + self.head_params) * batch / flops)
