"""Products of bf16 numbers that fit the registers, as IR: 2 x 4 by 4 x 2 at a time (bfmmla of NEON, FEAT_BF16).

Owns:      the IR of the tile, and how rounded rows lie for it: two rows together, four inputs of either in turn.
Never:     threads, or chooses blocks; bf16.py does.
Invariant: an element's sum runs in the order of the inputs in one accumulator, which may rest in memory between calls.
           Two rows share an instruction and no arithmetic; a row without another has zeros beside it.
Thread:    any; no state. Addresses and strides are in bytes.
Source:    Arm Architecture Reference Manual (DDI 0487), BFMMLA, with FPCR.EBF = 0 as Linux starts a process: of four
           inputs the first two products are added up, then added to the sum, then the last two. Every addition rounds
           to odd (what is inexact is cut off, and its last bit set: off by up to 2 ** -23, a multiply-add in fp32 by
           2 ** -24); numbers below 2 ** -126, of operands and results, are zeros.
"""

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, types

from replicas.kernels.bf16_tiles import AHEAD_BYTES, STEP, BFloat, emit_rounded, emit_rows, store1_rounded
from replicas.kernels.panel_tiles import COLUMNS, chosen_tile
from replicas.kernels.simd import F32, I32, I64, W, add_bytes, emit_prefetch, load, load1, op, pointer_to, vector
from replicas.kernels.team import inlined

MMLA_ROWS = 12  # of a tile: six pairs by 8 channels are 24 sums, of NEON's 32 registers
FOUR = 4  # inputs of a row that one instruction multiplies
_FOUR_BYTES, _PAIR_BYTES, _LINE = 2 * FOUR, 4 * FOUR, 64  # of a row's, of two rows', of 8 channels'
_LINES = COLUMNS * _FOUR_BYTES // _LINE  # of a panel's four inputs
_SUMS, _HALF, _NUMBERS = (ir.VectorType(*kind) for kind in ((F32, 4), (BFloat(), FOUR), (BFloat(), 2 * FOUR)))


def _mask(*lanes: int) -> Any:
    return ir.Constant(ir.VectorType(I32, len(lanes)), lanes)


@op(types.void, types.int64, vector)
def _store_fours(builder: Any, address: Any, value: Any) -> None:
    """Store sixteen floats of a row, rounded, every four beside those of the other row."""
    numbers = emit_rounded(builder, value)
    for i in range(0, W, FOUR):
        four = builder.shuffle_vector(numbers, ir.Constant(numbers.type, ir.Undefined), _mask(*range(i, i + FOUR)))
        at = add_bytes(builder, address, i // FOUR * _PAIR_BYTES)
        builder.store(four, pointer_to(builder, at, _HALF), align=2)


@inlined
def round_in_pairs(x: int, length: int, out: int) -> None:
    """Floats at x as bf16, and zeros up to a whole step, as one of two rows that lie together."""
    if length >= STEP:
        for i in range(0, STEP, W):
            _store_fours(out + i // FOUR * _PAIR_BYTES, load(x + 4 * i))
        return
    for i in range(STEP):
        store1_rounded(out + i // FOUR * _PAIR_BYTES + i % FOUR * 2, load1(x + 4 * i) if i < length else 0.0)


@inlined
def place_in_pairs(a: Any, row: int) -> int:
    return int(a.rounded + row // 2 * a.group_bytes + row % 2 * _FOUR_BYTES)


def _emit_tile(builder: Any, rows: int, a: Any, lda: Any, b: Any, c: Any, ldc: Any, steps: Any, keep: Any) -> None:
    lines = {1: 4, 2: 2, 3: 2}.get((rows + 1) // 2, 1)  # at once: 16 to 24 sums
    a_pairs, c_rows = emit_rows(builder, a, lda, (rows + 1) // 2), emit_rows(builder, c, ldc, rows)
    for first in range(0, _LINES, lines):
        at, targets = add_bytes(builder, b, first * _LINE), [add_bytes(builder, row, 32 * first) for row in c_rows]
        _emit_lines(builder, lines, a_pairs, at, targets, steps, keep)


def _emit_lines(builder: Any, lines: int, a_pairs: Any, b: Any, c_rows: Any, steps: Any, keep: Any) -> None:
    """Multiply by ``lines`` times 8 channels."""
    places = [(p, j) for p in range(len(a_pairs)) for j in range(4 * lines)]  # pairs of rows, of channels
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
        offset = builder.mul(loop.index, ir.Constant(I64, _PAIR_BYTES))
        at = builder.add(b, builder.mul(loop.index, ir.Constant(I64, _LINE * _LINES)))
        x = [_emit_pair(builder, builder.add(pair, offset), 2 * p + 1 < len(c_rows)) for p, pair in enumerate(a_pairs)]
        for line in range(lines):
            emit_prefetch(builder, add_bytes(builder, at, AHEAD_BYTES + _LINE * line))
        for j in range(4 * lines):
            weights = builder.load(pointer_to(builder, add_bytes(builder, at, _PAIR_BYTES * j), _NUMBERS), align=2)
            for p in range(len(a_pairs)):
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


def _emit_pair(builder: Any, address: Any, two: bool) -> Any:
    """Load four inputs of ``two`` rows, or of one and zeros."""
    if two:
        return builder.load(pointer_to(builder, address, _NUMBERS), align=2)
    half = builder.load(pointer_to(builder, address, _HALF), align=2)
    return builder.shuffle_vector(half, ir.Constant(_HALF, None), _mask(*range(2 * FOUR)))


def _emit_mmla(builder: Any, sums: Any, x: Any, weights: Any) -> Any:
    """Add to sums [2 rows, 2 channels] the products of x [2 rows, 4] and weights [2 channels, 4]."""
    kind = ir.FunctionType(_SUMS, [_SUMS, _NUMBERS, _NUMBERS])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.aarch64.neon.bfmmla")
    return builder.call(function, [sums, x, weights])


# f(rows, a, a_stride, b, c, c_stride, steps, keep): c[rows, 32] = a[rows, 32 steps] @ b, added to c if keep is not 0.
# a: of each two rows, a_stride bytes apart [8 steps, 2, 4]; b: [8 steps, 32, 4]
_tile = chosen_tile(_emit_tile, MMLA_ROWS, 7)


@inlined
def multiply_pairs(a: Any, rows: int, x: int, b: int, c: int, ldc: int, start: int) -> None:
    """In tiles of nearly the same number of pairs of rows."""
    steps, pairs, row = min(a.part, a.inputs - start) // STEP, (rows + 1) // 2, 0
    count = (rows + MMLA_ROWS - 1) // MMLA_ROWS
    for i in range(count):
        end = min(pairs * (i + 1) // count * 2, rows)
        _tile(end - row, x + row // 2 * a.group_bytes, a.group_bytes, b, c + row * ldc, ldc, steps, start)
        row = end
