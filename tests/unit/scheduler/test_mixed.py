"""Steps that mix chunks of prompts with one token of each running request, and what of a step one may take."""

import pytest

from kvtransfer.types import PdTicket, PeerAddress
from replicas.request import Leg, Req, ReqState
from replicas.scheduler.budget import CLIP_NEW_TOKENS, NewTokenRatio, RatioRule, StepBudget, prompt_tokens
from replicas.scheduler.plan import DecodePlan, StepPlan
from replicas.scheduler.tokens import stop_reason
from replicas.types import PdLeg, PdTransfer, SamplingParams
from tests.harness import Bench, ask, choice_of, fake_engine, finish_all

LONG = list(range(100, 140))  # 40 tokens


def shape(plan: StepPlan) -> tuple[list[int], int]:
    """Tokens of each prompt in the step, and how many requests make one more."""
    if isinstance(plan, DecodePlan):
        return [], len(plan.rows)
    return [len(row.token_ids) for row in plan.rows[: len(plan.rows) - plan.num_decode]], plan.num_decode


def test_a_running_request_makes_a_token_in_each_step_of_a_long_prompt() -> None:
    """Of the 16 tokens that a step has beside others, 15 are left to the prompt: with the last page whole, 16."""
    bench = Bench(page_size=4, chunked_prefill_size=32)
    bench.submit([1, 2, 3], max_new_tokens=6)
    bench.step()
    bench.submit(LONG, max_new_tokens=2)
    bench.run()
    assert [shape(plan) for plan in bench.plans] == [([3], 0), ([16], 1), ([16], 1), ([8], 1), ([], 2), ([], 1)]
    assert (bench.scheduler.counters["prefill_tokens"], bench.scheduler.counters["decode_tokens"]) == (43, 6)


def test_without_mixing_prompts_go_first_and_running_requests_wait() -> None:
    """SPEC F01, F08."""
    bench = Bench(page_size=4, chunked_prefill_size=16, mixed_steps=False)
    bench.submit([1, 2, 3], max_new_tokens=6)
    bench.step()
    bench.submit(LONG, max_new_tokens=2)
    bench.run()
    assert [shape(plan) for plan in bench.plans][:5] == [([3], 0), ([16], 0), ([16], 0), ([8], 0), ([], 2)]


class Forcing:
    """The guide of an output that is forced to the end."""

    error = None
    mask_s = due_s = 0.0
    is_pending = False

    def consume(self, token_id: int) -> bool:
        return True

    def forced(self) -> int:
        return 7

    def words(self) -> None:
        return None

    def drop(self) -> None:
        pass

    def begin_masks(self, others: object, *, apart: bool = False, first: bool = False) -> None:
        pass


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_long_prompt_gets_on_however_many_tokens_are_forced(page_size: int) -> None:
    bench = Bench(page_size=page_size, num_pages=1024 // page_size, chunked_prefill_size=16)
    writers = [bench.submit([number, 2, 3], max_new_tokens=100) for number in range(5)]
    for writer in writers:
        writer.guide = Forcing()
    for _ in range(3):
        bench.step()
    prompt = bench.submit(LONG, max_new_tokens=2)
    while prompt.num_output == 0:
        assert all(writer.finish is None for writer in writers)
        bench.step()


@pytest.mark.parametrize(
    ("page_size", "chunk", "running", "left"),
    [
        (1, 16, 0, 16), (1, 16, 3, 5), (1, 16, 4, 4), (1, 16, 300, 4), (1, 3, 2, 1),
        # up to a page: 255 tokens in pages of 128, rounded down, would be one page, half of the budget
        (16, 512, 1, 256), (128, 512, 1, 256), (16, 512, 17, 240), (16, 512, 300, 128), (128, 256, 100, 128),
        # half a chunk that is no page: a page would be more than the whole chunk, or half of it no longer half
        (128, 128, 1, 63), (16, 8, 1, 3),
    ],
)  # fmt: skip
def test_beside_others_a_prompt_gets_what_they_leave_of_half_a_chunk_and_a_quarter_at_least(
    page_size: int, chunk: int, running: int, left: int
) -> None:
    assert prompt_tokens(chunk, running, page_size=page_size) == left


def test_a_step_that_retracts_a_request_starts_no_prompt() -> None:
    """SPEC F11: the freed pages are for the running requests; the retracted one may come back a step later."""
    bench = Bench(num_pages=8, page_size=4, new_token_ratio=0.0, min_new_token_ratio=0.0)
    first = bench.submit([1, 2, 3, 4], max_new_tokens=20)
    bench.step()
    second = bench.submit([5, 6, 7, 8], max_new_tokens=20)
    while not second.num_retractions:
        bench.step()
    assert shape(bench.plans[-1]) == ([], 1)
    assert (first.state, second.state) == (ReqState.RUNNING, ReqState.WAITING)
    bench.run()


def test_an_engine_counts_a_mixed_step_as_one_of_prompts_with_all_its_rows() -> None:
    """The steps: 4 tokens of a; 6 of b beside one of a; then both decode."""
    engine, _ = fake_engine()
    engine.submit(ask("a", range(4), max_new_tokens=3))
    engine.step()
    engine.submit(ask("b", range(50, 56), max_new_tokens=2))
    finish_all(engine)
    stats, tallies = engine.stats(), engine.tallies()
    assert (stats.num_extend_steps, stats.num_mixed_steps, stats.num_decode_steps) == (2, 1, 1)
    assert (stats.prefill_tokens, stats.decode_tokens) == (10, 3)
    assert (tallies.prefill_batch_requests.total, tallies.prefill_batch_tokens.total) == (3, 11)


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
    for role, fetch, reserved in ((PdLeg.DECODE, None, 100), (PdLeg.PREFILL, None, 0), (PdLeg.PREFILL, ticket, 0)):
        asked.leg = Leg(kv_transfer=PdTransfer(leg=role, ticket=ticket, fetch=fetch))
        assert ratio.reserve(asked) == reserved


def test_a_stop_id_that_came_before_the_least_output_does_not_end_the_answer() -> None:
    """It comes where nothing else is allowed, so that it could not be masked."""
    sampling = SamplingParams(stop_token_ids=(2,), min_new_tokens=4)
    ended = [choice_of("a", range(4), sampling=sampling, resumed_ids=(*range(10, 10 + n), 2)) for n in range(5)]
    assert [stop_reason(req) is not None for req in ended] == [False, False, False, True, True]
