"""Products of rows in bf16 by weights of 4 and 8 bits with scales, as IR: dots of pairs (AVX512_BF16), group by group.

Owns:      how two inputs of 16 channels become a register of pairs, by format; the tile that multiplies by them.
Never:     rounds x, or chooses blocks; bf16.py does.
Invariant: what is multiplied is exact: the whole numbers of a weight fit bf16, and scales come in after a group's sum.
           An element's sum runs in the order of the inputs within a group, then in that of the groups.
Thread:    any; no state. Addresses and strides are in bytes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, types

from replicas.kernels.bf16_tiles import AHEAD_BYTES, emit_dots, emit_rows, emit_splat_pair
from replicas.kernels.narrow import emit_load_bytes
from replicas.kernels.panel_tiles import COLUMNS, FORMS, PanelForm, chosen_tile
from replicas.kernels.simd import (
    F32,
    I64,
    IVEC,
    VEC,
    W,
    add_bytes,
    emit_fma,
    emit_load,
    emit_prefetch,
    emit_splat,
    emit_store,
    int_const,
    op,
    pointer_to,
    splat_const,
)
from replicas.kernels.weight_formats import GROUP, WeightFormat

PAIR_ROWS = 6  # of a tile of all 32 channels: 12 sums of a group, 12 of all groups, of AVX-512's 32 registers
_WORD = ir.IntType(16)
_WORDS, _TWO_BYTES = ir.VectorType(_WORD, 2 * W), ir.VectorType(ir.IntType(8), 2 * W)


def _words(values: Sequence[int]) -> ir.Constant:
    return ir.Constant(_WORDS, list(values))


_SMALL = _words((np.arange(16, dtype=np.float32).view(np.uint32) >> 16).tolist() * 2)  # 0 to 15 in bf16, twice
_SIDE_BY_SIDE = ir.Constant(ir.VectorType(ir.IntType(32), 2 * W), [i // 2 + W * (i % 2) for i in range(2 * W)])


def _nibble_pairs(builder: Any, at: Any) -> list[Any]:
    """Of bytes of two channels each: numbers are looked up by the lowest 5 bits of a word, of which 4 count."""
    two = builder.load(pointer_to(builder, at, _TWO_BYTES), align=1)
    words = builder.zext(two, _WORDS)
    words = builder.shuffle_vector(words, ir.Constant(_WORDS, ir.Undefined), _SIDE_BY_SIDE)
    look_up = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(_WORDS, [_WORDS, _WORDS]), "llvm.x86.avx512.permvar.hi.512"
    )
    return [builder.call(look_up, [_SMALL, each]) for each in (words, builder.lshr(words, _words([4] * 2 * W)))]


def _byte_pairs(builder: Any, at: Any) -> list[Any]:
    """A float of 7 bits ends in zeros: two make a pair without rounding."""
    pairs = []
    for half in range(2):
        numbers = (emit_load_bytes(builder, add_bytes(builder, at, COLUMNS * i + W * half)) for i in range(2))
        first, second = (builder.bitcast(builder.sitofp(builder.sext(each, IVEC), VEC), IVEC) for each in numbers)
        pairs.append(builder.or_(builder.lshr(first, int_const(16)), second))
    return pairs


@dataclass(frozen=True, slots=True)
class PairForm:
    """How a group of `GROUP` inputs of a panel is read by pairs of inputs."""

    panel: PanelForm
    pairs: Callable[[Any, Any], list[Any]]  # (builder, address of two inputs) -> two vectors
    least: bool  # whether a channel of a group has a least number, by which the sum of x's group is multiplied

    @property
    def group_bytes(self) -> int:
        return self.panel.head + GROUP * self.panel.step


PAIR_FORMS: dict[WeightFormat, PairForm] = {
    "q4_1": PairForm(FORMS["q4_1"], _nibble_pairs, least=True),
    "q8_0": PairForm(FORMS["q8_0"], _byte_pairs, least=False),
}


def scaled_tile(form: PairForm, *, unpacked: bool) -> Any:
    """Kernel ``f(rows, a, a_stride, sums, b, pairs, c, c_stride, groups, keep)``: c[rows, 32] = a[rows, 32 groups] @ b,
    added to c if ``keep`` is not 0, for 1 <= rows <= `PAIR_ROWS`.

    sums: [rows, groups] fp32 of a's groups, rows ``a_stride`` apart; read where the form has least numbers. pairs: what
    `unpacking` made of b, if ``unpacked``.
    """

    def emit(builder: Any, rows: int, *arguments: Any) -> None:
        _emit_scaled(builder, form, unpacked, rows, *arguments)

    return chosen_tile(emit, PAIR_ROWS, 9)


def _emit_scaled(
    builder: Any, form: PairForm, unpacked: bool, rows: int, a: Any, lda: Any, sums: Any, b: Any, pairs: Any, c: Any,
    ldc: Any, groups: Any, keep: Any,
) -> None:  # fmt: skip
    a_rows, sum_rows, c_rows = (emit_rows(builder, *at, rows) for at in ((a, lda), (sums, lda), (c, ldc)))
    targets = {(r, j): add_bytes(builder, c_rows[r], 4 * W * j) for r in range(rows) for j in range(2)}
    totals = {place: cgutils.alloca_once_value(builder, splat_const(0.0)) for place in targets}
    in_group = {place: cgutils.alloca_once(builder, VEC) for place in targets}
    for place in targets:
        builder.store(splat_const(0.0), totals[place])
    with builder.if_then(builder.icmp_signed("!=", keep, ir.Constant(I64, 0))):
        for place, target in targets.items():
            builder.store(emit_load(builder, target), totals[place])
    with cgutils.for_range(builder, groups, intp=I64) as group:
        start = _group(builder, form, b, group.index)
        scales = form.panel.scales(builder, start)
        for line in range(0, form.group_bytes, 64):
            emit_prefetch(builder, add_bytes(builder, start, AHEAD_BYTES + line))
        for place in targets:
            builder.store(splat_const(0.0), in_group[place])
        first = builder.mul(group.index, ir.Constant(I64, GROUP // 2))
        with cgutils.for_range(builder, ir.Constant(I64, GROUP // 2), intp=I64) as loop:
            pair = builder.add(first, loop.index)
            if unpacked:
                at = builder.add(pairs, builder.mul(pair, ir.Constant(I64, 4 * COLUMNS)))
                weights = [emit_load(builder, add_bytes(builder, at, 4 * W * j)) for j in range(2)]
            else:
                weights = form.pairs(builder, _pair(builder, form, start, loop.index))
            for r in range(rows):
                x = emit_splat_pair(builder, builder.add(a_rows[r], builder.shl(pair, ir.Constant(I64, 2))))
                for j in range(2):
                    builder.store(emit_dots(builder, builder.load(in_group[r, j]), x, weights[j]), in_group[r, j])
        for r, j in targets:
            total = emit_fma(builder, builder.load(in_group[r, j]), scales[j], builder.load(totals[r, j]))
            if form.least:
                at = builder.add(sum_rows[r], builder.shl(group.index, ir.Constant(I64, 2)))
                of_x = emit_splat(builder, builder.load(pointer_to(builder, at, F32), align=4))
                total = emit_fma(builder, of_x, scales[2 + j], total)
            builder.store(total, totals[r, j])
    for place, target in targets.items():
        emit_store(builder, target, builder.load(totals[place]))


def _group(builder: Any, form: PairForm, b: Any, index: Any) -> Any:
    return builder.add(b, builder.mul(index, ir.Constant(I64, form.group_bytes)))


def _pair(builder: Any, form: PairForm, group: Any, index: Any) -> Any:
    offset = builder.mul(index, ir.Constant(I64, 2 * form.panel.step))
    return add_bytes(builder, builder.add(group, offset), form.panel.head)


def unpacking(form: PairForm) -> Any:
    """Kernel ``f(b, groups, out)``: the whole numbers of a panel's groups as pairs in bf16, out[16 groups, 32, 2]."""

    @op(types.void, *[types.int64] * 3)
    def unpack(builder: Any, b: Any, groups: Any, out: Any) -> None:
        with cgutils.for_range(builder, groups, intp=I64) as group:
            start = _group(builder, form, b, group.index)
            to = builder.add(out, builder.mul(group.index, ir.Constant(I64, 2 * GROUP * COLUMNS)))
            for line in range(0, form.group_bytes, 64):
                emit_prefetch(builder, add_bytes(builder, start, AHEAD_BYTES + line))
            with cgutils.for_range(builder, ir.Constant(I64, GROUP // 2), intp=I64) as loop:
                at = builder.add(to, builder.mul(loop.index, ir.Constant(I64, 4 * COLUMNS)))
                for j, pairs in enumerate(form.pairs(builder, _pair(builder, form, start, loop.index))):
                    emit_store(builder, add_bytes(builder, at, 4 * W * j), builder.bitcast(pairs, VEC))

    return unpack
