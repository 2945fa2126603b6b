"""Cuts a step into tasks that threads take one by one: chunks of a decode batch, tiles of an extend batch.

Owns:      how a step is cut into tasks: numpy arrays that the kernels read.
Never:     touches K, V or queries.
Invariant: a request's chunks are cut at multiples of 128 of itself, whatever else is in the batch.
Thread:    the thread that runs the model.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from replicas.attention.cpu_decode import CHUNK
from replicas.scheduler.plan import PrefixGroup

Ints = npt.NDArray[np.int32]
TILE_ROWS = 192  # rows of an extend task: enough to pay for copying K and V, few enough for L2
MIN_TILE_TOKENS = 8
TASKS_PER_THREAD = 4  # tiles shrink until there are this many, so threads end together


@dataclass(frozen=True, slots=True, eq=False)
class DecodeTasks:
    """The tasks of a decode step as `cpu_decode.decode` reads them; each is for all KV heads."""

    tasks: Ints  # [N, 4] (first member, members, chunk, 0), those of several requests first
    members: Ints  # [M] requests
    first_partial: Ints  # [B + 1] results of a request's chunks: [first_partial[b], first_partial[b + 1])


def decode_tasks(seq_lens: Ints, groups: Sequence[PrefixGroup], *, first: int, max_members: int) -> DecodeTasks:
    """Make one task per chunk; a whole chunk that a group shares is one task, or a few of at most ``max_members``.

    Args: seq_lens: [B]. first: the request from which the groups count.
    """
    num_chunks = -(-seq_lens // CHUNK)  # [B]
    shared = np.zeros_like(num_chunks)  # [B] chunks that are read together with others
    parts: list[tuple[Ints, int]] = []  # members, chunks
    for group in groups:
        if group.length >= CHUNK and max_members > 1:
            members = group.members - np.int32(first)
            shared[members] = group.length // CHUNK
            num_parts = -(-len(members) // max_members)
            parts += [(part, group.length // CHUNK) for part in np.array_split(members, num_parts)]
    together, num_together = [], 0
    for part, chunks in parts:
        together += [(num_together, len(part), chunk, 0) for chunk in range(chunks)]
        num_together += len(part)
    alone = num_chunks - shared
    request = np.repeat(np.arange(len(seq_lens), dtype=np.int32), alone)
    ends = np.cumsum(alone, dtype=np.int32)
    tasks = np.zeros((len(together) + len(request), 4), np.int32)
    tasks[: len(together)] = np.array(together, np.int32).reshape(-1, 4)
    tasks[len(together) :, 0] = num_together + request
    tasks[len(together) :, 1] = 1
    tasks[len(together) :, 2] = np.arange(len(request), dtype=np.int32) - (ends - alone - shared)[request]
    everyone = np.arange(len(seq_lens), dtype=np.int32)
    first_partial = np.zeros(len(num_chunks) + 1, np.int32)
    np.cumsum(num_chunks, out=first_partial[1:])
    return DecodeTasks(tasks, np.concatenate([*(part for part, _ in parts), everyone]), first_partial)


def extend_tasks(counts: Ints, prefix_lens: Ints, *, tile: int, num_kv_heads: int) -> Ints:
    """Make one task per tile of queries and KV head; those with the most keys first.

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
    """Choose the tokens of a tile: as many as pay, fewer if threads would be without work."""
    tile = max(MIN_TILE_TOKENS, TILE_ROWS // group)
    wanted = TASKS_PER_THREAD * num_threads
    while tile > MIN_TILE_TOKENS and int((-(-counts // tile)).sum()) * num_kv_heads < wanted:
        tile = max(MIN_TILE_TOKENS, tile // 2)
    return tile
