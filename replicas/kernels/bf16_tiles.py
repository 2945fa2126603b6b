"""Products of bf16 numbers that fit the registers, as IR: dots of pairs (AVX512_BF16), tiles (AMX), 2 x 4 by 4 x 2 at a
time (bfmmla of ARMs with FEAT_BF16); rounding to bf16.

Owns:      the IR, in which way this CPU multiplies, and how rounded rows lie for bfmmla: two together, four inputs of
           either in turn. Such rows share an instruction and no arithmetic; one without another has zeros beside it.
Never:     threads or blocks; bf16.py does.
Invariant: an element's sum runs in the order of the inputs in one accumulator, which may rest in memory between calls.
Thread:    any. Tiles are a thread's own: `begin_tiles` comes first, `end_tiles` last.
Source:    Intel 64 and IA-32 Architectures Software Developer's Manual: VDPBF16PS, TDPBF16PS; for the permission
           Documentation/arch/x86/xstate.rst of Linux. Arm Architecture Reference Manual (DDI 0487): BFMMLA, with
           FPCR.EBF = 0, as Linux starts a process: of four inputs the first two products are added up, then added to
           the sum, then the last two. Every addition rounds to odd (what is inexact is cut off, and its last bit set:
           off by up to 2 ** -23, a multiply-add in fp32 by 2 ** -24); below 2 ** -126, operands and results are zeros.

Those of x86 take pairs of inputs that lie side by side, of 16 output channels at once: a panel's pair is 32 channels
long.
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
    I32,
    I64,
    VEC,
    W,
    add_bytes,
    compiles_for,
    emit_load,
    emit_prefetch,
    emit_splat,
    emit_store,
    load,
    load1,
    op,
    pointer_to,
    splat_const,
    vector,
)
from replicas.kernels.team import inlined

Way = Literal["amx", "dots", "mmla"]
WAYS: dict[Way, str] = {"amx": "AMX's tiles", "dots": "AVX-512's dot products", "mmla": "NEON's bfmmla"}  # in words
TIMED = frozenset[Way](("amx", "dots"))  # on real CPUs: only where these multiply it is a checkpoint's bf16 the default
HAS_DOTS = compiles_for("avx512bf16")
STEP = 32  # inputs of a row of a tile
STEP_BYTES = 2 * STEP * COLUMNS  # of a panel
DOT_ROWS = 12  # of a tile of dots: 24 sums, of AVX-512's 32 registers
TILE_ROWS = 16
MMLA_ROWS = 12  # of a tile: six pairs by 8 channels are 24 sums, of NEON's 32 registers
FOUR = 4  # inputs of a row that one instruction multiplies
_FOUR_BYTES, _OPERAND_BYTES, _LINE = 2 * FOUR, 4 * FOUR, 64  # of one row's or channel's, of two, of 8 channels'
_LINES = COLUMNS * _FOUR_BYTES // _LINE  # of a panel's four inputs
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
_SUMS, _HALF, _EIGHT = ir.VectorType(F32, 4), ir.VectorType(_NUMBER, FOUR), ir.VectorType(_NUMBER, 2 * FOUR)


@functools.cache
def way() -> Way | None:
    """Tell how this CPU multiplies bf16 without widening it; None: it does not.

    On Intel's CPUs dots are slower than multiply-adds in fp32, on a Zen 4 they are twice as fast (docs/performance.md).
    On ARMs nothing was measured: it is done where `dtype: bfloat16` is set.
    """
    if compiles_for("amx-tile", "amx-bf16", "avx512bf16") and _permitted():
        return "amx"
    if compiles_for("bf16"):  # of aarch64
        return "mmla"
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


def emit_rounded(builder: Any, value: Any) -> Any:
    """Round sixteen floats to nearest bf16, ties to even. NaN stays one, subnormal numbers may become 0."""
    return builder.fptrunc(value, _NUMBERS)


@op(types.void, types.int64, vector)
def store_rounded(builder: Any, address: Any, value: Any) -> None:
    """Store sixteen floats as bf16, rounded as `emit_rounded` does."""
    builder.store(emit_rounded(builder, value), pointer_to(builder, address, _NUMBERS), align=2)


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


def _mask(*lanes: int) -> Any:
    return ir.Constant(ir.VectorType(I32, len(lanes)), lanes)


@op(types.void, types.int64, vector)
def _store_fours(builder: Any, address: Any, value: Any) -> None:
    """Store sixteen floats of a row, rounded, every four beside those of the other row."""
    numbers = emit_rounded(builder, value)
    for i in range(0, W, FOUR):
        four = builder.shuffle_vector(numbers, ir.Constant(numbers.type, ir.Undefined), _mask(*range(i, i + FOUR)))
        at = add_bytes(builder, address, i // FOUR * _OPERAND_BYTES)
        builder.store(four, pointer_to(builder, at, _HALF), align=2)


@inlined
def round_in_row_pairs(x: int, length: int, out: int) -> None:
    """Store floats at x as bf16, and zeros up to a whole step, as one of two rows that lie together."""
    if length >= STEP:
        for i in range(0, STEP, W):
            _store_fours(out + i // FOUR * _OPERAND_BYTES, load(x + 4 * i))
        return
    for i in range(STEP):
        store1_rounded(out + i // FOUR * _OPERAND_BYTES + i % FOUR * 2, load1(x + 4 * i) if i < length else 0.0)


@inlined
def place_in_row_pairs(a: Any, row: int) -> int:
    """Return where row ``row`` of what is rounded begins, in its pair of rows."""
    return int(a.rounded + row // 2 * a.group_bytes + row % 2 * _FOUR_BYTES)


def _emit_mmla_tile(builder: Any, rows: int, a: Any, lda: Any, b: Any, c: Any, ldc: Any, steps: Any, keep: Any) -> None:
    lines = {1: 4, 2: 2, 3: 2}.get((rows + 1) // 2, 1)  # at once: 16 to 24 sums
    row_pairs, c_rows = emit_rows(builder, a, lda, (rows + 1) // 2), emit_rows(builder, c, ldc, rows)
    for first in range(0, _LINES, lines):
        at, targets = add_bytes(builder, b, first * _LINE), [add_bytes(builder, row, 32 * first) for row in c_rows]
        _emit_mmla_lines(builder, lines, row_pairs, at, targets, steps, keep)


def _emit_mmla_lines(builder: Any, lines: int, row_pairs: Any, b: Any, c_rows: Any, steps: Any, keep: Any) -> None:
    """Multiply by ``lines`` times 8 channels."""
    places = [(p, j) for p in range(len(row_pairs)) for j in range(4 * lines)]  # pairs of rows, of channels
    sums = {place: cgutils.alloca_once(builder, _SUMS) for place in places}
    zeros = ir.Constant(_SUMS, [0.0] * 4)
    for place in places:
        builder.store(zeros, sums[place])
    with builder.if_then(builder.icmp_signed("!=", keep, ir.Constant(I64, 0))):
        for p, j in places[::2]:
            two = [builder.load(at, align=4) for at in _targets(builder, c_rows, p, j)]
            for i, part in enumerate(_crossed(builder, *two, *[zeros] * (2 - len(two)))):
                builder.store(part, sums[p, j + i])
    with cgutils.for_range(builder, builder.mul(steps, ir.Constant(I64, STEP // FOUR)), intp=I64) as loop:
        offset = builder.mul(loop.index, ir.Constant(I64, _OPERAND_BYTES))
        at = builder.add(b, builder.mul(loop.index, ir.Constant(I64, _LINE * _LINES)))
        x = [
            _emit_row_pair(builder, builder.add(pair, offset), 2 * p + 1 < len(c_rows))
            for p, pair in enumerate(row_pairs)
        ]
        for line in range(lines):
            emit_prefetch(builder, add_bytes(builder, at, AHEAD_BYTES + _LINE * line))
        for j in range(4 * lines):
            weights = builder.load(pointer_to(builder, add_bytes(builder, at, _OPERAND_BYTES * j), _EIGHT), align=2)
            for p in range(len(row_pairs)):
                builder.store(_emit_mmla(builder, builder.load(sums[p, j]), x[p], weights), sums[p, j])
    for p, j in places[::2]:
        rows = _crossed(builder, builder.load(sums[p, j]), builder.load(sums[p, j + 1]))
        for at, row in zip(_targets(builder, c_rows, p, j), rows, strict=False):  # a pair may have one row
            builder.store(row, at, align=4)


def _targets(builder: Any, c_rows: Any, p: int, j: int) -> list[Any]:
    """Return where two pairs of channels' sums of one or two rows belong."""
    rows = c_rows[2 * p : 2 * p + 2]
    return [pointer_to(builder, add_bytes(builder, row, 8 * j), _SUMS) for row in rows]


