"""Pieces of matrix arithmetic that fit the registers, as IR: a 16 x 16 transposition and two kinds of product.

Owns:      the IR of the tiles; tiles.py covers matrices of any shape with them.
Invariant: an element's sum runs in the order of k, in one accumulator (outer) or in 16 lanes added at the end (dot).
Thread:    any; no state.
"""

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, types

from replicas.kernels.simd import (
    F32,
    I32,
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
    op,
    pointer_to,
    splat_const,
)


def _transpose_stage(builder: Any, rows: list[Any], step: int) -> list[Any]:
    """Swap the off-diagonal ``step`` x ``step`` blocks of every 2 step x 2 step block of a 16 x 16 matrix."""
    out = list(rows)
    low = [i if not i & step else W + i - step for i in range(W)]
    high = [i + step if not i & step else W + i for i in range(W)]
    for i in range(W):
        if not i & step:
            a, b = rows[i], rows[i + step]
            out[i] = builder.shuffle_vector(a, b, ir.Constant(IVEC, low))
            out[i + step] = builder.shuffle_vector(a, b, ir.Constant(IVEC, high))
    return out


@op(types.void, types.int64, types.int64, types.int64, types.int64)
def transpose16(builder: Any, src: Any, src_stride: Any, dst: Any, dst_stride: Any) -> None:
    """Transpose a 16 x 16 block: dst[j, i] = src[i, j]; strides in bytes."""
    rows = [emit_load(builder, builder.add(src, builder.mul(src_stride, ir.Constant(I64, i)))) for i in range(W)]
    for step in (8, 4, 2, 1):
        rows = _transpose_stage(builder, rows, step)
    for i, row in enumerate(rows):
        emit_store(builder, builder.add(dst, builder.mul(dst_stride, ir.Constant(I64, i))), row)


def outer_tile(rows: int, cols: int, *, fetches: bool) -> Any:
    """Kernel ``f(a, a_stride, b, b_stride, c, c_stride, k, keep)``: c[rows, 16 cols] = a[rows, k] @ b[k, 16 cols].

    ``keep`` != 0 adds the sum to what c holds. Strides in bytes. rows * cols + cols + 1 registers: 6 x 4 fills
    AVX-512's 32. One that ``fetches`` takes one more argument, ``ahead``: see `dot_tile`.
    """

    @op(types.void, *[types.int64] * (9 if fetches else 8))
    def tile(builder: Any, a: Any, lda: Any, b: Any, ldb: Any, c: Any, ldc: Any, k: Any, keep: Any, *more: Any) -> None:
        ahead = more[0] if fetches else None
        a_rows, c_rows = _row_addresses(builder, a, lda, rows), _row_addresses(builder, c, ldc, rows)
        sums = [[cgutils.alloca_once(builder, VEC) for _ in range(cols)] for _ in range(rows)]
        places = [(r, j) for r in range(rows) for j in range(cols)]
        for r, j in places:
            builder.store(splat_const(0.0), sums[r][j])
        with cgutils.for_range(builder, k, intp=I64) as loop:
            b_row = builder.add(b, builder.mul(ldb, loop.index))
            bs = [emit_load(builder, add_bytes(builder, b_row, 64 * j)) for j in range(cols)]
            for j in range(cols if ahead is not None else 0):
                emit_prefetch(builder, add_bytes(builder, builder.add(b_row, ahead), 64 * j), far=True)
            for r in range(rows):
                address = builder.add(a_rows[r], builder.shl(loop.index, ir.Constant(I64, 2)))
                x = emit_splat(builder, builder.load(pointer_to(builder, address, F32), align=4))
                for j in range(cols):
                    builder.store(emit_fma(builder, x, bs[j], builder.load(sums[r][j])), sums[r][j])
        with builder.if_then(builder.icmp_signed("!=", keep, ir.Constant(I64, 0))):
            for r, j in places:
                before = emit_load(builder, add_bytes(builder, c_rows[r], 64 * j))
                builder.store(builder.fadd(before, builder.load(sums[r][j])), sums[r][j])
        for r, j in places:
            emit_store(builder, add_bytes(builder, c_rows[r], 64 * j), builder.load(sums[r][j]))

    return tile


