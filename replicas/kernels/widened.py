"""y = x @ weight.T with int8 weights and activations on CPUs that cannot multiply bytes: both widened to fp32 first.

Owns:      the product's order of work. Weights lie as they were rounded, [N, K] int8 with [N, groups] scales in bf16.
Method:    the rows of x are rounded first, shared among the threads, and kept as floats in steps of their scale. Then
           four rows of the weight at a time are widened into L1 and multiplied by a block of x rows: memory is read a
           quarter as much as in fp32, and widening costs less than that saves while few rows share it.
Invariant: the same rounded numbers as int8.py's, in fp32 sums. An output row depends on its own x row alone: not on
           other rows, their number, or threads.
Thread:    all of the team; tasks are taken one by one.
"""

import ctypes
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numba import carray
from torch import Tensor

from replicas.kernels.linear import BLOCK_BYTES, PART, WHOLE, add_bias
from replicas.kernels.narrow import absolute, load_int8, prefetch, splat_bf16
from replicas.kernels.simd import W, add, hmax, hsum, load, maximum, mul, rint, splat, store, sub, take_next
from replicas.kernels.team import Kernel, Team, barrier, inlined, kernel, struct, team_size, thread_id
from replicas.kernels.tiles import dot, dot_in_parts

PANEL = 4  # rows of the weight that are widened at a time
STRIP_BYTES = 64 << 10  # weight bytes a task reads, less where threads would have few tasks
TASKS_PER_THREAD = 4  # at least, if there are enough panels
AHEAD_PANELS = 2  # what is asked for before it is read

# rounded: [m, k] floats. scratch: of each thread, PANEL widened rows, then what dot_in_parts keeps
WidenedArgs = struct(
    "WidenedArgs",
    "x x_stride rounded weight scales bias out out_stride m n k groups strip block part_len scratch scratch_stride "
    "counter",
)


@inlined
def round_group(x: int, length: int, out: int) -> None:
    """Floats at x, rounded to multiples of the largest magnitude / 127. NaN among them, or an infinity, makes all NaN:
    a maximum passes over NaN."""
    most, zeros = splat(0.0), splat(0.0)
    for i in range(0, 4 * length, 4 * W):
        value = load(x + i)
        most = maximum(most, absolute(value))
        zeros = add(zeros, sub(value, value))
    largest = hmax(most)
    factor = splat(127.0 / largest if largest > 0.0 else 0.0)
    scale = splat(largest / 127.0 + hsum(zeros))
    for i in range(0, 4 * length, 4 * W):
        store(out + i, mul(rint(mul(load(x + i), factor)), scale))


@inlined
def widen_row(weight: int, scales: int, groups: int, length: int, out: int, ahead: int) -> None:
    """A row of int8 numbers and its scales (bf16) as floats; meanwhile asks for what lies ``ahead`` bytes behind it."""
    for group in range(groups):
        scale = splat_bf16(scales + 2 * group)
        first = group * length
        for i in range(first, first + length, W):
            store(out + 4 * i, mul(load_int8(weight + i), scale))
        prefetch(weight + first + ahead)


