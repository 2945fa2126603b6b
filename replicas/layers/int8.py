"""``x @ weight.T + bias`` in int8: weights are rounded when loaded, activations at each call, in groups of inputs.

Owns:      the rounding of weights, and the choice of the kernel: that which multiplies bytes (replicas/kernels/int8.py)
           on CPUs with AVX-512 VNNI; on all others the one that widens both (replicas/kernels/widened.py).
Never:     keeps the weight as it was loaded, or leaves a product to BLAS: its order of sums depends on the rows.
Invariant: both kernels multiply the same rounded numbers: results differ by the order of fp32 sums. An output row
           depends on its own x row alone, whatever the other rows are.
"""

import torch
from torch import Tensor

from replicas.kernels.int8 import Int8Kernel, num_groups, serves
from replicas.kernels.int8_tiles import cpu_has_vnni
from replicas.kernels.linear import ANY_ROWS
from replicas.kernels.program import ReadingStage, Stage
from replicas.kernels.team import Team, team
from replicas.kernels.widened import WidenedKernel

CHUNK_ROWS = 4096  # of a weight, that are rounded at a time


class Int8Matmul:
    """The int8 product that replaces a `Matmul` (replicas/layers/linear.py)."""

    one_order = True  # of sums, in steps of any number of rows

    def __init__(self) -> None:
        self.shape = (0, 0)  # (out, in)
        self._product: Int8Kernel | WidenedKernel | None = None

    def prepare(self, weight: Tensor, bias: Tensor | None) -> None:
        """Take the weight [out, in] and bias [out], of any float dtype, on CPU. Called once."""
        self.shape = (weight.shape[0], weight.shape[1])
        rounded, scales = round_weight(weight)
        floats = None if bias is None else bias.float()
        kernel = Int8Kernel if serves(rounded) else WidenedKernel
        self._product = kernel(rounded, scales, floats, team(torch.get_num_threads()))

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply x [T, in] fp32 into a fresh tensor [T, out]."""
        return self.product(x)

    @property
    def product(self) -> Int8Kernel | WidenedKernel:
        assert self._product is not None, "finalize() comes before the first call"
        return self._product

    def rows(self, ids: Tensor) -> Tensor:
        """Return rows [T] of the rounded weight as a fresh float tensor [T, in]."""
        return self.product.rows(ids)

    def stages(self, x: Tensor, out: Tensor, team: Team) -> tuple[ReadingStage, *tuple[Stage, ...]]:
        """Make the product stages of a program: see `Matmul.stages`."""
        return (self.product.stage(x, out, team),)

    @property
    def program_rows(self) -> int:
        """Rows below which a step may run as part of a program; 0 if none may."""
        return ANY_ROWS if self.product.dense else 0

    @property
    def num_bytes(self) -> int:
        return 0 if self._product is None else self._product.num_bytes


def round_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round [N, K] to (int8 [N, K], scales [N, G] bf16): the numbers of a group in steps of its largest magnitude /
    127."""
    groups = num_groups(weight.shape[1])
    rounded = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(len(weight), groups, dtype=torch.bfloat16)
    for first in range(0, len(weight), CHUNK_ROWS):
        chunk = slice(first, first + CHUNK_ROWS)
        part = weight[chunk].float()
        parts = part.reshape(len(part), groups, -1)  # [rows, G, K / G]
        bits = (parts.abs().amax(dim=2) / 127.0).view(torch.int32)
        steps = ((bits + 0xFFFF) & ~0xFFFF).view(torch.float32)  # the next bf16 number: nothing goes beyond 127
        scales[chunk] = steps
        steps = steps.unsqueeze(2)
        rounded[chunk] = torch.where(steps > 0, parts / steps, 0.0).round_().flatten(1)
    return rounded, scales


def describe() -> str:
    """Say which product this CPU gets."""
    if cpu_has_vnni():
        return "our kernels (AVX-512 VNNI)"
    return "our kernels, which widen weights for fp32 arithmetic, since this CPU has no AVX-512 VNNI"
