"""y = x @ weight.T with int8 weights (a scale per output channel) and int8 activations (a scale per token).

Owns:      the packed form of a weight: panels of 32 output channels, [K / 4, 32, 4] bytes each, one behind the other.
Method:    the kernel first rounds the rows of x, shared among the threads, then multiplies: x is fp32 in memory, and
           nobody else sees its bytes. Panels are read once for up to 12 rows; few rows are as fast as memory allows.
Invariant: sums are exact, so an output row depends on its own x row alone: not on other rows, their number, threads.
Thread:    all of the team; tasks are taken one by one.
"""

import ctypes
from typing import Any

import numpy as np
import torch
from numba import carray
from torch import Tensor

from replicas.kernels.int8_tiles import COLS, ZERO, absolute, cpu_has_vnni, product_tile, store_bytes
from replicas.kernels.simd import W, hmax, load, maximum, mul, splat, store1, take_next
from replicas.kernels.team import Kernel, Team, barrier, inlined, kernel, struct, team_size, thread_id

PANEL = COLS * W  # output channels of a panel
BLOCK_ROWS = 252  # of x, of one task: a multiple of 12 whose bytes lie in L2
STRIP_BYTES = 64 << 10  # weight bytes a task reads at least
AHEAD_BYTES = 4 << 10  # what is asked for before it is read
LARGEST_K = 1 << 16  # 127 * 255 * K must fit an int32

Int8Args = struct(
    "Int8Args",
    "x x_stride bytes scales weight columns columns_stride out out_stride m n k strip block counter",
)

_TILE_12, _TILE_8, _TILE_6, _TILE_4, _TILE_3, _TILE_2, _TILE_1 = (product_tile(r) for r in (12, 8, 6, 4, 3, 2, 1))


@inlined
def quantize_row(x: int, k: int, out: int, scale: int) -> None:
    """k floats at x into bytes at out: multiples of the largest magnitude / 127, shifted by 128."""
    most = splat(0.0)
    for i in range(0, 4 * k, 4 * W):
        most = maximum(most, absolute(load(x + i)))
    largest = hmax(most)
    factor = splat(127.0 / largest if largest > 0.0 else 0.0)
    for i in range(0, k, W):
        store_bytes(out + i, mul(load(x + 4 * i), factor))
    store1(scale, largest / 127.0)


@inlined
def multiply(
    m: int, a: int, lda: int, b: int, columns: int, columns_stride: int, scales: int, c: int, ldc: int, k: int,
    ahead: int,
) -> None:  # fmt: skip
    """One panel by m rows."""
    row = 0
    while row < m:
        left, a_at, s, c_at = m - row, a + row * lda, scales + 4 * row, c + row * ldc
        if left >= 12:
            _TILE_12(a_at, lda, b, columns, columns_stride, s, c_at, ldc, k, ahead)
            row += 12
        elif left >= 8:
            _TILE_8(a_at, lda, b, columns, columns_stride, s, c_at, ldc, k, ahead)
            row += 8
        elif left >= 6:
            _TILE_6(a_at, lda, b, columns, columns_stride, s, c_at, ldc, k, ahead)
            row += 6
        elif left >= 4:
            _TILE_4(a_at, lda, b, columns, columns_stride, s, c_at, ldc, k, ahead)
            row += 4
        elif left == 3:
            _TILE_3(a_at, lda, b, columns, columns_stride, s, c_at, ldc, k, ahead)
            row += 3
        elif left == 2:
            _TILE_2(a_at, lda, b, columns, columns_stride, s, c_at, ldc, k, ahead)
            row += 2
        else:
            _TILE_1(a_at, lda, b, columns, columns_stride, s, c_at, ldc, k, ahead)
            row += 1


