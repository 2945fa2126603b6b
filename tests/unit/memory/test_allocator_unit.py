from collections.abc import Callable

import numpy as np
import pytest

from replicas.errors import PagesExhausted
from replicas.memory.allocator import PagedTokenToKVPoolAllocator


def slots(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def test_the_first_pages_after_the_dummy_go_out_first() -> None:
    """SPEC D03: with pages of 4, the first 8 tokens live in slots 4 to 11. SPEC K9: page 0 is never handed out."""
    pages = PagedTokenToKVPoolAllocator(num_pages=4, page_size=4)
    assert pages.pages_to_slots(pages.alloc(2, rid="a")).tolist() == [4, 5, 6, 7, 8, 9, 10, 11]
    assert pages.alloc(2, rid="a").tolist() == [3, 4]
    pages.check()


@pytest.mark.parametrize(("num_pages", "page_size"), [(0, 4), (4, 0), (2**27, 16)])
def test_no_page_no_token_and_slots_beyond_int32_are_refused(num_pages: int, page_size: int) -> None:
    with pytest.raises(ValueError, match=f"{num_pages} pages of {page_size} tokens: both must be >= 1"):
        PagedTokenToKVPoolAllocator(num_pages, page_size)


@pytest.mark.parametrize(
    ("take", "says"),
    [
        (lambda pages: pages.alloc(2, rid="b"), "request b needs 2 pages, 1 of 3 are free: evict 1"),
        (lambda pages: pages.alloc_extend(6, 13, 9, rid="a"), "needs 2 pages, 1 of 3"),
        (lambda pages: pages.alloc_decode(slots(1, 1), slots(-1, -1)), "needs 2 pages, 1 of 3"),
    ],
)
def test_what_does_not_fit_takes_nothing_and_says_what_to_do(
    take: Callable[[PagedTokenToKVPoolAllocator], np.ndarray], says: str
) -> None:
    """SPEC D06, D07."""
    pages = PagedTokenToKVPoolAllocator(num_pages=3, page_size=4)
    held = pages.alloc_extend(0, 6, -1, rid="a")
    with pytest.raises(PagesExhausted, match=says):
        take(pages)
    assert pages.num_free == 1
    pages.free(np.unique(held // 4))
    pages.check()


def test_available_is_counted_in_tokens() -> None:
    """SPEC K14."""
    pages = PagedTokenToKVPoolAllocator(num_pages=4, page_size=16)
    pages.alloc(1, rid="a")
    assert (pages.num_free, pages.available_tokens) == (3, 48)


def test_extend_fills_the_last_page_then_takes_whole_pages_then_begins_one() -> None:
    """SPEC D05: pages of 4; 6 tokens are there, up to slot 9; 9 more take 2 + 4 + 3 slots."""
    pages = PagedTokenToKVPoolAllocator(num_pages=8, page_size=4)
    assert pages.alloc_extend(0, 6, -1, rid="a").tolist() == [4, 5, 6, 7, 8, 9]
    assert pages.alloc_extend(6, 15, 9, rid="a").tolist() == [10, 11, 12, 13, 14, 15, 16, 17, 18]
    assert pages.num_free == 4
    assert pages.alloc_extend(15, 16, 18, rid="a").tolist() == [19]  # fits the page: none is taken
    assert pages.num_free == 4
    pages.check()


def test_extend_refuses_a_last_slot_that_does_not_fit_the_prefix() -> None:
    """SPEC D06: (last slot + 1) and the prefix agree modulo the page."""
    pages = PagedTokenToKVPoolAllocator(num_pages=3, page_size=4)
    with pytest.raises(AssertionError, match="slot 10 is not at 5"):
        pages.alloc_extend(6, 7, 10, rid="a")


def test_decode_takes_a_page_only_where_the_last_is_full() -> None:
    """SPEC D07: lengths 5 (begins a page), 7 and 1 (the first token)."""
    pages = PagedTokenToKVPoolAllocator(num_pages=8, page_size=4)
    pages.alloc(3, rid="held")
    assert pages.alloc_decode(slots(5, 7, 1), slots(7, 13, -1)).tolist() == [16, 14, 20]
    assert pages.num_free == 3
    pages.check()


def test_a_page_of_one_token_is_a_slot() -> None:
    """SPEC D01."""
    pages = PagedTokenToKVPoolAllocator(num_pages=8, page_size=1)
    assert pages.alloc_extend(0, 3, -1, rid="a").tolist() == [1, 2, 3]
    assert pages.alloc_decode(slots(4, 1), slots(3, -1)).tolist() == [4, 5]
    pages.check()


def test_freeing_twice_is_noticed_and_frees_nothing() -> None:
    pages = PagedTokenToKVPoolAllocator(num_pages=4, page_size=4)
    held = pages.alloc(2, rid="a")
    for wrong, message in (([1, 1], "named twice"), ([1, 3], "are not held"), ([0], "not all in 1..4")):
        with pytest.raises(AssertionError, match=message):
            pages.free(wrong)
        assert pages.num_free == 2
    pages.free(held)
    with pytest.raises(AssertionError, match="double free"):
        pages.free(held)
    pages.check()
