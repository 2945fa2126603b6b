"""How many replicas there should be."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.autoscaling import Objective, Signals, TtftPolicy, decide, holding, replica_stats, signals_of
from tests.unit.deployments.sample_values import stats

OBJECTIVE = Objective(ttft_s=2.0, pool_high=0.8, running_high=0.5, slack=0.7)
IDLE = Signals(
    num_replicas=1,
    queued_tokens=0,
    num_requests=0,
    num_running=0,
    used_pages=0,
    prefill_tokens_per_s=1000,
    slots=10,
    pool_pages=100,
)


def target(now: int, **load: float) -> int:
    return decide(dataclasses.replace(IDLE, num_replicas=now, **load), OBJECTIVE, least=1, most=8)


@pytest.mark.parametrize(
    ("load", "wanted"),
    [
        ({}, 1),
        ({"queued_tokens": 2000}, 1),  # 2 s of prefill: just within the objective
        ({"queued_tokens": 2001}, 2),
        ({"queued_tokens": 6000}, 3),
        ({"queued_tokens": 6000, "prefill_tokens_per_s": 0}, 1),  # rate not measured yet: tokens say nothing
        ({"used_pages": 81}, 2),
        ({"num_requests": 16, "num_running": 10}, 4),  # 5 a replica
        ({"queued_tokens": 10**9}, 8),
    ],
)
def test_load_over_a_limit_wants_more_replicas(load: dict[str, float], wanted: int) -> None:
    assert target(1, **load) == wanted


def test_replicas_go_only_when_the_rest_would_be_well_below_the_limits() -> None:
    """With two, one would be enough for 2,000 tokens, but only just: at 1,400 (0.7 of it) the second goes."""
    assert [target(2, queued_tokens=tokens) for tokens in (2000, 1401, 1400, 0)] == [2, 2, 1, 1]


def test_never_below_what_holds_the_running_requests() -> None:
    lax = Objective(ttft_s=2.0, pool_high=1.0, running_high=1.0, slack=1.0)
    signals = dataclasses.replace(IDLE, num_replicas=5, num_running=31, num_requests=31, used_pages=120)
    assert holding(signals) == 4
    assert decide(signals, lax, least=1, most=8) == 4
    assert decide(signals, lax, least=1, most=3) == 3  # the bounds are the operator's


AMOUNT = st.floats(0, 1e6)
SIGNALS = st.builds(
    Signals,
    num_replicas=st.integers(0, 50),
    queued_tokens=AMOUNT,
    num_requests=AMOUNT,
    num_running=AMOUNT,
    used_pages=AMOUNT,
    prefill_tokens_per_s=AMOUNT,
    slots=AMOUNT,
    pool_pages=AMOUNT,
)
SHARE = st.floats(0.05, 1.0)
OBJECTIVES = st.builds(Objective, ttft_s=st.floats(0.01, 100), pool_high=SHARE, running_high=SHARE, slack=SHARE)


@given(SIGNALS, OBJECTIVES, st.integers(0, 10), st.integers(10, 60))
def test_the_target_is_within_the_bounds_holds_what_runs_and_does_not_swing(
    signals: Signals, objective: Objective, least: int, most: int
) -> None:
    wanted = decide(signals, objective, least=least, most=most)
    assert least <= wanted <= most
    assert wanted >= min(holding(signals), most)
    again = dataclasses.replace(signals, num_replicas=wanted)
    assert decide(again, objective, least=least, most=most) == wanted


@given(SIGNALS, OBJECTIVES, st.floats(0, 1e6))
def test_more_load_never_wants_fewer(signals: Signals, objective: Objective, more: float) -> None:
    loaded = dataclasses.replace(signals, queued_tokens=signals.queued_tokens + more)
    assert decide(loaded, objective, least=0, most=10**9) >= decide(signals, objective, least=0, most=10**9)


@dataclass
class Context:
    """What Serve hands to a policy, as far as ours reads it."""

    target_num_replicas: int
    aggregated_metrics: dict[str, dict[Any, float]] = field(default_factory=dict)
    capacity_adjusted_min_replicas: int = 1
    capacity_adjusted_max_replicas: int = 4


def test_the_policy_adds_up_what_the_replicas_say() -> None:
    each = [
        replica_stats(stats(waiting_uncached_tokens=1500, prefill_tokens_per_s=1000.0, num_running=2)),
        replica_stats(stats(waiting_uncached_tokens=4500)),  # has not measured its rate yet
    ]
    metrics = {name: {f"r{i}": values[name] for i, values in enumerate(each)} for name in each[0]}
    assert signals_of(2, metrics) == Signals(
        num_replicas=2,
        queued_tokens=6000,
        num_requests=2,
        num_running=2,
        used_pages=0,
        prefill_tokens_per_s=1000,
        slots=4,
        pool_pages=10,
    )
    assert TtftPolicy(ttft_s=2.0)(Context(2, metrics)) == (3, {})
    assert TtftPolicy(ttft_s=1.0)(Context(2, metrics)) == (4, {})


def test_without_word_from_a_replica_nothing_changes() -> None:
    assert TtftPolicy()(Context(2)) == (2, {})


def test_who_waits_for_the_prefill_side_is_no_load_of_a_decode_replica_and_quarantined_pages_are_taken() -> None:
    """Three wait for row and pages: one in three of those that have them runs."""
    pool = dataclasses.replace(stats().pool, free_pages=4, quarantined_pages=5, reserved_pages=1)
    said = replica_stats(
        dataclasses.replace(stats(num_running=2, num_waiting=1, num_preallocating=3, num_receiving=4), pool=pool)
    )
    assert (said["num_running"], said["num_waiting"], said["used_pages"]) == (2, 1 + 3 * 2 / 6, 6)


@pytest.mark.parametrize(
    ("num_running", "num_receiving", "wanted"),
    [(0, 64, 1), (0, 0, 4), (64, 0, 5), (32, 32, 3)],  # 57.6 a replica
)
def test_decode_replicas_are_added_for_those_that_wait_for_decoding(
    num_running: int, num_receiving: int, wanted: int
) -> None:
    """200 wait for row and pages, which are held by requests that run, or that wait for the prefill side."""
    said = replica_stats(
        stats(max_running_requests=64, num_running=num_running, num_receiving=num_receiving, num_preallocating=200)
    )
    signals = signals_of(1, {name: {"r0": value} for name, value in said.items()})
    assert signals is not None
    assert decide(signals, Objective(), least=1, most=8) == wanted
