"""How much of a step, and of the pool, a request may take."""

import pytest

from kvtransfer.types import PdTicket, PeerAddress
from replicas.request import Leg, Req
from replicas.scheduler.budget import CLIP_NEW_TOKENS, NewTokenRatio, RatioRule, StepBudget
from replicas.scheduler.tokens import stop_reason
from replicas.types import PdLeg, SamplingParams
from tests.harness import choice_of


def req(*, max_new_tokens: int, num_output: int = 0) -> Req:
    return choice_of("a", range(4), max_new_tokens=max_new_tokens, resumed_ids=tuple(range(num_output)))


def test_a_part_of_a_prompt_ends_on_a_page_boundary() -> None:
    budget = StepBudget(40, page_size=16)
    assert budget.grant(100, prefix_len=0) == 32
    assert budget.grant(40, prefix_len=0) == 40  # the whole rest needs no boundary
    budget.spend(32)
    assert budget.grant(100, prefix_len=16) == 0  # 8 left: not a page
    assert budget.grant(8, prefix_len=16) == 8
    budget.spend(8)
    assert budget.empty


def test_what_is_lent_goes_once_and_only_to_a_prompt_that_ends() -> None:
    budget = StepBudget(16, page_size=16)
    budget.lend(16)
    assert budget.grant(20, prefix_len=0) == 16
    assert budget.grant(20, prefix_len=0, ends=True) == 20
    budget.spend(20)
    budget.lend(16)
    assert [budget.grant(want, prefix_len=20, ends=True) for want in (12, 13)] == [12, 12]
    budget.spend(12)
    budget.lend(0)
    assert budget.empty


def test_a_step_smaller_than_a_page_still_makes_progress() -> None:
    assert StepBudget(5, page_size=16).grant(100, prefix_len=3) == 5


def test_the_reserve_shrinks_with_the_output_made_and_is_clipped() -> None:
    ratio = NewTokenRatio(RatioRule(initial=0.5, floor=0.1, decay=0.01))
    assert ratio.reserve(req(max_new_tokens=100)) == 50
    assert ratio.reserve(req(max_new_tokens=100, num_output=60)) == 20
    assert ratio.reserve(req(max_new_tokens=100_000)) == CLIP_NEW_TOKENS // 2


def test_the_ratio_decays_to_its_floor_and_jumps_after_a_retraction() -> None:
    """SPEC F11: new_token_ratio is raised when a request was retracted."""
    ratio = NewTokenRatio(RatioRule(initial=0.7, floor=0.1, decay=0.2))
    for _ in range(10):
        ratio.decode_step()
    assert ratio.value == pytest.approx(0.1)
    ratio.retracted([req(max_new_tokens=100, num_output=30)])
    assert ratio.value == pytest.approx(0.5)  # (30 + 20) of 100
    ratio.idle()
    assert ratio.value == 0.7


def test_a_prefill_leg_reserves_nothing_for_the_output_that_another_replica_makes() -> None:
    ticket = PdTicket(room=1, generation=0, prefill=PeerAddress(host="127.0.0.1", port=1, incarnation="a"))
    ratio, asked = NewTokenRatio(RatioRule(initial=1.0, floor=0.0, decay=0.0)), req(max_new_tokens=100)
    for role, reserved in ((PdLeg.DECODE, 100), (PdLeg.PREFILL, 0)):
        asked.leg = Leg(role=role, ticket=ticket)
        assert ratio.reserve(asked) == reserved


def test_a_stop_id_that_came_before_the_least_output_does_not_end_the_answer() -> None:
    """It comes where nothing else is allowed, so that it could not be masked."""
    sampling = SamplingParams(stop_token_ids=(2,), min_new_tokens=4)
    ended = [choice_of("a", range(4), sampling=sampling, resumed_ids=(*range(10, 10 + n), 2)) for n in range(5)]
    assert [stop_reason(req) is not None for req in ended] == [False, False, False, True, True]
