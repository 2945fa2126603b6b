"""Pages that leave one engine's tiers and come into another's: the right bytes, the bounds, and nothing held."""

import numpy as np
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.layout import KvLayout
from kvtransfer.migration.plan import Shares
from kvtransfer.migration.wire import Path
from replicas.cache.host_pages import HostTier
from replicas.cache.page_home import TieredPageHome
from replicas.cache.tiers import HiRadixCache
from replicas.memory.allocator import PagedTokenToKVPoolAllocator
from tests.harness import Clock

PS, TP, PAGE_BYTES = 2, 2, 32
LAYOUT = KvLayout(
    model="m", architecture="MHA", num_layers=1, num_kv_heads=2, head_dim=1, dtype="float32", item_bytes=4,
    page_size=PS, tp=TP,
)  # fmt: skip


def bytes_of(salt: str, ids: np.ndarray) -> np.ndarray:
    """The K/V of the last page of ``ids``: a function of all tokens, as in a model."""
    digest = xxhash.xxh3_64_intdigest(salt.encode() + ids.astype("<i4").tobytes())
    return np.random.default_rng(digest).integers(0, 256, PAGE_BYTES, dtype=np.uint8)


class Node:
    """The cache of one engine, with bytes for device and host pages."""

    def __init__(self, *, device: int = 16, host: int = 16, write: str = "write_back") -> None:
        self.clock = Clock()
        self.device = np.zeros((device + 1, PAGE_BYTES), dtype=np.uint8)
        self.view = np.zeros((host + 1, PAGE_BYTES), dtype=np.uint8)
        self.page_bytes = PAGE_BYTES
        self.digests = np.zeros((host + 1, TP), dtype=np.uint64)
        self.allocator = PagedTokenToKVPoolAllocator(device, PS)
        tier = HostTier(num_pages=host, copier=self, write=write)
        self.tiers = HiRadixCache(PS, host=tier, clock=self.clock)
        self.home = TieredPageHome(self.tiers, self, LAYOUT, clock=self.clock)

    def backup(self, device_pages: np.ndarray, host_pages: np.ndarray, *, wait: bool = True) -> None:
        self.view[host_pages] = self.device[device_pages]
        for page in host_pages:
            self.digests[page] = [xxhash.xxh3_64_intdigest(part.data) for part in self.view[page].reshape(TP, -1)]

    def load(self, host_pages: np.ndarray, device_pages: np.ndarray) -> np.ndarray:
        self.device[device_pages] = self.view[host_pages]
        return np.ones(len(host_pages), dtype=np.bool_)

    def compute(self, ids: list[int], salt: str = "", hits: int = 0) -> None:
        """A request comes and goes; it is matched ``hits`` times more."""
        token_ids = np.array(ids, dtype=np.int32)
        num = len(ids) // PS
        if (short := num - self.allocator.num_free) > 0:
            self.evict(short)
        pages = self.allocator.alloc(num, rid="r")
        for at in range(num):
            self.device[pages[at]] = bytes_of(salt, token_ids[: (at + 1) * PS])
        already = self.tiers.insert(token_ids, pages, salt)
        self.allocator.free(pages[: already // PS])
        for _ in range(hits):
            self.tiers.match_prefix(token_ids, salt)

    def evict(self, num: int) -> None:
        self.allocator.free(self.tiers.evict(num))

    def push(self, other: "Node", *, run: int = 3) -> float:
        """All that the migrator does, in one thread. Returns: the share of the value that ``other`` has."""
        paths = self.home.hottest(1 << 62)
        shares = Shares[Node](paths, PS)
        shares.join(other, other.home.held(paths))
        for index, path in enumerate(paths):
            while (chosen := shares.choose(index)) is not None:
                first, num = chosen[1], min(run, path.num_pages(PS) - chosen[1])
                found = self.home.read(path, first, num)
                kept = 0 if found is None else other.home.write(path, first, *found)
                shares.sent(other, index, kept, 1)
                if kept < num:
                    break
        shares.check()
        return shares.value_kept

    def check(self) -> None:
        """Every page of both tiers holds the bytes of its tokens; no host page is on its way."""
        self.tiers.check()
        assert self.tiers.host.coming == 0
        for path in self.home.hottest(1 << 62):
            host, device = self.tiers.where(path.ids, path.salt, 0)
            for at in range(path.num_pages(PS)):
                want = bytes_of(path.salt, path.ids[: (at + 1) * PS])
                assert not host[at] or (self.view[host[at]] == want).all()
                assert not device[at] or (self.device[device[at]] == want).all()


A, B, C = list(range(8)), [*range(8), 20, 21, 22, 23], [50, 51, 52, 53]  # 4, 2 more, 2 pages


def test_pages_of_both_tiers_come_to_the_host_of_the_other() -> None:
    one, two = Node(), Node()
    one.compute(B)
    one.evict(3)  # to the host
    one.compute(C, "salt")
    assert one.push(two) == 1.0
    assert two.home.held([Path("", np.array(B, dtype="<i4").tobytes(), 0)]) == [6]
    assert two.tiers.evictable_pages == 0  # nothing of it in the device pool
    assert two.home.held([Path("", np.array(C, dtype="<i4").tobytes(), 0)]) == [0]  # another salt
    one.check()
    two.check()


def test_what_comes_keeps_its_hits_and_its_age() -> None:
    one, two = Node(), Node()
    one.compute(A, hits=7)
    one.clock.now_s, two.clock.now_s = 30.0, 1000.0
    one.push(two, run=8)
    [path] = two.home.hottest(1 << 62)
    assert (path.hits, path.idle_s) == (7, 30.0)


def test_the_order_is_by_rate_and_parents_stand_before_children() -> None:
    one = Node()
    one.compute(A)
    one.compute(B, hits=9)
    one.clock.now_s = 600.0
    one.compute(C, hits=5)
    paths = one.home.hottest(1 << 62)
    assert [(path.num_pages(PS), path.first_page, path.parent) for path in paths] == [(2, 0, -1), (4, 0, -1), (6, 4, 1)]
    assert [path.hits for path in paths] == [5, 9, 9]


def test_the_hottest_that_fit_are_named() -> None:
    one = Node()
    one.compute(A, hits=1)
    one.compute(C, hits=5)
    assert [path.hits for path in one.home.hottest(4 * PAGE_BYTES)] == [5]
    assert one.home.hottest(PAGE_BYTES) == []


def test_what_is_worth_more_is_not_displaced() -> None:
    two = Node(device=4, host=4)
    two.compute(A, hits=3)
    two.evict(4)  # its host tier is full
    cold, hot = Node(), Node()
    cold.compute(C, hits=1)
    hot.compute(C, hits=9)
    assert cold.push(two) == 0.0
    assert two.home.held([Path("", np.array(A, dtype="<i4").tobytes(), 0)]) == [4]
    assert hot.push(two) == 1.0
    assert two.home.held([Path("", np.array(A, dtype="<i4").tobytes(), 0)]) == [2]  # the tail made room
    two.check()


def test_pages_come_a_second_time_without_effect() -> None:
    one, two = Node(), Node()
    one.compute(A)
    [path] = one.home.hottest(1 << 62)
    found = one.home.read(path, 0, 4)
    assert found is not None
    assert [two.home.write(path, 0, *found) for _ in range(2)] == [4, 4]
    assert two.tiers.host.num_free == 12
    two.check()


def test_pages_without_those_before_them_are_not_taken() -> None:
    one, two = Node(), Node()
    one.compute(A)
    [path] = one.home.hottest(1 << 62)
    found = one.home.read(path, 2, 2)
    assert found is not None
    assert two.home.write(path, 2, *found) == 0
    assert two.tiers.host.num_free == 16


def test_what_was_evicted_is_not_read() -> None:
    one = Node(write="write_back")
    one.compute(A)
    [path] = one.home.hottest(1 << 62)
    one.tiers.reset()
    assert one.home.read(path, 0, 4) is None


def test_a_host_page_that_is_read_takes_no_device_page_of_the_same_prefix() -> None:
    one = Node(device=8, host=2)
    one.compute(A[:4])
    one.compute(A)
    one.evict(2)  # the host is full of the last two
    path = Path("", np.array(A, dtype="<i4").tobytes(), 0)
    assert one.home.read(path, 0, 4) is None
    one.check()


def test_a_full_host_tier_still_gives_what_is_on_the_device_alone() -> None:
    one, two = Node(device=8, host=4), Node()
    one.compute(A, hits=1)
    one.evict(4)
    one.compute(C, hits=9)  # on the device alone; the host is full of A
    assert one.push(two, run=1) > 0.5
    assert two.home.held([Path("", np.array(C, dtype="<i4").tobytes(), 0)]) == [2]
    one.check()
    two.check()


SEQUENCES = st.lists(st.integers(0, 1), min_size=1, max_size=6).map(lambda pages: [x for p in pages for x in (p, p)])
STEP = st.one_of(
    st.tuples(st.just("compute"), st.integers(0, 1), SEQUENCES, st.integers(0, 3)),
    st.tuples(st.just("evict"), st.integers(0, 1), st.integers(1, 6)),
    st.tuples(st.just("push"), st.integers(0, 1), st.integers(1, 3)),
)


@given(st.lists(STEP, max_size=25), st.sampled_from(["write_back", "write_through", "adaptive"]), st.integers(1, 8))
def test_whatever_happens_bytes_are_right_and_pages_add_up(steps: list[tuple], write: str, host: int) -> None:
    nodes = [Node(device=6, host=host, write=write), Node(device=6, host=8, write=write)]
    for name, which, *args in steps:
        node, other = nodes[which], nodes[1 - which]
        if name == "compute":
            node.compute(args[0], hits=args[1])
        elif name == "evict":
            node.evict(args[0])
        else:
            node.push(other, run=args[0])
        for each in nodes:
            each.clock.now_s += 1.0
            each.check()
