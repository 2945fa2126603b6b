"""y = x @ weight.T + bias by activations in bf16, summed in fp32, on CPUs that multiply bf16.

Weights are in bf16 too, or of 4 and 8 bits with scales.

Owns:      the packed form of a weight in bf16: panels of 32 output channels, in which two inputs of a channel lie side
           by side. Weights with scales lie as in panels.py.
Method:    the kernel first rounds the rows of x, shared among the threads: x is fp32 in memory, and no other module
           sees what it is rounded to. Then 512 inputs of a strip of panels are multiplied by a block of rows, all of
           which stay in L2; few rows take all inputs of a panel at once. For AMX each 16 rows of x lie together, 32
           inputs at a time: rows whose length is a power of two would push each other out of the caches.
Invariant: an element's sum runs in one order, that of the inputs: an output row depends on its own x row alone, not on
           the number of rows, the threads, or how many inputs are taken at once. A process has one `way`.
Thread:    all of the team; tasks are taken one by one.
"""

import ctypes
from typing import Any

import torch
import torch.nn.functional as F
from numba import carray
from torch import Tensor

from replicas.kernels import bf16_tiles
from replicas.kernels.bf16_tiles import (
    DOT_ROWS,
    STEP,
    STEP_BYTES,
    TILE_ROWS,
    Way,
    amx_tile,
    begin_tiles,
    dot_tile,
    end_tiles,
    store1_rounded,
    store_rounded,
    tile_configuration,
)
from replicas.kernels.linear import LinearKernel, LinearStage, finish_panel
from replicas.kernels.narrow import load_bf16
from replicas.kernels.panel_tiles import COLUMNS
from replicas.kernels.panels import Panels, Rows, by_chunks
from replicas.kernels.scaled_dots import PAIR_FORMS, PAIR_ROWS, scaled_tile, unpacking
from replicas.kernels.simd import W, add, hsum, load, load1, store, store1, take_next
from replicas.kernels.team import Kernel, Team, barrier, inlined, kernel, struct, team_size, thread_id
from replicas.kernels.weight_formats import WeightFormat

PART = 512  # inputs of many rows at a time: 32 KB of a panel
FEW_ROWS = 2 * TILE_ROWS  # up to so many take all inputs at once
UNPACKED = 256  # inputs of a panel with scales, whose pairs lie in L1 for more rows than a tile has: 16 KB
_UNPACKED_BYTES = 2 * COLUMNS * UNPACKED
BLOCK_ROWS = 192  # of x, per task, at most
STRIP, STRIP_BYTES = 8, 128 << 10  # panels a task of many rows reads; bytes of them, one of few
# at least, if there are enough panels: of few rows, whose panels ask for what lies behind them, and of many, where each
# task that is left is one thread's while the others wait
TASKS_PER_THREAD, TASKS_OF_MANY = 4, 16
_ROW_BYTES = 4 * COLUMNS  # of a panel's results
_ASIDE = BLOCK_ROWS * _ROW_BYTES  # of a block's sums of a panel

# rounded: x in bf16, with what lies between its rows, their steps, and each 16 rows. inputs: k in whole steps, of which
# part at once. block: rows of x, nearly as many for each task. tiles: AMX's configuration. aside: of each thread and
# panel of a task, sums until they are complete; pairs: of each thread, unpacked weights with scales
Bf16Args = struct(
    "Bf16Args",
    "x x_stride k rounded row_bytes step_bytes group_bytes weight panel_bytes bias out out_stride m n inputs part "
    "strip block tiles aside pairs counter",
)
_ONE, _TWO = (amx_tile(groups, fetches=False) for groups in (1, 2))
_ONE_FETCHES, _TWO_FETCHES = (amx_tile(groups, fetches=True) for groups in (1, 2))


@inlined
def round_step(x: int, length: int, out: int) -> None:
    """Store floats at x as bf16, and zeros up to a whole step."""
    if length >= STEP:
        for i in range(0, STEP, W):
            store_rounded(out + 2 * i, load(x + 4 * i))
        return
    for i in range(STEP):
        store1_rounded(out + 2 * i, load1(x + 4 * i) if i < length else 0.0)


