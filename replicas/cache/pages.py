"""PageStore: which pages of one pool are free, which the prefix cache keeps, and which are in quarantine.

Owns:      allocator, prefix cache and quarantine; evicts when pages are short.
Never:     knows requests or rows: cache/kv.py does.
Invariant: free + evictable + protected + reserved + quarantined == capacity; reserved ones are requests' own.
Thread:    scheduler thread only.
"""

import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

from kvtransfer.layout import Carried
from replicas.cache.base import ChunkCache, MatchResult, PrefixCache
from replicas.cache.events import CacheEvent, CacheSnapshot, EventLog
from replicas.cache.host_pages import HostTier
from replicas.cache.node import TreeNode
from replicas.cache.parts import PartAllocator, SnapshotAllocator, WindowAllocator
from replicas.cache.quarantine import Detained, Quarantine
from replicas.cache.radix import IDLE_S, RadixCache
from replicas.cache.tiers import HiRadixCache, HiRadixCacheOfStates
from replicas.cache.tree_view import CacheTree, empty_tree
from replicas.errors import PagesExhausted
from replicas.memory.allocator import PagedTokenToKVPoolAllocator, Pages
from replicas.memory.sizing import PoolSize
from replicas.types import GroupStats, PoolStats, Tally, TallyCounts, TokenIds

log = logging.getLogger(__name__)

NOTHING_CARRIED = Carried()
BATCH = 64  # pages with parts are evicted by one in so many of all: what they are worth is asked of all leaves


