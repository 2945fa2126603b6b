"""Both roles over real schedulers and pools, joined by a wire in memory: what happens when nothing goes wrong."""

from dataclasses import replace

import pytest

from kvtransfer.types import PdTicket
from replicas.errors import InvalidRequest
from replicas.request import CachedTokens, ReqState
from replicas.types import FinishReason, PdLeg, PdTransfer
from tests.fakes import continuation
from tests.harness import ask, fake_engine
from tests.pair import Pair

pytestmark = pytest.mark.model
PROMPT = list(range(100, 145))  # 45 tokens: 11 whole pages of 4 and one token; chunks of 16, 16 and 13


def test_the_decode_side_says_what_one_engine_would_and_the_prefill_side_nothing() -> None:
    """SPEC H08, H16: row and pages first, then the K/V, then the tokens, the first of them from the other side."""
    pair = Pair()
    pair.ask("a", PROMPT)
    pair.run()
    assert pair.decode.ids("a") == continuation(PROMPT, 8)
    assert pair.decode.end("a") is FinishReason.LENGTH
    assert pair.prefill.ids("a") == []
    assert pair.prefill.end("a") is FinishReason.HANDED_OFF
    assert pair.decode.engine.stats().prefill_tokens == 0
    assert pair.prefill.engine.stats().prefill_tokens == 45
    assert pair.prefill.pages() == (53, 11, 0, 0, 0)  # both keep the prefix (SPEC H15)
    assert pair.decode.pages() == (51, 13, 0, 0, 0)  # 45 + 7 of the 8 tokens
    report = pair.decode.report("a")
    assert (report.transferred, report.reason, report.num_pages, report.num_bytes) == (True, None, 12, 1200)
    assert all(delta.kv_transfer is None for delta in pair.decode.deltas[("a", 0)][1:])


def test_pages_leave_chunk_by_chunk_and_the_states_are_those_of_the_life_cycle() -> None:
    """SPEC H08, H09: 16 of 45 tokens are four pages; the partial page goes with the last."""
    pair = Pair()
    pair.ask("a", PROMPT)
    assert (pair.prefill.state("a"), pair.decode.state("a")) == (ReqState.WAITING, ReqState.WAITING)
    waits = pair.prefill.engine.stats()
    assert (waits.num_handing_off, waits.num_waiting, waits.waiting_uncached_tokens) == (1, 0, 0)  # not opened yet
    waits = pair.decode.engine.stats()
    assert (waits.num_preallocating, waits.num_waiting, waits.waiting_uncached_tokens) == (1, 0, 0)
    pair.turn()  # granted, opened
    assert pair.decode.engine.stats().num_receiving == 1
    assert pair.decode.state("a") is ReqState.RECEIVING
    assert pair.decode.pages() == (52, 0, 0, 12, 0)
    room, sent, left = pair.wire.room(1), [], []
    for _ in range(3):
        pair.turn()
        sent.append((room.next_page, pair.prefill.state("a")))
        left.append(pair.prefill.engine.stats().waiting_uncached_tokens)
    assert left == [29, 13, 0]
    assert sent == [(4, ReqState.PREFILLING), (8, ReqState.PREFILLING), (12, ReqState.HANDING_OFF)]
    assert pair.prefill.pages() == (52, 0, 11, 1, 0)  # pinned until the receiver has them
    stats = pair.prefill.engine.stats()
    assert (stats.num_handing_off, stats.num_running, stats.num_waiting) == (1, 0, 0)
    pair.run()
    assert pair.decode.ids("a") == continuation(PROMPT, 8)


def test_each_prefill_leg_is_counted_in_one_state_at_a_time() -> None:
    """Three legs, and one may run at once: not opened, queued, computed, on their way; the states sum to those that
    have not ended."""
    pair = Pair(prefill={"max_running": 1})
    for number, rid in enumerate("abc"):
        pair.ask(rid, range(100 * number, 100 * number + 12), max_new_tokens=4)
    seen = []
    for _ in range(60):
        stats = pair.prefill.engine.stats()
        alive = sum(pair.prefill.state(rid) not in (None, ReqState.FINISHED) for rid in "abc")
        seen.append((stats.num_waiting, stats.num_running, stats.num_handing_off))
        assert sum(seen[-1]) == alive, seen
        pair.turn()
    assert seen[0] == (0, 0, 3)
    assert any(waiting and handing_off for waiting, _, handing_off in seen)
    assert seen[-1] == (0, 0, 0)


