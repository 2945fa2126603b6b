"""Every state of both legs x {abort, deadline, failure, an answer after the end}: the answers, and where pages are."""

from dataclasses import replace

import numpy as np
import pytest

from kvtransfer.types import SendReady
from replicas.errors import Fault
from replicas.request import ReqState
from replicas.scheduler.plan import BROKEN, StepPlan, StepResult
from replicas.scheduler.rounds import PATIENCE_S
from replicas.types import FinishReason
from tests.fakes import continuation
from tests.harness import ask, at_once
from tests.pair import Pair, Side

pytestmark = pytest.mark.model
PROMPT = list(range(100, 145))  # 45 tokens: 12 pages of 4, three chunks
ENDS = ["abort", "deadline", "failure"]


def bring(pair: Pair, side: Side, state: str) -> None:
    """Request "a" of ``side`` into ``state``, writes that it has posted being still under way."""
    match state:
        case "parked":
            pair.wire.muted.add(1)
            pair.turn()
        case "queued":  # the receiver has opened, the step budget is another's
            pair.prefill.submit(ask("other", range(60), max_new_tokens=1))
            pair.turn()
            pair.wire.pump()
            pair.turn(pump=0)
            assert pair.prefill.state("a") is ReqState.WAITING
        case "prealloc":
            pass
        case _:
            pair.until(side, "a", ReqState(state), pump=1)


def end(pair: Pair, side: Side, how: str) -> None:
    if how == "abort":
        side.abort("a")
    elif how == "deadline":
        pair.clock.now_s += 100
    else:
        pair.wire.fail(1)


def started(how: str) -> Pair:
    pair = Pair()
    prefill, decode = pair.legs(ask("a", PROMPT))
    if how == "deadline":  # on one side only: the other learns of it from its peer
        prefill, decode = replace(prefill, deadline_s=50.0), replace(decode, deadline_s=50.0)
    pair.prefill.submit(prefill)
    pair.decode.submit(decode)
    return pair


def arrived() -> Pair:
    """All K/V of request "a" has come; the decode engine has not taken the event."""
    pair = Pair()
    pair.ask("a", PROMPT)
    pair.until(pair.prefill, "a", ReqState.HANDING_OFF)
    return pair


@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize("state", ["parked", "queued", "prefilling", "handing_off"])
def test_a_prefill_leg_that_ends_early_is_answered_at_once_and_its_pages_stay_until_all_is_quiet(
    state: str, how: str
) -> None:
    """SPEC H19: no page is freed while a transfer references it."""
    pair = started(how)
    bring(pair, pair.prefill, state)
    pair.wire.draining = False
    held = sum(pair.prefill.pages()[2:]) if state != "queued" else 0
    end(pair, pair.prefill, how)
    pair.turn(pump=0)
    expected = FinishReason.ERROR if how == "failure" else FinishReason.ABORT
    assert pair.prefill.end("a") is expected
    assert pair.prefill.engine.stats().num_handing_off == 1
    if state != "queued":  # another runs there, whose pages change
        assert sum(pair.prefill.pages()[2:]) == held
    for _ in range(20):
        pair.turn()
    if state != "queued":
        assert sum(pair.prefill.pages()[2:]) == held
    pair.wire.resume_draining()
    pair.run()
    assert pair.prefill.engine.stats().num_handing_off == 0
    assert pair.at_rest
    if how != "deadline":
        assert pair.decode.ids("a") == continuation(PROMPT, 8)  # computed there, or received before
        assert pair.decode.end("a") is FinishReason.LENGTH


@pytest.mark.parametrize("how", ENDS)
def test_a_decode_leg_whose_kv_transfer_fails_is_computed_here_and_one_that_is_gone_leaves_quarantine(how: str) -> None:
    """SPEC H19: the pages of a failed room are in quarantine while the peer may write to them."""
    pair = started(how)
    bring(pair, pair.decode, "receiving")
    pair.wire.draining = False
    end(pair, pair.decode, how)
    pair.turn(pump=0)
    assert pair.decode.pages()[4] == 12
    for _ in range(30):
        pair.turn()
    assert pair.decode.pages()[4] == 12  # never by time alone
    if how == "failure":
        assert pair.decode.ids("a") == continuation(PROMPT, 8)
        report = pair.decode.report("a")
        assert (report.transferred, report.reason) == (False, "the wire broke")
    else:
        assert pair.decode.end("a") is FinishReason.ABORT
    pair.wire.resume_draining()
    pair.run()
    assert pair.at_rest


