"""A request on two replicas: complete and equal answers whichever replica dies when,
each failure with its reason, and no leak.

SPEC H06, H08, H19.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from deployments.channel.channel_client import ChannelClient
from deployments.dispatch.attempt import HoldOut, TakenBack
from deployments.dispatch.dispatcher import NO_HINTS, query_of
from deployments.dispatch.leases import ReplicaGone
from deployments.http.admin import load_of
from deployments.http.arrivals import header_part
from deployments.record.route_forms import kv_transfer_body, pair_body, record_body
from deployments.record.route_log import Try
from replicas.errors import Fault, Overloaded, StepFailed
from replicas.types import Finish, FinishReason, GenerateRequest, PdLeg, PdTransferReport, RetryAs, TokenDelta
from routing.migration import Migration, Waiting
from routing.types import Ending, NoReplica, Pair, PairReason, Role, RouteOutcome
from tests.harness import Clock
from tests.unit.deployments.in_process import House, ScriptedReplica
from tests.unit.deployments.pair_in_process import Desks, PdTransferReplica
from tests.unit.deployments.sample_values import ask, ids, stats
from tests.waiting import until_async

WHOLE = list(range(1000, 1008))


class Pairs:
    """A house whose replicas hand over whatever may be handed over."""

    def __init__(self) -> None:
        self.house = House(always_kv_transfer=True)
        self.desks = Desks()

    def prefill(self, replica_id: str = "p0", **how: Any) -> PdTransferReplica:
        return PdTransferReplica(replica_id, Role.PREFILL, self.desks, **how)

    def decode(self, replica_id: str = "d0", **how: Any) -> PdTransferReplica:
        return PdTransferReplica(replica_id, Role.DECODE, self.desks, **how)

    async def add(self, *replicas: ScriptedReplica) -> None:
        await self.house.ready(*replicas)

    async def collect(self, **options: Any) -> list[TokenDelta]:
        return await self.house.collect(**options)

    async def begin(self, p: PdTransferReplica, d: PdTransferReplica) -> "asyncio.Task[list[TokenDelta]]":
        """Add both, and a request whose prompt waits at ``p``."""
        p.prefill_hold.clear()
        await self.add(p, d)
        pending = asyncio.create_task(self.collect())
        await until_async(lambda: bool(p.requests and d.requests))
        return pending

    @property
    def tries(self) -> list[Try]:
        [record] = self.house.dispatcher.routes.recent()
        return record.tries

    @property
    def pair(self) -> Pair:
        """How the last try's replicas were chosen."""
        pair = self.tries[-1].decision.pair
        assert pair is not None
        return pair


@pytest.fixture
async def pairs() -> AsyncIterator[Pairs]:
    pairs = Pairs()
    async with pairs.house:
        yield pairs
        await until_async(lambda: all(future.done() for future in pairs.desks.rooms.values()))
    pairs.desks.check()


def leg(request: GenerateRequest) -> PdLeg | None:
    return None if request.kv_transfer is None else request.kv_transfer.leg


def room(request: GenerateRequest) -> int:
    assert request.kv_transfer is not None
    return request.kv_transfer.ticket.room


async def test_both_replicas_get_the_request_with_one_ticket_and_the_decode_leg_streams(pairs: Pairs) -> None:
    p, d = pairs.prefill(), pairs.decode()
    await pairs.add(p, d)
    assert ids(await pairs.collect()) == WHOLE
    [to_p], [to_d] = p.requests, d.requests
    assert (leg(to_p), leg(to_d)) == (PdLeg.PREFILL, PdLeg.DECODE)
    assert to_p.kv_transfer is not None
    assert to_d.kv_transfer is not None
    assert to_p.kv_transfer.ticket == to_d.kv_transfer.ticket
    assert (to_p.rid, to_p.kv_transfer.ticket.generation, to_p.kv_transfer.ticket.prefill) == (to_d.rid, 0, p.address)


