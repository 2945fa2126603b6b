"""Prefill and decode apart: who computes the prompt, who goes on, and why. SPEC H06, H08."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from kvtransfer.pages import page_keys
from routing.explain import explain, sentence
from routing.fleet_state import ASSUMED_BYTES_PER_S, LinkRates
from routing.pair import OVERHEAD_S
from routing.router import Router
from routing.types import (
    Decision,
    Ending,
    KeysStored,
    Pair,
    PairReason,
    Reason,
    ReplicaView,
    Role,
    RouteOutcome,
    RouteQuery,
)

PROMPT = list(range(1_000))  # 62 whole pages, 63 in all
FINISHED = RouteOutcome(ending=Ending.OK, cached_tokens=0, ttft_s=1.0)
PAGE_BYTES = 1_000_000


def view(replica_id: str, *, time_s: float = 0.0, rate: float = 1_000.0, **more: float) -> ReplicaView:
    """p0, p1 are for prefill; d0, d1 for decode. 1,000 prompt tokens a second, 20 ms a decode step, 100 slots."""
    given = {"decode_step_s": 0.02, "max_running_requests": 100, **more}
    return ReplicaView(
        replica_id=replica_id, time_s=time_s, prefill_tokens_per_s=rate, pool_pages=10_000, page_bytes=PAGE_BYTES,
        role=Role.PREFILL if replica_id.startswith("p") else Role.DECODE, **given,  # type: ignore[arg-type]
    )  # fmt: skip


def router(*views: ReplicaView, always: bool = False, seed: int = 0) -> Router:
    made = Router("estimated_ttft", Random(seed), lambda: 0.0, always_kv_transfer=always)
    made.update(views)
    return made


def query(tokens: list[int] = PROMPT, *, max_new_tokens: int = 100, **more: object) -> RouteQuery:
    return RouteQuery(rid="r", token_ids=tokens, max_new_tokens=max_new_tokens, **more)  # type: ignore[arg-type]


def pair_of(decision: Decision) -> Pair:
    assert decision.pair is not None
    return decision.pair


def test_with_nobody_to_disturb_the_decode_replica_computes_the_prompt_itself() -> None:
    """1.0 s there; 1.0 s on p0, and 63 MB and a message more."""
    decision = router(view("p0"), view("d0")).choose(query())
    pair = pair_of(decision)
    assert (decision.replica_id, decision.prefill_id, pair.reason) == ("d0", None, PairReason.LOCAL)
    assert decision.predicted_ttft_s == 1.0
    assert pair.chosen.local_cost_s == 1.0
    assert pair.kv_transfer_cost_s == pytest.approx(1.0 + 0.063 + OVERHEAD_S)


def test_a_prefill_replica_pays_for_the_fixed_part_of_a_step_too() -> None:
    """It runs no decode steps, so it has that of those that do: else every short prompt would seem quicker there."""
    told = {"rate_step_tokens": 100.0}
    pair = pair_of(router(view("p0", decode_step_s=0.0, **told), view("d0", **told)).choose(query([1] * 10)))
    assert (pair.prefill_s, pair.chosen.ttft_s) == pytest.approx((0.01 + 0.018, 0.01 + 0.018))


def test_requests_that_would_wait_for_it_hand_the_prompt_over() -> None:
    """Three run on d0: each would wait 1 s."""
    decision = router(view("p0"), view("d0", num_running=3)).choose(query())
    pair = pair_of(decision)
    assert (decision.replica_id, decision.prefill_id, pair.reason) == ("d0", "p0", PairReason.TRANSFER)
    assert (pair.chosen.stall_s, pair.chosen.transfer_pages, pair.chosen.transfer_bytes) == (3.0, 63, 63_000_000)
    assert decision.predicted_ttft_s == pytest.approx(1.0 + 0.063 + OVERHEAD_S)


def test_no_later_decision_has_the_number_of_a_batch_request_s_prefill_leg() -> None:
    made = router(view("p0"), view("d0", num_running=3))
    batch, later = made.choose(query(offline=True)), made.choose(query())
    assert (batch.prefill_id, pair_of(batch).prefill_number) == ("p0", batch.number + 1)
    assert later.number == batch.number + 2


def test_who_waits_for_pages_from_elsewhere_does_not_wait_for_a_prompt_computed_here() -> None:
    """60 wait for p0, which has 50 s to do; on d0 nobody runs, so that it has the first token after 1.01 s."""
    behind = view("p0", queued_uncached_tokens=50_000)
    decision = router(behind, view("d0", num_receiving=60)).choose(query())
    pair = pair_of(decision)
    assert (pair.prefill_id, decision.predicted_ttft_s, pair.chosen.stall_s, pair.chosen.slower_s) == (None, 1.01, 0, 0)
    assert [each.num_requests for each in decision.candidates] == [0, 60]  # the places are taken nevertheless
    both = pair_of(router(behind, view("d0", num_running=2, num_waiting=1, num_receiving=60)).choose(query()))
    assert both.chosen.stall_s == 3.0
    assert both.chosen.slower_s == pytest.approx(100 * 0.02 * 3 / 100)


def test_prompts_handed_over_are_no_reason_to_hand_over_more() -> None:
    """One request runs on d0: a prompt computed there costs 2.03 s, the third behind two at p0 costs 3.1 s."""
    made = router(view("p0"), view("d0", num_running=1))
    decisions = [made.choose(query([number] * 1_000)) for number in range(40)]
    assert [each.prefill_id for each in decisions[:3]] == ["p0", None, "p0"]
    assert sum(each.prefill_id is None for each in decisions) >= 10
    assert decisions[-1].predicted_ttft_s < 40.0
    for each in decisions:
        made.done(each, FINISHED)
    made.check()


def test_a_prefix_on_the_decode_replica_keeps_it_there() -> None:
    """992 of 1,000 tokens are cached: 8 tokens delay three requests by 24 ms, less than a KV transfer costs."""
    made = router(view("p0"), view("d0", num_running=3))
    made.done(made.choose(query(one_replica="test")), FINISHED)
    pair = pair_of(made.choose(query()))
    assert (pair.prefill_id, pair.reason, pair.chosen.cached_tokens) == (None, PairReason.LOCAL, 992)
    assert pair.chosen.stall_s == pytest.approx(0.024)


def test_the_prefill_replica_is_the_one_that_is_done_first() -> None:
    """p0 holds the prefix and is busy for less than the prefix takes; then for more."""
    for queued, winner in ((900, "p0"), (1_100, "p1")):
        made = router(view("p0", queued_uncached_tokens=queued), view("p1"), view("d0", num_running=9))
        made.apply("p0", [KeysStored(1, page_keys(np.array(PROMPT, dtype=np.int32), 16, ""))])
        decision = made.choose(query())
        assert decision.prefill_id == winner
        assert decision.overlap_tokens == (992 if winner == "p0" else 0)
        assert decision.best_overlap == ("p0", 992)


def small(replica_id: str, *, pool_pages: int, **more: float) -> ReplicaView:
    return replace(view(replica_id, **more), pool_pages=pool_pages)


def test_a_prefill_replica_whose_pool_cannot_hold_the_prompt_is_not_asked() -> None:
    """1,000 tokens in 62 pages of 16 are too many, in 63 they are not."""
    busy = view("d0", num_running=3)
    pair = pair_of(router(small("p0", pool_pages=62), busy).choose(query()))
    assert (pair.prefill_id, pair.reason) == (None, PairReason.NO_PREFILL)
    assert router(small("p0", pool_pages=63), busy).choose(query()).prefill_id == "p0"
    assert router(small("p0", pool_pages=62), view("p1"), busy).choose(query()).prefill_id == "p1"
    assert router(small("p0", pool_pages=0), busy).choose(query()).prefill_id == "p0"  # it has not told


def test_missing_pages_at_a_prefill_replica_count_as_tokens_to_compute_before() -> None:
    """p0 has 25 of 100 pages free: 400 tokens; 600 are missing, which takes 0.6 s. p1 has more to do first."""
    full, busy = small("p0", pool_pages=100, pool_utilization=0.75), view("d0", num_running=9)
    assert pair_of(router(full, busy).choose(query())).prefill_s == pytest.approx(1.6)
    for queued, winner in ((500, "p1"), (700, "p0")):
        decision = router(full, view("p1", queued_uncached_tokens=queued), busy).choose(query())
        assert decision.prefill_id == winner
    assert decision.candidates[0].terms.pressure_s == pytest.approx(0.6)


def test_requests_are_spread_over_the_decode_replicas() -> None:
    made = router(view("p0"), view("d0", num_running=10), view("d1", num_running=10), always=True)
    decisions = [made.choose(query([number] * 100)) for number in range(8)]
    assert [sum(each.replica_id == name for each in decisions) for name in ("d0", "d1")] == [4, 4]


def test_a_decode_replica_without_room_is_passed_over() -> None:
    """d0 is full: for 1,100 of the 160,000 tokens held there it waits that share of 100 steps of 20 ms."""
    full = view("d0", num_running=10, pool_utilization=1.0)
    decision = router(view("p0"), full, view("d1", num_running=10)).choose(query())
    assert (decision.replica_id, decision.reason) == ("d1", Reason.CHEAPEST)
    assert pair_of(decision).costs.at(0).pressure_s == pytest.approx(2.0 * 1_100 / 160_000)


def test_without_a_prefill_replica_the_decode_replica_does_all() -> None:
    made = router(view("d0", num_running=3))
    pair = pair_of(made.choose(query()))
    assert (pair.prefill_id, pair.reason, pair.kv_transfer_cost_s) == (None, PairReason.NO_PREFILL, None)


def test_a_request_that_needs_one_replica_gets_one_and_the_reason_is_told() -> None:
    made = router(view("p0"), view("d0", num_running=3), always=True)
    decision = made.choose(query(one_replica="n is 2"))
    pair = pair_of(decision)
    assert (pair.prefill_id, pair.reason, pair.why) == (None, PairReason.ONE_REPLICA, "n is 2")
    assert sentence(decision).startswith(
        "r (1000 prompt tokens) went to d0 by pd_pair: it was the only replica that may take the request. "
        "d0 computes the prompt itself: n is 2. 0 tokens"
    )


def test_both_legs_are_open_until_each_is_done() -> None:
    made = router(view("p0"), view("d0", num_running=3))
    decision = made.choose(query())
    seen = made.explain_only(query()).candidates
    assert [(each.replica_id, each.load.in_flight, each.queued_tokens) for each in seen] == [
        ("p0", 1, 1_000), ("d0", 1, 0),
    ]  # fmt: skip
    assert made.num_open == 2
    assert made.prefill_done(decision)
    assert not made.prefill_done(decision)
    assert made.num_open == 1
    assert made.done(decision, FINISHED)
    assert not made.done(decision, FINISHED)
    assert made.num_open == 0
    made.check()


@pytest.mark.parametrize(("failed", "bias"), [(False, 0.0), (True, 320.0)])
def test_what_the_decode_replica_had_cached_is_held_against_what_was_predicted_of_it(failed: bool, bias: float) -> None:
    """320 were cached in the end: as many as were predicted of p0, 320 more than of d0, which computes it otherwise."""
    made = router(view("p0"), view("d0", num_running=3))
    made.apply("p0", [KeysStored(1, page_keys(np.array(PROMPT[:320], dtype=np.int32), 16, ""))])
    decision = made.choose(query())
    assert (decision.prefill_id, decision.overlap_tokens) == ("p0", 320)
    made.done(decision, RouteOutcome(ending=Ending.OK, cached_tokens=320, ttft_s=1.0, kv_transfer_failed=failed))
    assert made.errors.cached_bias_tokens == bias


def test_the_decision_in_words_has_every_term() -> None:
    decision = router(view("p0"), view("d0", num_running=3)).choose(query())
    assert sentence(decision) == (
        "r (1000 prompt tokens) went to d0 by pd_pair: it was the only replica that may take the request. "
        "p0 computes the prompt and hands it over: through p0 it costs 1.143 s (1.000 s there, 0.063 s for 63 pages, "
        "0.020 s fixed), computing it on d0 costs 4.070 s (first token after 1.010 s, its other requests together wait "
        "3.000 s meanwhile). 0 tokens are predicted to be cached on p0, and the first token after 1.083 s."
    )
    lines = explain(decision).splitlines()
    assert [line[:5] for line in lines[2:4]] == ["> p0 ", "> d0 "]
    assert lines[-2].endswith("at 1.00 GB/s (assumed)")
    assert lines[-1].split("|")[0].split() == [
        ">", "d0", "4.070", "=", "1.010", "+", "3.000", "+", "0.060", "s",
    ]  # fmt: skip


def test_the_link_is_as_fast_as_three_of_four_telling_kv_transfers_at_most() -> None:
    link = LinkRates()
    assert (link.measured, link.bytes_per_s) == (False, ASSUMED_BYTES_PER_S)
    link.record(1000, 0.001)  # too small to tell
    link.record(4 << 20, 0.0)
    assert not link.measured
    for seconds in (4.0, 2.0, 1.0, 0.5, 0.25):
        link.record(4 << 20, seconds)
    assert (link.measured, link.bytes_per_s) == (True, 8 << 20)
    for _ in range(32):
        link.record(4 << 20, 1.0)
    assert link.bytes_per_s == 4 << 20


def test_the_shortest_wait_is_over_both_ways_and_needs_room_where_it_decodes() -> None:
    """9 s of prompts wait at p0, 4 s at d0; and a d0 that is full makes everyone wait, however idle p0 is."""
    queues = router(view("p0", queued_uncached_tokens=9_000), view("d0", queued_uncached_tokens=4_000))
    assert queues.choose(query()).shortest_wait_s == 4.0
    full = view("d0", num_running=100, max_running_requests=50)
    assert router(view("p0"), full).choose(query()).shortest_wait_s == pytest.approx(100 * 0.02 * 51 / 50)


def test_the_shortest_wait_is_that_for_the_kv_transfer_where_every_prompt_is_handed_over() -> None:
    """9 s of prompts wait at p0; d0 is idle, but may compute only what cannot be handed over."""
    busy = view("p0", queued_uncached_tokens=9_000)
    assert router(busy, view("d0")).choose(query()).shortest_wait_s == 0.0
    assert router(busy, view("d0"), always=True).choose(query()).shortest_wait_s == 9.0
    assert router(busy, view("d0"), always=True).choose(query(one_replica="test")).shortest_wait_s == 0.0


def test_no_prompt_is_computed_behind_a_longer_queue_than_allowed() -> None:
    """p0 holds the prefix and queues 8 s; p1 does not, 1 s are queued there and 20 wait."""
    made = router(
        view("p0", queued_uncached_tokens=8_000), view("p1", queued_uncached_tokens=1_000, num_waiting=20),
        view("d0", num_running=99),
    )  # fmt: skip
    made.apply("p0", [KeysStored(1, page_keys(np.array(PROMPT, dtype=np.int32), 16, ""))])
    assert made.explain_only(query()).prefill_id == "p0"
    assert made.explain_only(query(max_wait_s=5.0)).prefill_id == "p1"
    pair = pair_of(made.explain_only(query(max_wait_s=0.5)))  # nor at p1: d0 computes it
    assert (pair.prefill_id, pair.best_prefill_id) == (None, "p1")
