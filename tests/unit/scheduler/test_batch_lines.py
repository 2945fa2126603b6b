"""Lines of batches in the scheduler: they run in the gaps that others leave, give way at once, and lose nothing."""

from random import Random

import pytest

from replicas.request import Req, ReqState
from replicas.scheduler.lines import LineShare, RowTime
from replicas.scheduler.plan import DecodePlan, ExtendPlan
from tests.fakes import continuation
from tests.harness import Bench, choice_of
from tests.unit.scheduler.test_mixed import Forcing


def timed(bench: Bench, *, token_s: float, step_s: float = 0.02, row_s: float = 0.002) -> None:
    """Have steps of one row taken ``step_s``, each further row ``row_s``, and each token of a prompt ``token_s``."""
    for num_rows in (1, 9):
        bench.scheduler.queues.lines.share.time.timed(num_rows, step_s + (num_rows - 1) * row_s)
    bench.scheduler.queues.waiting.s_per_token = token_s


def test_a_line_is_paused_with_what_it_holds_while_a_prompt_is_computed() -> None:
    bench = Bench(chunked_prefill_size=16)
    line = bench.submit([1, 2, 3], max_new_tokens=12, offline=True)
    bench.step()
    bench.step()
    made = line.num_output
    prompt = bench.submit(list(range(30)), max_new_tokens=3)
    bench.step()
    bench.step()  # two chunks
    assert (line.num_output, line.state, line.num_retractions) == (made, ReqState.RUNNING, 0)
    assert prompt.state is ReqState.RUNNING
    bench.step()
    assert (line.num_output, prompt.num_output) == (made + 1, 2)
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
    before = bench.scheduler.counters.prefill_tokens
    bench.run()
    assert computed >= 8
    assert bench.scheduler.counters.prefill_tokens - before == 40 - computed  # nothing is computed again


def test_a_line_whose_tokens_are_forced_gives_way_too() -> None:
    bench = Bench(page_size=4, chunked_prefill_size=16)
    line = bench.submit([1, 2, 3], max_new_tokens=100, offline=True)
    line.guide = Forcing()
    while not bench.scheduler.queues.forced:
        bench.step()
    made = line.num_output
    bench.submit(list(range(100, 130)), max_new_tokens=1)
    bench.step()
    assert [len(row.token_ids) for row in bench.plans[-1].rows] == [16]
    assert (line.num_output, line.state) == (made, ReqState.WAITING)
    while not line.num_output > made:
        bench.step()


def forced_beside(num_pages: int) -> tuple[Bench, Req, Req]:
    """Return a line that has to save up for tokens that are forced, and a request that runs beside it."""
    options = {"chunked_prefill_size": 32, "new_token_ratio": 0.0, "min_new_token_ratio": 0.0}
    bench = Bench(num_pages=num_pages, page_size=4, **options)
    other = bench.submit([1, 2, 3, 4], max_new_tokens=40)
    bench.step()
    timed(bench, token_s=1e-6)
    line = bench.submit(list(range(100, 112)), max_new_tokens=100, offline=True)
    line.guide = Forcing()
    while not bench.scheduler.queues.forced:
        bench.step()
    bench.scheduler.queues.waiting.s_per_token = 10.0
    return bench, line, other


def test_no_request_is_retracted_while_a_line_waits_to_go_on_with_what_is_forced() -> None:
    bench, line, other = forced_beside(num_pages=12)
    while other.finish is None:
        bench.step()
    assert (line.num_retractions, other.num_retractions) == (1, 0)


def plan_ahead_of(bench: Bench, other: Req) -> None:
    """Run a step, and one that is planned ahead of its end, which has ``other`` alone."""
    plan = bench.scheduler.schedule()
    assert plan is not None
    ahead = bench.scheduler.schedule_ahead()
    assert ahead is not None
    assert bench.scheduler.queues.under_way.newest == [other]
    for each in (plan, ahead):
        bench.scheduler.apply(each, bench.device.execute(each))


def test_a_step_is_planned_ahead_beside_a_line_whose_tokens_are_forced_and_has_to_save_up() -> None:
    bench, line, other = forced_beside(num_pages=64)
    bench.step()
    plan_ahead_of(bench, other)
    bench.scheduler.queues.waiting.s_per_token = 1e-6
    made = line.num_output
    bench.step()
    assert line.num_output > made


def test_a_step_of_a_lines_prompt_is_short_because_whoever_comes_waits_for_it() -> None:
    bench = Bench(page_size=4, chunked_prefill_size=32)
    bench.submit(list(range(40)), max_new_tokens=1, offline=True)
    bench.run()
    assert [len(row.token_ids) for plan in bench.plans if isinstance(plan, ExtendPlan) for row in plan.rows] == [4] * 10


def test_beside_others_lines_have_as_many_rows_as_a_quarter_of_the_others_time_is_worth() -> None:
    bench = Bench()
    lines = [bench.submit([10 * i, 2], max_new_tokens=30, offline=True) for i in range(4)]
    for _ in range(6):
        bench.step()
    timed(bench, token_s=0.01)
    bench.submit([500, 501], max_new_tokens=8)
    bench.step()
    for _ in range(4):
        before = [line.num_output for line in lines]
        bench.step()
        assert [line.num_output - made for line, made in zip(lines, before, strict=True)] == [1, 1, 0, 0]
    assert [line.num_retractions for line in lines] == [0] * 4
    bench.run()


def test_while_nobody_knows_what_rows_cost_lines_have_one_beside_others() -> None:
    bench = Bench()
    lines = [bench.submit([10 * i, 2], max_new_tokens=30, offline=True) for i in range(3)]
    for _ in range(5):
        bench.step()
    bench.submit([500, 501], max_new_tokens=8)
    bench.step()
    before = sum(line.num_output for line in lines)
    bench.step()
    assert sum(line.num_output for line in lines) == before + 1


