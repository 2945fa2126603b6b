"""The contract of `PrefixCache`, run over every implementation. What only the radix cache does is in its own tests."""

import numpy as np
import pytest

from replicas.cache.base import ChunkCache, PrefixCache
from replicas.cache.radix import RadixCache

PS = 2
CACHES = {"radix": lambda: RadixCache(PS), "chunk": ChunkCache}


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def state(cache: PrefixCache) -> tuple[int, int, int, list[int]]:
    return cache.evictable_pages, cache.protected_pages, cache.num_nodes, sorted(cache.all_pages().tolist())


@pytest.fixture(params=CACHES)
def cache(request: pytest.FixtureRequest) -> PrefixCache:
    """A cache that was given [1..6] on pages 10 to 12, and [1, 2, 7, 8] on pages 10 and 20, as far as it keeps them."""
    made: PrefixCache = CACHES[request.param]()
    assert made.insert(ids(1, 2, 3, 4, 5, 6), ids(10, 11, 12), "") == 0
    made.insert(ids(1, 2, 7, 8), ids(10, 20), "")
    return made


def test_what_a_match_finds_is_what_the_cache_owns(cache: PrefixCache) -> None:
    owned = set(cache.all_pages().tolist())
    matches = [cache.match_prefix(tokens, "") for tokens in (ids(1, 2, 3, 4, 5, 6), ids(1, 2, 7, 8))]
    assert {page for match in matches for page in match.pages.tolist()} == owned
    assert owned in ({10, 11, 12, 20}, set())  # a cache keeps all that it is given, or nothing
    assert cache.evictable_pages + cache.protected_pages == len(owned)
    cache.check()


def test_a_match_is_in_whole_pages_and_peek_agrees_and_changes_nothing(cache: PrefixCache) -> None:
    for tokens in (ids(1, 2, 3, 9), ids(1, 2, 3, 4, 5), ids(9, 9), ids(1), ids()):
        before = state(cache)
        peeked = cache.peek_len(tokens, "")
        assert state(cache) == before
        match = cache.match_prefix(tokens, "")
        assert match.prefix_len == peeked == len(match.pages) * PS
    cache.check()


def test_insert_returns_the_length_that_was_there_and_takes_only_the_rest(cache: PrefixCache) -> None:
    known = cache.peek_len(ids(1, 2, 3, 4, 9, 9), "")
    before = set(cache.all_pages().tolist())
    assert cache.insert(ids(1, 2, 3, 4, 9, 9), ids(30, 31, 32), "") == known
    assert set(cache.all_pages().tolist()) - before <= set(ids(30, 31, 32)[known // PS :].tolist())
    cache.check()


def test_salts_share_nothing(cache: PrefixCache) -> None:
    assert cache.peek_len(ids(1, 2, 3, 4), "x") == cache.match_prefix(ids(1, 2, 3, 4), "x").prefix_len == 0
    assert cache.insert(ids(1, 2), ids(40), "x") == 0
    assert 40 not in cache.match_prefix(ids(1, 2), "").pages
    cache.evict(100)
    cache.check()  # also that no salt without pages has a root


def test_what_is_locked_is_not_evicted_until_the_receipt_comes_back_once(cache: PrefixCache) -> None:
    match = cache.match_prefix(ids(1, 2, 3, 4, 5, 6), "")
    lock, again = cache.inc_lock_ref(match.node), cache.inc_lock_ref(match.node)
    assert cache.protected_pages == len(match.pages)
    assert not set(cache.evict(100).tolist()) & set(match.pages.tolist())
    assert cache.match_prefix(ids(1, 2, 3, 4, 5, 6), "").pages.tolist() == match.pages.tolist()
    cache.dec_lock_ref(lock)
    assert cache.protected_pages == len(match.pages)  # `again` still pins it
    cache.dec_lock_ref(again)
    assert (cache.protected_pages, cache.evictable_pages) == (0, len(match.pages))
    with pytest.raises(AssertionError, match="given back twice"):
        cache.dec_lock_ref(lock)
    cache.check()


@pytest.mark.parametrize("num_pages", [0, 1, 2, 100])
def test_evict_frees_at_least_what_is_asked_or_all_and_forgets_it(cache: PrefixCache, num_pages: int) -> None:
    owned = set(cache.all_pages().tolist())
    freed = cache.evict(num_pages).tolist()
    assert len(freed) == len(set(freed)) >= min(num_pages, len(owned))
    assert set(cache.all_pages().tolist()) == owned - set(freed)
    assert cache.evictable_pages == len(owned) - len(freed)
    cache.check()


def test_reset_hands_every_page_back_and_leaves_nothing(cache: PrefixCache) -> None:
    owned = sorted(cache.all_pages().tolist())
    assert sorted(cache.reset().tolist()) == owned
    assert state(cache)[:2] == (0, 0)
    assert not len(cache.all_pages())
    assert cache.peek_len(ids(1, 2, 3, 4), "") == 0
    cache.check()