async def test_the_record_tells_the_pair_the_report_and_how_the_prefill_leg_ended(pairs: Pairs) -> None:
    await pairs.add(pairs.prefill(), pairs.decode())
    await pairs.collect()
    [record] = pairs.house.dispatcher.routes.recent()
    [only] = record.tries
    assert only.kv_transfer is not None
    assert (only.kv_transfer.transferred, only.kv_transfer.num_pages, only.prefill_end) == (True, 2, "handed off")
    assert header_part(record) == (
        "replica=d0; overlap_predicted=0; overlap_actual=0; policy=pd_pair; reason=only_candidate; tries=1; "
        "uncached=never_seen; prefill=p0; pair=kv_transfer_always; kv_transfer=ok"
    )
    body = record_body(record, router_id="r")["tries"][0]
    assert body["kv_transfer"]["num_bytes"] == 2 << 20
    assert (body["pair"]["prefill"], body["pair"]["decode"], body["pair"]["best_prefill"]) == ("p0", "d0", "p0")
    assert [each["replica"] for each in body["candidates"] if each["chosen"]] == ["p0", "d0"]
    assert pairs.house.router.link.bytes_per_s == pytest.approx((2 << 20) / 0.01)
    dry = pair_body(pairs.house.dispatcher.explain_only(query_of(ask(), NO_HINTS)))["pair"]
    assert (dry["prefill"], dry["decode"], dry["decode_replicas"][0]["replica_id"]) == ("p0", "d0", "d0")


class LateWord(PdTransferReplica):
    """A prefill replica whose own word of the end comes after ``prefill_hold``: it is in a long step."""

    async def _hand_over(self, client: ChannelClient, request: GenerateRequest, room: int) -> None:
        self.desks.settle(room, came=True)
        await super()._hand_over(client, request, room)


async def test_a_prefill_leg_that_has_handed_over_is_left_to_end_by_itself(pairs: Pairs) -> None:
    p, d = LateWord("p0", Role.PREFILL, pairs.desks), pairs.decode()
    p.prefill_hold.clear()
    await pairs.add(p, d)
    assert ids(await pairs.collect()) == WHOLE
    assert pairs.tries[0].prefill_end == "handed off, says the decode replica: the try ended first"
    p.prefill_hold.set()
    await until_async(lambda: not pairs.house.dispatcher._holder._ending)
    assert p.num_aborted == 0


@pytest.mark.parametrize("others", [0, 1])
async def test_a_prefill_replica_that_dies_while_the_request_queues_there_costs_only_time(
    pairs: Pairs, others: int
) -> None:
    """With another one the prompt goes there, else the decode replica computes it."""
    p, d = pairs.prefill(), pairs.decode()
    pending = await pairs.begin(p, d)
    if others:
        await pairs.add(pairs.prefill("p1"))
    p.die()
    assert ids(await pending) == WHOLE
    first, second = pairs.tries
    assert first.failure is not None
    assert first.failure.startswith("PrefillLost: replica p0, which was to compute the prompt: ReplicaGone: ")
    assert (first.decision.replica_id, second.decision.replica_id) == ("d0", "d0")
    assert second.decision.prefill_id == ("p1" if others else None)
    assert d.num_aborted == 1
    [retry] = pairs.house.dispatcher.retries
    assert (retry.replica_id, retry.num_delivered) == ("p0", 0)
    if others:
        assert room(d.requests[0]) != room(d.requests[1])
    else:
        assert leg(d.requests[1]) is None


async def test_a_prefill_replica_that_refuses_is_passed_over(pairs: Pairs) -> None:
    full = pairs.prefill("p0", refuse=Overloaded("full"))
    await pairs.add(full, pairs.prefill("p1"), pairs.decode())
    for _ in range(4):  # the draw between the two falls on each
        pairs.house.dispatcher.routes._records.clear()
        assert ids(await pairs.collect()) == WHOLE
        assert pairs.tries[-1].decision.prefill_id == "p1"
    assert full.requests
    assert all("Overloaded: full" in retry.reason for retry in pairs.house.dispatcher.retries)


