"""Extend attention: new tokens over a prefix, limited by arithmetic.

Method:    a task is (KV head, tile of queries); its rows are the tile's tokens times the group's query heads. A tile is
           of one request, or holds pieces of several that begin with the same tokens: all its rows attend to those in
           common, then each piece to its own (cascade attention, Ye et al. 2024, in prefill).
           Keys come in blocks of 64: copied out of their pages, transposed, multiplied with all rows, online softmax,
           multiplied with the values (FlashAttention-2, Dao 2023, on register tiles). A block is used by ~200 rows, so
           that copying it costs 1-3 %; all of a task's data lies in L2. Of a block on the diagonal, 16 tokens at a time
           are multiplied with the keys that the last of them sees.
Invariant: key blocks begin at multiples of 64 of the request itself: a row's result depends neither on how the prompt
           is chunked, nor on the tile, nor on the batch, nor on whether its prefix is read with others. Keys that no
           token of a tile sees (a window, a chunk of positions) are not read; tiles of such layers have one request.
Thread:    all of the team; tasks are taken one by one, those with the most keys first.
"""

from typing import Any

from numba import carray

from replicas.attention import cpu_pairs
from replicas.attention.cpu_pages import (
    BATCH_FIELDS,
    KIND_FLOATS,
    ONE,
    POOL_FIELDS,
    cap_scores,
    number_bytes,
    read_block,
    share_of,
    store_new,
)
from replicas.attention.cpu_pairs import multiply_pairs, pair_keys, pair_values, round_floats, round_to
from replicas.kernels.register_tiles import transpose16
from replicas.kernels.simd import (
    W,
    add,
    exp,
    fma,
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
    take_next,
)
from replicas.kernels.team import barrier, inlined, kernel, struct, team_size, thread_id
from replicas.kernels.tiles import outer

BLOCK = cpu_pairs.BLOCK  # keys; what one pass of the widest register tile covers
DIAGONAL_TOKENS = 16  # rows taken together where they see different keys of a block
TASK_BYTES = 16  # (first piece, pieces, KV head, blocks that the pieces have in common) as four int32
PIECE_BYTES = 16  # (request, first of its new tokens, tokens, 0) as four int32

ExtendArgs = struct(
    "ExtendArgs",
    POOL_FIELDS
    + BATCH_FIELDS
    + "qo_indptr prefix_lens tasks num_tasks pieces scratch scratch_stride tile_rows counter window chunk",
    floats=KIND_FLOATS,
)


@inlined
def first_seen(a: Any, position: int) -> int:
    """Return the first position that the token at ``position`` sees; ``window`` and ``chunk`` are 0 without one."""
    first = max(position - a.window + 1, 0) if a.window > 0 else 0
    return int(max(first, position - position % a.chunk) if a.chunk > 0 else first)


@inlined
def load_queries(a: Any, kv_head: int, first: int, tokens: int, target: int) -> None:
    """Write q * scale of the tile's tokens into target [tokens * group, D]; row t * group + g. For pairs, q rounded."""
    width = a.group * a.head_dim
    factor = splat(a.scale)
    for t in range(tokens):
        src = a.q + (first + t) * a.q_stride + kv_head * width * 4
        if a.pairs:
            round_floats(src, target + 2 * t * width, width)
            continue
        for i in range(0, width, W):
            store(target + 4 * (t * width + i), mul(load(src + 4 * i), factor))


@inlined
def store_results(a: Any, kv_head: int, first: int, tokens: int, acc: int, statistics: int) -> None:
    """Divide acc [rows, value_dim] by the rows' sums into out [T, H * value_dim]."""
    vector_bytes = a.value_dim * 4
    for t in range(tokens):
        for g in range(a.group):
            row = t * a.group + g
            head = kv_head * a.group + g
            share = splat(share_of(a, head, load1(statistics + 8 * row), load1(statistics + 8 * row + 4)))
            target = a.out + (first + t) * a.out_stride + head * vector_bytes
            for d in range(0, vector_bytes, 4 * W):
                store(target + d, mul(load(acc + row * vector_bytes + d), share))


