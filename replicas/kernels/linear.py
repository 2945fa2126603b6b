"""y = x @ weight.T + bias in fp32 arithmetic, from a weight in panels (panels.py), for any number of rows.

Method:    192 inputs of a panel at a time (24 KB as floats, so they stay in L1) are multiplied by a block of rows of x
           that stays in L2. Formats narrower than fp32 become floats in the tile's registers, or for many rows in L1,
           once a block. What comes next is asked for meanwhile, so that memory works while the core computes. Where
           activations are rounded too (int8 on a CPU that cannot multiply bytes), that comes first, shared among the
           threads.
Invariant: an element's sum is taken in one order, that of the inputs, 192 at a time: an output row depends on its own
           x row alone, whatever the number of rows, the tile, the format of exact weights, or the threads.
Thread:    all of the team; tasks are taken one by one.
"""

import ctypes
import threading
from typing import Any

import numpy as np
import torch
from numba import carray
from torch import Tensor

from replicas.kernels.narrow import absolute
from replicas.kernels.panel_tiles import COLUMNS, FORMS, tiles, widening
from replicas.kernels.panels import Panels, pack
from replicas.kernels.simd import (
    W,
    add,
    hmax,
    hsum,
    load,
    load1,
    maximum,
    mul,
    rint,
    splat,
    store,
    store1,
    sub,
    take_next,
)
from replicas.kernels.team import Kernel, Team, barrier, inlined, kernel, struct, team_size, thread_id
from replicas.kernels.tiles import MANY_REGISTERS
from replicas.kernels.weight_formats import WeightFormat

STEPS = 192  # inputs summed before they join the total: rounding errors grow with the length of a running sum
TILE_ROWS = 12 if MANY_REGISTERS else 6  # by 32 columns (24 of AVX-512's registers), else by 16 (12 of AVX2's 16)
WIDE_ROWS = TILE_ROWS if MANY_REGISTERS else 3  # up to so many a tile has all 32 columns, and reads a weight once
PAIR_ROWS = 2  # up to so many two panels at once, where weights have scales: one would wait for its own sums
FUSED_ROWS = 4 * TILE_ROWS  # up to so many each tile widens what it reads; for more that is done once
BLOCK_BYTES = 384 << 10  # of x, per task: they stay in L2
STRIP_BYTES = 128 << 10  # weight bytes a task reads, less where threads would have few tasks
TASKS_PER_THREAD = 4  # at least, if there are enough panels
AHEAD_BYTES = 10 << 10  # what is asked for before it is read; 4 KB lost a third at 1 and 8 rows, 24 KB a tenth
# rounds: whether x is rounded to `rounded` [m, k] first, in groups. steps: inputs that are summed at once, a multiple
# of group. scratch: of each thread, a widened part of a panel, then a panel's results where columns are missing
LinearArgs = struct(
    "LinearArgs",
    "x x_stride rounds rounded weight panel_bytes group ahead bias out out_stride m n k steps strip block "
    "scratch scratch_stride counter",
)


