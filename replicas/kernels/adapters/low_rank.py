"""out += (x @ A.T) @ B.T for rows of a step, by the adapter of each (LoRA): two kernels after a product.

Method:    The rows of an adapter that lie one behind the other are multiplied together, some at a time (`StepRows`).
           A product of several weights (q, k and v) has their A one below the other, and a B for each. Both lie in
           panels of 16 outputs, so that a rank of 16 wastes nothing: in bfloat16 where that holds all of an adapter's
           numbers as they are, else in fp32. Sums are in fp32, so that they are the same in both.
Invariant: the order of the sums of an element is one: x @ A.T over the inputs, 192 at a time; that by B over the
           ranks; and this total is added to ``out``. It depends on the row and its adapter alone: not on other rows,
           their adapters, or threads. B carries the adapter's scale. Rows without an adapter are not touched.
Thread:    all of the team; tasks are taken one by one.
"""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numba import carray
from torch import Tensor

from replicas.kernels.linear import AHEAD_BYTES, STEPS, TILE_ROWS
from replicas.kernels.narrow import emit_load_bf16
from replicas.kernels.panel_tiles import PanelForm, tiles
from replicas.kernels.simd import W, emit_load, load1, load_i64, store1, take_next
from replicas.kernels.team import Kernel, Team, inlined, kernel, struct, thread_id

Floats = npt.NDArray[np.float32]
Numbers = npt.NDArray[Any]  # fp32, or the bits of bfloat16
BLOCK_ROWS = 48  # of one adapter, per task: their x stays in L2
MAX_PIECES = 3  # weights of a product
_MAX_BLOCKS = 1 << 16  # of a step
_PIECE = 5  # int64 of a piece: its first column of ``low``, rank, first column of ``out``, columns, address of B
_RECORD = 2 + MAX_PIECES * _PIECE  # of an adapter: the address of A, bytes of a number, then the pieces
# step: addresses of `StepRows`; pieces: of the product; low: [rows, ..] between the kernels
LowRankArgs = struct(
    "LowRankArgs", "x x_stride out out_stride low low_stride k step records pieces strips aside counter"
)
_FULL, _HALF = (
    tiles(PanelForm(0, size * W, lambda builder, at: [], lambda builder, at, scales, load=load: [load(builder, at)]),
          TILE_ROWS, (0,))
    for size, load in ((4, emit_load), (2, emit_load_bf16))
)  # fmt: skip


@inlined
def multiply_narrow(m: int, a: int, lda: int, b: int, size: int, c: int, ldc: int, k: int, keep: int) -> None:
    """Compute c[m, 16] = a[m, k] @ b[k, 16], added to c if ``keep`` is 1; a number of b has ``size`` bytes."""
    count, row = (m + TILE_ROWS - 1) // TILE_ROWS, 0
    for i in range(count):
        end = m * (i + 1) // count
        ahead = AHEAD_BYTES if i == 0 else 0
        if size == 4:
            _FULL(end - row, a + row * lda, lda, b, 0, k, c + row * ldc, ldc, k, keep, ahead)
        else:
            _HALF(end - row, a + row * lda, lda, b, 0, k, c + row * ldc, ldc, k, keep, ahead)
        row = end


