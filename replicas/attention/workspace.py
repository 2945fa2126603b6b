"""The device memory that attention on a GPU takes beside the pool: set aside before the pool is sized.

Owns:      the formulas of FlashInfer's plans (scheduler.cuh of 0.6.13) for the partial results of split keys.
Never:     allocates.
Invariant: a step planned within `workspace_bytes` never overflows FlashInfer's float workspace.
"""

import torch

MIN_BYTES = 128 << 20  # what FlashInfer recommends
INT_BYTES = 8 << 20  # of each wrapper, by its constructor
PROMPT_TILE = 128  # new tokens in a tile of FA3
EAGER_WRAPPERS = 3  # extend twice, decode


def workspace_bytes(*, num_heads: int, num_kv_heads: int, head_dim: int, graph_rows: int, num_sms: int) -> int:
    """Compute FlashInfer's float workspace: fp32 results and sums of every query row of each tile with split keys.

    Args: graph_rows: of the largest decode step in a CUDA graph, whose tiles are counted whether they are split or not;
          0 without graphs. num_sms: multiprocessors, two programs on each.
    """
    group = num_heads // num_kv_heads
    split_tiles = 2 * num_sms // num_kv_heads
    rows = split_tiles * _tile(1 << 20, head_dim)  # the largest tile: a chunk of a prompt
    if graph_rows:
        tile = _tile(group, head_dim)
        rows = max(rows, tile * max(split_tiles, -(-graph_rows * group // tile) + graph_rows - 1))
    return max(MIN_BYTES, 4 * num_heads * rows * (head_dim + 1) + 64)


def attention_bytes(
    *, num_heads: int, num_kv_heads: int, head_dim: int, graph_rows: int, num_sms: int, max_pages: int
) -> int:
    """Compute all that FlashInfer takes, except the integers of a graph's wrapper, which runner/graphs.py counts.

    Args: max_pages: of a request; graphs have place for the page numbers of ``graph_rows`` such.
    """
    floats = workspace_bytes(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, graph_rows=graph_rows, num_sms=num_sms
    )
    return floats + EAGER_WRAPPERS * INT_BYTES + 4 * graph_rows * max_pages


def num_sms(device: torch.device) -> int:
    """Count the multiprocessors of ``device``; 1 on a CPU, where tests run."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def filling_tokens(num_heads: int, device: torch.device) -> int:
    """Compute the new tokens of one request whose tiles (PROMPT_TILE by one head) are one for each multiprocessor."""
    return PROMPT_TILE * -(-num_sms(device) // num_heads)


def _tile(rows: int, head_dim: int) -> int:
    """Return the query rows (tokens x heads of a group) that a program takes of a request with ``rows``."""
    if rows > 64 and head_dim < 256:
        return 128
    return 64 if rows > 16 else 16
