from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvtransfer.layout import Carried
from replicas.cache.kv import KvCache, came, carried_parts, handed_len, see_no_more
from replicas.cache.parts import SnapshotAllocator
from replicas.config import CacheConfig
from replicas.errors import InvalidRequest, PagesExhausted
from replicas.memory.sizing import WindowPool
from replicas.request import Req
from replicas.types import Finish, FinishReason
from tests.harness import choice_of, pool_of


def make(**changes: Any) -> KvCache:
    return KvCache(**({"size": pool_of(8, 4), "max_requests": 4, "context_len": 64} | changes))


def prefill(kv: KvCache, req: Req, length: int | None = None) -> list[int]:
    """Admit if need be, take slots for ``length`` tokens, compute and commit them. Returns the slots."""
    if req.holding is None:
        kv.admit(req)
    slots = kv.extend(req, length or req.num_tokens)
    req.computed_len = length or req.num_tokens
    kv.commit(req)
    return slots.tolist()


def held(kv: KvCache, rid: str, length: int) -> Req:
    """Make a request that has slots for all of its ``length`` tokens 0, 1, ...; none is computed."""
    req = choice_of(rid, range(length))
    kv.admit(req)
    kv.extend(req, length)
    return req


def prefilled(kv: KvCache, rid: str, length: int) -> Req:
    """Make a request whose ``length`` tokens 0, 1, ... are computed and committed."""
    req = choice_of(rid, range(length))
    prefill(kv, req)
    return req


def decode(kv: KvCache, *reqs: Req) -> list[int]:
    """A sampled token each, and a slot for it."""
    for req in reqs:
        req.append(100 + req.num_tokens)
    slots = kv.extend_decode(reqs)
    for req in reqs:
        req.computed_len = req.num_tokens
    return slots.tolist()


def pages(kv: KvCache) -> tuple[int, int, int, int, int]:
    pool = kv.store.stats()
    return pool.free_pages, pool.evictable_pages, pool.protected_pages, pool.reserved_pages, pool.quarantined_pages


def test_an_idle_check_counts_what_nobody_holds_and_nothing_else() -> None:
    """SPEC D16: quarantine with and without a lock; a row, alone or with pages; a lost page, and a lost lock."""
    kv = make()

    def fails() -> bool:
        before = kv.store.failed_checks
        kv.check_idle()
        return kv.store.failed_checks > before

    kv.release(prefilled(kv, "first", 9), keep=True)
    assert not fails()
    receipts = []
    for locked in (True, False):
        req = prefilled(kv, "second", 11)
        assert fails()  # no request is open, says who calls
        receipts.append(kv.quarantine(req, locked=locked))
        assert not fails()
    for receipt in receipts:
        kv.store.release_quarantined(receipt)
        assert not fails()
    row = kv.table.alloc()
    assert fails()
    kv.table.free(row)
    assert not fails()
    page = kv.store.allocator.alloc(1, rid="a leak")
    assert fails()
    kv.store.allocator.free(page)
    assert not fails()
    lock = kv.store.cache.inc_lock_ref(kv.cache.match_prefix(np.arange(8, dtype=np.int32), "").node)
    assert fails()
    kv.store.cache.dec_lock_ref(lock)
    assert not fails()


def test_a_second_request_reuses_whole_pages_but_runs_at_least_one_token() -> None:
    """SPEC E08: ten tokens leave two whole pages; the tail is freed. Eight equal tokens reuse one page, not two."""
    kv = make()
    first = prefilled(kv, "a", 10)
    kv.release(first, keep=True)
    assert (first.holding, first.computed_len, pages(kv)) == (None, 0, (6, 2, 0, 0, 0))
    equal, longer = choice_of("b", range(8)), choice_of("c", range(9))
    assert (kv.admit(equal), kv.admit(longer)) == (4, 8)
    assert (longer.computed_len, pages(kv)) == (8, (6, 0, 2, 0, 0))
    kv.check([equal, longer])


def test_tokens_whose_successors_logprob_is_wanted_are_run_again() -> None:
    """The logprob of position 6 comes out of running position 5: at most 5 tokens, one page of 4, may be reused."""
    kv = make()
    prefilled(kv, "a", 12)
    assert kv.admit(choice_of("b", range(12), prompt_logprobs_from=6)) == 4
    assert kv.admit(choice_of("c", range(12), prompt_logprobs_from=0)) == 0