@pytest.mark.parametrize(
    ("gauges", "load"),
    [
        ({"num_running": 2, "num_waiting": 1, "num_preallocating": 3, "num_receiving": 4}, 10),
        ({"num_running": 1, "num_waiting": 1, "num_handing_off": 5}, 7),  # a leg is in one state at a time
    ],
)
def test_legs_of_kv_transfers_are_load_in_the_server_info(gauges: dict[str, int], load: int) -> None:
    assert load_of(stats(**gauges)) == load


async def test_a_prefill_engine_that_gives_up_does_not_end_the_try(pairs: Pairs) -> None:
    """What the engines tell each other needs no router: the decode side has fallen back by itself."""
    p, d = pairs.prefill(leg_ends=Finish(reason=FinishReason.ERROR, message="not opened")), pairs.decode()
    await pairs.add(p, d)
    assert ids(await pairs.collect()) == WHOLE
    [only] = pairs.tries
    assert only.kv_transfer is not None
    assert (only.kv_transfer.transferred, only.kv_transfer.reason, only.prefill_end) == (
        False, "the peer failed", "error: not opened",
    )  # fmt: skip
    assert only.outcome is not None
    assert only.outcome.kv_transfer_failed


@pytest.mark.parametrize("retry_as", ["step_failed", "died_in_step"])
async def test_a_prompt_that_fails_on_the_prefill_side_and_on_the_decode_side_is_not_tried_on_a_third(
    pairs: Pairs, retry_as: RetryAs
) -> None:
    """Where the prefill engine goes on, the decode side computes the prompt in the same try; else another try does."""
    fails = Finish(reason=FinishReason.ERROR, message="no such index", fault=Fault.INTERNAL, retry_as=retry_as)
    p, d, third = pairs.prefill(leg_ends=fails), pairs.decode(), pairs.decode("d1")
    d.finish = third.finish = fails
    await pairs.add(p, d, third)
    with pytest.raises(StepFailed, match="on replica p0 and on d"):
        await pairs.collect()
    assert len(pairs.tries) == (1 if retry_as == "step_failed" else 2)


async def test_a_prefill_engine_that_crashes_ends_the_try(pairs: Pairs) -> None:
    crash = Finish(reason=FinishReason.ERROR, message="a step crashed", retry_as="engine_dead")
    p, d = pairs.prefill(leg_ends=crash), pairs.decode()
    await pairs.add(p, d)
    assert ids(await pairs.collect()) == WHOLE
    assert "EngineDead: a step crashed" in pairs.house.dispatcher.retries[0].reason
    assert leg(d.requests[-1]) is None


async def test_the_death_of_prefill_after_the_decode_replica_fell_back_takes_nothing_from_it(pairs: Pairs) -> None:
    """It computes the prompt, and no token has come yet; the client hears of tokens only."""
    p, d = pairs.prefill(), pairs.decode()
    d.hold.clear()
    pending = await pairs.begin(p, d)
    pairs.desks.settle(room(d.requests[0]), came=False)
    await until_async(lambda: p.num_aborted == 1)
    p.die()
    await until_async(lambda: pairs.tries[0].prefill_end is not None)
    d.hold.set()
    deltas = await pending
    assert ids(deltas) == WHOLE
    assert all(delta.token_ids for delta in deltas)
    assert (pairs.house.dispatcher.num_retries, len(d.requests), d.num_aborted) == (0, 1, 0)


@pytest.mark.parametrize("reason", [FinishReason.ERROR, FinishReason.ABORT])
async def test_a_decode_leg_that_ends_before_its_pages_came_ends_the_prefill_leg(
    pairs: Pairs, reason: FinishReason
) -> None:
    """Its deadline passed, or its logits were broken: an answer, not a try that failed."""
    p, d = pairs.prefill(), pairs.decode(gives_up=Finish(reason=reason, message="late"))
    [last] = await (await pairs.begin(p, d))
    assert last.finish is not None
    assert last.finish.reason is reason
    await until_async(lambda: p.num_aborted == 1)
    assert pairs.tries[0].prefill_end == "not known: the try ended first"


