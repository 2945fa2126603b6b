"""Products of bf16 numbers that fit the registers, as IR: dots of pairs (AVX512_BF16), tiles (AMX); rounding to bf16.

Owns:      the IR, and by which of the two this CPU multiplies.
Never:     threads or blocks; bf16.py does.
Invariant: an element's sum runs in the order of the inputs in one accumulator, which may rest in memory between calls.
Thread:    any. Tiles are a thread's own: `begin_tiles` comes first, `end_tiles` last.
Source:    Intel 64 and IA-32 Architectures Software Developer's Manual: VDPBF16PS, TDPBF16PS; for the permission
           Documentation/arch/x86/xstate.rst of Linux.

Both take pairs of inputs that lie side by side, of 16 output channels at once: a panel's pair is 32 channels long.
"""

import ctypes
import functools
from typing import Any, Literal

import llvmlite.binding  # type: ignore[import-untyped]
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types

from replicas.kernels.panel_tiles import COLUMNS, chosen_tile
from replicas.kernels.simd import (
    F32,
    I64,
    VEC,
    W,
    add_bytes,
    compiles_for,
    emit_load,
    emit_prefetch,
    emit_splat,
    emit_store,
    op,
    pointer_to,
    splat_const,
    vector,
)

Way = Literal["amx", "dots"]
WAYS: dict[Way, str] = {"amx": "AMX's tiles", "dots": "AVX-512's dot products"}  # in words
HAS_DOTS = compiles_for("avx512bf16")
STEP = 32  # inputs of a row of a tile
STEP_BYTES = 2 * STEP * COLUMNS  # of a panel
DOT_ROWS = 12  # of a tile of dots: 24 sums, of AVX-512's 32 registers
TILE_ROWS = 16
AHEAD_BYTES = 10 << 10  # what is asked for before it is read
_BYTE = ir.IntType(8)


class _BFloat(ir.types.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite does not name."""

    null, intrinsic_name = "0.0", "bf16"

    def __str__(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


_NUMBER = _BFloat()
_NUMBERS, _PAIRS = ir.VectorType(_NUMBER, W), ir.VectorType(_NUMBER, 2 * W)


@functools.cache
def way() -> Way | None:
    """Tell how this CPU multiplies bf16 without widening it; None: it does not.

    On Intel's CPUs dots are slower than multiply-adds in fp32, on a Zen 4 they are twice as fast (docs/performance.md).
    """
    if compiles_for("amx-tile", "amx-bf16", "avx512bf16") and _permitted():
        return "amx"
    amd = llvmlite.binding.get_host_cpu_name().startswith("znver")
    return "dots" if amd and compiles_for("avx512bf16") else None


def _permitted() -> bool:
    """Ask Linux for the tiles' registers, for all threads of this process and its children."""
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return int(ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data)) == 0


def tile_configuration() -> "np.ndarray[Any, np.dtype[np.uint8]]":
    """Return what `begin_tiles` loads: eight tiles of 16 rows of 64 bytes."""
    configuration = np.zeros(64, np.uint8)
    configuration[0] = 1  # the palette
    configuration[16:32].view(np.uint16)[:] = 64
    configuration[48:56] = TILE_ROWS
    return configuration


@op(types.void, types.int64, vector)
def store_rounded(builder: Any, address: Any, value: Any) -> None:
    """Store sixteen floats as bf16, rounded to nearest, ties to even. NaN stays one, subnormal numbers may become 0."""
    builder.store(builder.fptrunc(value, _NUMBERS), pointer_to(builder, address, _NUMBERS), align=2)


@op(types.void, types.int64, types.float32)
def store1_rounded(builder: Any, address: Any, value: Any) -> None:
    builder.store(builder.fptrunc(value, _NUMBER), pointer_to(builder, address, _NUMBER), align=2)


def emit_rows(builder: Any, start: Any, stride: Any, rows: int) -> list[Any]:
    return [builder.add(start, builder.mul(stride, ir.Constant(I64, r))) for r in range(rows)]


