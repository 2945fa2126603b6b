"""HiRadixCache: the radix tree over two tiers, the device pool (L1) and host memory (L2).

Owns:      the host pages, and which nodes have a copy there. The bytes are copied by ``copier``, of all ranks.
Never:     waits for a store or a peer (cache/store_tier.py): what those bring comes in by `adopt`.
Invariant: host pages: free + in the tree + taken == capacity; a page that somebody reads (`pin`) is not given to
           another before `unpin`, though its node may be gone. What is loaded has been verified: a page with a wrong
           digest leaves the tree with all that is below it.
Thread:    scheduler thread only; the copies are made, or begun, within its calls.
Source:    SGLang HiRadixCache (SPEC G01-G03, G06).

The pages of a node are
    device ──copied (WritePolicy: at insertion, in idle time, at eviction)──> device and host ──evicted──> host
      ^                                                                                                     │
      └────────────────── evicted without a copy: gone                              load ───────────────────┘
Pages of a victim that is not worth a copy are forgotten, and with them what hangs below it on the host.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np

from replicas.cache.arc import host_queue
from replicas.cache.base import MatchResult
from replicas.cache.ends import Snapshot, Snapshots
from replicas.cache.events import EventLog
from replicas.cache.host_pages import HostPages, HostTier, TierCounters
from replicas.cache.node import NO_PAGES, TreeNode, path_to, walk
from replicas.cache.radix import RadixCache
from replicas.cache.write_policy import WritePolicy
from replicas.errors import MantaError
from replicas.memory.allocator import Pages
from replicas.types import TierStats, TokenIds

log = logging.getLogger(__name__)

UNMEASURED_RATIO = 8  # tokens loaded in the time of one computed, until both are measured
MEASURE_EVERY = 32  # of the prefixes that seem quicker to compute, the share that is loaded
LONG = 4  # a node this many times as long as what is to be copied in idle time is cut
GHOSTS_PER_PAGE = 4  # pages that have left, remembered for each host page


class HiRadixCache(RadixCache):
    """A RadixCache whose evicted pages move to the host and are loaded from there."""

    cuts: ClassVar[bool] = True  # a request can go on behind any page

    def __init__(
        self,
        page_size: int,
        *,
        host: HostTier,
        policy: str = "lru",
        events: EventLog | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(page_size, policy=policy, events=events, clock=clock)
        self._names_pages = True
        self.host = HostPages(host.num_pages)
        self.counters = TierCounters()
        self.on_copied: Callable[[TreeNode], None] = lambda node: None  # it has a copy now: news for a store
        self.clean_pages = 0  # of the device, with a copy
        self.compute_s_per_token = 0.0  # by the engine's steps; 0 until measured
        self.copier = host.copier
        self._write = WritePolicy.make(host.write, ghost_capacity=GHOSTS_PER_PAGE * host.num_pages)
        self._host_queue = host_queue(
            host.eviction,
            host.num_pages,
            retention=self.retention,
            write=self._write,
            spare=self._is_spare,
        )
        self.retention.queues.append(self._host_queue)
        self._dirty: deque[TreeNode] = deque()  # to be copied in idle time, oldest first; some are copied or gone
        # (node, device pages, host pages) whose bytes the call under way copies at its end
        self._copies: list[tuple[TreeNode, Pages, Pages]] = []

    def insert(self, token_ids: TokenIds, pages: Pages, salt: str, *, priority: int = 0) -> int:
        already = super().insert(token_ids, pages, salt, priority=priority)
        if self._write.rule.insert_hits is not None:
            for node, _ in self._path(token_ids, salt):
                if not node.on_host and self._write.at_insert(node.hit_count):
                    self._give_host_pages(node)
            self._copy(wait=False)
        return already

    def evict(self, num_pages: int) -> Pages:
        """As `RadixCache.evict`; what of the freed pages was worth it is on the host, or on its way there."""
        freed = super().evict(num_pages)
        self._copy(wait=False)
        return freed

    def reset(self) -> Pages:
        """Empty both tiers."""
        held = [node.host for node in self._nodes() if node.on_host]
        freed = super().reset()
        self._write.gaps.clear()
        self._dirty.clear()
        for pages in held:
            self.host.free(pages)
        self.clean_pages = 0
        return freed

    def load(self, match: MatchResult, pages: Pages) -> int:
        """Load the first ``len(pages)`` host pages behind ``match``, whose whole path is locked, into device ``pages``.

        Returns: how many have come; the rest of ``pages`` stays the caller's. If they are fewer, the page behind them
        is wrong: `drop_host` it when the path is unlocked.
        """
        path = path_to(match.host_node, below=match.node)
        wanted = np.concatenate([node.host for node in path])[: len(pages)]
        started_s = self._clock()
        ok = self.copier.load(wanted, pages)
        good = len(ok) if ok.all() else int(ok.argmin())
        load_s = self._clock() - started_s
        self.counters.loaded(len(ok), load_s, num_wrong=int((~ok).sum()))
        self.counters.saved_s += good * self.page_size * self.compute_s_per_token - load_s
        at = 0
        for node in path:
            if at == good:
                break
            if node.num_pages > good - at:
                node = self._split_node(node, good - at)
            self._to_device(node, pages[at : at + node.num_pages].copy())
            at += node.num_pages
        return good

    def worth_loading(self, num_pages: int = 1, num_tokens: int = 0) -> bool:
        """Whether ``num_pages`` are loaded from the host sooner than ``num_tokens``, or a page's, are computed, as far
        as both have been measured. Now and then they are loaded all the same, to measure again."""
        compute_s = self.compute_s_per_token * (num_tokens or self.page_size)
        if not 0 < compute_s < num_pages * self.counters.load_s_per_page:
            return True
        self.counters.slow_loads += 1
        return self.counters.slow_loads % MEASURE_EVERY == 0

    def load_budget(self, chunk_size: int) -> int:
        """Count the tokens that load in the time in which ``chunk_size`` are computed."""
        load_s = self.counters.load_s_per_page / self.page_size
        ratio = self.compute_s_per_token / load_s if load_s and self.compute_s_per_token else UNMEASURED_RATIO
        return max(int(chunk_size * ratio), self.page_size)

    def drop_host(self, token_ids: TokenIds, salt: str, first: int) -> None:
        """Forget page ``first`` of ``token_ids``, which is on the host alone, and all below it."""
        at = 0
        for child, common in self._path(token_ids, salt):
            if at + common > first:
                assert not child.on_device, "the device uses a page that is to be dropped"
                if at < first:
                    self._split_node(child, first - at)
                self._drop(child)
                return
            at += common

    def take_host(self, num_pages: int, *, spare: Callable[[TreeNode], bool] = lambda node: False) -> Pages | None:
        """Take host pages for what a store or a peer brings; evicts for it, up to the first node to ``spare``. They
        come back by `adopt` or `HostPages.give_back`. None: even so there are not as many."""
        self._room_on_host(num_pages, spare)
        return self.host.take(num_pages, coming=True) if self.host.num_free >= num_pages else None

    def adopt(self, token_ids: TokenIds, salt: str, host_pages: Pages, first: int, *, stored: bool = False) -> int:
        """Give the tree ``host_pages`` [n] of `take_host`, sealed: pages [first, first + n) of ``token_ids``.

        Returns: how many, the last ones, the tree keeps. The others are freed: the tree has those pages, or lacks a
        page before them.
        """
        self.host.arrived(len(host_pages))
        end, at = first + len(host_pages), 0
        whole = token_ids[: end * self.page_size]
        node = self._roots.get(salt)
        for child, common in self._path(whole, salt):
            at += common
            node = self._split_node(child, common) if common < child.num_pages and at < end else child
        kept = end - at if at >= first else 0
        self.host.free(host_pages[: len(host_pages) - kept])
        if kept:
            self._tick += 1
            if node is None:
                node = self._roots[salt] = TreeNode.root(salt)
            key = whole[at * self.page_size :].copy()
            leaf = self._add_leaf(node, key, self._clock(), host=host_pages[len(host_pages) - kept :].copy())
            leaf.stored = stored
            self.on_copied(leaf)
        return kept

    def credit(self, leaf: TreeNode, hits: int, used_s: float) -> None:
        """Take over what the peer that sent ``leaf`` knows of its uses."""
        if hits and not leaf.hit_count:
            self._host_queue.warms(leaf)
        leaf.hit_count, leaf.used_s = max(hits, leaf.hit_count), used_s
        self.retention.refile(leaf)

    def copy_idle(self, most_pages: int, *, to_store: bool) -> int:
        """Copy about ``most_pages`` pages that have no copy yet, oldest first, into host pages that are free; a node is
        copied whole unless it is much longer than that.

        Args:    to_store: all pages, since a store takes them from the host, and into the host pages of what both the
                 device and the store have too; else as many as the write policy wants.
        Returns: how many were copied; 0 when there is nothing to do.
        """
        wanted = self.evictable_pages * (1.0 if to_store else self._write.rule.idle_fraction)
        if self.clean_pages >= wanted:
            return 0
        copied, left = 0, len(self._dirty)
        while left and copied < most_pages:
            node, left = self._dirty.popleft(), left - 1
            if node.parent is None or not node.on_device or node.on_host or (to_store and node.stored):
                continue
            if node.num_pages > LONG * most_pages:
                self._split_node(node, node.num_pages - most_pages)
            if to_store:
                self._room_on_host(node.num_pages, spare=lambda other: not (other.on_device and other.stored))
            if self.host.num_free < node.num_pages or node.page_keys is None:
                self._dirty.append(node)
            elif self._write.admits(hits=node.hit_count, victim_idle_s=None):
                self._give_host_pages(node)
                copied += len(node.host)
        self._copy()
        return copied

    def stats(self) -> TierStats:
        """Count what the host tier holds and has done."""
        counted, ps = self.counters, self.page_size
        return TierStats(
            host_pages=self.host.num_pages,
            host_used_pages=self.host.num_pages - self.host.num_free,
            clean_pages=self.clean_pages,
            host_written_tokens=counted.written_pages * ps,
            host_evicted_tokens=counted.evicted_pages * ps,
            pushed_tokens=counted.pushed_pages * ps,
            received_tokens=counted.received_pages * ps,
            host_write_s=counted.write_s,
            host_load_s=counted.load_s,
            saved_s=counted.saved_s,
            host_wrong_pages=counted.wrong_pages,
            slow_loads=counted.slow_loads,
            host_s_per_token=counted.load_s_per_page / ps,
        )

    def hottest(self, max_pages: int) -> list[TreeNode]:
        """List the nodes that were used most, each after its parent; at most ``max_pages`` pages in all. O(cache)."""
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

    def where(self, token_ids: TokenIds, salt: str, first: int) -> tuple[Pages, Pages]:
        """Return the host pages and the device pages of the pages of ``token_ids`` from ``first`` on, as many as are
        cached; 0 stands for none."""
        hosts, devices, at = [NO_PAGES], [NO_PAGES], 0
        for node, common in self._path(token_ids, salt):
            start, at = max(first - at, 0), at + common
            for parts, pages in ((hosts, node.host), (devices, node.pages)):
                parts.append(pages[start:common] if len(pages) else np.zeros(max(common - start, 0), dtype=np.int32))
        return np.concatenate(hosts), np.concatenate(devices)

    def copy(self, nodes: Sequence[TreeNode]) -> None:
        """Copy ``nodes`` to the host where they have no copy, as far as there is room."""
        for node in nodes:
            if node.on_device and not node.on_host:
                self._give_host_pages(node)
        self._copy()

    def check(self) -> None:
        super().check()
        held = [node.host for node in self._nodes() if node.on_host]
        self.host.check(np.concatenate(held) if held else NO_PAGES)
        self._write.gaps.check()
        clean = sum(len(node.pages) for node in self._nodes() if node.on_host)
        assert clean == self.clean_pages, f"{clean} device pages have a copy, {self.clean_pages} are counted"
        assert not self._copies, "a call has ended before its copies were made"

    def _use(self, node: TreeNode, now_s: float, *, hit: bool) -> None:
        if hit and not node.hit_count:
            self._host_queue.warms(node)
            if not node.on_device:
                self._write.gaps.waited(now_s - node.used_s)
        super()._use(node, now_s, hit=hit)

    def _split_node(self, node: TreeNode, at: int) -> TreeNode:
        head = super()._split_node(node, at)
        if not head.on_host:
            self._is_dirty(head)
        if any(each is node for each, _, _ in self._copies):
            self._copies.append((head, NO_PAGES, NO_PAGES))
        self.retention.file(head)
        return head

    def _is_dirty(self, node: TreeNode) -> None:
        """Queue ``node``, without a copy, for idle time. There may never be any: what is copied or gone leaves when it
        is more than half."""
        self._dirty.append(node)
        if len(self._dirty) > 2 * self.num_nodes + 64:
            waiting = dict.fromkeys(each for each in self._dirty if each.parent is not None and not each.on_host)
            self._dirty = deque(waiting)

    def _added(self, leaf: TreeNode, now_s: float) -> None:
        if leaf.on_device:
            assert leaf.page_keys is not None
            self._is_dirty(leaf)
            if known := self._write.gaps.computed(leaf.page_keys, now_s):
                (leaf if known == leaf.num_pages else self._split_node(leaf, known)).hit_count = 1
        else:
            self._host_queue.entered(leaf)

    def _to_device(self, node: TreeNode, pages: Pages) -> None:
        super()._to_device(node, pages)
        self._host_queue.refile(node)
        self.clean_pages += len(pages)

    def _give_up(self, leaf: TreeNode) -> Pages:
        """Take an unlocked leaf of the device off it: to the host, or forget it."""
        pages, parent = leaf.pages, leaf.parent
        assert parent is not None
        # children are on the host, and nothing without it
        if not leaf.on_host and (leaf.children or (self.cuts and self._is_worth_copying(leaf, leaf.num_pages))):
            self._give_host_pages(leaf)
        if not leaf.on_host:
            self._drop(leaf)
            return pages
        self._queue.left(leaf)
        leaf.pages = NO_PAGES
        parent.device_children -= 1
        self.evictable_pages -= len(pages)
        self.clean_pages -= len(pages)
        self._tell_stored(leaf)
        self.retention.file(leaf)
        self.retention.file(parent)
        return pages

    def _is_spare(self, node: TreeNode) -> bool:
        """Tell whether the host may lose ``node`` for nothing: the device has it too, and copies it again when it goes
        there. Then the two tiers hold most between them."""
        return self._write.rule.at_eviction and node.on_device

    def _is_worth_copying(self, node: TreeNode, num_pages: int) -> bool:
        """Tell whether ``node`` is worth ``num_pages`` on the host: it is kept for who comes back, or the policy says
        so."""
        victim = self._host_queue.peek() if self.host.num_free < num_pages else None
        missed = victim is not None and not self._host_queue.order.spare(victim)
        idle_s = self._clock() - victim.used_s if victim is not None and missed else None
        return self.retention.keeps(node) or self._write.admits(hits=node.hit_count, victim_idle_s=idle_s)

    def _give_host_pages(self, node: TreeNode) -> None:
        """Give a node of the device its pages on the host, if they can be had; `_copy` fills them."""
        if node.num_pages > self.host.num_pages - self.host.coming:
            return  # others' pages would leave for nothing
        self._room_on_host(node.num_pages)
        if self.host.num_free >= node.num_pages and node.parent is not None:
            node.host = self.host.take(node.num_pages)
            self.clean_pages += node.num_pages
            self._host_queue.entered(node)
            self._copies.append((node, node.pages, node.host))
            self.retention.file(node)

    def _copy(self, *, wait: bool = True) -> None:
        """Make the copies that were decided on since the last call. ``wait``: for them, as no request does."""
        copies, self._copies = self._copies, []
        if not copies:
            return
        device = np.concatenate([pages for _, pages, _ in copies])
        host = np.concatenate([pages for _, _, pages in copies])
        if len(copies) > 1:  # a page that was given to one node, evicted and given to another: the last has it
            _, last = np.unique(host[::-1], return_index=True)
            device, host = device[::-1][last], host[::-1][last]
        started_s = self._clock()
        try:
            self.copier.backup(device, host, wait=wait)
        except (MantaError, RuntimeError) as error:  # a rank that is gone ends the engine at the next step
            log.warning("%d pages that leave the device are forgotten: %s", len(host), error)
            for node, _, _ in copies:
                if node.on_host and node.parent is not None:
                    self._drop(node)
            return
        self.counters.written_pages += len(host)
        taken_s = self._clock() - started_s
        self.counters.write_s += taken_s
        if wait:
            self.counters.write_s_per_page = taken_s / len(host)
        for node, _, _ in copies:
            if node.on_host and node.parent is not None:
                self.on_copied(node)

    def _remove_leaf(self, leaf: TreeNode) -> None:
        super()._remove_leaf(leaf)
        assert leaf.page_keys is not None
        self._write.gaps.dropped(leaf.page_keys, leaf.used_s)

    def _room_on_host(self, num_pages: int, spare: Callable[[TreeNode], bool] = lambda node: False) -> None:
        """Evict from the host until ``num_pages`` are free there, or nothing more can go, or is next to ``spare``."""
        self.retention.expire()
        while (short := num_pages - self.host.num_free) > 0 and (node := self._host_queue.pop()) is not None:
            if spare(node):
                self._host_queue.add(node)
                return
            if node.num_pages > short and self.cuts:
                self._split_node(node, node.num_pages - short)
            self.counters.evicted_pages += node.num_pages
            self._drop(node)

    def _drop(self, top: TreeNode) -> None:
        """Drop the copy of ``top`` where the device has it too; else remove it, unlocked, and what is below it on the
        host alone."""
        if top.on_device and top.on_host:
            self._host_queue.left(top)
            self.host.free(top.host)
            self.clean_pages -= top.num_pages
            top.host = NO_PAGES
            return
        for node in [*reversed(list(walk([top]))), top]:
            if node.on_host:
                self._host_queue.left(node)
            self.host.free(node.host)
            self._remove_leaf(node)


class HiRadixCacheOfStates(HiRadixCache):
    """The same where a request goes on behind those pages alone that have a snapshot of recurrent states.

    One that the device gives up is copied with the pages of its node; K and V that lead to no snapshot are not, and go
    first on the host. It comes back into pages of the device by `load_snapshot`.
    """

    cuts = False

    def evict_ends(self, num_pages: int, snapshots: Snapshots) -> tuple[Pages, int]:
        """As `RadixCache.evict_ends`; what of that was worth it is on the host, or on its way there."""
        freed = super().evict_ends(num_pages, snapshots)
        self._copy(wait=False)
        return freed

    def load_snapshot(self, node: TreeNode, pages: Pages) -> Snapshot | None:
        """Load the snapshot of the last page of ``node``, whose path is locked, from the host into device ``pages``.
        Returns: it as it lies there; None: it was wrong, and has gone."""
        held, started_s = self.host.snapshot_of(int(node.host[-1])), self._clock()
        ok = self.copier.load(held.pages, pages)
        load_s = self._clock() - started_s
        self.counters.loaded(len(ok), load_s, num_wrong=int((~ok).sum()))
        self.counters.saved_s -= load_s
        if ok.all():
            return replace(held, pages=pages)
        self.host.drop_snapshots(node.host[-1:])
        self.retention.refile(node)  # it is spare now
        return None

    def _is_spare(self, node: TreeNode) -> bool:
        """Tell whether ``node`` leads to no snapshot on the host."""
        return not self.host.has_snapshot(node.host).any()

    def _give_up_snapshot(self, node: TreeNode, page: int, snapshots: Snapshots) -> int:
        """Give up the snapshot of a page on the device: to the host, with the pages of ``node``, or for good."""
        (at,) = np.flatnonzero(node.pages == page).tolist()
        has_copy = node.on_host and self.host.has_snapshot(node.host[at : at + 1]).all()
        if not has_copy:
            self._copy_snapshot(node, at, snapshots.snapshot_of(page))
        return super()._give_up_snapshot(node, page, snapshots)

    def _copy_snapshot(self, node: TreeNode, at: int, snapshot: Snapshot) -> None:
        """Give the snapshot of page ``at`` of ``node`` pages on the host, and the node, if they are worth it and can be
        had; `_copy` fills them. A policy that copies K and V before the device evicts them takes all snapshots."""
        num_pages = len(snapshot.pages) + (0 if node.on_host else node.num_pages)
        if num_pages > self.host.num_pages - self.host.coming:
            return
        fits = node.on_host and self.host.num_free >= num_pages
        if self._write.rule.at_eviction and not fits and not self._is_worth_copying(node, num_pages):
            return
        lock = self.inc_lock_ref(node)
        self._room_on_host(num_pages)
        if self.host.num_free >= num_pages:
            if not node.on_host:
                self._give_host_pages(node)
            assert node.page_keys is not None
            pages = self.host.take(len(snapshot.pages))
            self.host.keep(int(node.host[at]), replace(snapshot, pages=pages), int(node.page_keys[at]))
            self._copies.append((node, snapshot.pages, pages))
        self.dec_lock_ref(lock)
