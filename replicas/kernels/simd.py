"""Sixteen floats at a time, inside numba kernels: loads, stores, arithmetic, exp.

Owns:      the LLVM IR that numba does not emit by itself. The ``emit_`` functions build it; kernels call the operations
           below them; register_tiles.py builds larger pieces.
Never:     allocates, checks bounds, or knows what is computed; memory is named by address (int64, bytes).
Invariant: a result depends on operands and shapes alone, never on alignment or on what ran before.
Thread:    any; no state.

One vector is ``<16 x float>``: a register with AVX-512, two with AVX2 (LLVM splits it). numba caches a kernel by its
own file's time stamp: after a change here, delete ``__pycache__/*.nb*`` of the files that use it.
"""

import inspect
import platform
from collections.abc import Callable
from typing import Any

import llvmlite.binding  # type: ignore[import-untyped]
from llvmlite import ir
from numba.core import cgutils, config, types
from numba.core.codegen import get_host_cpu_features
from numba.core.datamodel import models, register_default
from numba.extending import intrinsic

from replicas.kernels.instructions import SETS

W = 16  # floats in a vector
F32 = ir.FloatType()
I32 = ir.IntType(32)
I64 = ir.IntType(64)
VEC = ir.VectorType(F32, W)
IVEC = ir.VectorType(I32, W)


def compiles_for(*features: str) -> bool:
    """Tell whether kernels may use these instructions (LLVM's names): this CPU has them, and numba compiles for them,
    which NUMBA_CPU_FEATURES and NUMBA_ENABLE_AVX may forbid (LLVM would end the process at a forbidden instruction)."""
    here = llvmlite.binding.get_host_cpu_features()
    compiled = config.CPU_FEATURES if config.CPU_FEATURES is not None else get_host_cpu_features()
    return all(here.get(name, False) and f"+{name}" in compiled.split(",") for name in features)


def compiled_for() -> str:
    """Describe the CPU and the instructions that kernels are compiled for, as numba's own cache tells them apart."""
    features = config.CPU_FEATURES if config.CPU_FEATURES is not None else get_host_cpu_features()
    return f"{config.CPU_NAME or llvmlite.binding.get_host_cpu_name()} {features}"


def instruction_set() -> str:
    """Name what kernels are compiled for in a word, and what of it products can use besides: "avx512 vnni bf16"."""
    for name, each in reversed(SETS.items()):
        if compiles_for(each.feature):
            return " ".join([name, *(more for more, feature in each.more.items() if compiles_for(feature))])
    return platform.machine()


class VectorType(types.Type):
    """The numba type of one vector; has no Python value, lives in registers."""

    def __init__(self) -> None:
        super().__init__(name="f32x16")


vector = VectorType()


@register_default(VectorType)
class _VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, VEC)


def op(returns: Any, *params: Any) -> Callable[[Callable[..., Any]], Any]:
    """Make an intrinsic of fixed types; ``emit(builder, *values) -> value`` emits its IR."""

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


def int_const(value: int) -> ir.Constant:
    return ir.Constant(IVEC, [value] * W)


def pointer_to(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def emit_llvm(builder: Any, name: str, returns: Any, *args: Any) -> Any:
    """Call an LLVM intrinsic, with the freedom to reorder and to drop NaN cases."""
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(returns, [a.type for a in args]), name)
    return builder.call(function, args, fastmath=("fast",))


def emit_load(builder: Any, address: Any) -> Any:
    return builder.load(pointer_to(builder, address, VEC), align=4)


def emit_store(builder: Any, address: Any, value: Any) -> None:
    builder.store(value, pointer_to(builder, address, VEC), align=4)


def emit_splat(builder: Any, scalar: Any) -> Any:
    one = builder.insert_element(ir.Constant(VEC, ir.Undefined), scalar, ir.Constant(I32, 0))
    return builder.shuffle_vector(one, ir.Constant(VEC, ir.Undefined), int_const(0))


def emit_fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return emit_llvm(builder, "llvm.fma.v16f32", VEC, a, b, c)


def emit_hsum(builder: Any, v: Any) -> Any:
    return emit_llvm(builder, "llvm.vector.reduce.fadd.v16f32", F32, ir.Constant(F32, -0.0), v)


# A Zen 4 has few misses of L1 under way at once, and more of L2. Elsewhere that was not measured; weights of
# 4 bits lose a twentieth by it
FAR = 2 if llvmlite.binding.get_host_cpu_name() == "znver4" else 3


def emit_prefetch(builder: Any, address: Any, *, far: bool = False) -> None:
    """Ask for the cache line at ``address``, in L2 if ``far`` and if that pays on this CPU; never faults."""
    byte = ir.IntType(8).as_pointer()
    args = [builder.inttoptr(address, byte), *(ir.Constant(I32, n) for n in (0, FAR if far else 3, 1))]
    kind = ir.FunctionType(ir.VoidType(), [byte, I32, I32, I32])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0"), args)


def add_bytes(builder: Any, address: Any, offset: int) -> Any:
    return builder.add(address, ir.Constant(I64, offset)) if offset else address


@op(vector, types.int64)
def load(builder: Any, address: Any) -> Any:
    return emit_load(builder, address)