@kernel(Int8Args)
def product(pointer: Any) -> None:
    """Tasks are (strip of panels, block of x rows), blocks of a strip one after the other."""
    a = carray(pointer, 1)[0]
    me, threads = thread_id(), team_size()
    for row in range(a.m * me // threads, a.m * (me + 1) // threads):
        quantize_row(a.x + row * a.x_stride, a.k, a.bytes + row * a.k, a.scales + 4 * row)
    barrier()
    panels, blocks = a.n // PANEL, (a.m + a.block - 1) // a.block
    num_tasks = (panels + a.strip - 1) // a.strip * blocks
    task = take_next(a.counter)
    while task < num_tasks:
        first, row = task // blocks * a.strip, task % blocks * a.block
        rows = min(a.block, a.m - row)
        for panel in range(first, min(first + a.strip, panels)):
            weight, column = a.weight + panel * PANEL * a.k, 4 * panel * PANEL
            out = a.out + row * a.out_stride + column
            multiply(
                rows, a.bytes + row * a.k, a.k, weight, a.columns + column, a.columns_stride, a.scales + 4 * row,
                out, a.out_stride, a.k, AHEAD_BYTES,
            )  # fmt: skip
        task = take_next(a.counter)


class Int8Kernel:
    """Multiplies by one weight, packed; K a multiple of 16, any N."""

    def __init__(self, weight: Tensor, scales: Tensor, bias: Tensor | None, team: Team) -> None:
        """weight [N, K] int8, scales [N] and bias [N] fp32; the weight is not kept."""
        assert serves(weight), f"{weight.shape} {weight.dtype} is not for this kernel"
        n = weight.shape[0]
        self._n, self._team = n, team
        padded = -(-n // PANEL) * PANEL
        self._packed = pack(weight, padded)
        self._columns = torch.zeros(3, padded)
        self._columns[0, :n] = (weight.sum(1, dtype=torch.int32) * -ZERO).view(torch.float32)
        self._columns[1, :n] = scales
        if bias is not None:
            self._columns[2, :n] = bias
        self._counter = np.zeros(8, np.int64)

    @property
    def num_bytes(self) -> int:
        return self._packed.nbytes + self._columns.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """[M, K] fp32 -> [M, N], a fresh tensor."""
        if x.stride(1) != 1:
            x = x.contiguous()
        out = torch.empty(x.shape[0], -(-self._n // PANEL) * PANEL)
        stage = Int8Stage(self._columns, self._packed, x, out, self._team)
        _, arguments = stage.prepare(x.shape[0], self._counter.ctypes.data)
        self._counter[0] = 0
        self._team.run(product, arguments)
        return out if out.shape[1] == self._n else out[:, : self._n].contiguous()

    def stage(self, x: Tensor, out: Tensor, team: Team) -> "Int8Stage":
        """The product as a stage of a program of ``team``: rows of x [.., K] into rows of ``out`` [.., N], both kept by
        the caller. Only where ``dense``."""
        assert self.dense, f"{self._n} output channels do not fill panels of {PANEL}"
        return Int8Stage(self._columns, self._packed, x, out, team)

    @property
    def dense(self) -> bool:
        """Whether the output channels fill the panels."""
        return self._n % PANEL == 0

    def rows(self, ids: Tensor) -> Tensor:
        """Rows ``ids`` [T] of the weight, as floats [T, K]."""
        panels = self._packed[ids // PANEL, :, ids % PANEL]  # [T, K / 4, 4]
        return panels.flatten(1).float().mul_(self._columns[1][ids].unsqueeze(1))


class Int8Stage:
    """One product of a program (replicas/kernels/program.py); its bytes of x lie in the team's scratch."""

    def __init__(self, columns: Tensor, packed: Tensor, x: Tensor, out: Tensor, team: Team) -> None:
        n, k = columns.shape[1], x.shape[1]
        self._room = -(-x.shape[0] // W) * W  # of the scales, in floats
        self._memory = team.memory(self._room + x.shape[0] * k // 4)  # kept alive
        scratch = self._memory.data_ptr()
        self._arguments = Int8Args(
            x=x.data_ptr(),
            x_stride=4 * x.stride(0),
            scales=scratch,
            bytes=scratch + 4 * self._room,
            weight=packed.data_ptr(),
            columns=columns.data_ptr(),
            columns_stride=4 * n,
            out=out.data_ptr(),
            out_stride=4 * out.stride(0),
            n=n,
            k=k,
            strip=max(1, STRIP_BYTES // (PANEL * k)),
            block=BLOCK_ROWS,
        )

    def read_from(self, x: Tensor) -> None:
        """Multiply the rows of ``x`` from now on."""
        self._arguments.x, self._arguments.x_stride = x.data_ptr(), 4 * x.stride(0)

    def prepare(self, num_rows: int, counter: int) -> tuple[Kernel, ctypes.Structure]:
        self._arguments.m, self._arguments.counter = num_rows, counter
        return product, self._arguments


def pack(weight: Tensor, padded: int) -> Tensor:
    """[N, K] int8 -> [padded / 32, K / 4, 32, 4]; rows from N on are zero."""
    n, k = weight.shape
    packed = torch.zeros(padded // PANEL, k // 4, PANEL, 4, dtype=torch.int8)
    whole = n // PANEL
    packed[:whole] = weight[: whole * PANEL].view(whole, PANEL, k // 4, 4).transpose(1, 2)
    if whole * PANEL < n:
        rest = n - whole * PANEL
        packed[whole, :, :rest] = weight[whole * PANEL :].view(rest, k // 4, 4).transpose(0, 1)
    return packed


def serves(weight: Tensor) -> bool:
    """Whether the kernel can multiply by this weight [N, K] int8, on this CPU."""
    k = weight.shape[1]
    return weight.device.type == "cpu" and k % W == 0 and k <= LARGEST_K and cpu_has_vnni()
