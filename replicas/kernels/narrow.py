"""Numbers of two bytes and less beside sixteen floats: bfloat16, int8, 8-bit floats (fp8 is e4m3, and e5m2), and 4-bit
floats (e2m1) with their scales (e8m0: a power of two in a byte).

Owns:      the bit tricks. An 8-bit float is a float's upper bits with another bias: shifted into place and multiplied
           by 2 ** 120 (e5m2: 2 ** 112) it is that float, its subnormal numbers too (Micikevicius et al. 2022,
           arXiv:2209.05433). A 4-bit float is looked up: twice its value is an integer.
Never:     chooses scales; callers multiply.
Invariant: narrowing rounds to nearest, ties to even; what was widened narrows to the same bits.
Thread:    any; inside kernels only. Memory is named by address (int64, bytes).
"""

import platform
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, types

from replicas.kernels.simd import (
    IVEC,
    VEC,
    W,
    emit_llvm,
    emit_prefetch,
    emit_store,
    int_const,
    op,
    pointer_to,
    splat_const,
    vector,
)
from replicas.kernels.weight_formats import E2M1_TWICE, E8M0_LEAST

BYTES = ir.VectorType(ir.IntType(8), W)
HALVES = ir.VectorType(ir.IntType(16), W)
INT8_MAX, FP8_MAX, E5M2_MAX = 127.0, 448.0, 57_344.0  # the largest magnitudes
_LOOK_UP = "llvm.x86.ssse3.pshuf.b.128" if platform.machine() in ("x86_64", "AMD64") else "llvm.aarch64.neon.tbl1.v16i8"


@op(types.void, types.int64)
def prefetch(builder: Any, address: Any) -> None:
    """Ask for the cache line at ``address``; never faults."""
    emit_prefetch(builder, address, far=True)


@op(vector, vector)
def absolute(builder: Any, v: Any) -> Any:
    return emit_llvm(builder, "llvm.fabs.v16f32", VEC, v)


@op(vector, types.int64)
def load_bf16(builder: Any, address: Any) -> Any:
    return emit_load_bf16(builder, address)


def _emit_halves(builder: Any, address: Any) -> Any:
    return builder.zext(builder.load(pointer_to(builder, address, HALVES), align=2), IVEC)


def emit_load_bf16(builder: Any, address: Any) -> Any:
    return builder.bitcast(builder.shl(_emit_halves(builder, address), int_const(16)), VEC)


@op(types.void, types.int64, vector)
def store_bf16(builder: Any, address: Any, value: Any) -> None:
    halves = builder.trunc(_rounded(builder, builder.bitcast(value, IVEC), 16), HALVES)
    builder.store(halves, pointer_to(builder, address, HALVES), align=2)


@op(vector, types.int64)
def load_int8(builder: Any, address: Any) -> Any:
    return builder.sitofp(builder.sext(emit_load_bytes(builder, address), IVEC), VEC)


@op(types.void, types.int64, vector)
def store_int8(builder: Any, address: Any, value: Any) -> None:
    """Store ``value``, which lies within -127 and 127."""
    rounded = emit_llvm(builder, "llvm.rint.v16f32", VEC, value)
    _store_bytes(builder, address, builder.trunc(builder.fptosi(rounded, IVEC), BYTES))


@op(vector, types.int64)
def load_fp8(builder: Any, address: Any) -> Any:
    return _load_float8(builder, address, mantissa=3)


@op(types.void, types.int64, vector)
def store_fp8(builder: Any, address: Any, value: Any) -> None:
    """Store ``value``, which lies within -448 and 448."""
    _store_float8(builder, address, value, mantissa=3)


@op(vector, types.int64)
def load_e5m2(builder: Any, address: Any) -> Any:
    return _load_float8(builder, address, mantissa=2)


