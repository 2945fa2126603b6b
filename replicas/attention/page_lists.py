"""Which pages the requests of a step read, as lists behind one another: what kernels for page tables want.

Owns:      the arithmetic from slots to pages; nothing else.
Invariant: request b's pages are indices[indptr[b] : indptr[b + 1]], in order of position; its last page holds
           last_page_len[b] tokens, 1 to page_size.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints = npt.NDArray[np.int32]


def page_bounds(seq_lens: Ints, page_size: int, first_pages: Ints | None = None) -> tuple[Ints, Ints]:
    """indptr [B + 1] and last_page_len [B] of requests with ``seq_lens`` [B] tokens, each at least 1.

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
    """The pages [indptr[-1]] int32, on the table's device; nothing there is waited for.

    Args: table: [R, C] slot of (row, position). rows: [B] rows of the requests.
    """
    place = np.arange(indptr[-1], dtype=np.int64) - np.repeat(indptr[:-1], np.diff(indptr))  # page within its request
    if first_pages is not None:
        place += np.repeat(first_pages, np.diff(indptr))
    request = np.repeat(np.arange(len(indptr) - 1, dtype=np.int64), np.diff(indptr))
    where = torch.from_numpy(np.stack((request, place * page_size))).to(table.device, non_blocking=True)  # [2, N]
    return table[rows.long()[where[0]], where[1]] // page_size