@inlined
def load_block(
    a: Any, row: int, kv_head: int, start: int, seen: int, end: int, last: int, keys: int, keys_t: int, values: int
) -> None:
    """Keys [seen, end) of ``last`` of a head in the block from ``start`` on, transposed into keys_t [D, 64], and its
    values [64, D]; missing rows are zero. ``values`` is ``keys`` where a latent vector is both."""
    offset = kv_head * a.head_stride
    key, value = a.keys + offset, a.values + offset
    if a.pairs:
        load_pairs(a, row, key, value, start, seen, end, last, keys, keys_t, values)
        return
    missing = (seen - start) * a.head_dim
    for i in range(0, missing, W):
        store(keys + 4 * i, splat(0.0))
        store(values + 4 * i, splat(0.0))
    read_block(a, key, row, seen, end, keys + 4 * missing, value, row, 0, last)
    if values != keys:
        read_block(a, value, row, seen, end, values + 4 * missing, key, row, BLOCK, last)
    for i in range((end - start) * a.head_dim, BLOCK * a.head_dim, W):
        store(keys + 4 * i, splat(0.0))
        store(values + 4 * i, splat(0.0))
    for j in range(0, BLOCK, W):
        for d in range(0, a.head_dim, W):
            transpose16(keys + 4 * (j * a.head_dim + d), a.head_dim * 4, keys_t + 4 * (d * BLOCK + j), BLOCK * 4)


@inlined
def places_of(a: Any, keys: int) -> tuple[int, int]:
    """Return where a block's keys, transposed, and its values lie, behind its keys. A latent vector is both, unless it
    is paired, which is done one way for keys, and another for values."""
    keys_t = keys + BLOCK * a.head_dim * 4
    return keys_t, keys if a.values == a.keys and not a.pairs else keys_t + BLOCK * a.head_dim * 4


@inlined
def load_pairs(
    a: Any, row: int, key: int, value: int, start: int, seen: int, end: int, last: int, block: int, keys: int,
    values: int,
) -> None:
    """What `load_block` loads, in pairs; missing rows are zero."""
    row_bytes = 2 * a.head_dim
    missing, rest = (seen - start) * row_bytes, block + (end - start) * row_bytes
    for i in range(0, missing, 2 * W):
        round_to(block + i, splat(0.0))
    for i in range(0, (start + BLOCK - end) * row_bytes, 2 * W):
        round_to(rest + i, splat(0.0))
    read_block(a, key, row, seen, end, block + missing, value, row, 0, last)
    for i in range(0, BLOCK, W):
        pair_keys(block + i * row_bytes, a.head_dim, keys + 4 * i, 0)
    if value != key:
        read_block(a, value, row, seen, end, block + missing, key, row, BLOCK, last)
    pair_values(block, BLOCK, a.head_dim, a.value_dim, values, 0)


@inlined
def online_softmax(
    a: Any, scores: int, unseen: int, visible: int, width: int, factor: float, acc: int, statistic: int
) -> None:
    """Turn a row of scores, of which [unseen, visible) count, times ``factor`` into weights; scale acc to the new
    maximum.

    A row that sees none of them may have seen nothing yet, and has no maximum: its weights are 0.
    """
    if unseen >= max(visible, 1):
        for j in range(0, width, W):
            store(scores + 4 * j, splat(0.0))
        return
    for j in range(unseen):
        store1(scores + 4 * j, -1e30)
    for j in range(max(visible, 0), width):
        store1(scores + 4 * j, -1e30)
    top = load(scores)
    for j in range(W, width, W):
        top = maximum(top, load(scores + 4 * j))
    old = load1(statistic)
    peak = max(old, hmax(top) * factor)
    each, shift, total = splat(factor), splat(-peak), splat(0.0)
    for j in range(0, width, W):
        weight = exp(fma(load(scores + 4 * j), each, shift))
        total = add(total, weight)
        if a.pairs:
            round_to(scores + 2 * j, weight)
        else:
            store(scores + 4 * j, weight)
    new_sum = load1(statistic + 4)
    if peak > old:
        decay = exp(splat(old - peak))
        for d in range(0, a.value_dim * 4, 4 * W):
            store(acc + d, mul(load(acc + d), decay))
        new_sum *= hsum(decay) * (1.0 / W)
    store1(statistic, peak)
    store1(statistic + 4, new_sum + hsum(total))


