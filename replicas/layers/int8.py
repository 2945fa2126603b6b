"""``x @ weight.T + bias`` in int8: weights are rounded when loaded, activations at each call, in groups of inputs.

Owns:      the rounding, and the choice of the product: our kernel (replicas/kernels/int8.py) on CPUs with AVX-512 VNNI;
           on all others what was rounded is widened, weights a part at a time, for PyTorch's fp32 product.
Never:     keeps the weight as it was loaded.
Invariant: both products multiply the same rounded numbers: results differ by the order of fp32 sums. Our kernel's
           output row depends on its own x row alone, whatever the other rows are.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from replicas.kernels.int8 import Int8Kernel, num_groups, serves
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
        rounded, scales = round_weight(weight)
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
    """One weight in int8, multiplied in fp32: the memory of the one, and more than the time of the other, since a call
    of few rows widens the whole weight (1-5 times as long at 1 and 8 rows)."""

    def __init__(self, weight: Tensor, scales: Tensor, bias: Tensor | None) -> None:
        """weight [N, K] int8, scales [N, G] bf16, bias [N] fp32."""
        self._weight, self._scales, self._bias = weight, scales, bias

    def __call__(self, x: Tensor) -> Tensor:
        """[M, K] fp32 -> [M, N], a fresh tensor."""
        x = round_activations(x, self._scales.shape[1])
        out = torch.empty(x.shape[0], self._weight.shape[0])
        for first in range(0, self._weight.shape[0], CHUNK_ROWS):
            chunk = slice(first, first + CHUNK_ROWS)
            out[:, chunk] = F.linear(x, _widened(self._weight[chunk], self._scales[chunk]))
        return out if self._bias is None else out.add_(self._bias)

    def rows(self, ids: Tensor) -> Tensor:
        """Rows ``ids`` [T] of the weight, as floats [T, K]."""
        return _widened(self._weight[ids], self._scales[ids])

    @property
    def num_bytes(self) -> int:
        return sum(t.nbytes for t in (self._weight, self._scales, self._bias) if t is not None)


def round_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[N, K] -> (int8 [N, K], scales [N, G] bf16): the numbers of a group in steps of its largest magnitude / 127."""
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


def round_activations(x: Tensor, groups: int) -> Tensor:
    """[M, K] -> the same in steps of each group's largest magnitude / 127, as our kernel rounds them."""
    parts = x.reshape(len(x), groups, -1)
    largest = parts.abs().amax(dim=2, keepdim=True).double()  # steps are made in double precision, and then rounded
    factor = torch.where(largest > 0, 127.0 / largest, 0.0).float()
    return (parts * factor).round_().mul_((largest / 127.0).float()).flatten(1)


def _widened(weight: Tensor, scales: Tensor) -> Tensor:
    """[R, K] int8, [R, G] -> floats [R, K]."""
    parts = weight.float().view(len(weight), scales.shape[1], -1)
    return parts.mul_(scales.float().unsqueeze(2)).flatten(1)


def describe() -> str:
    """Which product this CPU gets, in words."""
    if cpu_has_vnni():
        return "our kernels (AVX-512 VNNI)"
    return (
        "weights are widened for fp32 products, since this CPU has no AVX-512 VNNI: int8 saves memory here, and a "
        "product of few rows takes 1-5 times as long as in fp32"
    )