@pytest.mark.parametrize("how", ["abort", "deadline"])
def test_a_decode_leg_that_waits_for_its_grant_just_ends(how: str) -> None:
    pair = started(how)
    assert pair.decode.engine.scheduler.queues.prealloc
    if how == "deadline":
        pair.clock.now_s += 100
    else:
        pair.decode.abort("a")
    pair.decode.step()
    assert pair.decode.end("a") is FinishReason.ABORT
    assert not pair.decode.engine.has_work
    assert pair.wire.room(1).receiver is None
    assert pair.decode.pages() == (64, 0, 0, 0, 0)


def test_a_decode_leg_that_waits_too_long_for_its_grant_is_computed_here_and_its_peer_let_go() -> None:
    """Row and pages are another's for longer than the 180 s that the terms allow."""
    pair = Pair(decode={"num_pages": 20})
    pair.decode.submit(ask("other", range(60), max_new_tokens=12))
    pair.turn()
    pair.ask("a", PROMPT)
    pair.clock.now_s += 179.9
    pair.turn(pump=0)
    assert pair.decode.state("a") is ReqState.WAITING
    assert ("a", 0) not in pair.decode.deltas
    pair.clock.now_s += 0.1
    pair.turn()
    pair.turn()
    report = pair.decode.report("a")
    assert (report.transferred, report.wait_s) == (False, 0.0)
    assert report.reason == "no row and pages for it on the decode side within 180 s"
    assert report.grant_s == pytest.approx(180, abs=0.1)
    order = pair.wire.room(1).order
    assert order is not None
    assert (order.first_page, len(order.pages)) == (len(PROMPT) // 4, 0)  # it asks for no page
    assert pair.prefill.end("a") is FinishReason.ERROR  # long before pages come free here
    pair.run()
    assert pair.decode.ids("a") == continuation(PROMPT, 8)
    assert pair.decode.ids("other") == continuation(list(range(60)), 12)
    assert pair.at_rest
    assert pair.prefill.engine.stats().num_handing_off == 0


def test_a_first_token_that_cannot_be_chosen_fails_the_room_and_the_other_side_computes() -> None:
    pair = Pair()
    device = pair.prefill.engine.steps.launch

    def broken(plan: StepPlan) -> StepResult:
        result = device(plan).result()
        return StepResult(token_ids=np.full_like(result.token_ids, BROKEN))

    pair.prefill.engine.steps.launch = at_once(broken)
    pair.ask("a", PROMPT)
    pair.run()
    assert pair.prefill.end("a") is FinishReason.ERROR
    assert pair.decode.ids("a") == continuation(PROMPT, 8)
    report = pair.decode.report("a")
    assert "NaN" in (report.reason or "")
    assert pair.prefill.at_rest


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rid": "b"}, "K/V of b"),
        ({"prompt_len": 44}, "of 44 came"),
        ({"token_range": (4, 45)}, r"\(4, 45\)"),
        ({"first_token": 1000}, "token 1000 is not in the vocabulary of 1000"),
        ({"first_token": -1}, "token -1"),
    ],
    ids=str,
)
def test_a_meta_that_is_not_of_this_request_is_not_believed(changes: dict[str, object], reason: str) -> None:
    """SPEC H12: mismatch is refused, not reinterpreted."""
    pair = arrived()
    pair.decode.service.change(**changes)
    pair.run()
    assert pair.decode.ids("a") == continuation(PROMPT, 8)
    report = pair.decode.report("a")
    assert report.transferred is False
    assert reason.replace("\\", "") in (report.reason or "")
    assert pair.decode.engine.stats().prefill_tokens == 45
    assert pair.decode.at_rest


@pytest.mark.parametrize("first_token", [0, 999])
def test_the_first_and_the_last_token_of_the_vocabulary_are_believed(first_token: int) -> None:
    pair = arrived()
    pair.decode.service.change(first_token=first_token)
    pair.run()
    assert pair.decode.ids("a") == [first_token, *continuation([*PROMPT, first_token], 7)]


def test_a_first_token_without_the_logprob_that_is_wanted_is_made_again() -> None:
    pair = Pair()
    request = replace(ask("a", PROMPT), return_logprobs=True)
    prefill, decode = pair.legs(request)
    pair.prefill.submit(replace(prefill, return_logprobs=False))
    pair.decode.submit(decode)
    pair.run()
    report = pair.decode.report("a")
    assert "without its logprob" in (report.reason or "")
    assert pair.decode.ids("a") == continuation(PROMPT, 8)


