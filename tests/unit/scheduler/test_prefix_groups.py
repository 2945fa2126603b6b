"""Which requests of a batch read their prefix together."""

import numpy as np
import pytest

from replicas.cache.radix import RadixCache
from replicas.scheduler.decode import find_groups
from replicas.scheduler.plan import DecodePlan, ExtendPlan
from tests.harness import Bench

PAGE = 4


def groups(sequences: list[list[int]], *, min_len: int = 8) -> list[tuple[list[int], int]]:
    """(members, length) among requests that have locked these token sequences, which come one after the other."""
    cache, locks, next_page = RadixCache(PAGE), [], 1
    for sequence in sequences:
        ids = np.array(sequence, dtype=np.int32)
        pages = np.arange(next_page, next_page + len(ids) // PAGE, dtype=np.int32)
        next_page += len(pages)
        cache.insert(ids, pages, "")
        locks.append(cache.inc_lock_ref(cache.match_prefix(ids, "").node))
    return [(group.members.tolist(), group.length) for group in find_groups([lock.node for lock in locks], min_len)]


def run(token: int, length: int) -> list[int]:
    return [token] * length


def test_requests_with_one_prefix_are_a_group_and_others_are_in_none() -> None:
    system = run(1, 16)
    assert groups([system + run(2, 4), run(3, 20), system + run(4, 8), system]) == [([0, 2, 3], 16)]


def test_a_prefix_shorter_than_what_pays_makes_no_group() -> None:
    assert groups([run(1, 4) + run(2, 8), run(1, 4) + run(3, 8)]) == []


def test_a_longer_prefix_of_few_wins_over_a_short_one_of_all() -> None:
    """Two documents of 40 under a system prompt of 8, three readers each: 2 x 2 x 48 tokens saved against 5 x 8. Two
    more readers of the system prompt alone have that in common."""
    system = run(9, 8)
    readers = [system + run(1 + i % 2, 40) + run(3 + i, 4) for i in range(6)] + [system + run(20, 4), system]
    assert sorted(groups(readers)) == [([0, 2, 4], 48), ([1, 3, 5], 48), ([6, 7], 8)]


def test_a_long_prefix_of_all_wins_over_a_little_more_of_some() -> None:
    """Pairs of 44 under a prefix of 40 that six share: 5 x 40 tokens saved against 3 x 44."""
    assert groups([run(9, 40) + run(1 + i % 3, 4) for i in range(6)]) == [([0, 1, 2, 3, 4, 5], 40)]


def decode_groups(bench: Bench) -> list[tuple[list[int], int]]:
    plan = bench.step()
    assert isinstance(plan, DecodePlan | ExtendPlan)
    return [(group.members.tolist(), group.length) for group in plan.prefix_groups]


def started(*, cascade: bool = True) -> Bench:
    """Two requests with 256 tokens in common, a third without, all running; 40 tokens each to write."""
    bench = Bench(num_pages=256, context_len=400, chunked_prefill_size=512, cascade=cascade)
    for prompt in ([*run(1, 256), 2, 3], run(4, 260), [*run(1, 256), 5, 6]):
        bench.submit(prompt, max_new_tokens=40)
        bench.step()
    return bench


def test_a_decode_plan_says_which_requests_read_a_prefix_together() -> None:
    bench = started()
    assert decode_groups(bench) == [([0, 2], 256)]
    bench.scheduler.queues.running.reverse()
    assert decode_groups(bench) == [([0, 2], 256)]


def test_a_mixed_step_counts_members_from_its_first_row() -> None:
    bench = started()
    bench.submit(run(7, 20))
    plan = bench.step()
    assert isinstance(plan, ExtendPlan)
    assert plan.num_decode == 3
    assert [(group.members.tolist(), group.length) for group in plan.prefix_groups] == [([1, 3], 256)]


def test_a_request_that_joins_or_leaves_changes_the_groups() -> None:
    bench = started()
    assert decode_groups(bench) == [([0, 2], 256)]
    joined = bench.submit([*run(1, 256), 7, 8], max_new_tokens=3)
    bench.step()
    assert decode_groups(bench) == [([0, 2, 3], 256)]
    while joined.finish is None:
        bench.step()
    assert decode_groups(bench) == [([0, 2], 256)]


def test_with_cascade_off_no_plan_has_groups() -> None:
    assert decode_groups(started(cascade=False)) == []


def test_a_group_that_saves_less_reading_than_the_device_asks_for_is_none() -> None:
    """Two requests with 256 tokens in common save 256 a step; 512 are wanted, which a third one brings."""
    bench = Bench(num_pages=400, context_len=400, chunked_prefill_size=512, cascade_saves=512)
    for end in (2, 3):
        bench.submit([*run(1, 256), end, 9], max_new_tokens=40)
        bench.step()
    assert decode_groups(bench) == []
    bench.submit([*run(1, 256), 4, 9], max_new_tokens=40)
    bench.step()
    assert decode_groups(bench) == [([0, 1, 2], 256)]


@pytest.mark.parametrize("cascade", [True, False])
def test_prompts_over_one_cached_prefix_are_a_group_of_their_step(cascade: bool) -> None:
    """Beside a running request with that prefix, which is in no group with them, and a prompt of its own."""
    bench = Bench(num_pages=256, context_len=400, chunked_prefill_size=512, cascade=cascade, policy="lpm")
    bench.submit([*run(1, 256), 2, 3], max_new_tokens=40)
    bench.step()
    for prompt in ([*run(1, 256), 4, 5], run(6, 20), [*run(1, 256), 7, 8]):
        bench.submit(prompt)
    plan = bench.step()
    assert isinstance(plan, ExtendPlan)
    assert [row.prefix_len for row in plan.rows] == [256, 256, 0, 258]  # the longest cached prefix goes first
    assert plan.prefix_groups == ()
    found = [(group.members.tolist(), group.length) for group in plan.prompt_groups]
    assert found == ([([0, 1], 256)] if cascade else [])
