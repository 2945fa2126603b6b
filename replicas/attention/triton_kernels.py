"""Attention over the paged pool in Triton: the programs. `triton_paged.py` decides which run.

Queries of one KV head's group are rows of one tile, so that its keys and values are read once for all of them. Row r of
a tile is token r // GROUP_ROWS, query head r % GROUP_ROWS of the group (GROUP_ROWS is the group's size up to a power of
two). A part is the attention over some of the keys: its result, and the base-2 logarithm of the sum of its weights, by
which parts are merged. How many there are is an ordinary argument, so that another batch size compiles nothing.

Of a layer's kind, LIMITED says that a token sees its last ``window`` tokens, or those from the last multiple of
``chunk`` on (either 0: none), and CAPPED that scores become ``cap * tanh(score)``; ``cap`` is times log2(e), and the
scale then makes of a product the score as a share of the cap. Keys before all that a tile sees are not read.

Source: Dao 2023 (arXiv:2307.08691); parts as in Flash-Decoding (Dao et al. 2023) and Hydragen (arXiv:2402.05099).
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _first_seen(position, window, chunk):
    """The first position that the token at ``position`` sees."""
    first = tl.where(window > 0, tl.maximum(position - window + 1, 0), 0)
    return tl.maximum(first, tl.where(chunk > 0, position - position % tl.maximum(chunk, 1), 0))


@triton.jit
def _attend(
    q, keys, values, slots, low, high, first, last, scale, cap, page_stride,
    PAGE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    CAUSAL: tl.constexpr, LIMITED: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):
    """Queries q [ROWS, BLOCK_D] over positions [low, high), row r from position first[r] on if LIMITED, and up to
    position last[r] if CAUSAL.

    keys, values: of this layer and KV head; slots: slot of each position. scale: of the scores, times log2(e).
    Returns: result [ROWS, BLOCK_D], 0 where nothing was seen, and log2 of the weights' sum [ROWS], -inf there.
    """
    d = tl.arange(0, BLOCK_D)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for start in range(low, high, BLOCK):
        position = start + tl.arange(0, BLOCK)
        there = position < high
        slot = tl.load(slots + position, mask=there, other=0)
        place = (slot // PAGE).to(tl.int64) * page_stride + (slot % PAGE) * D  # [BLOCK]
        k = tl.load(keys + place[None, :] + d[:, None], mask=there[None, :] & (d < D)[:, None], other=0.0)
        score = tl.dot(q, k.to(q.dtype), input_precision=PRECISION) * scale  # [ROWS, BLOCK]
        if CAPPED:
            score = cap * (2.0 * tl.sigmoid(2.0 * score) - 1.0)
        seen = there[None, :]
        if LIMITED:
            seen = seen & (position[None, :] >= first[:, None])
        if CAUSAL:
            seen = seen & (position[None, :] <= last[:, None])
        score = tl.where(seen, score, float("-inf"))
        higher = tl.maximum(peak, tl.max(score, 1))
        shift = tl.where(higher == float("-inf"), 0.0, higher)  # a row that has seen nothing yet: no inf - inf
        weight = tl.exp2(score - shift[:, None])
        fade = tl.exp2(peak - shift)
        v = tl.load(values + place[:, None] + d[None, :], mask=there[:, None] & (d < D)[None, :], other=0.0)
        out = out * fade[:, None] + tl.dot(weight.to(q.dtype), v.to(q.dtype), input_precision=PRECISION)
        total = total * fade + tl.sum(weight, 1)
        peak = higher
    some = total > 0.0
    out = out / tl.where(some, total, 1.0)[:, None]
    return out, tl.where(some, peak + tl.log2(tl.where(some, total, 1.0)), float("-inf"))


@triton.jit(do_not_specialize=["first_token", "first_request", "splits", "window", "chunk"])
def decode_parts(
    q, keys, values, table, rows, seq_lens, part_out, part_lse, first_token, first_request, splits, scale, cap,
    window, chunk, q_stride, page_stride, head_stride, table_stride, num_heads,
    GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr, LIMITED: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (b, kv head, split): one token of request b over its share of the keys.

    q [T, H, D]; part_out [B, H, splits, D] fp32, part_lse [B, H, splits].
    """
    b, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    request = first_request + b
    seq_len = tl.load(seq_lens + request)
    begin = 0
    if LIMITED:
        begin = _first_seen(seq_len - 1, window, chunk)
    share = tl.cdiv(tl.cdiv(seq_len - begin, splits), BLOCK) * BLOCK
    low = begin + split * share
    high = tl.minimum(low + share, seq_len)
    g, d = tl.arange(0, GROUP_ROWS), tl.arange(0, BLOCK_D)
    head = kv_head * GROUP + g
    exists = (g < GROUP)[:, None] & (d < D)[None, :]
    token = (first_token + b).to(tl.int64)
    own_q = tl.load(q + token * q_stride + head[:, None] * D + d[None, :], mask=exists, other=0.0)
    row = tl.load(rows + request).to(tl.int64)
    out, lse = _attend(
        own_q, keys + kv_head * head_stride, values + kv_head * head_stride, table + row * table_stride,
        low, high, g, g, scale, cap, page_stride, PAGE, D, BLOCK_D, GROUP_ROWS, BLOCK, False, False, CAPPED, PRECISION,
    )
    part = (b * num_heads + head) * splits + split
    tl.store(part_lse + part, lse, mask=g < GROUP)
    tl.store(part_out + part[:, None] * D + d[None, :], out, mask=exists & (lse > float("-inf"))[:, None])


