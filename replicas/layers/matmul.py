"""The floating-point product of all layers: ``x @ weight.T + bias``.

Owns:      the choice of its kernel: on a CPU in fp32 our kernels (replicas/kernels/linear.py), or PyTorch's BLAS where
           the engine's `Products` say so.
Never:     measures or chooses (runner/product_choice.py does, when an engine starts); keeps a second, packed copy of a
           weight: on CPU it stays a view of the mapped file (but for odd sizes with ``one_order``).
Invariant: which product runs depends on shapes and `Products` alone; an output row does not depend on other rows,
           except that steps of more rows may sum in another order (fp32 rounding), which ``one_order`` excludes.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from replicas.config import Products
from replicas.kernels.linear import ANY_ROWS, LinearKernel, serves
from replicas.kernels.program import ReadingStage, Stage
from replicas.kernels.simd import W
from replicas.kernels.team import Team, team

OWN = Products()


class Matmul:
    """The product ``x @ weight.T + bias`` by the kernels or by BLAS."""

    def __init__(self, products: Products = OWN) -> None:
        self.weight: Tensor | None = None  # [out, in]
        self.bias: Tensor | None = None  # [out]
        self._products = products
        self._kernel: LinearKernel | None = None
        self._blas_rows = 0  # steps of this many rows or more go to F.linear
        self._padded = False  # the kernel has a copy of the weight, with zeros up to sizes that it serves

    def prepare(self, weight: Tensor, bias: Tensor | None) -> None:
        """Take the final weight [out, in] and bias [out], on their device and in their dtype. Called once."""
        self.weight, self.bias = weight, bias
        if self.one_order and weight.device.type == "cpu" and weight.dtype == torch.float32 and not serves(weight):
            rows, columns = (-size % W for size in weight.shape)
            weight, bias = F.pad(weight, (0, columns, 0, rows)), None if bias is None else F.pad(bias, (0, rows))
            self._padded = True
        if serves(weight):
            threads = team(torch.get_num_threads())
            self._kernel = LinearKernel(weight, threads, bias, one_order=self.one_order)
            self._blas_rows = ANY_ROWS if self.one_order else self._products.blas_rows.get(self.shape, ANY_ROWS)

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply x [T, in] into a fresh tensor [T, out]."""
        if self._padded and self._kernel is not None:
            return self._kernel(F.pad(x, (0, -x.shape[1] % W)))[:, : self.shape[0]].contiguous()
        if self._kernel is not None and x.shape[0] < self._blas_rows and x.dtype == torch.float32:
            return self._kernel(x)
        assert self.weight is not None, "finalize() comes before the first call"
        return F.linear(x, self.weight, self.bias)

    def stages(self, x: Tensor, out: Tensor, team: Team) -> tuple[ReadingStage, *tuple[Stage, ...]]:
        """Make the product stages of a program of ``team``: rows of x [.., in] into rows of ``out`` [.., out], both
        kept by the caller; the first reads x. Only where ``program_rows`` > 0, for steps of fewer rows than that."""
        assert self._kernel is not None, "program_rows is 0: this product cannot be part of a program"
        return (self._kernel.stage(x, out, team),)

    @property
    def one_order(self) -> bool:
        """Whether sums are taken in one order in steps of any number of rows."""
        return self._products.one_order

    @property
    def shape(self) -> tuple[int, int]:
        """The weight's shape (out, in)."""
        assert self.weight is not None, "finalize() comes before the first step"
        return self.weight.shape[0], self.weight.shape[1]

    @property
    def program_rows(self) -> int:
        """Rows below which a step may run as part of a program; 0 if none may."""
        return 0 if self._padded else self._blas_rows

    @property
    def num_bytes(self) -> int:
        held = sum(t.nbytes for t in (self.weight, self.bias) if t is not None)
        return held + (self._kernel.num_bytes if self._padded and self._kernel is not None else 0)
