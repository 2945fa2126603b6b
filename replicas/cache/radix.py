"""RadixCache: a tree over token ids whose edges own the KV pages of those tokens.

Owns:      the pages of every prefix that it keeps, and the locks on them. Of nodes whose pages are only on the host it
           knows no more than that they are not on the device (cache/tiers.py makes them).
Never:     frees pages itself: `evict` and `reset` hand their ids to the caller. Knows no requests.
Invariant: keys are whole pages; siblings differ in their first page; a child's lock_ref <= its parent's;
           evictable + protected == pages over all nodes; different salts have different roots and share nothing.
Thread:    scheduler thread only.
Source:    SGLang radix cache (Zheng et al. 2024, arXiv:2312.07104, section 3), paged, with page ids for values.
"""

import heapq
import itertools
import time
from collections.abc import Callable, Iterator

import numpy as np

from kvtransfer.pages import Tier, page_keys
from replicas.cache.audit import audit_tree
from replicas.cache.base import Lock, MatchResult
from replicas.cache.ends import Snapshots, Victims
from replicas.cache.events import CacheSnapshot, EventLog, PagesStored
from replicas.cache.node import NO_PAGES, TreeNode, first_page, key_before, walk
from replicas.cache.retention import POLICY, EvictionQueue, Rank, Retention, TierOrder
from replicas.cache.tree_view import CacheTree, PagesWithParts, cache_tree
from replicas.memory.allocator import Pages
from replicas.types import Tally, TokenIds

IDLE_S = (.1, .5, 1, 5, 10, 30, 60, 300, 900, 3600, 14400)  # fmt: skip
SIBLINGS = 64  # children of a node that may be those that go on with less than a page


