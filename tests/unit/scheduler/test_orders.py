"""Orders of the waiting queue: SPEC F03, and the one by objectives."""

import math
from collections import Counter
from dataclasses import dataclass, replace
from itertools import combinations
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replicas.request import Req, ReqState
from replicas.scheduler.orders import ORDERS, QueueEntry, in_time, passed_tokens, shortest_first, sort_keys
from replicas.scheduler.precedence import StepTimes, bound_len
from replicas.scheduler.rounds import begins_at_once
from tests.harness import Bench

A, B = list(range(100, 116)), list(range(200, 208))  # prefixes of four pages, of two


def waiting(policy: str, **settings: object) -> tuple[Bench, dict[str, Req]]:
    """A cache that holds A and B; a request that runs with key "k"; four that wait, in this order."""
    bench = Bench(page_size=4, max_running=1, num_pages=64, chunked_prefill_size=64, policy=policy, **settings)
    for prefix in (A, B):
        bench.submit([*prefix, 1], max_new_tokens=1)
        bench.run()
    bench.submit([1, 2, 3], max_new_tokens=20, routing_key="k")
    bench.step()
    reqs = {
        "long": bench.submit([*range(300, 340)], max_new_tokens=3, routing_key="other"),
        "b": bench.submit([*B, 9], max_new_tokens=9),
        "a": bench.submit([*A, 7, 7, 7], max_new_tokens=5, routing_key="k"),
        "b2": bench.submit([*B, 5, 5], max_new_tokens=2),
    }
    return bench, reqs


def names(bench: Bench, reqs: dict[str, Req], *, after_s: float = 1.0) -> list[str]:
    queues = bench.scheduler.queues
    order = queues.waiting.ordered(bench.clock() + after_s, queues.running)
    of = {req: name for name, req in reqs.items()}
    assert Counter(of[req] for req in order) == Counter(reqs.keys())
    return [of[req] for req in order]


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("fcfs", ["long", "b", "a", "b2"]),
        ("lpm", ["a", "b", "b2", "long"]),  # 16 tokens cached, 8, 8, 0
        ("dfs-weight", ["b", "b2", "a", "long"]),  # two wait for B, one for A
        ("hrrn", ["b", "b2", "a", "long"]),  # 1, 2, 3 and 40 tokens to compute, all waited equally long
        ("lof", ["b", "a", "long", "b2"]),  # 9, 5, 3, 2 tokens of output
        ("routing-key", ["a", "long", "b", "b2"]),  # the one that runs has the key of a
    ],
)
def test_each_policy_has_its_order(policy: str, order: list[str]) -> None:
    bench, reqs = waiting(policy)
    assert names(bench, reqs) == order
    bench.run()


def test_a_random_order_is_another_one_at_each_look_and_every_one_comes_first() -> None:
    bench, reqs = waiting("random")
    looks = [tuple(names(bench, reqs)) for _ in range(64)]
    assert len(set(looks)) > 12  # of 24
    assert {look[0] for look in looks} == set(reqs)
    bench.run()


def test_a_long_prompt_passes_short_ones_once_it_has_waited_long_enough_for_its_length() -> None:
    """hrrn: 40 tokens that waited 41 s go before 1 token that waited 1 s, with ageing out of the way."""
    bench, reqs = waiting("hrrn", ageing_s=1e9)
    bench.clock.now_s += 40.0
    reqs["late"] = bench.submit([*B, 8], max_new_tokens=2)
    assert names(bench, reqs) == ["b", "b2", "a", "long", "late"]
    bench.run()


