"""y = x @ weight.T with int8 weights and activations: 32 of an output channel, 32 of a token, share a scale.

Owns:      the packed form of a weight: panels of 32 output channels, in groups of 32 inputs: 32 scales, then the bytes.
Method:    the kernel first rounds the rows of x, shared among the threads, then multiplies: x is fp32 in memory, and
           no other module sees its bytes. Panels are read once by few rows, and stay in L1 for many.
Invariant: integer sums are exact and groups are added in their order, so an output row depends on its own x row
           alone: not on other rows, their number, or threads.
Thread:    all of the team; tasks are taken one by one.
"""

import ctypes
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numba import carray
from torch import Tensor

from replicas.kernels.int8_tiles import COLS, SCALE_BYTES, ZERO, cpu_has_vnni, product_tile, store_bytes, store_i32
from replicas.kernels.narrow import absolute
from replicas.kernels.panels import Panels
from replicas.kernels.simd import W, add, hmax, hsum, load, maximum, mul, splat, store1, sub, take_next
from replicas.kernels.team import Kernel, Team, barrier, inlined, kernel, struct, team_size, thread_id

PANEL = COLS * W  # output channels of a panel
BLOCK_ROWS = 252  # of x, per task: a multiple of 6, and its bytes fit L2
STRIP_BYTES = 64 << 10  # weight bytes a task reads, less where threads would have few tasks
TASKS_PER_THREAD = 2  # at least, if there are enough panels
AHEAD_BYTES = 4 << 10  # what is asked for before it is read

# bytes: [m, k] x rounded; parts: [m, groups, 2] what the sum of a group starts with (int32), and its scale (fp32);
# panel: how many bytes one has
Int8Args = struct(
    "Int8Args",
    "x x_stride bytes parts weight panel bias out out_stride m n k groups strip block counter",
)

_TILE_6, _TILE_4, _TILE_3, _TILE_2, _TILE_1 = (product_tile(rows) for rows in (6, 4, 3, 2, 1))


@inlined
def round_group(x: int, length: int, out: int, part: int) -> None:
    """Floats at x into bytes at out: multiples of the largest magnitude / 127. NaN among them, or an infinity, makes
    the scale NaN: bytes have none, and a maximum passes over it."""
    most, zeros = splat(0.0), splat(0.0)
    for i in range(0, 4 * length, 4 * W):
        value = load(x + i)
        most = maximum(most, absolute(value))
        zeros = add(zeros, sub(value, value))
    largest = hmax(most)
    factor = splat(127.0 / largest if largest > 0.0 else 0.0)
    total = 0
    for i in range(0, length, W):
        total += store_bytes(out + i, mul(load(x + 4 * i), factor))
    store_i32(part, -ZERO * total)
    store1(part + 4, largest / 127.0 + hsum(zeros))


@inlined
def multiply(
    m: int, a: int, lda: int, parts: int, b: int, bias: int, c: int, ldc: int, groups: int,
    steps: int,
) -> None:  # fmt: skip
    """Multiply one panel by m rows."""
    row = 0
    while row < m:
        left, a_at, p, ldp, c_at = m - row, a + row * lda, parts + row * groups * 8, groups * 8, c + row * ldc
        if left >= 6:
            _TILE_6(a_at, lda, p, ldp, b, bias, c_at, ldc, groups, steps, AHEAD_BYTES)
            row += 6
        elif left >= 4:
            _TILE_4(a_at, lda, p, ldp, b, bias, c_at, ldc, groups, steps, AHEAD_BYTES)
            row += 4
        elif left == 3:
            _TILE_3(a_at, lda, p, ldp, b, bias, c_at, ldc, groups, steps, AHEAD_BYTES)
            row += 3
        elif left == 2:
            _TILE_2(a_at, lda, p, ldp, b, bias, c_at, ldc, groups, steps, AHEAD_BYTES)
            row += 2
        else:
            _TILE_1(a_at, lda, p, ldp, b, bias, c_at, ldc, groups, steps, AHEAD_BYTES)
            row += 1


