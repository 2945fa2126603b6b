"""The host tier's queue under arc: pages used once and pages used again share the tier, and ghosts move the border."""

import numpy as np
import pytest

from replicas.cache.arc import ArcQueue, host_queue
from replicas.cache.node import TreeNode
from replicas.cache.retention import Retention
from replicas.cache.write_policy import WritePolicy


class Tier:
    """A host tier of ``num_pages`` pages without a tree: every node is a run of its own."""

    def __init__(self, num_pages: int, *, policy: str = "arc", write: str = "write_back") -> None:
        self.now_s = 0.0
        self.free = num_pages
        self.write = WritePolicy.make(write, ghost_capacity=100)
        self.queue = host_queue(
            policy,
            num_pages,
            retention=Retention(lambda: self.now_s),
            write=self.write,
            spare=lambda node: node.on_device and self.write.rule.at_eviction,
        )
        self.nodes: dict[int, TreeNode] = {}

    def put(self, number: int, num_pages: int = 1, *, on_device: bool = False, hits: int = 0) -> None:
        self.now_s += 1.0
        while self.free < num_pages:
            self.evict()
        run = np.arange(num_pages, dtype=np.int32)
        node = TreeNode(
            key=run,
            pages=run if on_device else run[:0],
            parent=TreeNode.root(""),
            salt="",
            created=int(self.now_s),
            last_access=int(self.now_s),
            used_s=self.now_s,
            hit_count=hits,
            page_keys=np.arange(100 * number, 100 * number + num_pages, dtype=np.uint64),
            host=run,
        )
        self.nodes[number] = node
        self.free -= num_pages
        self.queue.entered(node)
        self.queue.add(node)
        self.queue.check(self.nodes.values())

    def use(self, number: int) -> None:
        self.now_s += 1.0
        node = self.nodes[number]
        if not node.hit_count:
            self.queue.warms(node)
        node.last_access, node.used_s, node.hit_count = int(self.now_s), self.now_s, node.hit_count + 1
        self.queue.refile(node)
        self.queue.check(self.nodes.values())

    def evict(self) -> int:
        """Returns: the number of the run that left."""
        expected = self.queue.peek()
        node = self.queue.pop()
        assert node is not None
        assert node is expected
        self.queue.left(node)
        number = next(number for number, each in self.nodes.items() if each is node)
        del self.nodes[number]
        self.free += len(node.host)
        self.queue.check(self.nodes.values())
        return number


def test_a_scan_of_runs_used_once_does_not_wash_out_what_was_used_again() -> None:
    """Of 4 pages 2 were used again; 6 others pass through. lru would lose both."""
    left = {}
    for policy in ("arc", "lru"):
        tier = Tier(4, policy=policy)
        for number in (1, 2):
            tier.put(number)
            tier.use(number)
        for number in range(3, 9):
            tier.put(number)
        left[policy] = sorted(tier.nodes)
    assert left == {"arc": [1, 2, 7, 8], "lru": [5, 6, 7, 8]}


def test_runs_that_come_back_after_one_use_get_a_larger_share() -> None:
    """3 and 4 left after one use and come again: a page more is for such runs each time, so 1 goes before 6."""
    tier = Tier(4)
    for number in (1, 2):
        tier.put(number)
        tier.use(number)
    for number in (3, 4, 5, 6):
        tier.put(number)
    assert sorted(tier.nodes) == [1, 2, 5, 6]
    tier.put(3)  # for 5, and it is hot now: it was here before
    tier.put(4)  # one page is for runs used once now, and 6 has it: the oldest of the others goes
    assert sorted(tier.nodes) == [2, 3, 4, 6]


def test_a_run_counts_with_its_pages_and_is_remembered_by_them() -> None:
    tier = Tier(6)
    tier.put(1, 4)
    tier.put(2, 4)
    assert sorted(tier.nodes) == [2]
    tier.put(1, 2)  # the first two pages of the run that left
    assert tier.nodes[1].hit_count
    assert not tier.nodes[2].hit_count
    assert tier.evict() == 2


def test_what_is_idle_for_longer_than_second_uses_take_goes_first() -> None:
    """The run used again is older than nearly all waits: it goes although runs used once have more than their share."""
    tier = Tier(4)
    tier.put(1)
    tier.use(1)
    for number in (2, 3, 4):
        tier.put(number)
    tier.write.gaps.waited(10.0)
    assert tier.queue.peek() is tier.nodes[2]
    tier.now_s += 10.0
    assert tier.evict() == 1


@pytest.mark.parametrize("policy", ["arc", "lru", "fifo"])
@pytest.mark.parametrize(("write", "first"), [("adaptive", 3), ("write_back", 3), ("write_through", 1)])
def test_a_copy_that_the_device_gives_again_goes_first(policy: str, write: str, first: int) -> None:
    """Run 3 is on the device too; under write_through it is not copied again, so that its copy is worth as much."""
    tier = Tier(4, policy=policy, write=write)
    tier.put(1)
    tier.put(2)
    tier.put(3, on_device=True)
    assert tier.evict() == first


def test_what_the_device_has_is_not_lost_when_the_host_drops_it() -> None:
    tier = Tier(4)
    tier.put(1, on_device=True)
    assert tier.evict() == 1
    tier.put(1)
    assert not tier.nodes[1].hit_count


def test_a_locked_run_stays_and_emptied_queues_have_no_victim() -> None:
    tier = Tier(4)
    tier.put(1, hits=1)
    tier.put(2)
    tier.nodes[2].lock_ref = 1
    assert tier.evict() == 1
    assert tier.queue.peek() is tier.queue.pop() is None
    tier.nodes[2].lock_ref = 0
    tier.queue.add(tier.nodes[2])
    assert tier.evict() == 2
    tier.put(3)
    tier.queue.clear()
    tier.nodes.clear()
    assert isinstance(tier.queue, ArcQueue)
    tier.queue.check([])
    assert tier.queue.pop() is None
