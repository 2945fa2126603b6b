"""Operations on rows on a GPU, in Triton: those between the matrix products, and the draw of tokens from logits.

Owns:      the arithmetic of one row, or of one block of it, a program. Rows lie one behind the other.
Never:     allocates, or chooses sizes of blocks and numbers of warps (gpu.py and runner/device_draw.py do).
Invariant: between products it is computed in fp32 and rounded to the tensors' dtype once, at the end; the residual is
           rounded where it is stored, and its norm is of what was stored. The draw has the rules, noise and cuts of
           runner/sampler.py, which explains them.
"""

import triton
import triton.language as tl

STRIDE = tl.constexpr(0x9E3779B97F4A7C15)  # of runner/sampler.py
BELOW_HEAD = tl.constexpr(1 << 40)
IN_PROMPT = tl.constexpr(1 << 30)  # of runner/token_counts.py
SMALLEST = tl.constexpr(745.13)  # exp(-x) of a larger one is 0 in fp64
NO_MASS = tl.constexpr(0x7F800000)  # the place of -inf


@triton.jit
def add_rms_norm(x, term, weight, out, size, eps, ADDS: tl.constexpr, BLOCK: tl.constexpr):
    """Program (row): x [T, size] += term, if ADDS; out = x normalised, times weight [size]."""
    row = tl.program_id(0).to(tl.int64) * size
    i = tl.arange(0, BLOCK)
    there = i < size
    value = tl.load(x + row + i, mask=there, other=0.0).to(tl.float32)
    if ADDS:
        added = (value + tl.load(term + row + i, mask=there, other=0.0).to(tl.float32)).to(x.dtype.element_ty)
        tl.store(x + row + i, added, mask=there)
        value = added.to(tl.float32)
    factor = tl.rsqrt(tl.sum(value * value, 0) / size + eps)
    scaled = value * factor * tl.load(weight + i, mask=there, other=0.0).to(tl.float32)
    tl.store(out + row + i, scaled.to(out.dtype.element_ty), mask=there)


@triton.jit
def silu_mul(gate_up, out, size, BLOCK: tl.constexpr):
    """Program (row, block): out [T, size] = silu(first half) * second half of gate_up [T, 2 size]."""
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = i < size
    gate = tl.load(gate_up + row * 2 * size + i, mask=there, other=0.0).to(tl.float32)
    up = tl.load(gate_up + (row * 2 + 1) * size + i, mask=there, other=0.0).to(tl.float32)
    made = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * size + i, made.to(out.dtype.element_ty), mask=there)


