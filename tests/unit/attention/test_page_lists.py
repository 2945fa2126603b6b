"""Lists of pages against the table from which they are made."""

import numpy as np
import pytest
import torch

from replicas.attention.page_lists import page_bounds, page_indices


def test_pages_are_listed_request_by_request_and_the_last_is_partly_full() -> None:
    """Pages of 4: 9 tokens are 3 pages, the last with 1; 4 tokens are 1 full page; 1 token is 1 page."""
    table = torch.zeros(3, 12, dtype=torch.int32)
    for row, pages in ((0, [5]), (1, [7, 2, 9]), (2, [3])):
        slots = [page * 4 + offset for page in pages for offset in range(4)]
        table[row, : len(slots)] = torch.tensor(slots)
    indptr, last = page_bounds(np.array([9, 4, 1], np.int32), 4)
    assert indptr.tolist() == [0, 3, 4, 5]
    assert last.tolist() == [1, 4, 1]
    rows = torch.tensor([1, 2, 0], dtype=torch.int32)
    assert page_indices(table, rows, indptr, 4).tolist() == [7, 2, 9, 3, 5]


def test_pages_that_a_group_reads_are_left_out() -> None:
    table = torch.arange(0, 32, dtype=torch.int32).view(2, 16) + 16  # pages of 4: row 0 has 4..7, row 1 has 8..11
    first = np.array([2, 0], np.int32)
    indptr, last = page_bounds(np.array([15, 6], np.int32), 4, first)
    assert indptr.tolist() == [0, 2, 4]
    assert last.tolist() == [3, 2]
    assert page_indices(table, torch.tensor([0, 1]), indptr, 4, first).tolist() == [6, 7, 8, 9]


def test_a_request_of_which_nothing_is_left_is_a_fault() -> None:
    with pytest.raises(AssertionError, match="reads a page"):
        page_bounds(np.array([8], np.int32), 4, np.array([2], np.int32))


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_lists_of_random_tables_give_back_every_slot(page_size: int) -> None:
    random = np.random.default_rng(page_size)
    seq_lens = random.integers(1, 100, 20).astype(np.int32)
    pages = random.permutation(20 * 100).reshape(20, 100).astype(np.int32)
    table = torch.from_numpy((pages[:, :, None] * page_size + np.arange(page_size)).reshape(20, -1).astype(np.int32))
    indptr, last = page_bounds(seq_lens, page_size)
    indices = page_indices(table, torch.arange(20), indptr, page_size).numpy()
    for b, length in enumerate(seq_lens.tolist()):
        own = indices[indptr[b] : indptr[b + 1]]
        slots = (own[:, None] * page_size + np.arange(page_size)).reshape(-1)[:length]
        assert slots.tolist() == table[b, :length].tolist()
        assert (len(own) - 1) * page_size + last[b] == length