@op(types.void, types.int64, vector)
def store_e5m2(builder: Any, address: Any, value: Any) -> None:
    """Store ``value``, which lies within -57,344 and 57,344."""
    _store_float8(builder, address, value, mantissa=2)


def _rebias(mantissa: int) -> float:
    """Return what a float is multiplied by whose bits are those of an 8-bit one of ``mantissa`` bits, shifted."""
    return float(2.0 ** (127 - (2 ** (6 - mantissa) - 1)))


def _load_float8(builder: Any, address: Any, *, mantissa: int) -> Any:
    bits = builder.zext(emit_load_bytes(builder, address), IVEC)
    sign = builder.shl(builder.and_(bits, int_const(0x80)), int_const(24))
    magnitude = builder.shl(builder.and_(bits, int_const(0x7F)), int_const(23 - mantissa))
    return builder.fmul(builder.bitcast(builder.or_(sign, magnitude), VEC), splat_const(_rebias(mantissa)))


def _store_float8(builder: Any, address: Any, value: Any, *, mantissa: int) -> None:
    bits = builder.bitcast(builder.fmul(value, splat_const(1.0 / _rebias(mantissa))), IVEC)
    magnitude = _rounded(builder, builder.and_(bits, int_const(0x7FFFFFFF)), 23 - mantissa)
    sign = builder.and_(builder.lshr(bits, int_const(24)), int_const(0x80))
    _store_bytes(builder, address, builder.trunc(builder.or_(sign, magnitude), BYTES))


def _rounded(builder: Any, bits: Any, dropped: int) -> Any:
    """Drop the lowest ``dropped`` of ``bits``, rounded to nearest, ties to even."""
    odd = builder.and_(builder.lshr(bits, int_const(dropped)), int_const(1))
    half = builder.add(odd, int_const((1 << (dropped - 1)) - 1))
    return builder.lshr(builder.add(bits, half), int_const(dropped))


def emit_load_bytes(builder: Any, address: Any) -> Any:
    return builder.load(pointer_to(builder, address, BYTES), align=1)


def emit_load_e8m0(builder: Any, address: Any) -> Any:
    """Load sixteen powers of two."""
    bits = builder.shl(builder.zext(emit_load_bytes(builder, address), IVEC), int_const(23))
    least = int_const(E8M0_LEAST)
    return builder.bitcast(builder.select(builder.icmp_signed(">", bits, least), bits, least), VEC)


def emit_e2m1_twice(builder: Any, indices: Any) -> Any:
    """Make sixteen floats of BYTES below 16: twice the 4-bit floats that they are."""
    table = ir.Constant(BYTES, E2M1_TWICE)
    kind = ir.FunctionType(BYTES, [BYTES, BYTES])
    found = builder.call(cgutils.get_or_insert_function(builder.module, kind, _LOOK_UP), [table, indices])
    return builder.sitofp(builder.sext(found, IVEC), VEC)


def _store_bytes(builder: Any, address: Any, value: Any) -> None:
    builder.store(value, pointer_to(builder, address, BYTES), align=1)


@op(types.void, types.int64, types.int64, types.int64)
def pair_up(builder: Any, first: Any, second: Any, dst: Any) -> None:
    """Write sixteen pairs of one bf16 number of each of two rows."""
    low, high = (_emit_halves(builder, at) for at in (first, second))
    emit_store(builder, dst, builder.bitcast(builder.or_(low, builder.shl(high, int_const(16))), VEC))


@op(types.void, types.int64, types.int64)
def pair_with_zeros(builder: Any, only: Any, dst: Any) -> None:
    emit_store(builder, dst, builder.bitcast(_emit_halves(builder, only), VEC))


@op(types.void, types.int64, types.int64)
def copy_sixteen(builder: Any, src: Any, dst: Any) -> None:
    """Copy sixteen bf16 numbers."""
    builder.store(builder.load(pointer_to(builder, src, HALVES), align=2), pointer_to(builder, dst, HALVES), align=2)
