"""The product of few rows by a panel of packed weights, as IR: one tile for every format and number of rows.

Owns:      how 32 numbers of a panel become floats in registers, by format; the tile that multiplies by them at once;
           and the one that writes them to memory, for many rows to share.
Never:     chooses tiles or blocks (linear.py does), or lays panels out (panels.py does).
Invariant: an element's sum runs in the order of k in one accumulator, whatever the rows, the columns and the format.
Thread:    any; no state. Addresses and strides are in bytes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, types

from replicas.kernels.narrow import BYTES, emit_e2m1_twice, emit_load_bf16, emit_load_bytes, emit_load_e8m0
from replicas.kernels.simd import (
    F32,
    I64,
    IVEC,
    VEC,
    W,
    add_bytes,
    compiles_for,
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

COLUMNS = 2 * W  # of a panel
_FOURS, _FIFTEENS = (ir.Constant(BYTES, [value] * W) for value in (4, 15))
Emit = Callable[..., list[Any]]


@dataclass(frozen=True, slots=True)
class PanelForm:
    """How a format's groups are read. A group begins with ``head`` bytes; each input has ``step`` bytes after it."""

    head: int
    step: int
    scales: Emit  # (builder, address of a group) -> what `numbers` needs of it
    numbers: Emit  # (builder, address of an input, scales) -> its two vectors


def _no_scales(builder: Any, at: Any) -> list[Any]:
    return []


def _scales(load: Callable[[Any, Any], Any], count: int, num_bytes: int = 2) -> Emit:
    """``num_bytes``: of a scale."""

    def emit(builder: Any, at: Any) -> list[Any]:
        return [load(builder, add_bytes(builder, at, num_bytes * W * i)) for i in range(count)]

    return emit


def _plain(load: Callable[[Any, Any], Any], vector_bytes: int) -> Emit:
    def emit(builder: Any, at: Any, scales: Sequence[Any]) -> list[Any]:
        return [load(builder, add_bytes(builder, at, vector_bytes * j)) for j in range(2)]

    return emit


def _half(builder: Any, at: Any) -> Any:
    halves = builder.load(pointer_to(builder, at, ir.VectorType(ir.HalfType(), W)), align=2)
    return builder.fpext(halves, VEC)


def _bytes(builder: Any, at: Any, scales: Sequence[Any]) -> list[Any]:
    wide = [builder.sext(emit_load_bytes(builder, add_bytes(builder, at, W * j)), IVEC) for j in range(2)]
    return [builder.fmul(builder.sitofp(x, VEC), scale) for x, scale in zip(wide, scales, strict=True)]


def _nibbles(builder: Any, at: Any, scales: Sequence[Any]) -> list[Any]:
    wide = builder.zext(emit_load_bytes(builder, at), IVEC)
    parts = builder.and_(wide, int_const(15)), builder.lshr(wide, int_const(4))
    # a number of 4 bits by a scale of 11 is exact: one rounding, as in the checkpoint that was widened
    return [emit_fma(builder, builder.sitofp(x, VEC), scales[j], scales[2 + j]) for j, x in enumerate(parts)]


def _half_e8m0(builder: Any, at: Any) -> Any:
    return builder.fmul(emit_load_e8m0(builder, at), splat_const(0.5))


def _floats4(builder: Any, at: Any, scales: Sequence[Any]) -> list[Any]:
    both = emit_load_bytes(builder, at)
    parts = builder.and_(both, _FIFTEENS), builder.lshr(both, _FOURS)
    # twice a number by half a power of two: exact
    return [builder.fmul(emit_e2m1_twice(builder, x), scale) for x, scale in zip(parts, scales, strict=True)]


FORMS = {
    "float32": PanelForm(0, 4 * COLUMNS, _no_scales, _plain(emit_load, 4 * W)),
    "bfloat16": PanelForm(0, 2 * COLUMNS, _no_scales, _plain(emit_load_bf16, 2 * W)),
    "float16": PanelForm(0, 2 * COLUMNS, _no_scales, _plain(_half, 2 * W)),
    "int8": PanelForm(2 * COLUMNS, COLUMNS, _scales(emit_load_bf16, 2), _bytes),
    "q8_0": PanelForm(2 * COLUMNS, COLUMNS, _scales(_half, 2), _bytes),
    "q4_1": PanelForm(4 * COLUMNS, W, _scales(_half, 4), _nibbles),
    "mxfp4": PanelForm(COLUMNS, W, _scales(_half_e8m0, 2, 1), _floats4),
}


def _for_inputs(
    builder: Any, form: PanelForm, panels: Sequence[Any], group: Any, k: Any, ahead: Any, each: Callable[..., None], *,
    far: bool,
) -> None:  # fmt: skip
    """Emit ``each(builder, index, vectors)`` for inputs [0, k) of groups that begin at each of ``panels``; of what is
    asked for ahead, ``far`` is as in `emit_prefetch`."""
    stride = builder.add(builder.mul(group, ir.Constant(I64, form.step)), ir.Constant(I64, form.head))
    num_groups = builder.sdiv(builder.sub(builder.add(k, group), ir.Constant(I64, 1)), group)
    with cgutils.for_range(builder, num_groups, intp=I64) as outer:
        first = builder.mul(group, outer.index)
        left = builder.sub(k, first)
        count = builder.select(builder.icmp_signed("<", left, group), left, group)
        starts = [builder.add(panel, builder.mul(stride, outer.index)) for panel in panels]
        scales = [form.scales(builder, start) for start in starts]
        for start in starts:
            _fetch(builder, start, ahead, form.head, far=far)
        with cgutils.for_range(builder, count, intp=I64) as inner:
            offset = add_bytes(builder, builder.mul(inner.index, ir.Constant(I64, form.step)), form.head)
            vectors = []
            for start, of_group in zip(starts, scales, strict=True):
                vectors += form.numbers(builder, builder.add(start, offset), of_group)
                _fetch(builder, builder.add(start, offset), ahead, form.step, far=far)
            each(builder, builder.add(first, inner.index), vectors)


