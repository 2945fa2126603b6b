"""What the host knows of the pages that a step's requests read; a kernel lists them (triton_kernels.py).

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
