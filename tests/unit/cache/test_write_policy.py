"""When pages are copied to the host, and what is learned from pages that come back."""

import numpy as np
import pytest

from replicas.cache.write_policy import SAMPLES, ReuseGaps, WritePolicy


def keys(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint64)


@pytest.mark.parametrize(
    ("name", "at_insert", "at_eviction", "idle"),
    [
        ("write_through", [True, True], False, 0.0),
        ("write_through_selective", [False, True], False, 0.0),
        ("write_back", [False, False], True, 0.0),
        ("adaptive", [False, False], True, 0.25),
    ],
)
def test_each_policy_has_its_moment(name: str, at_insert: list[bool], at_eviction: bool, idle: float) -> None:
    policy = WritePolicy.make(name, ghost_capacity=10)
    assert [policy.at_insert(hits) for hits in (0, 1)] == at_insert
    assert policy.rule.at_eviction == policy.admits(hits=0, victim_idle_s=1.0) == at_eviction
    assert policy.rule.idle_fraction == idle


def test_an_unknown_policy_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="unknown write policy 'lazy'; allowed: write_through, write_through_selec"):
        WritePolicy.make("lazy", ghost_capacity=10)


def test_adaptive_lets_a_first_use_in_only_for_what_is_idle_longer_than_second_uses_take() -> None:
    """Pages 1 to 10 come back after 10, 20, ... 100 s: three tenths of them within 40 s."""
    policy = WritePolicy.make("adaptive", ghost_capacity=100)
    assert policy.admits(hits=0, victim_idle_s=1.0)  # nothing is known yet
    for page in range(1, 11):
        policy.gaps.dropped(keys(page), used_s=0.0)
    for page in range(1, 11):
        assert policy.gaps.computed(keys(page), now_s=10.0 * page) == 1
    assert policy.gaps.quantile(0.3) == 40.0
    assert not policy.admits(hits=0, victim_idle_s=40.0)
    assert policy.admits(hits=0, victim_idle_s=41.0)
    assert policy.admits(hits=1, victim_idle_s=1.0)  # it was used twice
    assert policy.admits(hits=0, victim_idle_s=None)  # nothing that is missed has to leave
    policy.gaps.check()


def test_a_run_that_begins_with_lost_pages_is_one_second_use() -> None:
    """Of pages 1, 2, 3, 4 the first two were there before: one wait of 7 s; each ghost comes back once."""
    gaps = ReuseGaps(100)
    gaps.dropped(keys(1, 2), used_s=3.0)
    assert gaps.computed(keys(1, 2, 3, 4), now_s=10.0) == 2
    assert (gaps.quantile(0.0), gaps.quantile(1.0)) == (7.0, 7.0)
    assert gaps.computed(keys(1, 2, 3, 4), now_s=20.0) == 0
    assert gaps.computed(keys(9), now_s=20.0) == 0
    gaps.check()


def test_the_oldest_ghosts_and_waits_are_forgotten() -> None:
    gaps = ReuseGaps(3)
    gaps.dropped(keys(1, 2), used_s=0.0)
    gaps.dropped(keys(3), used_s=0.0)
    gaps.dropped(keys(1), used_s=1.0)  # again: now the newest
    gaps.dropped(keys(4), used_s=2.0)  # 2 goes
    assert [gaps.computed(keys(page), now_s=5.0) for page in (1, 2, 3, 4)] == [1, 0, 1, 1]
    for gap_s in range(SAMPLES):
        gaps.waited(float(gap_s))
    assert (gaps.quantile(0.0), gaps.quantile(0.5)) == (0.0, 500.0)
    gaps.waited(5_000.0)
    assert (gaps.quantile(0.0), gaps.quantile(1.0)) == (1.0, 5_000.0)
    gaps.check()
