"""Pieces of int8 arithmetic that fit the registers, as IR: a product tile of VNNI instructions, and rounding to bytes.

Owns:      the IR, and whether this CPU can run it.
Never:     threads or blocks; int8.py does.
Invariant: sums are of integers, hence exact in any order: an element does not depend on the tile that made it.
Thread:    any; no state.

``vpdpbusd`` adds four products of an unsigned and a signed byte to each of 16 int32 sums, without saturating. The
weights are the unsigned ones: shifted by 128, which the sums' starting values take back.
"""

from typing import Any

import llvmlite.binding  # type: ignore[import-untyped]
from llvmlite import ir
from numba.core import cgutils, types

from replicas.kernels.narrow import BYTES, emit_load_bf16
from replicas.kernels.simd import (
    F32,
    I32,
    I64,
    IVEC,
    VEC,
    W,
    add_bytes,
    compiles_for,
    emit_fma,
    emit_llvm,
    emit_load,
    emit_prefetch,
    emit_splat,
    emit_store,
    int_const,
    op,
    pointer_to,
    splat_const,
    vector,
)

COLS = 2  # vectors of a tile, and of a panel of the packed weight
SCALE_BYTES = 2 * W * COLS  # of a group of a panel: bf16
STEP_BYTES = 4 * W * COLS  # of four weights of each column
ZERO = 128  # the unsigned byte of the packed weight that stands for 0
_QUADS = ir.VectorType(ir.IntType(8), 4 * W)  # what the instruction multiplies
_OLD_LLVM = 22  # until then the intrinsic took its bytes as vectors of int32


def cpu_has_vnni() -> bool:
    """Tell whether kernels may multiply bytes 64 at a time (AVX-512 VNNI)."""
    return compiles_for("avx512vnni", "avx512bw")


def _emit_dot4(builder: Any, sums: Any, unsigned: Any, signed: Any) -> Any:
    """Add the products of 16 x 4 bytes to sums; operands are <16 x i32>."""
    kind = IVEC if llvmlite.binding.llvm_version_info[0] < _OLD_LLVM else _QUADS
    args = [sums, builder.bitcast(unsigned, kind), builder.bitcast(signed, kind)]
    signature = ir.FunctionType(IVEC, [IVEC, kind, kind])
    return builder.call(
        cgutils.get_or_insert_function(builder.module, signature, "llvm.x86.avx512.vpdpbusd.512"), args
    )


def _emit_load_ints(builder: Any, address: Any) -> Any:
    return builder.load(pointer_to(builder, address, IVEC), align=4)


