"""Extend attention: new tokens over a prefix, limited by arithmetic.

Method:    a task is (request, KV head, tile of queries); its rows are the tile's tokens times the group's query heads.
           Keys come in blocks of 64: copied out of their pages, transposed, multiplied with all rows, online softmax,
           multiplied with the values (FlashAttention-2, Dao 2023, on register tiles). A block is used by ~200 rows, so
           that copying it costs 1-3 %; all of a task's data lies in L2.
Invariant: key blocks begin at multiples of 64 of the request itself: a row's result depends neither on how the prompt
           is chunked, nor on the tile, nor on the batch.
Thread:    all of the team; tasks are taken one by one, those with the most keys first.
"""

from typing import Any

from numba import carray

from replicas.attention.cpu_pages import BATCH_FIELDS, POOL_FIELDS, read_block, store_new
from replicas.kernels.register_tiles import transpose16
from replicas.kernels.simd import (
    W,
    add,
    exp,
    hmax,
    hsum,
    load,
    load1,
    load_i32,
    maximum,
    mul,
    splat,
    store,
    store1,
    sub,
    take_next,
)
from replicas.kernels.team import barrier, inlined, kernel, struct, team_size, thread_id
from replicas.kernels.tiles import outer

BLOCK = 64  # keys; what one pass of the widest register tile covers
TASK_BYTES = 16  # (request, KV head, first token of the tile, tokens) as four int32

ExtendArgs = struct(
    "ExtendArgs",
    POOL_FIELDS + BATCH_FIELDS + "qo_indptr prefix_lens tasks num_tasks scratch scratch_stride tile_rows counter",
    floats="scale",
)


def scratch_floats(tile_rows: int, head_dim: int) -> int:
    """Count a thread's floats: queries, results, scores, maxima, sums of a tile; K, K transposed, V of a block."""
    return tile_rows * (2 * head_dim + BLOCK + 2) + 3 * BLOCK * head_dim + W


@inlined
def load_queries(a: Any, kv_head: int, first: int, tokens: int, target: int) -> None:
    """Write q * scale of the tile's tokens into target [tokens * group, D]; row t * group + g."""
    width = a.group * a.head_dim
    factor = splat(a.scale)
    for t in range(tokens):
        src = a.q + (first + t) * a.q_stride + kv_head * width * 4
        for i in range(0, width, W):
            store(target + 4 * (t * width + i), mul(load(src + 4 * i), factor))


@inlined
def store_results(a: Any, kv_head: int, first: int, tokens: int, acc: int, statistics: int) -> None:
    """Divide acc [rows, D] by the rows' sums into out [T, H * D]."""
    vector_bytes = a.head_dim * 4
    for t in range(tokens):
        for g in range(a.group):
            row = t * a.group + g
            share = splat(1.0 / load1(statistics + 8 * row + 4))
            target = a.out + (first + t) * a.out_stride + (kv_head * a.group + g) * vector_bytes
            for d in range(0, vector_bytes, 4 * W):
                store(target + d, mul(load(acc + row * vector_bytes + d), share))


@inlined
def load_block(
    a: Any, row: int, kv_head: int, start: int, end: int, last: int, keys: int, keys_t: int, values: int
) -> None:
    """Keys [start, end) of ``last`` of a head, transposed into keys_t [D, 64], and its values [64, D]; missing rows
    are zero."""
    offset = kv_head * a.head_stride
    key, value = a.keys + offset, a.values + offset
    read_block(a, key, row, start, end, keys, value, row, 0, last)
    read_block(a, value, row, start, end, values, key, row, BLOCK, last)
    for i in range((end - start) * a.head_dim, BLOCK * a.head_dim, W):
        store(keys + 4 * i, splat(0.0))
        store(values + 4 * i, splat(0.0))
    for j in range(0, BLOCK, W):
        for d in range(0, a.head_dim, W):
            transpose16(keys + 4 * (j * a.head_dim + d), a.head_dim * 4, keys_t + 4 * (d * BLOCK + j), BLOCK * 4)


@inlined
def online_softmax(scores: int, visible: int, acc: int, head_dim: int, statistic: int) -> None:
    """Turn a row of scores [64], the first ``visible`` of which count, into weights; scales acc to the new maximum."""
    for j in range(max(visible, 0), BLOCK):
        store1(scores + 4 * j, -1e30)
    top = load(scores)
    for j in range(W, BLOCK, W):
        top = maximum(top, load(scores + 4 * j))
    old = load1(statistic)
    peak = max(old, hmax(top))
    shift, total = splat(peak), splat(0.0)
    for j in range(0, BLOCK, W):
        weight = exp(sub(load(scores + 4 * j), shift))
        total = add(total, weight)
        store(scores + 4 * j, weight)
    new_sum = load1(statistic + 4)
    if peak > old:
        decay = exp(splat(old - peak))
        for d in range(0, head_dim * 4, 4 * W):
            store(acc + d, mul(load(acc + d), decay))
        new_sum *= hsum(decay) * (1.0 / W)
    store1(statistic, peak)
    store1(statistic + 4, new_sum + hsum(total))


@inlined
def attend_tile(a: Any, request: int, kv_head: int, first: int, tokens: int, scratch: int) -> None:
    """Attend to all keys that the tile's tokens see; ``first`` counts from the request's first new token."""
    rows, head_dim = tokens * a.group, a.head_dim
    vector_bytes = head_dim * 4
    queries, acc = scratch, scratch + a.tile_rows * vector_bytes
    scores = acc + a.tile_rows * vector_bytes
    statistics = scores + a.tile_rows * BLOCK * 4
    keys = statistics + a.tile_rows * 8
    keys_t, values = keys + BLOCK * vector_bytes, keys + 2 * BLOCK * vector_bytes
    token = load_i32(a.qo_indptr + 4 * request) + first
    table_row = load_i32(a.rows + 4 * request)
    position = load_i32(a.prefix_lens + 4 * request) + first
    load_queries(a, kv_head, token, tokens, queries)
    for row in range(rows):
        store1(statistics + 8 * row, -1e30)
        store1(statistics + 8 * row + 4, 0.0)
        for d in range(0, vector_bytes, 4 * W):
            store(acc + row * vector_bytes + d, splat(0.0))
    for start in range(0, position + tokens, BLOCK):
        end = min(start + BLOCK, position + tokens)
        load_block(a, table_row, kv_head, start, end, position + tokens, keys, keys_t, values)
        outer(rows, BLOCK, head_dim, queries, vector_bytes, keys_t, BLOCK * 4, scores, BLOCK * 4, 0)
        for row in range(rows):
            visible = position + row // a.group + 1 - start
            online_softmax(scores + row * BLOCK * 4, visible, acc + row * vector_bytes, head_dim, statistics + 8 * row)
        outer(rows, head_dim, end - start, scores, BLOCK * 4, values, vector_bytes, acc, vector_bytes, 1)
    store_results(a, kv_head, token, tokens, acc, statistics)


@kernel(ExtendArgs)
def extend(pointer: Any) -> None:
    """Store the new tokens; then attend, tile by tile."""
    a = carray(pointer, 1)[0]
    me, threads = thread_id(), team_size()
    store_new(a, a.num_tokens * me // threads, a.num_tokens * (me + 1) // threads)
    barrier()
    scratch = a.scratch + me * a.scratch_stride
    task = take_next(a.counter)
    while task < a.num_tasks:
        at = a.tasks + TASK_BYTES * task
        attend_tile(a, load_i32(at), load_i32(at + 4), load_i32(at + 8), load_i32(at + 12), scratch)
        task = take_next(a.counter)
