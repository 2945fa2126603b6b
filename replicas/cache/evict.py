"""Eviction order of one tier: which node that can go goes next, without a look at the tree.

To add a policy, give `POLICIES` a function from a node to its rank: it is then a value of ``cache.eviction`` and
the host tier. One that keeps books of its own, for the host tier alone, is an entry of arc.py's HOST_QUEUES.

Owns:      for each tenant a heap of (rank, node), and for each node the rank of its live entry. Entries are not touched
           when a node is used, locked or extended: an entry that is no longer true is found when it is popped, and then
           dropped or filed again. The tenants are in a heap too, by their first entries; one that is over its share, or
           within it again, is filed anew when a victim is asked for.
Never:     frees anything (cache/radix.py).
Invariant: every node that can go has a live entry, filed under a rank that is not above its present one. So a rank that
           rises needs no word; of one that may have fallen `refile` is told.
Thread:    scheduler thread only.
"""

import heapq
from collections.abc import Callable, Collection, Container, Iterable
from typing import Protocol

from replicas.cache.node import TreeNode
from replicas.request import OFFLINE

Rank = tuple[int, ...]  # smallest goes first
Entry = tuple[Rank, int, TreeNode]  # and what tells equal ranks apart
Place = tuple[Rank, int]  # among all tenants' entries

PROTECTED_HITS = 2  # SGLang's threshold of slru
TENANTS_A_LOOK = 16  # a look at who is over its share serves a victim more for each so many tenants
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


def kept(node: TreeNode, over: Collection[str] = (), marked: Container[TreeNode] = ()) -> Rank:
    """Rank ``node`` before any policy. What only lines of batches use goes first: they come in the order of their
    prefixes. Then what tenants ``over`` their share have. What
    is ``marked`` goes later, and what is kept for a session goes last, that for a younger one sooner."""
    lease = (int(node in marked), 0) if node.lease is None else (2, -node.lease.born)
    return (node.priority != OFFLINE, node.tenant not in over, *lease)