def product_tile(rows: int) -> Any:
    """Kernel ``f(a, a_stride, parts, parts_stride, b, bias, c, c_stride, groups, steps, ahead)``: c[rows, 32] of rows
    of signed bytes and a panel of the packed weight, in groups of 4 * steps bytes of a row.

    a: [rows, groups * 4 * steps] bytes. parts: [rows, groups, 2] of each group its starting sum (int32) and its scale
    (fp32). b: [groups] of 32 scales (bf16) and [steps, 32, 4] unsigned bytes. bias: [32]. Each cache line of b that is
    read asks for the one ``ahead`` bytes further. 4 rows + 3 registers: 6 rows fill most of AVX-512's 32.
    """

    @op(types.void, *[types.int64] * 11)
    def tile(
        builder: Any, a: Any, lda: Any, parts: Any, ldp: Any, b: Any, bias: Any, c: Any, ldc: Any, groups: Any,
        steps: Any, ahead: Any,
    ) -> None:  # fmt: skip
        a_rows, part_rows, c_rows = (_rows(builder, *at, rows) for at in ((a, lda), (parts, ldp), (c, ldc)))
        places = [(r, j) for r in range(rows) for j in range(COLS)]
        sums = {place: cgutils.alloca_once(builder, IVEC) for place in places}
        totals = {place: cgutils.alloca_once(builder, VEC) for place in places}
        for place in places:
            builder.store(splat_const(0.0), totals[place])
        group_bytes = add_bytes(builder, builder.mul(steps, ir.Constant(I64, STEP_BYTES)), SCALE_BYTES)
        with cgutils.for_range(builder, groups, intp=I64) as group:
            part = builder.shl(group.index, ir.Constant(I64, 3))
            b_scales = builder.add(b, builder.mul(group.index, group_bytes))
            b_steps = add_bytes(builder, b_scales, SCALE_BYTES)
            emit_prefetch(builder, builder.add(b_scales, ahead), far=True)
            for r, j in places:
                builder.store(_emit_splat_int(builder, builder.add(part_rows[r], part)), sums[r, j])
            first = builder.mul(group.index, steps)
            with cgutils.for_range(builder, steps, intp=I64) as loop:
                step = builder.add(first, loop.index)
                b_row = builder.add(b_steps, builder.mul(loop.index, ir.Constant(I64, STEP_BYTES)))
                offset = builder.shl(step, ir.Constant(I64, 2))
                bs = [_emit_load_ints(builder, add_bytes(builder, b_row, 4 * W * j)) for j in range(COLS)]
                for j in range(COLS):
                    emit_prefetch(builder, add_bytes(builder, builder.add(b_row, ahead), 4 * W * j), far=True)
                for r in range(rows):
                    x = _emit_splat_int(builder, builder.add(a_rows[r], offset))
                    for j in range(COLS):
                        builder.store(_emit_dot4(builder, builder.load(sums[r, j]), bs[j], x), sums[r, j])
            b_scale = [emit_load_bf16(builder, add_bytes(builder, b_scales, 2 * W * j)) for j in range(COLS)]
            for r, j in places:
                scale = emit_splat(builder, _emit_load_one(builder, builder.add(part_rows[r], part), 4))
                value = builder.fmul(builder.sitofp(builder.load(sums[r, j]), VEC), b_scale[j])
                builder.store(emit_fma(builder, value, scale, builder.load(totals[r, j])), totals[r, j])
        for r, j in places:
            value = builder.fadd(builder.load(totals[r, j]), emit_load(builder, add_bytes(builder, bias, 4 * W * j)))
            emit_store(builder, add_bytes(builder, c_rows[r], 4 * W * j), value)

    return tile


def _rows(builder: Any, start: Any, stride: Any, count: int) -> list[Any]:
    return [builder.add(start, builder.mul(stride, ir.Constant(I64, i))) for i in range(count)]


def _emit_load_one(builder: Any, address: Any, offset: int) -> Any:
    return builder.load(pointer_to(builder, add_bytes(builder, address, offset), F32), align=1)


def _emit_splat_int(builder: Any, address: Any) -> Any:
    """Load the int32 at ``address`` into all lanes."""
    scalar = builder.load(pointer_to(builder, address, I32), align=1)
    one = builder.insert_element(ir.Constant(IVEC, ir.Undefined), scalar, ir.Constant(I32, 0))
    return builder.shuffle_vector(one, ir.Constant(IVEC, ir.Undefined), int_const(0))


@op(types.int64, types.int64, vector)
def store_bytes(builder: Any, address: Any, x: Any) -> Any:
    """Store sixteen floats of -127 to 127 as bytes, rounded to the nearest (ties to even); returns their sum."""
    whole = builder.fptosi(emit_llvm(builder, "llvm.rint.v16f32", VEC, x), IVEC)
    builder.store(builder.trunc(whole, BYTES), pointer_to(builder, address, BYTES), align=1)
    add = ir.FunctionType(I32, [IVEC])
    total = cgutils.get_or_insert_function(builder.module, add, "llvm.vector.reduce.add.v16i32")
    return builder.sext(builder.call(total, [whole]), I64)


@op(types.void, types.int64, types.int64)
def store_i32(builder: Any, address: Any, value: Any) -> None:
    builder.store(builder.trunc(value, I32), pointer_to(builder, address, I32), align=4)
