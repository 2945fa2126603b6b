"""Sixteen floats at a time, inside numba kernels: loads, stores, arithmetic, exp, and three register tiles.

Owns:      the LLVM IR that numba cannot be talked into: explicit vectors, register blocking, transposition.
Never:     allocates, checks bounds, or knows what is computed; memory is named by address (int64, bytes).
Invariant: a result depends on operands and shapes alone, never on alignment or on what ran before.
Thread:    any; no state.

One vector is ``<16 x float>``: a register with AVX-512, two with AVX2 (LLVM splits it). numba caches a kernel by its
own file's time stamp: after a change here, delete ``__pycache__/*.nb*`` of the files that use it.
"""

import inspect
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.datamodel import models, register_default
from numba.extending import intrinsic

W = 16  # floats in a vector
F32 = ir.FloatType()
I32 = ir.IntType(32)
I64 = ir.IntType(64)
VEC = ir.VectorType(F32, W)
IVEC = ir.VectorType(I32, W)


class VectorType(types.Type):  # type: ignore[misc]
    """The numba type of one vector; has no Python value, lives in registers."""

    def __init__(self) -> None:
        super().__init__(name="f32x16")


vector = VectorType()


@register_default(VectorType)
class _VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, VEC)


def op(returns: Any, *params: Any) -> Callable[[Callable[..., Any]], Any]:
    """An intrinsic of fixed types whose body emits IR: ``emit(builder, *values) -> value``."""

    def wrap(emit: Callable[..., Any]) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            value = emit(builder, *args)
            return context.get_dummy_value() if returns is types.void else value

        def typing(typingctx: Any, *args: Any) -> Any:
            return returns(*params), codegen

        typing.__name__ = emit.__name__
        names = ["typingctx", *(f"a{i}" for i in range(len(params)))]
        parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
        typing.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # numba reads the arity here
        return intrinsic(typing)

    return wrap


def splat_const(value: float) -> ir.Constant:
    return ir.Constant(VEC, [value] * W)


def _int_const(value: int) -> ir.Constant:
    return ir.Constant(IVEC, [value] * W)


def _pointer(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def _llvm(builder: Any, name: str, returns: Any, *args: Any) -> Any:
    """Call an LLVM intrinsic, with the freedom to reorder and to drop NaN cases."""
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(returns, [a.type for a in args]), name)
    return builder.call(function, args, fastmath=("fast",))


def _load(builder: Any, address: Any) -> Any:
    return builder.load(_pointer(builder, address, VEC), align=4)


def _store(builder: Any, address: Any, value: Any) -> None:
    builder.store(value, _pointer(builder, address, VEC), align=4)


def _splat(builder: Any, scalar: Any) -> Any:
    one = builder.insert_element(ir.Constant(VEC, ir.Undefined), scalar, ir.Constant(I32, 0))
    return builder.shuffle_vector(one, ir.Constant(VEC, ir.Undefined), _int_const(0))


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return _llvm(builder, "llvm.fma.v16f32", VEC, a, b, c)


def _hsum(builder: Any, v: Any) -> Any:
    return _llvm(builder, "llvm.vector.reduce.fadd.v16f32", F32, ir.Constant(F32, -0.0), v)


def _prefetch(builder: Any, address: Any) -> None:
    """Ask for the cache line at ``address``; never faults."""
    byte = ir.IntType(8).as_pointer()
    args = [builder.inttoptr(address, byte), ir.Constant(I32, 0), ir.Constant(I32, 3), ir.Constant(I32, 1)]
    kind = ir.FunctionType(ir.VoidType(), [byte, I32, I32, I32])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0"), args)


def _add_bytes(builder: Any, address: Any, offset: int) -> Any:
    return builder.add(address, ir.Constant(I64, offset)) if offset else address


@op(vector, types.int64)
def load(builder: Any, address: Any) -> Any:
    return _load(builder, address)


@op(types.void, types.int64, vector)
def store(builder: Any, address: Any, value: Any) -> None:
    _store(builder, address, value)


@op(types.float32, types.int64)
def load1(builder: Any, address: Any) -> Any:
    return builder.load(_pointer(builder, address, F32), align=4)


