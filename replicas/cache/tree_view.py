"""A picture of the radix tree for people: the largest subtrees, with sizes, hits and ages. No token ids, no text.

Owns:      which nodes are shown.
Never:     changes the tree, or walks it: every node knows the sums over those below it, so the engine thread is blocked
           for 2 to 5 ms, whatever the size of the tree (MAX_LOOKS).
Invariant: at every node, shown and left out add up to what is below it.
Thread:    scheduler thread only.
"""

import heapq
import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from kvtransfer.pages import PageKey
from replicas.cache.node import TreeNode
from replicas.memory.allocator import Pages

MAX_DEPTH = 64  # a picture is nested, and travels so
MAX_LOOKS = 3000  # nodes that are looked at in order to find the largest; of many siblings the youngest


class PagesWithParts(Protocol):
    """Tells how many pages have what window layers or states need (cache/parts.py)."""

    kind: ClassVar[str]  # window, state

    def num_with_part(self, pages: Pages) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """The descendants of a node that are not shown, as sums."""

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
    parts: int | None = None  # of its own pages, those that have one (`CacheTree.part`); None where pages have none
    children: tuple["NodeView", ...]  # largest subtree first
    left_out: LeftOut | None  # None: all its children are shown


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheTree:
    """The content of one prefix cache, as far as it is shown."""

    page_size: int
    tokens: int  # of the whole cache
    nodes: int  # of the whole cache
    shown: int  # nodes below ``root``
    part: str = ""  # what pages have beside K and V that all layers see: window, state; "": nothing
    root: NodeView


@dataclass(slots=True, eq=False)
class _Shown:
    """A chosen node and its chosen children, the largest first. Without a node: the root."""

    node: TreeNode | None
    children: list["_Shown"] = field(default_factory=list)
    view: NodeView | None = None  # once it is made


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
    max_looks: int = MAX_LOOKS,
    parts: PagesWithParts | None = None,
) -> CacheTree:
    """Build the view of the largest subtrees below ``roots``: at most ``max_nodes`` nodes, down to ``max_depth`` (the
    root's children are at 1), of at least ``min_tokens`` with all below them.

    Args: num_pages, num_nodes: of the whole tree. now_s: on the clock of the tree's times.
    """
    shown = _choose(
        roots,
        max_depth=min(max_depth, MAX_DEPTH),
        max_nodes=max_nodes,
        min_pages=-(-min_tokens // page_size),
        max_looks=max_looks,
    )
    for each in reversed(shown[1:]):  # children before their parents
        each.view = _view(each, page_size=page_size, now_s=now_s, parts=parts)
    children = _views(shown[0])
    root = NodeView(
        tokens=0,
        subtree_tokens=num_pages * page_size,
        subtree_nodes=num_nodes,
        hits=0,
        locked=False,
        idle_s=0.0,
        key=None,
        children=children,
        left_out=_left_out(num_nodes, num_pages * page_size, children),
    )
    part = "" if parts is None else parts.kind
    return CacheTree(
        page_size=page_size, tokens=root.subtree_tokens, nodes=num_nodes, shown=len(shown) - 1, part=part, root=root
    )


def empty_tree(page_size: int) -> CacheTree:
    """Build the view of a cache that keeps nothing."""
    return cache_tree(
        (), page_size=page_size, num_pages=0, num_nodes=0, now_s=0.0, max_depth=1, max_nodes=0, min_tokens=0
    )


def _choose(
    roots: Collection[TreeNode], *, max_depth: int, max_nodes: int, min_pages: int, max_looks: int
) -> list[_Shown]:
    """Choose the root and the nodes to show, parents before children. Largest first over all, so that of the nodes seen
    nothing is left out that is larger than what is shown."""
    shown = [_Shown(None)]
    queue: list[tuple[int, int, int, TreeNode, _Shown]] = []  # pages of the subtree, negative; tie; depth; node; parent
    ties = itertools.count()
    num_looks = 0

    def offer(parent: _Shown, nodes: Iterator[TreeNode], depth: int) -> None:
        nonlocal num_looks
        if depth > max_depth:
            return
        for node in itertools.islice(nodes, max_looks - num_looks):
            num_looks += 1
            num_pages = node.num_pages + node.below.pages
            if num_pages >= min_pages:
                heapq.heappush(queue, (-num_pages, next(ties), depth, node, parent))

    offer(shown[0], itertools.chain.from_iterable(_youngest(root) for root in roots), 1)
    while queue and len(shown) <= max_nodes:
        _, _, depth, node, parent = heapq.heappop(queue)
        shown.append(_Shown(node))
        parent.children.append(shown[-1])
        offer(shown[-1], _youngest(node), depth + 1)
    return shown


def _youngest(node: TreeNode) -> Iterator[TreeNode]:
    """Iterate over its children, the newest first."""
    return reversed(node.children.values())


def _view(shown: _Shown, *, page_size: int, now_s: float, parts: PagesWithParts | None) -> NodeView:
    """Build the view of a node whose shown children are built already."""
    node, children = shown.node, _views(shown)
    assert node is not None
    tokens, below_tokens = node.num_pages * page_size, node.below.pages * page_size
    return NodeView(
        tokens=tokens,
        subtree_tokens=tokens + below_tokens,
        subtree_nodes=1 + node.below.nodes,
        hits=node.hit_count,
        locked=node.lock_ref > 0,
        idle_s=max(now_s - node.used_s, 0.0),
        key=int(node.page_keys[-1]) if node.page_keys is not None else None,
        parts=None if parts is None else parts.num_with_part(node.pages),
        children=children,
        left_out=_left_out(node.below.nodes, below_tokens, children),
    )


def _views(shown: _Shown) -> tuple[NodeView, ...]:
    return tuple(child.view for child in shown.children if child.view is not None)


def _left_out(num_nodes: int, num_tokens: int, children: tuple[NodeView, ...]) -> LeftOut | None:
    """Count the descendants of a node that are in no shown child's subtree."""
    nodes = num_nodes - sum(child.subtree_nodes for child in children)
    tokens = num_tokens - sum(child.subtree_tokens for child in children)
    return LeftOut(nodes=nodes, tokens=tokens) if nodes else None
