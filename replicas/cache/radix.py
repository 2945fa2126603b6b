"""RadixCache: a tree over token ids whose edges own the KV pages of those tokens.

Owns:      the pages of every prefix that it keeps, and the locks on them. Of nodes whose pages are only on the host it
           knows no more than that they are not on the device (cache/tiers.py makes them).
Never:     frees pages itself: `evict` and `reset` hand their ids to the caller. Knows no requests.
Invariant: keys are whole pages; siblings differ in their first page; a child's lock_ref <= its parent's;
           evictable + protected == pages over all nodes; different salts have different roots and share nothing.
Thread:    scheduler thread only.
Source:    SGLang radix cache (Zheng et al. 2024, arXiv:2312.07104, section 3), paged, with page ids for values.
"""

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np

from kvtransfer.pages import PageKey, Tier, page_keys
from replicas.cache.audit import audit_tree
from replicas.cache.base import Lock, MatchResult
from replicas.cache.events import CacheSnapshot, EventLog, PagesStored
from replicas.cache.evict import EvictionQueue
from replicas.cache.node import NO_PAGES, TreeNode, first_page, path_to, walk
from replicas.cache.owners import EVERYBODY, Marks, Owners
from replicas.cache.sessions import Sessions
from replicas.cache.tree_view import CacheTree, cache_tree
from replicas.distributions import IDLE_S, Tally
from replicas.memory.allocator import Pages
from replicas.types import TokenIds

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
        self._clock = clock
        self._marks = Marks(touched=self._touched, clock=clock)
        self.sessions = Sessions(touched=self._touched, key_of=self._key_of, clock=clock)
        self._owners = Owners(clock)
        self._held = Counter[str]()  # pages on the device, by tenant
        self._queue = EvictionQueue(
            policy,
            can_go=lambda node: node.evictable,
            over=lambda: self._owners.over(self._held),
            marked=self._marks.until_s,
        )
        self._roots: dict[str, TreeNode] = {}  # by salt; a root lives while it has children
        self._nowhere = TreeNode.root("")  # what an empty match locks when its salt has no root
        self._tick = 0  # logical clock: one per match or insert
        self._evictable = 0  # pages on the device
        self._protected = 0  # pages on the device
        self._num_nodes = 0
        self._names_pages = events is not None  # nodes know their page keys

    @property
    def evictable_pages(self) -> int:
        return self._evictable

    @property
    def protected_pages(self) -> int:
        return self._protected

    @property
    def num_nodes(self) -> int:
        """The number of nodes, without the roots."""
        return self._num_nodes

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

    def used_by(self, node: TreeNode, tenant: str, weight: float) -> None:
        """Take note that a request of ``tenant`` uses the path down to ``node``, or has computed it."""
        if not tenant:
            return
        self._owners.used(tenant, weight)
        for step in path_to(node):
            if step.tenant not in (tenant, EVERYBODY):
                self._give(step, EVERYBODY if step.tenant else tenant)

    def _give(self, node: TreeNode, tenant: str) -> None:
        """Let ``node`` be ``tenant``'s."""
        self._held[node.tenant] -= len(node.pages)
        self._held[tenant] += len(node.pages)
        node.tenant = tenant
        self._queue.changed(node)

    def mark(self, token_ids: TokenIds, salt: str, ttl_s: float, *, tenant: str, weight: float) -> None:
        """Take note that ``tenant`` asks to keep ``token_ids`` for ``ttl_s``, as far as they are here: within its share
        they go later than what nobody waits for."""
        any_marked = False
        for child, common in self._path(token_ids, salt):
            self._marks.keep(child if common == child.num_pages else self._split_node(child, common), ttl_s)
            any_marked = True
        if tenant and any_marked:
            self._owners.used(tenant, weight, for_s=ttl_s)

    def returns(self, token_ids: TokenIds, salt: str, *, rid: str = "") -> None:
        """Take note that the prompt of ``rid`` arrived: the session that it goes on with is kept until its answer."""
        path = self._whole_nodes(token_ids, salt)
        self.sessions.returns(path, rid=rid, keys=lambda: page_keys(token_ids, self.page_size, salt))

    def answered(self, token_ids: TokenIds, prompt_len: int, salt: str, *, name: str = "", rid: str = "") -> None:
        """Take note that ``token_ids`` are a prompt, of request ``rid``, and its answer, in the session that the client
        calls ``name``."""
        path = self._whole_nodes(token_ids, salt)
        ends = np.cumsum([len(node.key) for node in path])
        num_prompt = int(np.searchsorted(ends, prompt_len, side="right"))
        self.sessions.answered(path, num_prompt, tick=self._tick, name=name, rid=rid)

    def inc_lock_ref(self, node: TreeNode) -> Lock:
        """Pin ``node`` and all above it (SPEC E11); 0 -> 1 moves a node's pages from evictable to protected."""
        lock = Lock(node)
        step: TreeNode | None = node
        while step is not None and step.parent is not None:
            if step.lock_ref == 0:
                self._evictable -= len(step.pages)  # none of a node that is only on the host
                self._protected += len(step.pages)
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
                self._evictable += len(step.pages)
                self._protected -= len(step.pages)
                self._file(step)
            step = step.parent

    def evict(self, num_pages: int) -> Pages:
        """Free ``num_pages`` pages of unlocked leaves by policy (SPEC E12), or all if there are fewer.

        A leaf longer than what is wanted loses its tail only; its idle time counts each time. Returns: ids of the freed
        pages.
        """
        freed: list[Pages] = []
        missing = num_pages
        now_s = self._clock()
        self._expire()
        while missing > 0 and (leaf := self._queue.pop()) is not None:
            used_s = leaf.used_s
            pages = self._give_up(leaf, missing)
            freed.append(pages)
            missing -= len(pages)
            self.evicted_idle_s.add(now_s - used_s)
        return np.concatenate(freed) if freed else NO_PAGES

    def reset(self) -> Pages:
        """Empty the cache (SPEC E03); nothing may be locked. Returns: ids of all pages."""
        assert self._protected == 0, f"{self._protected} pages are locked"
        freed = self.all_pages()
        self._queue.clear()
        self.sessions.clear()
        if self._marks.until_s:
            self._marks.clear()
        self._roots = {}
        self._evictable = self._num_nodes = 0
        self._held.clear()
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
                    parent_key=_last_key(node.parent),
                    page_size=self.page_size,
                    token_ids=node.key,
                    tier=Tier.DEVICE if node.on_device else Tier.HOST,
                )
            )
        return CacheSnapshot(seq=seq, stored=tuple(stored))

    def tree(self, *, max_depth: int, max_nodes: int, min_tokens: int) -> CacheTree:
        """Return the largest subtrees, for people; cache/tree_view.py states the cost."""
        return cache_tree(
            self._roots.values(),
            page_size=self.page_size,
            num_pages=sum(root.below.pages for root in self._roots.values()),
            num_nodes=self._num_nodes,
            now_s=self._clock(),
            max_depth=max_depth,
            max_nodes=max_nodes,
            min_tokens=min_tokens,
        )

    def all_pages(self) -> Pages:
        parts = [node.pages for node in self._nodes() if node.on_device]
        return np.concatenate(parts) if parts else NO_PAGES

    def check(self) -> None:
        """Assert the invariant of the module's docstring, and that every evictable leaf is queued. O(cache)."""
        counted = audit_tree(self._roots.values(), self.page_size)
        kept = (self._evictable, self._protected, self._num_nodes)
        assert counted == kept, f"evictable, protected, nodes: {counted} are in the tree, {kept} are counted"
        self._check_held(self._held, lambda node: len(node.pages))
        self._queue.check(self._nodes())
        self.sessions.check(self._nodes())
        self._marks.check(self._nodes())

    def _check_held(self, held: Counter[str], num_pages: Callable[[TreeNode], int]) -> None:
        counted = Counter[str]()
        for node in self._nodes():
            counted[node.tenant] += num_pages(node)
        assert counted == held, f"pages by tenant: {counted} are in the tree, {held} are counted"

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

    def _whole_nodes(self, token_ids: TokenIds, salt: str) -> list[TreeNode]:
        """List the nodes along the match that it has whole."""
        return [child for child, common in self._path(token_ids, salt) if common == child.num_pages]

    def _key_of(self, node: TreeNode) -> PageKey:
        """Return the key of the last page of ``node``."""
        if node.page_keys is not None:
            return int(node.page_keys[-1])
        before = self._key_of(node.parent) if node.parent is not None and node.parent.parent is not None else None
        return int(page_keys(node.key, self.page_size, node.salt, before)[-1])

    def _split_node(self, node: TreeNode, at: int) -> TreeNode:
        """Put a new parent with the first ``at`` pages above ``node`` (SPEC E06); sizes do not change."""
        self._num_nodes += 1
        head = node.split(at, self.page_size)
        assert head.parent is not None
        head.parent.grew(0, 1)
        if node in self._marks.until_s:
            self._marks.was_split(node, head)
        self._touched(node)
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
        self._num_nodes += 1
        parent.grew(leaf.num_pages, 1)
        parent.device_children += leaf.on_device
        self._evictable += len(pages)
        self._held[leaf.tenant] += len(pages)
        if self._names_pages:
            leaf.page_keys = page_keys(key, self.page_size, leaf.salt, _last_key(parent))
        self._tell_stored(leaf)
        self._file(leaf)
        self._added(leaf, now_s)
        return leaf

    def _added(self, leaf: TreeNode, now_s: float) -> None:
        """Called with each new leaf, once it is whole: the place of a tree with more tiers to note it."""

    def _to_device(self, node: TreeNode, pages: Pages) -> None:
        """Give a node that is only on the host its pages on the device; its parent is there."""
        assert node.parent is not None
        node.pages = pages
        node.parent.device_children += 1
        self._held[node.tenant] += len(pages)
        if node.lock_ref:
            self._protected += len(pages)
        else:
            self._evictable += len(pages)
        self._tell_stored(node)
        self._file(node)

    def _use(self, node: TreeNode, now_s: float, *, hit: bool) -> None:
        node.last_access, node.used_s = self._tick, now_s
        node.hit_count += hit
        self._touched(node)

    def _touched(self, node: TreeNode) -> None:
        """Take note that ``node`` was used or cut: its place in the order of eviction may have changed."""
        self._queue.refile(node)

    def _expire(self) -> None:
        """Let the order of eviction say what holds now."""
        self.sessions.expire()
        if self._marks.until_s:
            self._marks.expire()

    def _file(self, node: TreeNode) -> None:
        """Queue ``node`` for eviction if it is a candidate; after any change that may make it one."""
        if node.evictable:
            self._queue.add(node)

    def _give_up(self, leaf: TreeNode, most: int) -> Pages:
        """Take up to ``most`` pages of an unlocked leaf off the device. Returns: their ids."""
        return self._cut_tail(leaf, most) if leaf.num_pages > most else self._remove_leaf(leaf)

    def _remove_leaf(self, leaf: TreeNode) -> Pages:
        parent = leaf.parent
        assert parent is not None
        self.sessions.removed(leaf)
        if leaf in self._marks.until_s:
            self._marks.removed(leaf)
        del parent.children[first_page(leaf.key, self.page_size)]
        leaf.parent = None
        parent.grew(-leaf.num_pages, -1)
        parent.device_children -= leaf.on_device
        self._num_nodes -= 1
        self._forget(leaf, 0)
        self._file(parent)
        if parent.parent is None and not parent.children:
            del self._roots[parent.salt]
        return leaf.pages

    def _cut_tail(self, leaf: TreeNode, num_pages: int) -> Pages:
        keep = leaf.num_pages - num_pages
        pages = leaf.pages[keep:]
        assert leaf.parent is not None
        leaf.parent.grew(-num_pages, 0)
        self._forget(leaf, keep)
        leaf.keep(0, keep, self.page_size)
        self._file(leaf)
        return pages

    def _forget(self, leaf: TreeNode, keep: int) -> None:
        """Count and report the removal of the leaf's pages from ``keep`` on."""
        self._evictable -= len(leaf.pages[keep:])
        self._held[leaf.tenant] -= len(leaf.pages[keep:])
        if self.events is not None:
            assert leaf.page_keys is not None
            self.events.removed(leaf.page_keys[keep:])

    def tell_tier(self, node: TreeNode, tier: Tier) -> None:
        """Report that ``tier`` has the node's pages: the best of its own tiers, or a store too."""
        if self.events is not None:
            assert node.page_keys is not None
            self.events.stored(node.page_keys, _last_key(node.parent), self.page_size, node.key, tier)

    def _tell_stored(self, node: TreeNode) -> None:
        """Report the best tier of the node's pages."""
        self.tell_tier(node, Tier.DEVICE if node.on_device else Tier.HOST)

    def _nodes(self) -> Iterator[TreeNode]:
        """Iterate over all nodes except the roots, parents first."""
        return walk(self._roots.values())


def _last_key(node: TreeNode | None) -> PageKey | None:
    """Return the key of the page before a child of ``node``; None when ``node`` is a root."""
    return int(node.page_keys[-1]) if node is not None and node.page_keys is not None else None
