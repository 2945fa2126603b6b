"""The place of a token's K and V in the paged pool, and the two accesses to it: store new tokens, read a block.

Besides what decode and extend both do to scores: caps, and sinks.

Owns:      address arithmetic: slot s of a layer's view is page s // page_size, offset s % page_size; the meaning of a
           number in each kind of pool. The block of a head in a page is its values [page_size, D], and in pools of
           int8 or 8-bit floats one float32 a token behind them, by which its numbers are to be multiplied.
Never:     hands out slots.
Invariant: the slots of one page belong to consecutive positions, so a run inside a page is contiguous memory.
Thread:    inside kernels, any.
"""

from typing import Any

import numpy as np
import torch

from replicas.attention.cpu_pairs import copy_numbers
from replicas.kernels.narrow import (
    E5M2_MAX,
    FP8_MAX,
    INT8_MAX,
    absolute,
    load_bf16,
    load_e5m2,
    load_fp8,
    load_int8,
    prefetch,
    store_bf16,
    store_e5m2,
    store_fp8,
    store_int8,
)
from replicas.kernels.simd import (
    W,
    add,
    div,
    exp,
    hmax,
    hsum,
    load,
    load1,
    load_i32,
    load_i64,
    maximum,
    mul,
    splat,
    store,
    store1,
    sub,
)
from replicas.kernels.team import inlined

FLOAT32, BFLOAT16, INT8, FP8, E5M2 = range(5)  # what a pool's numbers are
KINDS = {
    torch.float32: FLOAT32,
    torch.bfloat16: BFLOAT16,
    torch.int8: INT8,
    torch.float8_e4m3fn: FP8,
    torch.float8_e5m2: E5M2,
}

# One layer of the pool and of the batch, the part of the arguments that decode and extend share. Strides in bytes;
# page_shift is log2 of the page size, or -1; pairs: 1 if bf16 numbers are multiplied as they are (cpu_pairs.py). Latent
# vectors (memory/latent_pool.py) are keys whose first value_dim
# numbers are the values: ``values`` is ``keys`` then, and V is not stored a second time.
POOL_FIELDS = (
    "keys values page_stride head_stride token_bytes scales_at kind pairs page_size page_shift num_kv_heads head_dim "
    "value_dim "
    "table table_stride rows "
)
BATCH_FIELDS = "q q_stride k k_stride v v_stride out out_stride group out_slots num_tokens sinks "
ONE: Any = np.float32(1.0)  # a scale
KIND_FLOATS = "scale soft_cap"  # of a layer's AttentionKind; without a cap 0, and without sinks their address is 0


