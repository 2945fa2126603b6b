"""y = x @ weight.T in fp32, from the weight as it was loaded: no packed copy, so that replicas can share mapped files.

Method:    few rows: dot products along the weight's rows, each read once, in place: as fast as memory allows. From
           PART_ROWS rows of x on a weight with K above WHOLE is read a part of K at a time, so that four rows of x and
           four of the weight stay in L1. Many: 64 rows of the weight at a time are transposed into scratch that lies
           in L2, and used by a block of x.
           Where what is made of the result is rounded (``one_order``), the way of few rows takes them all, a block
           after the other: 10-30 % slower for many rows.
Invariant: an output row depends on its own x row and on which of the two ways was taken, not on other rows or threads;
           with ``one_order`` on its own x row alone.
Thread:    all of the team; tasks are taken one by one.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import carray
from torch import Tensor

from replicas.kernels.register_tiles import transpose16
from replicas.kernels.simd import W, load1, store1, take_next
from replicas.kernels.team import Kernel, Team, inlined, kernel, struct, thread_id
from replicas.kernels.tiles import MANY_REGISTERS, dot, dot_in_parts, outer

PANEL = 64  # weight rows a task of the many-rows way transposes
STRIP_BYTES = 256 << 10  # weight bytes a task of the few-rows way reads
# floats: four rows of x and four of the weight that are no longer take half of L1 (48 KB on Zen 5; 32 on older AVX2)
PART = 768 if MANY_REGISTERS else 512
WHOLE = 1024  # floats of a row that is not worth parts: K = 896 and 1,024 lost up to 7 % by them, 1,152 won 17 %
# from here on longer rows are read in parts, by the way of few rows: below it costs more than it gives
PART_ROWS = 16 if MANY_REGISTERS else 4
BLOCK_BYTES = 384 << 10  # of x, that the way of few rows takes at a time: they stay in L2
FEW_ROWS = 64  # from here on transposing pays: measured crossing between 48 and 100 rows on Zen 5
ANY_ROWS = 1 << 62
SUM_LENGTH = 192  # products summed before they join the total: rounding errors grow with the length of a running sum
PACK_ROWS = 24  # transposing a panel takes as long as multiplying it with this many rows; for balancing only

LinearArgs = struct(
    "LinearArgs", "x x_stride weight bias out out_stride m n k strip block part_len scratch scratch_stride counter"
)


@inlined
def add_bias(rows: int, columns: int, bias: int, out: int, out_stride: int) -> None:
    for row in range(rows):
        for i in range(0, 4 * columns, 4):
            store1(out + row * out_stride + i, load1(out + row * out_stride + i) + load1(bias + i))


@kernel(LinearArgs)
def few_rows(pointer: Any) -> None:
    a = carray(pointer, 1)[0]
    row_bytes = a.k * 4
    first = take_next(a.counter) * a.strip
    while first < a.n:
        count = min(a.strip, a.n - first)
        for row in range(0, a.m, a.block):
            rows, x = min(a.block, a.m - row), a.x + row * a.x_stride
            weight, out = a.weight + first * row_bytes, a.out + row * a.out_stride + 4 * first
            if a.part_len < a.k:  # count is a multiple of 4, as strips and n are
                waiting = a.scratch + thread_id() * a.scratch_stride  # 32 KB at most, of 256 k bytes
                for i in range(0, count, 4):
                    four, to = weight + i * row_bytes, out + 4 * i
                    dot_in_parts(
                        rows, a.k, a.part_len, x, a.x_stride, four, row_bytes, to, a.out_stride, 4 * row_bytes, waiting
                    )
            else:
                dot(rows, count, a.k, x, a.x_stride, weight, row_bytes, out, a.out_stride, 4 * row_bytes)
            if a.bias:
                add_bias(rows, count, a.bias + 4 * first, out, a.out_stride)
        first = take_next(a.counter) * a.strip


@inlined
def pack_panel(weight: int, rows: int, k: int, panel: int) -> None:
    """Pack rows (at most 64, a multiple of 16) of weight [rows, k] into panel [k, 64]."""
    for j in range(0, rows, W):
        for i in range(0, k, W):
            transpose16(weight + 4 * (j * k + i), 4 * k, panel + 4 * (i * PANEL + j), 4 * PANEL)


@kernel(LinearArgs)
def many_rows(pointer: Any) -> None:
    """Tasks are (panel, block of x rows), blocks of a panel one after the other."""
    a = carray(pointer, 1)[0]
    panel = a.scratch + thread_id() * a.scratch_stride
    blocks = (a.m + a.block - 1) // a.block
    num_tasks = (a.n + PANEL - 1) // PANEL * blocks
    packed = -1
    task = take_next(a.counter)
    while task < num_tasks:
        column, row = task // blocks * PANEL, task % blocks * a.block
        width, count = min(PANEL, a.n - column), min(a.block, a.m - row)
        if packed != column:
            pack_panel(a.weight + column * a.k * 4, width, a.k, panel)
            packed = column
        x, out = a.x + row * a.x_stride, a.out + row * a.out_stride + 4 * column
        for i in range(0, a.k, SUM_LENGTH):
            length, keep = min(SUM_LENGTH, a.k - i), 1 if i else 0
            part = panel + 4 * i * PANEL
            outer(count, width, length, x + 4 * i, a.x_stride, part, 4 * PANEL, out, a.out_stride, keep)
        if a.bias:
            add_bias(count, width, a.bias + 4 * column, out, a.out_stride)
        task = take_next(a.counter)


class LinearKernel:
    """The product by one weight [N, K] plus ``bias`` [N]; N and K multiples of 16, fp32, contiguous, in memory."""

    def __init__(self, weight: Tensor, team: Team, bias: Tensor | None = None, *, one_order: bool = False) -> None:
        """``one_order``: a row's sums are taken in the same order in steps of any number of rows."""
        assert serves(weight), f"{weight.shape} {weight.dtype} is not for these kernels"
        self._weight, self._bias, self._team = weight, bias, team
        self._few_rows = ANY_ROWS if one_order else FEW_ROWS  # fewer rows than that go their way
        self._counter = np.zeros(8, np.int64)
        self._arguments = self._fixed_arguments()

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply x [M, K] into a fresh tensor [M, N]."""
        if x.stride(1) != 1:
            x = x.contiguous()
        out = torch.empty(x.shape[0], self._weight.shape[0])
        arguments = self._arguments
        arguments.x, arguments.x_stride, arguments.out = x.data_ptr(), 4 * x.stride(0), out.data_ptr()
        function = self._set_rows(arguments, x.shape[0])
        arguments.scratch, arguments.counter = self._team.scratch(self._scratch_floats), self._counter.ctypes.data
        self._counter[0] = 0
        self._team.run(function, arguments)
        return out

    def stage(self, x: Tensor, out: Tensor, team: Team) -> "LinearStage":
        """Make the product a stage of a program of ``team``: rows of x [.., K] into rows of ``out`` [.., N], both kept
        by the caller."""
        arguments = self._fixed_arguments()
        arguments.x, arguments.x_stride = x.data_ptr(), 4 * x.stride(0)
        arguments.out, arguments.out_stride = out.data_ptr(), 4 * out.stride(0)
        assert team.num_threads <= self._team.num_threads, "there is scratch for each thread of the product's own team"
        return LinearStage(arguments, self._set_rows, team.memory(self._scratch_floats))

    def _fixed_arguments(self) -> Any:
        n, k = self._weight.shape
        strips = -(-4 * n * k // (STRIP_BYTES * self._team.num_threads)) * self._team.num_threads  # as many for each
        return LinearArgs(
            weight=self._weight.data_ptr(),
            bias=0 if self._bias is None else self._bias.data_ptr(),
            n=n,
            k=k,
            strip=-(-n // (4 * strips)) * 4,
            out_stride=4 * n,
            scratch_stride=4 * k * PANEL,
        )

    def _set_rows(self, arguments: Any, num_rows: int) -> Kernel:
        """Fit the arguments to the number of rows of x. Returns: the kernel for them."""
        arguments.m = num_rows
        if num_rows < self._few_rows:
            arguments.block = max(12, BLOCK_BYTES // (4 * arguments.k) // 12 * 12)  # whole tiles, of three rows or four
            parts = -(-arguments.k // PART) if num_rows >= PART_ROWS and arguments.k > WHOLE else 1
            arguments.part_len = -(-arguments.k // (W * parts)) * W
            return few_rows
        arguments.block = self._block(num_rows)
        return many_rows

    @property
    def num_bytes(self) -> int:
        return self._weight.nbytes + (0 if self._bias is None else self._bias.nbytes)

    @property
    def _scratch_floats(self) -> int:
        return self._weight.shape[1] * PANEL * self._team.num_threads

    def _block(self, m: int) -> int:
        """Choose the rows of x per task, so threads end together without packing panels too often."""
        panels, threads = -(-self._weight.shape[0] // PANEL), self._team.num_threads

        def cost(blocks: int) -> float:
            return -(-panels * blocks // threads) * (-(-m // blocks) + PACK_ROWS)

        return -(-m // min(range(1, 5), key=cost))


class LinearStage:
    """A LinearKernel as a stage of a program (replicas/kernels/program.py)."""

    def __init__(self, arguments: Any, set_rows: Callable[[Any, int], Kernel], scratch: Tensor) -> None:
        self._arguments, self._set_rows = arguments, set_rows
        self._memory = scratch  # kept alive
        arguments.scratch = scratch.data_ptr()

    def read_from(self, x: Tensor) -> None:
        """Multiply the rows of ``x`` [.., K] from now on."""
        assert x.shape[1] == self._arguments.k, f"rows of {self._arguments.k} are wanted, got {x.shape}"
        self._arguments.x, self._arguments.x_stride = x.data_ptr(), 4 * x.stride(0)

    def prepare(self, num_rows: int, counter: int) -> tuple[Kernel, ctypes.Structure]:
        self._arguments.counter = counter
        return self._set_rows(self._arguments, num_rows), self._arguments


def serves(weight: Tensor) -> bool:
    """Tell whether the kernels can multiply by this weight [N, K]."""
    n, k = weight.shape
    return (
        weight.dtype == torch.float32
        and weight.device.type == "cpu"
        and weight.is_contiguous()
        and n % W == 0
        and k % W == 0
    )
