"""Lines of batches in the scheduler: the lowest class. They give way to every other request, and lose nothing."""

from random import Random

import pytest

from replicas.request import ReqState
from replicas.scheduler.plan import DecodePlan, ExtendPlan
from tests.fakes import continuation
from tests.harness import Bench


def test_a_line_that_runs_makes_a_token_in_each_step_as_any_request_does() -> None:
    bench = Bench(chunked_prefill_size=16)
    line = bench.submit([1, 2, 3], max_new_tokens=12, offline=True)
    bench.step()
    prompt = bench.submit(list(range(30)), max_new_tokens=3)
    for made in range(2, 7):
        bench.step()
        assert line.num_output == made
    assert (prompt.num_output, line.num_retractions) == (2, 0)
    bench.run()


def test_a_line_in_the_middle_of_its_prompt_gives_way_and_keeps_its_pages() -> None:
    bench = Bench(page_size=4, chunked_prefill_size=16)
    line = bench.submit(list(range(40)), max_new_tokens=2, offline=True)
    for _ in range(4):
        bench.step()
    computed = line.computed_len
    prompt = bench.submit([700, 701, 702], max_new_tokens=2)
    bench.step()
    assert prompt.num_output == 1
    assert line.state is ReqState.WAITING
    before = bench.scheduler.counters["prefill_tokens"]
    bench.run()
    assert computed >= 8
    assert bench.scheduler.counters["prefill_tokens"] - before == 40 - computed  # nothing is computed again


def test_a_step_of_a_lines_prompt_is_short_because_whoever_comes_waits_for_it() -> None:
    bench = Bench(page_size=4, chunked_prefill_size=32)
    bench.submit(list(range(40)), max_new_tokens=1, offline=True)
    bench.run()
    assert [len(row.token_ids) for plan in bench.plans if isinstance(plan, ExtendPlan) for row in plan.rows] == [4] * 10


def test_lines_that_hold_all_rows_are_retracted_for_a_request_the_one_with_least_output_first() -> None:
    bench = Bench(max_running=2)
    first = bench.submit([1, 2], max_new_tokens=9, offline=True)
    bench.step()
    second = bench.submit([3, 4], max_new_tokens=9, offline=True)
    bench.step()
    prompt = bench.submit([5, 6], max_new_tokens=2)
    bench.step()
    assert prompt.num_output == 1
    assert (first.num_retractions, second.num_retractions) == (0, 1)
    assert bench.scheduler.counters["retractions"] == 0  # it says nothing of the pool
    bench.run()
    assert second.output_ids.tolist() == continuation([3, 4], 9)


def test_lines_that_hold_the_pool_are_retracted_for_a_request() -> None:
    bench = Bench(num_pages=12, page_size=4, new_token_ratio=0.0, min_new_token_ratio=0.0)
    lines = [bench.submit([10 * i, 1, 2, 3], max_new_tokens=12, offline=True) for i in range(3)]
    for _ in range(6):
        bench.step()
    assert [line.state for line in lines] == [ReqState.RUNNING] * 3
    prompt = bench.submit(list(range(100, 132)), max_new_tokens=8)
    while prompt.state is not ReqState.RUNNING:
        bench.step()
    assert sum(line.num_retractions for line in lines) >= 1
    bench.run()


def test_no_line_is_retracted_for_a_request_that_this_step_has_no_tokens_for() -> None:
    bench = Bench(max_running=3, page_size=4, chunked_prefill_size=16)
    lines = [bench.submit([10 * i, 2], max_new_tokens=30, offline=True) for i in range(3)]
    for _ in range(4):
        bench.step()
    bench.submit(list(range(100, 116)), max_new_tokens=1)  # the whole step
    bench.submit(list(range(200, 216)), max_new_tokens=1)
    bench.step()
    assert sum(line.num_retractions for line in lines) == 1
    bench.run()


def test_lines_take_no_place_from_the_limit_of_those_that_wait() -> None:
    bench = Bench(max_running=2)
    for i in range(2):
        bench.submit([i, 2], max_new_tokens=9, offline=True)
    bench.step()
    bench.step()
    assert len(bench.scheduler.queues.holding) == 2
    assert [bench.scheduler.would_wait(num) for num in (2, 3)] == [0, 1]


def test_a_line_without_memory_blocks_nobody() -> None:
    bench = Bench(num_pages=8, page_size=4, chunked_prefill_size=32, new_token_ratio=0.0, min_new_token_ratio=0.0)
    bench.submit(list(range(20)), max_new_tokens=6)
    bench.step()
    short = bench.submit(list(range(100, 120)), max_new_tokens=1, offline=True)
    bench.step()
    bench.step()
    assert bench.scheduler.last.short is short
    assert (bench.scheduler.blocked, bench.scheduler.would_wait(1)) == ("", 0)
    bench.run()


def test_no_line_starts_while_a_request_waits_whatever_its_priority_and_however_long_it_has_waited() -> None:
    bench = Bench(max_running=1, priorities="on", ageing_s=0.05)
    running = bench.submit([1, 2], max_new_tokens=6)
    bench.step()
    line = bench.submit([3, 4], max_new_tokens=1, offline=True, priority=1000)
    bench.clock.now_s += 1e6
    low = bench.submit([5, 6], max_new_tokens=3, priority=-1000)
    bench.run()
    assert running.stamps.ended_s is not None
    assert low.stamps.ended_s is not None
    assert line.stamps.admitted_s is not None
    assert line.stamps.admitted_s > low.stamps.ended_s > running.stamps.ended_s


def test_what_lines_alone_have_computed_is_evicted_first() -> None:
    bench = Bench(num_pages=12, page_size=4)
    bench.submit(list(range(17)), max_new_tokens=1)
    bench.run()
    for i in range(4):  # 4 pages each: more than fit beside the four pages of the first
        bench.submit([100 * (i + 1) + t for t in range(17)], max_new_tokens=1, offline=True)
        bench.run()
    again = bench.submit([*range(17), 99], max_new_tokens=1)
    bench.run()
    assert again.cached_tokens == 16


def test_a_prefix_that_lines_computed_and_another_request_uses_is_no_longer_theirs() -> None:
    bench = Bench(num_pages=12, page_size=4)
    bench.submit(list(range(17)), max_new_tokens=1, offline=True)
    bench.run()
    bench.submit([*range(17), 98], max_new_tokens=1)
    bench.run()
    for i in range(4):
        bench.submit([100 * (i + 1) + t for t in range(17)], max_new_tokens=1, offline=True)
        bench.run()
    assert bench.kv.cache.peek_len(bench.reqs[0].ids[:17], "") == 16


@pytest.mark.parametrize("seed", range(12))
def test_every_answer_is_right_however_lines_and_requests_come(seed: int) -> None:
    """`Bench.step` checks all invariants after each step, `run` each answer."""
    random = Random(seed)
    bench = Bench(
        num_pages=random.choice([20, 40]),
        page_size=4,
        max_running=random.choice([2, 5]),
        mixed_steps=random.random() < 0.8,
        priorities="on",
    )
    for _ in range(25):
        prompt = [random.choice([1, 500]) + t for t in range(random.randint(1, 30))]
        bench.submit(
            prompt,
            max_new_tokens=random.randint(1, 20),
            offline=random.random() < 0.6,
            priority=random.randint(-3, 3),
        )
        for _ in range(random.randint(0, 4)):
            bench.step()
    bench.run()
    assert any(isinstance(plan, DecodePlan) for plan in bench.plans)
