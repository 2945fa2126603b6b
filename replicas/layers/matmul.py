"""The one place where a layer multiplies: ``x @ weight.T + bias``, by the fastest product for the weight's device.

Owns:      the choice. On CPU in fp32: our kernels (replicas/kernels/linear.py), except that for many rows
           PyTorch's BLAS takes over on machines where it is clearly faster; that is measured once a process.
Never:     keeps a second, packed copy of a weight: on CPU it stays a view of the mapped file.
Invariant: which product runs depends on the shapes alone within a process; an output row does not depend on other rows,
           except that steps below and above FEW_ROWS rows sum in another order (fp32 rounding).
"""

import functools
import logging
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from replicas.kernels.linear import FEW_ROWS, LinearKernel, serves
from replicas.kernels.program import ReadingStage, Stage
from replicas.kernels.team import Team, team

log = logging.getLogger(__name__)
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
            self._kernel = LinearKernel(weight, team(torch.get_num_threads()), bias)
            self._blas_rows = FEW_ROWS if blas_is_faster() else 1 << 62

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
def blas_is_faster() -> bool:
    """Whether F.linear clearly beats our kernel at 256 x 1024 x 1024; takes ~60 ms, once a process.

    By CPU time of one thread: what else runs while an engine starts must not decide how fast it is from then on (by
    wall time on two threads our kernel, twice as fast, lost one in eight tries on a busy machine).
    """
    x, weight = torch.ones(256, 1024), torch.ones(1024, 1024)
    ours, num_threads = LinearKernel(weight, team(1)), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        times_s = [(_cpu_s(lambda: ours(x)), _cpu_s(lambda: F.linear(x, weight))) for _ in range(6)]
    finally:
        torch.set_num_threads(num_threads)
    ours_s, blas_s = map(min, zip(*times_s, strict=True))
    log.info("products of many rows: PyTorch's BLAS takes %.2f x the time of our kernel", blas_s / ours_s)
    return bool(ours_s > CLEARLY_FASTER * blas_s)


def _cpu_s(work: Callable[[], object]) -> float:
    started_s = time.thread_time()
    work()
    return time.thread_time() - started_s
