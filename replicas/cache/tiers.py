"""HiRadixCache: the radix tree over two tiers, the device pool (L1) and host memory (L2).

Owns:      the host pages, and which nodes have a copy there. The bytes are copied by ``copier``, of all ranks.
Never:     waits for a store or a peer (cache/store_tier.py): what those bring comes in by `adopt`.
Invariant: host pages: free + in the tree + taken == capacity; a page that somebody reads (`pin`) is not given to
           another before `unpin`, though its node may be gone. What is loaded has been verified: a page with a wrong
           digest leaves the tree with all that is below it.
Thread:    scheduler thread only; the copies are made within its calls.
Source:    SGLang HiRadixCache (SPEC G01-G03, G06).

The pages of a node are
    device ──copied (WritePolicy: at insertion, in idle time, at eviction)──> device and host ──evicted──> host
      ^                                                                                                     │
      └────────────────── evicted without a copy: gone                              load ───────────────────┘
Pages of a victim that is not worth a copy are forgotten, and with them what hangs below it on the host.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvtransfer.pages import PageKeys
from replicas.cache.base import NO_PAGES, MatchResult
from replicas.cache.events import EventLog
from replicas.cache.evict import EvictionQueue
from replicas.cache.node import TreeNode, walk
from replicas.cache.radix import RadixCache
from replicas.cache.write_policy import WritePolicy
from replicas.memory.allocator import PagedTokenToKVPoolAllocator, Pages
from replicas.types import TokenIds

SMOOTHING = 0.2  # weight of the newest load in the measured rate


class Copier(Protocol):
    """Copies pages between the device pools and the host memory of all ranks, within the call."""

    def backup(self, device_pages: Pages, host_pages: Pages) -> None: ...

    def load(self, host_pages: Pages, device_pages: Pages) -> npt.NDArray[np.bool_]:
        """Returns: [n] whether the page on the host was as it had been written, on every rank."""
        ...


class HostPages:
    """Which pages of the host memory are free; those that somebody reads become free only afterwards."""

    def __init__(self, num_pages: int) -> None:
        self._allocator = PagedTokenToKVPoolAllocator(num_pages, 1)
        self._readers: Counter[int] = Counter()
        self._late: set[int] = set()  # freed while they were read

    @property
    def num_pages(self) -> int:
        return self._allocator.num_pages

    @property
    def num_free(self) -> int:
        return self._allocator.num_free

    def take(self, num_pages: int) -> Pages:
        """Take free pages; as many are there."""
        return self._allocator.alloc(num_pages, rid="the host tier")

    def free(self, pages: Pages) -> None:
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

    @property
    def late(self) -> int:
        """The pages that are free but for their readers."""
        return len(self._late)

    def check(self, in_tree: Pages, num_taken: int) -> None:
        """Assert that each page is free, late, in the tree, or one of ``num_taken`` that are on their way in."""
        self._allocator.check()
        free = self._allocator.free_pages()
        assert len(np.unique(in_tree)) == len(in_tree), "a host page is in the tree twice"
        assert not np.intersect1d(in_tree, free).size, "a host page of the tree is free"
        held = self.num_pages - len(free)
        assert held == len(in_tree) + len(self._late) + num_taken, (
            f"{held} host pages are held: {len(in_tree)} in the tree, {len(self._late)} read, {num_taken} taken"
        )


@dataclass(slots=True)
class TierCounters:
    """What the two tiers have done; only grows, but for the rate."""

    written_pages: int = 0  # device -> host
    loaded_pages: int = 0  # host -> device
    evicted_pages: int = 0  # from the host
    wrong_pages: int = 0
    write_s: float = 0.0
    load_s: float = 0.0
    load_s_per_page: float = 0.0  # smoothed; 0 until measured


class HiRadixCache(RadixCache):
    """A RadixCache whose evicted pages move to the host and are loaded from there."""

    def __init__(
        self,
        page_size: int,
        *,
        host_pages: int,
        copier: Copier,
        write: WritePolicy,
        host_queue: Callable[[Callable[[TreeNode], bool]], EvictionQueue],
        policy: str = "lru",
        events: EventLog | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``host_queue`` makes the queue of what leaves the host, from the rule which nodes are candidates."""
        super().__init__(page_size, policy=policy, events=events, clock=clock)
        self._names_pages = True
        self.host = HostPages(host_pages)
        self.counters = TierCounters()
        self.on_copied: Callable[[TreeNode], None] = lambda node: None  # the node has a copy now: for a store
        self._copier = copier
        self._write = write
        self._host_queue = host_queue(lambda node: node.host_evictable)
        self._dirty: deque[TreeNode] = deque()  # may be copied in idle time, oldest first; some are copied or gone
        self._copies: list[tuple[Pages, Pages]] = []  # of the eviction under way: device pages, host pages

    def insert(self, token_ids: TokenIds, pages: Pages, salt: str) -> int:
        already = super().insert(token_ids, pages, salt)
        for node in self._whole_path(token_ids, salt):
            if node.on_device and not node.on_host and self._write.at_insert(node.hit_count):
                self._copy([node], force=False)
        return already

    def evict(self, num_pages: int) -> Pages:
        """As `RadixCache.evict`; the pages are free when this returns, what of them was worth it is on the host."""
        freed = super().evict(num_pages)
        self._flush_copies()
        return freed

    def reset(self) -> Pages:
        """Empty both tiers."""
        held = [node.host for node in self._nodes() if node.on_host]
        freed = super().reset()
        self._host_queue.clear()
        self._dirty.clear()
        if held:
            self.host.free(np.concatenate(held))
        return freed

    def load(self, match: MatchResult, pages: Pages) -> int:
        """Load the first ``len(pages)`` host pages behind ``match``, whose path is locked, into device ``pages``.

        Returns: how many have come; the rest of ``pages`` stays the caller's. Where it is fewer, the page behind them
        was wrong, and has left the tree with all below it.
        """
        nodes = _below(match)
        wanted = np.concatenate([node.host for node in nodes])[: len(pages)]
        started_s = self._clock()
        ok = self._copier.load(wanted, pages)
        self._count_load(len(wanted), self._clock() - started_s)
        good = len(ok) if ok.all() else int(ok.argmin())
        at = 0
        for node in nodes:
            if at == good:
                break
            if node.num_pages > good - at:
                node = self._split_node(node, good - at)
            self._to_device(node, pages[at : at + node.num_pages].copy())
            at += node.num_pages
        if good < len(ok):
            self.counters.wrong_pages += int((~ok).sum())
        return good

    def drop_host(self, match: MatchResult, first: int) -> None:
        """Forget the host pages from page ``first`` of ``match``'s sequence on: they are wrong. Nothing there is locked
        or on the device."""
        path, node = [], match.host_node
        while node is not None and node.parent is not None:
            path.append(node)
            node = node.parent
        at = 0
        for node in reversed(path):
            at += node.num_pages
            if at > first:
                assert at - node.num_pages == first, "a wrong page does not begin a node"
                self._remove_subtree(node)
                return

    def take_host(self, num_pages: int) -> Pages | None:
        """Take host pages for what a store or a peer brings; evicts for it. None: even so there are not as many."""
        self._room_on_host(num_pages)
        return self.host.take(num_pages) if self.host.num_free >= num_pages else None

    def adopt(self, token_ids: TokenIds, salt: str, host_pages: Pages, first: int) -> int:
        """Give the tree ``host_pages`` [n], sealed: pages [first, first + n) of ``token_ids``.

        Returns: how many, the last ones, the tree keeps. It frees the others: the tree has those pages, or lacks a page
        before them.
        """
        self._tick += 1
        now_s = self._clock()
        whole = token_ids[: (first + len(host_pages)) * self.page_size]
        node = self._roots.get(salt)
        if node is None:
            node = self._roots[salt] = TreeNode.root(salt)
        at = 0
        for child, common in self._path(whole, salt):
            at += common
            splits = common < child.num_pages and at < first + len(host_pages)
            node = self._split_node(child, common) if splits else child
        kept = first + len(host_pages) - at if at >= first else 0
        self.host.free(host_pages[: len(host_pages) - kept])
        if kept:
            key = whole[at * self.page_size :].copy()
            leaf = self._add_leaf(node, key, now_s, host=host_pages[len(host_pages) - kept :].copy())
            self.on_copied(leaf)
        elif not node.children and node.parent is None:
            del self._roots[salt]
        return kept

    def copy_idle(self, most_pages: int) -> int:
        """Copy up to ``most_pages`` pages that have no copy yet, oldest first, into host pages that are free.

        Returns: how many were copied; 0 when there is no more to do.
        """
        dirty, self._dirty = self._dirty, deque()
        copied = 0
        while dirty:
            node = dirty.popleft()
            if node.parent is None or not node.on_device or node.on_host:
                continue
            if copied >= most_pages or self.host.num_free < node.num_pages:
                self._dirty.append(node)
                continue
            if self._write.in_idle(node.hit_count):
                copied += self._copy([node], force=False)
        return copied

    def hottest(self, max_pages: int) -> list[TreeNode]:
        """List nodes that others may want, most used first, each after its parent; at most ``max_pages`` in all."""
        chosen: dict[TreeNode, None] = {}
        num_pages = 0
        for node in sorted(self._nodes(), key=lambda node: (-node.hit_count, -node.last_access)):
            chain: list[TreeNode] = []
            step: TreeNode | None = node
            while step is not None and step.parent is not None and step not in chosen:
                chain.append(step)
                step = step.parent
            cost = sum(each.num_pages for each in chain)
            if num_pages + cost <= max_pages:
                num_pages += cost
                chosen.update(dict.fromkeys(reversed(chain)))
        return list(chosen)

    def copy(self, nodes: Sequence[TreeNode]) -> None:
        """Copy the pages of ``nodes`` to the host where they have no copy, as far as there is room."""
        self._copy([node for node in nodes if node.on_device and not node.on_host], force=False)

    @property
    def clean_pages(self) -> int:
        """The device pages with a copy. O(nodes)."""
        return sum(len(node.pages) for node in self._nodes() if node.on_host)

    def check_host(self, num_taken: int = 0) -> None:
        """Assert the invariant of the module's docstring; ``num_taken``: host pages on their way in. O(cache)."""
        held = [node.host for node in self._nodes() if node.on_host]
        self.host.check(np.concatenate(held) if held else NO_PAGES, num_taken)
        for node in self._nodes():
            assert not node.host_evictable or node in self._host_queue, "a host page is not queued for eviction"
        assert not self._copies, "an eviction has ended before its copies"

    def check(self) -> None:
        super().check()
        self.check_host(self.num_taken())

    def num_taken(self) -> int:
        """Count the host pages that were taken and have not come in; whoever takes them tells."""
        return self._taken()

    def _file(self, node: TreeNode) -> None:
        super()._file(node)
        if node.host_evictable:
            self._host_queue.add(node)

    def _give_up(self, leaf: TreeNode, most: int) -> Pages:
        """Move up to ``most`` pages of an unlocked leaf of the device to the host, or forget them."""
        if leaf.num_pages > most:
            self._split_node(leaf, leaf.num_pages - most)
        pages, parent = leaf.pages, leaf.parent
        assert parent is not None
        if not leaf.on_host:
            self._choose_copy(leaf)
        if not leaf.on_host:
            self._remove_subtree(leaf)
            return pages
        leaf.pages = NO_PAGES
        parent.device_children -= 1
        self._evictable -= len(pages)
        self._tell_stored(leaf)
        self._file(leaf)
        self._file(parent)
        return pages

    def _choose_copy(self, leaf: TreeNode) -> None:
        """Give a victim its host pages, if it is worth that; `evict` copies at its end."""
        assert leaf.page_keys is not None
        full = self.host.num_free < leaf.num_pages
        age_s = self._host_victim_age_s() if full else None
        if leaf.children or self._write.admits(int(leaf.page_keys[0]), hits=leaf.hit_count, victim_age_s=age_s):
            self._room_on_host(leaf.num_pages, spare=leaf)
            if self.host.num_free >= leaf.num_pages and leaf.parent is not None:
                leaf.host = self.host.take(leaf.num_pages)
                self._copies.append((leaf.pages, leaf.host))

    def _copy(self, nodes: Sequence[TreeNode], *, force: bool) -> int:
        """Copy ``nodes``, on the device, into host pages. Returns: pages copied."""
        copied = 0
        for node in nodes:
            if self.host.num_free < node.num_pages:
                self._room_on_host(node.num_pages, spare=node)
            if self.host.num_free < node.num_pages or node.on_host:
                continue
            node.host = self.host.take(node.num_pages)
            self._copies.append((node.pages, node.host))
            copied += node.num_pages
            self._file(node)
        self._flush_copies()
        for node in nodes:
            if node.on_host:
                self.on_copied(node)
        return copied
