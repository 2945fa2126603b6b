"""Retention: what each node of a tree is worth, and the queues by which the least worth leaves a tier next.

To add an eviction policy, give `POLICIES` a function from a node to its rank: it is then a value of ``cache.eviction``
and the host tier. One that keeps books of its own, for the host tier alone, is an entry of arc.py's HOST_QUEUES.

Owns:      the tenants' weights and until when each is active, until when what is before a cache breakpoint is kept, the
           sessions (cache/sessions.py), and the order of each tier. `TreeNode.tenant` is written here.
Never:     evicts, locks or keeps a page free: a rank counts only while pages are short.
Invariant: a node that requests of several tenants used is everybody's, and stays so; it counts as no one's. A node
           with a breakpoint is in the tree.
Thread:    scheduler thread only.

A tenant has a share while it is active, so that pages of one that has gone protect nothing; for as long as it asked to
keep what is before a breakpoint, it is. A share is by weight of what the active ones have cached in all; a tenant
that is active alone may have everything. Anthropic's ``cache_control`` becomes a cache breakpoint; each use lengthens
it.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from replicas.cache.node import TreeNode, path_to
from replicas.cache.sessions import Expiry, Sessions
from replicas.memory.allocator import Pages
from replicas.request import OFFLINE

EVERYBODY = "*"  # no tenant has this name (deployments/tenancy/tenants.py)
ACTIVE_S = 600.0  # since a tenant's last request began or ended its prompt
PROTECTED_HITS = 2  # SGLang's threshold of slru
TAIL_TOKENS = 1024  # tlru: tokens that a next turn may compute again beside its own, and still begin in time

Rank = tuple[int, ...]  # smallest goes first
SHARE = 2  # where a rank says that the node's tenant is within its share
POLICY = 5  # where the policy's part of a rank begins
TENANTS_A_LOOK = 16  # a look at who is over its share serves a victim more for each so many tenants
Entry = tuple[Rank, int, TreeNode]  # and what tells equal ranks apart
Place = tuple[Rank, int]  # among all tenants' entries


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TierOrder:
    """By what the nodes of one tier are ordered, and how much of it each tenant has."""

    policy: str  # one of `POLICIES`
    pages: Callable[[TreeNode], Pages]  # of a node in the tier
    can_go: Callable[[TreeNode], bool]  # whether a node can leave the tier now
    spare: Callable[[TreeNode], bool] = lambda node: False  # whether its loss there costs nothing
    held: Counter[str] = field(default_factory=Counter)  # pages in the tier, by tenant

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ValueError(f"unknown eviction policy {self.policy!r}; allowed: {sorted(POLICIES)}")

    def check(self, nodes: Iterable[TreeNode]) -> None:
        """Assert that ``held`` counts the pages of ``nodes``, all of the tier."""
        counted = Counter[str]()
        for node in nodes:
            counted[node.tenant] += len(self.pages(node))
        assert counted == self.held, f"pages by tenant: {counted} are in the tree, {self.held} are counted"


class TierQueue(Protocol):
    """What a tree asks of the order in which nodes leave a tier; `EvictionQueue` says what each method is for."""

    order: TierOrder

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


class Retention:
    """What ranks the nodes of one tree, in each of its tiers."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.queues: list[TierQueue] = []  # one for each tier, which are told of each change
        self.sessions = Sessions(fell=self.refile, clock=clock)
        self._breakpoints = Expiry[TreeNode]()
        self._weights: dict[str, float] = {}  # by tenant
        self._active_until_s: dict[str, float] = {}  # by tenant

    def rank(self, node: TreeNode, order: TierOrder, over: Collection[str] = ()) -> Rank:
        """Rank ``node`` among those of a tier; the smallest leaves first.

        What costs nothing goes first, then what only batch requests use (they come in the order of their prefixes),
        then what the tenants ``over`` have, which are beyond their shares. What is before a breakpoint goes later, and
        what is kept for a session last, that for a younger one sooner. Equal ones go by the tier's policy.
        """
        lease = (int(node in self._breakpoints.until_s), 0) if node.lease is None else (2, -node.lease.born)
        return (
            not order.spare(node),
            node.priority != OFFLINE,
            node.tenant not in over,
            *lease,
            *POLICIES[order.policy](node),
        )

    def keeps(self, node: TreeNode) -> bool:
        """Whether ``node`` is kept for who comes back."""
        return node.lease is not None or node in self._breakpoints.until_s

    def over(self, held: Counter[str]) -> frozenset[str]:
        """Return the tenants that have more than their share of a tier, whose pages are ``held`` by tenant. Where fewer
        than two are active, none has."""
        for tenant in [tenant for tenant, num_pages in held.items() if not num_pages]:
            del held[tenant]
        now_s, until_s = self.clock(), self._active_until_s
        active = {tenant for tenant in held if until_s.get(tenant, now_s) > now_s}
        if len(active) < 2:
            return frozenset()
        share = sum(held[tenant] for tenant in active) / sum(self._weights[tenant] for tenant in active)
        gone = (tenant for tenant in held if tenant in until_s and tenant not in active)
        return frozenset([*gone, *(tenant for tenant in active if held[tenant] > share * self._weights[tenant])])

    def used_by(self, node: TreeNode, tenant: str, weight: float) -> None:
        """Take note that a request of ``tenant`` uses the path down to ``node``, or has computed it; ``weight``: of its
        share."""
        if not tenant:
            return
        self._is_active(tenant, weight, ACTIVE_S)
        for step in path_to(node):
            if step.tenant in (tenant, EVERYBODY):
                continue
            before, step.tenant = step.tenant, EVERYBODY if step.tenant else tenant
            for queue in self.queues:
                num_pages = len(queue.order.pages(step))
                queue.order.held[before] -= num_pages
                queue.order.held[step.tenant] += num_pages
                queue.changed(step)

    def set_breakpoint(self, path: Sequence[TreeNode], ttl_s: float, *, tenant: str, weight: float) -> None:
        """Take note that ``tenant`` asks to keep ``path`` for ``ttl_s`` from now on: within its share it goes later
        than what nobody waits for."""
        until_s = self.clock() + ttl_s
        for node in path:
            self._breakpoints.keep(node, max(self._breakpoints.until_s.get(node, 0.0), until_s))
        if tenant and path:
            self._is_active(tenant, weight, ttl_s)

    def file(self, node: TreeNode) -> None:
        """Queue ``node`` in each tier that it can leave; after any change that may make it a candidate."""
        for queue in self.queues:
            if queue.order.can_go(node):
                queue.add(node)

    def refile(self, node: TreeNode) -> None:
        """Take note that ``node`` was used or cut, or is kept no longer: its rank may have fallen."""
        for queue in self.queues:
            queue.refile(node)

    def was_split(self, node: TreeNode, head: TreeNode) -> None:
        """Take note that ``head`` is what was the beginning of ``node``."""
        if node in self._breakpoints.until_s:
            self._breakpoints.keep(head, self._breakpoints.until_s[node])
        self.refile(node)

    def removed(self, leaf: TreeNode) -> None:
        """Take note that ``leaf`` is about to leave the tree."""
        self.sessions.removed(leaf)
        self._breakpoints.drop(leaf)

    def expire(self) -> None:
        """End the cache breakpoints and leases that have run out; before victims are asked for."""
        self.sessions.expire()
        for node in self._breakpoints.pop_due(self.clock()):
            self.refile(node)

    def clear(self) -> None:
        """Forget what is known of nodes: the tree is empty."""
        self.sessions.clear()
        self._breakpoints.clear()
        for queue in self.queues:
            queue.clear()

    def check(self, nodes: Sequence[TreeNode]) -> None:
        """Assert the invariants of all parts, given all nodes of the tree. O(nodes * depth)."""
        self.sessions.check(nodes)
        self._breakpoints.check()
        assert self._breakpoints.until_s.keys() <= set(nodes), "a node has a breakpoint and has left"
        for queue in self.queues:
            queue.check(node for node in nodes if len(queue.order.pages(node)))

    def _is_active(self, tenant: str, weight: float, for_s: float) -> None:
        self._weights[tenant] = weight
        self._active_until_s[tenant] = max(self._active_until_s.get(tenant, 0.0), self.clock() + for_s)