@kernel(LowRankArgs)
def shrink(pointer: Any) -> None:
    """low = x @ A.T, for the rows that have an adapter."""
    a = carray(pointer, 1)[0]
    panels = (a.pieces * load_i64(a.step + 8) + W - 1) // W  # of the highest rank
    num_tasks = load_i64(a.step) * panels
    task = take_next(a.counter)
    while task < num_tasks:
        block, panel = a.step + 16 + 24 * (task // panels), task % panels
        first, rows, record = load_i64(block), load_i64(block + 8), a.records + 8 * _RECORD * load_i64(block + 16)
        stacked = 0
        for piece in range(a.pieces):
            stacked += load_i64(record + 16 + 8 * _PIECE * piece + 8)
        if panel * W < stacked:
            size = load_i64(record + 8)
            weight, x = load_i64(record) + panel * size * W * a.k, a.x + first * a.x_stride
            low = a.low + first * a.low_stride + panel * 4 * W
            for start in range(0, a.k, STEPS):
                steps, keep, at = min(STEPS, a.k - start), 1 if start else 0, weight + start * size * W
                multiply_narrow(rows, x + 4 * start, a.x_stride, at, size, low, a.low_stride, steps, keep)
        task = take_next(a.counter)


@kernel(LowRankArgs)
def expand(pointer: Any) -> None:
    """out += low @ B.T, for the rows that have an adapter."""
    a = carray(pointer, 1)[0]
    tasks = a.pieces * a.strips  # of a block
    num_tasks, aside = load_i64(a.step) * tasks, a.aside + thread_id() * BLOCK_ROWS * 4 * W
    task = take_next(a.counter)
    while task < num_tasks:
        block, strip = a.step + 16 + 24 * (task // tasks), task % a.strips
        first, rows, record = load_i64(block), load_i64(block + 8), a.records + 8 * _RECORD * load_i64(block + 16)
        piece = record + 16 + 8 * _PIECE * (task % tasks // a.strips)
        size, rank, columns = load_i64(record + 8), load_i64(piece + 8), load_i64(piece + 24)
        panels = (columns + W - 1) // W if rank else 0
        low, out = a.low + first * a.low_stride + 4 * load_i64(piece), a.out + first * a.out_stride
        for panel in range(panels * strip // a.strips, panels * (strip + 1) // a.strips):
            weight, width = load_i64(piece + 32) + panel * size * W * rank, columns - panel * W
            at = out + 4 * (load_i64(piece + 16) + panel * W)
            if width >= W:
                multiply_narrow(rows, low, a.low_stride, weight, size, at, a.out_stride, rank, 1)
                continue
            multiply_narrow(rows, low, a.low_stride, weight, size, aside, 4 * W, rank, 0)
            for row in range(rows):
                for i in range(0, 4 * width, 4):
                    place = at + row * a.out_stride + i
                    store1(place, load1(place) + load1(aside + row * 4 * W + i))
        task = take_next(a.counter)


class StepRows:
    """The rows of a step that have an adapter: runs of rows of one adapter, cut into blocks."""

    def __init__(self) -> None:
        # number of blocks, highest rank, then (first row, rows, adapter) of each block
        self._memory = np.zeros(2 + 3 * _MAX_BLOCKS, np.int64)
        self.address = self._memory.ctypes.data
        self.runs: Sequence[tuple[int, int, int]] = ()  # (first row, rows, adapter)

    def set(self, runs: Sequence[tuple[int, int, int]], rank: int) -> None:
        """Let the next step have these runs; ``rank``: the highest of their adapters."""
        self.runs = runs
        blocks = [
            (start, min(BLOCK_ROWS, first + rows - start), adapter)
            for first, rows, adapter in runs
            for start in range(first, first + rows, BLOCK_ROWS)
        ]
        assert len(blocks) <= _MAX_BLOCKS, f"a step of {len(blocks)} blocks"
        self._memory[0], self._memory[1] = len(blocks), rank
        self._memory[2 : 2 + 3 * len(blocks)] = np.array(blocks, np.int64).reshape(-1)


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """What one adapter adds to one product, as the kernels read it."""

    record: npt.NDArray[np.int64]
    panels: Sequence[Numbers]  # that the record names by address


def together(parts: Sequence[Packed]) -> list[Packed]:
    """Move what one adapter adds to all products into one piece of memory: the system gives it large pages."""
    memory, at, moved = np.empty(sum(panel.nbytes for part in parts for panel in part.panels), np.uint8), 0, []
    for part in parts:
        record = part.record.copy()
        for panel in part.panels:
            place = memory[at : at + panel.nbytes]
            place[:] = panel.reshape(-1).view(np.uint8)
            record[part.record == panel.ctypes.data] = place.ctypes.data
            at += panel.nbytes
        moved.append(Packed(record, [memory]))
    return moved


@dataclass(frozen=True, slots=True, eq=False)
class HostPacked:
    """What one adapter adds to the products of a rank."""

    parts: Mapping[str, Packed]
    num_bytes: int


class HostLowRank:
    """What adapters add to the products of a rank."""

    def __init__(
        self, products: Mapping[str, tuple[int, Sequence[int]]], team: Team, *, max_rank: int, max_held: int
    ) -> None:
        """``products``: of each its inputs, and the outputs of its weights in their order."""
        self.step = StepRows()
        self.added = {
            name: LowRankKernel(self.step, inputs, pieces, team, max_rank=max_rank, max_held=max_held)
            for name, (inputs, pieces) in products.items()
        }

    def pack(self, pairs: Mapping[str, Sequence[tuple[Tensor, Tensor] | None]], *, narrow: bool = False) -> HostPacked:
        """As `LowRankKernel.pack`, for each product that an adapter changes."""
        parts = {name: self.added[name].pack(of_weights, narrow=narrow) for name, of_weights in pairs.items()}
        num_bytes = sum(panel.nbytes for part in parts.values() for panel in part.panels)
        return HostPacked(dict(zip(parts, together(list(parts.values())), strict=True)), num_bytes)

    def put(self, adapter: int, packed: HostPacked) -> None:
        """Let rows of number ``adapter`` add this."""
        for name, part in packed.parts.items():
            self.added[name].put(adapter, part)

    def drop(self, adapter: int) -> None:
        """Forget an adapter that no step uses any more."""
        for added in self.added.values():
            added.drop(adapter)


class LowRankKernel:
    """What adapters add to one product of ``inputs`` inputs."""

    def __init__(
        self, step: StepRows, inputs: int, pieces: Sequence[int], team: Team, *, max_rank: int, max_held: int
    ) -> None:
        """``pieces``: the outputs of each of its weights, in their order; ``max_held``: adapters, of ``max_rank``."""
        assert len(pieces) <= MAX_PIECES
        self._step, self._inputs, self._pieces, self._team = step, inputs, pieces, team
        self.low_floats = -(-len(pieces) * max_rank // W) * W  # of a row between the two kernels
        self._records = np.zeros((max_held, _RECORD), np.int64)
        self._held: dict[int, Packed] = {}

    def pack(self, pairs: Sequence[tuple[Tensor, Tensor] | None], *, narrow: bool = False) -> "Packed":
        """Lay out A [r, inputs] and B [outputs, r] (scaled) of each weight; None where it stays as it is. ``narrow``:
        in bfloat16, which holds them all. Any thread may: PyTorch's are not used."""
        record, column, low = np.zeros(_RECORD, np.int64), 0, 0
        panels = [_panels(np.concatenate([a.numpy() for a, _ in filter(None, pairs)]), narrow)]
        record[:2] = panels[0].ctypes.data, panels[0].itemsize
        for i, (pair, outputs) in enumerate(zip(pairs, self._pieces, strict=True)):
            if pair is not None:
                panels.append(_panels(pair[1].numpy(), narrow))
                rank, at = pair[1].shape[1], 2 + _PIECE * i
                record[at : at + _PIECE] = low, rank, column, outputs, panels[-1].ctypes.data
                low += rank
            column += outputs
        return Packed(record, panels)

    def put(self, adapter: int, packed: "Packed") -> None:
        """Let rows of number ``adapter`` add this."""
        self._held[adapter], self._records[adapter] = packed, packed.record

    @property
    def in_step(self) -> bool:
        """Whether any row of this step has an adapter."""
        return bool(self._step.runs)

    def drop(self, adapter: int) -> None:
        """Forget an adapter that no step uses any more."""
        self._records[adapter] = 0
        self._held.pop(adapter, None)

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """Add to ``out`` [T, sum of pieces] what the adapters of this step's rows make of x [T, inputs]."""
        if not self.in_step:
            return
        counter = np.zeros(8, np.int64)
        x = x if x.stride(1) == 1 else x.contiguous()
        low = torch.empty(x.shape[0], self.low_floats)
        for stage in self.stages(x, out, low, self._team):
            counter[0] = 0
            self._team.run(*stage.prepare(x.shape[0], counter.ctypes.data))

    def stages(self, x: Tensor, out: Tensor, low: Tensor, team: Team) -> "tuple[LowRankStage, LowRankStage]":
        """Make the two kernels stages of a program of ``team``; the first reads x. ``low`` [.., low_floats]: between
        them; all three are kept by the caller."""
        memory = team.memory(team.num_threads * BLOCK_ROWS * W)
        fields = {
            "x": x.data_ptr(), "x_stride": 4 * x.stride(0), "out": out.data_ptr(), "out_stride": 4 * out.stride(0),
            "low": low.data_ptr(), "low_stride": 4 * low.stride(0), "k": self._inputs, "step": self._step.address,
            "records": self._records.ctypes.data, "pieces": len(self._pieces), "aside": memory.data_ptr(),
            "strips": 1 if team.num_threads == 1 else 2 * team.num_threads,
        }  # fmt: skip
        return LowRankStage(shrink, fields, memory), LowRankStage(expand, fields, memory)


class LowRankStage:
    """One of the two kernels as a stage of a program (replicas/kernels/team.py)."""

    def __init__(self, function: Kernel, fields: dict[str, int], memory: Tensor) -> None:
        self._function, self._memory, self._arguments = function, memory, LowRankArgs(**fields)

    def read_from(self, x: Tensor) -> None:
        """Read the rows of ``x`` from now on."""
        self._arguments.x, self._arguments.x_stride = x.data_ptr(), 4 * x.stride(0)

    def prepare(self, num_rows: int, counter: int) -> tuple[Kernel, ctypes.Structure]:
        self._arguments.counter = counter
        return self._function, self._arguments


def _panels(weight: Floats, narrow: bool) -> Numbers:
    """Lay a weight [n, k] out as [panels, k, 16]."""
    whole: Numbers = np.pad(weight, ((0, -len(weight) % W), (0, 0)))
    if narrow:
        assert is_bf16(weight), "bfloat16 does not hold these numbers as they are"
        whole = (whole.view(np.uint32) >> 16).astype(np.uint16)
    return np.ascontiguousarray(whole.reshape(-1, W, weight.shape[1]).transpose(0, 2, 1))


def is_bf16(weight: Floats) -> bool:
    """Whether bfloat16 holds these numbers as they are."""
    return not (weight.view(np.uint32) & 0xFFFF).any()