@inlined
def round_group(x: int, length: int, out: int) -> None:
    """Floats at x, rounded to multiples of the largest magnitude / 127. NaN among them, or an infinity, makes all NaN:
    a maximum passes over NaN."""
    most, zeros = splat(0.0), splat(0.0)
    whole = 4 * (length // W * W)
    for i in range(0, whole, 4 * W):
        value = load(x + i)
        most = maximum(most, absolute(value))
        zeros = add(zeros, sub(value, value))
    for i in range(whole, 4 * length, 4):
        value = splat(load1(x + i))
        most = maximum(most, absolute(value))
        zeros = add(zeros, sub(value, value))
    largest = hmax(most)
    factor = splat(127.0 / largest if largest > 0.0 else 0.0)
    scale = splat(largest / 127.0 + hsum(zeros))
    for i in range(0, whole, 4 * W):
        store(out + i, mul(rint(mul(load(x + i), factor)), scale))
    for i in range(whole, 4 * length, 4):
        store1(out + i, hsum(mul(rint(mul(splat(load1(x + i)), factor)), scale)) * (1.0 / W))  # all lanes are equal


@inlined
def finish_panel(a: Any, rows: int, at: int, stride: int, column: int, out: int) -> None:
    """Add the bias to a panel's results at ``at``; brings those of a panel that lacks columns to ``out``."""
    width = min(COLUMNS, a.n - column)
    if at == out and not a.bias:
        return
    for row in range(rows):
        for i in range(0, 4 * width, 4):
            value = load1(at + row * stride + i)
            if a.bias:
                value += load1(a.bias + 4 * column + i)
            store1(out + row * a.out_stride + i, value)


def make_multiply(name: WeightFormat) -> Any:
    """Make ``f(m, a, a_stride, b, group, c, c_stride, k, keep, ahead)``, which computes c[m, 32] = a[m, k] @ b[k, 32],
    added to c if ``keep`` is 1, in tiles of nearly the same height; asks for what lies ``ahead`` bytes behind b."""
    form = FORMS[name]
    whole = tiles(form, WIDE_ROWS, (0, 1))
    left, right = (tiles(form, TILE_ROWS if WIDE_ROWS < TILE_ROWS else 1, (half,)) for half in (0, 1))

    def multiply(m: int, a: int, lda: int, b: int, group: int, c: int, ldc: int, k: int, keep: int, ahead: int) -> None:
        count, row = (m + TILE_ROWS - 1) // TILE_ROWS, 0
        for i in range(count):
            end = m * (i + 1) // count
            a_at, c_at, rows = a + row * lda, c + row * ldc, end - row
            if rows <= WIDE_ROWS:
                whole(rows, a_at, lda, b, 0, group, c_at, ldc, k, keep, ahead)
            else:
                left(rows, a_at, lda, b, 0, group, c_at, ldc, k, keep, ahead)
                right(rows, a_at, lda, b, 0, group, c_at, ldc, k, keep, 0)
            row, ahead = end, 0

    multiply.__qualname__ = f"multiply_{name}"
    return inlined(multiply)


_MULTIPLY_FLOATS = make_multiply("float32")


def make_run(name: WeightFormat) -> Any:
    """Make the function that all threads of a team run over weights of a format."""
    form = FORMS[name]
    pair, widen = tiles(form, PAIR_ROWS, (0, 1), 2), widening(form)
    multiply, multiply_floats = make_multiply(name), _MULTIPLY_FLOATS
    head, step, in_place, pairs = form.head, form.step, name == "float32", form.head > 0

    def run(a: Any) -> None:
        """Multiply, task by task: (strip of panels, block of x rows), blocks of a strip one after the other."""
        me, threads = thread_id(), team_size()
        x, x_stride = a.x, a.x_stride
        if a.rounds:
            groups = a.k // a.group
            for i in range(a.m * groups * me // threads, a.m * groups * (me + 1) // threads):
                row, start = i // groups, 4 * (i % groups * a.group)
                round_group(a.x + row * a.x_stride + start, a.group, a.rounded + 4 * row * a.k + start)
            x, x_stride = a.rounded, 4 * a.k
            barrier()
        part = a.scratch + me * a.scratch_stride
        aside = part + 4 * COLUMNS * a.steps
        panels, blocks = (a.n + COLUMNS - 1) // COLUMNS, (a.m + a.block - 1) // a.block
        num_tasks = (panels + a.strip - 1) // a.strip * blocks
        part_bytes = a.steps // a.group * head + a.steps * step
        task = take_next(a.counter)
        while task < num_tasks:
            first, row = task // blocks * a.strip, task % blocks * a.block
            rows, x_at = min(a.block, a.m - row), x + row * x_stride
            panel, end = first, min(first + a.strip, panels)
            while panel < end:
                weight, column = a.weight + panel * a.panel_bytes, panel * COLUMNS
                out = a.out + row * a.out_stride + 4 * column
                at, stride = out, a.out_stride
                both = pairs and rows <= PAIR_ROWS and panel + 1 < end and a.n - column >= 2 * COLUMNS
                if a.n - column < COLUMNS:
                    at, stride = aside, 4 * COLUMNS
                for start in range(0, a.k, a.steps):
                    steps, keep, x_here = min(a.steps, a.k - start), 1 if start else 0, x_at + 4 * start
                    if both:
                        pair(rows, x_here, x_stride, weight, a.panel_bytes, a.group, at, stride, steps, keep, a.ahead)
                    elif in_place or rows <= FUSED_ROWS:
                        multiply(rows, x_here, x_stride, weight, a.group, at, stride, steps, keep, a.ahead)
                    else:
                        widen(weight, a.group, steps, part, a.ahead)
                        multiply_floats(rows, x_here, x_stride, part, steps, at, stride, steps, keep, 0)
                    weight += part_bytes
                finish_panel(a, rows, at, stride, column, out)
                panel += 1
                if both:
                    finish_panel(a, rows, at + 4 * COLUMNS, stride, column + COLUMNS, out + 4 * COLUMNS)
                    panel += 1
            task = take_next(a.counter)

    run.__qualname__ = f"run_{name}"
    return inlined(run)


_RUN_FLOAT32 = make_run("float32")


@kernel(LinearArgs)
def product_float32(pointer: Any) -> None:
    _RUN_FLOAT32(carray(pointer, 1)[0])


_RUN_BFLOAT16 = make_run("bfloat16")


@kernel(LinearArgs)
def product_bfloat16(pointer: Any) -> None:
    _RUN_BFLOAT16(carray(pointer, 1)[0])


_RUN_FLOAT16 = make_run("float16")


@kernel(LinearArgs)
def product_float16(pointer: Any) -> None:
    _RUN_FLOAT16(carray(pointer, 1)[0])


_RUN_INT8 = make_run("int8")


@kernel(LinearArgs)
def product_int8(pointer: Any) -> None:
    _RUN_INT8(carray(pointer, 1)[0])


_RUN_Q8_0 = make_run("q8_0")


@kernel(LinearArgs)
def product_q8_0(pointer: Any) -> None:
    _RUN_Q8_0(carray(pointer, 1)[0])


_RUN_Q4_1 = make_run("q4_1")


@kernel(LinearArgs)
def product_q4_1(pointer: Any) -> None:
    _RUN_Q4_1(carray(pointer, 1)[0])


_RUN_MXFP4 = make_run("mxfp4")


@kernel(LinearArgs)
def product_mxfp4(pointer: Any) -> None:
    _RUN_MXFP4(carray(pointer, 1)[0])


PRODUCTS: dict[WeightFormat, Kernel] = {
    "float32": product_float32,
    "bfloat16": product_bfloat16,
    "float16": product_float16,
    "int8": product_int8,
    "q8_0": product_q8_0,
    "q4_1": product_q4_1,
    "mxfp4": product_mxfp4,
}


class LinearKernel:
    """The product by one packed weight [N, K] plus ``bias`` [N] fp32; any N and K."""

    def __init__(
        self, weight: Panels | Tensor, team: Team, bias: Tensor | None = None, *, rounds: bool = False
    ) -> None:
        """``weight``: a tensor is packed as fp32. ``rounds``: activations are rounded to int8, in its groups."""
        self.weight = pack(weight, "float32") if isinstance(weight, Tensor) else weight
        self._bias, self._team, self._rounds = bias, team, rounds
        self._counter = np.zeros(8, np.int64)
        self._counter_at = self._counter.ctypes.data
        self._last: LinearStage | None = None  # of the last call, for the next of as many rows
        self._asked = 0, 0

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes + (0 if self._bias is None else self._bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply x [M, K] fp32 into a fresh tensor [M, N]."""
        if x.stride(1) != 1:
            x = x.contiguous()
        out = torch.empty(x.shape[0], self.weight.n)
        stage, asked = self._last, (x.shape[0], threading.get_ident())  # the scratch is the thread's
        if stage is None or self._asked != asked:
            self._last, self._asked = (stage := self.stage(x, out, self._team)), asked
        stage.move(x, out)
        function, arguments = stage.prepare(x.shape[0], self._counter_at)
        self._counter[0] = 0
        self._team.run(function, arguments)
        return out

    def stage(self, x: Tensor, out: Tensor, team: Team) -> "LinearStage":
        """Make the product a stage of a program of ``team``: rows of x [.., K] into rows of ``out`` [.., N], both kept
        by the caller."""
        return LinearStage(self.weight, self._bias, x, out, team, rounds=self._rounds)

    def rows(self, ids: Tensor) -> Tensor:
        """Return rows ``ids`` [T] of the weight as floats [T, K]."""
        return self.weight.rows(ids)


class LinearStage:
    """A LinearKernel as a stage of a program (replicas/kernels/team.py)."""

    def __init__(
        self, weight: Panels, bias: Tensor | None, x: Tensor, out: Tensor, team: Team, *, rounds: bool
    ) -> None:
        k, panels = weight.k, len(weight.data)
        steps = STEPS if weight.group == 0 or STEPS % weight.group == 0 else -(-k // weight.group) * weight.group
        block = max(TILE_ROWS, BLOCK_BYTES // (4 * k) // TILE_ROWS * TILE_ROWS)
        floats = x.shape[0] * k if rounds else 0
        own = COLUMNS * (steps + (block if weight.n % COLUMNS else 0))
        self._memory = team.memory(floats + team.num_threads * own)  # kept alive
        self._weight, self._bias, self._function = weight, bias, PRODUCTS[weight.format]
        scratch = self._memory.data_ptr()
        strip = min(STRIP_BYTES // weight.data.stride(0), panels // (TASKS_PER_THREAD * team.num_threads))
        self._arguments = LinearArgs(
            x=x.data_ptr(),
            x_stride=4 * x.stride(0),
            rounds=int(rounds),
            rounded=scratch,
            weight=weight.data.data_ptr(),
            panel_bytes=weight.data.stride(0),
            group=weight.group or steps,
            ahead=AHEAD_BYTES,
            bias=0 if bias is None else bias.data_ptr(),
            out=out.data_ptr(),
            out_stride=4 * out.stride(0),
            n=weight.n,
            k=k,
            steps=steps,
            strip=max(1, strip),
            block=block,
            scratch=scratch + 4 * floats,
            scratch_stride=4 * own,
        )

    def move(self, x: Tensor, out: Tensor) -> None:
        """Multiply rows of another ``x`` into another ``out``."""
        self.read_from(x)
        self._arguments.out, self._arguments.out_stride = out.data_ptr(), 4 * out.stride(0)

    def read_from(self, x: Tensor) -> None:
        """Multiply the rows of ``x`` [.., K] from now on."""
        assert x.shape[1] == self._arguments.k, f"rows of {self._arguments.k} are wanted, got {x.shape}"
        self._arguments.x, self._arguments.x_stride = x.data_ptr(), 4 * x.stride(0)

    def prepare(self, num_rows: int, counter: int) -> tuple[Kernel, ctypes.Structure]:
        self._arguments.m, self._arguments.counter = num_rows, counter
        return self._function, self._arguments
