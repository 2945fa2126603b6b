"""Owners: whose cached pages are, which tenants have more of a tier than their share, and what they asked to keep.

Owns:      the weight of each tenant, until when it is active, and until when each marked node is. Whose a node is
           stands in `TreeNode.tenant`.
Never:     evicts, or keeps a page free: a share and a mark count only while pages are short, in the order of evict.py.
Invariant: a node that requests of several tenants used is everybody's, and stays so; it counts as no one's. A marked
           node is in the tree, and has an entry in the heap that is not due after its mark.
Thread:    scheduler thread only.

A tenant has a share while it is active, so that pages of one that has gone protect nothing; for as long as it asked to
keep what it marked, it is. A share is by weight of what the active ones have cached in all; whoever is active alone may
have everything.

Anthropic's ``cache_control`` becomes a mark: what is marked goes after what nobody waits for, and before what a session
is expected back for. Each use lengthens it. What a tenant has beyond its share goes first, marked or not.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Iterable

from replicas.cache.node import TreeNode

EVERYBODY = "*"  # no tenant has this name (deployments/tenancy/tenants.py)
ACTIVE_S = 600.0  # since a tenant's last request began or ended its prompt


class Owners:
    """The tenants of one cache."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._weights: dict[str, float] = {}
        self._until_s: dict[str, float] = {}

    def used(self, tenant: str, weight: float, *, for_s: float = ACTIVE_S) -> None:
        """Note that a request of ``tenant`` uses the cache, and that it is active ``for_s`` from now on."""
        self._weights[tenant] = weight
        self._until_s[tenant] = max(self._until_s.get(tenant, 0.0), self._clock() + for_s)

    def over(self, held: Counter[str]) -> frozenset[str]:
        """Return the tenants that have more than their share of a tier, whose pages are ``held`` by tenant. Where fewer
        than two are active, none has."""
        for tenant in [tenant for tenant, num_pages in held.items() if not num_pages]:
            del held[tenant]
        now_s = self._clock()
        active = {tenant for tenant in held if self._until_s.get(tenant, now_s) > now_s}
        if len(active) < 2:
            return frozenset()
        share = sum(held[tenant] for tenant in active) / sum(self._weights[tenant] for tenant in active)
        gone = (tenant for tenant in held if tenant in self._until_s and tenant not in active)
        return frozenset([*gone, *(tenant for tenant in active if held[tenant] > share * self._weights[tenant])])


class Marks:
    """The marked nodes of one tree."""

    def __init__(self, *, touched: Callable[[TreeNode], None], clock: Callable[[], float]) -> None:
        """``touched``: called where the rank of a node has fallen."""
        self.until_s: dict[TreeNode, float] = {}  # read by who orders nodes; written here
        self._touched = touched
        self._clock = clock
        self._due: list[tuple[float, int, TreeNode]] = []  # by when to look at a node; some have left since
        self._tie = 0

    def keep(self, node: TreeNode, ttl_s: float) -> None:
        """Mark ``node`` for ``ttl_s`` from now on, or for as long as it is marked already."""
        self._mark(node, max(self.until_s.get(node, 0.0), self._clock() + ttl_s))

    def was_split(self, node: TreeNode, head: TreeNode) -> None:
        """Take note that ``head`` is what was the beginning of ``node``, which is marked."""
        self._mark(head, self.until_s[node])

    def removed(self, leaf: TreeNode) -> None:
        """Take note that ``leaf``, which is marked, is about to leave the tree."""
        del self.until_s[leaf]
        if len(self._due) > 2 * len(self.until_s) + 64:
            self._due = [entry for entry in self._due if entry[2] in self.until_s]
            heapq.heapify(self._due)

    def expire(self) -> None:
        """End the marks that have run out; before each look at the order of eviction."""
        now_s = self._clock()
        while self._due and self._due[0][0] <= now_s:
            node = heapq.heappop(self._due)[2]
            until_s = self.until_s.pop(node, None)
            if until_s is not None and until_s > now_s:
                self._mark(node, until_s)  # it was used since
            elif until_s is not None:
                self._touched(node)

    def clear(self) -> None:
        """Forget all marks: the tree is empty."""
        self.until_s.clear()
        self._due = []

    def check(self, nodes: Iterable[TreeNode]) -> None:
        """Assert the invariant, given all nodes of the tree. O(nodes)."""
        assert self.until_s.keys() <= set(nodes), "a node is marked that has left"
        due = [(node, due_s) for due_s, _, node in self._due if node in self.until_s]
        assert len(due) == len(self.until_s), f"{len(self.until_s)} nodes are marked, {len(due)} are in the heap"
        assert all(due_s <= self.until_s[node] for node, due_s in due), "a mark runs out before it is looked at"

    def _mark(self, node: TreeNode, until_s: float) -> None:
        if node not in self.until_s:
            self._tie += 1
            heapq.heappush(self._due, (until_s, self._tie, node))
        self.until_s[node] = until_s
