"""The pages of the host tier: which are free, and which copies of them are under way or done.

Owns:      the free list of the host pages, and which of them have a snapshot of recurrent states, in further ones.
Never:     touches bytes (memory/host.py), or knows which node has a page (cache/tiers.py).
Invariant: free + in the tree + of snapshots + coming + read by somebody after they left the tree == capacity. A
           snapshot goes with its page.
Thread:    scheduler thread only.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvtransfer.pages import PageKey
from replicas.cache.ends import Snapshot
from replicas.memory.allocator import PagedTokenToKVPoolAllocator, Pages

SMOOTHING = 0.2  # weight of the newest load in the measured rate
OUTLIER = 4.0  # a load that took so many times the measured rate counts as that: the process may have stood still


class Copier(Protocol):
    """Copies pages between the device pools and the host memory of all ranks, as if within the call."""

    def backup(self, device_pages: Pages, host_pages: Pages, *, wait: bool = True) -> None:
        """``wait``: False may return before the bytes are on the host; what reads them there waits."""
        ...

    def load(self, host_pages: Pages, device_pages: Pages) -> npt.NDArray[np.bool_]:
        """Returns: [n] whether the page on the host was as it had been written, on every rank."""
        ...


class HostPages:
    """Which pages of the host memory are free; those that somebody reads become free only afterwards."""

    def __init__(self, num_pages: int) -> None:
        self._allocator = PagedTokenToKVPoolAllocator(num_pages, 1)
        self._readers: Counter[int] = Counter()
        self._late: set[int] = set()  # freed while they were read
        self.coming = 0  # taken, on their way into the tree
        self.told: Callable[[PageKey, bool], None] = lambda key, there: None  # of snapshots; set once, by PageStore
        self._snapshots: dict[int, tuple[Snapshot, PageKey]] = {}  # by host page
        self._leads = np.zeros(num_pages + 1, dtype=np.bool_)  # by host page: whether it has a snapshot

    @property
    def num_pages(self) -> int:
        return self._allocator.num_pages

    @property
    def num_free(self) -> int:
        return self._allocator.num_free

    def take(self, num_pages: int, *, coming: bool = False) -> Pages:
        """Take free pages; as many are there. ``coming``: their bytes arrive later, told by `arrived`."""
        self.coming += num_pages if coming else 0
        return self._allocator.alloc(num_pages, rid="the host tier")

    def arrived(self, num_pages: int) -> None:
        """Count taken pages that the tree has now, or that are freed next."""
        assert num_pages <= self.coming, f"{num_pages} host pages arrive, {self.coming} were to come"
        self.coming -= num_pages

    def give_back(self, pages: Pages) -> None:
        """Free pages that were to come, and that nothing came into."""
        self.arrived(len(pages))
        self.free(pages)

    def keep(self, page: int, snapshot: Snapshot, key: PageKey) -> None:
        """Let ``page`` of the tree, that of ``key``, have a ``snapshot``, in taken pages."""
        assert not self._leads[page], f"host page {page} has a snapshot"
        self._snapshots[page], self._leads[page] = (snapshot, key), True
        self.told(key, True)

    def has_snapshot(self, pages: Pages) -> npt.NDArray[np.bool_]:
        """Tell of each of ``pages`` whether it has a snapshot; 0 has none."""
        return self._leads[pages]

    def snapshot_of(self, page: int) -> Snapshot:
        """Return the snapshot of ``page``."""
        return self._snapshots[page][0]

    def drop_snapshots(self, pages: Pages) -> None:
        """Free the snapshots of ``pages``."""
        for page in pages[self._leads[pages]].tolist():
            snapshot, key = self._snapshots.pop(page)
            self._leads[page] = False
            self._allocator.free(snapshot.pages)
            self.told(key, False)

    def free(self, pages: Pages) -> None:
        self.drop_snapshots(pages)
        read = [page for page in pages.tolist() if page in self._readers] if self._readers else []
        self._late.update(read)
        self._allocator.free(np.setdiff1d(pages, np.array(read, dtype=np.int32)) if read else pages)

    def pin(self, pages: Pages) -> None:
        """Keep the bytes of ``pages``, which a store or a peer reads, until `unpin`."""
        self._readers.update(pages.tolist())

    def unpin(self, pages: Pages) -> None:
        self._readers.subtract(pages.tolist())
        done = [page for page in pages.tolist() if not self._readers[page]]
        for page in done:
            del self._readers[page]
        late = [page for page in done if page in self._late]
        self._late.difference_update(late)
        self._allocator.free(np.array(late, dtype=np.int32))

    def check(self, in_tree: Pages) -> None:
        """Assert that each page is free, in the tree, on its way in, or only read."""
        self._allocator.check()
        free = self._allocator.free_pages()
        assert len(np.unique(in_tree)) == len(in_tree), "a host page is in the tree twice"
        assert not np.intersect1d(in_tree, free).size, "a host page of the tree is free"
        held = self.num_pages - len(free)
        of_snapshots = [snapshot.pages for snapshot, _ in self._snapshots.values()]
        assert len(set(map(len, of_snapshots))) <= 1, f"snapshots have {sorted(set(map(len, of_snapshots)))} host pages"
        lies = np.concatenate([in_tree, *of_snapshots])
        assert len(np.unique(lies)) == len(lies), "a host page is of two snapshots, or in the tree"
        assert not np.intersect1d(lies, free).size, "a host page of a snapshot is free"
        assert self._late.isdisjoint([*lies.tolist(), *free.tolist()]), "a host page that is only read is another's"
        assert np.array_equal(np.flatnonzero(self._leads), sorted(self._snapshots)), "snapshots are miscounted"
        assert set(self._snapshots) <= set(in_tree.tolist()), "a snapshot has outlived its page"
        assert held == len(lies) + len(self._late) + self.coming, (
            f"{held} host pages are held: {len(in_tree)} in the tree, {len(lies) - len(in_tree)} of snapshots, "
            f"{len(self._late)} read, {self.coming} coming"
        )


@dataclass(slots=True)
class TierCounters:
    """What the two tiers have done; only grows, but for the rate."""

    written_pages: int = 0  # device -> host
    pushed_pages: int = 0  # to other replicas (page_home.py)
    received_pages: int = 0  # from them
    loaded_pages: int = 0  # host -> device
    evicted_pages: int = 0  # from the host
    wrong_pages: int = 0
    write_s: float = 0.0
    write_s_per_page: float = 0.0  # of the last copies that were waited for; 0 until measured
    load_s: float = 0.0
    saved_s: float = 0.0  # what computing the loaded pages would have taken, less load_s
    slow_loads: int = 0  # prefixes that were computed because that was quicker
    load_s_per_page: float = 0.0  # smoothed; 0 until measured

    def loaded(self, num_pages: int, load_s: float, *, num_wrong: int) -> None:
        """Count a load."""
        self.loaded_pages += num_pages - num_wrong
        self.wrong_pages += num_wrong
        self.load_s += load_s
        each_s, old_s = load_s / num_pages, self.load_s_per_page
        self.load_s_per_page = old_s + (min(each_s, OUTLIER * old_s) - old_s) * SMOOTHING if old_s else each_s


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTier:
    """What a cache needs for its host tier."""

    num_pages: int
    copier: Copier
    eviction: str = "arc"
    write: str = "adaptive"