@pytest.mark.parametrize(
    ("late_s", "waited_s", "first"), [(0.8, 0.0, "short"), (0.9, 0.0, "long"), (0.9, 0.1, "short")]
)
def test_a_short_prompt_passes_one_that_waits_longer_if_it_has_waited_more_for_its_length(
    late_s: float, waited_s: float, first: str
) -> None:
    """hrrn: after 1 s 20 tokens have waited 50 ms each; 3 tokens that came at 0.8 s 67 ms, at 0.9 s 33 ms, unless they
    waited at another replica."""
    bench = Bench(page_size=4, max_running=1, chunked_prefill_size=64, policy="hrrn", ageing_s=1e9)
    bench.submit([1, 2, 3], max_new_tokens=20)
    bench.step()
    reqs = {"long": bench.submit(range(300, 320), max_new_tokens=3)}
    bench.clock.now_s += late_s
    reqs["short"] = bench.submit([7, 8, 9], max_new_tokens=2, waited_s=waited_s)
    assert names(bench, reqs, after_s=1.0 - late_s)[0] == first
    bench.run()


@pytest.mark.parametrize("policy", ORDERS)
def test_what_has_aged_goes_first_in_order_of_arrival_under_every_policy(policy: str) -> None:
    bench, reqs = waiting(policy, ageing_s=5.0)
    assert names(bench, reqs, after_s=6.0) == ["long", "b", "a", "b2"]
    bench.run()


@pytest.mark.parametrize("policy", ORDERS)
def test_priority_goes_before_every_policy(policy: str) -> None:
    bench, reqs = waiting(policy, priorities="on")
    reqs["urgent"] = bench.submit([*range(400, 420)], max_new_tokens=4, priority=1)
    assert names(bench, reqs)[0] == "urgent"
    bench.run()


@pytest.mark.parametrize("policy", ["lpm", "dfs-weight", "hrrn"])
def test_a_long_queue_is_not_looked_up(policy: str) -> None:
    bench, reqs = waiting(policy, lpm_max_queue=3)
    assert names(bench, reqs) == ["long", "b", "a", "b2"]
    bench.run()


def entry(uncached_len: int, left_s: float, *, left_len: float = float("inf"), begun: bool = False) -> QueueEntry:
    """A prompt that is computed at 10 tokens a second."""
    return QueueEntry(
        waited_s=0.0, output_len=1, uncached_len=uncached_len, left_s=left_s, needed_s=uncached_len / 10,
        left_len=left_len, begun=begun,
    )  # fmt: skip


def on_time(*waiting: QueueEntry) -> list[int]:
    keys = sort_keys("on_time", waiting, [], Random(0))
    return sorted(range(len(keys)), key=lambda at: (keys[at], at))


def test_the_shortest_goes_first_as_long_as_it_makes_none_late_that_it_passes() -> None:
    """3 s by 4 s, 2 s by 9 s, 1 s by 9 s: 1 s may go before the 3 s, 2 s more may not."""
    assert on_time(entry(30, 4.0), entry(20, 9.0), entry(10, 9.0)) == [2, 0, 1]
    assert on_time(entry(30, 3.5), entry(20, 9.0), entry(10, 9.0)) == [0, 2, 1]


def test_what_can_be_in_time_goes_first_and_what_is_late_after_it_by_its_bound() -> None:
    late = [entry(10, -1.0, left_len=900), entry(10, -9.0, left_len=800), entry(60, 5.0, left_len=950)]  # needs 6 s
    assert on_time(*late, entry(20, 4.0), entry(10, 3.0)) == [4, 3, 1, 0, 2]


def test_of_those_that_cannot_all_be_in_time_the_longest_waits() -> None:
    """4, 1 and 1 s by 5 s: without the first both others are in time, with it only one is."""
    assert on_time(entry(40, 5.0), entry(10, 5.0), entry(10, 5.0)) == [1, 2, 0]


def test_nothing_passes_a_request_whose_bound_leaves_it_no_tokens() -> None:
    late, small, large = entry(50, -1.0, left_len=70), entry(20, 5.0), entry(21, 5.0)
    assert on_time(late, small) == [1, 0]  # 20 of the 70 go before its 50
    assert on_time(late, large) == [0, 1]
    assert on_time(late, small, entry(1, 6.0)) == [2, 0, 1]  # 1 of the 20 goes: 19 are left to others
    assert (passed_tokens([late]), passed_tokens([late, small])) == (50, 0)


