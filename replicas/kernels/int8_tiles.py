"""Pieces of int8 arithmetic that fit the registers, as IR: a product tile of VNNI instructions, and rounding to bytes.

Owns:      the IR, and whether this CPU can run it.
Never:     threads or blocks; int8.py does.
Invariant: sums are of integers, hence exact in any order: an element does not depend on the tile that made it.
Thread:    any; no state.

``vpdpbusd`` adds four products of an unsigned and a signed byte to each of 16 int32 sums, without saturating. The
activations are the unsigned ones: shifted by 128, which the sums' starting values take back.
"""

from typing import Any

import llvmlite.binding
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
    emit_llvm,
    emit_load,
    emit_prefetch,
    emit_splat,
    emit_store,
    op,
    pointer_to,
    vector,
)

COLS = 2  # vectors of a tile, and of a panel of the packed weight
ZERO = 128  # the unsigned byte that stands for 0
_BYTES = ir.VectorType(ir.IntType(8), W)
_QUADS = ir.VectorType(ir.IntType(8), 4 * W)  # what the instruction multiplies
_OLD_LLVM = 22  # until then the intrinsic took its bytes as vectors of int32


def cpu_has_vnni() -> bool:
    """Whether this CPU multiplies bytes 64 at a time (AVX-512 VNNI)."""
    features = llvmlite.binding.get_host_cpu_features()
    return bool(features.get("avx512vnni", False) and features.get("avx512bw", False))


def _emit_dot4(builder: Any, sums: Any, unsigned: Any, signed: Any) -> Any:
    """sums + the products of 16 x 4 bytes; operands are <16 x i32>."""
    kind = IVEC if llvmlite.binding.llvm_version_info[0] < _OLD_LLVM else _QUADS
    args = [sums, builder.bitcast(unsigned, kind), builder.bitcast(signed, kind)]
    signature = ir.FunctionType(IVEC, [IVEC, kind, kind])
    return builder.call(
        cgutils.get_or_insert_function(builder.module, signature, "llvm.x86.avx512.vpdpbusd.512"), args
    )


def _emit_load_ints(builder: Any, address: Any) -> Any:
    return builder.load(pointer_to(builder, address, IVEC), align=4)


def product_tile(rows: int) -> Any:
    """Kernel ``f(a, a_stride, b, columns, columns_stride, scales, c, c_stride, k, ahead)``: c[rows, 32] of a[rows, k]
    (unsigned bytes) and a panel of the packed weight.

    b: [k / 4, 32, 4] signed bytes. columns: three rows, ``columns_stride`` bytes apart, of the columns' starting sums
    (int32), scales and biases. scales: of the rows of a. k is a multiple of 4; each cache line of b that is read asks
    for the one ``ahead`` bytes further. 2 rows + 3 registers: 12 rows fill most of AVX-512's 32.
    """

    @op(types.void, *[types.int64] * 10)
    def tile(
        builder: Any, a: Any, lda: Any, b: Any, columns: Any, columns_stride: Any, scales: Any, c: Any, ldc: Any,
        k: Any, ahead: Any,
    ) -> None:  # fmt: skip
        a_rows = [builder.add(a, builder.mul(lda, ir.Constant(I64, i))) for i in range(rows)]
        c_rows = [builder.add(c, builder.mul(ldc, ir.Constant(I64, i))) for i in range(rows)]
        sums = [[cgutils.alloca_once(builder, IVEC) for _ in range(COLS)] for _ in range(rows)]
        for j in range(COLS):
            start = _emit_load_ints(builder, add_bytes(builder, columns, 4 * W * j))
            for r in range(rows):
                builder.store(start, sums[r][j])
        with cgutils.for_range(builder, builder.lshr(k, ir.Constant(I64, 2)), intp=I64) as loop:
            b_row = builder.add(b, builder.mul(loop.index, ir.Constant(I64, 4 * W * COLS)))
            bs = [_emit_load_ints(builder, add_bytes(builder, b_row, 4 * W * j)) for j in range(COLS)]
            for j in range(COLS):
                emit_prefetch(builder, add_bytes(builder, builder.add(b_row, ahead), 4 * W * j))
            offset = builder.shl(loop.index, ir.Constant(I64, 2))
            for r in range(rows):
                quad = builder.load(pointer_to(builder, builder.add(a_rows[r], offset), I32), align=1)
                one = builder.insert_element(ir.Constant(IVEC, ir.Undefined), quad, ir.Constant(I32, 0))
                x = builder.shuffle_vector(one, ir.Constant(IVEC, ir.Undefined), ir.Constant(IVEC, [0] * W))
                for j in range(COLS):
                    builder.store(_emit_dot4(builder, builder.load(sums[r][j]), x, bs[j]), sums[r][j])
        scale_row, bias_row = builder.add(columns, columns_stride), builder.add(
            columns, builder.mul(columns_stride, ir.Constant(I64, 2))
        )
        for r in range(rows):
            scale = builder.load(pointer_to(builder, add_bytes(builder, scales, 4 * r), F32), align=4)
            for j in range(COLS):
                value = builder.fmul(builder.sitofp(builder.load(sums[r][j]), VEC), emit_splat(builder, scale))
                weight_scale = emit_load(builder, add_bytes(builder, scale_row, 4 * W * j))
                bias = emit_load(builder, add_bytes(builder, bias_row, 4 * W * j))
                value = emit_fma(builder, value, weight_scale, bias)
                emit_store(builder, add_bytes(builder, c_rows[r], 4 * W * j), value)

    return tile


@op(vector, vector)
def absolute(builder: Any, x: Any) -> Any:
    return emit_llvm(builder, "llvm.fabs.v16f32", VEC, x)


@op(types.void, types.int64, vector)
def store_bytes(builder: Any, address: Any, x: Any) -> None:
    """Sixteen floats of -127 to 127, rounded to the nearest integer (ties to even) plus 128, as 16 unsigned bytes."""
    whole = builder.fptosi(emit_llvm(builder, "llvm.rint.v16f32", VEC, x), IVEC)
    shifted = builder.add(whole, ir.Constant(IVEC, [ZERO] * W))
    builder.store(builder.trunc(shifted, _BYTES), pointer_to(builder, address, _BYTES), align=1)
