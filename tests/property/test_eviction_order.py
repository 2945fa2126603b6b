"""The eviction queue against a search through all nodes: what it pops is what can go and has the lowest rank."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from replicas.cache.node import NO_PAGES, Session, TreeNode
from replicas.cache.retention import POLICIES, EvictionQueue, Retention, TierOrder
from replicas.request import OFFLINE

TENANTS = st.sampled_from(["", "one", "two"])
WHICH = st.integers(0, 1_000)


def queue_of(policy: str) -> EvictionQueue:
    order = TierOrder(policy=policy, pages=lambda node: NO_PAGES, can_go=lambda node: node.lock_ref == 0)
    return EvictionQueue(Retention(lambda: 0.0), order)


class QueueAgainstSearch(RuleBasedStateMachine):
    """SPEC E12, E19: nodes are added, used, locked, cut in two, and leave, in any order; each pop is compared."""

    @initialize(policy=st.sampled_from(sorted(POLICIES)))
    def start(self, policy: str) -> None:
        self.over: frozenset[str] = frozenset()
        self.queue = queue_of(policy)
        self.retention = self.queue._retention
        self.retention.over = lambda held: self.over  # type: ignore[method-assign]
        self.nodes: list[TreeNode] = []
        self.tick = 0

    def node(self, which: int) -> TreeNode | None:
        return self.nodes[which % len(self.nodes)] if self.nodes else None

    @rule(
        behind=st.integers(0, 4),
        pages=st.integers(1, 4),
        priority=st.sampled_from([OFFLINE, -1, 0, 1]),
        tenant=TENANTS,
    )
    def insert(self, behind: int, pages: int, priority: int, tenant: str) -> None:
        self.tick += 1
        key = np.zeros(512 * pages, dtype=np.int32)
        node = TreeNode(
            key=key,
            pages=np.zeros(pages, dtype=np.int32),
            parent=None,
            salt="",
            created=self.tick,
            last_access=self.tick,
            priority=priority,
            tenant=tenant,
            ahead=512 * behind + len(key),
        )
        self.nodes.append(node)
        self.queue.add(node)

    @rule(which=WHICH, hit=st.booleans(), longer=st.integers(0, 3), priority=st.integers(-1, 2))
    def use(self, which: int, hit: bool, longer: int, priority: int) -> None:
        if (node := self.node(which)) is not None:
            self.tick += 1
            node.last_access = self.tick
            node.hit_count += hit
            node.ahead += 512 * longer
            node.priority = max(node.priority, priority)
            self.queue.refile(node)

    @rule(which=WHICH, tenant=TENANTS)
    def change(self, which: int, tenant: str) -> None:
        if (node := self.node(which)) is not None:
            node.tenant = tenant
            self.queue.changed(node)

    @rule(over=st.frozensets(TENANTS))
    def weigh(self, over: frozenset[str]) -> None:
        self.over = over

    @rule(which=WHICH, born=st.integers(1, 4))
    def lease(self, which: int, born: int) -> None:
        """An older session's lease takes the place of a younger's."""
        node = self.node(which)
        if node is not None and (node.lease is None or node.lease.born > born):
            node.lease = Session(born, end=node)

    @rule(which=WHICH)
    def lease_runs_out(self, which: int) -> None:
        if (node := self.node(which)) is not None:
            node.lease = None
            self.queue.refile(node)

    @rule(which=WHICH)
    def cut(self, which: int) -> None:
        """The node becomes the deeper part of itself, as in a split: it begins later."""
        node = self.node(which)
        if node is not None and len(node.pages) > 1:
            node.keep(1, len(node.pages), 512)
            self.queue.refile(node)

    @rule(which=WHICH)
    def lock(self, which: int) -> None:
        if (node := self.node(which)) is not None:
            node.lock_ref += 1

    @rule(which=WHICH)
    def unlock(self, which: int) -> None:
        node = self.node(which)
        if node is not None and node.lock_ref:
            node.lock_ref -= 1
            if not node.lock_ref:
                self.queue.add(node)

    @rule(which=WHICH)
    def leave(self, which: int) -> None:
        if (node := self.node(which)) is not None:
            self.nodes.remove(node)
            self.queue.left(node)

    @rule(times=st.integers(1, 3))
    def pop(self, times: int) -> None:
        for _ in range(times):
            free = [node for node in self.nodes if not node.lock_ref]
            victim = self.queue.pop()
            if not free:
                assert victim is None
                return
            assert victim in free
            ranks = [self.retention.rank(node, self.queue.order, self.over) for node in free]
            assert ranks[free.index(victim)] == min(ranks)
            self.nodes.remove(victim)

    @invariant()
    def agrees(self) -> None:
        self.queue.check(self.nodes)


TestQueueAgainstSearch = QueueAgainstSearch.TestCase
TestQueueAgainstSearch.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_node_that_is_used_for_ever_fills_no_heap(policy: str) -> None:
    """Under mru each use lowers the rank and files an entry: those that are no longer true are swept."""
    queue = queue_of(policy)
    nodes = [TreeNode.root("") for _ in range(10)]
    for node in nodes:
        node.lock_ref = 0
        queue.add(node)
    for tick in range(1, 2_001):
        nodes[tick % 10].last_access = tick
        queue.refile(nodes[tick % 10])
        assert queue._num_entries <= 2 * 10 + 64
    queue.check(nodes)
    assert {id(queue.pop()) for _ in range(10)} == {id(node) for node in nodes}
    assert queue.pop() is None
