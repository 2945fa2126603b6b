"""Sessions in the tree: whose pages go first, and until when they are kept."""

import gc

import numpy as np
import pytest

from kvtransfer.pages import page_keys
from replicas.cache.node import TreeNode
from replicas.cache.radix import RadixCache
from replicas.cache.sessions import LEASE_S
from replicas.memory.allocator import Pages
from replicas.types import TokenIds
from tests.harness import Bench, Clock

PS = 4


class Tree:
    """A tree of pages of 4 tokens, and agents that ask it: agent a's tokens are a, a, ..."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.cache = RadixCache(PS, clock=self.clock)
        self.sessions = self.cache.retention.sessions
        self.num_pages = 0

    def ids(self, agent: int, num_pages: int) -> TokenIds:
        return np.full(num_pages * PS, agent, dtype=np.int32)

    def returns(self, prompt: TokenIds, rid: str = "") -> None:
        self.sessions.returns(self.cache.nodes_of(prompt, ""), rid=rid, keys=lambda: page_keys(prompt, PS, ""))

    def answered(self, whole: TokenIds, prompt_len: int, *, name: str = "", rid: str = "") -> None:
        self.sessions.answered(self.cache.nodes_of(whole, ""), prompt_len, name=name, rid=rid)

    def turn(self, agent: int, prompt_pages: int, *, answer_pages: int = 1, name: str = "") -> None:
        """A prompt arrives, is computed and answered."""
        prompt, whole = self.ids(agent, prompt_pages), self.ids(agent, prompt_pages + answer_pages)
        self.returns(prompt, rid=f"agent {agent}")
        for ids in (prompt, whole):
            num = len(ids) // PS
            pages: Pages = np.arange(self.num_pages, self.num_pages + num, dtype=np.int32)
            self.num_pages += num
            self.cache.insert(ids, pages, "")
            self.cache.match_prefix(ids, "", count_hit=False)
        self.answered(whole, len(prompt), name=name, rid=f"agent {agent}")
        self.cache.check()

    def left(self, agent: int) -> int:
        return self.cache.peek_len(self.ids(agent, 64), "") // PS

    def evict(self, num_pages: int) -> None:
        assert len(self.cache.evict(num_pages)) == num_pages
        self.cache.check()


def test_a_younger_sessions_pages_go_before_an_olders_though_it_was_used_last() -> None:
    tree = Tree()
    for agent in (1, 2):
        tree.turn(agent, 2)
    for agent in (1, 2):
        tree.turn(agent, 4)  # both have come back: they are leased
    tree.evict(3)
    assert (tree.left(1), tree.left(2)) == (5, 2)
    tree.evict(2)
    assert (tree.left(1), tree.left(2)) == (5, 0)


def test_what_no_session_holds_goes_first_though_it_was_used_last() -> None:
    tree = Tree()
    tree.turn(1, 2)
    tree.turn(1, 4)
    tree.turn(9, 3)  # one request, which never came back
    tree.evict(4)
    assert (tree.left(1), tree.left(9)) == (5, 0)


def test_a_name_makes_the_first_answer_a_sessions() -> None:
    tree = Tree()
    tree.turn(1, 2, name="agent")
    tree.turn(9, 2)
    tree.evict(3)
    assert (tree.left(1), tree.left(9)) == (3, 0)


def test_a_named_session_is_as_old_as_its_name_when_all_of_it_was_evicted() -> None:
    tree = Tree()
    tree.turn(1, 2, name="old")
    tree.evict(3)
    tree.turn(2, 2, name="young")
    tree.turn(1, 2, name="old")
    tree.evict(3)
    assert (tree.left(1), tree.left(2)) == (3, 0)


def test_a_session_without_a_name_is_known_by_what_it_says_when_all_of_it_was_evicted() -> None:
    tree = Tree()
    tree.turn(1, 2)
    tree.turn(2, 2)
    tree.evict(6)
    for agent in (2, 1):
        tree.turn(agent, 4)
    assert len(tree.sessions.leases.until_s) == 2  # both have come back
    tree.evict(5)
    assert (tree.left(1), tree.left(2)) == (5, 0)


def test_a_session_that_left_the_tree_while_its_prompt_waited_is_not_found_by_where_it_was() -> None:
    tree = Tree()
    tree.turn(1, 2)
    cache, prompt, whole = tree.cache, tree.ids(1, 4), tree.ids(1, 5)
    tree.returns(prompt, rid="next")
    tree.evict(3)
    for length in (4, 5):
        cache.insert(tree.ids(1, length), np.arange(10, 10 + length, dtype=np.int32), "")
    tree.answered(whole, len(prompt), rid="next")
    cache.check()
    tree.clock.now_s += LEASE_S + 1
    tree.sessions.expire()
    tree.returns(tree.ids(1, 3), rid="another")  # begins as its first prompt did, and ends before its second
    assert len(tree.sessions.leases.until_s) == 0
    tree.returns(whole, rid="its own")
    assert len(tree.sessions.leases.until_s) == 1


def test_what_is_kept_for_a_session_is_kept_until_its_lease_runs_out() -> None:
    tree = Tree()
    tree.turn(1, 2)
    tree.turn(1, 4)
    tree.clock.now_s += LEASE_S - 1
    tree.turn(9, 3)
    tree.evict(4)
    assert (tree.left(1), tree.left(9)) == (5, 0)
    tree.clock.now_s += 2
    tree.turn(8, 3)
    tree.evict(5)
    assert (tree.left(1), tree.left(8)) == (0, 4)
    assert len(tree.sessions.leases.until_s) == 0


def test_two_that_go_on_from_one_answer_are_two_sessions() -> None:
    tree = Tree()
    tree.turn(1, 2)
    branch = np.concatenate([tree.ids(1, 3), tree.ids(7, 1)])
    tree.turn(1, 4)
    before = len(tree.sessions.leases.until_s)
    tree.returns(branch)
    tree.cache.insert(branch, np.arange(90, 94, dtype=np.int32), "")
    tree.cache.match_prefix(branch, "", count_hit=False)
    tree.answered(branch, len(branch), name="branch")
    tree.cache.check()
    assert (before, len(tree.sessions.leases.until_s)) == (1, 2)


def test_an_older_session_that_answers_alike_takes_over_what_is_kept_for_a_younger() -> None:
    tree = Tree()
    tree.turn(2, 2, name="old")
    tree.turn(1, 2, name="young")
    tree.turn(1, 1, answer_pages=2, name="old")
    assert len(tree.sessions.leases.until_s) == 2  # both of "old": it has asked two prompts
    tree.turn(1, 4, name="young")
    tree.evict(2)
    assert (tree.left(1), len(tree.sessions.leases.until_s)) == (3, 2)


@pytest.mark.parametrize("name", ["", "agent"])
def test_no_session_keeps_a_node_alive_that_has_left_the_tree(name: str) -> None:
    """Of an answer whose prompt stays, so that the session is known."""
    tree = Tree()
    tree.turn(4711, 2, name=name)
    tree.evict(1)
    gc.collect()
    nodes = [each for each in gc.get_objects() if isinstance(each, TreeNode) and 4711 in each.key]
    assert [len(node.key) for node in nodes] == [2 * PS]


def test_a_cache_that_is_emptied_knows_no_session() -> None:
    tree = Tree()
    tree.turn(1, 3, name="one")
    tree.turn(2, 3)
    tree.cache.reset()
    tree.cache.check()
    tree.turn(1, 3)
    assert tree.left(1) == 4


@pytest.mark.parametrize("sessions", [True, False])
def test_the_scheduler_tells_the_tree_of_prompts_and_answers(sessions: bool) -> None:
    """Six turns of a session, then requests that fill the pool: what is cached of it afterwards."""
    bench = Bench(num_pages=24, sessions=sessions)
    history = [3, 1, 4, 1, 5, 9, 2, 6]
    for _ in range(3):
        req = bench.submit(history, max_new_tokens=4)
        bench.run()
        history = [*req.ids[: req.num_tokens].tolist(), 7, 7, 7, 7]
    for other in range(6):
        bench.submit([100 + other] * 20, max_new_tokens=2)
        bench.run()
    kept = bench.kv.cache.peek_len(np.array(history, dtype=np.int32), "")
    assert kept == (len(history) - 8 if sessions else 0)