def test_a_request_that_was_retracted_goes_first() -> None:
    assert on_time(entry(1, 0.5), entry(30, -9.0, begun=True), entry(1, -1.0, left_len=5)) == [1, 0, 2]


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 60)), max_size=7))
def test_no_larger_set_of_requests_could_be_in_time(jobs: list[tuple[int, int]]) -> None:
    waiting = [entry(10 * length, left) for length, left in jobs]  # whole seconds: exact sums

    def all_in_time(chosen: tuple[QueueEntry, ...]) -> bool:
        by_deadline = sorted(chosen, key=lambda each: each.left_s)
        through = [sum(each.needed_s for each in by_deadline[: at + 1]) for at in range(len(by_deadline))]
        return all(end_s <= each.left_s + 1e-9 for end_s, each in zip(through, by_deadline, strict=True))

    found = in_time(waiting)
    assert all_in_time(tuple(waiting[at] for at in found))
    assert not any(all_in_time(chosen) for chosen in combinations(waiting, len(found) + 1))
    now_s = 0.0
    for at in shortest_first(waiting, found):
        now_s += waiting[at].needed_s
        assert now_s <= waiting[at].left_s + 1e-9


@dataclass(eq=False)
class Job:
    length: int
    objective: int
    came: int
    bound: float


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 40), st.integers(0, 60)), min_size=1, max_size=25),
    st.sampled_from([1.0, 1.3, 2.0, 4.0]),
)
def test_no_first_token_is_later_than_its_bound_whatever_else_comes(
    arrivals: list[tuple[int, int, int]], factor: float
) -> None:
    """A token a second: a prompt that arrives behind w tokens has its first after factor x (w + its own), at most."""
    coming, jobs, now, order = [], [], 0, []
    for after, length, objective in arrivals:
        now += after
        coming.append((now, length, objective))
    now = 0
    while coming or jobs:
        if not jobs:
            now = max(now, coming[0][0])
        while coming and coming[0][0] <= now:  # what came while a prompt ran finds its rest in front of it too
            came, length, objective = coming.pop(0)
            ahead = now - came + sum(job.length for job in jobs)
            jobs.append(Job(length, objective, came, came + factor * (ahead + length)))
        waiting = [
            QueueEntry(
                waited_s=now - job.came, output_len=1, uncached_len=job.length, left_s=job.came + job.objective - now,
                needed_s=job.length, left_len=job.bound - now,
            )
            for job in jobs
        ]  # fmt: skip
        keys = sort_keys("on_time", waiting, [], Random(0))
        job = jobs.pop(min(range(len(keys)), key=lambda at: (keys[at], at)))
        now += job.length
        order.append(job)
        assert now <= job.bound + 1e-6, f"{job} ended at {now}"
    if factor == 1.0:
        assert order == sorted(order, key=lambda job: job.came)


def busy(**more: object) -> Bench:
    """One request runs; a prompt token takes 10 ms."""
    bench = Bench(page_size=4, max_running=1, num_pages=64, chunked_prefill_size=64, policy="on_time", **more)
    bench.submit([1, 2, 3], max_new_tokens=20)
    bench.step()
    bench.scheduler.queues.waiting.step_times = StepTimes(s_per_token=0.01)
    return bench


def test_the_engines_queue_puts_those_first_that_can_be_in_time_and_says_what_they_pass() -> None:
    bench = busy(late_factor=1e9)
    reqs = {
        "late": bench.submit(range(300, 340), objective_s=0.3),  # 40 tokens take 0.4 s
        "later": bench.submit(range(400, 410), objective_s=9.0),
        "soon": bench.submit(range(500, 510), objective_s=1.0),
        "never": bench.submit(range(600, 602)),
    }
    assert names(bench, reqs, after_s=0.5) == ["never", "soon", "later", "late"]
    assert bench.scheduler.queues.waiting.late_len == 40
    assert names(bench, reqs, after_s=0.95) == ["never", "later", "late", "soon"]  # 0.05 s are left for 0.1 s of work
    bench.run()
    assert bench.scheduler.queues.waiting.late_len == 0


