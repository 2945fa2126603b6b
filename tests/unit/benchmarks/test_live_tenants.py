"""What light tenants had beside one that floods a fleet: times and tokens of one arm by hand, and the lines of all."""

import pytest

from benchmarks.client import Run, Sample
from benchmarks.live_tenants import ALONE, ARMS, LIGHT, NAMED, TOGETHER, Runs, light_s, rows_of, tokens
from benchmarks.sim_tenants import HEAVY


def run(*samples: Sample, wall_s: float = 80.0) -> Run:
    return Run(samples=samples, wall_s=wall_s, client_cpu_s=0.0, answers_known=True)


def sample(*, at_s: float, ttft_s: float | None, made: int) -> Sample:
    error = None if made in (32, 64) else "cut off after 80 s"
    return Sample(name="", start_s=at_s, ttft_s=ttft_s, token_ids=[7] * made, error=error)


def arm(ttft_s: float | None, *, heavy: int | None) -> Runs:
    """Each light tenant asks twice, and a third time just before the end; ``heavy``: answers of the heavy one."""
    made = 0 if ttft_s is None else 32
    late, unsent = sample(at_s=77.0, ttft_s=0.1, made=1), sample(at_s=0.0, ttft_s=None, made=0)
    runs = {
        each: run(*(sample(at_s=at_s, ttft_s=ttft_s, made=made) for at_s in (10.0, 70.0)), late, unsent)
        for each in LIGHT
    }
    if heavy is not None:
        waits = [sample(at_s=0.1, ttft_s=None, made=0)] * 100
        runs[HEAVY] = run(*[sample(at_s=0.1, ttft_s=20.0, made=64)] * heavy, *waits)
    return runs


def test_who_had_no_first_token_waited_to_the_end_and_the_last_ones_are_not_counted() -> None:
    assert light_s(arm(0.3, heavy=1)) == [0.3] * 18
    assert light_s(arm(None, heavy=1)) == [70.0, 10.0] * 9


def test_tokens_are_counted_as_they_came() -> None:
    had, asked = tokens(arm(0.3, heavy=10))
    assert had == dict.fromkeys(LIGHT, 2 * 160 + 129) | {HEAVY: 3_640}
    assert asked == dict.fromkeys(LIGHT, 3 * 160) | {HEAVY: 110 * 364}


def test_each_arm_is_held_against_the_light_ones_alone_and_the_order_without_tenants() -> None:
    found = {
        ALONE: [arm(0.2, heavy=None)] * 2,
        TOGETHER: [arm(None, heavy=20), arm(None, heavy=30)],
        NAMED: [arm(0.3, heavy=10), arm(0.3, heavy=30)],
    }
    rows = {(row.name, row.figure): row for row in rows_of(found, 80.0)}
    assert {name for name, _ in rows} == set(ARMS)
    assert rows[NAMED, "p95 by alone's"].value == pytest.approx(1.5)
    assert rows[NAMED, "light TTFT p95"].note == "36 light requests"
    ratio, light = rows[NAMED, "tokens by no tenants'"], 9 * 449
    assert ratio.low == pytest.approx((light + 3_640) / (9 * 129 + 7_280))
    assert ratio.high == pytest.approx((light + 10_920) / (9 * 129 + 10_920))
    assert rows[TOGETHER, "tokens"].high == pytest.approx((9 * 129 + 10_920) / 80)
    assert rows[NAMED, "heavy TTFT p50"].value == 20.0
    jain = {name: row.value or 0.0 for (name, figure), row in rows.items() if figure == "Jain"}
    assert jain[TOGETHER] < 0.7 < 0.98 < jain[NAMED] < 1.0 == jain[ALONE]
    assert (ALONE, "heavy TTFT p50") not in rows


def test_what_failed_is_said() -> None:
    failed = arm(0.3, heavy=1)
    failed[LIGHT[0]].samples[0].error = "HTTP 429: full"
    found = {ALONE: [arm(0.2, heavy=None)], TOGETHER: [failed], NAMED: [failed]}
    notes = {row.name: row.note for row in rows_of(found, 80.0) if row.note}
    assert notes == {ALONE: "18 light requests", TOGETHER: "18 light requests; HTTP 429: full"} | {
        NAMED: notes[TOGETHER]
    }