@op(types.void, types.int64, types.float32)
def store1(builder: Any, address: Any, value: Any) -> None:
    builder.store(value, _pointer(builder, address, F32), align=4)


@op(types.int64, types.int64)
def load_i32(builder: Any, address: Any) -> Any:
    return builder.sext(builder.load(_pointer(builder, address, I32), align=4), I64)


@op(types.int64, types.int64)
def load_i64(builder: Any, address: Any) -> Any:
    return builder.load(_pointer(builder, address, I64), align=8)


@op(vector, types.float32)
def splat(builder: Any, scalar: Any) -> Any:
    return _splat(builder, scalar)


@op(vector, vector, vector)
def add(builder: Any, a: Any, b: Any) -> Any:
    return builder.fadd(a, b)


@op(vector, vector, vector)
def mul(builder: Any, a: Any, b: Any) -> Any:
    return builder.fmul(a, b)


@op(vector, vector, vector)
def sub(builder: Any, a: Any, b: Any) -> Any:
    return builder.fsub(a, b)


@op(vector, vector, vector)
def div(builder: Any, a: Any, b: Any) -> Any:
    return builder.fdiv(a, b)


@op(vector, vector, vector)
def maximum(builder: Any, a: Any, b: Any) -> Any:
    return _llvm(builder, "llvm.maxnum.v16f32", VEC, a, b)


@op(vector, vector, vector, vector)
def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""
    return _fma(builder, a, b, c)


@op(types.float32, vector)
def hsum(builder: Any, v: Any) -> Any:
    return _hsum(builder, v)


@op(types.float32, vector)
def hmax(builder: Any, v: Any) -> Any:
    return _llvm(builder, "llvm.vector.reduce.fmax.v16f32", F32, v)


