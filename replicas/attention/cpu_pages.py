"""Where a token's K and V lie in the paged pool, and the two ways to touch them: store new tokens, copy a block out.

Owns:      address arithmetic: slot s of a layer's view is page s // page_size, offset s % page_size.
Never:     computes attention; hands out slots.
Invariant: the slots of one page belong to consecutive positions, so that a run inside a page is one stretch of memory.
Thread:    inside kernels, any.
"""

from typing import Any

from replicas.kernels.simd import W, load, load_i32, load_i64, store
from replicas.kernels.team import inlined

# One layer of the pool and of the batch, the part of the arguments that decode and extend share. Strides in bytes.
POOL_FIELDS = "keys values page_stride head_stride page_size num_kv_heads head_dim table table_stride rows "
BATCH_FIELDS = "q q_stride k k_stride v v_stride out out_stride group out_slots num_tokens "


@inlined
def copy_floats(src: int, dst: int, count: int) -> None:
    """``count`` floats, a multiple of 16."""
    for i in range(0, count, W):
        store(dst + 4 * i, load(src + 4 * i))


@inlined
def slot_offset(a: Any, slot: int) -> int:
    """Bytes from a head's first key (or value) of this layer to that of ``slot``."""
    page = slot // a.page_size
    return int(page * a.page_stride + (slot - page * a.page_size) * a.head_dim * 4)


@inlined
def token_offset(a: Any, row: int, position: int) -> int:
    """`slot_offset` of the token at ``position`` of table row ``row``."""
    return int(slot_offset(a, load_i32(a.table + row * a.table_stride + 4 * position)))


@inlined
def run_length(a: Any, position: int, end: int) -> int:
    """Tokens from ``position`` that lie one behind the other: to the end of the page, at most to ``end``."""
    return int(min(a.page_size - position % a.page_size, end - position))


@inlined
def store_new(a: Any, first: int, last: int) -> None:
    """Put k and v of the step's tokens [first, last) into their slots."""
    for t in range(first, last):
        place = slot_offset(a, load_i64(a.out_slots + 8 * t))
        for h in range(a.num_kv_heads):
            copy_floats(a.k + t * a.k_stride + h * a.head_dim * 4, a.keys + place + h * a.head_stride, a.head_dim)
            copy_floats(a.v + t * a.v_stride + h * a.head_dim * 4, a.values + place + h * a.head_stride, a.head_dim)


@inlined
def copy_block(a: Any, buffer: int, row: int, start: int, end: int, dst: int) -> None:
    """Positions [start, end) of a head into dst [end - start, D]; ``buffer``: the head's keys or values."""
    position = start
    while position < end:
        length = run_length(a, position, end)
        copy_floats(buffer + token_offset(a, row, position), dst, length * a.head_dim)
        dst += length * a.head_dim * 4
        position += length
