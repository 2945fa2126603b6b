"""The products of a mixture of experts on a GPU, in Triton: rows of many experts in one launch. on_gpu.py starts it.

Never run on a GPU by us: interpreted on a CPU by tests, and compiled for a Hopper GPU.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows"])
def grouped_product(
    x, weight, out, choices, experts, num_rows, outputs, inputs, x_stride,
    SHARED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (tile, block of columns): out [num_rows, outputs] = x @ weight[expert].T for a tile of one expert's rows.

    choices [tiles, BLOCK_M] int32: the rows of out that a tile makes, num_rows where there is none; experts [tiles]
    int32: whose they are, -1 for a tile without rows. Row r reads row r // SHARED of x: a token's choices share it.
    weight [E, outputs, inputs], contiguous. Sums are in fp32, in blocks of inputs, one after the other.
    """
    tile, column = tl.program_id(0), tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    expert = tl.load(experts + tile).to(tl.int64)
    if expert >= 0:
        row = tl.load(choices + tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
        there, wanted = row < num_rows, column < outputs
        x_rows = x + (row // SHARED)[:, None] * x_stride
        columns = weight + expert * outputs * inputs + column[None, :].to(tl.int64) * inputs
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, inputs, BLOCK_K):
            i = start + tl.arange(0, BLOCK_K)
            a = tl.load(x_rows + i[None, :], mask=there[:, None] & (i < inputs)[None, :], other=0.0)
            b = tl.load(columns + i[:, None], mask=wanted[None, :] & (i < inputs)[:, None], other=0.0)
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
