"""Tenants in the simulator: what is fair by hand, and the production scheduler under one that floods it."""

import math

import pytest

from benchmarks.harness import percentile
from benchmarks.sim_tenants import HEAVY, fair, fairness, jain, load, run, served


def test_what_is_fair_by_hand() -> None:
    assert jain([1, 1, 1]) == 1
    assert jain([3, 0, 0]) == pytest.approx(1 / 3)
    assert fair({"a": 10, "b": 100, "c": 200}, 110) == {"a": 10, "b": 50, "c": 50}
    assert fair({"a": 10, "b": 20}, 30) == {"a": 10, "b": 20}


def test_one_that_floods_a_replica_costs_the_others_a_step_or_two_and_without_names_all_their_time() -> None:
    seconds, light = 40.0, dict[bool, float]()
    requests = load("short prompts", seconds, seed=0)
    index, tokens = dict[bool, float](), dict[bool, int]()
    for named in (False, True):
        records = run(requests, named=named, queue="lpm", seed=0)
        light[named] = percentile([each.ttft_s for each in records if requests[each.number].tenant != HEAVY], 95)
        index[named] = fairness(served(requests, records, seconds), served(requests, records, math.inf))
        ended = [requests[each.number] for each in records if each.ended_s <= seconds]
        tokens[named] = sum(each.input_len + each.output_len for each in ended)
    assert light[False] > 20
    assert light[True] < 1
    assert index[False] < 0.2
    assert index[True] > 0.95
    assert tokens[True] >= 0.95 * tokens[False]


def test_short_prompts_wait_little_longer_beside_one_that_floods_the_replica_than_alone() -> None:
    """At p95; 1.52 times as long where its steps are as long as any, and all its requests run on in those of others."""
    requests, p95_s = load("short prompts", 60.0, seed=0), list[float]()
    for among in (requests, [each for each in requests if each.tenant != HEAVY]):
        records = run(among, named=True, queue="lpm", seed=0)
        p95_s.append(percentile([each.ttft_s for each in records if among[each.number].tenant != HEAVY], 95))
    assert p95_s[0] <= 1.4 * p95_s[1]


def test_chats_keep_their_histories_beside_one_that_floods_the_pool() -> None:
    """Of their prompts 0.61 is cached under LRU alone."""
    requests = load("chats", 150.0, seed=0)
    chats = [each for each in run(requests, named=True, queue="lpm", seed=0) if requests[each.number].tenant != HEAVY]
    input_len = sum(requests[each.number].input_len for each in chats)
    assert sum(each.cached_tokens for each in chats) >= 0.7 * input_len