@kernel(Int8Args)
def product(pointer: Any) -> None:
    """Tasks are (strip of panels, block of x rows), blocks of a strip one after the other."""
    a = carray(pointer, 1)[0]
    me, threads = thread_id(), team_size()
    length = a.k // a.groups
    for i in range(a.m * a.groups * me // threads, a.m * a.groups * (me + 1) // threads):
        row, start = i // a.groups, i % a.groups * length
        round_group(a.x + row * a.x_stride + 4 * start, length, a.bytes + row * a.k + start, a.parts + 8 * i)
    barrier()
    panels, blocks = a.n // PANEL, (a.m + a.block - 1) // a.block
    num_tasks = (panels + a.strip - 1) // a.strip * blocks
    task = take_next(a.counter)
    while task < num_tasks:
        first, row = task // blocks * a.strip, task % blocks * a.block
        rows = min(a.block, a.m - row)
        for panel in range(first, min(first + a.strip, panels)):
            column = 4 * panel * PANEL
            multiply(
                rows, a.bytes + row * a.k, a.k, a.parts + row * a.groups * 8, a.weight + panel * a.panel,
                a.bias + column, a.out + row * a.out_stride + column, a.out_stride, a.groups,
                length // 4,
            )  # fmt: skip
        task = take_next(a.counter)


class Int8Kernel:
    """The product by one packed int8 weight; K a multiple of 16, any N."""

    def __init__(self, weight: Panels, bias: Tensor | None, team: Team) -> None:
        """weight: as `pack` makes it. bias: [N] fp32."""
        n = weight.n
        self._n, self._team = n, team
        self._packed = weight.data.view(len(weight.data), weight.k // weight.group, -1)
        self._bias = torch.zeros(len(weight.data) * PANEL)
        self.num_bytes = self._packed.nbytes  # of weights: the zeros of a product without a bias are none
        if bias is not None:
            self.num_bytes += self._bias.nbytes
            self._bias[:n] = bias
        self._counter = np.zeros(8, np.int64)

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply x [M, K] fp32 into a fresh tensor [M, N]."""
        if x.stride(1) != 1:
            x = x.contiguous()
        out = torch.empty(x.shape[0], -(-self._n // PANEL) * PANEL)
        stage = Int8Stage(self._bias, self._packed, x, out, self._team)
        _, arguments = stage.prepare(x.shape[0], self._counter.ctypes.data)
        self._counter[0] = 0
        self._team.run(product, arguments)
        return out if out.shape[1] == self._n else out[:, : self._n].contiguous()

    def stage(self, x: Tensor, out: Tensor, team: Team) -> "Int8Stage":
        """Make the product a stage of a program of ``team``: rows of x [.., K] into rows of ``out`` [.., N], both kept
        by the caller. Only where ``dense``."""
        assert self.dense, f"{self._n} output channels do not fill panels of {PANEL}"
        return Int8Stage(self._bias, self._packed, x, out, team)

    @property
    def dense(self) -> bool:
        """Tell whether the output channels fill the panels."""
        return self._n % PANEL == 0

    def rows(self, ids: Tensor) -> Tensor:
        """Return rows ``ids`` [T] of the weight as floats [T, K]."""
        weight, scales = views(self._packed)
        panel, column = ids // PANEL, ids % PANEL
        rows = weight[panel, :, :, column].flatten(2).float()  # [T, groups, K / groups]
        return rows.sub_(ZERO).mul_(scales[panel, :, column].unsqueeze(2)).flatten(1)


class Int8Stage:
    """An Int8Kernel as a stage of a program; its bytes of x lie in the team's scratch."""

    def __init__(self, bias: Tensor, packed: Tensor, x: Tensor, out: Tensor, team: Team) -> None:
        n, groups = bias.shape[0], packed.shape[1]
        k = groups * (packed.shape[2] - SCALE_BYTES) // PANEL  # not x's columns: another x may be read
        floats = x.shape[0] * k // 4  # of the bytes; k is a multiple of 16
        self._memory = team.memory(floats + 2 * x.shape[0] * groups)  # kept alive
        scratch = self._memory.data_ptr()
        self._arguments = Int8Args(
            x=x.data_ptr(),
            x_stride=4 * x.stride(0),
            bytes=scratch,
            parts=scratch + 4 * floats,
            weight=packed.data_ptr(),
            panel=packed.stride(0),
            bias=bias.data_ptr(),
            out=out.data_ptr(),
            out_stride=4 * out.stride(0),
            n=n,
            k=k,
            groups=groups,
            strip=max(1, min(STRIP_BYTES // (PANEL * k), n // PANEL // (TASKS_PER_THREAD * team.num_threads))),
            block=BLOCK_ROWS,
        )

    def read_from(self, x: Tensor) -> None:
        """Multiply the rows of ``x`` [.., K] from now on."""
        assert x.shape[1] == self._arguments.k, f"rows of {self._arguments.k} are wanted, got {x.shape}"
        self._arguments.x, self._arguments.x_stride = x.data_ptr(), 4 * x.stride(0)

    def prepare(self, num_rows: int, counter: int) -> tuple[Kernel, ctypes.Structure]:
        self._arguments.m, self._arguments.counter = num_rows, counter
        return product, self._arguments


def pack(weight: Tensor, scales: Tensor) -> Panels:
    """[N, K] int8, [N, G] bf16 -> panels [padded / 32, G, 64 + 32 K / G] bytes. Weights are shifted by 128, so
    unsigned; scales of rows from N on are 0."""
    assert serves(weight.shape[1]), f"{weight.shape} {weight.dtype} is not for this kernel"
    (n, k), groups = weight.shape, scales.shape[1]
    length, below = k // groups, -n % PANEL
    packed = torch.zeros((n + below) // PANEL, groups, SCALE_BYTES + PANEL * length, dtype=torch.uint8)
    packed_weight, packed_scales = views(packed)
    if below:
        weight, scales = F.pad(weight, (0, 0, 0, below)), F.pad(scales, (0, 0, 0, below))
    split = weight.view(torch.uint8).view(-1, PANEL, groups, length // 4, 4)
    packed_weight.copy_(split.permute(0, 2, 3, 1, 4)).bitwise_xor_(ZERO)
    packed_scales.copy_(scales.view(-1, PANEL, groups).transpose(1, 2))
    return Panels("int8", n, k, length, packed.flatten(1))


def views(packed: Tensor) -> tuple[Tensor, Tensor]:
    """View the two parts of a packed weight: bytes [panels, G, K / G / 4, 32, 4] and scales [panels, G, 32], bf16."""
    weight, scales = packed[:, :, SCALE_BYTES:], packed[:, :, :SCALE_BYTES]
    panels, groups, num_bytes = weight.shape
    return weight.view(panels, groups, num_bytes // (4 * PANEL), PANEL, 4), scales.view(torch.bfloat16)


def serves(inputs: int) -> bool:
    """Tell whether the kernel can multiply by rows of so many int8 weights, on this CPU."""
    return inputs % W == 0 and cpu_has_vnni()
