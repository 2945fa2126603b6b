"""Asserts the invariants that span allocator, table and prefix cache.

Counts from the ground up, and never trusts a counter that it is there to verify. O(pool): for tests and idle moments.
"""

from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np

from replicas.cache.base import Lock, PrefixCache
from replicas.cache.node import NO_PAGES, TreeNode, first_page, path_to, walk
from replicas.cache.quarantine import Quarantine
from replicas.memory.allocator import PagedTokenToKVPoolAllocator, Pages, ReqToTokenPool
from replicas.request import Req


def audit(
    allocator: PagedTokenToKVPoolAllocator,
    table: ReqToTokenPool,
    cache: PrefixCache,
    quarantine: Quarantine,
    reqs: Sequence[Req],
    of_parts: Pages = NO_PAGES,
) -> None:
    """Raise AssertionError where an invariant fails. ``reqs``: all with pages. ``of_parts``: pages of snapshots."""
    allocator.check()
    table.check()
    cache.check()
    ps = allocator.page_size
    private: list[Pages] = []
    locks: Counter[int] = Counter()
    nodes: dict[int, TreeNode] = {}
    for req in reqs:
        holding = req.holding
        assert holding is not None, f"{req.rid} holds nothing"
        assert holding.prefix_len % ps == 0, f"{req.rid}: {holding}"
        assert holding.prefix_len <= holding.kv_len, f"{req.rid}: {holding}"
        assert holding.behind.gone_len % ps == 0, f"{req.rid}: {holding}"
        assert not holding.behind.gone_len or holding.prefix_len == 0, f"{req.rid}: {holding}"
        assert req.computed_len <= holding.kv_len, f"{req.rid}: {req.computed_len} computed, {holding.kv_len} held"
        assert table.valid_len(holding.row) == holding.kv_len, f"{req.rid}: its row is not valid on [0, kv_len)"
        slots = table.view(holding.row, 0, holding.kv_len)
        pages = slots[::ps] // ps
        expected = allocator.pages_to_slots(pages)[: len(slots)]
        assert (slots == expected).all(), f"{req.rid}: its row does not walk through whole pages"
        assert isinstance(holding.lock, Lock)
        assert holding.lock.held, f"{req.rid}: its lock was given back"
        path = path_to(holding.lock.node)
        tree = np.concatenate([node.pages for node in path]) if path else pages[:0]
        assert np.array_equal(tree, pages[: holding.prefix_len // ps]), f"{req.rid}: its prefix is not the tree's (B05)"
        if path:
            key = np.concatenate([node.key for node in path])
            assert np.array_equal(key, req.ids[: holding.prefix_len]), f"{req.rid}: its prefix holds other tokens"
            assert path[0].salt == req.salt, f"{req.rid}: its prefix has another salt"
        locks.update(id(node) for node in path)
        nodes.update((id(node), node) for node in path)
        private.append(pages[max(holding.prefix_len, holding.behind.gone_len) // ps :])
    for detained in quarantine:
        if detained.lock is not None:
            assert detained.lock.held, f"{detained.rid}: the lock of its pages in quarantine was given back"
            path = path_to(detained.lock.node)
            locks.update(id(node) for node in path)
            nodes.update((id(node), node) for node in path)
    apart = [detained.pages for detained in quarantine]
    assert sum(map(len, apart)) == quarantine.num_pages, "the pages in quarantine are miscounted"
    for key_, node in nodes.items():
        assert node.lock_ref == locks[key_], f"a node has {node.lock_ref} locks, {locks[key_]} requests pin it"
    protected = sum(len(node.pages) for node in nodes.values())
    assert protected == cache.protected_pages, f"{cache.protected_pages} pages are protected, {protected} are pinned"
    everything = np.concatenate([allocator.free_pages(), cache.all_pages(), *private, *apart, of_parts])
    assert np.array_equal(np.sort(everything), np.arange(1, allocator.num_pages + 1)), (
        f"of {allocator.num_pages} pages {allocator.num_free} are free, {len(cache.all_pages())} in the tree and "
        f"{sum(map(len, private))} private, {quarantine.num_pages} in quarantine and {len(of_parts)} of parts: a page "
        "is lost or in two places"
    )


def audit_tree(roots: Collection[TreeNode], page_size: int) -> tuple[int, int, int]:
    """Assert what holds of every node. Returns: evictable pages, protected pages, nodes, as counted."""
    assert all(root.children for root in roots), "a salt without pages has a root"
    evictable = protected = num_nodes = 0
    pages: list[Pages] = []
    for node in walk(roots):
        parent = node.parent
        assert parent is not None, "a node below a root has no parent"
        assert node.num_pages > 0, "a node is empty"
        assert len(node.key) == node.num_pages * page_size, "a key is not whole pages"
        assert len(node.host) in (0, node.num_pages), "a node has a copy of some of its pages"
        above = parent.on_device or parent.parent is None
        assert above or not node.on_device, "a page is on the device without its parent"
        on_device = sum(child.on_device for child in node.children.values())
        assert node.device_children == on_device, f"{node.device_children} children on the device, {on_device} are"
        assert parent.children[first_page(node.key, page_size)] is node, "a child is filed under a wrong page"
        assert node.salt == parent.salt, "a node left its salt"
        assert parent.parent is None or node.lock_ref <= parent.lock_ref, "a child outlocks its parent"
        assert len(node.key) <= node.ahead, "a node is longer than all that was inserted through it"
        assert node.page_keys is None or len(node.page_keys) == node.num_pages, "a page has no key"
        num_nodes += 1
        protected += len(node.pages) if node.lock_ref else 0
        evictable += 0 if node.lock_ref else len(node.pages)
        pages.append(node.pages)
    everything = np.concatenate(pages) if pages else np.empty(0)
    assert len(np.unique(everything)) == len(everything), "a page is in the tree twice"
    _audit_sums(roots)
    return evictable, protected, num_nodes


def _audit_sums(roots: Collection[TreeNode]) -> None:
    below: Counter[int] = Counter()
    pages_below: Counter[int] = Counter()
    for node in [*reversed(list(walk(roots))), *roots]:  # children before parents
        counted = (pages_below[id(node)], below[id(node)])
        kept = node.below
        assert counted == kept, f"pages, nodes below a node: {counted} are there, {kept} are counted"
        if node.parent is not None:
            below[id(node.parent)] += 1 + node.below.nodes
            pages_below[id(node.parent)] += node.num_pages + node.below.pages
