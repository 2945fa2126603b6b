"""Decode attention: one new token a request, limited by how fast K and V can be read.

Method:    each request's tokens are cut into chunks of 128; a task is one chunk, all heads (flash decoding, Dao et al.
           2023: the softmax of each chunk by itself, chunks merged by their maxima). K and V are read once, in place,
           for all query heads of a group.
Invariant: chunks begin at multiples of 128 of the request itself and merge in order: a request's result is the same bit
           for bit whatever else is in the batch and however many threads there are.
Thread:    all of the team; tasks are taken one by one, so that ragged batches and busy cores balance.
"""

import math
from typing import Any

from numba import carray

from replicas.attention.cpu_pages import BATCH_FIELDS, POOL_FIELDS, run_length, store_new, token_offset
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

CHUNK = 128  # tokens; a multiple of 16. Scores of a chunk stay in L1
TASK_BYTES = 8  # (request, chunk) as two int32

DecodeArgs = struct(
    "DecodeArgs",
    POOL_FIELDS
    + BATCH_FIELDS
    + "seq_lens tasks num_tasks first_task partial scratch scratch_stride counter merge_counter",
    floats="scale",
)


def partial_floats(num_heads: int, head_dim: int) -> int:
    """Floats of one task's result: the weighted values of each head, then each head's maximum and sum, padded."""
    return num_heads * head_dim + math.ceil(2 * num_heads / W) * W


def scratch_floats(num_heads: int) -> int:
    """Floats a thread needs: the scores of one chunk."""
    return num_heads * CHUNK


@inlined
def attend_chunk(a: Any, row: int, q: int, start: int, end: int, following: int, scores: int, partial: int) -> None:
    """One chunk, all heads: weighted values, maxima and sums of exp(score - maximum) into ``partial``.

    Reading a page fetches the next one, where the hardware would not look: after the last page of keys comes the first
    of values, after that of values the first of keys of ``following``, the thread's next task.
    """
    vector_bytes = a.head_dim * 4
    group_bytes, num_heads = a.group * vector_bytes, a.num_kv_heads * a.group
    score_bytes = a.group * CHUNK * 4
    position, column = start, 0
    while position < end:
        length = run_length(a, position, end)
        offset = token_offset(a, row, position)
        position += length
        ahead = token_offset(a, row, position) if position < end else token_offset(a, row, start) + a.values - a.keys
        for h in range(a.num_kv_heads):
            keys, target = a.keys + offset + h * a.head_stride, scores + h * score_bytes + column
            queries, distance = q + h * group_bytes, ahead - offset
            dot(a.group, length, a.head_dim, queries, vector_bytes, keys, vector_bytes, target, CHUNK * 4, distance)
        column += 4 * length
    for head in range(num_heads):
        statistic = partial + num_heads * vector_bytes + 8 * head
        softmax_row(scores + head * CHUNK * 4, end - start, a.scale, statistic)
    position, column = start, 0
    while position < end:
        length = run_length(a, position, end)
        offset = token_offset(a, row, position)
        position += length
        ahead = token_offset(a, row, position) if position < end else first_key(a, following) - a.values
        for h in range(a.num_kv_heads):
            weights, values = scores + h * score_bytes + column, a.values + offset + h * a.head_stride
            target, keep, distance = partial + h * group_bytes, 1 if column else 0, ahead - offset
            outer_fetch(
                a.group,
                a.head_dim,
                length,
                weights,
                CHUNK * 4,
                values,
                vector_bytes,
                target,
                vector_bytes,
                keep,
                distance,
            )
        column += 4 * length


@inlined
def softmax_row(scores: int, count: int, scale: float, result: int) -> None:
    """scores[count] becomes exp(scale * (score - maximum)); writes scale * maximum and the sum to ``result``."""
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
        store(scores + 4 * i, weight)
    store1(result, peak * scale)
    store1(result + 4, hsum(total))


@inlined
def merge_chunks(a: Any, request: int, partial_bytes: int) -> None:
    """out[request] from the partial results of its chunks, in order."""
    vector_bytes = a.head_dim * 4
    num_heads = a.num_kv_heads * a.group
    first, last = load_i32(a.first_task + 4 * request), load_i32(a.first_task + 4 * request + 4)
    for head in range(num_heads):
        statistic = a.partial + num_heads * vector_bytes + 8 * head
        peak = load1(statistic + first * partial_bytes)
        for task in range(first + 1, last):
            peak = max(peak, load1(statistic + task * partial_bytes))
        total = splat(0.0)
        for task in range(first, last):
            at = statistic + task * partial_bytes
            weight = exp(splat(load1(at) - peak))
            total = add(total, mul(weight, splat(load1(at + 4))))
        share = 1.0 / (hsum(total) * (1.0 / W))  # all lanes of total are equal
        target = a.out + request * a.out_stride + head * vector_bytes
        for d in range(0, vector_bytes, W * 4):
            value = splat(0.0)
            for task in range(first, last):
                weight = exp(splat(load1(statistic + task * partial_bytes) - peak))
                value = add(value, mul(weight, load(a.partial + task * partial_bytes + head * vector_bytes + d)))
            store(target + d, mul(value, splat(share)))


@inlined
def first_key(a: Any, task: int) -> int:
    """Address of the first key, of head 0, of a task's chunk."""
    request, chunk = load_i32(a.tasks + TASK_BYTES * task), load_i32(a.tasks + TASK_BYTES * task + 4)
    return int(a.keys + token_offset(a, load_i32(a.rows + 4 * request), chunk * CHUNK))


@kernel(DecodeArgs)
def decode(pointer: Any) -> None:
    """Store the new tokens, attend chunk by chunk, merge: three phases between barriers."""
    a = carray(pointer, 1)[0]
    me, threads = thread_id(), team_size()
    store_new(a, a.num_tokens * me // threads, a.num_tokens * (me + 1) // threads)
    barrier()
    num_heads = a.num_kv_heads * a.group
    partial_bytes = 4 * (num_heads * a.head_dim + (2 * num_heads + W - 1) // W * W)
    scores = a.scratch + me * a.scratch_stride
    task = take_next(a.counter)
    while task < a.num_tasks:
        following = take_next(a.counter)
        request, chunk = load_i32(a.tasks + TASK_BYTES * task), load_i32(a.tasks + TASK_BYTES * task + 4)
        start = chunk * CHUNK
        end = min(start + CHUNK, load_i32(a.seq_lens + 4 * request))
        row, q = load_i32(a.rows + 4 * request), a.q + request * a.q_stride
        attend_chunk(a, row, q, start, end, min(following, a.num_tasks - 1), scores, a.partial + task * partial_bytes)
        task = following
    barrier()
    request = take_next(a.merge_counter)
    while request < a.num_tokens:
        merge_chunks(a, request, partial_bytes)
        request = take_next(a.merge_counter)