def test_commit_swaps_the_requests_duplicates_for_the_trees_pages() -> None:
    """SPEC E09, K5: both computed [0, 8); the second frees its two pages and its row walks through the first's."""
    kv = make()
    a, b = choice_of("a", range(10)), choice_of("b", range(10))
    kv.admit(a)
    kv.admit(b)
    slots = {req.rid: kv.extend(req, 10).tolist() for req in (a, b)}
    assert pages(kv) == (2, 0, 0, 6, 0)
    kv.table.drain_writes()
    for req in (a, b):
        req.computed_len = 10
        kv.commit(req)
    assert b.holding is not None
    assert b.holding.prefix_len == 8
    writes = [(row, start, new.tolist()) for row, start, new in kv.table.drain_writes()]
    assert writes == [(b.holding.row, 0, slots["a"][:8])]
    assert pages(kv) == (4, 0, 2, 2, 0)  # the tails stay with their requests
    kv.check([a, b])


def test_extend_evicts_unused_pages_before_it_fails() -> None:
    """SPEC D10: evict first, fail with the pool's state, take nothing."""
    kv = make()
    old = choice_of("old", range(100, 124))
    prefill(kv, old)
    kv.release(old, keep=True)
    req = choice_of("new", range(40))
    kv.admit(req)
    kv.extend(req, 16)  # 4 pages: 2 were free
    assert (kv.store.evicted_tokens, pages(kv)) == (8, (0, 4, 0, 4, 0))
    with pytest.raises(PagesExhausted, match=r"request new needs 5 pages .* 0 are free, 4 evictable, 0 protected"):
        kv.extend(req, 36)
    assert (kv.store.evicted_tokens, kv.store.alloc_failures, pages(kv)) == (8, 1, (0, 4, 0, 4, 0))
    kv.check([req])


def test_flush_empties_the_cache_unless_a_request_holds_pages() -> None:
    kv = make()
    req = prefilled(kv, "busy", 12)
    with pytest.raises(InvalidRequest, match="in use by busy"):
        kv.flush()
    kv.release(req, keep=True)
    kv.flush()
    assert pages(kv) == (8, 0, 0, 0, 0)
    kv.check([])


def test_events_are_recorded_only_when_asked_for() -> None:
    for record, seq in ((True, 1), (False, 0)):
        kv = make(record_events=record)
        prefill(kv, choice_of("a", range(8)))
        assert (kv.store.event_seq, len(kv.store.drain_events()), len(kv.store.snapshot().stored)) == (seq, seq, seq)


def test_a_lost_page_is_noticed() -> None:
    """The leak check can fail (SPEC D16)."""
    kv = make()
    kv._allocator.alloc(1, rid="leak")
    with pytest.raises(AssertionError, match="a page is lost or in two places"):
        kv.check([])


def test_a_receiver_keeps_its_own_pages_apart_and_lets_the_prefix_go() -> None:
    """SPEC H19. Two of five pages are the tree's: a peer may still write to the others."""
    kv = make()
    kv.release(prefilled(kv, "before", 8), keep=True)
    req = choice_of("a", range(18))
    assert kv.admit(req, whole=True) == 8
    kv.extend(req, 18)
    assert pages(kv) == (3, 0, 2, 3, 0)
    assert kv.pages(req, 2, 5).tolist() == [3, 4, 5]
    receipt = kv.quarantine(req, locked=False)
    assert (req.holding, req.computed_len) == (None, 0)
    assert pages(kv) == (3, 2, 0, 0, 3)
    kv.check([])
    kv.store.release_quarantined(receipt)
    assert pages(kv) == (6, 2, 0, 0, 0)
    kv.check([])


def test_a_sender_keeps_what_the_tree_has_locked_too() -> None:
    kv = make()
    req = prefilled(kv, "a", 18)
    receipt = kv.quarantine(req, locked=True)
    assert pages(kv) == (3, 0, 4, 0, 1)
    kv.check([])
    other = choice_of("b", range(30))
    kv.admit(other)
    with pytest.raises(PagesExhausted, match="4 protected and 0 reserved, 1 in quarantine"):
        kv.extend(other, 30)  # nothing of it can be evicted
    kv.release(other, keep=False)
    kv.store.release_quarantined(receipt)
    assert pages(kv) == (4, 4, 0, 0, 0)
    kv.check([])


