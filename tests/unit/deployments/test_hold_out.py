"""How long a prefill replica whose hand-offs fail is not asked."""

from deployments.dispatch.prefill_leg import HoldOut
from replicas.types import HandOffReport
from tests.harness import Clock

FAILED = HandOffReport(transferred=False, reason="no way")
DONE = HandOffReport(transferred=True)


def held(hold_out: HoldOut, clock: Clock, at_s: float) -> bool:
    clock.now_s = at_s
    return "p0" in hold_out.now()


def test_a_failed_hand_off_holds_its_prefill_replica_out_for_two_seconds_and_says_why() -> None:
    clock = Clock()
    clock.now_s = 0.0
    hold_out = HoldOut(clock)
    assert hold_out.now() == {}
    hold_out.take("p0", FAILED)
    clock.now_s = 0.5
    assert hold_out.now() == {"p0": "a hand-off from it failed (no way); not asked for another 1.5 s"}
    assert held(hold_out, clock, 1.99)
    assert not held(hold_out, clock, 2.0)


def test_it_doubles_with_each_failure_after_it_up_to_a_minute_and_not_with_those_during_it() -> None:
    clock = Clock()
    clock.now_s = 0.0
    hold_out, lengths = HoldOut(clock), []
    for _ in range(7):
        for _ in range(20):  # as many rooms were open
            hold_out.take("p0", FAILED)
        began_s = clock.now_s
        while held(hold_out, clock, clock.now_s + 0.5):
            pass
        lengths.append(clock.now_s - began_s)
    assert lengths == [2, 4, 8, 16, 32, 60, 60]


def test_a_hand_off_that_succeeds_clears_the_name() -> None:
    clock = Clock()
    clock.now_s = 0.0
    hold_out = HoldOut(clock)
    hold_out.take("p0", FAILED)
    assert held(hold_out, clock, 1.0)
    hold_out.take("p0", DONE)
    assert not held(hold_out, clock, 1.0)
    hold_out.take("p0", FAILED)
    assert not held(hold_out, clock, 3.0)


def test_what_is_long_past_is_forgotten() -> None:
    clock = Clock()
    clock.now_s = 0.0
    hold_out = HoldOut(clock)
    hold_out.take("p0", FAILED)
    assert not held(hold_out, clock, 130.0)
    hold_out.take("p0", FAILED)
    assert not held(hold_out, clock, 132.0)  # 2 s again
    assert held(hold_out, clock, 131.9)
