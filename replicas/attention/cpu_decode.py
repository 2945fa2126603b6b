"""Decode attention: one new token per request, limited by the speed of reading K and V.

Method:    each request's tokens are cut into chunks of 128 (flash decoding, Dao et al. 2023: the softmax of each chunk
           by itself, chunks merged by their maxima). A task is a chunk, or one KV head of it, for one request, or for
           several that share its tokens: K and V are then read once, for all query heads of the group and all those
           requests (cascade attention, Ye et al. 2024).
Invariant: chunks begin at multiples of 128 of the request itself and merge in order, and a product of many rows adds up
           like one of few: a request's result is the same bit for bit whatever else is in the batch, whether its
           chunks are read for it alone or for many, and however many threads there are. Tokens before the first that
           it sees (a window, a chunk of positions) are not read; its first chunk is then a part of one.
Thread:    all of the team; tasks are taken one by one, so that ragged batches and busy cores balance.
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
    run_length,
    share_of,
    store_new,
    token_offset,
    tokens_at,
)
from replicas.attention.cpu_pairs import multiply_pairs, pair_keys, pair_values, pairs_at, round_floats, round_to
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
from replicas.kernels.tiles import dot, outer_fetch

CHUNK = 128  # tokens; a multiple of BLOCK. Scores of a chunk stay in L1
BLOCK = 16  # tokens that are copied at a time where K and V are not read in place; in pairs cpu_pairs.BLOCK
PAIRS = cpu_pairs.BLOCK
TASK_BYTES = 16  # (first member, members, chunk, tokens left out of it) as four int32; a member is a request

DecodeArgs = struct(
    "DecodeArgs",
    POOL_FIELDS
    + BATCH_FIELDS
    + "seq_lens in_place block_bytes members tasks num_tasks part_heads first_partial chunk_zero partial scratch "
    + "scratch_stride counter merge_counter",
    floats=KIND_FLOATS,
)


def block_bytes(head_dim: int, *, pairs: bool) -> int:
    """Count the bytes of a block of K or V, which the scratch of a thread begins with."""
    return cpu_pairs.block_bytes(head_dim) if pairs else 4 * BLOCK * head_dim


@inlined
def attend_chunk(
    a: Any, row: int, kv_head: int, heads: int, start: int, end: int, following: int, next_head: int, queries: int,
    rows: int, work: int, result: int, statistics: int,
) -> None:
    """Positions [start, end) of ``heads`` KV heads from ``kv_head`` on: weighted values of queries [heads, rows, D] (in
    bf16 for pairs) into ``result`` [heads, rows, value_dim], maxima and sums of exp(score - maximum) into
    ``statistics`` [heads, rows, 2].
    Block by block, all heads of each: in a page they lie one behind the other.

    Reading in place fetches the next block, where the hardware would not look: after the last keys the first values,
    after the last values the first keys of task ``following``. Where blocks are copied or paired, reading keys fetches
    the values of the same tokens, and reading values the keys of that task.
    """
    vector_bytes, value_bytes = a.head_dim * number_bytes(a), a.value_dim * 4
    head_bytes, score_bytes = rows * vector_bytes, rows * CHUNK * 4
    keys, values = a.keys + kv_head * a.head_stride, a.values + kv_head * a.head_stride
    block, scores = work, work + a.block_bytes
    position = start
    while position < end:
        length = block_length(a, position, end)
        for h in range(heads):
            key, value = keys + h * a.head_stride, values + h * a.head_stride
            target = scores + h * score_bytes + 4 * (position - start)
            query = queries + h * head_bytes
            if a.pairs:
                score_pairs(a, key, value, row, position, length, end, block, rows, query, target)
            else:
                at, distance = fetch(a, key, row, start, position, length, end, block, value, row, 0, end)
                dot(rows, length, a.head_dim, query, vector_bytes, at, vector_bytes, target, CHUNK * 4, distance)
        position += length
    for i in range(heads * rows):
        scale = a.scale
        if a.soft_cap > 0.0:
            cap_scores(scores + i * CHUNK * 4, (end - start + W - 1) // W * W, scale, a.soft_cap)
            scale = ONE
        softmax_row(scores + i * CHUNK * 4, end - start, scale, a.pairs, statistics + 8 * i)
    next_keys = a.keys + next_head * a.head_stride
    next_row, next_start, next_end = place_of(a, following)
    shift = next_start - start
    position = start
    while position < end:
        length = block_length(a, position, end)
        for h in range(heads):
            value, next_key = values + h * a.head_stride, next_keys + h * a.head_stride
            weights = scores + h * score_bytes + number_bytes(a) * (position - start)
            target, keep = result + h * rows * value_bytes, 0 if position == start else 1
            if a.pairs:
                add_pairs(
                    a, value, next_key, row, position, length, block, next_row, shift, next_end, rows, weights, target,
                    keep,
                )  # fmt: skip
            else:
                at, distance = fetch(
                    a, value, row, start, position, length, end, block, next_key, next_row, shift, next_end
                )
                outer_fetch(
                    rows, a.value_dim, length, weights, CHUNK * 4, at, vector_bytes, target, value_bytes, keep, distance
                )
        position += length


@inlined
def score_pairs(
    a: Any, key: int, value: int, row: int, position: int, length: int, end: int, block: int, rows: int, query: int,
    target: int,
) -> None:
    """Scores of ``length`` tokens of a head, at most `PAIRS`, by queries [rows, D] in bf16."""
    pairs = pairs_at(block, a.head_dim)
    for i in range(0, length, W):
        at, ahead = tokens_at(a, key, row, position + i, min(W, length - i), block, value, row, 0, end)
        pair_keys(at, a.head_dim, pairs + 4 * i, ahead)
    width, query_bytes = (length + W - 1) // W * W, 2 * a.head_dim
    multiply_pairs(rows, width, a.head_dim // 2, query, query_bytes, pairs, PAIRS * 4, target, CHUNK * 4, 0)


@inlined
def add_pairs(
    a: Any, value: int, next_key: int, row: int, position: int, length: int, block: int, next_row: int, shift: int,
    last: int, rows: int, weights: int, target: int, keep: int,
) -> None:
    """Values of ``length`` tokens of a head, at most `PAIRS`, by weights in bf16, into ``target`` [rows, value_dim]."""
    pairs, pair_bytes = pairs_at(block, a.head_dim), 4 * a.value_dim
    for i in range(0, length, W):
        count = min(W, length - i)
        at, ahead = tokens_at(a, value, row, position + i, count, block, next_key, next_row, shift, last)
        pair_values(at, count, a.head_dim, a.value_dim, pairs + i // 2 * pair_bytes, ahead)
    multiply_pairs(
        rows, a.value_dim, (length + 1) // 2, weights, CHUNK * 4, pairs, pair_bytes, target, pair_bytes, keep
    )


@inlined
def place_of(a: Any, task: int) -> tuple[int, int, int]:
    """Return the row, the first position and the end of a task's chunk."""
    at = a.tasks + task * TASK_BYTES
    request, start = load_i32(a.members + 4 * load_i32(at)), load_i32(at + 8) * CHUNK
    end = min(start + CHUNK, load_i32(a.seq_lens + 4 * request))
    return load_i32(a.rows + 4 * request), start + load_i32(at + 12), end