class EvictionQueue:
    """The nodes of one tier by rank, without a look at the tree (SPEC E12, E19). A pop costs O(log nodes), amortised
    over uses and pops.

    A heap of (rank, node) for each tenant, and for each node the rank of its live entry. Entries are not touched when a
    node is used, locked or extended: an entry that is no longer true is found when it is popped, and then dropped or
    filed again. The tenants are in a heap too, by their first entries; one that is over its share, or within it again,
    is filed anew when a victim is asked for.

    Invariant: every node that can go has a live entry, filed under a rank that is not above its present one. So a rank
    that rises needs no word; of one that may have fallen `refile` is told.
    """

    def __init__(self, retention: Retention, order: TierOrder) -> None:
        self.order = order
        self._retention = retention
        self._heaps: dict[str, list[Entry]] = {}  # by tenant
        self._tenants: list[tuple[Place, str]] = []  # a heap, by first entry; those that are no longer true are dropped
        self._now_over: frozenset[str] = frozenset()  # as of the last look; tenants are filed by that
        self._num_asked = 0  # times for a victim, since
        self._num_entries = 0
        self._filed: dict[TreeNode, Rank] = {}  # by what its live entry is filed under, as of a tenant within its share
        self._tie = 0

    def add(self, node: TreeNode) -> None:
        """Add ``node``, which can go now."""
        assert self.order.can_go(node)
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
        self.order.held[node.tenant] += len(self.order.pages(node))

    def warms(self, node: TreeNode) -> None:
        """Take note that ``node`` is about to be used a second time."""

    def left(self, node: TreeNode) -> None:
        """Forget ``node``, whose pages leave the tier, still its own."""
        self.order.held[node.tenant] -= len(self.order.pages(node))
        self.forget(node)

    def forget(self, node: TreeNode) -> None:
        """Take ``node`` out of the order."""
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
        """Forget all nodes, which left the tier together."""
        self._heaps, self._tenants, self._num_entries, self._filed = {}, [], 0, {}
        self.order.held.clear()

    def check(self, tier: Iterable[TreeNode]) -> None:
        """Assert the invariant, given all nodes of the tier. O(nodes)."""
        nodes = list(tier)
        self.order.check(nodes)
        lost = sum(self.order.can_go(node) and node not in self._filed for node in nodes)
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
        self._now_over = frozenset(self._retention.over(self.order.held) if len(self._heaps) > 1 else ())
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
        return (*rank[:SHARE], tenant not in self._now_over, *rank[SHARE + 1 :]), tie

    def _head(self, tenant: str) -> TreeNode | None:
        """Return the node of the first entry of ``tenant``, if that is true; else drop it, or file the node again."""
        entry = filed, _, node = self._heaps[tenant][0]
        is_live = self._is_live(tenant, entry)  # else it left, was filed lower, or became another's since
        rank = self._rank(node) if is_live and self.order.can_go(node) else None
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

    def _rank(self, node: TreeNode) -> Rank:
        return self._retention.rank(node, self.order)

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