@triton.jit
def quantise(x, out, scales, size, x_stride, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    """Program (row): out [T, size] = x / its scale, in e4m3; scales [T] bring the row's largest number to LARGEST.
    Numbers are rounded to its three bits here, as converting loses a carry where it is interpreted."""
    row = tl.program_id(0).to(tl.int64)
    peak = tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        i = start + tl.arange(0, BLOCK)
        peak = tl.maximum(peak, tl.abs(tl.load(x + row * x_stride + i, mask=i < size, other=0.0).to(tl.float32)))
    scale = tl.maximum(tl.max(peak, 0) / LARGEST, 1e-30)
    tl.store(scales + row, scale)
    for start in range(0, size, BLOCK):
        i = start + tl.arange(0, BLOCK)
        value = tl.load(x + row * x_stride + i, mask=i < size, other=0.0).to(tl.float32) / scale
        bits = tl.minimum(tl.maximum(value, -LARGEST), LARGEST).to(tl.int32, bitcast=True)
        value = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
        tl.store(out + row * size + i, value.to(out.dtype.element_ty), mask=i < size)


@triton.jit
def enter_rows(ids, source, table, row_len, follows, rows, positions, out_slots):
    """Program (row): the slot of a row that decodes goes into table [R, row_len] at its position; its input id becomes
    token follows[row] of the int64 that lie at the address source[0], 0 for one that is broken, unless either is -1."""
    b = tl.program_id(0)
    at = tl.load(rows + b).to(tl.int64) * row_len + tl.load(positions + b)
    tl.store(table + at, tl.load(out_slots + b).to(tl.int32))
    address, place = tl.load(source), tl.load(follows + b)
    there = (address > 0) & (place >= 0)
    token = tl.load(address.to(tl.pointer_type(tl.int64)) + place, mask=there, other=0)
    tl.store(ids + b, tl.maximum(token, 0), mask=there)


@triton.jit
def greatest(logits, tokens, peaks, size, BLOCK: tl.constexpr):
    """Program (row): the largest of logits [S, size] and the first token that has it; -1 where that is not finite."""
    row = tl.program_id(0).to(tl.int64)
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    first, broken = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    for start in range(0, size, BLOCK):
        i = start + tl.arange(0, BLOCK)
        value = tl.load(logits + row * size + i, mask=i < size, other=float("-inf"))
        broken |= (value != value).to(tl.int32)
        first = tl.where(value > highest, i, first)
        highest = tl.where(value > highest, value, highest)
    peak = tl.max(highest, 0)
    token = tl.min(tl.where(highest == peak, first, size), 0)
    finite = (tl.max(broken, 0) == 0) & (peak > float("-inf")) & (peak < float("inf"))
    tl.store(peaks + row, peak)
    tl.store(tokens + row, tl.where(finite, token, -1).to(tl.int64))


# `places` is a row of a matrix [5, R]: 16-byte aligned or not by R
@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["places"])
def penalise(logits, counts, index, places, penalties, num_rows, size, BLOCK: tl.constexpr):
    """Program (r, block): the penalties of row index[r] of logits [S, size], in place, by counts [n, size] int32.

    penalties [3, R] int64: bits of repetition, frequency and presence (float64); what they do: runner/sampler.py.
    """
    r, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = i < size
    count = tl.load(counts + tl.load(places + r) * size + i, mask=there, other=0)
    at = logits + tl.load(index + r) * size + i
    value = tl.load(at, mask=there, other=0.0)
    factor = tl.zeros_like(value) + _float(penalties + r).to(tl.float32)
    value = tl.where(count != 0, tl.where(value > 0.0, tl.div_rn(value, factor), value * factor), value)
    made = count & (IN_PROMPT - 1)
    term = _float(penalties + num_rows + r) * made.to(tl.float64) + _float(penalties + 2 * num_rows + r)
    tl.store(at, tl.where(made > 0, value - term.to(tl.float32), value), mask=there)


@triton.jit(do_not_specialize=["num_rows"])
def scale(logits, peaks, index, rules, scaled, num_rows, size, BLOCK: tl.constexpr):
    """Program (r, block): scaled [R, size] = (logits of row index[r] - its peak) / temperature."""
    r, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(index + r)
    temperature = _float(rules + 2 * num_rows + r).to(tl.float32)
    value = tl.load(logits + row * size + i, mask=i < size, other=0.0) - tl.load(peaks + row)
    tl.store(scaled + r * size + i, tl.div_rn(value, tl.zeros_like(value) + temperature), mask=i < size)