def dot_tile(rows: int, cols: int) -> Any:
    """Kernel ``f(a, a_stride, b, b_stride, c, c_stride, k, ahead)``: c[rows, cols] = a[rows, k] @ b[cols, k].T.

    k is a multiple of 16 and rows * cols at most 16: sums run along k in 16 lanes, which are added up at the end.
    Each cache line of b that is read asks for the one ``ahead`` bytes further: fetched so, between the arithmetic,
    memory keeps working while the core computes.
    """
    assert rows * cols <= W

    @op(types.void, *[types.int64] * 8)
    def tile(builder: Any, a: Any, lda: Any, b: Any, ldb: Any, c: Any, ldc: Any, k: Any, ahead: Any) -> None:
        a_rows, b_rows = _row_addresses(builder, a, lda, rows), _row_addresses(builder, b, ldb, cols)
        sums = [[cgutils.alloca_once(builder, VEC) for _ in range(cols)] for _ in range(rows)]
        places = [place for row in sums for place in row]
        for place in places:
            builder.store(splat_const(0.0), place)
        with cgutils.for_range(builder, builder.lshr(k, ir.Constant(I64, 4)), intp=I64) as loop:
            offset = builder.shl(loop.index, ir.Constant(I64, 6))
            bs = [emit_load(builder, builder.add(row, offset)) for row in b_rows]
            for row in b_rows:
                emit_prefetch(builder, builder.add(builder.add(row, offset), ahead), far=True)
            for r in range(rows):
                x = emit_load(builder, builder.add(a_rows[r], offset))
                for j in range(cols):
                    builder.store(emit_fma(builder, x, bs[j], builder.load(sums[r][j])), sums[r][j])
        values = [builder.load(place) for place in places]
        _store_sums(builder, values, _row_addresses(builder, c, ldc, rows), cols)

    return tile


def _store_sums(builder: Any, vectors: list[Any], c_rows: list[Any], cols: int) -> None:
    """Store the sum of each vector's lanes, ``cols`` of them per row."""
    lanes = _lane_sums(builder, vectors)
    for r, c_row in enumerate(c_rows):
        mask = ir.Constant(ir.VectorType(I32, cols), list(range(r * cols, (r + 1) * cols)))
        part = builder.shuffle_vector(lanes, ir.Constant(VEC, ir.Undefined), mask)
        builder.store(part, pointer_to(builder, c_row, part.type), align=4)


def _row_addresses(builder: Any, start: Any, stride: Any, count: int) -> list[Any]:
    return [builder.add(start, builder.mul(stride, ir.Constant(I64, i))) for i in range(count)]


def _lane_sums(builder: Any, vectors: list[Any]) -> Any:
    """Sum the lanes of ``vectors[i]`` into lane i of one vector; at most 16 vectors, halved four times."""
    undefined = ir.Constant(VEC, ir.Undefined)
    level = vectors + [undefined] * (W - len(vectors))
    for width in (8, 4, 2, 1):  # a lane group of 2 * width holds one partial sum and becomes one of width
        groups = [g * 2 * width + i for g in range(W // (2 * width)) for i in range(width)]
        first = ir.Constant(IVEC, groups + [W + g for g in groups])
        second = ir.Constant(IVEC, [g + width for g in groups] + [W + width + g for g in groups])
        pairs = list(zip(level[::2], level[1::2], strict=True))
        level = [
            undefined if a is undefined else builder.fadd(
                builder.shuffle_vector(a, b, first), builder.shuffle_vector(a, b, second)
            )
            for a, b in pairs
        ]
    return level[0]
