"""A picture of the radix tree for people: the largest subtrees, with sizes, hits and ages. No token ids, no text.

Owns:      which nodes are shown, and the sums over the others.
Never:     changes the tree, or stops the engine for longer than MAX_COUNTED nodes take.
Invariant: what is shown and what is left out add up, for every node, to what is counted below it.
Thread:    scheduler thread only.
"""

import heapq
from collections.abc import Collection
from dataclasses import dataclass

from kvtransfer.pages import PageKey
from replicas.cache.node import TreeNode

ROOT = -1  # in place of a node's number
MAX_DEPTH = 64  # a picture is nested, and travels so
MAX_COUNTED = 40_000  # nodes; a walk over them costs about 0.25 us each


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """Descendants of a node that are not shown."""

    nodes: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """One edge of the tree; the root stands for the roots of all salts."""

    tokens: int  # its own
    subtree_tokens: int  # with its own
    subtree_nodes: int  # itself included, but for the root
    hits: int
    locked: bool  # a request pins it
    idle_s: float  # since its last use
    key: PageKey | None  # of its last page, where the cache records events
    children: tuple["NodeView", ...]  # largest subtree first
    left_out: LeftOut | None  # None: all its children are shown; zeros: they were not counted either


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheTree:
    """What one prefix cache holds, as far as it is shown."""

    page_size: int
    tokens: int  # of the whole cache
    nodes: int  # of the whole cache
    shown: int  # nodes below ``root``
    counted: int  # nodes that the sums are over; with fewer than ``nodes`` the deepest are missing from them
    root: NodeView


class _Walk:
    """All nodes, parents before children, and the sums of their subtrees; at most ``limit`` of them."""

    def __init__(self, roots: Collection[TreeNode], limit: int) -> None:
        self.nodes: list[TreeNode] = [child for root in roots for child in root.children.values()]
        self.num_tops = len(self.nodes)
        nodes = self.nodes
        self.first_child: list[int] = []  # [nodes] where its children begin; they are neighbours
        parents = [ROOT] * self.num_tops
        for at, node in enumerate(nodes):  # grows while it is walked
            self.first_child.append(len(nodes))
            if node.children and len(nodes) < limit:
                nodes.extend(node.children.values())
                parents.extend([at] * len(node.children))
        self.pages = [len(node.pages) for node in nodes]  # [nodes] of the subtree
        self.sizes = [1] * len(nodes)  # [nodes] nodes of the subtree
        pages, sizes = self.pages, self.sizes
        for at in range(len(nodes) - 1, self.num_tops - 1, -1):
            parent = parents[at]
            pages[parent] += pages[at]
            sizes[parent] += sizes[at]

    def num_children(self, at: int) -> int:
        """Of node ``at``, counted or not."""
        return self.num_tops if at == ROOT else len(self.nodes[at].children)

    def children(self, at: int) -> range:
        """Of node ``at``; none where the walk ended before them."""
        if at == ROOT:
            return range(self.num_tops)
        first = self.first_child[at]
        end = first + len(self.nodes[at].children)
        return range(first, end) if end <= len(self.nodes) else range(0)


def cache_tree(
    roots: Collection[TreeNode],
    *,
    page_size: int,
    num_pages: int,
    num_nodes: int,
    now_s: float,
    max_depth: int,
    max_nodes: int,
    min_tokens: int,
    limit: int = MAX_COUNTED,
) -> CacheTree:
    """The largest subtrees below ``roots``: at most ``max_nodes`` nodes, down to ``max_depth`` (the root's children are
    at 1), of at least ``min_tokens`` with all below them. O(nodes).

    Args: num_pages, num_nodes: of the whole tree. now_s: on the clock of the tree's times.
    """
    walk = _Walk(roots, limit)
    shown = _choose(
        walk, max_depth=min(max_depth, MAX_DEPTH), max_nodes=max_nodes, min_pages=-(-min_tokens // page_size)
    )
    views: dict[int, NodeView] = {}
    for at in sorted(shown, reverse=True):  # children before their parents, the root (-1) last
        views[at] = _view(walk, at, [views[child] for child in shown[at]], page_size=page_size, now_s=now_s)
    return CacheTree(
        page_size=page_size,
        tokens=num_pages * page_size,
        nodes=num_nodes,
        shown=len(shown) - 1,
        counted=len(walk.nodes),
        root=views[ROOT],
    )


def empty_tree(page_size: int) -> CacheTree:
    """Of a cache that keeps nothing."""
    return cache_tree(
        (), page_size=page_size, num_pages=0, num_nodes=0, now_s=0.0, max_depth=1, max_nodes=0, min_tokens=0
    )


def _choose(walk: _Walk, *, max_depth: int, max_nodes: int, min_pages: int) -> dict[int, list[int]]:
    """What to show: node -> its shown children, the largest first. Largest first over all, so that what is cut off is
    never larger than what is shown."""
    shown: dict[int, list[int]] = {ROOT: []}
    queue: list[tuple[int, int, int, int]] = []  # pages below, negative; node; its depth; its parent

    def offer(parent: int, depth: int) -> None:
        if depth <= max_depth:
            for at in walk.children(parent):
                if walk.pages[at] >= min_pages:
                    heapq.heappush(queue, (-walk.pages[at], at, depth, parent))

    offer(ROOT, 1)
    while queue and len(shown) <= max_nodes:
        _, at, depth, parent = heapq.heappop(queue)
        shown[parent].append(at)
        shown[at] = []
        offer(at, depth + 1)
    return shown


def _view(walk: _Walk, at: int, children: list[NodeView], *, page_size: int, now_s: float) -> NodeView:
    """Of node ``at``, whose shown ``children`` are made already."""
    below = walk.children(at)
    left_out = None
    if len(children) < walk.num_children(at):
        left_out = LeftOut(
            nodes=sum(walk.sizes[child] for child in below) - sum(child.subtree_nodes for child in children),
            tokens=sum(walk.pages[child] for child in below) * page_size
            - sum(child.subtree_tokens for child in children),
        )
    if at == ROOT:
        return NodeView(
            tokens=0,
            subtree_tokens=sum(walk.pages[child] for child in below) * page_size,
            subtree_nodes=len(walk.nodes),
            hits=0,
            locked=False,
            idle_s=0.0,
            key=None,
            children=tuple(children),
            left_out=left_out,
        )
    node = walk.nodes[at]
    return NodeView(
        tokens=len(node.pages) * page_size,
        subtree_tokens=walk.pages[at] * page_size,
        subtree_nodes=walk.sizes[at],
        hits=node.hit_count,
        locked=node.lock_ref > 0,
        idle_s=max(now_s - node.used_s, 0.0),
        key=int(node.page_keys[-1]) if node.page_keys is not None else None,
        children=tuple(children),
        left_out=left_out,
    )
