"""The pages that the requests of a step read, as one list: the input of kernels that take page tables.

Owns:      the arithmetic from slots to pages, on the table's device: the host sends a few numbers per request.
Invariant: request b's pages are indices[indptr[b] : indptr[b + 1]], in order of position; its last page holds
           last_page_len[b] tokens, 1 to page_size.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints = npt.NDArray[np.int32]


def to_device(array: npt.NDArray[np.number[Any]], device: torch.device) -> Tensor:
    """Copy ``array`` to ``device`` for work of the current stream, without waiting. PyTorch keeps the pinned copy
    until it is read."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def page_bounds(seq_lens: Ints, page_size: int, first_pages: Ints | None = None) -> tuple[Ints, Ints]:
    """Compute indptr [B + 1] and last_page_len [B] of requests with ``seq_lens`` [B] tokens, each at least 1.

    Args: first_pages: [B] pages of each request that are left out from its beginning; at least one remains.
    """
    pages = -(-seq_lens // page_size)
    if first_pages is not None:
        pages = pages - first_pages
    assert (pages > 0).all(), "every request reads a page"
    indptr = np.zeros(len(seq_lens) + 1, np.int32)
    np.cumsum(pages, out=indptr[1:])
    return indptr, ((seq_lens - 1) % page_size + 1).astype(np.int32)


def page_indices(
    table: Tensor, rows: Tensor, indptr: Ints, page_size: int, first_pages: Ints | None = None
) -> Tensor:
    """List the pages [indptr[-1]] int32 on the table's device, without waiting for it.

    Args: table: [R, C] slot of (row, position). rows: [B] rows of the requests.
    """
    total = int(indptr[-1])
    starts = indptr[:-1] if first_pages is None else indptr[:-1] - first_pages  # where its page 0 is, or would be
    counts, starts_there = to_device(np.stack((np.diff(indptr), starts)).astype(np.int64), table.device)  # [B] each
    request = torch.repeat_interleave(counts, output_size=total)  # [N]; with the size given, no device read
    place = torch.arange(total, device=table.device) - starts_there[request]  # page within its request
    return table[rows.long()[request], place * page_size] // page_size
