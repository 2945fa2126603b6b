import numpy as np

from kvtransfer.pages import Tier, page_keys
from replicas.cache.events import AllCleared, EventLog, PagesRemoved, PagesStored, PartLog, PartsChanged
from replicas.cache.radix import RadixCache

PROMPT = np.arange(8, dtype=np.int32)
KEYS = page_keys(PROMPT, 2, "s").tolist()


def recorded() -> tuple[RadixCache, EventLog]:
    log = EventLog()
    cache = RadixCache(2, events=log)
    cache.insert(PROMPT[:4], np.array([1, 2], dtype=np.int32), "s")
    cache.insert(PROMPT, np.array([5, 6, 3, 4], dtype=np.int32), "s")
    return cache, log


def test_only_new_pages_make_an_event_with_the_key_that_they_follow() -> None:
    """SPEC E17."""
    _, log = recorded()
    first, second = log.drain()
    assert isinstance(first, PagesStored)
    assert isinstance(second, PagesStored)
    assert (first.seq, first.keys.tolist(), first.parent_key) == (1, KEYS[:2], None)
    assert (second.seq, second.keys.tolist(), second.parent_key) == (2, KEYS[2:], KEYS[1])
    assert (second.page_size, second.token_ids.tolist()) == (2, [4, 5, 6, 7])
    assert log.drain() == ()


def test_evicted_pages_and_a_reset_make_events() -> None:
    cache, log = recorded()
    log.drain()
    cache.evict(1)
    cache.evict(2)
    cache.reset()
    tail, rest_of_leaf, next_leaf, cleared = log.drain()
    assert isinstance(tail, PagesRemoved)
    assert isinstance(rest_of_leaf, PagesRemoved)
    assert isinstance(next_leaf, PagesRemoved)
    assert [event.keys.tolist() for event in (tail, rest_of_leaf, next_leaf)] == [[KEYS[3]], [KEYS[2]], [KEYS[1]]]
    assert isinstance(cleared, AllCleared)
    assert cleared.seq == log.seq == 6


def test_lost_events_show_as_a_gap_and_a_snapshot_fills_it() -> None:
    log = EventLog(capacity=1)
    cache = RadixCache(2, events=log)
    cache.insert(PROMPT[:4], np.array([1, 2], dtype=np.int32), "s")
    cache.insert(PROMPT, np.array([1, 2, 3, 4], dtype=np.int32), "s")
    (left,) = log.drain()
    assert left.seq == 2  # 1 is missing
    snapshot = cache.snapshot()
    assert snapshot.seq == 2
    assert [run.keys.tolist() for run in snapshot.stored] == [KEYS[:2], KEYS[2:]]
    assert [run.parent_key for run in snapshot.stored] == [None, KEYS[1]]


def test_nothing_is_hashed_unless_events_are_recorded() -> None:
    cache = RadixCache(2)
    cache.insert(PROMPT, np.array([1, 2, 3, 4], dtype=np.int32), "s")
    assert cache.match_prefix(PROMPT, "s").node.page_keys is None


def test_after_a_flush_parts_that_come_again_are_told_again() -> None:
    """Of the same keys, on the same pages, before anybody has heard of the flush."""
    log, part, pages = EventLog(), np.zeros(3, dtype=np.int32), np.array([1, 2], dtype=np.int32)
    log.parts = PartLog(part)
    told = []
    for _ in range(2):
        log.stored(np.array(KEYS[:2], dtype=np.uint64), None, 2, PROMPT[:4], pages=pages)
        part[1] = 1
        log.parts.on_host(KEYS[1], there=True)
        told.append([(each.keys.tolist(), each.tier) for each in log.drain() if isinstance(each, PartsChanged)])
        log.cleared()
        log.parts.forget(pages)
        log.parts.on_host(KEYS[1], there=False)
    assert told == [[(KEYS[:1], Tier.DEVICE), (KEYS[1:2], Tier.HOST)]] * 2