def test_a_whole_sequence_may_be_reused_when_no_token_has_to_run_here() -> None:
    kv = make()
    kv.release(prefilled(kv, "before", 8), keep=True)
    req = choice_of("a", range(8))
    assert kv.admit(req, whole=True) == 8
    assert len(kv.extend(req, 8)) == 0
    kv.check([req])


def test_flush_refuses_while_a_peer_may_use_pages() -> None:
    kv = make()
    req = held(kv, "slow", 8)
    receipt = kv.quarantine(req, locked=True)
    assert kv.in_use
    with pytest.raises(InvalidRequest, match="in use by slow"):
        kv.flush()
    kv.store.release_quarantined(receipt)
    assert not kv.in_use
    kv.flush()


def test_a_receipt_is_given_back_once() -> None:
    kv = make()
    req = held(kv, "a", 8)
    receipt = kv.quarantine(req, locked=False)
    kv.store.release_quarantined(receipt)
    with pytest.raises(AssertionError, match="have left quarantine before"):
        kv.store.release_quarantined(receipt)


def test_a_whole_prefix_that_a_higher_priority_reused_outlives_what_came_after_it() -> None:
    """``eviction: priority``; nothing was computed behind it, so its use alone raises it."""
    kv = make(cache=CacheConfig(eviction="priority"))
    first, other = list(range(8)), list(range(50, 58))
    for number, (prompt, priority) in enumerate([(first, 0), (first, 5), (other, 0)]):
        req = choice_of(f"r{number}", prompt, priority=priority)
        kv.admit(req, whole=True)
        kv.extend(req, 8)
        req.computed_len = 8
        kv.release(req, keep=True)
    kv.store.make_room(6, "a test")
    left = [kv.cache.match_prefix(np.array(prompt, dtype=np.int32), "").prefix_len for prompt in (first, other)]
    assert left == [8, 0]


def test_a_row_that_walks_through_another_prefix_than_the_trees_is_noticed() -> None:
    """SPEC B05: the pages are there, whole, and another prompt's."""
    kv = make()
    kv.release(prefilled(kv, "other", 9), keep=True)
    wrong = kv.cache.match_prefix(np.arange(4, dtype=np.int32), "").pages
    kv.release(_computed(kv, "own", [70, 71, 72, 73, 74]), keep=True)
    choice = choice_of("again", [70, 71, 72, 73, 75])
    kv.admit(choice)
    kv.check([choice])
    assert choice.holding is not None
    kv.table._slots[choice.holding.row, :4] = kv.store.allocator.pages_to_slots(wrong)
    with pytest.raises(AssertionError, match="B05"):
        kv.check([choice])


def _computed(kv: KvCache, rid: str, prompt: list[int]) -> Req:
    req = choice_of(rid, prompt)
    prefill(kv, req)
    return req


@pytest.mark.parametrize(("num_snapshots", "whole"), [(0, True), (2, False)])
def test_all_of_a_prompt_in_progress_is_kept_but_behind_a_snapshot(num_snapshots: int, whole: bool) -> None:
    kv = make(size=replace(pool_of(8, 4), num_snapshots=num_snapshots))
    req = choice_of("mid", range(1, 20))
    kv.admit(req)
    kv.extend(req, 8)
    req.computed_len = 8
    assert kv.keeps(req)
    assert kv.keeps(req, whole=True) is whole


def test_a_request_that_is_refused_after_it_was_admitted_copies_no_state_is_no_hit_and_ages_nothing() -> None:
    """As one that finds no memory beside others, at each look."""
    kv = make(size=replace(pool_of(8, 4), num_snapshots=2))
    parts = kv.store.parts
    assert isinstance(parts, SnapshotAllocator)
    first = choice_of("first", range(1, 10))
    kv.admit(first)
    kv.extend(first, 9)
    first.computed_len = 9
    kv.commit(first)
    kv.release(first, keep=True)
    assert [copy.from_snapshot for copy in parts.drain()] == [False]
    before, worth = parts._worth._gone_on.sum(), parts.worth().tolist()
    for _ in range(3):
        again = choice_of("again", range(1, 12))
        assert kv.admit(again) == 8
        kv.release(again, keep=False)
    assert (parts.drain(), parts._worth._gone_on.sum(), parts.worth().tolist()) == ([], before, worth)
    kv.admit(again)
    kv.extend(again, 11)
    again.computed_len = 11
    kv.commit(again)
    assert [copy.from_snapshot for copy in parts.drain()] == [True]
    assert parts._worth._gone_on.sum() == before + 1