class RadixCache:
    """The PrefixCache that reuses prefixes.

    Costs: match O(length / SIMD + nodes on the path); insert the same plus O(new pages);
    evict O(freed pages + victims log nodes)."""

    def __init__(
        self,
        page_size: int,
        *,
        policy: str = "lru",
        events: EventLog | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.page_size = page_size
        self.events = events  # None: nothing is recorded or hashed
        self.evicted_idle_s = Tally(IDLE_S)  # time since the last use of what `evict` took
        self.retention = Retention(clock)
        self.evictable_pages = self.protected_pages = 0  # on the device
        self.num_nodes = 0  # without the roots
        self._clock = clock
        order = TierOrder(policy=policy, pages=lambda node: node.pages, can_go=lambda node: node.evictable)
        self._queue = EvictionQueue(self.retention, order)
        self.retention.queues.append(self._queue)
        self._roots: dict[str, TreeNode] = {}  # by salt; a root lives while it has children
        self._nowhere = TreeNode.root("")  # what an empty match locks when its salt has no root
        self._tick = 0  # logical clock: one per match or insert
        self._names_pages = events is not None  # nodes know their page keys

    def match_prefix(self, token_ids: TokenIds, salt: str, *, count_hit: bool = True) -> MatchResult:
        """Find the longest cached prefix in whole pages; split an edge that matches in part (SPEC E04).

        Args:    token_ids: [n] contiguous int32. count_hit: False where a request looks up its own insertion.
        """
        self._tick += 1
        now_s = self._clock()
        node = deepest = self._roots.get(salt, self._nowhere)
        parts: list[Pages] = []
        length = host_len = 0
        for child, common in self._path(token_ids, salt):
            deepest = child if common == child.num_pages else self._split_node(child, common)
            self._use(deepest, now_s, hit=count_hit)
            if deepest.on_device:
                node = deepest
                parts.append(node.pages)
                length += common
            else:
                host_len += common
        pages = np.concatenate(parts) if parts else NO_PAGES
        return MatchResult(length * self.page_size, pages, node, host_len * self.page_size, deepest)

    def peek_len(self, token_ids: TokenIds, salt: str) -> int:
        """Count the tokens that `match_prefix` would find, on the device or the host; change nothing."""
        return sum(common for _, common in self._path(token_ids, salt)) * self.page_size

    def peek_path(self, token_ids: TokenIds, salt: str) -> list[int]:
        """Return numbers that name its nodes, from the root on, until the cache changes; change nothing."""
        return [id(node) for node, _ in self._path(token_ids, salt)]

    def nodes_of(self, token_ids: TokenIds, salt: str, *, split: bool = False) -> list[TreeNode]:
        """List the nodes of the longest cached prefix that it has whole, from the root on; use none. With ``split`` one
        that it has in part is cut, so that they hold all of the prefix."""
        nodes = []
        for child, common in self._path(token_ids, salt):
            if common == child.num_pages:
                nodes.append(child)
            elif split:
                nodes.append(self._split_node(child, common))
        return nodes

    def kept_behind(self, node: TreeNode, token_ids: TokenIds, most: int) -> TokenIds:
        """Return up to ``most`` tokens of a sequence that goes on behind ``token_ids``, which follow ``node``: of some,
        the one that was added last, where a node has no more than SIBLINGS newer children. Change nothing."""
        at, ps, found = 0, self.page_size, list[TokenIds]()
        while most > 0:
            rest = token_ids[at:]
            if len(rest) >= ps:
                child = node.children.get(first_page(rest, ps))
            else:
                newest = itertools.islice(reversed(node.children.values()), SIBLINGS)
                child = next((each for each in newest if np.array_equal(each.key[: len(rest)], rest)), None)
            if child is None or not np.array_equal(child.key[: len(rest)], rest[: len(child.key)]):
                break
            found.append(child.key[len(rest) : len(rest) + most])
            most -= len(found[-1])
            node, at = child, at + len(child.key)
        return np.concatenate(found) if found else token_ids[:0]

    def insert(self, token_ids: TokenIds, pages: Pages, salt: str, *, priority: int = 0) -> int:
        """Keep ``pages`` as the K/V of ``token_ids`` [n * page_size], which a request of ``priority`` computed.

        Returns: the tokens that were on the device before (SPEC E07, K5); the pages up to there stay the caller's.
        """
        assert len(token_ids) == len(pages) * self.page_size, f"{len(token_ids)} tokens are not {len(pages)} pages"
        if not len(pages):
            return 0
        self._tick += 1
        now_s = self._clock()
        node = self._roots.get(salt)
        if node is None:
            node = self._roots[salt] = TreeNode.root(salt)
        length = at = 0
        for child, common in self._path(token_ids, salt):
            start, at = at, at + common
            # a sequence that ends inside an edge changes nothing of it on the device; one that leaves it there needs a
            # branch; on the host alone, what the sequence has of it comes to the device
            splits = common < child.num_pages and (at < len(pages) or not child.on_device)
            node = self._split_node(child, common) if splits else child
            node.priority = max(node.priority, priority)
            node.ahead = max(node.ahead, len(token_ids) - start * self.page_size)
            self._use(node, now_s, hit=False)
            if node.on_device:
                length = at
            else:
                self._to_device(node, pages[start:at].copy())
        if at < len(pages):
            key = token_ids[at * self.page_size :].copy()
            self._add_leaf(node, key, now_s, pages=pages[at:].copy(), priority=priority)
        return length * self.page_size

    def inc_lock_ref(self, node: TreeNode) -> Lock:
        """Pin ``node`` and all above it (SPEC E11); 0 -> 1 moves a node's pages from evictable to protected."""
        lock = Lock(node)
        step: TreeNode | None = node
        while step is not None and step.parent is not None:
            if step.lock_ref == 0:
                self.evictable_pages -= len(step.pages)  # none of a node that is only on the host
                self.protected_pages += len(step.pages)
            step.lock_ref += 1
            step = step.parent
        return lock

    def dec_lock_ref(self, lock: Lock) -> None:
        """Undo `inc_lock_ref`; 1 -> 0 moves pages back, and an unlocked leaf becomes a candidate for eviction."""
        assert lock.held, "a lock was given back twice"
        lock.held = False
        step: TreeNode | None = lock.node
        while step is not None and step.parent is not None:
            assert step.lock_ref > 0, "a node has fewer locks than receipts"
            step.lock_ref -= 1
            if step.lock_ref == 0:
                self.evictable_pages += len(step.pages)
                self.protected_pages -= len(step.pages)
                self.retention.file(step)
            step = step.parent

    def evict(self, num_pages: int) -> Pages:
        """Free ``num_pages`` pages of unlocked leaves by policy (SPEC E12), or all if there are fewer.

        A leaf longer than what is wanted loses its tail only; its idle time counts each time. Returns: ids of the freed
        pages.
        """
        freed: list[Pages] = []
        missing = num_pages
        now_s = self._clock()
        self.retention.expire()
        while missing > 0 and (leaf := self._queue.pop()) is not None:
            if leaf.num_pages > missing:
                self._split_node(leaf, leaf.num_pages - missing)
            self.evicted_idle_s.add(now_s - leaf.used_s)
            freed.append(self._give_up(leaf))
            missing -= len(freed[-1])
        return np.concatenate(freed) if freed else NO_PAGES

    def evict_least(self, num_pages: int, worth: Callable[[TreeNode], float]) -> Pages:
        """Free whole unlocked leaves, and what becomes one by that, until ``num_pages`` are free: first those of no
        ``worth``, then by what they are kept for (`Retention.rank`) and what they are worth. O(nodes). Returns: ids of
        the freed pages."""
        self.retention.expire()
        freed, num_freed, now_s, order = [NO_PAGES], 0, self._clock(), self._queue.order
        over = self.retention.over(order.held)

        def ranked(node: TreeNode) -> tuple[bool, Rank, float, int, int, TreeNode]:
            is_worth = worth(node)
            kept_for = self.retention.rank(node, order, over)[:POLICY]
            return is_worth > 0, kept_for, is_worth, node.last_access, id(node), node

        leaves = [ranked(node) for node in self._nodes() if node.evictable]
        heapq.heapify(leaves)
        while leaves and num_freed < num_pages:
            leaf = heapq.heappop(leaves)[-1]
            parent = leaf.parent
            self.evicted_idle_s.add(now_s - leaf.used_s)
            freed.append(self._give_up(leaf))
            num_freed += len(freed[-1])
            if parent is not None and parent.evictable:
                heapq.heappush(leaves, ranked(parent))
        return np.concatenate(freed)

    def evict_ends(self, num_pages: int, snapshots: Snapshots) -> tuple[Pages, int]:
        """Free ``num_pages`` pages, or all if there are fewer: of snapshots, which are given up on the way, and the
        ends of unlocked leaves behind which there is none (`Victims`), first those of what is kept for nobody
        (`Retention.rank`). O(nodes + pool). Returns: ids of the leaves' freed pages, and how many snapshots freed."""
        self.retention.expire()
        freed, num_freed, now_s, order = [NO_PAGES], 0, self._clock(), self._queue.order
        over = self.retention.over(order.held)
        nodes = [node for node in self._nodes() if node.on_device]
        victims = Victims(
            nodes,
            snapshots,
            lambda node: self.retention.rank(node, order, over)[:POLICY],
            lambda node, page: self._give_up_snapshot(node, page, snapshots),
        )
        while (found := victims.next(num_pages - num_freed)) is not None:
            leaf, used = found
            if used:
                victims.was_cut(self._split_node(leaf, used), leaf)
            parent = leaf.parent
            assert parent is not None
            self.evicted_idle_s.add(now_s - leaf.used_s)
            freed.append(self._give_up(leaf))
            num_freed += len(freed[-1])
            victims.has_left(parent)
        return np.concatenate(freed), victims.num_freed

    def reset(self) -> Pages:
        """Empty the cache (SPEC E03); nothing may be locked. Returns: ids of all pages."""
        assert self.protected_pages == 0, f"{self.protected_pages} pages are locked"
        freed = self.all_pages()
        self.retention.clear()
        self._roots = {}
        self.evictable_pages = self.num_nodes = 0
        if self.events is not None:
            self.events.cleared()
        return freed

    def snapshot(self) -> CacheSnapshot:
        """Return what is cached now, for a reader that lost events. O(cache)."""
        assert self.events is not None, "events are not recorded"
        seq = self.events.seq
        stored = []
        for node in self._nodes():
            assert node.page_keys is not None
            stored.append(
                PagesStored(
                    seq=seq,
                    keys=node.page_keys,
                    parent_key=key_before(node),
                    page_size=self.page_size,
                    token_ids=node.key,
                    tier=Tier.DEVICE if node.on_device else Tier.HOST,
                    salt=node.salt,
                )
            )
        return CacheSnapshot(seq=seq, stored=tuple(stored))

    def tree(
        self, *, max_depth: int, max_nodes: int, min_tokens: int, parts: PagesWithParts | None = None
    ) -> CacheTree:
        """Return the largest subtrees, for people; cache/tree_view.py states the cost, and what ``parts`` tells."""
        return cache_tree(
            self._roots.values(),
            page_size=self.page_size,
            num_pages=sum(root.below.pages for root in self._roots.values()),
            num_nodes=self.num_nodes,
            now_s=self._clock(),
            max_depth=max_depth,
            max_nodes=max_nodes,
            min_tokens=min_tokens,
            parts=parts,
        )

    def all_pages(self) -> Pages:
        parts = [node.pages for node in self._nodes() if node.on_device]
        return np.concatenate(parts) if parts else NO_PAGES

    def check(self) -> None:
        """Assert the invariant of the module's docstring, and that every evictable leaf is queued. O(cache)."""
        counted = audit_tree(self._roots.values(), self.page_size)
        kept = (self.evictable_pages, self.protected_pages, self.num_nodes)
        assert counted == kept, f"evictable, protected, nodes: {counted} are in the tree, {kept} are counted"
        self.retention.check(list(self._nodes()))

    def _path(self, token_ids: TokenIds, salt: str) -> Iterator[tuple[TreeNode, int]]:
        """Iterate over the children along the match, each with its number of equal pages; only the last may be partial.

        The caller may split the child that was just yielded.
        """
        node = self._roots.get(salt)
        at, ps = 0, self.page_size
        while node is not None and len(token_ids) - at >= ps:
            child = node.children.get(first_page(token_ids, ps, at))
            if child is None:
                return
            key = child.key
            length = min(len(key), len(token_ids) - at)
            same = key[:length] == token_ids[at : at + length]
            common = (length if same.all() else int(same.argmin())) // ps
            whole = common * ps == len(key)
            yield child, common
            if not whole:
                return
            node = child
            at += common * ps

    def _split_node(self, node: TreeNode, at: int) -> TreeNode:
        """Put a new parent with the first ``at`` pages above ``node`` (SPEC E06); sizes do not change."""
        self.num_nodes += 1
        head = node.split(at, self.page_size)
        assert head.parent is not None
        head.parent.grew(0, 1)
        self.retention.was_split(node, head)
        return head

    def _add_leaf(
        self,
        parent: TreeNode,
        key: TokenIds,
        now_s: float,
        *,
        pages: Pages = NO_PAGES,
        host: Pages = NO_PAGES,
        priority: int = 0,
    ) -> TreeNode:
        """Add a leaf with its pages on the device or on the host."""
        leaf = TreeNode(
            key=key,
            pages=pages,
            parent=parent,
            salt=parent.salt,
            created=self._tick,
            last_access=self._tick,
            used_s=now_s,
            host=host,
            priority=priority,
            ahead=len(key),
        )
        parent.children[first_page(key, self.page_size)] = leaf
        self.num_nodes += 1
        parent.grew(leaf.num_pages, 1)
        parent.device_children += leaf.on_device
        self.evictable_pages += len(pages)
        if self._names_pages:
            leaf.page_keys = page_keys(key, self.page_size, leaf.salt, key_before(leaf))
        self._tell_stored(leaf)
        self._queue.entered(leaf)
        self.retention.file(leaf)
        self._added(leaf, now_s)
        return leaf

    def _added(self, leaf: TreeNode, now_s: float) -> None:
        """Called with each new leaf, once it is whole: the place of a tree with more tiers to note it."""

    def _to_device(self, node: TreeNode, pages: Pages) -> None:
        """Give a node that is only on the host its pages on the device; its parent is there."""
        assert node.parent is not None
        node.pages = pages
        node.parent.device_children += 1
        self._queue.entered(node)
        if node.lock_ref:
            self.protected_pages += len(pages)
        else:
            self.evictable_pages += len(pages)
        self._tell_stored(node)
        self.retention.file(node)

    def _use(self, node: TreeNode, now_s: float, *, hit: bool) -> None:
        node.last_access, node.used_s = self._tick, now_s
        node.hit_count += hit
        self.retention.refile(node)

    def _give_up(self, leaf: TreeNode) -> Pages:
        """Take an unlocked leaf of the device off it. Returns: the ids of its pages."""
        self._remove_leaf(leaf)
        return leaf.pages

    def _give_up_snapshot(self, node: TreeNode, page: int, snapshots: Snapshots) -> int:
        """Give up the snapshot of a page of ``node``. Returns: how many pages are free by that."""
        return snapshots.give_up(page)

    def _remove_leaf(self, leaf: TreeNode) -> None:
        """Remove an unlocked leaf; its pages are the caller's."""
        parent = leaf.parent
        assert parent is not None
        self.retention.removed(leaf)
        self._queue.left(leaf)
        self.evictable_pages -= len(leaf.pages)
        if self.events is not None:
            assert leaf.page_keys is not None
            tier = Tier.DEVICE if leaf.on_device else Tier.HOST
            self.events.removed(leaf.page_keys, tier, idle_s=max(self._clock() - leaf.used_s, 0.0))
        del parent.children[first_page(leaf.key, self.page_size)]
        leaf.parent = None
        parent.grew(-leaf.num_pages, -1)
        parent.device_children -= leaf.on_device
        self.num_nodes -= 1
        self.retention.file(parent)
        if parent.parent is None and not parent.children:
            del self._roots[parent.salt]

    def tell_tier(self, node: TreeNode, tier: Tier) -> None:
        """Report that ``tier`` has the node's pages: the best of its own tiers, or a store too."""
        if self.events is not None:
            assert node.page_keys is not None
            keys, before = node.page_keys, key_before(node)
            self.events.stored(keys, before, self.page_size, node.key, tier, node.pages, node.salt)

    def _tell_stored(self, node: TreeNode) -> None:
        """Report the best tier of the node's pages."""
        self.tell_tier(node, Tier.DEVICE if node.on_device else Tier.HOST)

    def _nodes(self) -> Iterator[TreeNode]:
        """Iterate over all nodes except the roots, parents first."""
        return walk(self._roots.values())