@inlined
def page_of(a: Any, slot: int) -> int:
    """Find the page of ``slot``. A division costs as much as reading a token from L2: most page sizes need none."""
    return int(slot >> a.page_shift if a.page_shift >= 0 else slot // a.page_size)


@inlined
def slot_offset(a: Any, slot: int) -> int:
    """Count the bytes from a head's first key (or value) of this layer to the one in ``slot``."""
    page = page_of(a, slot)
    return int(page * a.page_stride + (slot - page * a.page_size) * a.token_bytes)


@inlined
def token_offset(a: Any, row: int, position: int) -> int:
    """Return the `slot_offset` of the token at ``position`` of table row ``row``."""
    return int(slot_offset(a, load_i32(a.table + row * a.table_stride + 4 * position)))


@inlined
def run_length(a: Any, position: int, end: int) -> int:
    """Count the contiguous tokens from ``position``: to the end of the page, at most to ``end``."""
    offset = position & (a.page_size - 1) if a.page_shift >= 0 else position % a.page_size
    return int(min(a.page_size - offset, end - position))


@inlined
def store_new(a: Any, first: int, last: int) -> None:
    """Put k and v of the step's tokens [first, last) into their slots."""
    for t in range(first, last):
        slot = load_i64(a.out_slots + 8 * t)
        page = page_of(a, slot)
        offset = slot - page * a.page_size
        for h in range(a.num_kv_heads):
            block = page * a.page_stride + h * a.head_stride
            store_vector(a, a.k + t * a.k_stride + h * a.head_dim * 4, a.keys + block, offset)
            if a.values != a.keys:
                store_vector(a, a.v + t * a.v_stride + h * a.head_dim * 4, a.values + block, offset)


@inlined
def store_vector(a: Any, src: int, block: int, offset: int) -> None:
    """Store src [D] float32 as token ``offset`` of the head's block."""
    dst = block + offset * a.token_bytes
    if a.kind == FLOAT32:
        for i in range(0, a.head_dim, W):
            store(dst + 4 * i, load(src + 4 * i))
    elif a.kind == BFLOAT16:
        for i in range(0, a.head_dim, W):
            store_bf16(dst + 2 * i, load(src + 4 * i))
    else:
        store_scaled(a, src, dst, block + a.scales_at + 4 * offset)


@inlined
def store_scaled(a: Any, src: int, dst: int, scale_at: int) -> None:
    """src [D] as bytes, its largest magnitude the largest that a byte has; and what to multiply them by: NaN, where
    src has NaN or infinities, which bytes cannot say."""
    top, zeros = splat(0.0), splat(0.0)
    for i in range(0, a.head_dim, W):
        value = load(src + 4 * i)
        top = maximum(top, absolute(value))
        zeros = add(zeros, sub(value, value))
    largest = INT8_MAX if a.kind == INT8 else FP8_MAX if a.kind == FP8 else E5M2_MAX
    peak = max(hmax(top), 1e-30)
    store1(scale_at, peak / largest + hsum(zeros))
    factor = splat(largest / peak)
    for i in range(0, a.head_dim, W):
        scaled = mul(load(src + 4 * i), factor)
        if a.kind == INT8:
            store_int8(dst + i, scaled)
        elif a.kind == FP8:
            store_fp8(dst + i, scaled)
        else:
            store_e5m2(dst + i, scaled)


@inlined
def number_bytes(a: Any) -> int:
    """Return the bytes of a number that products read: of a query, a block's key or value, a weight."""
    return 2 if a.pairs else 4


@inlined
def read_block(
    a: Any, buffer: int, row: int, start: int, end: int, dst: int, next_buffer: int, next_row: int, shift: int,
    last: int,
) -> None:
    """Read a head's positions [start, end) as float32 into dst [end - start, D], or as they are to be paired;
    ``buffer``: the head's keys or values.

    Meanwhile asks for what is read next: for each position that ``shift`` further of another buffer and row, which ends
    before ``last``.
    """
    position = start
    while position < end:
        length = run_length(a, position, end)
        slot = load_i32(a.table + row * a.table_stride + 4 * position)
        page = page_of(a, slot)
        offset, block = slot - page * a.page_size, buffer + page * a.page_stride
        src = block + offset * a.token_bytes
        ahead = next_buffer + token_offset(a, next_row, min(position + shift, last - 1)) - src
        read_run(a, src, block + a.scales_at + 4 * offset, length, dst, ahead)
        dst += length * number_bytes(a) * a.head_dim
        position += length


@inlined
def read_run(a: Any, src: int, scales: int, length: int, dst: int, ahead: int) -> None:
    """Read ``length`` contiguous tokens."""
    if a.kind == FLOAT32:
        for i in range(0, 4 * length * a.head_dim, 4 * W):
            prefetch(src + ahead + i)
            store(dst + i, load(src + i))
    elif a.pairs:
        copy_numbers(src, dst, 2 * length * a.head_dim, ahead)
    elif a.kind == BFLOAT16:
        for i in range(0, length * a.head_dim, W):
            prefetch(src + ahead + 2 * i)
            store(dst + 4 * i, load_bf16(src + 2 * i))
    else:
        for t in range(length):
            factor = splat(load1(scales + 4 * t))
            prefetch(src + ahead)
            for i in range(0, a.head_dim, W):
                if a.kind == INT8:
                    number = load_int8(src + i)
                elif a.kind == FP8:
                    number = load_fp8(src + i)
                else:
                    number = load_e5m2(src + i)
                store(dst + 4 * i, mul(number, factor))
            src += a.head_dim
            dst += 4 * a.head_dim


@inlined
def tokens_at(
    a: Any, buffer: int, row: int, position: int, count: int, dst: int, next_buffer: int, next_row: int, shift: int,
    last: int,
) -> tuple[int, int]:
    """Where ``count`` <= 16 tokens of a head in bf16 lie behind each other: in their page, if it holds sixteen from
    there on and reading whole lines stays in it, else in ``dst``; and how far behind them lies what is read next, as
    for `read_block`."""
    if a.head_dim % (2 * W) == 0 and run_length(a, position, position + W) == W:
        at = buffer + token_offset(a, row, position)
        return at, next_buffer + token_offset(a, next_row, min(position + shift, last - 1)) - at
    read_block(a, buffer, row, position, position + count, dst, next_buffer, next_row, shift, last)
    return dst, 0


@inlined
def cap_scores(scores: int, width: int, scale: float, cap: float) -> None:
    """Replace scores[width], width a multiple of W, by cap * tanh(scale * score / cap).

    tanh(x) from its continued fraction at x / 4, whose terms are all positive, doubled twice: 4e-7 of itself.
    """
    factor, limit, four, one = splat(scale / cap), splat(9.0), splat(0.25), splat(1.0)
    for i in range(0, width, W):
        x = maximum(mul(load(scores + 4 * i), factor), sub(splat(0.0), limit))
        x = mul(sub(splat(0.0), maximum(sub(splat(0.0), x), sub(splat(0.0), limit))), four)
        s = mul(x, x)
        top = add(mul(add(mul(add(s, splat(378.0)), s), splat(17325.0)), s), splat(135135.0))
        low = add(mul(add(mul(add(mul(s, splat(28.0)), splat(3150.0)), s), splat(62370.0)), s), splat(135135.0))
        t = div(mul(x, top), low)
        t = div(add(t, t), add(mul(t, t), one))
        t = div(add(t, t), add(mul(t, t), one))
        store(scores + 4 * i, mul(t, splat(cap)))


@inlined
def share_of(a: Any, head: int, peak: float, total: float) -> float:
    """Return what a head's weighted values, relative to ``peak``, are multiplied by: 1 / the sum of weights, among
    them the weight of the head's sink."""
    if a.sinks == 0:
        return 1.0 / total
    sink = load1(a.sinks + 4 * head)
    top = max(peak, sink)
    own, more = hsum(exp(splat(peak - top))) * (1.0 / W), hsum(exp(splat(sink - top))) * (1.0 / W)
    return float(own / (total * own + more))
