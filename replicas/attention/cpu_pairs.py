"""Attention in bf16 by dot products of pairs, on CPUs that multiply bf16: what differs from arithmetic in fp32.

Owns:      when it is used; how K and V of a block become pairs; the product by them; what queries and weights are
           rounded to.
Method:    two numbers that are multiplied and added up lie side by side: two of a key for scores, one of each of two
           tokens' values for results. Queries are rounded before they are scaled, weights once their softmax is known;
           sums, maxima, and the sum of the weights stay in fp32, as in PyTorch's and vllm's attention in bf16.
Never:     rounds K and V again: the pool holds them in bf16.
Invariant: an element's sum runs in one accumulator, pair by pair, the second number first, whatever the number of rows
           and columns.
Thread:    inside kernels, any. Addresses and strides are in bytes.
"""

import torch

from replicas.kernels import bf16_tiles
from replicas.kernels.bf16_tiles import HAS_DOTS, pair_tile, store_rounded
from replicas.kernels.narrow import copy_sixteen, pair_up, pair_with_zeros, prefetch, store_bf16
from replicas.kernels.register_tiles import transpose16
from replicas.kernels.simd import W, load
from replicas.kernels.team import inlined

BLOCK = 64  # tokens that become pairs at a time: scores of one pass of the widest tile
WIDE_ROWS, NARROW_ROWS = 6, 12  # of a tile of 64 columns, and of 16
round_to = store_rounded if HAS_DOTS else store_bf16  # without them it is compiled, and never run


def serves(dtype: torch.dtype) -> bool:
    """Tell whether attention over a pool in ``dtype`` runs by dot products on this CPU."""
    return dtype == torch.bfloat16 and bf16_tiles.way() == "dots"


def block_bytes(head_dim: int) -> int:
    """Count the bytes of a block as it lies in its pages, and after it those of its pairs, whose rows are whole
    vectors."""
    return 2 * 2 * BLOCK * (head_dim + 2 * W)


@inlined
def pairs_at(block: int, head_dim: int) -> int:
    """Return where a block's pairs lie behind its tokens."""
    return int(block + 2 * BLOCK * (head_dim + 2 * W))


@inlined
def round_floats(src: int, dst: int, count: int) -> None:
    """Write ``count`` floats, a multiple of 16, as bf16."""
    for i in range(0, count, W):
        round_to(dst + 2 * i, load(src + 4 * i))


@inlined
def pair_keys(keys: int, head_dim: int, dst: int, ahead: int) -> None:
    """Write sixteen keys [16, head_dim] as pairs [head_dim / 2, 16], rows `BLOCK` pairs apart; asks for what lies
    ``ahead`` bytes behind each line."""
    for d in range(0, 2 * head_dim, 4 * W):
        for i in range(W):
            prefetch(keys + 2 * i * head_dim + d + ahead)
        transpose16(keys + d, 2 * head_dim, dst + d * BLOCK, 4 * BLOCK)


@inlined
def pair_values(values: int, count: int, head_dim: int, value_dim: int, dst: int, ahead: int) -> None:
    """Write ``count`` values, ``head_dim`` numbers apart, as pairs [count / 2 rounded up, value_dim], with zeros beside
    the last of an odd number; asks for what lies ``ahead`` bytes behind each line."""
    row_bytes = 2 * head_dim
    for token in range(0, count, 2):
        row, pairs = values + token * row_bytes, dst + 2 * token * value_dim
        for i in range(0, 2 * row_bytes, 4 * W):
            prefetch(row + i + ahead)
        for i in range(0, 2 * value_dim, 2 * W):
            if token + 1 < count:
                pair_up(row + i, row + row_bytes + i, pairs + 2 * i)
            else:
                pair_with_zeros(row + i, pairs + 2 * i)


_WIDE, _NARROW = pair_tile(WIDE_ROWS, 4), pair_tile(NARROW_ROWS, 1)


@inlined
def multiply_pairs(m: int, n: int, pairs: int, a: int, lda: int, b: int, ldb: int, c: int, ldc: int, keep: int) -> None:
    """Compute c[m, n] = a[m, pairs] @ b[pairs, n], added to c if ``keep`` is 1; n is a multiple of 16."""
    column = 0
    while column < n:
        wide = n - column >= 4 * W
        most = WIDE_ROWS if wide else NARROW_ROWS
        count, row = (m + most - 1) // most, 0
        for i in range(count):
            end = m * (i + 1) // count
            a_at, b_at, c_at = a + row * lda, b + 4 * column, c + row * ldc + 4 * column
            if wide:
                _WIDE(end - row, a_at, lda, b_at, ldb, c_at, ldc, pairs, keep)
            else:
                _NARROW(end - row, a_at, lda, b_at, ldb, c_at, ldc, pairs, keep)
            row = end
        column += 4 * W if wide else W


@inlined
def copy_numbers(src: int, dst: int, num_bytes: int, ahead: int) -> None:
    """Copy a run of bf16 numbers, a multiple of 16; asks for what lies ``ahead`` bytes behind each line."""
    for i in range(0, num_bytes, 2 * W):
        prefetch(src + ahead + i)
        copy_sixteen(src + i, dst + i)