@pytest.mark.parametrize("first_page", [-1, 12])
def test_a_receiver_that_asks_for_pages_that_are_not_there_is_refused(first_page: int) -> None:
    pair = Pair()
    pair.ask("a", PROMPT)
    pair.turn()
    assert pair.prefill.service.waits(SendReady)
    pair.prefill.service.change(first_page=first_page)
    pair.run()
    assert pair.prefill.end("a") is FinishReason.ERROR
    assert pair.decode.ids("a") == continuation(PROMPT, 8)


def test_the_other_choices_go_on_when_the_kv_transfer_fails_or_choice_0_ends() -> None:
    pair = Pair()
    pair.ask("a", PROMPT, n=3, max_new_tokens=2)
    pair.until(pair.decode, "a", ReqState.RECEIVING)
    pair.wire.fail(1)
    pair.run()
    assert [pair.decode.ids("a", i) for i in range(3)] == [continuation(PROMPT, 2)] * 3
    assert pair.decode.engine.stats().prefill_tokens == 47  # the prompt once, two tails
    pair.ask("b", PROMPT[::-1], n=2)
    pair.until(pair.decode, "b", ReqState.RECEIVING)
    pair.decode.abort("b")
    assert [pair.decode.end("b", i) for i in range(2)] == [FinishReason.ABORT] * 2
    pair.run()
    assert pair.decode.at_rest


def test_the_other_choices_go_on_when_choice_0_alone_runs_out_of_time() -> None:
    """Each choice has a clock of its own; here choice 0 arrived a second before the others. They compute the prompt."""
    pair = Pair()
    _, decode = pair.legs(replace(ask("a", PROMPT, n=3, max_new_tokens=2), deadline_s=50.0))
    arrivals = iter((0.0, 1.0, 1.0))
    pair.decode.engine._clock = lambda: next(arrivals)
    pair.decode.submit(decode)
    pair.decode.engine._clock = pair.clock
    pair.until(pair.decode, "a", ReqState.RECEIVING)
    pair.clock.now_s = 50.5
    pair.turn()
    assert pair.decode.end("a") is FinishReason.ABORT
    assert [pair.decode.end("a", i) for i in (1, 2)] == [None, None]
    pair.run()
    assert [pair.decode.ids("a", i) for i in (1, 2)] == [continuation(PROMPT, 2)] * 2
    assert pair.decode.at_rest


def test_a_prefill_leg_in_the_middle_of_its_prompt_does_not_give_way_the_last_that_runs_does() -> None:
    """SPEC F11: its pages may be on their way, so that it is never retracted."""
    pair = Pair()
    pair.prefill.submit(ask("own", [1, 2], max_new_tokens=30))
    pair.prefill.step()
    pair.ask("a", PROMPT)
    pair.until(pair.prefill, "a", ReqState.PREFILLING)
    own = pair.prefill.engine.find("own")
    assert own is not None
    assert own.computed_len == 4  # its next token needs a page
    pages = pair.prefill.engine.kv._allocator
    stolen = pages.alloc(pages.num_free, rid="thief")
    leg = pair.prefill.engine.find("a")
    assert leg is not None
    computed = leg.computed_len
    pair.prefill.step()
    assert (pair.prefill.state("own"), pair.prefill.state("a")) == (ReqState.WAITING, ReqState.PREFILLING)
    assert leg.computed_len == computed
    pages.free(stolen)
    pair.run()
    assert pair.prefill.ids("own") == continuation([1, 2], 30)
    assert pair.prefill.end("a") is FinishReason.HANDED_OFF
    assert pair.decode.ids("a") == continuation(PROMPT, 8)


def cramped() -> Pair:
    """A decode side of 24 pages, 18 of them in quarantine until its peer lets go, which it does not."""
    pair = Pair(decode={"num_pages": 24})
    pair.ask("lost", range(70))
    pair.until(pair.decode, "lost", ReqState.RECEIVING, pump=1)
    pair.wire.draining = False
    pair.decode.abort("lost")
    pair.turn(pump=0)
    assert pair.decode.pages()[4] == 18
    return pair