@triton.jit(do_not_specialize=["num_rows"])
def draw(
    scaled, head_values, head_ids, index, rules, tokens, num_rows, size, num, HEAD: tl.constexpr, BLOCK: tl.constexpr
):
    """Program (r): the token of a row that draws, from log p relative to its peak, scaled [R, size].

    head_values, head_ids [R, num + 1]: its largest. A row whose winner is among the first ``num`` ends there. Of
    another, a row without cuts draws one by one from the rest; one with cuts finds them by bisection and draws from all
    that they keep. rules [6, R] int64: bits of top_p, log min_p and temperature (float64), top_k, position, seed.
    """
    r = tl.program_id(0)
    top_p, log_min_p = _float(rules + r), _float(rules + num_rows + r)
    top_k = tl.load(rules + 3 * num_rows + r)
    position = tl.load(rules + 4 * num_rows + r).to(tl.uint64, bitcast=True)
    seed = tl.load(rules + 5 * num_rows + r).to(tl.uint64, bitcast=True)
    stream = _mix(_mix(seed + STRIDE) + position * STRIDE)
    row = scaled + r.to(tl.int64) * size

    h, at = tl.arange(0, HEAD), r * (num + 1)
    edge = tl.load(head_values + at + num)
    value = tl.load(head_values + at + h, mask=h < num, other=float("-inf"))
    ids = tl.load(head_ids + at + h, mask=h < num, other=size)
    log_p = tl.where(value > edge, value, float("-inf")).to(tl.float64)  # equals never stand on both sides of its end
    mass = tl.exp(log_p)
    equal = log_p[:, None] == log_p[None, :]
    before = (log_p[:, None] > log_p[None, :]) | (equal & (ids[:, None] < ids[None, :]))  # [j, i]: j stands before i
    ranks = tl.sum(before.to(tl.int32), 0)
    mass_before = tl.sum(tl.where(before, mass[:, None], 0.0), 0)
    head_mass, num_head = tl.sum(mass, 0), tl.sum((mass > 0.0).to(tl.int32), 0)
    masses, places = tl.zeros([BLOCK], tl.float64), tl.zeros([BLOCK], tl.int32)
    for start in range(0, size, BLOCK):
        x = _block(row, start, size, BLOCK)
        masses += tl.where(x <= edge, tl.exp(x), 0.0).to(tl.float64)
        places = tl.maximum(places, tl.where(_place(x) < NO_MASS, _place(x), 0))
    below = tl.sum(masses, 0)
    limit = top_p * (head_mass + below)
    kept = (ranks < top_k) & (mass_before < limit) & (log_p >= log_min_p) & (mass > 0.0)
    perturbed = tl.where(kept, log_p + _gumbel(_bits(stream, ids)), float("-inf"))
    best = tl.max(perturbed, 0)
    token = tl.min(tl.where(perturbed == best, ids, size), 0)

    cuts = (top_k < size) | (top_p < float("inf")) | (log_min_p > float("-inf"))
    rest = tl.log(below) + _gumbel(_bits(stream, tl.zeros([], tl.int64) + BELOW_HEAD))
    reaches = (num_head < top_k) & (head_mass < limit) & (edge.to(tl.float64) >= log_min_p) & (below > 0.0)
    if reaches & (cuts | (rest > best)):
        first, last, end, num_ties = _place(edge), NO_MASS, NO_MASS, tl.zeros([], tl.float64)
        if cuts:
            first, last, end, num_ties = _cut(
                row, size, _place(edge), num_head, head_mass, tl.max(places, 0), top_k, limit, log_min_p, BLOCK
            )
        token = _draw_kept(row, size, stream, first, last, end, num_ties, BLOCK)
    out = tokens + tl.load(index + r)
    if tl.load(out) >= 0:  # else its logits are broken
        tl.store(out, token)


