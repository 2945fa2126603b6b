"""Cache breakpoints (`cache_control`): what is before one goes after what nobody waits for, in its tenant's share."""

import numpy as np
import pytest

from replicas.cache.retention import ACTIVE_S
from replicas.scheduler.prefill import Refusal
from replicas.types import CacheBreakpoint
from tests.harness import Bench, choice_of
from tests.unit.cache.test_owners import Shelf, ids
from tests.unit.cache.test_tiers import Rig

TTL_S = 300.0


def set_breakpoint(shelf: Shelf, pages: set[int], tenant: str, ttl_s: float = TTL_S) -> None:
    """Keep what `Shelf.put` returned."""
    path = shelf.cache.nodes_of(ids(1000 * min(pages), len(pages)), "", split=True)
    shelf.cache.retention.set_breakpoint(path, ttl_s, tenant=tenant, weight=1.0)
    shelf.cache.check()


def left_of_a_prompt(*breakpoints: CacheBreakpoint, wait_s: float = 0.0) -> int:
    """The tokens that are cached of a prompt of 20 when six others have filled the pool behind it."""
    bench = Bench(num_pages=24, sessions=False)
    prompt = list(range(1, 21))
    first = bench.submit(prompt, max_new_tokens=2, cache_breakpoints=breakpoints)
    bench.run()
    assert (first.usage().cached_tokens, first.usage().kept_tokens) == (0, 20)
    bench.clock.now_s += wait_s
    for other in range(6):
        bench.submit([100 + other] * 20, max_new_tokens=2)
        bench.run()
    return bench.kv.cache.peek_len(np.array(prompt, dtype=np.int32), "")


def test_a_marked_part_of_a_prompt_outlives_what_was_used_after_it_and_the_rest_does_not() -> None:
    assert left_of_a_prompt() == 0  # LRU
    assert left_of_a_prompt(CacheBreakpoint(14, TTL_S)) == 12  # whole pages of 4
    assert left_of_a_prompt(CacheBreakpoint(14, TTL_S), wait_s=TTL_S) == 0
    assert left_of_a_prompt(CacheBreakpoint(14, TTL_S), CacheBreakpoint(8, 2 * TTL_S), wait_s=TTL_S) == 8


def test_each_use_lengthens_a_breakpoint() -> None:
    shelf = Shelf()
    old = shelf.put("", 3)
    set_breakpoint(shelf, old, "")
    shelf.clock.now_s += TTL_S - 1
    set_breakpoint(shelf, old, "")
    young = shelf.put("", 3)
    shelf.clock.now_s += TTL_S - 1
    assert shelf.evict(3) == young
    shelf.put("", 3)
    shelf.clock.now_s += 1
    assert shelf.evict(3) == old


def test_what_is_left_of_a_marked_run_stays_marked() -> None:
    shelf = Shelf()
    marked = shelf.put("", 3)
    set_breakpoint(shelf, marked, "")
    assert shelf.evict(1) == {3}  # a breakpoint is no lock
    assert shelf.evict(1) | shelf.put("", 2) == {2, 4, 5}
    assert shelf.evict(2) == {4, 5}


def test_of_breakpoints_whose_nodes_have_left_few_are_kept() -> None:
    shelf = Shelf()
    for _ in range(100):
        set_breakpoint(shelf, shelf.put("", 1), "")
        shelf.evict(1)
    assert len(shelf.cache.retention._breakpoints._due) <= 65


def test_what_a_tenant_marked_beyond_its_share_goes_before_what_others_did_not_mark() -> None:
    shelf = Shelf()
    light = shelf.put("light", 3)
    heavy = [shelf.put("heavy", 3) for _ in range(3)]
    for pages in heavy:
        set_breakpoint(shelf, pages, "heavy")
    assert shelf.evict(6) == heavy[0] | heavy[1]
    assert shelf.evict(3) == light  # equal now: what is marked goes later
    assert shelf.evict(3) == heavy[2]