@inlined
def place_of_row(a: Any, row: int) -> int:
    """Return where row ``row`` of what is rounded begins; that of the first of a block, where the block does."""
    return int(a.rounded + row // TILE_ROWS * a.group_bytes + row % TILE_ROWS * a.row_bytes)


@inlined
def place_of_sums(a: Any, rows: int, column: int, out: int, aside: int) -> tuple[int, int]:
    """Return where a panel's sums are made, and what lies between their rows: where they belong if they are made at
    once, of all columns, and by AMX of all rows of a tile."""
    if a.part >= a.inputs and a.n - column >= COLUMNS and (not a.tiles or rows % TILE_ROWS == 0):
        return out, a.out_stride
    return aside, _ROW_BYTES


@inlined
def finish(a: Any, rows: int, at: int, stride: int, column: int, out: int) -> None:
    """Add the bias to a panel's sums at ``at``, and bring them to ``out``."""
    if a.n - column < COLUMNS or (at == out and not a.bias):
        finish_panel(a, rows, at, stride, column, out)
        return
    for row in range(rows):
        for i in range(0, _ROW_BYTES, 4 * W):
            value = load(at + row * stride + i)
            if a.bias:
                value = add(value, load(a.bias + 4 * column + i))
            store(out + row * a.out_stride + i, value)


@inlined
def no_tiles(a: Any) -> None:
    """Compiled where a CPU has none: LLVM ends the process at an instruction that the CPU lacks, called or not."""


@inlined
def no_sum(a: Any, row: int, step: int) -> None:
    """For weights without least numbers."""


@inlined
def sum_of_step(a: Any, row: int, step: int) -> None:
    """Sum what was rounded, for a group's least numbers, which all of x are multiplied by; sums lie behind the row."""
    at = row + step * a.step_bytes
    store1(row + 2 * a.inputs + 4 * step, hsum(add(load_bf16(at), load_bf16(at + 2 * W))))


def make_run(
    multiply: Any, name: str, panel_step: int = STEP_BYTES, begin: Any = no_tiles, finish_tiles: Any = no_tiles,
    sum_step: Any = no_sum,
) -> Any:  # fmt: skip
    """Make the function that all threads of a team run. ``multiply(a, rows, x, b, c, c_stride, start)``: inputs from
    ``start`` on of a panel by a block of rows; between ``begin(a)`` and ``finish_tiles(a)``. ``panel_step``: bytes of a
    step of a panel. ``sum_step(a, row, step)``: what is done besides with a step of a row that was rounded."""

    def run(a: Any) -> None:
        """Multiply, task by task: (strip of panels, block of x rows), blocks of a strip one after the other."""
        me, threads, steps = thread_id(), team_size(), a.inputs // STEP
        for i in range(a.m * steps * me // threads, a.m * steps * (me + 1) // threads):
            row, step = i // steps, i % steps
            row_at = place_of_row(a, row)
            round_step(a.x + row * a.x_stride + 4 * STEP * step, a.k - STEP * step, row_at + step * a.step_bytes)
            sum_step(a, row_at, step)
        barrier()
        begin(a)
        panels, blocks = (a.n + COLUMNS - 1) // COLUMNS, (a.m + a.block - 1) // a.block
        num_tasks = (panels + a.strip - 1) // a.strip * blocks
        task = take_next(a.counter)
        while task < num_tasks:
            first, row = task // blocks * a.strip, task % blocks * a.block
            rows, end = min(a.block, a.m - row), min(first + a.strip, panels)
            x, here = place_of_row(a, row), a.out + row * a.out_stride
            for start in range(0, a.inputs, a.part):
                for panel in range(first, end):
                    aside = a.aside + (me * STRIP + panel - first) * _ASIDE
                    c, ldc = place_of_sums(a, rows, panel * COLUMNS, here + panel * _ROW_BYTES, aside)
                    b = a.weight + panel * a.panel_bytes + start // STEP * panel_step
                    multiply(a, rows, x + start // STEP * a.step_bytes, b, c, ldc, start)
            for panel in range(first, end):
                column, out = panel * COLUMNS, here + panel * _ROW_BYTES
                aside = a.aside + (me * STRIP + panel - first) * _ASIDE
                c, ldc = place_of_sums(a, rows, column, out, aside)
                finish(a, rows, c, ldc, column, out)
            task = take_next(a.counter)
        finish_tiles(a)

    run.__qualname__ = f"run_{name}"
    return inlined(run)


@inlined
def configured(a: Any) -> None:
    begin_tiles(a.tiles)


@inlined
def released(a: Any) -> None:
    end_tiles()


@inlined
def multiply_tiles(a: Any, rows: int, x: int, b: int, c: int, ldc: int, start: int) -> None:
    """Multiply in tiles of 16 rows, of which the last may reach beyond ``rows``."""
    steps = min(a.part, a.inputs - start) // STEP
    for row in range(0, rows, 2 * TILE_ROWS):
        two, x_at, at = rows - row > TILE_ROWS, x + row // TILE_ROWS * a.group_bytes, c + row * ldc
        if two and row:
            _TWO(x_at, a.group_bytes, b, at, ldc, steps, start)
        elif two:
            _TWO_FETCHES(x_at, a.group_bytes, b, at, ldc, steps, start)
        elif row:
            _ONE(x_at, a.group_bytes, b, at, ldc, steps, start)
        else:
            _ONE_FETCHES(x_at, a.group_bytes, b, at, ldc, steps, start)


@inlined
def multiply_dots(a: Any, rows: int, x: int, b: int, c: int, ldc: int, start: int) -> None:
    """Multiply in tiles of nearly the same height."""
    steps, count, row = min(a.part, a.inputs - start) // STEP, (rows + DOT_ROWS - 1) // DOT_ROWS, 0
    for i in range(count):
        end = rows * (i + 1) // count
        dot_tile(end - row, x + row * a.row_bytes, a.row_bytes, b, c + row * ldc, ldc, steps, start)
        row = end


_RUN_TILES = make_run(multiply_tiles, "tiles", begin=configured, finish_tiles=released)


@kernel(Bf16Args)
def product_amx(pointer: Any) -> None:
    _RUN_TILES(carray(pointer, 1)[0])


_RUN_DOTS = make_run(multiply_dots, "dots")


@kernel(Bf16Args)
def product_dots(pointer: Any) -> None:
    _RUN_DOTS(carray(pointer, 1)[0])


def make_multiply_scaled(format_: WeightFormat) -> Any:
    """Make what `multiply_dots` is, for weights with scales: the rows of one tile unpack what they read."""
    form = PAIR_FORMS[format_]
    group_bytes = form.group_bytes
    fused, unpack, tile = scaled_tile(form, unpacked=False), unpacking(form), scaled_tile(form, unpacked=True)

    def multiply(a: Any, rows: int, x: int, b: int, c: int, ldc: int, start: int) -> None:
        end, sums = min(start + a.part, a.inputs), x + 2 * (a.inputs - start)
        pairs = a.pairs + thread_id() * _UNPACKED_BYTES
        if rows <= PAIR_ROWS:
            fused(rows, x, a.row_bytes, sums + start // 8, b, 0, c, ldc, (end - start) // STEP, start)
            return
        count = (rows + PAIR_ROWS - 1) // PAIR_ROWS
        for first in range(start, end, UNPACKED):
            groups = min(UNPACKED, end - first) // STEP
            unpack(b, groups, pairs)
            row = 0
            for i in range(count):
                stop = rows * (i + 1) // count
                x_at, sums_at, at = x + row * a.row_bytes, sums + row * a.row_bytes + first // 8, c + row * ldc
                tile(stop - row, x_at, a.row_bytes, sums_at, b, pairs, at, ldc, groups, first)
                row = stop
            x, b = x + 2 * UNPACKED, b + UNPACKED // STEP * group_bytes

    multiply.__qualname__ = f"multiply_{format_}"
    return inlined(multiply)


_RUN_Q4_1 = make_run(make_multiply_scaled("q4_1"), "q4_1", PAIR_FORMS["q4_1"].group_bytes, sum_step=sum_of_step)


@kernel(Bf16Args)
def product_q4_1(pointer: Any) -> None:
    _RUN_Q4_1(carray(pointer, 1)[0])


_RUN_Q8_0 = make_run(make_multiply_scaled("q8_0"), "q8_0", PAIR_FORMS["q8_0"].group_bytes)


@kernel(Bf16Args)
def product_q8_0(pointer: Any) -> None:
    _RUN_Q8_0(carray(pointer, 1)[0])


PRODUCTS: dict[tuple[Way, WeightFormat], Kernel] = {
    ("amx", "bfloat16"): product_amx,
    ("dots", "bfloat16"): product_dots,
    ("dots", "q4_1"): product_q4_1,
    ("dots", "q8_0"): product_q8_0,
}
_TILES = tile_configuration()


def serves(format_: WeightFormat, dtype: torch.dtype, *, grouped: bool = False) -> bool:
    """Tell whether this CPU multiplies weights in ``format_`` by activations in bf16, of a model in ``dtype``.

    ``grouped``: rows of several weights, which lie together in AMX's tiles of 16.
    """
    way = bf16_tiles.way()
    in_bf16 = dtype == torch.bfloat16 or format_ == "bfloat16"
    return in_bf16 and (way, format_) in PRODUCTS and not (grouped and way == "amx")


class Bf16Kernel(LinearKernel):
    """The product by a weight that `pack` made, or in a format of `PAIR_FORMS`, plus ``bias`` [N] fp32; any N and K."""

    def __init__(self, weight: Panels, team: Team, bias: Tensor | None = None, *, by: Way | None = None) -> None:
        """``by``: what this CPU has, as `way` tells it if None."""
        super().__init__(weight, team, bias)
        chosen = by or bf16_tiles.way()
        assert chosen is not None, "this CPU does not multiply bf16"
        self._way: Way = chosen

    def stage(self, x: Tensor, out: Tensor, team: Team) -> "Bf16Stage":
        return Bf16Stage(self.weight, self._bias, x, out, team, by=self._way)

    def rows(self, ids: Tensor) -> Tensor:
        if self.weight.format != "bfloat16":
            return self.weight.rows(ids)
        pairs = self.weight.data.view(torch.bfloat16).view(len(self.weight.data), -1, COLUMNS, 2)
        return pairs[ids // COLUMNS, :, ids % COLUMNS].float().flatten(1)[:, : self.weight.k]


class Bf16Stage(LinearStage):
    """A Bf16Kernel as a stage of a program; what it rounds lies in the team's scratch."""

    def __init__(self, weight: Panels, bias: Tensor | None, x: Tensor, out: Tensor, team: Team, *, by: Way) -> None:
        inputs = -(-weight.k // STEP) * STEP
        row_bytes, step_bytes, group_bytes, room = _layout(by, inputs)
        rounded_bytes = -(-x.shape[0] // FEW_ROWS) * FEW_ROWS * room
        aside_bytes = team.num_threads * STRIP * _ASIDE
        pairs_bytes = team.num_threads * _UNPACKED_BYTES
        self._memory = team.memory((rounded_bytes + aside_bytes + pairs_bytes) // 4)  # kept alive
        self._weight, self._bias, self._function = weight, bias, PRODUCTS[by, weight.format]
        few, many = (len(weight.data) // (tasks * team.num_threads) for tasks in (TASKS_PER_THREAD, TASKS_OF_MANY))
        self._strip_of_few = max(1, min(few, STRIP, STRIP_BYTES // weight.data.stride(0)))
        self._strip = max(1, min(many, STRIP))
        self._unit = 2 * TILE_ROWS if by == "amx" else 4 * DOT_ROWS  # of a block: whole tiles, and each 16 rows of x
        self._arguments = Bf16Args(
            x=x.data_ptr(),
            x_stride=4 * x.stride(0),
            k=weight.k,
            rounded=self._memory.data_ptr(),
            row_bytes=row_bytes,
            step_bytes=step_bytes,
            group_bytes=group_bytes,
            weight=weight.data.data_ptr(),
            panel_bytes=weight.data.stride(0),
            bias=0 if bias is None else bias.data_ptr(),
            out=out.data_ptr(),
            out_stride=4 * out.stride(0),
            n=weight.n,
            inputs=inputs,
            tiles=_TILES.ctypes.data if by == "amx" else 0,
            aside=self._memory.data_ptr() + rounded_bytes,
            pairs=self._memory.data_ptr() + rounded_bytes + aside_bytes,
        )

    def prepare(self, num_rows: int, counter: int) -> tuple[Kernel, ctypes.Structure]:
        few, a = num_rows <= FEW_ROWS, self._arguments
        a.m, a.counter, a.part = num_rows, counter, a.inputs if few else PART
        a.strip, blocks = self._strip_of_few if few else self._strip, -(-num_rows // BLOCK_ROWS)
        a.block = -(-num_rows // (blocks * self._unit)) * self._unit
        return self._function, a


def _layout(by: Way, inputs: int) -> tuple[int, int, int, int]:
    """Return how far what is rounded of a row, a step and a group of rows lies from that of the next, and the bytes
    that a row needs."""
    if by == "amx":
        return 2 * STEP, 2 * STEP * TILE_ROWS, 2 * inputs * TILE_ROWS, 2 * inputs
    behind = (4 * inputs // STEP // 64 + 1) * 64  # the sums of steps, in whole cache lines
    row = 2 * inputs + behind
    return row, 2 * STEP, TILE_ROWS * row, row


def pack(weight: Tensor | Rows) -> Panels:
    """[N, K] -> panels [N in whole ones, K in whole steps / 2, 32, 2]; zeros where there are no weights."""
    return by_chunks(weight, "bfloat16", 0, lambda rows: _pack(weight[rows]))


def _pack(weight: Tensor) -> Tensor:
    n, k = weight.shape
    whole = F.pad(weight.bfloat16(), (0, -k % STEP, 0, -n % COLUMNS))
    pairs = whole.view(-1, COLUMNS, whole.shape[1] // 2, 2).transpose(1, 2)
    return pairs.contiguous().view(torch.uint8).flatten(1)