class PageStore:
    """The allocator, prefix cache and quarantine of one engine."""

    def __init__(
        self,
        *,
        size: PoolSize,
        prefix_cache: str,
        eviction: str,
        record_events: bool,
        clock: Callable[[], float],
        host: HostTier | None = None,
    ) -> None:
        """``host``: pages that leave the pool move there."""
        if prefix_cache not in ("radix", "chunk"):
            raise ValueError(f"unknown prefix cache {prefix_cache!r}; allowed: radix, chunk")
        self.size, self.page_size = size, size.page_size
        self.reuses_prefixes = prefix_cache == "radix"
        self._events = EventLog() if record_events and self.reuses_prefixes else None
        self.tiers: HiRadixCache | None = None
        if host is not None and self.reuses_prefixes:
            tree = HiRadixCacheOfStates if size.windows is None and size.num_snapshots else HiRadixCache
            self.tiers = tree(self.page_size, host=host, policy=eviction, events=self._events, clock=clock)
        self.radix = self.tiers or (
            RadixCache(self.page_size, policy=eviction, events=self._events, clock=clock)
            if self.reuses_prefixes
            else None
        )
        self.cache: PrefixCache = self.radix or ChunkCache()
        self.parts: PartAllocator | None = None  # of pages that have more than K and V of all layers
        if size.windows is not None:
            self.parts = WindowAllocator(size.num_pages, size.page_size, size.windows)
        elif size.num_snapshots and self.reuses_prefixes:
            self.parts = SnapshotAllocator(
                size.num_pages,
                size.page_size,
                num_snapshots=size.num_snapshots,
                snapshot_pages=size.snapshot_pages,
            )
            self.parts.find_room = self._find_room
        if self._events is not None and self.parts is not None:
            self._events.parts = self.parts.record()
            if self.tiers is not None:
                self.tiers.host.told = self._events.parts.on_host
        self.allocator = self.parts or PagedTokenToKVPoolAllocator(size.num_pages, size.page_size)
        self.quarantine = Quarantine()
        self.part_bytes: Mapping[str, int] = {}  # of a page in each group, all ranks (`sizing.group_parts`)
        self.evicted_tokens = 0  # when pages were short
        self.flushed_tokens = 0  # by `flush`
        self.alloc_failures = 0
        self.failed_checks = 0  # `count_lost`

    @property
    def num_pages(self) -> int:
        return self.allocator.num_pages

    @property
    def evictable_pages(self) -> int:
        """Pages that can be evicted: of the tree, and of snapshots."""
        return self.cache.evictable_pages + (0 if self.parts is None else self.parts.num_part_pages)

    @property
    def held_pages(self) -> int:
        """Pages that are neither free nor evictable."""
        return self.num_pages - self.allocator.num_free - self.evictable_pages

    @property
    def event_seq(self) -> int:
        """The number of the last cache event; 0 while none are recorded."""
        return self._events.seq if self._events is not None else 0

    def available_tokens(self) -> int:
        """Count the tokens in pages that are free or can be evicted; none where requests may see too many windows."""
        if self.parts is not None and self.parts.overbooked:
            return 0
        return (self.allocator.num_free + self.evictable_pages) * self.page_size

    def make_room(self, num_pages: int, needed_by: str, tenant: str = "") -> None:
        """Evict until ``num_pages`` are free; raises PagesExhausted, with nothing evicted, if that cannot be.
        ``tenant``: whose request needs them; "" if it is not one's alone."""
        short = num_pages - self.allocator.num_free
        if short <= 0:
            return
        if short > self.evictable_pages:
            self.alloc_failures += 1
            pool = self.stats()
            quarantined = f", {pool.quarantined_pages} in quarantine" if pool.quarantined_pages else ""
            raise PagesExhausted(
                f"{needed_by} needs {num_pages} pages of {self.page_size} tokens; of {pool.num_pages} pages "
                f"{pool.free_pages} are free, {pool.evictable_pages} evictable, {pool.protected_pages} protected and "
                f"{pool.reserved_pages} reserved{quarantined}: retract {short - pool.evictable_pages} pages' worth of "
                "requests"
            )
        if self._events is not None:
            self._events.needed_by = tenant
        most, of_snapshots = max(short, self.num_pages // BATCH), 0
        parts = self.parts
        if self.radix is not None and isinstance(parts, SnapshotAllocator):
            freed, of_snapshots = self.radix.evict_ends(most, parts)
        elif self.radix is not None and isinstance(parts, WindowAllocator):
            of_windows, worth = parts, parts.worth()
            freed = self.radix.evict_least(most, lambda node: of_windows.worth_of(node.pages, worth))
        else:
            freed = self.cache.evict(short)
        if self._events is not None:
            self._events.needed_by = ""
        assert len(freed) + of_snapshots >= short, f"{short} pages were evictable, {len(freed)} + {of_snapshots} came"
        self.allocator.free(freed)
        self.evicted_tokens += len(freed) * self.page_size

    def _find_room(self, num_pages: int) -> bool:
        """Make room for the pages of a snapshot, if that is possible."""
        if num_pages > self.allocator.num_free + self.evictable_pages:
            return False
        self.make_room(num_pages, "a snapshot")
        return True

    def flush(self) -> None:
        """Empty the prefix cache; nothing in it may be locked."""
        freed = self.cache.reset()
        self.allocator.free(freed)
        self.flushed_tokens += len(freed) * self.page_size

    def evicted_idle_s(self) -> TallyCounts:
        """Return how long evicted pages had been idle; any thread."""
        return self.radix.evicted_idle_s.read() if self.radix is not None else Tally(IDLE_S).read()

    def load(self, match: MatchResult, num_pages: int, needed_by: str, tenant: str = "") -> Pages:
        """Load the first ``num_pages`` of the host behind ``match``, whose path is locked; ``tenant``: as `make_room`.
        Returns: those that came. Raises: PagesExhausted."""
        assert self.tiers is not None
        self.make_room(num_pages, needed_by, tenant)
        pages = self.allocator.alloc(num_pages, rid=needed_by)
        num_loaded = 0
        try:
            num_loaded = self.tiers.load(match, pages)
        finally:
            self.allocator.free(pages[num_loaded:])
        return pages[:num_loaded]

    def load_snapshot(self, node: TreeNode) -> bool:
        """Load the snapshot of the last page of ``node``, whose path is locked, from the host. There is room. Returns:
        whether it was right."""
        assert isinstance(self.tiers, HiRadixCacheOfStates)
        assert isinstance(self.parts, SnapshotAllocator)
        pages = self.allocator.alloc(self.parts.snapshot_pages, rid="a snapshot")
        snapshot = None
        try:
            snapshot = self.tiers.load_snapshot(node, pages)
        finally:
            if snapshot is None:
                self.allocator.free(pages)
        if snapshot is not None:
            self.parts.put(int(node.pages[-1]), snapshot)
        return snapshot is not None

    def lend(
        self, token_ids: TokenIds, salt: str, rid: str, carried: Carried = NOTHING_CARRIED
    ) -> tuple[Pages, Detained]:
        """Lock the longest prefix of ``token_ids`` [n] that is cached and behind which a request can go on, so that a
        peer may read it. What is on the host is loaded first, as far as there is room, but where there are parts.

        Returns: its pages, and the receipt for `release_quarantined`, whose own pages are for what is ``carried``.
        Raises:  PagesExhausted without room for these.
        """
        match = self.cache.match_prefix(token_ids, salt)
        if self.tiers is not None and self.parts is None and match.host_node is not None and match.host_len:
            path = self.tiers.inc_lock_ref(match.host_node)
            with contextlib.suppress(PagesExhausted):
                self.load(match, match.host_len // self.tiers.page_size, rid)
            self.tiers.dec_lock_ref(path)
            match = self.cache.match_prefix(token_ids, salt, count_hit=False)
        most = carried.num_pages(match.prefix_len, self.page_size)
        self.make_room(most, rid)  # first, since it may evict a part too
        own = PagedTokenToKVPoolAllocator.alloc(self.allocator, most, rid=rid)
        if self.parts is not None:
            match = self.cache.match_prefix(token_ids, salt, count_hit=False)
            reach = self.parts.reach(match.pages) * self.page_size
            match = self.cache.match_prefix(token_ids[:reach], salt, count_hit=False)
        num_pages = carried.num_pages(match.prefix_len, self.page_size) if match.prefix_len else 0
        self.allocator.free(own[num_pages:])
        receipt = Detained(rid, own[:num_pages], self.cache.inc_lock_ref(match.node))
        self.quarantine.add(receipt)
        return match.pages, receipt

    def release_quarantined(self, receipt: Detained) -> None:
        """Free the pages of ``receipt``, which no peer reads or writes."""
        self.quarantine.remove(receipt)
        if receipt.lock is not None:
            self.cache.dec_lock_ref(receipt.lock)
        self.allocator.free(receipt.pages)

    def stats(self) -> PoolStats:
        """Count the pages by state (SPEC D14)."""
        free, evictable, protected = self.allocator.num_free, self.evictable_pages, self.cache.protected_pages
        quarantined = self.quarantine.num_pages
        return PoolStats(
            page_size=self.page_size,
            num_pages=self.num_pages,
            free_pages=free,
            evictable_pages=evictable,
            protected_pages=protected,
            reserved_pages=self.num_pages - free - evictable - protected - quarantined,
            quarantined_pages=quarantined,
        )

    def groups(self) -> tuple[GroupStats, ...]:
        """Count what pages have by group."""
        parts, held = self.parts, self.num_pages - self.allocator.num_free
        found = {"full": (self.num_pages, held, 0, self.evicted_tokens // self.page_size)}
        if parts is not None:
            num_parts, most = parts.parts.num_pages - parts.parts.num_free, parts.parts.num_pages
            found["full"] = (self.num_pages, held - parts.num_part_pages, *found["full"][2:])
            found[parts.kind] = (most, num_parts, parts.num_holes, parts.evicted)
        return tuple(
            GroupStats(
                group=group,
                capacity_bytes=most * self.part_bytes.get(group, 0),
                used_bytes=num_parts * self.part_bytes.get(group, 0),
                num_parts=num_parts,
                num_holes=num_holes,
                num_evicted=num_evicted,
            )
            for group, (most, num_parts, num_holes, num_evicted) in found.items()
        )

    def count_lost(self, num_rows: int) -> None:
        """Count, and log the first time, that pages or rows are held though no request is open (cache/kv.py)."""
        if not self.failed_checks:
            pool = self.stats()
            log.error(
                "%d of %d pages and %d rows are lost: no request is open, and %d pages are free, %d evictable, %d "
                "protected; restart this replica when it can be spared, and report this as a defect of Manta",
                self.held_pages, pool.num_pages, num_rows, pool.free_pages, pool.evictable_pages, pool.protected_pages,
            )  # fmt: skip
        self.failed_checks += 1

    def drain_events(self) -> tuple[CacheEvent, ...]:
        """Return the cache events since the last call; none unless they are recorded."""
        return self._events.drain() if self._events is not None else ()

    def snapshot(self) -> CacheSnapshot:
        """Return what is cached now, for a reader that lost events."""
        if self.radix is None or self._events is None:
            return CacheSnapshot(seq=0, stored=())
        self._events.tell_parts()
        snapshot = self.radix.snapshot()
        log = self._events.parts
        return snapshot if log is None else replace(snapshot, parts=log.told(), host_parts=log.told_on_host())

    def tree(self, *, max_depth: int, max_nodes: int, min_tokens: int) -> CacheTree:
        """Return the largest subtrees of the prefix cache; an empty tree without reuse."""
        if self.radix is None:
            return empty_tree(self.page_size)
        return self.radix.tree(max_depth=max_depth, max_nodes=max_nodes, min_tokens=min_tokens, parts=self.parts)