@op(vector, vector)
def exp(builder: Any, x: Any) -> Any:
    """e ** x to 2 ulp; below -87 it is a tiny positive number or 0, above 88 it saturates. Source: Cephes' expf."""
    x = _llvm(builder, "llvm.maxnum.v16f32", VEC, x, splat_const(-87.3))
    x = _llvm(builder, "llvm.minnum.v16f32", VEC, x, splat_const(88.3))
    n = _llvm(builder, "llvm.rint.v16f32", VEC, builder.fmul(x, splat_const(1.4426950408889634)))
    r = _fma(builder, n, splat_const(-0.693359375), x)
    r = _fma(builder, n, splat_const(2.12194440e-4), r)
    p = splat_const(1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = _fma(builder, p, r, splat_const(c))
    p = builder.fadd(_fma(builder, p, builder.fmul(r, r), r), splat_const(1.0))
    exponent = builder.shl(builder.add(builder.fptosi(n, IVEC), _int_const(127)), _int_const(23))
    return builder.fmul(p, builder.bitcast(exponent, VEC))


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
    """dst[j, i] = src[i, j] for a 16 x 16 block; strides in bytes."""
    rows = [_load(builder, builder.add(src, builder.mul(src_stride, ir.Constant(I64, i)))) for i in range(W)]
    for step in (8, 4, 2, 1):
        rows = _transpose_stage(builder, rows, step)
    for i, row in enumerate(rows):
        _store(builder, builder.add(dst, builder.mul(dst_stride, ir.Constant(I64, i))), row)


@op(types.int64, types.int64)
def take_next(builder: Any, counter: Any) -> Any:
    """Atomically add 1 to the int64 at ``counter``; returns what it was: the next task for the thread that asks."""
    return builder.atomic_rmw("add", _pointer(builder, counter, I64), ir.Constant(I64, 1), "monotonic")


def outer_tile(rows: int, cols: int, *, fetches: bool) -> Any:
    """Kernel ``f(a, a_stride, b, b_stride, c, c_stride, k, keep)``: c[rows, 16 cols] = a[rows, k] @ b[k, 16 cols].

    ``keep`` != 0 adds to what c holds. Strides in bytes. rows * cols + cols + 1 registers: 6 x 4 fills AVX-512's 32.
    One that ``fetches`` takes one more argument, ``ahead``: see `dot_tile`.
    """

    @op(types.void, *[types.int64] * (9 if fetches else 8))
    def tile(builder: Any, a: Any, lda: Any, b: Any, ldb: Any, c: Any, ldc: Any, k: Any, keep: Any, *more: Any) -> None:
        ahead = more[0] if fetches else None
        a_rows, c_rows = _row_addresses(builder, a, lda, rows), _row_addresses(builder, c, ldc, rows)
        sums = [[cgutils.alloca_once(builder, VEC) for _ in range(cols)] for _ in range(rows)]
        places = [(r, j) for r in range(rows) for j in range(cols)]
        for r, j in places:
            builder.store(splat_const(0.0), sums[r][j])
        with builder.if_then(builder.icmp_signed("!=", keep, ir.Constant(I64, 0))):
            for r, j in places:
                builder.store(_load(builder, _add_bytes(builder, c_rows[r], 64 * j)), sums[r][j])
        with cgutils.for_range(builder, k, intp=I64) as loop:
            b_row = builder.add(b, builder.mul(ldb, loop.index))
            bs = [_load(builder, _add_bytes(builder, b_row, 64 * j)) for j in range(cols)]
            for j in range(cols if ahead is not None else 0):
                _prefetch(builder, _add_bytes(builder, builder.add(b_row, ahead), 64 * j))
            for r in range(rows):
                address = builder.add(a_rows[r], builder.shl(loop.index, ir.Constant(I64, 2)))
                x = _splat(builder, builder.load(_pointer(builder, address, F32), align=4))
                for j in range(cols):
                    builder.store(_fma(builder, x, bs[j], builder.load(sums[r][j])), sums[r][j])
        for r, j in places:
            _store(builder, _add_bytes(builder, c_rows[r], 64 * j), builder.load(sums[r][j]))

    return tile


def dot_tile(rows: int, cols: int) -> Any:
    """Kernel ``f(a, a_stride, b, b_stride, c, c_stride, k, ahead)``: c[rows, cols] = a[rows, k] @ b[cols, k].T.

    k is a multiple of 16 and rows * cols at most 16: sums run along k in 16 lanes, which are added up at the end.
    Each cache line of b that is read asks for the one ``ahead`` bytes further: fetched so, between the arithmetic,
    memory keeps working while the core computes (8 rows by a cold weight: 36 -> 123 GFLOP/s on one Zen 5 core).
    """
    assert rows * cols <= W

    @op(types.void, *[types.int64] * 8)
    def tile(builder: Any, a: Any, lda: Any, b: Any, ldb: Any, c: Any, ldc: Any, k: Any, ahead: Any) -> None:
        a_rows, b_rows = _row_addresses(builder, a, lda, rows), _row_addresses(builder, b, ldb, cols)
        sums = [[cgutils.alloca_once(builder, VEC) for _ in range(cols)] for _ in range(rows)]
        for row in sums:
            for place in row:
                builder.store(splat_const(0.0), place)
        with cgutils.for_range(builder, builder.lshr(k, ir.Constant(I64, 4)), intp=I64) as loop:
            offset = builder.shl(loop.index, ir.Constant(I64, 6))
            bs = [_load(builder, builder.add(row, offset)) for row in b_rows]
            for row in b_rows:
                _prefetch(builder, builder.add(builder.add(row, offset), ahead))
            for r in range(rows):
                x = _load(builder, builder.add(a_rows[r], offset))
                for j in range(cols):
                    builder.store(_fma(builder, x, bs[j], builder.load(sums[r][j])), sums[r][j])
        lanes = _lane_sums(builder, [builder.load(place) for row in sums for place in row])
        for r, c_row in enumerate(_row_addresses(builder, c, ldc, rows)):
            mask = ir.Constant(ir.VectorType(I32, cols), list(range(r * cols, (r + 1) * cols)))
            part = builder.shuffle_vector(lanes, ir.Constant(VEC, ir.Undefined), mask)
            builder.store(part, _pointer(builder, c_row, part.type), align=4)

    return tile


def _row_addresses(builder: Any, start: Any, stride: Any, count: int) -> list[Any]:
    return [builder.add(start, builder.mul(stride, ir.Constant(I64, i))) for i in range(count)]


def _lane_sums(builder: Any, vectors: list[Any]) -> Any:
    """One vector whose lane i is the sum over lanes of ``vectors[i]``; at most 16 vectors, halved four times."""
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
