"""Orders of the waiting queue: SPEC F03."""

from collections import Counter

import pytest

from replicas.request import Req
from replicas.scheduler.orders import ORDERS
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


@pytest.mark.parametrize(("late_s", "first"), [(0.8, "short"), (0.9, "long")])
def test_a_short_prompt_passes_one_that_waits_longer_if_it_has_waited_more_for_its_length(
    late_s: float, first: str
) -> None:
    """hrrn: after 1 s 20 tokens have waited 50 ms each; 3 tokens that came at 0.8 s 67 ms, at 0.9 s 33 ms."""
    bench = Bench(page_size=4, max_running=1, chunked_prefill_size=64, policy="hrrn", ageing_s=1e9)
    bench.submit([1, 2, 3], max_new_tokens=20)
    bench.step()
    reqs = {"long": bench.submit(range(300, 320), max_new_tokens=3)}
    bench.clock.now_s += late_s
    reqs["short"] = bench.submit([7, 8, 9], max_new_tokens=2)
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


@pytest.mark.parametrize("policy", ["dfs-weight", "hrrn"])
def test_a_long_queue_is_not_looked_up(policy: str) -> None:
    bench, reqs = waiting(policy, lpm_max_queue=3)
    assert names(bench, reqs) == ["long", "b", "a", "b2"]
    bench.run()
