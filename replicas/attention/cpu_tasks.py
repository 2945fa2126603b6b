"""What the threads of a step take one by one: chunks of a decode batch, tiles of an extend batch.

Owns:      how a step is cut into tasks: numpy arrays that the kernels read.
Never:     touches K, V or queries.
Invariant: a request's chunks are cut at multiples of 128 of itself, whatever else is in the batch.
Thread:    the thread that runs the model.
"""

import numpy as np
import numpy.typing as npt

from replicas.attention.cpu_decode import CHUNK

Ints = npt.NDArray[np.int32]
TILE_ROWS = 192  # rows of an extend task: enough to pay for copying K and V, few enough for L2
MIN_TILE_TOKENS = 8
TASKS_PER_THREAD = 4  # smaller tiles until there are so many tasks, so that threads end together


def decode_tasks(seq_lens: Ints) -> tuple[Ints, Ints]:
    """One task a chunk, in order of request and chunk.

    Args:    seq_lens: [B].
    Returns: tasks [N, 2] of (request, chunk), and [B + 1] the first task of each request.
    """
    num_chunks = -(-seq_lens // CHUNK)  # [B]
    first_task = np.zeros(len(num_chunks) + 1, np.int32)
    np.cumsum(num_chunks, out=first_task[1:])
    request = np.repeat(np.arange(len(num_chunks), dtype=np.int32), num_chunks)
    chunk = np.arange(len(request), dtype=np.int32) - first_task[request]
    return np.stack((request, chunk), axis=1).astype(np.int32, copy=False), first_task


def extend_tasks(counts: Ints, prefix_lens: Ints, *, tile: int, num_kv_heads: int) -> Ints:
    """One task a tile of queries and KV head; those with the most keys first.

    Args:    counts, prefix_lens: [B] new tokens and those before; tile: tokens.
    Returns: [N, 4] of (request, KV head, first token of the tile, tokens).
    """
    tiles = [
        (before + start, b, start, min(tile, count - start))
        for b, (count, before) in enumerate(zip(counts.tolist(), prefix_lens.tolist(), strict=True))
        for start in range(0, count, tile)
    ]
    tiles.sort(key=lambda item: -item[0])
    return np.array([(b, head, start, n) for _, b, start, n in tiles for head in range(num_kv_heads)], np.int32)


def tile_tokens(counts: Ints, *, group: int, num_kv_heads: int, num_threads: int) -> int:
    """Tokens of a tile: as large as pays, smaller when that would leave threads without work."""
    tile = max(MIN_TILE_TOKENS, TILE_ROWS // group)
    wanted = TASKS_PER_THREAD * num_threads
    while tile > MIN_TILE_TOKENS and int((-(-counts // tile)).sum()) * num_kv_heads < wanted:
        tile = max(MIN_TILE_TOKENS, tile // 2)
    return tile
