import numpy as np
import pytest

from replicas.cache.radix import RadixCache

PS = 2


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def put(cache: RadixCache, tokens: np.ndarray, first_page: int, salt: str = "") -> int:
    return cache.insert(tokens, np.arange(first_page, first_page + len(tokens) // PS, dtype=np.int32), salt)


def test_a_match_is_the_longest_prefix_in_whole_pages() -> None:
    """SPEC E02, E04: a page that agrees in part does not match; a rest shorter than a page is not looked at."""
    cache = RadixCache(PS)
    put(cache, ids(1, 2, 3, 4, 5, 6), 10)
    match = cache.match_prefix(ids(1, 2, 3, 4, 5, 9), "")
    assert (match.prefix_len, match.pages.tolist()) == (4, [10, 11])
    assert cache.match_prefix(ids(1, 2, 3), "").pages.tolist() == [10]
    assert cache.match_prefix(ids(1, 9, 3, 4), "").prefix_len == 0
    assert cache.match_prefix(ids(), "").prefix_len == 0
    cache.check()


def test_insert_returns_the_length_that_was_there_before() -> None:
    """SPEC E07, E18, K5: the text's example says 5; 2 were there."""
    cache = RadixCache(1)
    assert cache.insert(ids(1, 2), ids(1, 2), "") == 0
    assert cache.insert(ids(1, 2, 3, 4, 5), ids(3, 4, 5, 6, 7), "") == 2
    assert cache.match_prefix(ids(1, 2, 3, 4, 5), "").pages.tolist() == [1, 2, 5, 6, 7]
    assert cache.insert(ids(1, 2, 3, 4, 5), ids(8, 9, 10, 11, 12), "") == 5
    assert cache.evictable_pages == 5
    cache.check()


def test_a_partial_match_splits_and_the_lock_still_covers_the_whole_path() -> None:
    """SPEC E06, K12: the head takes its segment alone, with the locks; sizes do not change."""
    cache = RadixCache(PS)
    put(cache, ids(1, 2, 3, 4, 5, 6), 10)
    deep = cache.match_prefix(ids(1, 2, 3, 4, 5, 6), "")
    lock = cache.inc_lock_ref(deep.node)
    head = cache.match_prefix(ids(1, 2, 9, 9), "").node
    assert (head.pages.tolist(), deep.node.pages.tolist()) == ([10], [11, 12])
    assert (head.lock_ref, deep.node.lock_ref, deep.node.parent is head) == (1, 1, True)
    assert (cache.protected_pages, cache.evictable_pages, cache.num_nodes) == (3, 0, 2)
    cache.check()
    cache.dec_lock_ref(lock)
    assert (cache.protected_pages, cache.evictable_pages) == (0, 3)
    cache.check()


def test_peek_changes_nothing() -> None:
    cache = RadixCache(PS)
    put(cache, ids(1, 2, 3, 4), 10)
    put(cache, ids(5, 6), 12)
    assert cache.peek_len(ids(1, 2, 9, 9), "") == 2
    assert cache.num_nodes == 2  # not split
    assert cache.peek_len(ids(1, 2, 3, 4), "") == 4
    assert cache.evict(1).tolist() == [11]  # still the least recently used


def test_a_locked_page_is_never_evicted() -> None:
    """SPEC E11, E15: the path of the lock stays, what hangs below and beside it goes."""
    cache = RadixCache(PS)
    put(cache, ids(1, 2, 3, 4), 10)
    put(cache, ids(1, 2, 5, 6), 20)  # page 20 is the caller's: [1, 2] was there
    lock = cache.inc_lock_ref(cache.match_prefix(ids(1, 2, 3, 4), "").node)
    assert cache.evict(100).tolist() == [21]
    assert (cache.evictable_pages, cache.protected_pages) == (0, 2)
    cache.dec_lock_ref(lock)
    assert sorted(cache.evict(100).tolist()) == [10, 11]
    assert cache.num_nodes == 0
    cache.check()


def test_a_lock_comes_back_once() -> None:
    cache = RadixCache(PS)
    put(cache, ids(1, 2), 10)
    lock = cache.inc_lock_ref(cache.match_prefix(ids(1, 2), "").node)
    cache.dec_lock_ref(lock)
    with pytest.raises(AssertionError, match="given back twice"):
        cache.dec_lock_ref(lock)
    cache.check()


def test_salts_share_nothing_and_leave_no_trace() -> None:
    """SPEC E20."""
    cache = RadixCache(PS)
    put(cache, ids(1, 2), 10, "a")
    assert cache.match_prefix(ids(1, 2), "b").prefix_len == 0
    assert cache.match_prefix(ids(1, 2), "").prefix_len == 0
    assert put(cache, ids(1, 2), 11, "b") == 0
    assert cache.match_prefix(ids(1, 2), "b").pages.tolist() == [11]
    assert sorted(cache.evict(2).tolist()) == [10, 11]
    cache.check()  # also that no salt without pages has a root


def test_reset_gives_every_page_back_but_not_under_a_lock() -> None:
    """SPEC E03."""
    cache = RadixCache(PS)
    put(cache, ids(1, 2, 3, 4), 10)
    lock = cache.inc_lock_ref(cache.match_prefix(ids(1, 2), "").node)
    with pytest.raises(AssertionError, match="1 pages are locked"):
        cache.reset()
    cache.dec_lock_ref(lock)
    assert sorted(cache.reset().tolist()) == [10, 11]
    assert cache.match_prefix(ids(1, 2), "").prefix_len == 0
    assert cache.evict(1).tolist() == []
    cache.check()


def test_later_changes_of_the_callers_arrays_do_not_reach_the_tree() -> None:
    cache = RadixCache(PS)
    tokens, pages = ids(1, 2), ids(10)
    cache.insert(tokens, pages, "")
    tokens[:], pages[:] = 9, 9
    assert cache.match_prefix(ids(1, 2), "").pages.tolist() == [10]
    cache.check()