async def test_a_prefill_replica_whose_kv_transfers_fail_is_not_asked_again_at_once(pairs: Pairs) -> None:
    """It is alive and reports, but its pages do not come: a wrong address, or no way between the two."""
    p, d = pairs.prefill(leg_ends=Finish(reason=FinishReason.ERROR, message="not opened")), pairs.decode()
    await pairs.add(p, d)
    for rid in ("a.0-me", "b.0-me", "c.0-me"):
        assert ids(await pairs.collect(rid=rid)) == WHOLE
    assert (len(p.requests), len(d.requests)) == (1, 3)
    first, _, last = [record.tries[0] for record in pairs.house.dispatcher.routes.recent()]
    assert (first.decision.prefill_id, last.decision.prefill_id) == ("p0", None)
    assert kv_transfer_body(first)["held_out"] == {}
    assert "a KV transfer from it failed (the peer failed)" in kv_transfer_body(last)["held_out"]["p0"]


@pytest.mark.parametrize("die_at", [0, 3])
async def test_a_decode_replica_that_dies_is_replaced_in_a_new_room(pairs: Pairs, die_at: int) -> None:
    p, d = pairs.prefill(), pairs.decode("d0", die_at=die_at)
    await pairs.add(p, d)
    pending = asyncio.create_task(pairs.collect())
    await until_async(lambda: pairs.house.dispatcher.num_retries == 1)
    pairs.house.remove("d0")
    again = pairs.decode("d1")
    pairs.house.add(again)
    assert ids(await pending) == WHOLE
    assert [leg(request) for request in again.requests] == [PdLeg.DECODE]
    delivered = pairs.house.dispatcher.retries[0].num_delivered  # what had arrived when the death was noticed
    assert min(die_at, 1) <= delivered <= die_at
    assert again.requests[0].resumed_ids == p.requests[1].resumed_ids == tuple(WHOLE[:delivered])
    assert room(p.requests[0]) != room(p.requests[1]) == room(again.requests[0])
    assert [each.decision.replica_id for each in pairs.tries] == ["d0", "d1"]


@pytest.mark.parametrize("stage", ["queued", "streaming"])
async def test_a_client_that_leaves_ends_both_legs(pairs: Pairs, stage: str) -> None:
    p, d = pairs.prefill(), pairs.decode()
    if stage == "queued":
        p.prefill_hold.clear()
    d.pause_at = 1
    await pairs.add(p, d)
    stream = pairs.house.dispatcher.stream(ask(max_new_tokens=100))
    first = asyncio.create_task(anext(stream))
    await until_async(lambda: bool(p.requests and d.requests))
    if stage == "streaming":
        await first
    first.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await first
    await stream.aclose()
    await until_async(lambda: d.num_aborted == 1)
    assert p.num_aborted == (1 if stage == "queued" else 0)
    assert (pairs.house.router.num_open, pairs.house.channel.num_streams) == (0, 0)
    assert pairs.tries[0].outcome is not None
    assert pairs.tries[0].outcome.ending.value == "cancelled"


async def test_the_tries_are_bounded_and_the_last_one_needs_no_prefill_replica(pairs: Pairs) -> None:
    d = pairs.decode()
    await pairs.add(*(pairs.prefill(f"p{i}", refuse=ReplicaGone("gone")) for i in range(4)), d)
    assert ids(await pairs.collect()) == WHOLE
    assert [leg(request) for request in d.requests] == [PdLeg.DECODE, PdLeg.DECODE, None]
    pair = pairs.pair
    assert (pair.reason, pair.why) == (PairReason.ONE_REPLICA, "the last try stays on one replica")


