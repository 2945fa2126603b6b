"""The gated feed-forward network of the Llama family: ``down(silu(gate(x)) * up(x))``."""

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor

from replicas.layers.layer import Layer
from replicas.layers.linear import ColumnParallelLinear, RowParallelLinear
from replicas.parallel import TpGroup


class GatedMLP(Layer):
    """Gate and up projections are one product."""

    def __init__(self, *, tp: TpGroup, bias: bool) -> None:
        self.gate_up = ColumnParallelLinear(("gate_proj", "up_proj"), tp=tp, bias=bias)
        self.down = RowParallelLinear(tp=tp, bias=bias)

    def parts(self) -> Mapping[str, Layer]:
        return {"": self.gate_up, "down_proj": self.down}

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate).mul_(up))