@pytest.mark.parametrize(("objective_s", "passed"), [(0.3, 40), (9.0, 0)])
def test_one_that_waits_alone_is_passed_only_if_it_is_late(objective_s: float, passed: int) -> None:
    bench = busy(late_factor=1e9)
    alone = bench.submit(range(300, 340), objective_s=objective_s)  # 40 tokens take 0.4 s
    assert names(bench, {"alone": alone}, after_s=0.0) == ["alone"]
    assert bench.scheduler.queues.waiting.late_len == passed
    bench.run()


def test_a_late_request_starts_when_its_bound_is_reached_whatever_comes() -> None:
    """In order of arrival it is through after its 40 tokens. Three objectives are 90: others may have 50 before it, in
    prompts of 10."""
    bench = busy(late_factor=2.0)
    late = bench.submit(range(300, 340), max_new_tokens=1, objective_s=0.3)
    bound, queue = late.rank.bound, bench.scheduler.queues.waiting
    assert bound.at_len == bench.scheduler.counters["prefill_tokens"] + 90
    queue.remove(late)
    queue.add(late)  # as what was retracted
    assert late.rank.bound == bound
    late.rank.bound = replace(bound, at_begun=math.inf)
    assert num_before(bench, late) == 5
    bench.run()


def test_no_more_than_twice_as_many_requests_begin_before_one_where_places_are_short() -> None:
    """However few tokens they have to compute: by tokens alone 40 of them could."""
    bench = busy(late_factor=2.0)
    bench.submit([1, 2, 3, 4], max_new_tokens=1, objective_s=60.0)
    late = bench.submit(range(300, 340), max_new_tokens=1, objective_s=0.3)
    assert late.rank.bound.at_begun == 2 * 2
    assert num_before(bench, late, prompt_len=1) == 3  # and the one that was there
    bench.run()


def num_before(bench: Bench, late: Req, *, prompt_len: int = 10) -> int:
    """How many requests that come one at a time, and can be in time, begin before ``late``."""
    for at in range(40):
        bench.submit(range(1000 + 20 * at, 1000 + 20 * at + prompt_len), max_new_tokens=1, objective_s=60.0)
        while len(bench.scheduler.queues.waiting) > 1:
            bench.step()
        if late.state is ReqState.FINISHED:
            return at
    raise AssertionError("it never began")


def test_a_long_queue_is_ordered_by_what_was_cached_when_each_came() -> None:
    bench = busy(lpm_max_queue=2)
    for prefix in (A,):
        bench.submit([*prefix, 1], max_new_tokens=1)
        bench.run()
    bench.submit([1, 2, 3], max_new_tokens=20)
    bench.step()
    reqs = {
        "known": bench.submit([*A, 7], objective_s=0.1),  # 1 token to compute
        "new": bench.submit(range(300, 317), objective_s=0.1),  # 17
        "third": bench.submit(range(400, 401), objective_s=0.09),
    }
    queue = bench.scheduler.queues.waiting
    queue._rules = replace(queue._rules, peek_len=lambda ids, salt: pytest.fail("it was looked up"))
    assert names(bench, reqs, after_s=0.0) == ["third", "known", "new"]
    assert [req.rank.bound.own_len for req in reqs.values()] == [1, 17, 1]


def test_what_is_left_of_a_prompt_that_has_begun_counts_as_work_before_a_request() -> None:
    bench = Bench(page_size=4, num_pages=64, chunked_prefill_size=16, policy="on_time", late_factor=2.0)
    bench.submit(range(300, 340))
    bench.step()
    bench.step()  # 16 of its 40 tokens are computed, 16 more under way are told after this one
    left = bench.scheduler.queues.chunked
    assert left is not None
    req = bench.submit(range(400, 410))
    assert req.rank.bound.at_len == bench.scheduler.counters["prefill_tokens"] + 2 * (left.extend_len + 10)
    bench.run()