def test_one_that_has_gone_keeps_its_share_for_as_long_as_it_asked_for() -> None:
    shelf = Shelf()
    gone = shelf.put("gone", 3)
    set_breakpoint(shelf, gone, "gone", 3600.0)
    shelf.clock.now_s += ACTIVE_S
    others = shelf.put("other", 6)
    assert shelf.evict(6) == others
    shelf.put("other", 2)
    shelf.clock.now_s += 3600.0
    shelf.put("third", 2)
    assert shelf.evict(3) == gone


def test_a_breakpoint_of_less_than_a_page_keeps_no_share() -> None:
    shelf = Shelf()
    gone = shelf.put("gone", 3)
    path = shelf.cache.nodes_of(ids(1000 * min(gone), 3)[:1], "", split=True)
    shelf.cache.retention.set_breakpoint(path, 3600.0, tenant="gone", weight=1.0)
    shelf.clock.now_s += ACTIVE_S
    for other in ("other", "third"):
        shelf.put(other, 4)
    assert shelf.evict(3) == gone


def test_a_request_that_is_only_refused_renews_no_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(num_pages=24, sessions=False)
    marked: list[object] = []
    monkeypatch.setattr(bench.kv.store.radix.retention, "set_breakpoint", lambda *args, **_: marked.append(args))
    prompt = list(range(1, 21))
    bench.submit(prompt, max_new_tokens=2)
    bench.run()
    bench.submit([100] * 48, max_new_tokens=20)
    for _ in range(4):
        bench.step()
    waits = bench.submit([*prompt, *range(30, 50)], max_new_tokens=20, cache_breakpoints=(CacheBreakpoint(20, TTL_S),))
    bench.step()
    assert bench.scheduler.last.refusals[(waits.rid, 0)] is Refusal.MEMORY
    assert not marked
    bench.run()
    assert marked


@pytest.mark.parametrize("eviction", ["lru", "arc"])
def test_the_host_goes_by_the_same_order(eviction: str) -> None:
    rig = Rig(num_host=4, eviction=eviction, write="write_through")
    rig.put(ids(100, 2), 1)
    rig.cache.retention.set_breakpoint(rig.cache.nodes_of(ids(100, 2), ""), TTL_S, tenant="", weight=1.0)
    rig.put(ids(200, 2), 10)
    rig.evict(4)
    rig.put(ids(300, 1), 20)  # needs a page of the host
    assert rig.tiers(ids(100, 2)) == (0, 2)
    assert rig.tiers(ids(200, 2)) == (0, 1)


def test_what_was_cached_before_counts_as_read_and_is_kept_as_what_is_new() -> None:
    bench = Bench()
    prompt = list(range(1, 19))
    for cached, kept in ((0, 16), (16, 16)):  # of whole pages; the second finds them
        req = bench.submit(prompt, max_new_tokens=2, cache_breakpoints=(CacheBreakpoint(18, TTL_S),))
        bench.step()
        usage = req.usage() if cached else None
        bench.run()
        usage = usage or req.usage()
        assert (usage.cached_tokens, min(usage.kept_tokens, 16)) == (cached, kept)
    chunk = Bench(prefix_cache="chunk")
    req = chunk.submit(prompt, max_new_tokens=2, cache_breakpoints=(CacheBreakpoint(18, TTL_S),))
    chunk.run()
    assert req.usage().kept_tokens == 0  # a cache that keeps nothing


def test_a_prefix_that_another_computed_in_the_meantime_is_kept_too() -> None:
    """As for the decode leg of a prompt that its prefill computed, and this replica had."""
    bench = Bench()
    prompt = list(range(1, 19))
    first = bench.submit(prompt, max_new_tokens=2)
    bench.run()
    assert first.usage().cached_tokens == 0
    leg = choice_of("leg", prompt, now_s=bench.clock(), max_new_tokens=2)
    bench.kv.admit(leg, whole=True)
    bench.kv.extend(leg, leg.num_tokens)
    leg.computed_len = leg.num_tokens
    bench.kv.commit(leg)
    assert (leg.usage().cached_tokens, leg.usage().kept_tokens) == (0, 16)
    bench.kv.release(leg, keep=True)
