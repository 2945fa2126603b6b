"""What is found again of texts whose layers do not all see everything: the bars of this, without a model."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from replicas.cache import parts
from replicas.cache.ends import End, Worth
from replicas.memory.sizing import PoolSize
from tests.reuse import BLOCK, LOADS, TRACE, Texts, chats, full, states, trace, windows

SIZES = {"windows": windows(50_000), "states": states(136_000)}  # room for 48 snapshots beside 64,000 tokens
both = pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)


@both
def test_a_shared_beginning_of_48_tokens_is_found_by_the_third_that_has_it(size: PoolSize) -> None:
    """The second finds K and V there and no state, and keeps one."""
    texts = Texts(size)
    start = texts.new(48)
    found = [texts.ask(np.concatenate([start, texts.new(600)]), 50)[1] for _ in range(4)]
    assert found == [0, 48 if size.windows else 0, 48, 48]
    texts.kv.check([])


@both
@pytest.mark.parametrize("chunk", [512, 8192])
def test_chains_that_are_forked_and_asked_again_are_found_the_first_fork_too(size: PoolSize, chunk: int) -> None:
    """Three of 4,096 tokens, forked at 1,024."""
    texts = Texts(size, chunk=chunk)
    chains = [texts.new(4096) for _ in range(3)]
    forks = [np.concatenate([chain[:1024], texts.new(3072)]) for chain in chains]
    others = [np.concatenate([chain[:1500], texts.new(2596)]) for chain in chains]
    for chain in chains:
        texts.ask(chain, 16)
    assert [texts.ask(fork, 16)[1] for fork in forks] == [1024] * 3
    assert all(texts.ask(each, 16)[1] >= 750 for each in others)  # of 1,500
    for asked in (chains, forks, others, chains):
        assert [texts.ask(each, 16)[1] for each in asked] == [4080] * 3
    texts.kv.check([])


@pytest.mark.parametrize("size", [windows(51_200), states(96_000)], ids=["windows", "states"])
def test_sessions_outlast_a_prompt_15_times_as_long(size: PoolSize) -> None:
    """Six, for all of which and the prompt there are pages; of window parts and of states there are fewer."""
    texts = Texts(size)
    sessions = [texts.new(2048) for _ in range(6)]
    for _ in range(3):
        sessions = [texts.ask(np.concatenate([session, texts.new(20)]), 100)[0] for session in sessions]
    texts.ask(texts.new(15 * 2048), 100)
    for session in sessions:
        assert texts.ask(np.concatenate([session, texts.new(20)]), 100)[1] >= 0.99 * len(session)
    texts.kv.check([])


def test_the_snapshot_that_saves_least_for_its_pages_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two texts of one kind and age the longer one stays."""
    monkeypatch.setattr(parts, "LUCK", 1.0)
    texts = Texts(states(30_000))
    store, snapshots = texts.kv.store, texts.kv.store.parts
    assert store.radix is not None
    assert isinstance(snapshots, parts.SnapshotAllocator)
    asked = [texts.ask(texts.new(num_tokens), 50)[0] for num_tokens in (6000, 300)]
    found = list[tuple[int, ...]]()
    for num_free in range(store.allocator.num_free, store.num_pages + 1, 8):
        store.make_room(num_free, "a test")
        matches = [store.radix.match_prefix(ids, "", count_hit=False) for ids in asked]
        reach = tuple(snapshots.reach(match.pages) for match in matches)
        found += [reach] if reach not in found else []
        texts.kv.check([])
    longest = tuple(len(ids) // 16 for ids in asked)
    assert found[0] == longest
    assert (longest[0] - 4, 0) in found  # the four pages of its answer save less than the short one
    assert found[-1] == (0, 0)


def test_who_would_have_gone_on_behind_a_snapshot_that_goes_does_so_behind_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a text of 3,000 tokens and an answer of 50."""
    monkeypatch.setattr(parts, "LUCK", 1.0)
    texts = Texts(states(30_000))
    store, snapshots = texts.kv.store, texts.kv.store.parts
    assert store.radix is not None
    assert isinstance(snapshots, parts.SnapshotAllocator)
    ids, _ = texts.ask(texts.new(3000), 50)
    pages = store.radix.match_prefix(ids, "", count_hit=False).pages
    prompt, answer = (int(page) for page in pages[snapshots.has(pages)][-2:])
    before = snapshots.worth()
    assert before[prompt] < before[answer]
    while snapshots.has(np.array([answer])):
        store.make_room(store.allocator.num_free + 1, "a test")
    assert snapshots.worth()[prompt] == before[answer]
    texts.kv.check([])


def test_chats_by_chance_in_two_thirds_of_their_room_find_85_hundredths_of_what_full_attention_finds() -> None:
    load, (_, _, num_tokens, _) = LOADS["chats"]
    assert load(states(num_tokens), False) >= 0.85 * load(full(num_tokens), False)


def test_64_chats_with_states_for_half_of_their_ends_find_most_where_lru_loses_half(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    size = replace(states(296_000), num_snapshots=64)  # as if each were kept apart
    assert chats(size, num=64, turns=12, in_turn=False) >= 0.80
    monkeypatch.setattr(Worth, "of", lambda self, kinds, ages: 1 / (1 + ages))
    monkeypatch.setattr(parts, "LUCK", 1.0)
    assert chats(size, num=64, turns=12, in_turn=False) <= 0.55


def test_fifty_conversations_in_turn_on_a_quarter_of_their_room_do_not_all_lose() -> None:
    """LRU loses each one right before it comes."""
    load, (num_tokens,) = LOADS["fifty"]
    assert load(full(num_tokens), True) < 0.05
    assert load(windows(num_tokens), True) > 0.5
    assert load(states(num_tokens), True) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "least"), [(windows, 1.0), (states, 0.8)])
def test_agents_find_four_fifths_of_what_full_attention_finds_in_the_same_bytes(
    kind: Callable[[int], PoolSize], least: float
) -> None:
    load, (_, num_tokens, _) = LOADS["agents"]
    assert load(kind(num_tokens), False) >= least * load(full(num_tokens), False)


@pytest.mark.slow
@pytest.mark.skipif(not TRACE.exists(), reason="the trace is not part of the repository")
@pytest.mark.parametrize(("kind", "least"), [(windows, 1.0), (states, 0.8)])
def test_the_public_trace_finds_four_fifths_of_what_full_attention_finds_in_the_same_bytes(
    kind: Callable[[int, int], PoolSize], least: float
) -> None:
    assert trace(kind(8_000_000, BLOCK)) >= least * trace(full(8_000_000, BLOCK))


def test_what_comes_in_turn_is_worth_most_right_before_it_comes_and_nothing_later() -> None:
    worth = Worth(1000)
    for _ in range(100):
        worth.gone_on(End.ANSWER, 50, num_parts=1)
    worth.evicted(np.full(20, End.ANSWER, dtype=np.int8), np.arange(20))  # too early: they say nothing of later ages
    found = worth.of(np.full(6, End.ANSWER, dtype=np.int8), np.array([0, 20, 40, 50, 80, 200]))
    assert (np.diff(found) > 0).tolist() == [True, True, True, False, False]