def test_a_bound_crosses_priorities_once_it_has_waited_five_seconds_for_each_point() -> None:
    bench = busy(late_factor=2.0, priorities="on")
    reqs = {"low": bench.submit(range(300, 310), objective_s=0.01)}
    reqs["high"] = bench.submit(range(400, 410), priority=9)
    assert names(bench, reqs, after_s=1.0) == ["high", "low"]
    bench.scheduler.counters["prefill_tokens"] += 1  # fewer are left than its own 10 until it must be through
    assert names(bench, reqs, after_s=44.0) == ["high", "low"]
    assert names(bench, reqs, after_s=46.0) == ["low", "high"]
    bench.run()


@pytest.mark.parametrize(
    ("ahead", "own", "objective", "most"),
    [
        (0, 10, 100, 300),  # it may be three objectives late
        (100, 290, 100, 415),  # later than that in order of arrival: a quarter of one more
        (500, 10, 100, 735),  # a queue of five: two of it are counted twice
        (500, 10, math.inf, 1020),  # no step was timed, or it has no objective
    ],
)
def test_a_bound_counts_from_order_of_arrival(ahead: int, own: int, objective: float, most: float) -> None:
    assert bound_len(ahead, own, objective, 2.0) == most


@pytest.mark.parametrize(
    ("long", "short", "first"),
    [
        ({"objective_s": 0.3}, {"objective_s": 1.0}, True),
        ({"objective_s": 9.0}, {"objective_s": 1.0}, False),  # both can be in time
        ({"objective_s": 0.3}, {"objective_s": 0.05}, False),  # neither can
        ({"objective_s": 0.3, "priority": 1}, {"objective_s": 1.0}, False),
        ({"objective_s": 0.03}, {"objective_s": 1.0}, False),  # its bound leaves no room
        ({"objective_s": 0.3}, {"objective_s": 1.0, "max_new_tokens": 100}, False),  # the pool may not carry both
    ],
)
def test_a_prompt_that_is_late_gives_way_between_two_chunks_to_one_that_can_be_in_time(
    long: dict[str, Any], short: dict[str, Any], first: bool
) -> None:
    """What is computed of it stays: no token is computed twice, and none counts as lost."""
    bench = Bench(page_size=4, num_pages=28, chunked_prefill_size=16, policy="on_time", priorities="on")
    bench.scheduler.queues.waiting.step_times = StepTimes(s_per_token=0.01)
    late = bench.submit(range(300, 380), max_new_tokens=1, **long)
    bench.step()
    quick = bench.submit(range(400, 410), **{"max_new_tokens": 1, **short})
    while not late.num_output and not quick.num_output:
        bench.step()
    assert (quick.num_output > 0) is first
    bench.run()
    assert bench.scheduler.counters["prefill_tokens"] == 90
    assert bench.scheduler.counters["retracted_tokens"] == 0


def test_a_late_prompt_keeps_its_step_where_it_goes_first_anyway_or_the_other_could_not_begin() -> None:
    """After its first token, once its bound is reached; and beside one that lacks its mask, or has another adapter."""
    bench = Bench(page_size=4, num_pages=64, chunked_prefill_size=16, policy="on_time")
    queues, kv, now_s = bench.scheduler.queues, bench.scheduler.kv, bench.scheduler.clock()
    waiting, counters = queues.waiting, bench.scheduler.counters
    waiting.step_times = StepTimes(s_per_token=0.01)
    late = bench.submit(range(300, 380), max_new_tokens=1, objective_s=0.3)
    bench.step()
    quick = bench.submit(range(400, 410), max_new_tokens=1, objective_s=1.0)
    assert (queues.chunked, waiting.in_time_before(late, now_s)) == (late, [quick])
    late.prompt_len -= 1  # as if its last token were one of its answer, whose pages it lost
    assert waiting.in_time_before(late, now_s) == []
    late.prompt_len += 1
    counters["begun_where_short"] += 1_000
    assert waiting.in_time_before(late, now_s) == []
    counters["begun_where_short"] -= 1_000
    assert begins_at_once(quick, queues, kv, now_s)
    quick.guide = SimpleNamespace(due_s=1.0)
    assert not begins_at_once(quick, queues, kv, now_s)
    quick.guide, quick.asked = None, replace(quick.asked, adapter=SimpleNamespace(identity="another"))
    assert not begins_at_once(quick, queues, kv, now_s)
