"""ArcQueue: which node leaves the host tier next, by a balance between recency and frequency that it finds itself.

Owns:      the share of the tier that pages used once may have, and the keys of pages that the tier lost lately.
Never:     frees anything (cache/tiers.py).
Invariant: pages used once, there and lost lately, are at most the tier's; all that are remembered, at most twice that.
Thread:    scheduler thread only.
Source:    Megiddo & Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST'03. What differs: the unit of
           order is a node of the tree, the unit of size its page; only what can go is a candidate; and a page that is
           idle for longer than nearly all second uses take goes before any other, since on long traces and in large
           tiers ARC kept pages for their past (`LAST` in cache/write_policy.py).
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Protocol

from kvtransfer.pages import PageKey
from replicas.cache.node import TreeNode
from replicas.cache.retention import POLICY, EvictionQueue, Retention, TierOrder, TierQueue
from replicas.cache.write_policy import LAST, ReuseGaps, WritePolicy

LOST_PER_PAGE = 2  # the paper has 1, for a cache that has none before it

Ghosts = OrderedDict[PageKey, None]  # oldest first


class ArcQueue:
    """The nodes of a tier of ``num_pages`` pages, with the interface of an `EvictionQueue`. A node is hot after its
    second use, even if it was lost in between."""

    def __init__(self, num_pages: int, *, retention: Retention, order: TierOrder, gaps: ReuseGaps) -> None:
        self.order = order
        self._num_pages = num_pages
        self._retention = retention
        self._gaps = gaps
        self._cold = EvictionQueue(
            retention, replace(order, can_go=lambda node: order.can_go(node) and not node.hit_count)
        )
        self._hot = EvictionQueue(
            retention, replace(order, can_go=lambda node: order.can_go(node) and node.hit_count > 0)
        )
        self._cold_pages = 0  # of cold nodes in the tier; |T1| of the paper
        self._cold_share = 0.0  # pages; p of the paper: what T1 is to have
        self._lost_cold: Ghosts = OrderedDict()  # B1
        self._lost_hot: Ghosts = OrderedDict()  # B2

    def add(self, node: TreeNode) -> None:
        """Add ``node``, which can go now."""
        self._queue(node).add(node)

    def refile(self, node: TreeNode) -> None:
        """Take note that ``node`` was used, cut in two, or is spare now."""
        if node.hit_count and self.order.can_go(node):
            self._hot.add(node)
        else:
            self._queue(node).refile(node)

    def changed(self, node: TreeNode) -> None:
        """Take note that ``node`` is another tenant's now."""
        self._queue(node).changed(node)

    def warms(self, node: TreeNode) -> None:
        """Take note that ``node`` is about to be used a second time."""
        self._cold.forget(node)
        self._cold_pages -= len(node.host)

    def entered(self, node: TreeNode) -> None:
        """Take note that the tier has the pages of ``node`` now: those it lost lately say which share was too small."""
        assert node.page_keys is not None
        self.order.held[node.tenant] += len(node.host)
        was_hot = node.hit_count > 0
        for key in node.page_keys.tolist():
            cold, hot = len(self._lost_cold), len(self._lost_hot)
            if key in self._lost_cold:
                del self._lost_cold[key]
                self._cold_share = min(self._num_pages, self._cold_share + max(1.0, hot / cold))
                was_hot = True
            elif key in self._lost_hot:
                del self._lost_hot[key]
                self._cold_share = max(0.0, self._cold_share - max(1.0, cold / hot))
                was_hot = True
        if was_hot:
            self._cold.forget(node)  # it may be queued already, as one used once
            node.hit_count = max(node.hit_count, 1)
        else:
            self._cold_pages += len(node.host)
        if self.order.can_go(node):
            self.add(node)

    def left(self, node: TreeNode) -> None:
        """Forget ``node``, whose pages leave the tier, still its own; remember their keys if they are lost thereby."""
        self._queue(node).left(node)
        self._cold_pages -= 0 if node.hit_count else len(node.host)
        if node.on_device:
            return  # nothing is lost
        assert node.page_keys is not None
        lost = self._lost_hot if node.hit_count else self._lost_cold
        for key in reversed(node.page_keys.tolist()):  # the first pages are worth most: they are forgotten last
            lost[key] = None
            lost.move_to_end(key)
        while self._lost_cold and self._cold_pages + len(self._lost_cold) > self._num_pages:
            self._lost_cold.popitem(last=False)
        while len(self._lost_cold) + len(self._lost_hot) > LOST_PER_PAGE * self._num_pages:
            (self._lost_hot or self._lost_cold).popitem(last=False)

    def peek(self) -> TreeNode | None:
        """Return the next victim and leave it; None when there is none."""
        cold, hot = self._cold.peek(), self._hot.peek()
        if cold is None or hot is None:
            return cold or hot
        over = self._retention.over(self.order.held)
        of_cold, of_hot = (self._retention.rank(node, self.order, over)[:POLICY] for node in (cold, hot))
        if of_cold != of_hot:
            return cold if of_cold < of_hot else hot
        longest_s = self._gaps.quantile(LAST)
        if longest_s is not None and hot.used_s < min(cold.used_s, self._retention.clock() - longest_s):
            return hot
        return cold if self._cold_pages > self._cold_share else hot

    def pop(self) -> TreeNode | None:
        """Remove and return the next victim; None when there is none."""
        node = self.peek()
        return self._queue(node).pop() if node is not None else None

    def clear(self) -> None:
        """Forget all nodes, which left the tier together."""
        self._cold.clear()
        self._hot.clear()
        self._cold_pages = 0

    def check(self, tier: Iterable[TreeNode]) -> None:
        """Assert the invariant, given all nodes of the tier. O(nodes)."""
        nodes = list(tier)
        self._cold.check(nodes)
        self._hot.check(nodes)
        cold = sum(len(node.host) for node in nodes if not node.hit_count)
        assert cold == self._cold_pages, f"{cold} host pages were used once, {self._cold_pages} are counted"
        assert 0 <= self._cold_share <= self._num_pages, f"a share of {self._cold_share} of {self._num_pages} pages"
        lost = len(self._lost_cold) + len(self._lost_hot)
        assert lost <= LOST_PER_PAGE * self._num_pages, f"{lost} pages are remembered for a tier of {self._num_pages}"

    def _queue(self, node: TreeNode) -> EvictionQueue:
        return self._hot if node.hit_count else self._cold


class MakeHostQueue(Protocol):
    """Makes the queue of a host tier; `ArcQueue` is one."""

    def __call__(self, num_pages: int, *, retention: Retention, order: TierOrder, gaps: ReuseGaps) -> TierQueue: ...


# the values of ``cache.host_eviction`` beside retention.py's POLICIES
HOST_QUEUES: dict[str, MakeHostQueue] = {"arc": ArcQueue}


def host_queue(
    policy: str, num_pages: int, *, retention: Retention, write: WritePolicy, spare: Callable[[TreeNode], bool]
) -> TierQueue:
    """Make the queue of a host tier of ``num_pages`` pages; what is ``spare`` goes first."""
    order = TierOrder(
        policy="lru" if policy in HOST_QUEUES else policy,
        pages=lambda node: node.host,
        can_go=lambda node: node.host_evictable,
        spare=spare,
    )
    if policy in HOST_QUEUES:
        return HOST_QUEUES[policy](num_pages, retention=retention, order=order, gaps=write.gaps)
    return EvictionQueue(retention, order)