class TierQueue(Protocol):
    """What a tier asks of its eviction order; `EvictionQueue` says what each method is for."""

    def add(self, node: TreeNode) -> None: ...
    def refile(self, node: TreeNode) -> None: ...
    def changed(self, node: TreeNode) -> None: ...
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
          over: returns the tenants that have more than their share of the tier. marked: nodes that clients asked to
          keep; `refile` is told of one whose time is over.
    """

    def __init__(
        self,
        policy: str,
        *,
        can_go: Callable[[TreeNode], bool],
        spare: Callable[[TreeNode], bool] | None = None,
        over: Callable[[], Collection[str]] = tuple,
        marked: Container[TreeNode] = (),
    ) -> None:
        if policy not in POLICIES:
            raise ValueError(f"unknown eviction policy {policy!r}; allowed: {sorted(POLICIES)}")
        by_policy = POLICIES[policy]

        def rank(node: TreeNode) -> Rank:
            usual = (*kept(node, marked=marked), *by_policy(node))
            return usual if spare is None else (not spare(node), *usual)

        self._rank = rank
        self._at = 1 if spare is None else 2  # where a rank says that its tenant is within its share
        self._can_go = can_go
        self._over = over
        self._heaps: dict[str, list[Entry]] = {}  # by tenant
        self._tenants: list[tuple[Place, str]] = []  # a heap, by first entry; those that are no longer true are dropped
        self._now_over: frozenset[str] = frozenset()  # as of the last look; tenants are filed by that
        self._num_asked = 0  # times for a victim, since
        self._num_entries = 0
        self._filed: dict[TreeNode, Rank] = {}  # by what its live entry is filed under, as of a tenant within its share
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

    def changed(self, node: TreeNode) -> None:
        """Take note that ``node`` is another tenant's now."""
        if node in self._filed:
            self._push(node, self._rank(node))

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
        self._look_who_is_over()
        while self._tenants:
            place, tenant = self._tenants[0]
            if tenant not in self._heaps or place != self._first(tenant):
                heapq.heappop(self._tenants)
            elif (node := self._head(tenant)) is not None:
                return node
        return None

    def pop(self) -> TreeNode | None:
        """Remove and return the next victim; None when there is none."""
        node = self.peek()
        if node is not None:
            self._drop_head(node.tenant)
            del self._filed[node]
            self._sweep()
        return node

    def clear(self) -> None:
        self._heaps, self._tenants, self._num_entries, self._filed = {}, [], 0, {}

    def check(self, tier: Iterable[TreeNode]) -> None:
        """Assert the invariant, given all nodes of the tier. O(nodes)."""
        lost = sum(self._can_go(node) and node not in self._filed for node in tier)
        assert not lost, f"{lost} nodes that can go are not queued for eviction"
        entries = {(id(node), rank, tenant) for tenant, heap in self._heaps.items() for rank, _, node in heap}
        for node, filed in self._filed.items():
            assert (id(node), filed, node.tenant) in entries, "a node in the eviction queue has no entry in its heap"
            assert filed <= self._rank(node), f"a node is filed under {filed}, its rank fell to {self._rank(node)}"
        places = {(self._first(tenant), tenant) for tenant in self._heaps}
        assert places.issubset(self._tenants), "the first entry of a tenant is not in the heap of tenants"
        num = sum(map(len, self._heaps.values()))
        assert num == self._num_entries, f"{num} entries are in the heaps, {self._num_entries} are counted"
        assert num <= 2 * len(self._filed) + 64, "entries that are no longer true pile up"

    def _look_who_is_over(self) -> None:
        """Look at who is over its share, so that a victim costs the same however many tenants there are."""
        self._num_asked += 1
        if self._num_asked <= len(self._heaps) // TENANTS_A_LOOK:
            return
        before, self._num_asked = self._now_over, 0
        self._now_over = frozenset(self._over() if len(self._heaps) > 1 else ())
        for tenant in before ^ self._now_over:
            if tenant in self._heaps:
                self._file_tenant(tenant)

    def _file_tenant(self, tenant: str) -> None:
        """File ``tenant`` by its first entry, which is another than before, or elsewhere among all."""
        heapq.heappush(self._tenants, (self._first(tenant), tenant))
        if len(self._tenants) > 2 * len(self._heaps) + 64:
            self._file_tenants()

    def _file_tenants(self) -> None:
        self._tenants = [(self._first(tenant), tenant) for tenant in self._heaps]
        heapq.heapify(self._tenants)

    def _first(self, tenant: str) -> Place:
        """Return the place of the first entry of ``tenant`` among all: its node's is not before that."""
        rank, tie, _ = self._heaps[tenant][0]
        return (*rank[: self._at], tenant not in self._now_over, *rank[self._at + 1 :]), tie

    def _head(self, tenant: str) -> TreeNode | None:
        """Return the node of the first entry of ``tenant``, if that is true; else drop it, or file the node again."""
        entry = filed, _, node = self._heaps[tenant][0]
        is_live = self._is_live(tenant, entry)  # else it left, was filed lower, or became another's since
        rank = self._rank(node) if is_live and self._can_go(node) else None
        if rank == filed:
            return node
        self._drop_head(tenant)
        if rank is not None:
            self._push(node, rank)  # used since
        elif is_live:
            del self._filed[node]  # locked or grown since; it is added again when it can go
            self._sweep()
        return None

    def _is_live(self, tenant: str, entry: Entry) -> bool:
        rank, _, node = entry
        return node.tenant == tenant and self._filed.get(node) == rank

    def _drop_head(self, tenant: str) -> None:
        heap = self._heaps[tenant]
        heapq.heappop(heap)
        self._num_entries -= 1
        if heap:
            self._file_tenant(tenant)
        else:
            del self._heaps[tenant]

    def _push(self, node: TreeNode, rank: Rank) -> None:
        self._tie += 1
        self._filed[node] = rank
        heap = self._heaps.setdefault(node.tenant, [])
        heapq.heappush(heap, (rank, self._tie, node))
        self._num_entries += 1
        if heap[0][1] == self._tie:
            self._file_tenant(node.tenant)
        self._sweep()

    def _sweep(self) -> None:
        """Drop the entries that are no longer true when they are more than half."""
        if self._num_entries <= 2 * len(self._filed) + 64:
            return
        for tenant in list(self._heaps):
            self._heaps[tenant] = [entry for entry in self._heaps[tenant] if self._is_live(tenant, entry)]
            heapq.heapify(self._heaps[tenant])
            if not self._heaps[tenant]:
                del self._heaps[tenant]
        self._file_tenants()
        self._num_entries = sum(map(len, self._heaps.values()))