def emit_splat_pair(builder: Any, address: Any) -> Any:
    """Load the two numbers at ``address`` into all lanes."""
    return emit_splat(builder, builder.load(pointer_to(builder, address, F32), align=4))  # any four bytes


def emit_dots(builder: Any, sums: Any, x: Any, weights: Any) -> Any:
    """Add the products of 16 pairs to 16 sums: the pairs' second numbers first."""
    kind = ir.FunctionType(VEC, [VEC, _PAIRS, _PAIRS])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512bf16.dpbf16ps.512")
    return builder.call(function, [sums, builder.bitcast(x, _PAIRS), builder.bitcast(weights, _PAIRS)])


def _emit_sums(builder: Any, targets: dict[tuple[int, int], Any], keep: Any) -> dict[tuple[int, int], Any]:
    """Make the sums of a tile: what stands in its ``targets`` if ``keep`` is not 0, else zeros."""
    sums = {at: cgutils.alloca_once(builder, VEC) for at in targets}
    with builder.if_else(builder.icmp_signed("!=", keep, ir.Constant(I64, 0))) as (going_on, beginning):
        with going_on:
            for at, target in targets.items():
                builder.store(emit_load(builder, target), sums[at])
        with beginning:
            for place in sums.values():
                builder.store(splat_const(0.0), place)
    return sums


