"""Several kernels as one program: a team runs its stages one after the other, and Python is left once for all of them.

Owns:      the list of stages as the team reads it, and a task counter for each.
Never:     knows what a stage computes; holds no activations: stages name memory that their makers keep.
Invariant: a stage begins when every thread has ended the one before it; counters are 0 when a program begins.
Thread:    the one that runs the model. A program is not run by two threads at once.

Why: a kernel started from Python costs 6-10 us beside its work, a stage of a program below 1 us, and a block of a model
has ten of them.
"""

import ctypes
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numba import carray
from torch import Tensor

from replicas.kernels.simd import call_kernel, load_i64
from replicas.kernels.team import Kernel, Team, barrier, kernel, struct

_COUNTER_BYTES = 64  # a cache line each
ProgramArgs = struct("ProgramArgs", "stages num_stages")  # stages: [N, 2] int64, addresses of kernel and arguments


class Stage(Protocol):
    """One kernel on memory that does not move, for any number of rows that fit there."""

    def prepare(self, num_rows: int, counter: int) -> tuple[Kernel, ctypes.Structure]:
        """Return the kernel for ``num_rows`` and its arguments (kept alive by the stage, set in place).

        Args: counter: address of an int64 that is 0 whenever the kernel begins, for tasks taken one by one.
        """
        ...


@runtime_checkable
class ReadingStage(Stage, Protocol):
    """A stage that can read its input from another place at each run."""

    def read_from(self, x: Tensor) -> None:
        """Read the rows of ``x`` from now on. The caller keeps ``x`` until the run has ended."""
        ...


@kernel(ProgramArgs)
def _run_stages(pointer: Any) -> None:
    a = carray(pointer, 1)[0]
    for i in range(a.num_stages):
        if i:
            barrier()
        call_kernel(load_i64(a.stages + 16 * i), load_i64(a.stages + 16 * i + 8))


class Program:
    """Stages that ``team`` runs in order."""

    def __init__(self, stages: Sequence[Stage], team: Team, kept: Sequence[bool] | None = None) -> None:
        """``kept``: those that runs have which are not ``whole``; None: all."""
        self.stages = tuple(stages)
        self._kept = np.array(kept or [True] * len(self.stages))
        self._team = team
        self._num_rows = 0  # that the stages are prepared for
        self._table = np.zeros((len(self.stages), 2), np.int64)
        self._short = self._table[self._kept]
        self._counters = np.zeros((len(self.stages) + 1, _COUNTER_BYTES // 8), np.int64)
        self._counters_at = self._counters.ctypes.data
        self._all, self._some = (ProgramArgs(table.ctypes.data, len(table)) for table in (self._table, self._short))

    def run(self, num_rows: int, *, whole: bool = True) -> None:
        """Run the stages on the first ``num_rows`` >= 1 rows of their memory: all, or those that are kept."""
        if num_rows != self._num_rows:
            self._prepare(num_rows)
        self._counters.fill(0)
        self._team.run(_run_stages, self._all if whole else self._some)

    def _prepare(self, num_rows: int) -> None:
        calls = [stage.prepare(num_rows, self._counters_at + _COUNTER_BYTES * i) for i, stage in enumerate(self.stages)]
        self._table[:] = [(function.address, ctypes.addressof(arguments)) for function, arguments in calls]
        self._short[:] = self._table[self._kept]
        self._num_rows = num_rows
