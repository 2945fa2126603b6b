"""The rates in the statistics for routers, from steps of all kinds."""

from random import Random

import pytest

from replicas.engine.stepping import STOOD_STILL_S, Pulse, StepClock
from tests.harness import Clock


def test_a_mixed_step_counts_its_prompt_tokens_over_all_of_its_time() -> None:
    """That is how fast a queue drains beside what runs: 248 tokens in 0.25 s, whatever the 8 other rows took of it."""
    clock = StepClock(chunk_size=512)
    clock.record(0.25, 248, is_extend=True, num_decode=8)
    assert clock.prefill_tokens_per_s == pytest.approx(992)
    assert (clock.num_extend, clock.num_mixed, clock.num_decode) == (1, 1, 0)
    assert (clock.extend_s, clock.decode_step_s) == (0.25, 0.0)
    clock.record(0.006, 0, is_extend=False, num_decode=8)
    assert clock.costs[0] == pytest.approx(0.256 / 264)


def test_a_short_prompt_that_shares_its_step_with_many_moves_the_rate_by_its_length() -> None:
    """Smoothed apart, 512 - 0.2 x 448 tokens in 0.5 - 0.2 x 0.25 s: 939 a second; smoothing the rates gave 870."""
    clock = StepClock(chunk_size=512)
    for _ in range(5):
        clock.record(0.5, 512, is_extend=True)
    clock.record(0.25, 64, is_extend=True, num_decode=8)
    assert clock.prefill_tokens_per_s == pytest.approx(422.4 / 0.45)
    clock.record(0.2, 63, is_extend=True, num_decode=8)  # too short to say anything
    assert clock.prefill_tokens_per_s == pytest.approx(422.4 / 0.45)


def test_steps_that_only_decode_give_the_time_between_tokens() -> None:
    clock = StepClock(chunk_size=512)
    clock.record(0.02, 0, is_extend=False)
    clock.record(0.25, 248, is_extend=True, num_decode=8)
    clock.record(0.03, 0, is_extend=False)
    assert clock.decode_step_s == pytest.approx(0.025)
    assert clock.prefill_tokens_per_s == pytest.approx(992)


def test_a_step_in_which_drafts_came_true_made_several_tokens_of_a_request() -> None:
    clock = StepClock(chunk_size=512)
    assert clock.tokens_per_step == 1.0
    clock.record(0.02, 0, is_extend=False, tokens_each=6.0)
    clock.record(0.25, 248, is_extend=True, num_decode=8)
    assert clock.tokens_per_step == pytest.approx(2.0)
    clock.record(0.02, 0, is_extend=False)
    assert clock.tokens_per_step == pytest.approx(1.8)


def test_the_longest_recent_step_is_remembered_for_each_kind() -> None:
    """A long chunk among 32 extend steps, however many decode steps come between."""
    clock = StepClock(chunk_size=512)
    clock.record(3.0, 512, is_extend=True)
    for _ in range(1000):
        clock.record(0.02, 0, is_extend=False)
    assert clock.longest_s == 3.0
    for _ in range(31):
        clock.record(0.5, 512, is_extend=True)
    assert clock.longest_s == 3.0
    clock.record(0.5, 512, is_extend=True)
    assert clock.longest_s == 0.5


def test_chunks_too_small_for_a_full_step_still_give_a_rate() -> None:
    """Of chunks of 128 tokens a step beside others has 32 to 64 for prompts, however long they are."""
    clock = StepClock(chunk_size=128)
    clock.record(0.1, 63, is_extend=True, num_decode=8)
    assert clock.prefill_tokens_per_s == pytest.approx(630)
    clock.record(0.1, 31, is_extend=True, num_decode=8)  # a short prompt, or the end of one
    assert clock.prefill_tokens_per_s == pytest.approx(630)


def test_a_step_that_a_stop_of_the_process_spans_says_nothing_of_rates_nor_of_how_long_steps_are() -> None:
    """50 s of SIGSTOP in the middle of a decode step and of a chunk; the sums count them, they did take so long."""
    clock = StepClock(chunk_size=512)
    for step_s, is_extend in ((0.028, False), (0.5, True), (0.028, False)):
        clock.record(step_s, 512 * is_extend, is_extend=is_extend)
    clock.record(50.0, 0, is_extend=False, interrupted=lambda: True)
    clock.record(50.0, 512, is_extend=True, interrupted=lambda: True)
    assert (clock.decode_step_s, clock.prefill_tokens_per_s) == (pytest.approx(0.028), pytest.approx(1024))
    assert clock.longest_s == 0.5
    assert (clock.num_decode, clock.decode_s, clock.extend_s) == (3, pytest.approx(50.056), pytest.approx(50.5))


