"""HiRadixCache: each arrow of its module's picture, by hand. Pages of two tokens; the copier notes what it copies."""

import numpy as np
import pytest

from kvtransfer.pages import Tier, page_keys
from replicas.cache.ends import Snapshot
from replicas.cache.events import AllCleared, EventLog, PagesRemoved, PagesStored
from replicas.cache.host_pages import HostPages, HostTier, TierCounters
from replicas.cache.tiers import MEASURE_EVERY, HiRadixCache
from tests.harness import Clock

PS = 2
A, B, C, D = [1, 1], [2, 2], [3, 3], [4, 4]  # a page each


def ids(*pages: list[int]) -> np.ndarray:
    return np.array([token for page in pages for token in page], dtype=np.int32)


def at(*pages: int) -> np.ndarray:
    return np.array(pages, dtype=np.int32)


class Memory:
    """Device and host pages; each holds the number of the device page in which it was computed."""

    def __init__(self, clock: Clock, *, num_host: int, load_s: float) -> None:
        self.device = np.arange(100)
        self.host = np.zeros(num_host + 1, dtype=np.int64)
        self.wrong: set[int] = set()
        self.backups: list[list[int]] = []  # device pages of each call
        self.loads: list[list[int]] = []  # host pages of each call
        self._clock, self._load_s = clock, load_s

    def backup(self, device_pages: np.ndarray, host_pages: np.ndarray, *, wait: bool = True) -> None:
        assert 0 not in host_pages
        self.host[host_pages] = self.device[device_pages]
        self.wrong -= set(host_pages.tolist())
        self.backups.append(device_pages.tolist())

    def load(self, host_pages: np.ndarray, device_pages: np.ndarray) -> np.ndarray:
        self.device[device_pages] = self.host[host_pages]
        self.loads.append(host_pages.tolist())
        self._clock.now_s += self._load_s * len(host_pages)
        return np.array([page not in self.wrong for page in host_pages.tolist()])


