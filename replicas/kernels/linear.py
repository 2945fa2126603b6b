"""y = x @ weight.T in fp32, from the weight as it was loaded: no packed copy, so that replicas can share mapped files.

Method:    few rows: dot products along the weight's rows, each read once, in place: as fast as memory allows. Many:
           64 rows of the weight at a time are transposed into scratch that lies in L2, and used by a block of x.
Invariant: an output row depends on its own x row and on which of the two ways was taken, not on other rows or threads.
Thread:    all of the team; tasks are taken one by one.
"""

from typing import Any

import numpy as np
import torch
from numba import carray
from torch import Tensor

from replicas.kernels.register_tiles import transpose16
from replicas.kernels.simd import W, take_next
from replicas.kernels.team import Team, inlined, kernel, struct, thread_id
from replicas.kernels.tiles import dot, outer

PANEL = 64  # weight rows a task of the many-rows way transposes
STRIP_BYTES = 256 << 10  # weight bytes a task of the few-rows way reads
FEW_ROWS = 32  # from here on transposing pays: measured crossing between 16 and 48 rows on Zen 5
SUM_LENGTH = 192  # products summed before they join the total: rounding errors grow with the length of a running sum
PACK_ROWS = 24  # transposing a panel takes as long as multiplying it with this many rows; for balancing only

LinearArgs = struct(
    "LinearArgs", "x x_stride weight out out_stride m n k strip block scratch scratch_stride counter"
)


@kernel(LinearArgs)
def few_rows(pointer: Any) -> None:
    a = carray(pointer, 1)[0]
    row_bytes = a.k * 4
    first = take_next(a.counter) * a.strip
    while first < a.n:
        count = min(a.strip, a.n - first)
        weight, out = a.weight + first * row_bytes, a.out + 4 * first
        dot(a.m, count, a.k, a.x, a.x_stride, weight, row_bytes, out, a.out_stride, 4 * row_bytes)
        first = take_next(a.counter) * a.strip


@inlined
def pack_panel(weight: int, rows: int, k: int, panel: int) -> None:
    """rows (at most 64, a multiple of 16) of weight [rows, k] into panel [k, 64]."""
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
        task = take_next(a.counter)


class LinearKernel:
    """Multiplies by one weight [N, K]; N and K multiples of 16, fp32, contiguous, in memory."""

    def __init__(self, weight: Tensor, team: Team) -> None:
        assert serves(weight), f"{weight.shape} {weight.dtype} is not for these kernels"
        self._weight, self._team = weight, team
        n, k = weight.shape
        self._counter = np.zeros(8, np.int64)
        strip = max(4, STRIP_BYTES // (4 * k) // 4 * 4)
        self._arguments = LinearArgs(weight=weight.data_ptr(), n=n, k=k, strip=strip, out_stride=4 * n)
        self._arguments.counter = self._counter.ctypes.data

    def __call__(self, x: Tensor) -> Tensor:
        """[M, K] -> [M, N], a fresh tensor."""
        m, n = x.shape[0], self._weight.shape[0]
        if x.stride(1) != 1:
            x = x.contiguous()
        out = torch.empty(m, n)
        arguments = self._arguments
        arguments.x, arguments.x_stride, arguments.out, arguments.m = x.data_ptr(), 4 * x.stride(0), out.data_ptr(), m
        self._counter[0] = 0
        if m < FEW_ROWS:
            self._team.run(few_rows, arguments)
        else:
            arguments.block = self._block(m)
            floats = self._weight.shape[1] * PANEL
            scratch = self._team.scratch(floats * self._team.num_threads)
            arguments.scratch, arguments.scratch_stride = scratch, 4 * floats
            self._team.run(many_rows, arguments)
        return out

    def _block(self, m: int) -> int:
        """Rows of x a task takes, so that the threads end together without packing panels too often."""
        panels, threads = -(-self._weight.shape[0] // PANEL), self._team.num_threads

        def cost(blocks: int) -> float:
            return -(-panels * blocks // threads) * (-(-m // blocks) + PACK_ROWS)

        return -(-m // min(range(1, 5), key=cost))


def serves(weight: Tensor) -> bool:
    """Whether the kernels can multiply by this weight [N, K]."""
    n, k = weight.shape
    return (
        weight.dtype == torch.float32
        and weight.device.type == "cpu"
        and weight.is_contiguous()
        and n % W == 0
        and k % W == 0
    )