@pytest.mark.parametrize("leg", [False, True], ids=["whole", "decode leg"])
def test_a_request_that_only_quarantine_keeps_out_is_refused_after_a_while_and_blocks_no_other(leg: bool) -> None:
    """30 tokens fit 24 pages, but not the 6 that are left; no request holds pages that could come back. Requests behind
    it go on. When the peer has let go, the same request is served."""
    pair = cramped()
    submit = pair.ask if leg else lambda rid, prompt: pair.decode.submit(ask(rid, prompt))
    submit("big", range(200, 230))
    pair.turn(pump=0)
    assert pair.decode.end("big") is None  # a peer that lives lets go soon
    pair.clock.now_s += PATIENCE_S
    pair.turn(pump=0)
    finish = pair.decode.deltas[("big", 0)][-1].finish
    assert finish is not None
    assert (finish.reason, finish.fault, finish.retry_as) == (FinishReason.ERROR, Fault.UNAVAILABLE, "overloaded")
    assert "18 pages are in quarantine" in (finish.message or "")
    submit("next", range(300, 330))
    pair.decode.submit(ask("small", [3, 4, 5]))
    for _ in range(20):
        pair.clock.now_s += PATIENCE_S / 10
        pair.turn(pump=0)
    assert pair.decode.end("next") is FinishReason.ERROR
    assert pair.decode.ids("small") == continuation([3, 4, 5], 8)
    assert not pair.decode.engine.has_work  # nothing is left to look for
    pair.wire.resume_draining()
    for rid in ("big", "next") if leg else ():
        pair.prefill.abort(rid)
    pair.run()
    pair.decode.submit(ask("again", range(200, 230)))
    pair.run()
    assert pair.decode.ids("again") == continuation(list(range(200, 230)), 8)
    assert pair.decode.at_rest


def failed_in_14_pages() -> Pair:
    """A decode side of 14 pages, 12 of them in quarantine of a room that has failed."""
    pair = Pair(decode={"num_pages": 14})
    pair.wire.draining = False
    pair.ask("a", PROMPT)
    pair.until(pair.decode, "a", ReqState.RECEIVING, pump=1)
    pair.wire.fail(1)
    return pair


def test_a_request_whose_own_pages_are_in_quarantine_is_refused_where_the_rest_is_too_little() -> None:
    """12 of 14 pages are lost to its room; the two that are left never were enough for it."""
    pair = failed_in_14_pages()
    for _ in range(20):
        pair.clock.now_s += PATIENCE_S / 10
        pair.turn()
    assert pair.decode.end("a") is FinishReason.ERROR
    assert pair.decode.pages() == (2, 0, 0, 0, 12)
    pair.wire.resume_draining()
    pair.run()
    pair.decode.submit(ask("again", PROMPT))
    pair.run()
    assert pair.decode.ids("again") == continuation(PROMPT, 8)


def test_a_request_waits_for_pages_that_others_hold_beside_the_quarantine() -> None:
    """The same 30 tokens while another runs, whose pages might be enough: none is refused before it ends."""
    pair = cramped()
    pair.decode.submit(ask("runs", [1, 2], max_new_tokens=9))
    pair.turn(pump=0)
    pair.decode.submit(ask("big", range(200, 230)))
    while pair.decode.end("runs") is None:
        assert pair.decode.end("big") is None
        pair.clock.now_s += PATIENCE_S
        pair.turn(pump=0)
    pair.turn(pump=0)
    pair.clock.now_s += PATIENCE_S
    pair.turn(pump=0)
    assert pair.decode.end("big") is FinishReason.ERROR


def test_a_request_whose_own_pages_come_back_soon_is_computed_here() -> None:
    """As above, but the peer lets go half of the patience later."""
    pair = failed_in_14_pages()
    pair.turn()
    pair.clock.now_s += PATIENCE_S / 2
    pair.turn()
    pair.wire.resume_draining()
    pair.run()
    assert pair.decode.ids("a") == continuation(PROMPT, 8)


def test_a_decode_leg_without_a_grant_is_given_back_and_its_prefill_leg_never_begins() -> None:
    pair = Pair(decode={"max_running": 1})
    pair.ask("runs", [1, 2, 3], max_new_tokens=20)
    pair.until(pair.decode, "runs", ReqState.RUNNING)
    pair.ask("waits", [4, 5, 6], max_new_tokens=4)
    pair.turn()
    assert pair.decode.engine.take_back("runs") == []
    pair.decode.take(pair.decode.engine.take_back("waits"))
    assert pair.decode.end("waits") is FinishReason.ABORT
    pair.prefill.abort("waits")  # as the router does with the rest of the try
    pair.until(pair.decode, "runs", None)
    assert (pair.prefill.ids("waits"), pair.decode.ids("waits")) == ([], [])
    assert pair.prefill.at_rest
    assert pair.decode.at_rest


def test_a_decode_leg_with_a_grant_is_kept() -> None:
    pair = Pair()
    pair.ask("asks", [1, 2, 3], max_new_tokens=4)
    pair.until(pair.decode, "asks", ReqState.RECEIVING, pump=0)
    assert pair.decode.engine.take_back("asks") == []
    pair.until(pair.decode, "asks", None)
    assert len(pair.decode.ids("asks")) == 4
