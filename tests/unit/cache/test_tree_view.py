"""The picture of a radix tree: what is shown, and that nothing is lost from its sums."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.pages import page_keys
from replicas.cache.events import EventLog
from replicas.cache.node import walk
from replicas.cache.radix import RadixCache
from replicas.cache.tree_view import MAX_DEPTH, CacheTree, LeftOut, NodeView, cache_tree, empty_tree
from tests.harness import Clock, ask, fake_engine, finish_all

PS = 4


class Cache:
    """A radix cache with pages that are handed out one after the other."""

    def __init__(self, *, events: bool = False) -> None:
        self.clock = Clock()
        self.radix = RadixCache(PS, events=EventLog() if events else None, clock=self.clock)
        self._next = 1

    def insert(self, *runs: tuple[int, int], salt: str = "") -> None:
        """A sequence of runs of ``length`` pages, each of one ``token``."""
        ids = np.concatenate([np.full(length * PS, token, dtype=np.int32) for token, length in runs])
        pages = np.arange(self._next, self._next + len(ids) // PS, dtype=np.int32)
        self._next += len(pages)
        self.radix.insert(ids, pages, salt)

    def tree(self, *, max_depth: int = 9, max_nodes: int = 400, min_tokens: int = 0) -> CacheTree:
        return self.radix.tree(max_depth=max_depth, max_nodes=max_nodes, min_tokens=min_tokens)


def everything(node: NodeView) -> list[NodeView]:
    return [node, *(below for child in node.children for below in everything(child))]


def forked() -> Cache:
    """8 common pages, then 2 or 5; and 1 page of another salt."""
    cache = Cache()
    cache.insert((1, 8), (2, 2))
    cache.insert((1, 8), (3, 5))
    cache.insert((1, 1), salt="x")
    return cache


def test_sizes_of_nodes_and_subtrees_are_in_tokens_and_the_root_stands_for_all_salts() -> None:
    tree = forked().tree()
    assert (tree.page_size, tree.tokens, tree.nodes, tree.shown) == (PS, 64, 4, 4)
    root = tree.root
    assert (root.tokens, root.subtree_tokens, root.subtree_nodes, root.key, root.left_out) == (0, 64, 4, None, None)
    trunk, other = root.children
    assert (trunk.tokens, trunk.subtree_tokens, trunk.subtree_nodes) == (32, 60, 3)
    assert (other.tokens, other.subtree_tokens, other.subtree_nodes) == (4, 4, 1)
    assert [child.tokens for child in trunk.children] == [20, 8]  # the largest first


def test_what_is_too_small_too_deep_or_too_many_is_left_out_and_counted() -> None:
    cache = forked()
    small = cache.tree(min_tokens=9)
    assert [node.subtree_tokens for node in everything(small.root)] == [64, 60, 20]
    assert small.root.left_out == LeftOut(nodes=1, tokens=4)
    assert small.root.children[0].left_out == LeftOut(nodes=1, tokens=8)
    assert [node.subtree_tokens for node in everything(cache.tree(min_tokens=20).root)] == [64, 60, 20]
    shallow = cache.tree(max_depth=1)
    assert shallow.shown == 2
    assert shallow.root.left_out is None
    assert shallow.root.children[0].left_out == LeftOut(nodes=2, tokens=28)
    assert [node.subtree_tokens for node in everything(cache.tree(max_nodes=2).root)] == [64, 60, 20]


def test_a_node_shows_its_hits_its_lock_and_how_long_it_was_idle() -> None:
    cache = forked()
    cache.clock.now_s = 5.0
    match = cache.radix.match_prefix(np.full(8 * PS, 1, dtype=np.int32), "")
    lock = cache.radix.inc_lock_ref(match.node)
    cache.clock.now_s = 7.0
    trunk = cache.tree().root.children[0]
    assert (trunk.hits, trunk.locked, trunk.idle_s) == (1, True, 2.0)
    assert {(leaf.hits, leaf.locked, leaf.idle_s) for leaf in trunk.children} == {(0, False, 7.0)}
    cache.radix.dec_lock_ref(lock)
    assert not cache.tree().root.children[0].locked


def test_a_node_is_known_by_the_key_of_its_last_page() -> None:
    cache = Cache(events=True)
    cache.insert((1, 3), (2, 2))
    cache.insert((1, 3), (3, 1))
    keys = page_keys(np.repeat(np.array([1, 1, 1, 2, 2], dtype=np.int32), PS), PS, "")
    trunk = cache.tree().root.children[0]
    assert (trunk.key, trunk.children[0].key) == (int(keys[2]), int(keys[4]))


def test_a_chain_deeper_than_what_travels_is_cut() -> None:
    cache = Cache()
    for length in range(1, 200):
        cache.insert((1, length))
    tree = cache.tree(max_depth=10_000)
    assert (tree.nodes, tree.shown) == (199, MAX_DEPTH)
    assert everything(tree.root)[-1].left_out == LeftOut(nodes=199 - MAX_DEPTH, tokens=(199 - MAX_DEPTH) * PS)


def test_of_too_many_siblings_the_youngest_are_looked_at_and_no_sum_is_wrong() -> None:
    cache = forked()
    tree = cache_tree(
        cache.radix._roots.values(), page_size=PS, num_pages=16, num_nodes=4, now_s=0.0, max_depth=9, max_nodes=400,
        min_tokens=0, max_looks=3,
    )  # fmt: skip
    assert (tree.tokens, tree.nodes, tree.shown) == (64, 4, 3)
    (trunk, _) = tree.root.children
    assert [child.tokens for child in trunk.children] == [20]  # the second, which happens to be the larger
    assert trunk.left_out == LeftOut(nodes=1, tokens=8)


def test_a_cache_that_keeps_nothing_is_an_empty_tree() -> None:
    engine, _ = fake_engine(prefix_cache="chunk")
    engine.submit(ask("a", range(9)))
    finish_all(engine)
    assert engine.cache_tree() == empty_tree(4)
    assert (empty_tree(4).shown, empty_tree(4).root.children) == (0, ())


def test_an_engine_shows_what_its_requests_left_behind() -> None:
    engine, _ = fake_engine()
    engine.submit(ask("a", range(16), max_new_tokens=1))
    finish_all(engine)
    tree = engine.cache_tree(max_depth=2, min_tokens=1)
    assert (tree.tokens, tree.root.children[0].tokens) == (16, 16)


SEQUENCE = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3)), min_size=1, max_size=6)


@settings(max_examples=80, deadline=None)
@given(st.lists(SEQUENCE, max_size=12), st.integers(1, 6), st.integers(0, 12), st.integers(0, 40))
def test_shown_and_left_out_add_up_at_every_node(
    sequences: list[list[tuple[int, int]]], max_depth: int, max_nodes: int, min_tokens: int
) -> None:
    cache = Cache()
    for number, runs in enumerate(sequences):
        cache.insert(*runs, salt="x" if number % 3 == 0 else "")
    tree = cache.tree(max_depth=max_depth, max_nodes=max_nodes, min_tokens=min_tokens)
    nodes = list(walk(cache.radix._roots.values()))
    assert (tree.nodes, tree.root.subtree_nodes) == (len(nodes),) * 2
    assert tree.tokens == tree.root.subtree_tokens == sum(len(node.key) for node in nodes)
    shown = everything(tree.root)
    assert len(shown) - 1 == tree.shown <= max_nodes
    for node in shown:
        rest = node.left_out or LeftOut(nodes=0, tokens=0)
        below = sum(child.subtree_tokens for child in node.children) + rest.tokens
        assert node.tokens + below == node.subtree_tokens
        own = 0 if node is tree.root else 1
        assert own + sum(child.subtree_nodes for child in node.children) + rest.nodes == node.subtree_nodes
        sizes = [child.subtree_tokens for child in node.children]
        assert sizes == sorted(sizes, reverse=True)
        assert all(size >= min_tokens for size in sizes)


def test_times_go_back_no_further_than_the_clock() -> None:
    cache = forked()
    cache.clock.now_s = -1.0
    assert cache.tree().root.children[0].idle_s == pytest.approx(0.0)
