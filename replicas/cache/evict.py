"""Eviction order of one tier: which node that can go goes next, without a look at the tree.

To add a policy, give `POLICIES` a function from a node to its rank: it is then a value of ``cache.eviction`` and
``cache.host_eviction``. One that keeps books of its own, for the host tier alone, is an entry of arc.py's HOST_QUEUES.

Owns:      a heap of (rank, node), and for each node the rank of its live entry. Entries are not touched when a node is
           used, locked or extended: an entry that is no longer true is found when it is popped, and then dropped or
           filed again.
Never:     frees anything (cache/radix.py).
Invariant: every node that can go has a live entry, filed under a rank that is not above its present one. So a rank that
           rises needs no word; of one that may have fallen `refile` is told.
Thread:    scheduler thread only.
"""

import heapq
from collections.abc import Callable, Iterable
from typing import Protocol

from replicas.cache.node import TreeNode
from replicas.request import OFFLINE

Rank = tuple[int, ...]  # smallest goes first

PROTECTED_HITS = 2  # SGLang's threshold of slru
TAIL_TOKENS = 1024  # tlru: tokens that a next turn may compute again beside its own, and still begin in time


def _tail_rank(node: TreeNode) -> Rank:
    """Tail-optimised LRU: what a conversation can lose without its next turn being late goes first.

    A conversation is late if it has to compute more than `TAIL_TOKENS` tokens of its history. So a node is worth
    keeping if the history goes on for more than that from its begin.

    Source: Zhang et al. 2025 (arXiv:2510.15152), T-LRU: evict first what is "TEL-safe"; their threshold, less the
            estimate of the next prompt's own length, is our constant. SGLang has it as `tlru`.
    """
    return (int(node.ahead > TAIL_TOKENS), node.last_access)


POLICIES: dict[str, Callable[[TreeNode], Rank]] = {
    "lru": lambda node: (node.last_access,),
    "lfu": lambda node: (node.hit_count, node.last_access),
    "fifo": lambda node: (node.created,),
    "mru": lambda node: (-node.last_access,),
    "filo": lambda node: (-node.created,),
    "priority": lambda node: (node.priority, node.last_access),
    "slru": lambda node: (int(node.hit_count >= PROTECTED_HITS), node.last_access),
    "tlru": _tail_rank,
}


def kept(node: TreeNode) -> Rank:
    """Rank ``node`` before any policy. What only lines of batches use goes first: they come in the order of their
    prefixes; and so does what only a session used that has ended. What is kept for a session goes last, that for a
    younger one sooner."""
    return (node.priority != OFFLINE, *((0, 0) if node.lease is None else (1, -node.lease.born)))


class TierQueue(Protocol):
    """What a tier asks of its eviction order; `EvictionQueue` says what each method is for."""

    def add(self, node: TreeNode) -> None: ...
    def refile(self, node: TreeNode) -> None: ...
    def entered(self, node: TreeNode) -> None: ...
    def warms(self, node: TreeNode) -> None: ...
    def left(self, node: TreeNode) -> None: ...
    def peek(self) -> TreeNode | None: ...
    def pop(self) -> TreeNode | None: ...
    def clear(self) -> None: ...
    def check(self, tier: Iterable[TreeNode]) -> None: ...


class EvictionQueue:
    """The nodes of one tier by eviction policy (SPEC E12, E19). A pop costs O(log nodes), amortised over uses and pops.

    Args: policy: one of `POLICIES`. can_go: whether a node can leave the tier now.
          spare: nodes that go before all others, because their loss costs nothing.
    """

    def __init__(
        self,
        policy: str,
        *,
        can_go: Callable[[TreeNode], bool],
        spare: Callable[[TreeNode], bool] | None = None,
    ) -> None:
        if policy not in POLICIES:
            raise ValueError(f"unknown eviction policy {policy!r}; allowed: {sorted(POLICIES)}")
        by_policy = POLICIES[policy]

        def rank(node: TreeNode) -> Rank:
            usual = (*kept(node), *by_policy(node))
            return usual if spare is None else (not spare(node), *usual)

        self._rank = rank
        self._can_go = can_go
        self._heap: list[tuple[Rank, int, TreeNode]] = []
        self._filed: dict[TreeNode, Rank] = {}  # by what its live entry is filed under
        self._tie = 0

    def add(self, node: TreeNode) -> None:
        """Add ``node``, which can go now."""
        assert self._can_go(node)
        if node in self._filed:
            self.refile(node)
        else:
            self._push(node, self._rank(node))

    def refile(self, node: TreeNode) -> None:
        """Take note that the rank of ``node`` may have fallen: it was used, cut in two, or is spare now."""
        filed = self._filed.get(node)
        if filed is not None and (rank := self._rank(node)) < filed:
            self._push(node, rank)

    def entered(self, node: TreeNode) -> None:
        """Take note that the tier has the pages of ``node`` now."""

    def warms(self, node: TreeNode) -> None:
        """Take note that ``node`` is about to be used a second time."""

    def left(self, node: TreeNode) -> None:
        """Forget ``node``, whose pages leave the tier."""
        self._filed.pop(node, None)
        self._sweep()

    def peek(self) -> TreeNode | None:
        """Return the next victim and leave it; None when there is none."""
        while self._heap:
            filed, _, node = self._heap[0]
            if self._filed.get(node) != filed:
                heapq.heappop(self._heap)  # it left or was filed lower since
            elif not self._can_go(node):
                heapq.heappop(self._heap)  # locked or grown since; it is added again when it can go
                del self._filed[node]
                self._sweep()
            elif filed == (rank := self._rank(node)):
                return node
            else:
                heapq.heappop(self._heap)  # used since
                self._push(node, rank)
        return None

    def pop(self) -> TreeNode | None:
        """Remove and return the next victim; None when there is none."""
        node = self.peek()
        if node is not None:
            heapq.heappop(self._heap)
            del self._filed[node]
            self._sweep()
        return node

    def clear(self) -> None:
        self._heap, self._filed = [], {}

    def check(self, tier: Iterable[TreeNode]) -> None:
        """Assert the invariant, given all nodes of the tier. O(nodes)."""
        lost = sum(self._can_go(node) and node not in self._filed for node in tier)
        assert not lost, f"{lost} nodes that can go are not queued for eviction"
        entries = {(id(node), rank) for rank, _, node in self._heap}
        for node, filed in self._filed.items():
            assert (id(node), filed) in entries, "a node in the eviction queue has no entry in its heap"
            assert filed <= self._rank(node), f"a node is filed under {filed}, its rank fell to {self._rank(node)}"
        assert len(self._heap) <= 2 * len(self._filed) + 64, "entries that are no longer true pile up"

    def _push(self, node: TreeNode, rank: Rank) -> None:
        self._tie += 1
        self._filed[node] = rank
        heapq.heappush(self._heap, (rank, self._tie, node))
        self._sweep()

    def _sweep(self) -> None:
        """Drop the entries that are no longer true when they are more than half."""
        if len(self._heap) > 2 * len(self._filed) + 64:
            self._heap = [entry for entry in self._heap if self._filed.get(entry[2]) == entry[0]]
            heapq.heapify(self._heap)