def _fetch(builder: Any, at: Any, ahead: Any, num_bytes: int, *, far: bool) -> None:
    for line in range(0, num_bytes, 64):
        emit_prefetch(builder, add_bytes(builder, builder.add(at, ahead), line), far=far)


def chosen_tile(emit: Callable[..., None], most_rows: int, num_arguments: int) -> Any:
    """Kernel ``f(rows, ...)`` of ``num_arguments`` more addresses and sizes: what ``emit(builder, rows, ...)`` emits,
    for 1 <= rows <= ``most_rows``, chosen when it runs."""

    @op(types.void, *[types.int64] * (1 + num_arguments))
    def choose(builder: Any, rows: Any, *arguments: Any) -> None:
        done = builder.append_basic_block("tiles.done")
        choice = builder.switch(rows, done)
        for count in range(1, most_rows + 1):
            block = builder.append_basic_block(f"tile.{count}")
            choice.add_case(ir.Constant(I64, count), block)
            with builder.goto_block(block):
                emit(builder, count, *arguments)
                builder.branch(done)
        builder.position_at_end(done)

    return choose


def tiles(form: PanelForm, most_rows: int, cols: Sequence[int], panels: int = 1) -> Any:
    """Kernel ``f(rows, a, a_stride, b, panel_bytes, group, c, c_stride, k, keep, ahead)``: columns of c[rows, 32] =
    a[rows, k] @ b, added to c if ``keep`` is not 0, for 1 <= rows <= ``most_rows``.

    ``cols``: the halves (0, 1) of a panel's columns that are multiplied, of ``panels`` panels at once. b: the first
    one's groups of ``group`` inputs; a format without scales has one group. Each line that is read asks for the one
    ``ahead`` bytes behind it.
    """

    def emit(builder: Any, rows: Any, *arguments: Any) -> None:
        _emit_tile(builder, form, rows, cols, panels, *arguments)

    return chosen_tile(emit, most_rows, 10)


def _emit_tile(
    builder: Any, form: PanelForm, rows: int, cols: Sequence[int], panels: int, a: Any, lda: Any, b: Any,
    panel_bytes: Any, group: Any, c: Any, ldc: Any, k: Any, keep: Any, ahead: Any,
) -> None:  # fmt: skip
    a_rows = [builder.add(a, builder.mul(lda, ir.Constant(I64, r))) for r in range(rows)]
    c_rows = [builder.add(c, builder.mul(ldc, ir.Constant(I64, r))) for r in range(rows)]
    places = [2 * panel + half for panel in range(panels) for half in cols]
    sums = {(r, j): cgutils.alloca_once(builder, VEC) for r in range(rows) for j in places}
    targets = {(r, j): add_bytes(builder, c_rows[r], 4 * W * j) for r, j in sums}
    for place in sums.values():
        builder.store(splat_const(0.0), place)

    def multiply(builder: Any, index: Any, vectors: list[Any]) -> None:
        for r in range(rows):
            address = builder.add(a_rows[r], builder.shl(index, ir.Constant(I64, 2)))
            x = emit_splat(builder, builder.load(pointer_to(builder, address, F32), align=4))
            for j in places:
                builder.store(emit_fma(builder, x, vectors[j], builder.load(sums[r, j])), sums[r, j])

    starts = [builder.add(b, builder.mul(panel_bytes, ir.Constant(I64, i))) for i in range(panels)]
    # one row, and 8 floats at a time, wait for L1 (a Zen 4: one request of fp32 a third slower by L2, 8 by a twentieth)
    far = not form.head and rows > 1 and compiles_for("avx512f")
    _for_inputs(builder, form, starts, group, k, ahead, multiply, far=far)
    with builder.if_then(builder.icmp_signed("!=", keep, ir.Constant(I64, 0))):
        for at, place in sums.items():
            builder.store(builder.fadd(emit_load(builder, targets[at]), builder.load(place)), place)
    for at, place in sums.items():
        emit_store(builder, targets[at], builder.load(place))


def widening(form: PanelForm) -> Any:
    """Kernel ``f(b, group, k, out, ahead)``: inputs [0, k) of a panel as floats, out[k, 32]."""

    @op(types.void, *[types.int64] * 5)
    def widen(builder: Any, b: Any, group: Any, k: Any, out: Any, ahead: Any) -> None:
        def write(builder: Any, index: Any, vectors: list[Any]) -> None:
            at = builder.add(out, builder.mul(index, ir.Constant(I64, 4 * COLUMNS)))
            for j, numbers in enumerate(vectors):
                emit_store(builder, add_bytes(builder, at, 4 * W * j), numbers)

        _for_inputs(builder, form, [b], group, k, ahead, write, far=not form.head)

    return widen