@inlined
def block_length(a: Any, position: int, end: int) -> int:
    """Count the tokens of one round: a run inside a page, or a block."""
    return run_length(a, position, end) if a.in_place else min(PAIRS if a.pairs else BLOCK, end - position)


@inlined
def fetch(
    a: Any, buffer: int, row: int, start: int, position: int, length: int, end: int, block: int, next_buffer: int,
    next_row: int, shift: int, last: int,
) -> tuple[int, int]:
    """Where ``length`` tokens of a head can be read as float32, and how far behind them lies what is to be fetched
    meanwhile; the rest is as for `read_block`, which does so itself."""
    if a.in_place:
        at = buffer + token_offset(a, row, position)
        if position + length < end:
            return at, buffer + token_offset(a, row, position + length) - at
        return at, next_buffer + token_offset(a, next_row, start + shift) - at
    read_block(a, buffer, row, position, position + length, block, next_buffer, next_row, shift, last)
    return block, 0


@inlined
def attend(
    a: Any, first: int, members: int, kv_head: int, heads: int, chunk: int, skip: int, following: int, next_head: int,
    work: int,
) -> None:
    """A chunk of request members[first], but for ``skip`` tokens, which the ``members`` requests from there on have in
    common; ``heads`` is 1 where they are several.

    One request's results are made where they belong, and its queries used where they are, unless they are rounded;
    those of several are brought together for it.
    """
    group_floats, result_bytes = a.group * a.head_dim, a.group * a.value_dim * 4
    request, rows = load_i32(a.members + 4 * first), members * a.group
    end = min(chunk * CHUNK + CHUNK, load_i32(a.seq_lens + 4 * request))
    start = chunk * CHUNK + skip
    queries = work + a.block_bytes + heads * rows * CHUNK * 4
    if members == 1:
        partial = partial_of(a, request, chunk)
        result, statistics = partial + kv_head * result_bytes, statistics_of(a, partial, kv_head)
        query = a.q + request * a.q_stride + 4 * kv_head * group_floats
        if a.pairs:
            round_floats(query, queries, heads * group_floats)
        else:
            queries = query
    else:
        result = queries + rows * a.head_dim * 4
        statistics = result + rows * a.value_dim * 4
        for i in range(members):
            query = a.q + load_i32(a.members + 4 * (first + i)) * a.q_stride + 4 * kv_head * group_floats
            if a.pairs:
                round_floats(query, queries + 2 * i * group_floats, group_floats)
            else:
                copy_floats(query, queries + 4 * i * group_floats, 4 * group_floats)
    row = load_i32(a.rows + 4 * request)
    attend_chunk(a, row, kv_head, heads, start, end, following, next_head, queries, rows, work, result, statistics)
    if members > 1:
        for i in range(members):
            partial = partial_of(a, load_i32(a.members + 4 * (first + i)), chunk)
            copy_floats(result + i * result_bytes, partial + kv_head * result_bytes, result_bytes)
            target = statistics_of(a, partial, kv_head)
            for g in range(2 * a.group):
                store1(target + 4 * g, load1(statistics + 4 * (2 * i * a.group + g)))


