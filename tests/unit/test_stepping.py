"""The rates in the statistics for routers, from steps of all kinds."""

import pytest

from replicas.engine.stepping import StepClock


def test_a_mixed_step_counts_its_prompt_tokens_over_all_of_its_time() -> None:
    """That is how fast a queue drains beside what runs: 248 tokens in 0.25 s, whatever the 8 other rows took of it."""
    clock = StepClock(chunk_size=512)
    clock.record(0.25, 248, is_extend=True, is_mixed=True)
    assert clock.prefill_tokens_per_s == pytest.approx(992)
    assert (clock.num_extend, clock.num_mixed, clock.num_decode) == (1, 1, 0)
    assert (clock.extend_s, clock.decode_step_s) == (0.25, 0.0)


def test_a_short_prompt_that_shares_its_step_with_many_moves_the_rate_by_its_length() -> None:
    """Smoothed apart, 512 - 0.2 x 448 tokens in 0.5 - 0.2 x 0.25 s: 939 a second; smoothing the rates gave 870."""
    clock = StepClock(chunk_size=512)
    for _ in range(3):
        clock.record(0.5, 512, is_extend=True)
    clock.record(0.25, 64, is_extend=True, is_mixed=True)
    assert clock.prefill_tokens_per_s == pytest.approx(422.4 / 0.45)
    clock.record(0.2, 63, is_extend=True, is_mixed=True)  # too short to say anything
    assert clock.prefill_tokens_per_s == pytest.approx(422.4 / 0.45)


def test_steps_that_only_decode_give_the_time_between_tokens() -> None:
    clock = StepClock(chunk_size=512)
    clock.record(0.02, 0, is_extend=False)
    clock.record(0.25, 248, is_extend=True, is_mixed=True)
    clock.record(0.03, 0, is_extend=False)
    assert clock.decode_step_s == pytest.approx(0.022)
    assert clock.prefill_tokens_per_s == pytest.approx(992)


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
    clock.record(0.1, 63, is_extend=True, is_mixed=True)
    assert clock.prefill_tokens_per_s == pytest.approx(630)
    clock.record(0.1, 31, is_extend=True, is_mixed=True)  # a short prompt, or the end of one
    assert clock.prefill_tokens_per_s == pytest.approx(630)
