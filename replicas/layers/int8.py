"""``x @ weight.T + bias`` in int8: weights rounded per output channel when loaded, activations at each call.

Owns:      the rounding of weights, and the choice of the product: our kernel (replicas/kernels/int8.py) on CPUs with
           AVX-512 VNNI; on all others the weight is widened a part at a time for PyTorch's fp32 product.
Never:     keeps the weight as it was loaded.
Invariant: our kernel's output row depends on its own x row alone, whatever the other rows are.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from replicas.kernels.int8 import Int8Kernel, serves
from replicas.kernels.int8_tiles import cpu_has_vnni
from replicas.kernels.program import ReadingStage, Stage
from replicas.kernels.team import Team, team

CHUNK_ROWS = 4096  # of a weight, that are rounded or widened at a time
ANY_ROWS = 1 << 62


class Int8Matmul:
    """Takes the place of a `Matmul` (replicas/layers/matmul.py)."""

    def __init__(self) -> None:
        self.shape = (0, 0)  # (out, in)
        self._product: Int8Kernel | WidenedInt8 | None = None

    def prepare(self, weight: Tensor, bias: Tensor | None) -> None:
        """Take the weight [out, in] and bias [out], of any float dtype, on CPU. Called once."""
        self.shape = (weight.shape[0], weight.shape[1])
        rounded, scales = round_rows(weight)
        floats = None if bias is None else bias.float()
        if serves(rounded):
            self._product = Int8Kernel(rounded, scales, floats, team(torch.get_num_threads()))
        else:
            self._product = WidenedInt8(rounded, scales, floats)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] fp32 -> [T, out], a fresh tensor."""
        return self.product(x)

    @property
    def product(self) -> "Int8Kernel | WidenedInt8":
        assert self._product is not None, "finalize() comes before the first call"
        return self._product

    def rows(self, ids: Tensor) -> Tensor:
        """[T] -> rows of the rounded weight as floats [T, in], a fresh tensor."""
        return self.product.rows(ids)

    def stages(self, x: Tensor, out: Tensor, team: Team) -> tuple[ReadingStage, *tuple[Stage, ...]]:
        """The product as stages of a program: see `Matmul.stages`."""
        assert isinstance(self.product, Int8Kernel), "program_rows is 0: this product cannot be part of a program"
        return (self.product.stage(x, out, team),)

    @property
    def program_rows(self) -> int:
        """Steps of fewer rows may run as part of a program; 0 where none may."""
        return ANY_ROWS if isinstance(self.product, Int8Kernel) and self.product.dense else 0

    @property
    def num_bytes(self) -> int:
        return 0 if self._product is None else self._product.num_bytes


class WidenedInt8:
    """One weight in int8, multiplied in fp32: the memory of the one, a little more than the time of the other."""

    def __init__(self, weight: Tensor, scales: Tensor, bias: Tensor | None) -> None:
        """weight [N, K] int8; scales, bias [N] fp32."""
        self._weight, self._scales, self._bias = weight, scales, bias

    def __call__(self, x: Tensor) -> Tensor:
        """[M, K] fp32 -> [M, N], a fresh tensor."""
        out = torch.empty(x.shape[0], self._weight.shape[0])
        for first in range(0, self._weight.shape[0], CHUNK_ROWS):
            chunk = slice(first, first + CHUNK_ROWS)
            out[:, chunk] = F.linear(x, self._weight[chunk].float())
        out.mul_(self._scales)
        return out if self._bias is None else out.add_(self._bias)

    def rows(self, ids: Tensor) -> Tensor:
        """Rows ``ids`` [T] of the weight, as floats [T, K]."""
        return self._weight[ids].float().mul_(self._scales[ids].unsqueeze(1))

    @property
    def num_bytes(self) -> int:
        return sum(t.nbytes for t in (self._weight, self._scales, self._bias) if t is not None)


def round_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[N, K] -> (int8 [N, K], scales [N] fp32): each row in steps of its largest magnitude / 127."""
    rounded, scales = torch.empty(weight.shape, dtype=torch.int8), torch.empty(weight.shape[0])
    for first in range(0, weight.shape[0], CHUNK_ROWS):
        part = weight[first : first + CHUNK_ROWS].float()
        largest = part.abs().amax(dim=1)
        factor = torch.where(largest > 0, 127.0 / largest, 0.0)
        rounded[first : first + CHUNK_ROWS] = (part * factor.unsqueeze(1)).round_()
        scales[first : first + CHUNK_ROWS] = largest / 127.0
    return rounded, scales


def describe() -> str:
    """Which product this CPU gets, in words."""
    if cpu_has_vnni():
        return "our kernels (AVX-512 VNNI)"
    return "weights are widened for fp32 products: this CPU has no AVX-512 VNNI, int8 saves memory here and no time"