def test_pages_behind_the_window_are_seen_by_nobody_and_their_parts_may_go() -> None:
    """Window layers see 8 tokens; 16 pages of 4 have 13 parts. A text of 40 tokens goes on, ends, and is gone on with;
    then another one needs 6 parts, which are of those that no end of a text needs."""
    windows = WindowPool.of(13, page_size=4, cell_bytes=1, reach=8, step_tokens=4)
    kv = make(size=pool_of(16, 4, windows))
    req = prefilled(kv, "a", 40)
    kv.check([req])
    for _ in range(5):
        decode(kv, req)
        kv.check([req])
    kv.release(req, keep=True)
    kv.check([])
    again = choice_of("b", [*range(40), 1, 2])
    assert kv.admit(again) == 40
    kv.check([again])
    prefill(kv, again)
    kv.check([again])
    kv.release(again, keep=True)
    kv.check([])
    other = choice_of("c", range(100, 124))
    prefill(kv, other)
    kv.release(other, keep=True)
    for prompt in ([*range(40), 3], [*range(100, 124), 3]):
        last = choice_of(f"d{prompt[0]}", prompt)
        assert kv.admit(last) == len(prompt) - 1
        kv.release(last, keep=False)
    reused = list[int]()
    for num_pages in range(1, 10):
        inside = choice_of(f"e{num_pages}", [*range(4 * num_pages), 3])
        reused.append(kv.admit(inside) // 4)
        kv.check([inside])  # it sees no hole
        kv.release(inside, keep=False)
    assert reused != list(range(1, 10))
    parts: Any = kv.store.parts
    assert (parts.reserved, parts.evicted > 0) == (0, True)
    parts.reserved = 13
    assert kv.store.available_tokens() == 0


@pytest.mark.parametrize("num_made", [5, 1])
@pytest.mark.parametrize("finish", [None, Finish(reason=FinishReason.LENGTH)], ids=["retracted", "ended"])
def test_what_a_request_leaves_in_a_window_pool_outlasts_what_came_before_it(
    finish: Finish | None, num_made: int
) -> None:
    """A prompt of whole pages of 4, and an answer of more than one page, or of less than one."""
    windows = WindowPool.of(13, page_size=4, cell_bytes=1, reach=8, step_tokens=4)
    kv = make(size=pool_of(16, 4, windows))
    first, second = choice_of("first", range(100, 117)), choice_of("second", range(16))
    for req in (first, second):
        prefill(kv, req)
        for _ in range(num_made):
            decode(kv, req)
        req.finish = finish if req is second else Finish(reason=FinishReason.LENGTH)
        kv.release(req, keep=True)
    kv.store.make_room(9, "a test")
    assert kv.cache.peek_len(second.ids[: second.num_tokens], "") == (16 + num_made) // 4 * 4
    assert kv.cache.peek_len(first.ids[:17], "") == 0
    kv.check([])


def test_all_that_goes_over_of_a_window_stays_while_its_request_is_here() -> None:
    """Window layers see 6 tokens: behind 12 in pages of 4 the next token sees two pages, and one at the border before
    the last page, where the same prompt may be asked for again, three. Ten others need all parts that may go."""
    windows = WindowPool.of(0, page_size=4, cell_bytes=1, reach=6, step_tokens=12, drafted=3)
    kv = make(size=pool_of(64, 4, windows), carried=Carried(window_pages=3, window_layers=1))
    req = prefilled(kv, "a", 12)
    for start in range(100, 1100, 100):
        other = choice_of(f"{start}", range(start, start + 12))
        prefill(kv, other)
        kv.release(other, keep=True)
        kv.check([req])
    assert kv.store.parts is not None
    assert kv.store.parts.evicted > 10
    parts = carried_parts(kv.pages(req, 0, 3), kv)
    assert len(parts) == 3
    assert parts.all()
    kv.release(req, keep=False)


def test_pages_that_come_take_no_parts_before_they_are_here_and_then_those_of_the_last_window() -> None:
    """Of 10 pages of 4 that another replica computes, the last three have parts: window layers see 6 tokens."""
    windows = WindowPool.of(0, page_size=4, cell_bytes=1, reach=6, step_tokens=12, drafted=3)
    kv = make(size=pool_of(64, 4, windows), carried=Carried(window_pages=3, window_layers=1))
    req, again = choice_of("a", range(40)), choice_of("b", [*range(40), 7])
    kv.admit(req, whole=True)
    kv.extend(req, handed_len(req, kv))
    kv.check([req])
    assert kv.store.parts is not None
    assert kv.store.parts.parts.num_free == windows.num_pages
    kv.table.drain_writes()
    assert np.count_nonzero(came(req, kv, 40)) == 3
    assert [(start, len(slots)) for _, start, slots in kv.table.drain_writes()] == [(28, 12)]
    req.computed_len = 40
    kv.cut(req)
    kv.commit(req)
    kv.check([req])
    assert kv.store.parts.parts.num_free == windows.num_pages - 3
    assert kv.admit(again) == 40
    for each in (req, again):
        kv.release(each, keep=True)
    kv.check([])


@pytest.mark.parametrize("arrives", [False, True])
def test_windows_that_came_and_could_not_be_taken_over_are_in_no_cache(*, arrives: bool) -> None:
    """Of a prompt that the tree has whole, whose parts are gone."""
    windows = WindowPool.of(0, page_size=4, cell_bytes=1, reach=6, step_tokens=12, drafted=3)
    kv = make(size=pool_of(64, 4, windows), carried=Carried(window_pages=3, window_layers=1))
    before, parts = choice_of("before", range(40)), kv.store.parts
    for end in (12, 24, 36, 40):
        prefill(kv, before, end)
    kv.release(before, keep=True)
    assert parts is not None
    parts._give_up(kv.cache.match_prefix(np.arange(40, dtype=np.int32), "").pages)
    req, again = choice_of("a", range(40)), choice_of("b", [*range(40), 7])
    assert kv.admit(req, whole=True) == 40
    kv.extend(req, handed_len(req, kv))
    taken = came(req, kv, 40)
    assert np.count_nonzero(taken) == 3
    if not arrives:
        see_no_more(req, kv, taken)
        kv.check([req])
    kv.release(req, keep=False)
    kv.check([])
    assert parts.parts.num_free == windows.num_pages - 3 * arrives
    assert kv.admit(again) == 40 * arrives
    kv.release(again, keep=False)


def test_parts_of_a_window_that_are_here_do_not_go_for_those_that_come() -> None:
    """Of three, the first is gone. All that are free are taken, and these two are older than others that may go."""
    windows = WindowPool.of(0, page_size=4, cell_bytes=1, reach=6, step_tokens=12, drafted=3)
    kv = make(size=pool_of(64, 4, windows), carried=Carried(window_pages=3, window_layers=1))
    parts = kv.store.parts
    assert parts is not None
    for first in (0, 100):
        prefill(kv, req := choice_of("before", range(first, first + 12)))
        kv.release(req, keep=True)
    parts._give_up(kv.cache.match_prefix(np.arange(12, dtype=np.int32), "").pages[:1])
    taken = parts.parts.alloc(parts.parts.num_free, rid="a test")
    req = choice_of("a", range(12))
    kv.admit(req, whole=True)
    assert np.count_nonzero(came(req, kv, 12)) == 1
    parts.parts.free(taken)
    kv.release(req, keep=True)
    assert kv.admit(req, whole=False) == 8
    kv.release(req, keep=False)
    kv.check([])


def test_a_request_whose_windows_were_copied_to_be_sent_leaves_its_parts_to_others() -> None:
    """The pool holds one request's parts, and a step's."""
    windows = WindowPool.of(0, page_size=4, cell_bytes=1, reach=6, step_tokens=12, drafted=3)
    kv = make(size=pool_of(64, 4, windows), carried=Carried(window_pages=3, window_layers=1))
    req, other = choice_of("a", range(30)), choice_of("b", range(100, 130))
    for end in (12, 24, 30):
        prefill(kv, req, end)
    assert kv.store.parts is not None
    kv.extend(req, handed_len(req, kv), carries=True)
    kv.admit(other)
    assert kv.store.parts.overbooked
    see_no_more(req, kv)
    assert not kv.store.parts.overbooked
    for end in (12, 24, 30):
        prefill(kv, other, end)
        kv.check([req, other])
    for each in (req, other):
        kv.release(each, keep=True)
    kv.check([])


def test_guesses_get_slots_only_where_all_fit() -> None:
    """Two pages of 4: with 6 tokens two guesses fit, three do not."""
    kv = make(size=pool_of(2, 4))
    req = prefilled(kv, "a", 6)
    assert len(kv.extend_draft(req, 3)) == 0
    assert len(kv.extend_draft(req, 2)) == 2
    kv.release(req, keep=False)
    kv.check([])
