"""The two kernels of adapters on a GPU, in Triton: rows of many adapters in one launch each. on_gpu.py starts them.

tiles [1 + T, 1 + 16] int32: the number of tiles and the highest rank of theirs / 16; then of each tile its adapter, and
the rows of the step that it has, -1 where there is none. records [adapters, ..] int64, of one product, an adapter
``record_stride`` apart: the address of A, then of each piece (a weight of the product) its first column of low / 16,
its rank, and the address of B. A [ranks, inputs], B [rank / 16, columns, 16] and x are of one dtype. Ranks are
multiples of 16; 0 where nothing is added.
"""

import triton
import triton.language as tl

ROWS = tl.constexpr(16)  # of a tile, and ranks of a block: what tensor cores take
FIELDS = tl.constexpr(3)  # of a piece


@triton.jit
def shrink(
    x, low, records, tiles, inputs, chunk, x_stride, low_stride, part_stride, record_stride,
    PIECES: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (part, lane): low [parts, T, low_stride] = x @ A.T over the inputs of a part, which has CHUNKS chunks of
    inputs; each chunk is summed alone, and then they are, in their order."""
    part, lane, i = tl.program_id(0), tl.program_id(1), tl.arange(0, ROWS)
    blocks = PIECES * tl.load(tiles + 1)
    for task in range(lane, tl.load(tiles) * blocks, tl.num_programs(1)):
        tile, block = tiles + (1 + task // blocks) * (1 + ROWS), task % blocks
        record = records + tl.load(tile).to(tl.int64) * record_stride
        ranks = tl.load(record + 2)
        for piece in tl.static_range(1, PIECES):
            ranks += tl.load(record + piece * FIELDS + 2)
        if block * ROWS < ranks:
            row = tl.load(tile + 1 + i).to(tl.int64)
            x_rows, there = x + row[:, None] * x_stride, (row >= 0)[:, None]
            a = tl.multiple_of(tl.load(record).to(tl.pointer_type(x.dtype.element_ty)), 16)
            a += (block * ROWS + i)[None, :] * inputs
            total = tl.zeros([ROWS, ROWS], tl.float32)
            for number in range(part * CHUNKS, part * CHUNKS + CHUNKS):
                made = tl.zeros([ROWS, ROWS], tl.float32)
                for start in range(number * chunk, tl.minimum(number * chunk + chunk, inputs), BLOCK_K):
                    k = start + tl.arange(0, BLOCK_K)
                    values = tl.load(x_rows + k[None, :], mask=there & (k < inputs)[None, :], other=0.0)
                    weights = tl.load(a + k[:, None], mask=(k < inputs)[:, None], other=0.0)
                    made = tl.dot(values, weights, made, input_precision=PRECISION)
                total += made
            at = low + part * part_stride + row[:, None] * low_stride + (block * ROWS + i)[None, :]
            tl.store(at, total, mask=there)


@triton.jit
def expand(
    low, out, records, tiles, columns, columns_1, columns_2, low_stride, part_stride, out_stride, record_stride,
    PARTS: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (block of columns, piece, lane): out += (the sum of low's parts, in their order) @ B.T; that sum is
    rounded to B's dtype, and out once. ``columns``, _1, _2: of the pieces; 0 where there is none."""
    first, at_piece, i = tl.program_id(0) * BLOCK_N, tl.program_id(1), tl.arange(0, ROWS)
    before = 0
    if at_piece > 0:
        before, columns = columns, columns_1
    if at_piece > 1:
        before, columns = before + columns, columns_2
    for number in range(tl.program_id(2), tl.load(tiles), tl.num_programs(2)):
        tile = tiles + (1 + number) * (1 + ROWS)
        piece = records + tl.load(tile).to(tl.int64) * record_stride + 1 + at_piece * FIELDS
        rank = tl.load(piece + 1)
        if (rank > 0) & (first < columns):
            row = tl.load(tile + 1 + i).to(tl.int64)
            there, column = (row >= 0)[:, None], first + tl.arange(0, BLOCK_N)
            wanted = (column < columns)[None, :]
            low_rows = low + row[:, None] * low_stride + (tl.load(piece) * ROWS + i)[None, :]
            b = tl.multiple_of(tl.load(piece + 2).to(tl.pointer_type(out.dtype.element_ty)), 16)
            b += column[None, :] * ROWS + i[:, None]
            total = tl.zeros([ROWS, BLOCK_N], tl.float32)
            for start in range(0, rank, ROWS):
                made = tl.zeros([ROWS, ROWS], tl.float32)
                for part in tl.static_range(PARTS):
                    made += tl.load(low_rows + part * part_stride + start, mask=there, other=0.0)
                weights = tl.load(b + start * columns, mask=wanted, other=0.0)
                total = tl.dot(made.to(out.dtype.element_ty), weights, total, input_precision=PRECISION)
            at = out + row[:, None] * out_stride + (before + column)[None, :]
            kept = there & wanted
            total += tl.load(at, mask=kept, other=0.0).to(tl.float32)
            tl.store(at, total.to(out.dtype.element_ty), mask=kept)
