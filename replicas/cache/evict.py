"""Eviction order: which unlocked leaf is evicted next, without a look at the tree.

Owns:      a heap with at most one entry a node. Entries are not touched when a node is used, locked or extended:
           a stale entry is found when it is popped, and then dropped or filed again.
Never:     frees anything (cache/radix.py).
Invariant: every evictable node has an entry, filed under a rank that is not above its present one.
Thread:    scheduler thread only.
"""

import heapq
from collections.abc import Callable

from replicas.cache.node import TreeNode

Rank = tuple[int, int]  # smallest goes first; a node's rank never decreases while it lives

POLICIES: dict[str, Callable[[TreeNode], Rank]] = {
    "lru": lambda node: (node.last_access, 0),
    "lfu": lambda node: (node.hit_count, node.last_access),
    "fifo": lambda node: (node.created, 0),
}


class EvictionQueue:
    """Candidates by policy lru, lfu or fifo (SPEC E12, E19). A pop costs O(log nodes), amortised over uses and pops."""

    def __init__(self, policy: str) -> None:
        if policy not in POLICIES:
            raise ValueError(f"unknown eviction policy {policy!r}; allowed: {sorted(POLICIES)}")
        self._rank = POLICIES[policy]
        self._heap: list[tuple[Rank, int, TreeNode]] = []
        self._tie = 0

    def add(self, node: TreeNode) -> None:
        """Add ``node``, which has become an unlocked leaf."""
        assert node.evictable
        if not node.queued:
            self._push(node)

    def pop(self) -> TreeNode | None:
        """Remove and return the next victim; None when there is none."""
        while self._heap:
            rank, _, node = heapq.heappop(self._heap)
            node.queued = False
            if not node.evictable:
                continue  # locked or grown since; it is added again when it is unlocked or pruned
            if rank == self._rank(node):
                return node
            self._push(node)  # used since
        return None

    def clear(self) -> None:
        for _, _, node in self._heap:
            node.queued = False
        self._heap = []

    def _push(self, node: TreeNode) -> None:
        node.queued = True
        self._tie += 1
        heapq.heappush(self._heap, (self._rank(node), self._tie, node))