@inlined
def attend_block(a: Any, scratch: int, first: int, rows: int, start: int, end: int, position: int) -> None:
    """Rows [first, first + rows) of the tile over the loaded keys [start, end); the first row is of the token at
    ``position``."""
    vector_bytes, value_bytes, query_bytes = a.head_dim * 4, a.value_dim * 4, a.head_dim * number_bytes(a)
    acc = scratch + a.tile_rows * vector_bytes
    scores = acc + a.tile_rows * value_bytes
    statistics = scores + a.tile_rows * BLOCK * 4
    keys = statistics + a.tile_rows * 8
    keys_t, values = places_of(a, keys)
    whole = position + 1 >= end and first_seen(a, position + (rows - 1) // a.group) <= start
    part = rows if whole else DIAGONAL_TOKENS * a.group
    for low in range(first, first + rows, part):
        count = min(part, first + rows - low)
        seen = min(position + 1 + (low + count - 1 - first) // a.group, end) - start  # by the last of them
        if seen > 0:
            width = (seen + W - 1) // W * W
            at, result = scores + low * BLOCK * 4, acc + low * value_bytes
            queries = scratch + low * query_bytes
            if a.pairs:
                multiply_pairs(count, width, a.head_dim // 2, queries, query_bytes, keys_t, BLOCK * 4, at, BLOCK * 4, 0)
            else:
                outer(count, width, a.head_dim, queries, query_bytes, keys_t, BLOCK * 4, at, BLOCK * 4, 0)
            for row in range(low, low + count):
                token, weights = position + (row - first) // a.group, scores + row * BLOCK * 4
                visible, unseen = min(token + 1 - start, seen), max(first_seen(a, token) - start, 0)
                factor = a.scale if a.pairs else ONE
                if a.soft_cap > 0.0:
                    cap_scores(weights, width, factor, a.soft_cap)
                    factor = ONE
                online_softmax(
                    a, weights, unseen, visible, width, factor, acc + row * value_bytes, statistics + 8 * row
                )
            if a.pairs:
                multiply_pairs(
                    count, a.value_dim, (seen + 1) // 2, at, BLOCK * 4, values, value_bytes, result, value_bytes, 1
                )
            else:
                outer(count, a.value_dim, seen, at, BLOCK * 4, values, vector_bytes, result, value_bytes, 1)


@inlined
def attend_tile(a: Any, first: int, num_pieces: int, kv_head: int, shared: int, scratch: int) -> None:
    """Attend to all keys that the tokens of pieces [first, first + num_pieces) see; the first ``shared`` blocks are the
    same for all of them."""
    vector_bytes, value_bytes = a.head_dim * 4, a.value_dim * 4
    acc = scratch + a.tile_rows * vector_bytes
    statistics = acc + a.tile_rows * (value_bytes + BLOCK * 4)
    keys = statistics + a.tile_rows * 8
    keys_t, values = places_of(a, keys)
    total = 0
    for i in range(first, first + num_pieces):
        piece = a.pieces + PIECE_BYTES * i
        tokens = load_i32(piece + 8)
        token = load_i32(a.qo_indptr + 4 * load_i32(piece)) + load_i32(piece + 4)
        load_queries(a, kv_head, token, tokens, scratch + total * a.head_dim * number_bytes(a))
        total += tokens * a.group
    for row in range(total):
        store1(statistics + 8 * row, -1e30)
        store1(statistics + 8 * row + 4, 0.0)
        for d in range(0, value_bytes, 4 * W):
            store(acc + row * value_bytes + d, splat(0.0))
    done = shared * BLOCK
    table_row = load_i32(a.rows + 4 * load_i32(a.pieces + PIECE_BYTES * first))
    for start in range(0, done, BLOCK):
        load_block(a, table_row, kv_head, start, start, start + BLOCK, done, keys, keys_t, values)
        attend_block(a, scratch, 0, total, start, start + BLOCK, done)
    row = 0
    for i in range(first, first + num_pieces):
        piece = a.pieces + PIECE_BYTES * i
        request, offset, tokens = load_i32(piece), load_i32(piece + 4), load_i32(piece + 8)
        table_row = load_i32(a.rows + 4 * request)
        position = load_i32(a.prefix_lens + 4 * request) + offset
        last, seen = position + tokens, first_seen(a, position)
        for start in range(max(done, seen // BLOCK * BLOCK), last, BLOCK):
            end = min(start + BLOCK, last)
            load_block(a, table_row, kv_head, start, max(seen, start), end, last, keys, keys_t, values)
            attend_block(a, scratch, row, tokens * a.group, start, end, position)
        token = load_i32(a.qo_indptr + 4 * request) + offset
        store_results(a, kv_head, token, tokens, acc + row * value_bytes, statistics + 8 * row)
        row += tokens * a.group


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
