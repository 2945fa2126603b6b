"""A mixture of experts on a GPU, in Triton: the choice, its rows in tiles, and the products of all experts, each in one
launch. on_gpu.py starts them.

It has run on an H200; tests interpret it on a CPU, and compile it for a Hopper GPU.
"""

import triton
import triton.language as tl


@triton.jit
def choose_experts(
    logits, bias, ids, weights, scaling, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr, TWO: tl.constexpr, SIGMOID: tl.constexpr, NORMALIZE: tl.constexpr, BIASED: tl.constexpr,
    TINY: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Program (token): ids and weights [T, TOP_K] of its experts, by descending score, from logits [T, EXPERTS] fp32.

    The rules are those of routing.py. Of equals the first is chosen. Experts lie in [BLOCK_G, BLOCK_S], a group a row;
    a logit that is NaN chooses some expert that exists.
    """
    token = tl.program_id(0).to(tl.int64)
    size: tl.constexpr = EXPERTS // GROUPS
    group, place = tl.arange(0, BLOCK_G)[:, None], tl.arange(0, BLOCK_S)[None, :]
    there = (group < GROUPS) & (place < size)
    expert = group * size + place
    logit = tl.load(logits + token * EXPERTS + expert, mask=there, other=float("-inf"))
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logit))
    else:
        power = tl.exp(logit - tl.max(tl.max(logit, 1), 0))
        scores = power / tl.sum(tl.sum(power, 1), 0)
    ranked = scores
    if BIASED:
        ranked += tl.load(bias + expert, mask=there, other=0.0)
    ranked = tl.where(there, ranked, float("-inf"))
    if TOP_GROUPS < GROUPS:
        best = tl.max(ranked, 1)
        if TWO:
            first = tl.min(tl.where(ranked == best[:, None], place, size), 1)
            best += tl.max(tl.where(place == first[:, None], float("-inf"), ranked), 1)
        groups = tl.arange(0, BLOCK_G)
        kept = tl.zeros([BLOCK_G], tl.int32)
        for _ in tl.static_range(TOP_GROUPS):
            top = tl.min(tl.where(best == tl.max(best, 0), groups, GROUPS), 0)
            kept, best = tl.where(groups == top, 1, kept), tl.where(groups == top, float("-inf"), best)
        ranked = tl.where(kept[:, None] > 0, ranked, float("-inf"))
    choice = tl.arange(0, BLOCK_K)
    made, own = tl.zeros([BLOCK_K], tl.int64), tl.zeros([BLOCK_K], tl.float32)
    total = tl.zeros([], tl.float32)
    for j in tl.static_range(TOP_K):
        peak = tl.max(tl.max(ranked, 1), 0)
        chosen = tl.min(tl.min(tl.where(ranked == peak, expert, EXPERTS), 1), 0)
        chosen = tl.minimum(chosen, EXPERTS - 1)
        weight = tl.sum(tl.sum(tl.where(there & (expert == chosen), scores, 0.0), 1), 0)
        ranked = tl.where(expert == chosen, float("-inf"), ranked)
        made, own = tl.where(choice == j, chosen.to(tl.int64), made), tl.where(choice == j, weight, own)
        total += weight
    factor = scaling
    if NORMALIZE:
        factor = scaling / (total + TINY)
    tl.store(ids + token * TOP_K + choice, made, mask=choice < TOP_K)
    tl.store(weights + token * TOP_K + choice, own * factor, mask=choice < TOP_K)


@triton.jit(do_not_specialize=["total", "bound"])
def cut_tiles(
    ids, choices, experts, total, bound, EXPERTS: tl.constexpr, ROWS: tl.constexpr, BINS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (expert): its choices among ids [total] int64, by ascending place, in tiles of ROWS behind those of the
    experts before it: choices [bound, ROWS] int32, ``total`` where there is none, and experts [bound] int32. The last
    program, of no expert, gives -1 to the tiles that are left. BINS > EXPERTS.

    Every program counts all choices: nothing is added up in memory, so there is nothing to clear before.
    """
    own, bins = tl.program_id(0), tl.arange(0, BINS)
    counts = tl.zeros([BINS], tl.int32)
    for start in range(0, total, BLOCK):
        i = start + tl.arange(0, BLOCK)
        counts += tl.histogram(tl.load(ids + i, mask=i < total, other=EXPERTS).to(tl.int32), BINS)
    tiles = (counts + ROWS - 1) // ROWS
    first = tl.sum(tl.where(bins < own, tiles, 0), 0)
    end = tl.where(own < EXPERTS, first + tl.sum(tl.where(bins == own, tiles, 0), 0), bound)
    expert = tl.where(own < EXPERTS, own, -1)
    for start in range(first, end, ROWS):
        i = start + tl.arange(0, ROWS)
        tl.store(experts + i, tl.zeros_like(i) + expert, mask=i < end)
    place = first.to(tl.int64) * ROWS
    if own < EXPERTS:
        for start in range(0, total, BLOCK):
            i = start + tl.arange(0, BLOCK)
            mine = (tl.load(ids + i, mask=i < total, other=EXPERTS) == own).to(tl.int32)
            tl.store(choices + place + tl.cumsum(mine, 0) - 1, i, mask=mine > 0)
            place += tl.sum(mine, 0)
    for start in range(place, end.to(tl.int64) * ROWS, ROWS):
        i = start + tl.arange(0, ROWS)
        tl.store(choices + i, tl.zeros([ROWS], tl.int32) + total, mask=i < end.to(tl.int64) * ROWS)


@triton.jit(do_not_specialize=["num_rows"])
def grouped_product(
    x, weight, weight_scales, out, choices, experts, num_rows, outputs, inputs, x_stride, wide,
    SHARED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
    SCALED: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """Program (tile, block of columns): out [num_rows, outputs] = x @ weight[expert].T for a tile of one expert's rows.

    choices [tiles, BLOCK_M] int32: the rows of out that a tile makes, num_rows where there is none; experts [tiles]
    int32: whose they are, -1 for a tile without rows. Row r reads row r // SHARED of x: a token's choices share it.
    weight [E, outputs, inputs], contiguous. Sums are in fp32, in blocks of inputs, one after the other. If SCALED,
    weight_scales [E, outputs, ceil(inputs / wide)] fp32 are of ``wide`` inputs each, whole blocks or all of them. If
    DENSE, there is one expert, which has all rows in their order.
    """
    tile, column = tl.program_id(0), tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    expert = tl.zeros([], tl.int64) if DENSE else tl.load(experts + tile).to(tl.int64)
    if expert >= 0:
        if DENSE:
            row = tile.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        else:
            row = tl.load(choices + tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
        there, wanted = row < num_rows, column < outputs
        x_rows = x + (row // SHARED)[:, None] * x_stride
        columns = weight + expert * outputs * inputs + column[None, :].to(tl.int64) * inputs
        of_column = weight_scales + (expert * outputs + column) * ((inputs + wide - 1) // wide)
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, inputs, BLOCK_K):
            i = start + tl.arange(0, BLOCK_K)
            a = tl.load(x_rows + i[None, :], mask=there[:, None] & (i < inputs)[None, :], other=0.0)
            b = tl.load(columns + i[:, None], mask=wanted[None, :] & (i < inputs)[:, None], other=0.0)
            if SCALED:
                factor = tl.load(of_column + start // wide, mask=wanted, other=0.0)
                total += tl.dot(a, b.to(a.dtype), input_precision=PRECISION) * factor[None, :]
            else:
                total = tl.dot(a, b, total, input_precision=PRECISION)
        at = out + row[:, None] * outputs + column[None, :]
        tl.store(at, total.to(out.dtype.element_ty), mask=there[:, None] & wanted[None, :])


@triton.jit
def sum_choices(made, weights, out, size, made_stride, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """Program (token, block): out [T, size] = the sum over j of weights [T, TOP_K] fp32 times row t TOP_K + j of made,
    in fp32, in the order of j."""
    token, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = i < size
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(TOP_K):
        row = token * TOP_K + j
        total += tl.load(weights + row) * tl.load(made + row * made_stride + i, mask=there, other=0.0).to(tl.float32)
    tl.store(out + token * size + i, total.to(out.dtype.element_ty), mask=there)