async def test_what_a_kv_transfer_cannot_carry_stays_on_the_decode_replica(pairs: Pairs) -> None:
    p, d = pairs.prefill(), pairs.decode()
    await pairs.add(p, d)
    deltas = await pairs.collect(n=2)
    assert [ids(deltas, index) for index in (0, 1)] == [WHOLE, WHOLE]
    assert (p.requests, leg(d.requests[0])) == ([], None)
    pair = pairs.pair
    assert (pair.reason, pair.why) == (PairReason.ONE_REPLICA, "its 2 choices share one prompt")


async def test_without_prefill_all_is_local_and_without_decode_there_is_no_replica(pairs: Pairs) -> None:
    p = pairs.prefill()
    await pairs.add(p)
    assert pairs.house.fleet.num_ready == 0
    with pytest.raises(NoReplica, match="A decode replica is needed"):
        await pairs.collect()
    pairs.house.remove("p0")
    await pairs.add(pairs.decode())
    assert pairs.house.fleet.num_ready == 1
    assert ids(await pairs.collect()) == WHOLE
    pair = pairs.pair
    assert pair.reason is PairReason.NO_PREFILL
    assert kv_transfer_body(pairs.tries[-1]) == {"kv_transfer": None, "prefill_end": None, "held_out": {}}


FAILED = PdTransferReport(transferred=False, reason="no way")
DONE = PdTransferReport(transferred=True)


def held(hold_out: HoldOut, clock: Clock, at_s: float) -> bool:
    clock.now_s = at_s
    return "p0" in hold_out.now()


def test_a_failed_kv_transfer_holds_its_prefill_replica_out_for_two_seconds_and_says_why() -> None:
    hold_out = HoldOut(clock := Clock())
    assert hold_out.now() == {}
    hold_out.take("p0", FAILED)
    clock.now_s = 0.5
    assert hold_out.now() == {"p0": "a KV transfer from it failed (no way); not asked for another 1.5 s"}
    assert held(hold_out, clock, 1.99)
    assert not held(hold_out, clock, 2.0)


@pytest.mark.parametrize(("report", "at_s"), [(DONE, 1.0), (None, 130.0)], ids=["it succeeds", "long past"])
def test_a_hold_out_ends_and_the_next_one_is_as_short(report: PdTransferReport | None, at_s: float) -> None:
    hold_out = HoldOut(clock := Clock())
    hold_out.take("p0", FAILED)
    assert held(hold_out, clock, 1.0)
    clock.now_s = at_s
    if report is not None:
        hold_out.take("p0", report)
    assert not held(hold_out, clock, at_s)
    hold_out.take("p0", FAILED)
    assert held(hold_out, clock, at_s + 1.99)
    assert not held(hold_out, clock, at_s + 2.0)


def test_a_hold_out_doubles_with_each_failure_after_it_up_to_a_minute_and_not_with_those_during_it() -> None:
    clock = Clock()
    hold_out, lengths = HoldOut(clock), []
    for _ in range(7):
        for _ in range(20):  # as many rooms were open
            hold_out.take("p0", FAILED)
        began_s = clock.now_s
        while held(hold_out, clock, clock.now_s + 0.5):
            pass
        lengths.append(clock.now_s - began_s)
    assert lengths == [2, 4, 8, 16, 32, 60, 60]


async def test_a_pair_that_was_reserved_for_a_move_is_closed_where_half_of_it_has_left(pairs: Pairs) -> None:
    await pairs.add(pairs.prefill(), pairs.decode(), pairs.decode("d1"))
    dispatcher, router = pairs.house.dispatcher, pairs.house.router
    query = query_of(ask(), NO_HINTS, {})
    first, second = router.choose(query), router.choose(query)
    assert second.prefill_id == "p0"
    pairs.house.remove("p0")
    await until_async(lambda: "p0" not in {view.replica_id for view in router.views})
    waiting = Waiting(query=query, decision=first, arrived_s=0.0)
    taken_back = TakenBack("", Migration(waiting=waiting, decision=second, cause="freed", wait_s=1.0))
    third, _ = await dispatcher._choose(query, taken_back)
    assert third.number != second.number
    for decision in (first, third):
        router.done(decision, RouteOutcome(ending=Ending.CANCELLED))
    dispatcher.check()
