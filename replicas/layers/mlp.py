"""The gated feed-forward network of the Llama family: ``down(silu(gate(x)) * up(x))``."""

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor

from replicas.kernels import elementwise
from replicas.layers.layer import Layer
from replicas.layers.linear import ColumnParallelLinear, RowParallelLinear
from replicas.layers.tp_group import TpGroup


class GatedMLP(Layer):
    """Gate and up projections are one product."""

    def __init__(self, *, tp: TpGroup, bias: bool) -> None:
        self.gate_up = ColumnParallelLinear(("gate_proj", "up_proj"), tp=tp, bias=bias)
        self.down = RowParallelLinear(tp=tp, bias=bias)

    def parts(self) -> Mapping[str, Layer]:
        return {"": self.gate_up, "down_proj": self.down}

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        return self.down(silu_mul(self.gate_up(x)))


def silu_mul(gate_up: Tensor) -> Tensor:
    """[T, 2 size] -> silu(first half) * second half, [T, size]; a fresh tensor."""
    if elementwise.serves(gate_up, halves=True):
        return elementwise.silu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