def test_what_the_prefill_side_had_goes_before_its_forward_and_counts_as_cached() -> None:
    """Its own cached prefix at once. Of 45 tokens 44 are there."""
    pair = Pair()
    pair.prefill.submit(ask("warm", PROMPT, max_new_tokens=1))
    pair.run()
    pair.ask("a", PROMPT)
    pair.turn()
    due = []
    before = pair.prefill.engine.steps.launch
    pair.prefill.engine.steps.launch = lambda plan: (due.append(pair.wire.room(1).next_page), before(plan))[1]
    pair.turn()
    assert due == [11]
    pair.run()
    assert pair.decode.ids("a") == continuation(PROMPT, 8)
    assert pair.decode.deltas[("a", 0)][0].usage.cached_tokens == 44


def test_the_answer_says_in_which_tier_the_prefill_side_had_what_it_reused() -> None:
    """SPEC H05. Of 44 tokens 20 lay in host memory and 8 in the store."""
    pair = Pair()
    pair.ask("a", PROMPT)
    pair.until(pair.prefill, "a", ReqState.PREFILLING)
    req = pair.prefill.engine.find("a")
    assert req is not None
    req.cached = CachedTokens(44, 20, 8)
    pair.run()
    usage = pair.decode.deltas[("a", 0)][-1].usage
    assert (usage.cached_tokens, usage.host_tokens, usage.store_tokens) == (44, 20, 8)


def test_no_peer_makes_an_answer_say_that_more_was_cached_than_its_prompt_has() -> None:
    assert CachedTokens.from_tiers({"device": 9, "store": 5, "host": 99}, prompt_len=12) == CachedTokens(12, 7, 5)
    assert CachedTokens.from_tiers({"device": 4}, prompt_len=12) == CachedTokens(4)  # of an older release


@pytest.mark.parametrize(("held", "num_pages"), [(20, 7), (44, 1)])
def test_what_the_decode_side_has_is_not_sent(held: int, num_pages: int) -> None:
    """SPEC H12: cached_prefix_len. Of 45 tokens 20 are 5 pages of 12, 44 are 11."""
    pair = Pair()
    pair.decode.submit(ask("warm", PROMPT[:held], max_new_tokens=1))
    pair.run()
    pair.ask("a", PROMPT)
    pair.run()
    assert pair.decode.ids("a") == continuation(PROMPT, 8)
    assert pair.decode.report("a").num_pages == num_pages


def test_nothing_but_the_first_token_is_sent_where_the_decode_side_has_every_page() -> None:
    """Notes, section 8: a last note without pages must still come."""
    pair = Pair()
    pair.decode.submit(ask("warm", PROMPT[:44], max_new_tokens=1))
    pair.run()
    pair.ask("a", PROMPT[:44])
    pair.run()
    assert pair.decode.ids("a") == continuation(PROMPT[:44], 8)
    assert (pair.decode.report("a").transferred, pair.decode.report("a").num_pages) == (True, 0)


def test_a_first_token_that_ends_the_answer_ends_it() -> None:
    first = continuation(PROMPT, 1)[0]
    pair = Pair()
    pair.ask("one", PROMPT, max_new_tokens=1)
    pair.ask("stop", PROMPT, stop_token_ids=(first,))
    pair.run()
    assert (pair.decode.ids("one"), pair.decode.end("one")) == ([first], FinishReason.LENGTH)
    assert (pair.decode.ids("stop"), pair.decode.end("stop")) == ([first], FinishReason.STOP)
    assert pair.prefill.end("stop") is FinishReason.HANDED_OFF


def test_the_choices_of_one_request_wait_for_the_prompt_and_share_it() -> None:
    """n > 1: choice 0 is handed off, the others find its prompt here; the prefill leg is one."""
    pair = Pair()
    pair.ask("a", PROMPT, n=3, max_new_tokens=2)
    pair.until(pair.decode, "a", ReqState.RECEIVING)
    assert pair.decode.engine.stats().num_waiting == 2
    pair.run()
    for index in range(3):
        assert pair.decode.ids("a", index) == continuation(PROMPT, 2)
        assert pair.decode.end("a", index) is FinishReason.LENGTH
    assert [pair.decode.deltas[("a", i)][0].kv_transfer is not None for i in range(3)] == [True, False, False]
    assert pair.decode.engine.stats().prefill_tokens == 2  # two tails of 45 - 44
    assert pair.prefill.end("a") is FinishReason.HANDED_OFF
    assert ("a", 1) not in pair.prefill.deltas


def test_a_request_that_was_resumed_is_handed_off_with_its_tokens() -> None:
    """{one replica, P+D} x {resumed}."""
    done = continuation(PROMPT, 3)
    pair = Pair()
    for side, request in zip(
        (pair.prefill, pair.decode), pair.legs(replace(ask("a", PROMPT), resumed_ids=tuple(done))), strict=True
    ):
        side.submit(request)
    pair.run()
    assert done + pair.decode.ids("a") == continuation(PROMPT, 8)
    assert pair.decode.deltas[("a", 0)][-1].usage.completion_tokens == 8
    assert pair.decode.report("a").transferred


