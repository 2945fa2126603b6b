"""A fetch between two engines over fake devices: the answer, and where pages are, whatever becomes of it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvtransfer.types import PdTicket, Prefix, SendReady
from replicas.cache.radix import RadixCache
from replicas.request import ReqState
from replicas.types import FinishReason, GenerateRequest, PdLeg, PdTransfer
from tests.fakes import continuation
from tests.harness import ask
from tests.pair import Pair

pytestmark = pytest.mark.model
PROMPT = list(range(100, 145))  # 45 tokens: 11 whole pages of 4, and 1 token


def warm(cached: Sequence[int] = PROMPT, salt: str = "") -> Pair:
    """The donor (``prefill``) has cached ``cached``."""
    pair = Pair()
    pair.prefill.submit(replace(ask("before", cached, max_new_tokens=1), cache_salt=salt))
    pair.run()
    return pair


def fetching(pair: Pair, request: GenerateRequest, *, end_len: int = 44, within_s: float = 60.0) -> GenerateRequest:
    pair.num_rooms += 1
    ticket = PdTicket(
        room=pair.num_rooms, generation=0, prefill=pair.prefill.service.address, end_len=end_len, within_s=within_s
    )
    return replace(request, kv_transfer=PdTransfer(leg=PdLeg.FETCH, ticket=ticket))


def quiet(pair: Pair) -> None:
    """Nothing is held, lent or in quarantine."""
    pair.run()
    assert pair.at_rest
    assert not pair.prefill.engine.kv.in_use
    assert not pair.decode.engine.kv.in_use


def test_fetched_pages_are_cached_and_the_rest_is_computed() -> None:
    pair = warm()
    pair.decode.submit(fetching(pair, ask("a", PROMPT)))
    pair.until(pair.decode, "a", ReqState.RECEIVING)
    assert pair.decode.pages()[3] == 11  # reserved: what is fetched, and not the row of the whole request
    pair.turn(pump=0)
    assert pair.prefill.engine.kv.in_use  # lent
    quiet(pair)
    assert pair.decode.ids("a") == continuation(PROMPT, 8)
    report = pair.decode.report("a")
    assert (report.transferred, report.num_pages) == (True, 11)
    assert pair.decode.deltas["a", 0][-1].usage.cached_tokens == 44


@pytest.mark.parametrize("cached", [PROMPT[:21], PROMPT[:0]])
def test_what_has_left_the_donor_is_computed(cached: list[int]) -> None:
    pair = warm(cached or [1, 2, 3, 4, 5])
    pair.decode.submit(fetching(pair, ask("a", PROMPT)))
    quiet(pair)
    assert pair.decode.ids("a") == continuation(PROMPT, 8)
    assert pair.decode.report("a").transferred == bool(cached)
    assert pair.decode.deltas["a", 0][-1].usage.cached_tokens == len(cached) // 4 * 4


@pytest.mark.parametrize(("salt", "num_tokens"), [("another", 0), ("own", 44)])
def test_no_page_crosses_a_salt(salt: str, num_tokens: int) -> None:
    pair = warm(salt=salt)
    pair.decode.submit(fetching(pair, replace(ask("a", PROMPT), cache_salt="own")))
    quiet(pair)
    assert pair.decode.report("a").reason == (None if num_tokens else "the pages are not cached here any more")
    assert pair.decode.deltas["a", 0][-1].usage.cached_tokens == num_tokens


def test_what_a_tenant_fetches_is_in_its_share_of_the_cache() -> None:
    pair = warm()
    pair.decode.submit(replace(fetching(pair, ask("a", PROMPT)), tenant="ours"))
    quiet(pair)
    cache = pair.decode.engine.kv.store.cache
    assert isinstance(cache, RadixCache)
    assert cache.match_prefix(np.array(PROMPT[:44], dtype=np.int32), "", count_hit=False).node.tenant == "ours"


def test_only_what_is_missing_is_fetched_and_nothing_if_all_is_here() -> None:
    pair = warm()
    pair.decode.submit(ask("first", PROMPT[:20], max_new_tokens=1))
    pair.run()
    pair.decode.submit(fetching(pair, ask("a", PROMPT)))
    quiet(pair)
    assert pair.decode.report("a").num_pages == 6
    pair.decode.submit(fetching(pair, ask("b", PROMPT)))
    quiet(pair)
    assert pair.decode.report("b").num_pages == 0
    assert not pair.decode.deltas["b", 0][0].token_ids  # told at once, not with its first token
    assert pair.decode.ids("a") == pair.decode.ids("b") == continuation(PROMPT, 8)


@pytest.mark.parametrize("how", ["failure", "abort", "deadline"])
@pytest.mark.parametrize("pumped", [0, 1, 2])
def test_a_fetch_that_ends_early_leaves_nothing_and_a_request_that_goes_on_is_computed(how: str, pumped: int) -> None:
    """What the donor had posted lands in pages that are in quarantine until it has."""
    pair = warm()
    request = fetching(pair, ask("a", PROMPT))
    pair.decode.submit(replace(request, deadline_s=50.0) if how == "deadline" else request)
    pair.until(pair.decode, "a", ReqState.RECEIVING, pump=0)
    for _ in range(pumped):
        pair.turn(pump=1)
    pair.wire.draining = False
    came = pair.wire.room(1).receiver_over
    if how == "abort":
        pair.decode.abort("a")
    elif how == "deadline":
        pair.clock.now_s += 100
    else:
        pair.wire.fail(1)
    for _ in range(3):
        pair.turn(pump=0)
    assert pair.decode.pages()[4] == (0 if came else 11)  # in quarantine
    pair.wire.resume_draining()
    quiet(pair)
    assert pair.decode.end("a") == (FinishReason.LENGTH if how == "failure" else FinishReason.ABORT)
    if how == "failure":
        assert pair.decode.ids("a") == continuation(PROMPT, 8)


def test_a_fetch_that_finds_no_pages_in_time_is_computed_in_its_turn() -> None:
    pair = warm()
    holder = ask("holder", range(60), max_new_tokens=60)
    pair.decode.submit(holder)
    pair.decode.submit(replace(ask("other", range(200, 260), max_new_tokens=60)))
    for _ in range(12):
        pair.turn()
    pair.decode.submit(fetching(pair, ask("a", PROMPT), within_s=0.05))
    pair.clock.now_s += 1.0
    quiet(pair)
    assert pair.decode.ids("a") == continuation(PROMPT, 8)


def test_a_donor_holds_back_while_its_requests_decode() -> None:
    pair, donor = Pair(), "its own"
    assert not pair.prefill.service.holds_back
    pair.prefill.submit(ask(donor, PROMPT, max_new_tokens=3))
    seen = list[tuple[int, bool]]()
    while pair.prefill.end(donor) is None:
        pair.turn()
        seen.append((len(pair.prefill.ids(donor)), pair.prefill.service.holds_back))
    assert {held for num_tokens, held in seen if num_tokens == 0} == {False}  # its prompt is computed
    assert {held for num_tokens, held in seen if num_tokens in (1, 2)} == {True}
    assert seen[-1] == (3, False)


def test_all_choices_find_what_the_first_one_fetched() -> None:
    pair = warm()
    pair.decode.submit(fetching(pair, ask("a", PROMPT, n=3)))
    quiet(pair)
    for index in range(3):
        assert pair.decode.ids("a", index) == continuation(PROMPT, 8)
        assert pair.decode.deltas["a", index][-1].usage.cached_tokens == 44


@pytest.mark.parametrize("how", ["arrives", "fails", "is aborted"])
def test_who_begins_with_what_is_being_fetched_waits_for_it_and_others_do_not(how: str) -> None:
    pair = warm()
    pair.decode.submit(fetching(pair, ask("a", PROMPT)))
    pair.until(pair.decode, "a", ReqState.RECEIVING, pump=0)
    pair.decode.submit(ask("follows", [*PROMPT, 7, 8]))
    pair.decode.submit(replace(ask("another's", [*PROMPT, 7, 8]), cache_salt="own"))
    pair.decode.submit(ask("shorter", PROMPT[:20]))
    for _ in range(20):
        pair.turn(pump=0)
    assert pair.decode.engine.find("follows").state is ReqState.WAITING
    assert pair.decode.ids("another's") == continuation([*PROMPT, 7, 8], 8)
    assert pair.decode.ids("shorter") == continuation(PROMPT[:20], 8)
    if how == "fails":
        pair.wire.fail(1)
    elif how == "is aborted":
        pair.decode.abort("a")
    quiet(pair)
    assert pair.decode.ids("follows") == continuation([*PROMPT, 7, 8], 8)
    came = pair.decode.deltas["follows", 0][-1].usage.cached_tokens
    assert came == {"arrives": 44, "fails": 36, "is aborted": 20}[how]  # all; "a"'s first chunk too; the shorter one's


@pytest.mark.parametrize("end_len", [0, 42, 48])
def test_a_ticket_that_does_not_fit_is_computed(end_len: int) -> None:
    pair = warm()
    pair.decode.submit(fetching(pair, ask("a", PROMPT), end_len=end_len))
    quiet(pair)
    assert not pair.decode.report("a").transferred
    assert pair.decode.ids("a") == continuation(PROMPT, 8)
    assert pair.wire.rooms == {}


def second_turn(pair: Pair, *, answered: int = 12) -> list[int]:
    """A first turn is handed over, and answered by the decode replica. Returns: the prompt of the next."""
    pair.ask("first", PROMPT[:21], max_new_tokens=answered)
    pair.run()
    return [*PROMPT[:21], *pair.decode.ids("first"), 7, 8, 9]


def ask_both(pair: Pair, rid: str, prompt: list[int], *, end_len: int, room: int = 99, **request: Any) -> None:
    """A request whose prefill leg fetches up to ``end_len`` from the decode replica."""
    prefill, decode = pair.legs(replace(ask(rid, prompt), **request))
    assert prefill.kv_transfer is not None
    ticket = PdTicket(
        room=room, generation=0, prefill=pair.decode.service.address, end_len=end_len, within_s=60.0
    )
    pair.prefill.submit(replace(prefill, kv_transfer=replace(prefill.kv_transfer, fetch=ticket)))
    pair.decode.submit(decode)


def test_a_prefill_leg_fetches_the_answer_before_it_hands_the_prompt_over() -> None:
    """Of 36 tokens the prefill replica has 20, and the decode replica 32."""
    pair = Pair()
    prompt = second_turn(pair)
    ask_both(pair, "second", prompt, end_len=32)
    pair.until(pair.prefill, "second", ReqState.RECEIVING)
    quiet(pair)
    assert pair.prefill.report("second").num_pages == 3
    assert pair.prefill.end("second") is FinishReason.HANDED_OFF
    assert pair.decode.ids("second") == continuation(prompt, 8)
    usage = pair.decode.deltas["second", 0][-1].usage
    assert usage.cached_tokens == 32
    assert pair.decode.report("second").num_pages == 1


@pytest.mark.parametrize("comes", [True, False])
def test_a_prefill_leg_waits_for_what_another_one_fetches(comes: bool) -> None:
    pair = Pair()
    prompt = second_turn(pair)
    ask_both(pair, "second", prompt, end_len=32)
    pair.until(pair.prefill, "second", ReqState.RECEIVING, pump=0)
    for leg, side in zip(pair.legs(ask("follows", [*prompt, 7])), (pair.prefill, pair.decode), strict=True):
        side.submit(leg)
    for _ in range(20):
        pair.turn(pump=0)
    follows = pair.prefill.engine.find("follows")
    assert follows is not None
    assert follows.state is ReqState.WAITING
    if not comes:
        pair.wire.fail(99)
    quiet(pair)
    for rid, of in (("second", prompt), ("follows", [*prompt, 7])):
        assert pair.decode.ids(rid) == continuation(of, 8)
    assert pair.decode.deltas["follows", 0][-1].usage.cached_tokens == (32 if comes else 36)


@pytest.mark.parametrize("how", ["failure", "a ticket that does not fit", "abort", "abort of the leg", "is here"])
def test_a_prefill_leg_whose_fetch_ends_otherwise_is_handed_over_all_the_same(how: str) -> None:
    pair = Pair()
    prompt = second_turn(pair)
    if how == "is here":
        pair.prefill.submit(ask("computed", prompt, max_new_tokens=1))
        pair.run()
    ask_both(pair, "second", prompt, end_len=31 if "ticket" in how else 32)
    if how == "failure" or "abort" in how:
        pair.until(pair.prefill, "second", ReqState.RECEIVING, pump=0)
        pair.wire.draining = False
        if "abort" in how:
            pair.prefill.abort("second")
        if how == "abort":
            pair.decode.abort("second")
        elif how == "failure":
            pair.wire.fail(99)
        for _ in range(3):
            pair.turn(pump=0)
        assert pair.prefill.pages()[4] == 3  # in quarantine, whatever its leg is now
        pair.wire.resume_draining()
    quiet(pair)
    if how == "abort":
        assert pair.decode.end("second") is FinishReason.ABORT
        return
    assert pair.decode.ids("second") == continuation(prompt, 8)
    if how == "abort of the leg":  # its receiver, which waits for it, computes the prompt
        assert pair.decode.report("second").reason == "aborted by the client"
        return
    assert pair.prefill.report("second").transferred == (how == "is here")
    assert pair.prefill.deltas["second", 0][0].finish is None  # told before the leg ends: the answer may end first
    assert pair.decode.report("second").transferred


def test_an_order_that_fails_within_a_step_takes_no_other_event_along(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = warm()
    pair.decode.submit(fetching(pair, ask("a", PROMPT)))
    pair.until(pair.decode, "a", ReqState.RECEIVING)
    pair.turn()  # the pages are here, and the engine has yet to be told
    service, transfers = pair.decode.service, pair.decode.engine._kv_transfers
    wrong = SendReady(room=9, first_page=0, prefix=Prefix(salt="", token_ids=b"odd"))
    assert transfers is not None
    with monkeypatch.context() as patch:
        events = [wrong, *service.drain_events()]
        patch.setattr(service, "drain_events", lambda: events)
        with pytest.raises(ValueError, match="buffer size"):
            transfers.lend()
    quiet(pair)
    assert pair.decode.report("a").transferred