def test_a_step_far_longer_than_the_recent_ones_counts_as_four_times_their_median() -> None:
    """A rank elsewhere stood still, or the machine swapped: 0.028 + 0.2 x 3 x 0.028 s, where the mean of all was 10 s.
    Of prompts, per token: 512 at 1,024 a second, then 4 times as slow: 512 / (0.5 + 0.2 x 1.5) a second."""
    clock = StepClock(chunk_size=512)
    for _ in range(5):
        clock.record(0.028, 0, is_extend=False)
        clock.record(0.5, 512, is_extend=True)
    clock.record(50.0, 0, is_extend=False)
    clock.record(50.0, 512, is_extend=True)
    assert clock.decode_step_s == pytest.approx(0.028 * 1.6)
    assert clock.prefill_tokens_per_s == pytest.approx(512 / 0.8)
    assert clock.longest_s == 50.0  # such steps exist: nothing that takes 50 s is hung


def test_what_steps_take_is_told_apart_from_what_they_run_whichever_they_are_and_few_are_short() -> None:
    """0.02 s, 0.4 ms a prompt token, 1 ms a row: by uneven steps, by even ones, long after the last that differed."""
    clock, rng = StepClock(chunk_size=512), Random(0)
    assert clock.costs == (0.0, 0.0, 0.0, 0.0)
    for num in range(300):
        num_prompt, num_rows, uneven = rng.choice([0, 16, 128, 200]), rng.randint(30, 60), rng.choice([0.9, 1.1])
        step_s = 0.02 + 0.0004 * num_prompt + 0.001 * num_rows
        clock.record(step_s * (uneven if num < 150 else 1.0), num_prompt, is_extend=num_prompt > 0, num_decode=num_rows)
        if num == 149:
            assert clock.costs[1:] == pytest.approx((0.02, 0.0004, 0.001), rel=0.3)
    assert clock.costs[1:] == pytest.approx((0.02, 0.0004, 0.001), rel=0.1)
    for _ in range(4000):
        clock.record(rng.choice([0.099, 0.101]), 100, is_extend=True, num_decode=40)
    assert clock.costs[1:] == pytest.approx((0.02, 0.0004, 0.001), rel=0.1)


@pytest.mark.parametrize(
    ("steps", "costs"),
    [
        ([(100, 8, 0.2)], (0.2, 0.0, 0.0)),  # one says nothing of what it runs
        ([(0, 4, 0.02), (0, 8, 0.03)] * 20, (0.01, 0.0, 0.0025)),
        ([(0, 4, 0.2), (400, 8, 0.4)] * 20, (0.1, 0.00025, 0.025)),  # where both go together, each has a part
        ([(400, 8, 0.2), (0, 4, 0.4)] * 20, (0.3, 0.0, 0.0)),  # what takes less where it runs more has no cost
        ([(10, 0, 0.01), (100, 0, 0.2)] * 20, (0.00525, 0.00211, 0.0)),  # nor does a step take none
    ],
)
def test_of_steps_that_do_not_tell_apart_what_they_run_no_cost_is_below_zero(
    steps: list[tuple[int, int, float]], costs: tuple[float, float, float]
) -> None:
    clock = StepClock(chunk_size=512)
    for num_prompt, num_rows, step_s in steps:
        clock.record(step_s, num_prompt, is_extend=num_prompt > 0, num_decode=num_rows)
    assert clock.costs[1:] == pytest.approx(costs, rel=0.1)


def test_what_a_token_took_of_late_hardly_shows_a_step_far_longer_than_the_others() -> None:
    """12 s count as 4 times 0.02 s: else steps beside a light tenant were bounded wrongly for 100 more."""
    clock = StepClock(chunk_size=512)
    for _ in range(9):
        clock.record(0.02, 0, is_extend=False, num_decode=10)
    clock.record(12.0, 0, is_extend=False, num_decode=10)
    assert clock.costs[:2] == pytest.approx(((9 * 0.02 + 0.08) / 100, (9 * 0.02 + 0.08) / 10))
    assert clock.longest_s == 12.0


def test_an_engine_that_has_become_slower_is_believed_after_some_steps() -> None:
    clock = StepClock(chunk_size=512)
    for _ in range(32):
        clock.record(0.01, 0, is_extend=False)
    for _ in range(40):
        clock.record(0.1, 0, is_extend=False)
    assert clock.decode_step_s == pytest.approx(0.1, rel=0.01)


def test_a_pulse_tells_whether_the_process_stood_still_whichever_thread_goes_on_first() -> None:
    clock = Clock()
    pulse = Pulse(clock)
    clock.now_s = 100.0
    assert not pulse.stopped_since(0.0)  # nothing beats here
    pulse.beat()
    clock.now_s += STOOD_STILL_S
    assert not pulse.stopped_since(100.0)
    pulse.beat()
    clock.now_s += 50.0
    assert pulse.stopped_since(101.0)  # before the thread of the pulse goes on,
    pulse.beat()
    assert pulse.stopped_since(101.0)  # and after that
    assert not pulse.stopped_since(clock.now_s)  # a step that began later
