"""The one place where a layer multiplies: ``x @ weight.T + bias``, by the fastest product for the weight's device.

Owns:      the choice. On CPU in fp32: our kernels (replicas/kernels/linear.py), except that for many rows
           PyTorch's BLAS takes over on machines where it is clearly faster; that is measured once a process.
Never:     keeps a second, packed copy of a weight: on CPU it stays a view of the mapped file.
Invariant: which product runs depends on the shapes alone within a process; an output row does not depend on other rows,
           except that steps below and above FEW_ROWS rows sum in another order (fp32 rounding).
"""

import functools
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from replicas.kernels.linear import FEW_ROWS, LinearKernel, serves
from replicas.kernels.program import ReadingStage, Stage
from replicas.kernels.team import Team, team

CLEARLY_FASTER = 1.15  # measured times differ by less from run to run


class Matmul:
    """``x @ weight.T + bias``."""

    def __init__(self) -> None:
        self.weight: Tensor | None = None  # [out, in]
        self.bias: Tensor | None = None  # [out]
        self._kernel: LinearKernel | None = None
        self._blas_rows = 0  # steps of so many rows or more go to F.linear

    def prepare(self, weight: Tensor, bias: Tensor | None) -> None:
        """Take the final weight [out, in] and bias [out], on their device and in their dtype. Called once."""
        self.weight, self.bias = weight, bias
        if serves(weight):
            num_threads = torch.get_num_threads()
            self._kernel = LinearKernel(weight, team(num_threads), bias)
            self._blas_rows = FEW_ROWS if blas_is_faster(num_threads) else 1 << 62

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, out], a fresh tensor."""
        if self._kernel is not None and x.shape[0] < self._blas_rows and x.dtype == torch.float32:
            return self._kernel(x)
        assert self.weight is not None, "finalize() comes before the first call"
        return F.linear(x, self.weight, self.bias)

    def stages(self, x: Tensor, out: Tensor, team: Team) -> tuple[ReadingStage, *tuple[Stage, ...]]:
        """The product as stages of a program of ``team``: rows of x [.., in] into rows of ``out`` [.., out], both kept
        by the caller; the first reads x. Only where ``program_rows`` > 0, for steps of fewer rows than that."""
        assert self._kernel is not None, "program_rows is 0: this product cannot be part of a program"
        return (self._kernel.stage(x, out, team),)

    @property
    def shape(self) -> tuple[int, int]:
        """Of the weight: (out, in)."""
        assert self.weight is not None, "finalize() comes before the first step"
        return self.weight.shape[0], self.weight.shape[1]

    @property
    def program_rows(self) -> int:
        """Steps of fewer rows may run as part of a program; 0 where none may."""
        return self._blas_rows

    @property
    def num_bytes(self) -> int:
        return sum(t.nbytes for t in (self.weight, self.bias) if t is not None)


@functools.cache
def blas_is_faster(num_threads: int) -> bool:
    """Whether F.linear clearly beats our kernel at 256 x 1024 x 1024; takes ~50 ms, once a process."""
    x, weight = torch.ones(256, 1024), torch.ones(1024, 1024)
    ours = LinearKernel(weight, team(num_threads))
    return _best_s(lambda: ours(x)) > CLEARLY_FASTER * _best_s(lambda: F.linear(x, weight))


def _best_s(work: Callable[[], object]) -> float:
    """Least seconds of 5 runs after a warm-up: what other processes take is not counted."""
    work()
    times = []
    for _ in range(5):
        started_s = time.perf_counter()
        work()
        times.append(time.perf_counter() - started_s)
    return min(times)
