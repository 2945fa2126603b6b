import numpy as np
import pytest

from replicas.cache.radix import RadixCache

PS = 2


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def put(cache: RadixCache, tokens: np.ndarray, first_page: int, salt: str = "") -> int:
    return cache.insert(tokens, np.arange(first_page, first_page + len(tokens) // PS, dtype=np.int32), salt)


def test_reset_gives_every_page_back_but_not_under_a_lock() -> None:
    """SPEC E03."""
    cache = RadixCache(PS)
    put(cache, ids(1, 2, 3, 4), 10)
    lock = cache.inc_lock_ref(cache.match_prefix(ids(1, 2), "").node)
    with pytest.raises(AssertionError, match="1 pages are locked"):
        cache.reset()
    cache.dec_lock_ref(lock)
    with pytest.raises(AssertionError, match="given back twice"):
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


ORDERS = {
    "lru": [1, 2, 3, 4],
    "mru": [4, 3, 2, 1],
    "fifo": [4, 2, 1, 3],
    "filo": [3, 1, 2, 4],
    "lfu": [3, 4, 2, 1],
    "slru": [3, 4, 1, 2],
    "priority": [2, 3, 1, 4],
    "tlru": [1, 2, 3, 4],
}


@pytest.mark.parametrize(("policy", "order"), ORDERS.items())
def test_each_policy_has_its_order(policy: str, order: list[int]) -> None:
    """SPEC E12, E19: a prompt of a page each, 1 used three times, then 2 twice, 3 and 4. Of two priorities of one
    prompt the higher holds."""
    cache = RadixCache(1, policy=policy)
    for token, priority in ((4, 0), (2, -1), (1, 2), (3, 0), (4, 5), (1, -3)):
        cache.insert(ids(token), ids(token), "", priority=priority)
    for token in (1, 1, 1, 2, 2, 3, 4):
        cache.match_prefix(ids(token), "")
    assert [int(cache.evict(1)[0]) for _ in range(4)] == order
    cache.check()


def test_tlru_takes_first_the_tail_that_a_next_turn_can_compute_in_time() -> None:
    """Of 3,000 tokens a next turn may compute 1,024: what begins after token 1,976 goes before what is older."""
    cache = RadixCache(1, policy="tlru")
    cache.insert(np.arange(1900, dtype=np.int32), np.arange(1, 1901, dtype=np.int32), "")
    old, long = np.arange(5000, 7000, dtype=np.int32), np.arange(3000, dtype=np.int32)
    cache.insert(old, np.arange(5000, 7000, dtype=np.int32), "")  # one run from 0: its head is worth keeping
    cache.match_prefix(long[:1900], "")
    cache.insert(long[:2000], np.arange(1, 2001, dtype=np.int32), "")
    cache.insert(long, np.arange(1, 3001, dtype=np.int32), "")
    assert cache.evict(1000).tolist() == list(range(2001, 3001))  # [2000, 3000), the last used: its turn is in time
    assert cache.evict(1).tolist() == [6999]  # [1900, 2000) begins before token 1,976: then it is lru
    cache.check()


def test_a_run_that_is_cut_in_two_changes_its_place_under_tlru() -> None:
    cache = RadixCache(1, policy="tlru")
    cache.insert(np.arange(2000, dtype=np.int32), np.arange(1, 2001, dtype=np.int32), "")
    cache.insert(np.arange(5000, 7000, dtype=np.int32), np.arange(5000, 7000, dtype=np.int32), "")
    cache.match_prefix(np.arange(5000, 6500, dtype=np.int32), "")  # its tail begins at 1,500 of 2,000 now
    cache.check()
    assert cache.evict(500).tolist() == list(range(6500, 7000))
    assert cache.evict(1).tolist() == [2000]
    cache.check()


def test_looking_up_ones_own_insertion_is_no_use() -> None:
    cache = RadixCache(1, policy="lfu")
    for token in (1, 2):
        cache.insert(ids(token), ids(token), "")
    cache.match_prefix(ids(1), "")
    for _ in range(5):
        cache.match_prefix(ids(2), "", count_hit=False)
    assert cache.evict(1).tolist() == [2]


def test_evicting_looks_only_at_what_goes_and_what_was_used_since() -> None:
    """Eviction does not scan: of 1,000 leaves, one eviction leaves the other 999 entries of the queue alone."""
    cache = RadixCache(1)
    for token in range(1000):
        cache.insert(ids(token), ids(token + 1), "")
    ranked = 0
    rank = cache._queue._rank

    def counting(node):  # type: ignore[no-untyped-def]
        nonlocal ranked
        ranked += 1
        return rank(node)

    cache._queue._rank = counting
    assert cache.evict(1).tolist() == [1]
    assert ranked == 1
    cache.match_prefix(ids(1), "")  # the next in line was used: it is looked at, filed anew, and its successor goes
    assert cache.evict(1).tolist() == [3]
    assert ranked == 1 + 3


def test_an_unknown_policy_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"unknown eviction policy 'arc'; allowed: \['fifo', 'filo', 'lfu', 'lru', "):
        RadixCache(1, policy="arc")


def test_what_is_kept_behind_a_sequence_is_told_across_pages_and_nodes() -> None:
    """From where a node ends, from within a page, and on into children; nothing behind another token."""
    cache = RadixCache(PS)
    put(cache, ids(1, 2, 3, 4, 5, 6), 10)
    put(cache, ids(1, 2, 3, 4, 5, 6, 7, 8, 9, 10), 20)
    top = cache.match_prefix(ids(1, 2), "").node  # now the tree is [1, 2] - [3 .. 6] - [7 .. 10]
    assert cache.num_nodes == 3
    for known, kept in [
        ((), [3, 4, 5, 6, 7, 8, 9, 10]), ((3,), [4, 5, 6, 7, 8, 9, 10]), ((3, 4, 5), [6, 7, 8, 9, 10]),
        ((3, 4, 5, 6), [7, 8, 9, 10]), ((3, 4, 5, 6, 7), [8, 9, 10]), ((3, 4, 5, 6, 7, 8, 9, 10), []),
        ((9,), []), ((3, 9), []), ((3, 4, 9), []), ((3, 4, 5, 9), []), ((3, 4, 5, 6, 9), []),
    ]:  # fmt: skip
        for most in (0, 1, 4, 9):
            assert cache.kept_behind(top, ids(*known), most).tolist() == kept[:most]


def test_of_several_that_go_on_alike_the_newest_is_told_and_nothing_changes() -> None:
    cache = RadixCache(PS)
    put(cache, ids(1, 2, 3, 4), 10)
    put(cache, ids(1, 2, 3, 5), 20)
    put(cache, ids(1, 2, 6, 7), 30)
    top = cache.match_prefix(ids(1, 2), "").node
    before = [(node.last_access, node.used_s, node.hit_count) for node in cache._nodes()]
    assert cache.kept_behind(top, ids(), 8).tolist() == [6, 7]
    assert cache.kept_behind(top, ids(3), 8).tolist() == [5]
    assert [(node.last_access, node.used_s, node.hit_count) for node in cache._nodes()] == before
    assert cache.evict(1).tolist() == [11]  # still the least recently used
    cache.check()