def _emit_dot_tile(builder: Any, rows: int, a: Any, lda: Any, b: Any, c: Any, ldc: Any, steps: Any, keep: Any) -> None:
    a_rows, c_rows = emit_rows(builder, a, lda, rows), emit_rows(builder, c, ldc, rows)
    targets = {(r, j): add_bytes(builder, c_rows[r], 4 * W * j) for r in range(rows) for j in range(2)}
    sums = _emit_sums(builder, targets, keep)
    with cgutils.for_range(builder, builder.mul(steps, ir.Constant(I64, STEP // 2)), intp=I64) as loop:
        b_row = builder.add(b, builder.mul(loop.index, ir.Constant(I64, 4 * COLUMNS)))
        weights = [emit_load(builder, add_bytes(builder, b_row, 4 * W * j)) for j in range(2)]
        for j in range(2):
            emit_prefetch(builder, add_bytes(builder, b_row, AHEAD_BYTES + 4 * W * j))
        for r in range(rows):
            address = builder.add(a_rows[r], builder.shl(loop.index, ir.Constant(I64, 2)))
            x = emit_splat_pair(builder, address)
            for j in range(2):
                builder.store(emit_dots(builder, builder.load(sums[r, j]), x, weights[j]), sums[r, j])
    for at, target in targets.items():
        emit_store(builder, target, builder.load(sums[at]))


# f(rows, a, a_stride, b, c, c_stride, steps, keep): c[rows, 32] = a[rows, 32 steps] @ b, added to c if keep is not 0
dot_tile = chosen_tile(_emit_dot_tile, DOT_ROWS, 7)


def pair_tile(most_rows: int, cols: int) -> Any:
    """Kernel ``f(rows, a, a_stride, b, b_stride, c, c_stride, pairs, keep)``: c[rows, 16 cols] = a[rows, pairs] @
    b[pairs, 16 cols], added to c if ``keep`` is not 0, for 1 <= rows <= ``most_rows``."""

    def emit(
        builder: Any, rows: int, a: Any, lda: Any, b: Any, ldb: Any, c: Any, ldc: Any, pairs: Any, keep: Any
    ) -> None:
        if not HAS_DOTS:
            return  # LLVM ends the process at an instruction that the CPU lacks, run or not
        a_rows, c_rows = emit_rows(builder, a, lda, rows), emit_rows(builder, c, ldc, rows)
        targets = {(r, j): add_bytes(builder, c_rows[r], 4 * W * j) for r in range(rows) for j in range(cols)}
        sums = _emit_sums(builder, targets, keep)
        with cgutils.for_range(builder, pairs, intp=I64) as loop:
            b_row = builder.add(b, builder.mul(ldb, loop.index))
            numbers = [emit_load(builder, add_bytes(builder, b_row, 4 * W * j)) for j in range(cols)]
            for r in range(rows):
                x = emit_splat_pair(builder, builder.add(a_rows[r], builder.shl(loop.index, ir.Constant(I64, 2))))
                for j in range(cols):
                    builder.store(emit_dots(builder, builder.load(sums[r, j]), x, numbers[j]), sums[r, j])
        for at, target in targets.items():
            emit_store(builder, target, builder.load(sums[at]))

    return chosen_tile(emit, most_rows, 8)


def _emit_amx(builder: Any, name: str, *args: Any) -> None:
    """Emit an instruction of AMX. An operand is a register's number, an address (int64) or a stride in bytes."""
    function = ir.FunctionType(ir.VoidType(), [arg.type for arg in args])
    builder.call(cgutils.get_or_insert_function(builder.module, function, f"llvm.x86.{name}"), args)


def _register(number: int) -> Any:
    return ir.Constant(_BYTE, number)


@op(types.void, types.int64)
def begin_tiles(builder: Any, configuration: Any) -> None:
    _emit_amx(builder, "ldtilecfg", pointer_to(builder, configuration, _BYTE))


@op(types.void)
def end_tiles(builder: Any) -> None:
    """Give the registers back: the system need not keep them when it runs another thread."""
    _emit_amx(builder, "tilerelease")


def amx_tile(groups: int, *, fetches: bool) -> Any:
    """Kernel ``f(a, a_stride, b, c, c_stride, steps, keep)``: c[16 groups, 32] = a[16 groups, 32 steps] @ b, added to c
    if ``keep`` is not 0.

    ``groups``: 1, or 2, which read b once. a: of each 16 rows ``a_stride`` bytes apart [steps, 16, 32]. One that
    ``fetches`` asks for what it will read of b, if that lies in memory.
    """

    @op(types.void, *[types.int64] * 7)
    def tile(builder: Any, a: Any, lda: Any, b: Any, c: Any, ldc: Any, steps: Any, keep: Any) -> None:
        c_rows = emit_rows(builder, c, builder.mul(ldc, ir.Constant(I64, TILE_ROWS)), groups)
        targets = {
            2 * i + j: pointer_to(builder, add_bytes(builder, c_rows[i], 4 * W * j), _BYTE)
            for i in range(groups) for j in range(2)
        }  # fmt: skip
        with builder.if_else(builder.icmp_signed("!=", keep, ir.Constant(I64, 0))) as (going_on, beginning):
            with going_on:
                for number, target in targets.items():
                    _emit_amx(builder, "tileloadd64", _register(number), target, ldc)
            with beginning:
                for number in targets:
                    _emit_amx(builder, "tilezero", _register(number))
        with cgutils.for_range(builder, steps, intp=I64) as loop:
            row_bytes, pair_bytes = ir.Constant(I64, 2 * STEP), ir.Constant(I64, 4 * COLUMNS)
            a_step = builder.add(a, builder.mul(loop.index, ir.Constant(I64, 2 * STEP * TILE_ROWS)))
            b_step = builder.add(b, builder.mul(loop.index, ir.Constant(I64, STEP_BYTES)))
            for j in range(2):
                at = pointer_to(builder, add_bytes(builder, b_step, 4 * W * j), _BYTE)
                _emit_amx(builder, "tileloadd64", _register(6 + j), at, pair_bytes)
            for line in range(0, STEP_BYTES if fetches else 0, 64):
                emit_prefetch(builder, add_bytes(builder, b_step, AHEAD_BYTES + line))
            for i, at in enumerate(emit_rows(builder, a_step, lda, groups)):
                _emit_amx(builder, "tileloadd64", _register(4 + i), pointer_to(builder, at, _BYTE), row_bytes)
                for j in range(2):
                    _emit_amx(builder, "tdpbf16ps", _register(2 * i + j), _register(4 + i), _register(6 + j))
        for number, target in targets.items():
            _emit_amx(builder, "tilestored64", _register(number), target, ldc)

    return tile