@triton.jit
def _cut(row, size, low, num_low, mass_low, last, top_k, limit, log_min_p, BLOCK: tl.constexpr):
    """Where the cuts fall below place ``low``, before which are num_low tokens of mass_low; none is behind ``last``.
    Returns: the first place kept, that of tokens which may not all be kept, the place behind them, and how many of them
    are, by id.

    A token is kept if those before it are fewer than top_k and weigh less than ``limit``: true up to some place, false
    behind it. Found when one token at most, or one place, lies between; each turn asks at three places. What a program
    adds up, it adds up a lane at a time, and over its lanes once a turn.
    """
    least = tl.minimum(-log_min_p, SMALLEST)
    rounded = tl.abs(least.to(tl.float32))
    high = tl.minimum(_place(rounded) + (rounded.to(tl.float64) <= least).to(tl.int32), last + 1)
    num_high = size
    while (high - low > 1) & (num_high - num_low > 1):
        step = tl.maximum((high - low) // 4, 1)
        p1, p2, p3 = low + step, tl.minimum(low + 2 * step, high), tl.minimum(low + 3 * step, high)
        n1, n2, n3 = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
        m1, m2, m3 = tl.zeros([BLOCK], tl.float64), tl.zeros([BLOCK], tl.float64), tl.zeros([BLOCK], tl.float64)
        for start in range(0, size, BLOCK):
            x = _block(row, start, size, BLOCK)
            place, mass = _place(x), tl.exp(x).to(tl.float64)
            n1 += (place < p1).to(tl.int32)
            n2 += (place < p2).to(tl.int32)
            n3 += (place < p3).to(tl.int32)
            m1 += tl.where(place < p1, mass, 0.0)
            m2 += tl.where(place < p2, mass, 0.0)
            m3 += tl.where(place < p3, mass, 0.0)
        end, state = high, (low, num_low, mass_low, high, num_high)
        state = _narrow(p1, end, tl.sum(n1, 0), tl.sum(m1, 0), top_k, limit, state)
        state = _narrow(p2, end, tl.sum(n2, 0), tl.sum(m2, 0), top_k, limit, state)
        low, num_low, mass_low, high, num_high = _narrow(p3, end, tl.sum(n3, 0), tl.sum(m3, 0), top_k, limit, state)
    each = tl.exp(-low.to(tl.float32, bitcast=True).to(tl.float64))
    return 0, low, high, tl.minimum((top_k - num_low).to(tl.float64), tl.ceil((limit - mass_low) / each))


@triton.jit
def _narrow(place, end, num, mass, top_k, limit, state):
    """Take ``place``, before which are num tokens of mass, for the low or the high end of what `_cut` looks through; a
    place at its ``end`` says nothing."""
    low, num_low, mass_low, high, num_high = state
    keeps = (place < end) & (num < top_k) & (mass < limit)
    cuts = (place < high) & (keeps == 0)
    low, num_low, mass_low = tl.where(keeps, place, low), tl.where(keeps, num, num_low), tl.where(keeps, mass, mass_low)
    return low, num_low, mass_low, tl.where(cuts, place, high), tl.where(cuts, num, num_high)


@triton.jit
def _draw_kept(row, size, stream, first, last, end, num_ties, BLOCK: tl.constexpr):
    """The winner among the tokens at places [first, last) and the first ``num_ties`` of those at [last, end).

    The uniform number u of a winner is so large that 1 - u <= -log u < exp(log p - best): in most blocks none is, and
    no logarithm is taken.
    """
    best, token, seen = tl.full([], float("-inf"), tl.float64), tl.zeros([], tl.int64), 0
    for start in range(0, size, BLOCK):
        x, i = _block(row, start, size, BLOCK), start + tl.arange(0, BLOCK)
        place = _place(x)
        tie = (place >= last) & (place < end)
        order = seen + tl.cumsum(tie.to(tl.int32), 0) - 1
        seen += tl.sum(tie.to(tl.int32), 0)
        kept = (place >= first) & (place < last) | (tie & (order.to(tl.float64) < num_ties))
        bits = _bits(stream, i)
        gap = (((1 << 53) - 1 - (bits >> 11)).to(tl.float32) + 0.5) * 2.0**-53  # 1 - u
        could = kept & (gap <= tl.exp(x - best.to(tl.float32)) * 1.001)  # with room for the rounding of fp32
        if tl.max(could.to(tl.int32), 0) > 0:
            perturbed = tl.where(kept, x.to(tl.float64) + _gumbel(bits), float("-inf"))
            highest = tl.max(perturbed, 0)
            winner = tl.min(tl.where(perturbed == highest, i, size), 0).to(tl.int64)
            token = tl.where(highest > best, winner, token)
            best = tl.maximum(best, highest)
    return token


@triton.jit
def _block(row, start, size, BLOCK: tl.constexpr):
    i = start + tl.arange(0, BLOCK)
    return tl.load(row + i, mask=i < size, other=float("-inf"))


@triton.jit
def _place(x):
    """An integer in the order of -x, for x <= 0 in fp32."""
    return tl.abs(x).to(tl.int32, bitcast=True)


@triton.jit
def _float(pointer):
    return tl.load(pointer).to(tl.float64, bitcast=True)


@triton.jit
def _bits(stream, ids):
    return _mix(stream + ids.to(tl.uint64) * STRIDE + STRIDE)


@triton.jit
def _gumbel(bits):
    return -tl.log(-tl.log(((bits >> 11).to(tl.float64) + 0.5) * 2.0**-53))


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)