@kernel(WidenedArgs)
def product(pointer: Any) -> None:
    """Multiply strip by strip: a task is a strip of the weight."""
    a = carray(pointer, 1)[0]
    me, threads = thread_id(), team_size()
    length = a.k // a.groups
    for i in range(a.m * a.groups * me // threads, a.m * a.groups * (me + 1) // threads):
        row, start = i // a.groups, i % a.groups * length
        round_group(a.x + row * a.x_stride + 4 * start, length, a.rounded + 4 * (row * a.k + start))
    barrier()
    row_bytes = 4 * a.k
    panel = a.scratch + me * a.scratch_stride
    waiting = panel + PANEL * row_bytes
    first = take_next(a.counter) * a.strip
    while first < a.n:
        end = min(first + a.strip, a.n)
        for row in range(0, a.m, a.block):
            rows, x = min(a.block, a.m - row), a.rounded + row * row_bytes
            for column in range(first, end, PANEL):
                for i in range(PANEL):
                    weight, scales = a.weight + (column + i) * a.k, a.scales + 2 * (column + i) * a.groups
                    widen_row(weight, scales, a.groups, length, panel + i * row_bytes, AHEAD_PANELS * PANEL * a.k)
                out = a.out + row * a.out_stride + 4 * column
                if a.part_len < a.k:
                    dot_in_parts(
                        rows, a.k, a.part_len, x, row_bytes, panel, row_bytes, out, a.out_stride, 0, waiting
                    )
                else:
                    dot(rows, PANEL, a.k, x, row_bytes, panel, row_bytes, out, a.out_stride, 0)
            add_bias(rows, end - first, a.bias + 4 * first, a.out + row * a.out_stride + 4 * first, a.out_stride)
        first = take_next(a.counter) * a.strip


class WidenedKernel:
    """The product by one int8 weight on a CPU without VNNI, in place of an `Int8Kernel` (int8.py); any K, any N."""

    def __init__(self, weight: Tensor, scales: Tensor, bias: Tensor | None, team: Team) -> None:
        """weight [N, K] int8, scales [N, groups] bf16 and bias [N] fp32."""
        (self._n, self._k), self._team = weight.shape, team
        rows, columns = -self._n % PANEL, -self._k % W  # a K that is no multiple of 16 has one group; zeros change none
        self._weight = F.pad(weight, (0, columns, 0, rows)).contiguous()
        self._scales = F.pad(scales, (0, 0, 0, rows)).contiguous()
        self._bias = torch.zeros(self._n + rows)
        if bias is not None:
            self._bias[: self._n] = bias
        self._counter = np.zeros(8, np.int64)

    @property
    def num_bytes(self) -> int:
        return self._weight.nbytes + self._scales.nbytes + self._bias.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply x [M, K] fp32 into a fresh tensor [M, N]."""
        if x.stride(1) != 1 or self._k % W:
            x = F.pad(x, (0, -self._k % W)).contiguous()
        out = torch.empty(x.shape[0], self._bias.shape[0])
        stage = WidenedStage(self._bias, self._weight, self._scales, x, out, self._team)
        _, arguments = stage.prepare(x.shape[0], self._counter.ctypes.data)
        self._counter[0] = 0
        self._team.run(product, arguments)
        return out if out.shape[1] == self._n else out[:, : self._n].contiguous()

    def stage(self, x: Tensor, out: Tensor, team: Team) -> "WidenedStage":
        """Make the product a stage of a program of ``team``: rows of x [.., K] into rows of ``out`` [.., N], both kept
        by the caller. Only where ``dense``."""
        assert self.dense, f"{self._n} output channels and {self._k} inputs do not fill panels of {PANEL} x {W}"
        return WidenedStage(self._bias, self._weight, self._scales, x, out, team)

    @property
    def dense(self) -> bool:
        """Tell whether inputs and output channels fill the panels."""
        return self._weight.shape == (self._n, self._k)

    def rows(self, ids: Tensor) -> Tensor:
        """Return rows ``ids`` [T] of the weight as floats [T, K]."""
        scales = self._scales[ids]
        parts = self._weight[ids].float().view(len(scales), scales.shape[1], -1)
        return parts.mul_(scales.float().unsqueeze(2)).flatten(1)[:, : self._k]


class WidenedStage:
    """A WidenedKernel as a stage of a program; its rounded x lies in the team's scratch."""

    def __init__(self, bias: Tensor, weight: Tensor, scales: Tensor, x: Tensor, out: Tensor, team: Team) -> None:
        (n, k), groups = weight.shape, scales.shape[1]
        block = max(12, BLOCK_BYTES // (4 * k) // 12 * 12)  # whole tiles, of three rows or four
        floats, own = x.shape[0] * k, PANEL * k + 256 * (block // 2 + 1)  # of a thread: widened rows, and lanes
        self._memory = team.memory(floats + team.num_threads * own)  # kept alive
        scratch = self._memory.data_ptr()
        panels = n // PANEL
        strip = max(1, min(STRIP_BYTES // (PANEL * k), panels // (TASKS_PER_THREAD * team.num_threads)))
        self._arguments = WidenedArgs(
            x=x.data_ptr(),
            x_stride=4 * x.stride(0),
            rounded=scratch,
            weight=weight.data_ptr(),
            scales=scales.data_ptr(),
            bias=bias.data_ptr(),
            out=out.data_ptr(),
            out_stride=4 * out.stride(0),
            n=n,
            k=k,
            groups=groups,
            strip=PANEL * strip,
            block=block,
            part_len=PART if k > WHOLE else k,
            scratch=scratch + 4 * floats,
            scratch_stride=4 * own,
        )

    def read_from(self, x: Tensor) -> None:
        """Multiply the rows of ``x`` [.., K] from now on."""
        assert x.shape[1] == self._arguments.k, f"rows of {self._arguments.k} are wanted, got {x.shape}"
        self._arguments.x, self._arguments.x_stride = x.data_ptr(), 4 * x.stride(0)

    def prepare(self, num_rows: int, counter: int) -> tuple[Kernel, ctypes.Structure]:
        self._arguments.m, self._arguments.counter = num_rows, counter
        return product, self._arguments
