"""Grants of row and pages to decode legs, and fairness between them and local requests."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kvtransfer.types import PdTicket, PeerAddress
from replicas.disagg.roles import ask_grant, received
from replicas.request import CachedTokens, Leg, Req, ReqState
from replicas.scheduler.plan import ExtendPlan
from replicas.scheduler.precedence import StepTimes
from replicas.scheduler.prefill import Refusal
from replicas.types import Finish, FinishReason, PdLeg, PdTransfer
from tests.fakes import continuation
from tests.harness import Bench, choice_of

PEER = PeerAddress(host="fake", port=0, incarnation="p")
DONE = Finish(reason=FinishReason.ABORT)


def leg(bench: Bench, rid: str, prompt: Sequence[int], **request: Any) -> Req:
    """A decode leg in the queue; ``request`` as of `Bench.submit`."""
    req = choice_of(rid, prompt, now_s=bench.clock(), **({"max_new_tokens": 4} | request))
    req.leg = Leg(kv_transfer=PdTransfer(leg=PdLeg.DECODE, ticket=PdTicket(room=1, generation=0, prefill=PEER)))
    bench.reqs.append(req)
    ask_grant(bench.scheduler, req)
    return req


def receive(bench: Bench, req: Req) -> None:
    """All of it is here: what the wire does to the device, and the first token."""
    assert req.holding is not None
    assert req.leg is not None
    slots = bench.kv.table.view(req.holding.row, 0, req.num_tokens)
    bench.device.tokens[slots], bench.device.positions[slots] = req.ids[: req.num_tokens], np.arange(req.num_tokens)
    req.leg.exposed = False
    first = continuation(req.ids[: req.num_tokens].tolist(), 1)[0]
    received(bench.scheduler, req, first, None, cached=CachedTokens())


def test_a_grant_gives_a_row_and_the_pages_of_the_whole_prompt() -> None:
    """SPEC H07: 10 tokens are three pages of 4; four of its tokens are locked in the cache already."""
    bench = Bench()
    bench.submit([1, 2, 3, 4, 5], max_new_tokens=1)
    bench.run()
    req = leg(bench, "a", [1, 2, 3, 4, *range(10, 16)])
    bench.step()
    assert bench.scheduler.queues.away.take_granted() == [req]
    assert bench.scheduler.queues.away.take_granted() == []
    assert req.state is ReqState.RECEIVING
    assert req.holding is not None
    assert (req.holding.prefix_len, req.holding.kv_len) == (4, 10)
    stats = bench.kv.store.stats()
    assert (stats.protected_pages, stats.reserved_pages) == (1, 2)
    receive(bench, req)
    bench.run()


def test_nothing_is_granted_that_could_not_finish_beside_what_runs_and_receives() -> None:
    """16 pages of 4. Each takes 20 tokens and may make 12: two fit beside each other, three do not."""
    bench = Bench(num_pages=16, new_token_ratio=1.0, min_new_token_ratio=1.0)
    reqs = [leg(bench, f"r{i}", [i] * 20, max_new_tokens=12) for i in range(3)]
    bench.step()
    assert [req.state for req in reqs] == [ReqState.RECEIVING, ReqState.RECEIVING, ReqState.WAITING]
    for req in reqs[:2]:
        receive(bench, req)
    while reqs[2].state is ReqState.WAITING:
        bench.step()
    receive(bench, reqs[2])
    bench.run()
    assert [req.num_retractions for req in reqs] == [0, 0, 0]


def test_rows_are_granted_up_to_max_running() -> None:
    bench = Bench(max_running=4)
    own, _ = [bench.submit([i, 2, 3], max_new_tokens=6) for i in (1, 5)]
    bench.step()
    *first, second = [leg(bench, rid, [4, 5]) for rid in "abc"]
    bench.step()
    assert [each.state for each in (*first, second)] == [ReqState.RECEIVING, ReqState.RECEIVING, ReqState.WAITING]
    bench.scheduler.finish(own, DONE)
    bench.step()
    assert second.state is ReqState.RECEIVING


def test_legs_that_wait_for_their_sender_leave_rows_to_what_can_run_here() -> None:
    """A quarter of 4 rows, however long the senders take; one more leg is granted as soon as another one has come."""
    bench = Bench(max_running=4)
    legs = [leg(bench, f"leg{i}", [10 + i] * 4) for i in range(5)]
    for _ in range(3):  # those that receive already count
        bench.step()
    assert [req.state for req in legs] == [ReqState.RECEIVING] * 3 + [ReqState.WAITING] * 2
    bench.clock.now_s += 1
    short = bench.submit([1, 2, 3], max_new_tokens=4)
    for _ in range(4):
        bench.step()
    assert short.state is ReqState.FINISHED
    receive(bench, legs[0])
    bench.step()
    assert [req.state for req in legs[3:]] == [ReqState.RECEIVING, ReqState.WAITING]


def test_legs_that_only_wait_for_their_share_of_rows_are_not_starved_by_running_requests() -> None:
    """Of 4 rows, 3 wait; their places are taken by legs again and again, beside a stream of short local requests."""
    bench = Bench(max_running=4)
    legs = [leg(bench, f"leg{i}", [10 + i] * 4, max_new_tokens=2) for i in range(9)]
    for i in range(40):
        bench.clock.now_s += 0.01
        bench.submit([100 + i] * 3, max_new_tokens=2)
        bench.step()
        for req in legs:
            if req.state is ReqState.RECEIVING and i % 3 == 0:
                receive(bench, req)
    assert all(req.state is ReqState.FINISHED for req in legs)


def test_alone_a_leg_may_take_the_whole_pool() -> None:
    """A request must not wait for pages that do not exist."""
    bench = Bench(num_pages=4)
    req = leg(bench, "a", range(15), max_new_tokens=1)
    bench.step()
    assert req.state is ReqState.RECEIVING


def test_higher_priority_first_then_first_come() -> None:
    bench = Bench(max_running=1, priorities="on")
    reqs = [leg(bench, name, [i, i], priority=p) for i, (name, p) in enumerate([("a", 0), ("b", 1), ("c", 1)])]
    order = []
    for _ in range(3):
        bench.step()
        (granted,) = bench.scheduler.queues.away.take_granted()
        order.append(granted.rid)
        granted.leg = replace(granted.leg, exposed=False) if granted.leg is not None else None
        bench.scheduler.finish(granted, DONE)
    assert order == ["b", "c", "a"]
    assert all(req.state is ReqState.FINISHED for req in reqs)


def test_a_leg_that_finds_no_room_is_not_overtaken_by_later_local_requests() -> None:
    """A stream of short local requests would starve it: 12 of 16 pages are wanted, and 8 are always taken."""
    bench = Bench(num_pages=16, max_running=8, new_token_ratio=1.0, min_new_token_ratio=1.0)
    old = bench.submit([9] * 20, max_new_tokens=12)
    bench.step()
    req = leg(bench, "big", range(40), max_new_tokens=8)
    bench.step()
    assert req.state is ReqState.WAITING
    later = []
    for i in range(40):
        later.append(bench.submit([100 + i] * 4, max_new_tokens=4))
        bench.step()
        if req.state is ReqState.RECEIVING:
            break
    assert req.state is ReqState.RECEIVING
    assert old.state is ReqState.FINISHED
    assert [r.state for r in later] == [ReqState.WAITING] * len(later)
    refusals = bench.scheduler.last.refusals.values()
    assert Refusal.OLDER_GRANT in refusals or bench.scheduler.queues.prealloc.barrier is None
    receive(bench, req)
    bench.run()


def test_an_older_local_request_that_found_no_room_is_not_overtaken_by_grants() -> None:
    """The other way round: a stream of short decode legs would starve it."""
    bench = Bench(num_pages=16, max_running=8, new_token_ratio=1.0, min_new_token_ratio=1.0)
    bench.submit([9] * 20, max_new_tokens=12)
    for _ in range(2):
        bench.step()  # two chunks
    big = bench.submit(range(40), max_new_tokens=8)
    bench.step()
    assert big.state is ReqState.WAITING
    legs = []
    for i in range(60):
        legs.append(leg(bench, f"leg{i}", [100 + i] * 4))
        bench.step()
        if big.state is not ReqState.WAITING:
            break
        assert [req.state for req in legs] == [ReqState.WAITING] * len(legs)
    assert big.state is not ReqState.WAITING
    assert len(legs) > 5


def test_an_older_local_request_still_starts_before_a_leg_that_finds_no_room() -> None:
    bench = Bench(num_pages=16, new_token_ratio=1.0, min_new_token_ratio=1.0, chunked_prefill_size=16)
    bench.submit([9] * 20, max_new_tokens=12)
    bench.submit([8] * 8, max_new_tokens=4)  # waits for the step budget, not for memory
    bench.clock.now_s += 1
    req = leg(bench, "big", range(40), max_new_tokens=8)
    bench.step()
    assert req.state is ReqState.WAITING
    for _ in range(3):
        bench.step()
    assert bench.scheduler.queues.running[-1].prompt_len == 8
    assert req.state is ReqState.WAITING


def test_a_leg_that_was_received_and_is_left_out_of_the_next_step_keeps_its_pages() -> None:
    """No step has entered its pages into the ranks' tables yet: the one that leaves it out does."""
    bench = Bench(chunked_prefill_size=64)
    req = leg(bench, "a", range(10), tenant="heavy")
    assert bench.step() is None
    bench.scheduler.queues.waiting.shares._credits["heavy"] = -1.0
    bench.scheduler.queues.waiting.step_times = StepTimes(fixed_s=2.0, prompt_s=1.0, row_s=1.0)
    receive(bench, req)
    light = bench.submit([50, 51], tenant="light")
    plan = bench.step()
    assert isinstance(plan, ExtendPlan)
    assert (plan.num_decode, light.num_output, req.num_output) == (0, 1, 1)
    bench.run()