@triton.jit(do_not_specialize=["first_token", "parts"])
def merge_parts(
    part_out, part_lse, out, sinks, first_token, parts, num_heads, v_scale,
    BLOCK_PARTS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Program (b, head): the parts of one query, and the head's sink if SINKS, as one result; out [T, H, D]."""
    b, head = tl.program_id(0), tl.program_id(1)
    p, d = tl.arange(0, BLOCK_PARTS), tl.arange(0, BLOCK_D)
    part = (b * num_heads + head) * parts + p
    lse = tl.load(part_lse + part, mask=p < parts, other=float("-inf"))
    peak = tl.max(lse, 0)
    weight = tl.exp2(lse - peak)  # some part is never empty: a token sees itself
    seen = (lse > float("-inf"))[:, None] & (d < D)[None, :]
    value = tl.load(part_out + part[:, None] * D + d[None, :], mask=seen, other=0.0)
    total = tl.sum(weight, 0)
    if SINKS:
        total += tl.exp2(tl.load(sinks + head).to(tl.float32) * LOG2_E - peak)
    merged = tl.sum(value * weight[:, None], 0) / total * v_scale
    place = (first_token + b).to(tl.int64) * num_heads + head
    tl.store(out + place * D + d, merged.to(out.dtype.element_ty), mask=d < D)


@triton.jit(do_not_specialize=["window", "chunk"])
def extend(
    q, keys, values, table, rows, qo_indptr, prefix_lens, tiles, out, sinks,
    scale, cap, window, chunk, q_stride, page_stride, head_stride, table_stride, num_heads, v_scale,
    GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr, TILE: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, LIMITED: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (tile, kv head): up to TILE new tokens of a request over all keys before and among them.

    tiles [N, 2]: request, and the first of its new tokens. q, out [T, H, D].
    """
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    request, start = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1)
    bound = tl.load(qo_indptr + request)
    num_new = tl.load(qo_indptr + request + 1) - bound
    prefix = tl.load(prefix_lens + request)
    r, d = tl.arange(0, TILE * GROUP_ROWS), tl.arange(0, BLOCK_D)
    token, g = start + r // GROUP_ROWS, r % GROUP_ROWS
    exists = ((token < num_new) & (g < GROUP))[:, None] & (d < D)[None, :]
    head = kv_head * GROUP + g
    place = (bound + token).to(tl.int64)
    own_q = tl.load(q + place[:, None] * q_stride + head[:, None] * D + d[None, :], mask=exists, other=0.0)
    row = tl.load(rows + request).to(tl.int64)
    low, from_here = 0, token
    if LIMITED:
        low, from_here = _first_seen(prefix + start, window, chunk), _first_seen(prefix + token, window, chunk)
    high = prefix + tl.minimum(start + TILE, num_new)
    attended, lse = _attend(
        own_q, keys + kv_head * head_stride, values + kv_head * head_stride, table + row * table_stride,
        low, high, from_here, prefix + token, scale, cap, page_stride, PAGE, D, BLOCK_D, TILE * GROUP_ROWS, BLOCK, True,
        LIMITED, CAPPED, PRECISION,
    )
    if SINKS:
        sink = tl.load(sinks + head, mask=g < GROUP, other=0.0).to(tl.float32) * LOG2_E
        attended = attended / (1.0 + tl.exp2(sink - lse))[:, None]
    at = (place[:, None] * num_heads + head[:, None]) * D + d[None, :]
    tl.store(out + at, (attended * v_scale).to(out.dtype.element_ty), mask=exists)


@triton.jit
def turn_and_store(
    q, k, v, cos, sin, q_norm, k_norm, keys, values, out_slots, q_stride, k_stride, v_stride, page_stride, head_stride,
    k_inverse, v_inverse, eps, num_heads, LARGEST: tl.constexpr, NORMS: tl.constexpr, PAGE: tl.constexpr,
    D: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Program (token, head): a query head is turned in place; a key head, and with it its value head, is stored.

    Heads of K follow those of Q in the grid. NORMS: heads are normalised and multiplied by q_norm, k_norm [D] before.
    cos, sin [T, D], the first half of sin negated; dimension i turns together with i + D / 2.
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, HALF)
    there = i < D // 2
    turn_cos = tl.load(cos + token * D + i, mask=there, other=0.0).to(tl.float32)
    turn_sin = tl.load(sin + token * D + D // 2 + i, mask=there, other=0.0).to(tl.float32)
    kv_head = head - num_heads
    x, norm = q + token * q_stride + head * D, q_norm
    if kv_head >= 0:
        x, norm = k + token * k_stride + kv_head * D, k_norm
    first = tl.load(x + i, mask=there, other=0.0).to(tl.float32)
    second = tl.load(x + D // 2 + i, mask=there, other=0.0).to(tl.float32)
    if NORMS:
        factor = tl.rsqrt((tl.sum(first * first, 0) + tl.sum(second * second, 0)) / D + eps)
        first = first * factor * tl.load(norm + i, mask=there, other=0.0).to(tl.float32)
        second = second * factor * tl.load(norm + D // 2 + i, mask=there, other=0.0).to(tl.float32)
    turned = first * turn_cos - second * turn_sin
    turned_too = second * turn_cos + first * turn_sin
    if kv_head < 0:
        tl.store(x + i, turned.to(q.dtype.element_ty), mask=there)
        tl.store(x + D // 2 + i, turned_too.to(q.dtype.element_ty), mask=there)
    else:
        slot = tl.load(out_slots + token)
        place = (slot // PAGE).to(tl.int64) * page_stride + kv_head * head_stride + (slot % PAGE) * D
        _put(keys + place + i, turned, there, k_inverse, LARGEST)
        _put(keys + place + D // 2 + i, turned_too, there, k_inverse, LARGEST)
        new_v = v + token * v_stride + kv_head * D
        for half in tl.static_range(2):
            value = tl.load(new_v + half * (D // 2) + i, mask=there)
            _put(values + place + half * (D // 2) + i, value, there, v_inverse, LARGEST)


@triton.jit
def store(
    k, v, keys, values, out_slots, k_stride, v_stride, page_stride, head_stride, k_inverse, v_inverse,
    LARGEST: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Program (token, kv head): k, v [T, K, D] of the token into its slot."""
    token, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    slot = tl.load(out_slots + token)
    place = (slot // PAGE).to(tl.int64) * page_stride + kv_head * head_stride + (slot % PAGE) * D + d
    new_k = tl.load(k + token * k_stride + kv_head * D + d, mask=d < D)
    new_v = tl.load(v + token * v_stride + kv_head * D + d, mask=d < D)
    _put(keys + place, new_k, d < D, k_inverse, LARGEST)
    _put(values + place, new_v, d < D, v_inverse, LARGEST)


@triton.jit
def _put(to, x, there, inverse, LARGEST: tl.constexpr):
    """Store x; LARGEST: of an 8-bit float, in which x times ``inverse`` of the layer's scale is stored, cut to what the
    format holds; 0: x as it is."""
    if LARGEST > 0:
        x = tl.minimum(tl.maximum(x.to(tl.float32) * inverse, -LARGEST), LARGEST)
    tl.store(to, x.to(to.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize_on_alignment=["rows", "prefix_lens", "seq_lens", "indptr", "last_page_len"])
def list_pages(
    table, row_len, rows, prefix_lens, seq_lens, indptr, indices, last_page_len, window,
    PAGE: tl.constexpr, BLOCK: tl.constexpr,
):
    """Program (request b, part): its pages, from the first that its new tokens see on, go to indices from
    indptr[b] on; indptr[b + 1] and last_page_len[b] are written. indptr[0] is 0 already. ``window`` 0: all are seen."""
    b, part = tl.program_id(0), tl.program_id(1)
    pages = tl.zeros([BLOCK], tl.int32)  # of the requests before it
    for at in range(0, b, BLOCK):
        i = at + tl.arange(0, BLOCK)
        length = tl.load(seq_lens + i, mask=i < b, other=0)
        unseen = _first_seen(tl.load(prefix_lens + i, mask=i < b, other=0), window, 0) // PAGE
        pages += (length + PAGE - 1) // PAGE - unseen
    start, length = tl.sum(pages, 0), tl.load(seq_lens + b)
    unseen = _first_seen(tl.load(prefix_lens + b), window, 0) // PAGE
    count = (length + PAGE - 1) // PAGE - unseen
    tl.store(indptr + b + 1, start + count)
    tl.store(last_page_len + b, (length - 1) % PAGE + 1)
    row = table + tl.load(rows + b).to(tl.int64) * row_len + unseen * PAGE
    for at in range(part * BLOCK, count, tl.num_programs(1) * BLOCK):
        i = at + tl.arange(0, BLOCK)
        slot = tl.load(row + i * PAGE, mask=i < count, other=0)
        tl.store(indices + start + i, slot // PAGE, mask=i < count)