def test_a_resumed_request_that_was_complete_ends_on_both_sides_at_once() -> None:
    pair = Pair()
    request = replace(ask("a", PROMPT), resumed_ids=tuple(continuation(PROMPT, 8)))
    for side, leg in zip((pair.prefill, pair.decode), pair.legs(request), strict=True):
        side.submit(leg)
    assert (pair.prefill.end("a"), pair.decode.end("a")) == (FinishReason.LENGTH, FinishReason.LENGTH)
    pair.run()
    assert pair.at_rest


@pytest.mark.parametrize("changes", [{"prompt_logprobs_from": 0}, {"max_new_tokens": 0}], ids=str)
def test_what_needs_a_forward_over_the_prompt_here_is_computed_here_and_refused_there(changes: dict[str, int]) -> None:
    pair = Pair()
    request = ask("a", PROMPT, **{k: v for k, v in changes.items() if k != "prompt_logprobs_from"})
    request = replace(request, prompt_logprobs_from=changes.get("prompt_logprobs_from"))
    prefill, decode = pair.legs(request)
    with pytest.raises(InvalidRequest, match="send the whole request to one replica"):
        pair.prefill.submit(prefill)
    pair.decode.submit(decode)
    pair.run()
    assert pair.decode.ids("a") == continuation(PROMPT, changes.get("max_new_tokens", 8))
    assert not pair.decode.report("a").transferred
    assert pair.wire.rooms == {}


def test_a_leg_is_refused_where_there_is_no_transfer_service() -> None:
    pair = Pair()
    prefill, _ = pair.legs(ask("a", PROMPT))
    engine, _ = fake_engine()
    with pytest.raises(InvalidRequest, match="takes part in no KV transfers"):
        engine.submit(prefill)
    assert engine.open_rids == []


@pytest.mark.parametrize("leg", list(PdLeg))
def test_a_room_that_is_open_here_is_refused_a_second_time(leg: PdLeg) -> None:
    pair = Pair()
    ticket = PdTicket(room=7, generation=0, prefill=pair.prefill.service.address, end_len=44, within_s=60.0)
    side = pair.prefill if leg is PdLeg.PREFILL else pair.decode
    side.submit(replace(ask("a", PROMPT), kv_transfer=PdTransfer(leg=leg, ticket=ticket)))
    again = replace(ask("b", PROMPT), kv_transfer=PdTransfer(leg=leg, ticket=replace(ticket, generation=1)))
    with pytest.raises(InvalidRequest, match="room 7 belongs to request a here"):
        side.submit(again)
    assert side.engine.open_rids == ["a"]


def test_an_engine_plays_both_sides_at_once() -> None:
    """Any engine can; requests of its own run between."""
    pair = Pair()
    pair.ask("there", PROMPT)
    ticket = PdTicket(room=99, generation=0, prefill=pair.decode.service.address)
    back = ask("back", PROMPT[5:])
    pair.decode.submit(replace(back, kv_transfer=PdTransfer(leg=PdLeg.PREFILL, ticket=ticket)))
    pair.prefill.submit(replace(back, kv_transfer=PdTransfer(leg=PdLeg.DECODE, ticket=ticket)))
    pair.decode.submit(ask("own", PROMPT[9:]))
    pair.run()
    assert pair.decode.ids("there") == continuation(PROMPT, 8)
    assert pair.prefill.ids("back") == continuation(PROMPT[5:], 8)
    assert pair.decode.ids("own") == continuation(PROMPT[9:], 8)


def test_the_cache_is_not_flushed_under_a_peer() -> None:
    pair = Pair()
    pair.wire.draining = False
    pair.ask("a", PROMPT)
    pair.until(pair.prefill, "a", ReqState.HANDING_OFF, pump=1)
    pair.wire.fail(1)
    pair.turn()
    assert pair.prefill.engine.open_rids == []
    assert not pair.prefill.engine.flush_cache()
    pair.wire.resume_draining()
    pair.run()
    assert pair.prefill.engine.flush_cache()
    assert pair.prefill.pages() == (64, 0, 0, 0, 0)


def test_a_kv_transfer_that_fails_is_reported_before_the_prompt_is_computed() -> None:
    """The router needs the report at once: from then on the prefill replica does not matter."""
    pair = Pair(chunked_prefill_size=16)
    pair.ask("a", PROMPT)
    pair.until(pair.decode, "a", ReqState.RECEIVING)
    pair.wire.fail(1, "cut")
    pair.until(pair.decode, "a", ReqState.PREFILLING)
    [failed] = pair.decode.deltas[("a", 0)]
    assert failed.is_report
    assert failed.kv_transfer is not None
    assert (failed.kv_transfer.transferred, failed.kv_transfer.reason) == (False, "cut")
    pair.run()
    assert all(delta.kv_transfer is None for delta in pair.decode.deltas[("a", 0)][1:])
    assert pair.decode.end("a") is FinishReason.LENGTH