@inlined
def copy_floats(src: int, dst: int, num_bytes: int) -> None:
    """Copy ``num_bytes`` of float32, a multiple of 64."""
    for i in range(0, num_bytes, 4 * W):
        store(dst + i, load(src + i))


@inlined
def partial_stride(a: Any) -> int:
    """Return the bytes of one chunk's result: see `partial_floats`."""
    num_heads = a.num_kv_heads * a.group
    return int(4 * (num_heads * a.value_dim + (2 * num_heads + W - 1) // W * W))


@inlined
def partial_of(a: Any, request: int, chunk: int) -> int:
    """Return the address of the result of a request's chunk. ``chunk_zero``: where chunk 0's is, or would be."""
    return int(a.partial + (load_i32(a.chunk_zero + 4 * request) + chunk) * partial_stride(a))


@inlined
def statistics_of(a: Any, partial: int, kv_head: int) -> int:
    """Return the address of the maxima and sums of a head's group in a chunk's result."""
    return int(partial + a.num_kv_heads * a.group * a.value_dim * 4 + 8 * kv_head * a.group)


@inlined
def softmax_row(scores: int, count: int, scale: float, pairs: int, result: int) -> None:
    """Replace scores[count] by exp(scale * (score - maximum)), in bf16 for ``pairs``; writes scale * maximum and the
    sum to ``result``."""
    for i in range(count, (count + W - 1) // W * W):
        store1(scores + 4 * i, -1e30)
    top = load(scores)
    for i in range(W, count, W):
        top = maximum(top, load(scores + 4 * i))
    peak = hmax(top)
    factor, shift, total = splat(scale), splat(peak), splat(0.0)
    for i in range(0, count, W):
        weight = exp(mul(sub(load(scores + 4 * i), shift), factor))
        total = add(total, weight)
        if pairs:
            round_to(scores + 2 * i, weight)
        else:
            store(scores + 4 * i, weight)
    store1(result, peak * scale)
    store1(result + 4, hsum(total))


@inlined
def merge_chunks(a: Any, request: int) -> None:
    """Merge the results of a request's chunks, in order, into out[request]."""
    vector_bytes, partial_bytes = a.value_dim * 4, partial_stride(a)
    num_heads = a.num_kv_heads * a.group
    first, last = load_i32(a.first_partial + 4 * request), load_i32(a.first_partial + 4 * request + 4)
    for head in range(num_heads):
        statistic = a.partial + num_heads * vector_bytes + 8 * head
        peak = load1(statistic + first * partial_bytes)
        for i in range(first + 1, last):
            peak = max(peak, load1(statistic + i * partial_bytes))
        total = splat(0.0)
        for i in range(first, last):
            at = statistic + i * partial_bytes
            weight = exp(splat(load1(at) - peak))
            total = add(total, mul(weight, splat(load1(at + 4))))
            store1(at, hsum(weight) * (1.0 / W))  # all lanes are equal
        share = share_of(a, head, peak, hsum(total) * (1.0 / W))
        target = a.out + request * a.out_stride + head * vector_bytes
        for d in range(0, vector_bytes, W * 4):
            value = splat(0.0)
            for i in range(first, last):
                weight = splat(load1(statistic + i * partial_bytes))
                value = add(value, mul(weight, load(a.partial + i * partial_bytes + head * vector_bytes + d)))
            store(target + d, mul(value, splat(share)))


@inlined
def run_part(a: Any, part: int, following: int, work: int) -> None:
    """Run some heads of a task's chunk, or all if the task is one part; part ``following`` is next."""
    parts = a.num_kv_heads // a.part_heads
    task, head = part // parts, part % parts * a.part_heads
    at = a.tasks + task * TASK_BYTES
    first, members, chunk, skip = load_i32(at), load_i32(at + 4), load_i32(at + 8), load_i32(at + 12)
    heads = a.part_heads if members == 1 else 1
    last = head + a.part_heads - heads
    for kv_head in range(head, last + 1, heads):
        if kv_head < last:
            attend(a, first, members, kv_head, heads, chunk, skip, task, kv_head + 1, work)
        else:
            next_head = following % parts * a.part_heads
            attend(a, first, members, kv_head, heads, chunk, skip, following // parts, next_head, work)


@kernel(DecodeArgs)
def decode(pointer: Any) -> None:
    """Store the new tokens, attend chunk by chunk, merge: three phases between barriers."""
    a = carray(pointer, 1)[0]
    me, threads = thread_id(), team_size()
    store_new(a, a.num_tokens * me // threads, a.num_tokens * (me + 1) // threads)
    barrier()
    work, num_parts = a.scratch + me * a.scratch_stride, a.num_tasks * (a.num_kv_heads // a.part_heads)
    part = take_next(a.counter)
    while part < num_parts:
        following = take_next(a.counter)
        run_part(a, part, min(following, num_parts - 1), work)
        part = following
    barrier()
    request = take_next(a.merge_counter)
    while request < a.num_tokens:
        merge_chunks(a, request)
        request = take_next(a.merge_counter)