def _crossed(builder: Any, first: Any, second: Any) -> list[Any]:
    """Make of the sums of two pairs of channels those of two rows, and back."""
    return [builder.shuffle_vector(first, second, _mask(*lanes)) for lanes in ((0, 1, 4, 5), (2, 3, 6, 7))]


def _emit_row_pair(builder: Any, address: Any, two: bool) -> Any:
    """Load four inputs of ``two`` rows, or of one and zeros."""
    if two:
        return builder.load(pointer_to(builder, address, _EIGHT), align=2)
    half = builder.load(pointer_to(builder, address, _HALF), align=2)
    return builder.shuffle_vector(half, ir.Constant(_HALF, None), _mask(*range(2 * FOUR)))


def _emit_mmla(builder: Any, sums: Any, x: Any, weights: Any) -> Any:
    """Add to sums [2 rows, 2 channels] the products of x [2 rows, 4] and weights [2 channels, 4]."""
    kind = ir.FunctionType(_SUMS, [_SUMS, _EIGHT, _EIGHT])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.aarch64.neon.bfmmla")
    return builder.call(function, [sums, x, weights])


# f(rows, a, a_stride, b, c, c_stride, steps, keep): c[rows, 32] = a[rows, 32 steps] @ b, added to c if keep is not 0.
# a: of each two rows, a_stride bytes apart [8 steps, 2, 4]; b: [8 steps, 32, 4]
_mmla_tile = chosen_tile(_emit_mmla_tile, MMLA_ROWS, 7)


@inlined
def multiply_row_pairs(a: Any, rows: int, x: int, b: int, c: int, ldc: int, start: int) -> None:
    """Multiply in tiles of nearly the same number of pairs of rows."""
    steps, pairs, row = min(a.part, a.inputs - start) // STEP, (rows + 1) // 2, 0
    count = (rows + MMLA_ROWS - 1) // MMLA_ROWS
    for i in range(count):
        end = min(pairs * (i + 1) // count * 2, rows)
        _mmla_tile(end - row, x + row // 2 * a.group_bytes, a.group_bytes, b, c + row * ldc, ldc, steps, start)
        row = end