def test_beside_others_a_lines_prompt_waits_until_its_part_of_their_time_is_saved_up() -> None:
    bench = Bench(page_size=4, chunked_prefill_size=64)
    bench.submit([500, 501], max_new_tokens=60)
    bench.step()
    timed(bench, token_s=0.0049)  # a page costs less than what four steps of one request leave
    line = bench.submit(list(range(20)), max_new_tokens=1, offline=True)
    plans = [bench.step() for _ in range(30)]
    lens = [len(plan.rows[0].token_ids) if isinstance(plan, ExtendPlan) else 0 for plan in plans]
    assert lens[:10] == [0, 0, 0, 0, 4, 0, 0, 0, 4, 0]
    assert line.finish is not None
    assert line.num_retractions == 0
    bench.run()


@pytest.mark.parametrize("chunk", [4, 16, 28])
def test_a_lines_prompt_runs_beside_others_also_where_an_eighth_of_a_chunk_is_less_than_a_page(chunk: int) -> None:
    bench = Bench(page_size=4, chunked_prefill_size=chunk)
    bench.submit([500, 501], max_new_tokens=60)
    bench.step()
    timed(bench, token_s=0.0049)
    line = bench.submit(list(range(20)), max_new_tokens=1, offline=True)
    while line.finish is None:
        bench.step()
    assert bench.reqs[0].finish is None
    bench.run()


def test_a_whole_page_can_be_saved_up_whatever_a_token_takes() -> None:
    """3 tokens of .173 s take a bit less than three times as long, as floats go."""
    bench = Bench()
    reqs = [bench.submit([1, 2], max_new_tokens=2)]
    bench.step()
    plan = bench.step()
    assert isinstance(plan, DecodePlan)
    share = LineShare(24, page_size=3)
    share.time.timed(1, 100.0)
    share.ran(plan, reqs, 0.173)
    assert share.prompt_len(1, 0.173) == 3


def test_a_step_is_planned_ahead_beside_a_line_that_has_to_save_up() -> None:
    bench = Bench(page_size=4, chunked_prefill_size=64)
    line = bench.submit(list(range(40)), max_new_tokens=1, offline=True)
    bench.step()
    assert bench.scheduler.queues.chunked is line
    other = bench.submit([500, 501], max_new_tokens=60)
    bench.step()
    bench.submit(list(range(40)), max_new_tokens=1, offline=True)
    plan_ahead_of(bench, other)
    bench.run()


def test_what_a_row_costs_is_a_straight_line_through_the_steps_and_unknown_while_all_have_as_many() -> None:
    time = RowTime()
    for _ in range(3):
        time.timed(2, 0.03)
    assert (time.row_s, time.of(7)) == (None, pytest.approx(0.03))
    time.timed(6, 0.05)
    assert time.row_s == pytest.approx(0.005)
    assert time.of(1) == pytest.approx(0.025)
    for _ in range(2000):  # the machine has become twice as slow
        time.timed(2, 0.06)
        time.timed(6, 0.1)
    assert time.row_s == pytest.approx(0.01, rel=0.01)


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
    assert bench.scheduler.counters.retractions == 0  # it says nothing of the pool
    bench.run()
    assert second.output_ids.tolist() == continuation([3, 4], 9)


def test_lines_that_hold_the_pool_are_retracted_for_a_request() -> None:
    bench = Bench(num_pages=12, page_size=4, new_token_ratio=0.0, min_new_token_ratio=0.0)
    lines = [bench.submit([10 * i, 1, 2, 3], max_new_tokens=12, offline=True) for i in range(3)]
    for _ in range(6):
        bench.step()
    assert [line.state for line in lines] == [ReqState.RUNNING] * 3
    prompt = bench.submit(list(range(100, 132)), max_new_tokens=8)
    bench.step()
    bench.step()
    assert prompt.state is ReqState.RUNNING
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


def test_a_line_counts_as_open_until_it_ends_wherever_it_is() -> None:
    bench = Bench()
    scheduler, parked = bench.scheduler, choice_of("parked", [1, 2], offline=True, deadline_s=9.0)
    scheduler.park(parked)
    scheduler.check()
    found = [scheduler.queues.lines.num_open]
    scheduler.take_back(parked)
    assert (scheduler.deadlines.next_s, dict(scheduler.queues.waiting.shares._open)) == (None, {})
    found.append(scheduler.queues.lines.num_open)
    bench.submit([1, 2], max_new_tokens=3, offline=True)
    found.append(scheduler.queues.lines.num_open)
    bench.run()
    assert [*found, scheduler.queues.lines.num_open] == [1, 0, 1, 0]


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
    timed(bench, token_s=0.001)
    bench.submit(list(range(20)), max_new_tokens=6)
    bench.step()
    short = bench.submit(list(range(100, 120)), max_new_tokens=1, offline=True)
    bench.step()
    bench.step()
    assert bench.scheduler.last.short is short
    assert (bench.scheduler.blocked, bench.scheduler.would_wait(1)) == ("", 0)
    bench.run()


def test_no_line_starts_while_a_request_waits_whatever_its_priority() -> None:
    bench = Bench(max_running=1, priorities="on")
    running = bench.submit([1, 2], max_new_tokens=6)
    bench.step()
    line = bench.submit([3, 4], max_new_tokens=1, offline=True, priority=1000)
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


@pytest.mark.parametrize("seed", range(20))
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
    if random.random() < 0.5:
        timed(bench, token_s=random.choice([0.0001, 0.002]))
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