class Rig:
    """A cache with its memory, and what tests ask of both."""

    def __init__(
        self,
        num_host: int = 8,
        *,
        write: str = "write_back",
        events: bool = False,
        load_s: float = 0.01,
        eviction: str = "lru",
    ) -> None:
        self.clock = Clock()
        self.memory = Memory(self.clock, num_host=num_host, load_s=load_s)
        self.log = EventLog() if events else None
        tier = HostTier(num_pages=num_host, copier=self.memory, eviction=eviction, write=write)
        self.cache = HiRadixCache(PS, host=tier, events=self.log, clock=self.clock)

    def put(self, token_ids: np.ndarray, first_page: int, salt: str = "") -> int:
        pages = np.arange(first_page, first_page + len(token_ids) // PS, dtype=np.int32)
        already = self.cache.insert(token_ids, pages, salt)
        self.cache.check()
        return already

    def evict(self, num_pages: int) -> list[int]:
        freed = self.cache.evict(num_pages)
        self.cache.check()
        self.memory.device[freed] = -1  # another's now
        return sorted(freed.tolist())

    def tiers(self, token_ids: np.ndarray, salt: str = "") -> tuple[int, int]:
        """How many pages of it are on the device, and how many after those on the host."""
        match = self.cache.match_prefix(token_ids, salt, count_hit=False)
        self.cache.check()
        return match.prefix_len // PS, match.host_len // PS

    def load(self, token_ids: np.ndarray, *pages: int) -> int:
        match = self.cache.match_prefix(token_ids, "", count_hit=False)
        assert match.host_node is not None
        lock = self.cache.inc_lock_ref(match.host_node)
        good = self.cache.load(match, at(*pages))
        self.cache.dec_lock_ref(lock)
        self.cache.check()
        return good

    def holds(self, token_ids: np.ndarray, first: int = 0) -> list[int]:
        """Where the pages of it on the device, from ``first`` on, were computed."""
        return [int(self.memory.device[page]) for page in self.cache.match_prefix(token_ids, "").pages[first:]]


def test_a_page_that_leaves_the_device_is_on_the_host() -> None:
    rig = Rig()
    rig.put(ids(A, B, C), 10)
    assert rig.evict(1) == [12]
    assert rig.memory.backups == [[12]]  # the tail alone
    assert rig.tiers(ids(A, B, C)) == (2, 1)
    assert rig.evict(2) == [10, 11]
    assert rig.tiers(ids(A, B, C)) == (0, 3)
    assert (rig.cache.host.num_free, rig.cache.evictable_pages, rig.cache.protected_pages) == (5, 0, 0)
    assert rig.cache.peek_len(ids(A, B, C, D), "") == 6
    assert rig.cache.counters.written_pages == 3


def test_host_pages_are_loaded_in_part_and_keep_their_copy() -> None:
    """Two of three pages come; the third waits. What was loaded leaves again without another copy."""
    rig = Rig()
    rig.put(ids(A, B, C), 10)
    rig.evict(3)
    assert rig.load(ids(A, B, C), 20, 21) == 2
    assert rig.tiers(ids(A, B, C)) == (2, 1)
    assert rig.holds(ids(A, B, C)) == [10, 11]
    assert (rig.cache.clean_pages, rig.cache.evictable_pages, rig.cache.host.num_free) == (2, 2, 5)
    assert rig.load(ids(A, B, C), 22) == 1
    assert rig.holds(ids(A, B, C)) == [10, 11, 12]
    copies = list(rig.memory.backups)
    assert rig.evict(3) == [20, 21, 22]
    assert rig.memory.backups == copies
    assert rig.tiers(ids(A, B, C)) == (0, 3)
    assert (rig.cache.counters.loaded_pages, rig.cache.counters.wrong_pages) == (3, 0)


def test_write_through_copies_at_once_and_selective_at_the_second_use() -> None:
    through, selective = Rig(write="write_through"), Rig(write="write_through_selective")
    for rig in (through, selective):
        rig.put(ids(A, B), 10)
    assert (through.cache.clean_pages, selective.cache.clean_pages) == (2, 0)
    selective.cache.match_prefix(ids(A, B), "")  # a hit
    assert selective.put(ids(A, B), 20) == 4
    assert (selective.cache.clean_pages, selective.memory.backups) == (2, [[10, 11]])
    assert through.evict(2) == [10, 11]
    assert through.memory.backups == [[10, 11]]  # no second time


def test_the_host_gives_up_its_least_recent_leaf_and_what_the_device_has_too() -> None:
    """Three host pages: A and B went there first. B is the leaf; then A, which hangs above nothing any more."""
    rig = Rig(3)
    rig.put(ids(A, B), 10)
    rig.evict(2)
    rig.put(ids(C), 20)
    rig.put(ids(D), 30)
    assert rig.evict(1) == [20]
    assert rig.tiers(ids(A, B)) == (0, 2)
    rig.tiers(ids(C))  # used: it is not the oldest
    assert rig.evict(1) == [30]
    assert [rig.tiers(each)[1] for each in (ids(A, B), ids(C), ids(D))] == [1, 1, 1]
    assert rig.cache.counters.evicted_pages == 1


def test_what_leaves_the_host_while_the_device_has_it_stays_in_the_tree() -> None:
    """SPEC G06: B goes, the tail; then A, and both are still found on the device, and leave it as any page."""
    rig = Rig(2, write="write_through")
    rig.put(ids(A, B), 10)
    for left in (1, 0):
        taken = rig.cache.take_host(1)
        assert taken is not None
        assert rig.tiers(ids(A, B)) == (2, 0)
        assert rig.cache.clean_pages == left
    assert rig.cache.evictable_pages == 2
    assert rig.evict(2) == [10, 11]
    assert rig.tiers(ids(A, B)) == (0, 0)


def test_a_locked_path_keeps_its_host_pages() -> None:
    rig = Rig(2)
    rig.put(ids(A, B), 10)
    rig.evict(2)
    match = rig.cache.match_prefix(ids(A, B), "")
    assert match.host_node is not None
    lock = rig.cache.inc_lock_ref(match.host_node)
    assert rig.cache.take_host(1) is None
    rig.put(ids(C), 20)
    assert rig.evict(1) == [20]  # no room on the host: forgotten
    assert (rig.tiers(ids(C)), rig.tiers(ids(A, B))) == ((0, 0), (0, 2))
    rig.cache.dec_lock_ref(lock)
    taken = rig.cache.take_host(1)
    assert taken is not None
    rig.cache.host.give_back(taken)
    assert rig.tiers(ids(A, B)) == (0, 1)


def test_a_victim_without_room_on_the_host_is_forgotten_with_what_hangs_below() -> None:
    """Of three host pages two await others' bytes, and one holds C: A and B find no room, and C is nothing without."""
    rig = Rig(3, events=True)
    rig.put(ids(A, B, C), 10)
    rig.evict(1)
    taken = rig.cache.take_host(2)
    assert taken is not None
    assert rig.tiers(ids(A, B, C)) == (2, 1)
    assert rig.evict(2) == [10, 11]
    assert rig.tiers(ids(A, B, C)) == (0, 0)
    assert (rig.cache.num_nodes, rig.cache.host.num_free) == (0, 1)
    assert rig.log is not None
    a, b, c = page_keys(ids(A, B, C), PS, "", None).tolist()
    assert [event.keys.tolist() for event in rig.log.drain() if isinstance(event, PagesRemoved)] == [[c], [a, b]]
    rig.cache.host.give_back(taken)
    assert rig.cache.host.num_free == 3
    rig.cache.check()


def test_a_node_that_the_host_can_never_hold_does_not_empty_it() -> None:
    """Two host pages hold A and B; a victim of three pages is forgotten, and they stay."""
    rig = Rig(2)
    rig.put(ids(A, B), 10)
    rig.evict(2)
    rig.put(ids(C, C, D), 20)
    assert rig.evict(3) == [20, 21, 22]
    assert rig.tiers(ids(A, B)) == (0, 2)


def test_pages_that_come_are_adopted_where_the_tree_lacks_them() -> None:
    """Four taken. The tree has A, on the device: the page brought for it is freed. Behind a page that the tree lacks
    nothing is adopted."""
    rig = Rig()
    rig.put(ids(A), 10)
    taken = rig.cache.take_host(4)
    assert taken is not None
    assert rig.cache.host.coming == 4
    assert rig.cache.adopt(ids(A, B, C), "", taken[:3], 0) == 2
    assert rig.tiers(ids(A, B, C)) == (1, 2)
    assert rig.cache.adopt(ids(A, C, D), "", taken[3:], 2) == 0
    assert (rig.cache.host.coming, rig.cache.host.num_free) == (0, 6)
    assert rig.tiers(ids(A, B, C), salt="x") == (0, 0)
    rig.memory.host[taken[1:3]] = [77, 78]  # what came
    assert rig.load(ids(A, B, C), 20, 21) == 2
    assert rig.holds(ids(A, B, C)) == [10, 77, 78]


def test_taken_pages_come_back_and_room_is_made_up_to_what_is_to_be_spared() -> None:
    rig = Rig(3)
    rig.put(ids(A), 10)
    rig.put(ids(B), 11)
    rig.put(ids(C), 12)
    rig.evict(3)
    assert rig.cache.take_host(2, spare=lambda node: node.key[0] == B[0]) is None  # A went, B is next and stays
    assert [rig.tiers(each)[1] for each in (ids(A), ids(B), ids(C))] == [0, 1, 1]
    taken = rig.cache.take_host(1)
    assert taken is not None
    assert rig.cache.take_host(4) is None
    rig.cache.host.give_back(taken)
    assert (rig.cache.host.num_free, rig.cache.host.coming) == (3, 0)
    rig.cache.check()


def test_a_page_that_is_being_read_is_nobodys_until_it_has_been_read() -> None:
    """A store reads A's host page when it is evicted: its bytes stay until the store is done."""
    rig = Rig(1)
    rig.put(ids(A), 10)
    rig.evict(1)
    page = rig.cache.match_prefix(ids(A), "").host_node.host  # type: ignore[union-attr]
    rig.cache.host.pin(page)
    rig.cache.host.pin(page)  # and a peer reads it too
    rig.put(ids(B), 20)
    assert rig.evict(1) == [20]
    assert (rig.tiers(ids(A)), rig.tiers(ids(B)), rig.cache.host.num_free) == ((0, 0), (0, 0), 0)
    rig.cache.host.unpin(page)
    assert rig.cache.host.num_free == 0
    rig.cache.host.unpin(page)
    assert rig.cache.host.num_free == 1
    rig.cache.check()


def test_a_wrong_page_ends_the_load_and_leaves_the_tree_with_what_is_below_it() -> None:
    """B is wrong: A comes, B and C go; D, beside B, stays."""
    rig = Rig(events=True)
    rig.put(ids(A, B, C), 10)
    rig.put(ids(A, D), 20)
    rig.evict(4)
    wrong = int(np.flatnonzero(rig.memory.host == 11)[0])
    rig.memory.wrong.add(wrong)
    assert rig.load(ids(A, B, C), 30, 31, 32) == 1
    assert rig.tiers(ids(A, B, C)) == (1, 2)
    rig.cache.drop_host(ids(A, B, C), "", 1)
    assert (rig.tiers(ids(A, B, C)), rig.tiers(ids(A, D))) == ((1, 0), (1, 1))
    assert rig.cache.counters.wrong_pages == 1
    assert rig.cache.counters.loaded_pages == 2  # C was right, and of no use
    assert rig.cache.host.num_free == 6
    assert rig.log is not None
    (removed,) = [event for event in rig.log.drain() if isinstance(event, PagesRemoved)][-1:]
    assert removed.keys.tolist() == page_keys(ids(A, B, C), PS, "", None)[1:].tolist()


def test_events_name_the_best_tier_of_each_page_in_order() -> None:
    """Computed, its tail moved to the host, that loaded, moved again and then dropped from the host."""
    rig = Rig(1, events=True)
    rig.put(ids(A, B), 10)
    rig.evict(1)
    rig.load(ids(A, B), 20)
    rig.evict(1)
    taken = rig.cache.take_host(1)
    assert taken is not None
    rig.cache.host.give_back(taken)
    rig.cache.reset()
    assert rig.log is not None
    a, b = page_keys(ids(A, B), PS, "", None).tolist()
    events = rig.log.drain()
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    told = [
        (event.keys.tolist(), event.tier if isinstance(event, PagesStored) else None)
        for event in events
        if not isinstance(event, AllCleared)
    ]
    assert told == [([a, b], Tier.DEVICE), ([b], Tier.HOST), ([b], Tier.DEVICE), ([b], Tier.HOST), ([b], None)]
    assert isinstance(events[-1], AllCleared)


def test_a_snapshot_tells_the_tiers_parents_first() -> None:
    rig = Rig(events=True)
    rig.put(ids(A, B, C), 10)
    rig.evict(2)
    stored = rig.cache.snapshot().stored
    assert [(len(each.keys), each.tier) for each in stored] == [(1, Tier.DEVICE), (2, Tier.HOST)]
    assert stored[1].parent_key == int(stored[0].keys[-1])


def test_reset_empties_both_tiers() -> None:
    rig = Rig(4)
    rig.put(ids(A, B), 10)
    rig.put(ids(C), 20)
    rig.evict(2)
    taken = rig.cache.take_host(1)  # on its way: not the tree's to free
    assert taken is not None
    assert sorted(rig.cache.reset().tolist()) != []
    assert (rig.cache.num_nodes, rig.cache.host.num_free, rig.cache.clean_pages) == (0, 3, 0)
    rig.cache.check()
    assert rig.cache.adopt(ids(A), "", taken, 0) == 1
    assert rig.tiers(ids(A)) == (0, 1)


def test_pages_are_copied_in_idle_time_oldest_first_into_free_pages_only() -> None:
    rig = Rig(2)
    for first, token_ids in ((10, ids(A)), (20, ids(B)), (30, ids(C))):
        rig.put(token_ids, first)
    assert rig.cache.copy_idle(1, to_store=True) == 1
    assert rig.cache.copy_idle(8, to_store=True) == 1
    assert rig.memory.backups == [[10], [20]]
    assert rig.cache.copy_idle(8, to_store=True) == 0  # the host is full; nothing is evicted for it
    assert rig.cache.clean_pages == 2
    rig.cache.check()


def test_a_long_node_is_copied_in_idle_time_in_parts_from_its_end() -> None:
    """A request that comes meanwhile waits for one part."""
    rig = Rig(16)
    rig.put(np.arange(10 * PS, dtype=np.int32), 10)
    copied = []
    while pages := rig.cache.copy_idle(2, to_store=True):
        copied.append(pages)
        rig.cache.check()
    assert copied == [2, 8]
    assert rig.memory.backups == [[18, 19], [10, 11, 12, 13, 14, 15, 16, 17]]


@pytest.mark.parametrize("write", ["write_back", "adaptive"])
def test_a_replica_that_is_never_idle_remembers_no_node_that_is_gone(write: str) -> None:
    """500 prompts of a page through a pool of one; nothing asks for idle copies."""
    rig = Rig(4, write=write)
    for number in range(500):
        rig.put(np.arange(number * PS, (number + 1) * PS, dtype=np.int32), 10)
        rig.evict(1)
    assert rig.cache.num_nodes <= 4
    assert len(rig.cache._dirty) <= 2 * 5 + 64 + 1


def test_loading_that_is_slower_than_computing_is_not_worth_it_but_is_measured_again() -> None:
    """A page loads in 10 ms, and is computed in 4 ms, then in 40 ms."""
    rig = Rig()
    rig.put(ids(A), 10)
    rig.evict(1)
    rig.load(ids(A), 20)
    assert rig.cache.counters.load_s_per_page == pytest.approx(0.01)
    assert rig.cache.worth_loading()  # nothing computed yet
    rig.cache.compute_s_per_token = 0.002
    asked = [rig.cache.worth_loading() for _ in range(MEASURE_EVERY)]
    assert asked == [False] * (MEASURE_EVERY - 1) + [True]
    assert rig.cache.load_budget(64) == 64 * 2 // 5  # tokens: 0.128 s of computing
    rig.cache.compute_s_per_token = 0.02
    assert rig.cache.worth_loading()
    assert rig.cache.load_budget(64) == 256


def test_the_host_says_which_pages_of_snapshots_are_miscounted() -> None:
    def pages(*of_snapshots: list[int]) -> HostPages:
        made = HostPages(8)
        made.take(6)  # 1 and 2 in the tree, two for each snapshot
        for page, lies in zip((1, 2), of_snapshots, strict=True):
            made.keep(page, Snapshot(at(*lies), 1, 0, 0), page)
        return made

    pages([3, 4], [5, 6]).check(at(1, 2))
    for lies, wrong in (
        (([3, 4], [4, 5]), "of two snapshots"),
        (([3, 4], [5, 7]), "of a snapshot is free"),
        (([3, 4, 5], [6]), r"snapshots have \[1, 3\] host pages"),
    ):
        with pytest.raises(AssertionError, match=wrong):
            pages(*lies).check(at(1, 2))
    read = pages([3, 4], [5, 6])
    read._late.add(6)
    with pytest.raises(AssertionError, match="only read is another's"):
        read.check(at(1, 2))


def test_saved_seconds_are_those_of_computing_less_those_of_loading() -> None:
    rig = Rig()
    rig.cache.compute_s_per_token = 0.02
    rig.put(ids(A, B), 10)
    rig.evict(2)
    rig.load(ids(A, B), 20, 21)
    assert rig.cache.stats().saved_s == pytest.approx(4 * 0.02 - 2 * 0.01)
    assert rig.cache.stats().host_load_s == pytest.approx(0.02)
    assert (rig.cache.stats().host_used_pages, rig.cache.stats().host_written_tokens) == (2, 4)


def test_a_page_that_was_lost_and_is_brought_back_is_hot_and_queued_once() -> None:
    """A leaves the host for B, and comes back from a store: arc takes it for used twice."""
    rig = Rig(2, eviction="arc")
    rig.put(ids(A), 10)
    rig.evict(1)
    rig.put(ids(B, C), 20)
    rig.cache.match_prefix(ids(B, C), "")  # a hit: what was lost among those used once is remembered
    rig.evict(2)
    assert rig.tiers(ids(A)) == (0, 0)
    taken = rig.cache.take_host(1)
    assert taken is not None
    assert rig.cache.adopt(ids(A), "", taken, 0) == 1
    rig.cache.check()
    brought = rig.cache.match_prefix(ids(A), "").host_node
    assert brought is not None
    assert brought.hit_count == 2
    rig.load(ids(A), 30)
    rig.cache.check()


def test_a_load_that_took_far_longer_than_the_others_counts_as_four_times_what_they_take() -> None:
    """The process was stopped meanwhile: 0.01 + 0.2 x 0.03 s, so that loading goes on being worth it."""
    counters = TierCounters()
    counters.loaded(10, 0.1, num_wrong=0)
    counters.loaded(10, 50.0, num_wrong=0)
    assert counters.load_s_per_page == pytest.approx(0.016)
    assert counters.load_s == 50.1


def test_where_lists_the_copies_of_each_page() -> None:
    rig = Rig()
    rig.put(ids(A, B, C), 10)
    rig.evict(1)
    hosts, devices = rig.cache.where(ids(A, B, C, D), "", 1)
    assert devices.tolist() == [11, 0]
    assert hosts[0] == 0
    assert rig.memory.host[hosts[1]] == 12