@op(types.void, types.int64, vector)
def store(builder: Any, address: Any, value: Any) -> None:
    emit_store(builder, address, value)


@op(types.float32, types.int64)
def load1(builder: Any, address: Any) -> Any:
    return builder.load(pointer_to(builder, address, F32), align=4)


@op(types.void, types.int64, types.float32)
def store1(builder: Any, address: Any, value: Any) -> None:
    builder.store(value, pointer_to(builder, address, F32), align=4)


@op(vector, types.int64, types.int64, vector)
def load_where(builder: Any, address: Any, bits: Any, otherwise: Any) -> Any:
    """Load the floats whose bit is set among the low 16 of ``bits``; the others are those of ``otherwise``."""
    chosen = builder.bitcast(builder.trunc(bits, ir.IntType(W)), ir.VectorType(ir.IntType(1), W))
    return builder.select(chosen, emit_load(builder, address), otherwise)


@op(types.int64, types.int64)
def load_i32(builder: Any, address: Any) -> Any:
    return builder.sext(builder.load(pointer_to(builder, address, I32), align=4), I64)


@op(types.int64, types.int64)
def load_i64(builder: Any, address: Any) -> Any:
    return builder.load(pointer_to(builder, address, I64), align=8)


@op(vector, types.float32)
def splat(builder: Any, scalar: Any) -> Any:
    return emit_splat(builder, scalar)


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
    return emit_llvm(builder, "llvm.maxnum.v16f32", VEC, a, b)


@op(vector, vector, vector)
def at_least(builder: Any, x: Any, low: Any) -> Any:
    """Raise what is below ``low`` to it; NaN stays NaN."""
    return builder.select(builder.fcmp_unordered(">", x, low), x, low)


@op(vector, vector, vector)
def at_most(builder: Any, x: Any, high: Any) -> Any:
    """Lower what is above ``high`` to it; NaN stays NaN."""
    return builder.select(builder.fcmp_unordered("<", x, high), x, high)


@op(vector, vector, vector)
def evens(builder: Any, first: Any, second: Any) -> Any:
    """Return numbers 0, 2, .. of two vectors, one behind the other."""
    return builder.shuffle_vector(first, second, ir.Constant(IVEC, list(range(0, 2 * W, 2))))


@op(vector, vector, vector)
def odds(builder: Any, first: Any, second: Any) -> Any:
    """Return numbers 1, 3, .. of two vectors, one behind the other."""
    return builder.shuffle_vector(first, second, ir.Constant(IVEC, list(range(1, 2 * W, 2))))


@op(vector, vector, vector, vector)
def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Compute a * b + c, rounded once."""
    return emit_fma(builder, a, b, c)


@op(vector, vector)
def rint(builder: Any, x: Any) -> Any:
    """Round to the nearest integers, ties to even."""
    return emit_llvm(builder, "llvm.rint.v16f32", VEC, x)


@op(types.float32, vector)
def hsum(builder: Any, v: Any) -> Any:
    return emit_hsum(builder, v)


@op(types.float32, vector)
def hmax(builder: Any, v: Any) -> Any:
    return emit_llvm(builder, "llvm.vector.reduce.fmax.v16f32", F32, v)


@op(vector, vector)
def exp(builder: Any, x: Any) -> Any:
    """Compute e ** x to 2 ulp; below -87 it is a tiny positive number or 0, above 88 it saturates. Cephes' expf."""
    x = emit_llvm(builder, "llvm.maxnum.v16f32", VEC, x, splat_const(-87.3))
    x = emit_llvm(builder, "llvm.minnum.v16f32", VEC, x, splat_const(88.3))
    n = emit_llvm(builder, "llvm.rint.v16f32", VEC, builder.fmul(x, splat_const(1.4426950408889634)))
    r = emit_fma(builder, n, splat_const(-0.693359375), x)
    r = emit_fma(builder, n, splat_const(2.12194440e-4), r)
    p = splat_const(1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = emit_fma(builder, p, r, splat_const(c))
    p = builder.fadd(emit_fma(builder, p, builder.fmul(r, r), r), splat_const(1.0))
    exponent = builder.shl(builder.add(builder.fptosi(n, IVEC), int_const(127)), int_const(23))
    return builder.fmul(p, builder.bitcast(exponent, VEC))


@op(types.int64, types.int64)
def take_next(builder: Any, counter: Any) -> Any:
    """Atomically add 1 to the int64 at ``counter``; returns the old value: the next task of the calling thread."""
    return builder.atomic_rmw("add", pointer_to(builder, counter, I64), ir.Constant(I64, 1), "monotonic")


@op(types.void, types.int64, types.int64)
def call_kernel(builder: Any, function: Any, arguments: Any) -> None:
    """Call the kernel with its code at ``function`` and the address of its arguments."""
    byte = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte])
    builder.call(builder.inttoptr(function, kind.as_pointer()), [builder.inttoptr(arguments, byte)])


@op(types.void, types.int64, types.int64)
def store_i64(builder: Any, address: Any, value: Any) -> None:
    builder.store(value, pointer_to(builder, address, I64), align=8)
