"""Lists of pages against the table from which they are made."""

import numpy as np
import pytest
import torch
from torch import Tensor

from replicas.attention.base import BatchMeta
from replicas.attention.page_lists import Ints, page_bounds
from tests.gpu.device_steps import DEVICE
from tests.gpu.triton_or_skip import triton_paged


def listed(
    table: Tensor, rows: list[int], prefix_lens: Ints, seq_lens: Ints, page_size: int, *, window: int | None = None
) -> tuple[list[int], list[int], list[int]]:
    """indptr, indices and last_page_len as the kernel writes them, for all requests but the first, and indices anew."""
    numbers = [torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (rows, prefix_lens, seq_lens)]
    rows_there, prefixes, lens = numbers
    batch = BatchMeta(
        is_decode=False, qo_indptr=lens, rows=rows_there, prefix_lens=prefixes, seq_lens=lens, positions=lens,
        out_slots=lens, table=table.to(DEVICE), max_seq_len=0, num_tokens=0,
    )  # fmt: skip
    room = len(rows) * table.shape[1]
    lists = tuple(torch.zeros(num, dtype=torch.int32, device=DEVICE) for num in (len(rows), room, len(rows) - 1))
    triton_paged.list_pages(batch, slice(1, None), page_size, lists, window=window)  # type: ignore[arg-type]
    indptr, indices, last = (x.tolist() for x in lists)
    fresh = triton_paged.list_pages(batch, slice(1, None), page_size, indptr[-1], window=window)
    assert fresh.tolist() == indices[: indptr[-1]]
    assert not any(indices[indptr[-1] :])
    return indptr, fresh.tolist(), last


def test_pages_are_listed_request_by_request_and_the_last_is_partly_full() -> None:
    """Pages of 4: 9 tokens are 3 pages, the last with 1; 4 tokens are 1 full page; 1 token is 1 page."""
    table = torch.zeros(3, 12, dtype=torch.int32)
    for row, pages in ((0, [5]), (1, [7, 2, 9]), (2, [3])):
        slots = [page * 4 + offset for page in pages for offset in range(4)]
        table[row, : len(slots)] = torch.tensor(slots)
    indptr, last = page_bounds(np.array([9, 4, 1], np.int32), 4)
    assert indptr.tolist() == [0, 3, 4, 5]
    assert last.tolist() == [1, 4, 1]
    lens = np.array([2, 9, 4, 1], np.int32)
    assert listed(table, [0, 1, 2, 0], lens - 1, lens, 4) == ([0, 3, 4, 5], [7, 2, 9, 3, 5], [1, 4, 1])


def test_pages_before_the_window_of_the_first_new_token_are_left_out() -> None:
    """Of 7: the new tokens of one request are 13 and 14, of the other 5."""
    table = torch.arange(0, 32, dtype=torch.int32).view(2, 16) + 16  # pages of 4: row 0 has 4..7, row 1 has 8..11
    first = np.array([1, 0], np.int32)
    lens, prefixes = np.array([15, 6], np.int32), np.array([13, 5], np.int32)
    indptr, last = page_bounds(lens, 4, first)
    assert (indptr.tolist(), last.tolist()) == ([0, 3, 5], [3, 2])
    made = listed(table, [0, 0, 1], np.append(0, prefixes), np.append(1, lens), 4, window=7)
    assert made == ([0, 3, 5], [5, 6, 7, 8, 9], [3, 2])


def test_a_request_of_which_nothing_is_left_is_a_fault() -> None:
    with pytest.raises(AssertionError, match="reads a page"):
        page_bounds(np.array([8], np.int32), 4, np.array([2], np.int32))


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_lists_of_random_tables_give_back_every_slot(page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program lists 8 pages at a time, and adds up those of 8 requests."""
    monkeypatch.setattr(triton_paged, "LISTED", 8)
    random = np.random.default_rng(page_size)
    seq_lens = random.integers(1, 100, 20).astype(np.int32)
    pages = random.permutation(20 * 100).reshape(20, 100).astype(np.int32)
    table = torch.from_numpy((pages[:, :, None] * page_size + np.arange(page_size)).reshape(20, -1).astype(np.int32))
    indptr, last = page_bounds(seq_lens, page_size)
    lens = np.append(1, seq_lens)
    made = listed(table, [0, *range(20)], lens - 1, lens, page_size)
    assert (made[0], made[2]) == (indptr.tolist(), last.tolist())
    indices = np.array(made[1])
    for b, length in enumerate(seq_lens.tolist()):
        own = indices[indptr[b] : indptr[b + 1]]
        slots = (own[:, None] * page_size + np.arange(page_size)).reshape(-1)[:length]
        assert slots.tolist() == table[b, :length].tolist()
        assert (len(own) - 1) * page_size + last[b] == length
