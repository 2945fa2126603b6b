"""Owners: whose pages leave first where several tenants share a tier. Pages of two tokens."""

from collections import Counter

import numpy as np
import pytest

from replicas.cache.node import TreeNode
from replicas.cache.radix import RadixCache
from replicas.cache.retention import ACTIVE_S, EVERYBODY, EvictionQueue, Place, Retention
from tests.harness import Bench, Clock
from tests.unit.cache.test_tiers import Rig

PS = 2


def ids(first: int, num_pages: int) -> np.ndarray:
    return np.arange(first, first + num_pages * PS, dtype=np.int32)


class Shelf:
    """A cache whose page numbers count up; each entry is a leaf of its own."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.cache = RadixCache(PS, clock=self.clock)
        self.next = 1

    def put(self, tenant: str, num_pages: int, *, weight: float = 1.0) -> set[int]:
        pages = np.arange(self.next, self.next + num_pages, dtype=np.int32)
        token_ids = ids(1000 * self.next, num_pages)
        self.next += num_pages
        self.cache.insert(token_ids, pages, "")
        self.use(token_ids, tenant, weight=weight)
        return set(pages.tolist())

    def use(self, token_ids: np.ndarray, tenant: str, *, weight: float = 1.0) -> None:
        self.cache.retention.used_by(self.cache.match_prefix(token_ids, "").node, tenant, weight)
        self.cache.check()

    def evict(self, num_pages: int) -> set[int]:
        freed = set(self.cache.evict(num_pages).tolist())
        self.cache.check()
        return freed


def test_who_has_more_than_its_share_loses_its_pages_first_however_young() -> None:
    shelf = Shelf()
    light = shelf.put("light", 3)
    heavy = shelf.put("heavy", 6) | shelf.put("heavy", 3)
    assert shelf.evict(6) < heavy
    assert shelf.evict(2) < light  # equal now: the oldest goes


def test_a_share_is_by_weight() -> None:
    shelf = Shelf()
    shelf.put("payer", 6, weight=3.0)
    guest = shelf.put("guest", 3)
    assert shelf.evict(1) < guest  # 6 of 9 are less than three quarters


@pytest.mark.parametrize("others", [[], ["", "", EVERYBODY]])
def test_where_one_tenant_is_active_the_order_is_the_policys(others: list[str]) -> None:
    shelf = Shelf()
    oldest = shelf.put("one", 2)
    for tenant in others:
        shelf.put(tenant, 3)
    shelf.put("one", 4)
    assert shelf.evict(2) == oldest


def test_pages_that_two_tenants_use_are_everybodys_and_count_as_no_ones() -> None:
    shelf = Shelf()
    shared = shelf.put("heavy", 4)
    shelf.use(ids(1000, 4), "light")
    light, heavy = shelf.put("light", 1), shelf.put("heavy", 2)
    assert shelf.evict(1) < heavy
    assert shelf.evict(1) < shared  # the oldest, where nobody has more than a share
    shelf.use(ids(1000, 3), "heavy")
    assert shelf.evict(1) == light


def test_a_part_of_an_edge_becomes_everybodys_and_the_rest_stays_its_tenants() -> None:
    shelf = Shelf()
    shelf.put("heavy", 6)
    shelf.use(ids(1000, 2), "light")
    shelf.put("light", 1)
    assert shelf.evict(3) == {4, 5, 6}


def test_the_pages_of_one_that_has_gone_protect_nothing() -> None:
    shelf = Shelf()
    gone = shelf.put("gone", 1)
    shelf.clock.now_s += ACTIVE_S
    shelf.put("one", 3)
    shelf.put("two", 2)
    assert shelf.evict(1) == gone
    assert shelf.evict(1) < {2, 3, 4}


def test_what_is_held_is_forgotten_with_its_last_page() -> None:
    retention, held = Retention(Clock()), Counter({"a": 0, "b": 3, "c": 1})
    for tenant in "abc":
        retention.used_by(TreeNode.root(""), tenant, 1.0)
    assert retention.over(held) == {"b"}
    assert list(held) == ["b", "c"]


def test_a_victim_costs_no_look_at_all_tenants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 640 tenants with a leaf each, all used since, 60 go, after what one has beyond its share."""
    shelf = Shelf()
    cache = shelf.cache
    leaves = [ids(1000 * number, 1) for number in range(640)]
    for number, leaf in enumerate(leaves):
        cache.insert(leaf, np.array([number], dtype=np.int32), "")
        cache.retention.used_by(cache.match_prefix(leaf, "").node, f"tenant {number}", 1.0)
    shelf.next = len(leaves)
    beyond = shelf.put("heavy", 3)
    for leaf in leaves:
        cache.match_prefix(leaf, "")
    num_looks = num_firsts = 0
    over, first = cache.retention.over, EvictionQueue._first

    def looking(held: Counter[str]) -> frozenset[str]:
        nonlocal num_looks
        num_looks += 1
        return over(held)

    def counting(queue: EvictionQueue, tenant: str) -> Place:
        nonlocal num_firsts
        num_firsts += 1
        return first(queue, tenant)

    monkeypatch.setattr(cache.retention, "over", looking)
    monkeypatch.setattr(EvictionQueue, "_first", counting)
    freed = cache.evict(63)
    assert set(freed[:3].tolist()) == beyond
    assert num_looks <= 2
    assert num_firsts < 640 * 12  # a few for each that was used since
    cache.check()


@pytest.mark.parametrize("eviction", ["lru", "arc"])
def test_the_host_goes_by_the_same_order(eviction: str) -> None:
    rig = Rig(num_host=6, eviction=eviction, write="write_through")
    for first, num_pages, tenant in ((1, 2, "light"), (10, 2, "heavy"), (20, 2, "heavy")):
        token_ids = ids(100 * first, num_pages)
        rig.put(token_ids, first)
        rig.cache.retention.used_by(rig.cache.match_prefix(token_ids, "").node, tenant, 1.0)
    rig.evict(6)
    rig.put(ids(9000, 1), 30)  # needs a page of the host
    rig.cache.retention.used_by(rig.cache.match_prefix(ids(9000, 1), "").node, "light", 1.0)
    assert rig.tiers(ids(100, 2)) == (0, 2)
    assert sum(sum(rig.tiers(ids(100 * first, 2))) for first in (10, 20)) == 3


def test_a_tenants_history_stays_cached_beside_one_that_floods_the_pool() -> None:
    def hits(*, named: bool) -> int:
        bench = Bench(num_pages=32, max_running=4)
        chat = list(range(40))
        for turn in range(4):
            req = bench.submit(chat, max_new_tokens=1, tenant="light" if named else "", cache_salt="light")
            bench.run()
            for number in range(8):
                bench.submit(
                    [10_000 + 100 * (8 * turn + number) + at for at in range(30)],
                    max_new_tokens=1, tenant="heavy" if named else "", cache_salt="heavy",
                )  # fmt: skip
            bench.run()
        return req.cached_tokens

    assert hits(named=False) == 0
    assert hits(named=True) == 36
