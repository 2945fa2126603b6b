"""The load as believed between reports, and the seconds made of it."""

from dataclasses import asdict, replace
from random import Random

import numpy as np
import pytest

from kvtransfer.pages import page_keys
from replicas.scheduler.precedence import bound_len
from routing.explain import explain, latest_s
from routing.router import Router
from routing.types import (
    Candidate,
    Decision,
    Ending,
    IndexSnapshot,
    KeysStored,
    Reason,
    ReplicaView,
    RouteOutcome,
    RouteQuery,
)

PROMPT = list(range(1_000))  # 62 whole pages


class Fixture:
    """A router whose clock moves only when told."""

    def __init__(self, *views: ReplicaView, policy: str = "estimated_ttft", seed: int = 0) -> None:
        self.now_s = 0.0
        self.router = Router(policy, Random(seed), lambda: self.now_s)
        self.router.update(views)

    def choose(self, tokens: list[int] = PROMPT, **hints: str) -> Decision:
        return self.router.choose(RouteQuery(rid="r", token_ids=tokens, max_new_tokens=100, **hints))

    def look(self) -> dict[str, Candidate]:
        decision = self.router.explain_only(RouteQuery(rid="r", token_ids=[1] * 10, max_new_tokens=100))
        return {candidate.replica_id: candidate for candidate in decision.candidates}


def view(replica_id: str, time_s: float = 0.0, *, rate: float = 1_000.0, queued: int = 0, **more: float) -> ReplicaView:
    return ReplicaView(
        replica_id=replica_id, time_s=time_s, prefill_tokens_per_s=rate, queued_uncached_tokens=queued,
        pool_pages=1_000, **more,
    )  # fmt: skip


def test_silence_fades_towards_what_the_others_say() -> None:
    """7 s after the report: 2 s are fresh, 5 s are one half-life."""
    f = Fixture(view("a", rate=0.0, queued=1_000, num_running=8), view("b", rate=0.0))
    f.now_s = 7.0
    f.router.update([view("a", rate=0.0, queued=1_000, num_running=8), view("b", 7.0, rate=0.0)])
    seen = f.look()
    assert (seen["a"].queued_tokens, seen["a"].num_requests) == (500, 4)
    assert (seen["b"].queued_tokens, seen["b"].num_requests) == (0, 0)


def test_rates_are_smoothed_and_the_unmeasured_is_taken_for_the_mean_of_the_others() -> None:
    f = Fixture(view("a", rate=1_000.0), view("b", rate=0.0), view("c", rate=3_000.0))
    assert f.look()["b"].terms.prefill_tokens_per_s == 2_000.0
    f.router.update([view("a", 1.0, rate=2_000.0)])  # one half-life later
    assert f.look()["a"].terms.prefill_tokens_per_s == pytest.approx(1_500.0)


def test_what_a_replica_measured_is_believed_of_the_others_after_it_has_left() -> None:
    """The one that served everything dies: the other has measured nothing, but it is not taken for another machine."""
    told = {"decode_step_s": 0.02, "rate_step_tokens": 100.0}
    f = Fixture(view("a", rate=200.0, **told), view("b", rate=0.0))
    before = asdict(f.look()["b"].terms)
    f.router.forget("a")
    assert asdict(f.look()["b"].terms) == before
    f.router.update([view("b", 1.0, rate=500.0)])
    assert f.look()["b"].terms.prefill_tokens_per_s == 500.0


def test_a_short_prompt_pays_for_the_fixed_part_of_its_step() -> None:
    """1,000 tokens a second were measured on steps of 100 tokens, 0.02 s of which are spent whatever the tokens: 10
    tokens pay for a tenth of that. 50 that are queued share their step; from 100 on the rate has it all. One that
    has measured nothing is taken for one of them: it would look quicker than those that are known."""
    told = {"decode_step_s": 0.02, "rate_step_tokens": 100.0}
    f = Fixture(view("a", **told), view("b", queued=50, **told), view("c", queued=90, **told), view("d"))
    terms = {name: candidate.terms for name, candidate in f.look().items()}
    assert [terms[name].step_s for name in "abcd"] == pytest.approx([0.018, 0.008, 0.0, 0.018])
    assert terms["a"].ttft_s == pytest.approx(0.01 + 0.018)
    assert [terms[name].wait_s for name in "ab"] == [0.0, 0.05]  # until the step could begin


def test_the_way_to_a_replica_and_back_is_what_its_own_times_lack_at_the_median() -> None:
    f = Fixture(view("a"))
    for ttft_s, engine_s in ((1.004, 1.0), (9.0, 1.0), (0.506, 0.5), (0.3, None)):  # one came while the router was busy
        outcome = RouteOutcome(ending=Ending.OK, ttft_s=ttft_s, engine_s=engine_s)
        f.router.done(f.choose([1] * 10), outcome)
    terms = f.look()["a"].terms
    assert (terms.way_s, terms.ttft_s, terms.wait_s) == pytest.approx((0.006, 0.016, 0.0))


def test_a_full_pool_costs_the_share_of_what_is_held_that_must_come_free() -> None:
    """12,800 of 16,000 tokens are held; 1,000 + 100 fit: nothing. 16,000 held: 1,100 / 16,000 of 100 steps of 0.1 s."""
    f = Fixture(
        view("a", pool_utilization=0.8, num_running=9, decode_step_s=0.1),
        view("b", pool_utilization=1.0, num_running=9, decode_step_s=0.1),
    )
    a, b = f.choose().candidates
    assert a.terms.pressure_s == 0.0
    assert b.terms.pressure_s == pytest.approx(10.0 * 1_100 / 16_000)


def test_requests_end_sooner_where_steps_make_several_of_their_tokens() -> None:
    """100 tokens in 25 steps of 0.1 s; what a prompt waits for is a step all the same."""
    told = {"pool_utilization": 1.0, "num_running": 9, "decode_step_s": 0.1}
    f = Fixture(view("a", **told), replace(view("b", **told), tokens_per_step=4.0))
    a, b = f.choose().candidates
    assert b.terms.pressure_s == pytest.approx(2.5 * 1_100 / 16_000) == a.terms.pressure_s / 4
    assert b.terms.decode_s == a.terms.decode_s > 0


def test_an_answer_without_a_limit_is_taken_for_256_tokens() -> None:
    """A chat without a limit is allowed the context, 40,000 tokens, of pools of 16,000. With a tenth held, 1,000 + 256
    fit. With all held, 1,256 / 16,000 must come free, of what comes free in 256 steps of 0.1 s."""
    f = Fixture(
        view("a", decode_step_s=0.1),
        view("b", pool_utilization=0.1, num_running=1, decode_step_s=0.1),
        view("c", pool_utilization=1.0, num_running=1, decode_step_s=0.1),
    )
    ask = RouteQuery(rid="r", token_ids=PROMPT, max_new_tokens=40_000)
    a, b, c = f.router.explain_only(ask).candidates
    assert (a.terms.pressure_s, b.terms.pressure_s) == (0.0, 0.0)
    assert c.terms.pressure_s == pytest.approx(25.6 * 1_256 / 16_000)


def test_a_prompt_and_answer_larger_than_the_pool_wait_for_all_that_is_held_and_no_longer() -> None:
    """1,000 + 256 of a pool of 1,008: the engine cuts the answer. Nothing is held: nothing to wait for. A tenth is:
    all of it must come free, in 256 steps of 0.1 s."""
    f = Fixture(
        replace(view("a", decode_step_s=0.1), pool_pages=63),
        replace(view("b", pool_utilization=0.1, num_running=1, decode_step_s=0.1), pool_pages=63),
    )
    a, b = f.router.explain_only(RouteQuery(rid="r", token_ids=PROMPT, max_new_tokens=40_000)).candidates
    assert a.terms.pressure_s == 0.0
    assert b.terms.pressure_s == pytest.approx(25.6)


def test_a_prefix_wins_until_waiting_costs_more_than_computing_it_anew() -> None:
    f = Fixture(view("a"), view("b"))
    holder = f.choose().replica_id
    other = "b" if holder == "a" else "a"
    for queued, winner in ((900, holder), (1_100, other)):
        f.now_s += 10.0
        f.router.update([view(holder, f.now_s, queued=queued), view(other, f.now_s)])
        decision = f.router.explain_only(RouteQuery(rid="r", token_ids=PROMPT))
        assert (decision.replica_id, decision.reason) == (winner, Reason.SOONEST)
        assert decision.best_overlap == (holder, 992)
    assert decision.given_up == 992


def test_computing_a_prefix_anew_is_charged_for_each_who_waits_there() -> None:
    """a holds 992 of 1,000 tokens and queues 2,500; b holds none, queues 500 and has three waiting: the first token
    comes after 2.508 s there and 1.5 s here, but 0.992 s more for each of three is 2.976 s."""
    f = Fixture(view("a"), view("b"))
    f.router.choose(RouteQuery(rid="r", token_ids=PROMPT, allowed=frozenset({"a"})))
    f.now_s = 10.0
    f.router.update([view("a", 10.0, queued=2_500, num_waiting=9), view("b", 10.0, queued=500, num_waiting=3)])
    decision = f.router.explain_only(RouteQuery(rid="r", token_ids=PROMPT))
    a, b = (candidate.terms for candidate in decision.candidates)
    assert (a.ttft_s, a.behind_s) == pytest.approx((2.508, 0.0))
    assert (b.ttft_s, b.behind_s) == pytest.approx((1.5, 2.976))
    assert (decision.replica_id, decision.reason) == ("a", Reason.LEAST_DELAY)
    assert decision.predicted_ttft_s == pytest.approx(2.508)
    fresh = f.router.explain_only(RouteQuery(rid="r", token_ids=[7] * 1_000))  # cached nowhere: nothing is done twice
    assert [candidate.terms.behind_s for candidate in fresh.candidates] == [0.0, 0.0]
    assert (fresh.replica_id, fresh.reason) == ("b", Reason.SOONEST)


def test_a_session_breaks_a_tie_and_nothing_else() -> None:
    f = Fixture(view("a"), view("b"), seed=3)
    first = f.choose([1] * 10, session_id="s")
    f.router.done(first, RouteOutcome(ending=Ending.OK))
    other = "b" if first.replica_id == "a" else "a"
    again = f.choose([2] * 10, session_id="s")
    assert (again.replica_id, again.reason) == (first.replica_id, Reason.SESSION)
    f.router.update([view(first.replica_id, 1.0, queued=500), view(other, 1.0)])
    f.now_s = 1.0
    assert f.choose([3] * 10, session_id="s").replica_id == other


def test_routers_that_choose_at_once_draw_where_free_pages_differ_by_less_than_the_request_needs() -> None:
    """300 tokens to compute and 100 to make; a page has 16."""

    def chosen(free_pages: int) -> set[str]:
        fleet = view("a", free_pages=900), view("b", free_pages=free_pages)
        return {Fixture(*fleet, seed=seed).choose([1] * 300).replica_id for seed in range(20)}

    assert chosen(880) == {"a", "b"}  # 320 tokens fewer
    assert chosen(860) == {"a"}  # 640


def test_prefix_threshold_follows_the_prefix_unless_it_is_short_or_the_load_is_out_of_balance() -> None:
    f = Fixture(view("a"), view("b"), policy="prefix_threshold")
    holder = f.choose().replica_id
    other = "b" if holder == "a" else "a"
    assert (f.choose().replica_id, f.choose().reason) == (holder, Reason.LONGEST_PREFIX)
    short = f.choose(PROMPT[:160] + [9] * 900)  # 15 % of it
    assert (short.replica_id, short.reason) == (other, Reason.FEWER_REQUESTS)
    f.router.update([view(holder, 1.0, num_running=70), view(other, 1.0)])
    f.now_s = 1.0
    balance = f.choose()
    assert (balance.replica_id, balance.reason) == (other, Reason.BALANCE)


def test_random_reaches_everyone() -> None:
    f = Fixture(view("a"), view("b"), view("c"), policy="random")
    assert {f.choose().replica_id for _ in range(30)} == {"a", "b", "c"}


def test_a_dry_run_says_what_choose_will_and_changes_nothing() -> None:
    f = Fixture(*(view(name) for name in "abcdefgh"))
    query = RouteQuery(rid="r", token_ids=PROMPT)
    dry = [f.router.explain_only(query) for _ in range(3)]
    assert {(d.replica_id, d.dry_run) for d in dry} == {(f.router.choose(query).replica_id, True)}
    assert f.router.num_open == 1
    assert not f.router.done(dry[0], RouteOutcome(ending=Ending.OK))
    assert f.router.num_open == 1
    f.router.check()


def test_it_learns_how_wrong_it_was() -> None:
    f = Fixture(view("a"))
    decision = f.choose()  # 1,000 tokens at 1,000 a second, none cached
    f.router.done(decision, RouteOutcome(ending=Ending.OK, cached_tokens=160, ttft_s=1.5))
    failed = f.choose()
    f.router.done(failed, RouteOutcome(ending=Ending.ERROR))  # tells nothing
    errors = f.router.errors
    assert (errors.num, errors.cached_bias_tokens, errors.ttft_bias_s) == (1, 160.0, 0.5)
    assert (errors.predicted_ttft_s, errors.actual_ttft_s) == (1.0, 1.5)
    f.router.done(f.choose(), RouteOutcome(ending=Ending.OK, cached_tokens=160, ttft_s=2.5))
    assert (errors.num, errors.actual_ttft_s) == (2, 2.0)


def test_waits_are_believed_to_be_as_much_longer_as_they_were_of_late() -> None:
    """Predicted 7 s and came after 17.5, twice: (35 + 5) / (14 + 5). 20 s later half of it counts. 4 is the most."""
    f = Fixture(view("a", queued=6_000))
    assert f.router.overrun.factor == 1.0
    for _ in range(2):
        decision = f.router.explain_only(RouteQuery(rid="r", token_ids=PROMPT))
        assert decision.predicted_ttft_s == 7.0
        f.router.began(decision, 17.5)
    assert f.router.overrun.factor == pytest.approx(40 / 19)
    assert [f.router.overrun.beyond(most_s) for most_s in (17.0, 17.5)] == [pytest.approx(40 / 19), 1.0]
    late = f.router.explain_only(RouteQuery(rid="r", token_ids=PROMPT))
    assert late.predicted_ttft_s == 7.0  # the error stays visible
    assert "came 2.11 times as late as predicted" in explain(late)
    f.now_s = 20.0
    assert f.router.overrun.factor == pytest.approx(22.5 / 12)
    f.router.began(decision, 1_000.0)
    assert f.router.overrun.factor == 4.0
    f.now_s = 400.0
    assert f.router.overrun.factor == pytest.approx(1.0, abs=0.001)
    assert f.router.overrun.beyond(10.0) == 1.0
    f.router.began(decision, 0.1)  # sooner than predicted: nothing is allowed beyond the setting
    assert f.router.overrun.factor == 1.0
    f.router.began(decision, 20.0)  # 7 s were predicted of each of the two
    assert f.router.overrun.factor == pytest.approx(25.1 / 19, abs=0.001)


def test_a_salt_keeps_prefixes_apart() -> None:
    f = Fixture(view("a"))
    f.router.choose(RouteQuery(rid="r", token_ids=PROMPT, salt="x"))
    overlaps = [f.router.explain_only(RouteQuery(rid="r", token_ids=PROMPT, salt=s)).overlap_tokens for s in ("x", "y")]
    assert overlaps == [992, 0]


def test_another_page_size_or_an_untold_pool_means_no_overlap() -> None:
    rates = {"time_s": 0.0, "host_pages": 100, "prefill_tokens_per_s": 1_000.0, "host_s_per_token": 1e-6}
    f = Fixture(
        ReplicaView(replica_id="a", pool_pages=100, page_size=32, **rates), ReplicaView(replica_id="b", **rates)
    )
    keys = page_keys(np.array(PROMPT, dtype=np.int32), 16, "")
    for each in "ab":
        f.router.apply_snapshot(each, IndexSnapshot(1, keys[:0], keys[:1]))  # on the host
    for _ in range(3):
        assert f.choose().best_overlap[1] == 0
        assert all(each.terms.host_tokens == 0 for each in f.look().values())


def too_long() -> Fixture:
    """a holds the prompt and queues 180 s; b has the first token after 4.1 s, and 150 more wait there."""
    f = Fixture(view("a"), view("b"))
    f.router.choose(RouteQuery(rid="r", token_ids=PROMPT, allowed=frozenset({"a"})))
    f.now_s = 1.0
    f.router.update([view("a", 1.0, queued=180_000, num_waiting=180), view("b", 1.0, queued=3_100, num_waiting=180)])
    return f


def test_for_the_sake_of_others_nobody_waits_longer_than_allowed() -> None:
    f = too_long()
    ask = {
        max_wait_s: f.router.explain_only(RouteQuery(rid="r", token_ids=PROMPT, max_wait_s=max_wait_s))
        for max_wait_s in (200.0, 120.0, 1.0)  # both queues are allowed; b's alone; neither
    }
    terms = ask[120.0].candidates[1].terms
    assert (terms.ttft_s, terms.behind_s) == pytest.approx((4.1, 0.992 * 180))
    assert [(each.replica_id, each.reason) for each in ask.values()] == [
        ("a", Reason.LEAST_DELAY), ("b", Reason.SOONEST), ("b", Reason.SOONEST),
    ]  # fmt: skip


def test_a_queue_that_is_too_long_is_left_out_though_the_first_token_came_sooner_there() -> None:
    """0.008 s after a queue of 1.5 s against 1 s each after 0.9 s and 0.95 s."""
    f = Fixture(view("a"), view("b"), view("c"))
    f.router.choose(RouteQuery(rid="r", token_ids=PROMPT, allowed=frozenset({"a"})))
    f.now_s = 9.0
    f.router.update([view("a", 9.0, queued=1_500), view("b", 9.0, queued=900), view("c", 9.0, queued=950)])
    decision = f.router.explain_only(RouteQuery(rid="r", token_ids=PROMPT, max_wait_s=1.0))
    assert (decision.replica_id, decision.reason) == ("b", Reason.WAIT_ALLOWED)


def test_a_request_that_can_be_in_time_does_not_wait_for_late_ones() -> None:
    """8 of 10 s that are queued are late: with 1 s of its own it begins after 2 s, else after all."""
    f = Fixture(view("a", queued=10_000, late_uncached_tokens=8_000, num_waiting=5, late_factor=2.0))

    def terms(objective_s: float) -> tuple[float, float, float]:
        query = RouteQuery(rid="r", token_ids=PROMPT, max_new_tokens=100, objective_s=objective_s)
        decision = f.router.explain_only(query)
        each = decision.candidates[0].terms
        assert decision.shortest_wait_s == each.queue_s
        assert each.queued_tokens == each.queue_s * 1_000  # those before it, not those that it passes
        return each.queue_s, each.passed_tokens, each.ttft_s

    assert terms(3.0) == (2.0, 8_000, 3.0)
    assert terms(2.9) == (10.0, 0, 11.0)
    f.now_s = 1.0  # what is in time drains first
    assert terms(2.0) == (1.0, 8_000, 2.0)
    f.router.update([view("a", 3.0, queued=8_000, late_uncached_tokens=8_000)])
    f.now_s = 4.0
    assert terms(2.0) == (0.0, 7_000, 1.0)


def test_a_prefix_is_computed_anew_only_where_that_costs_late_requests_less() -> None:
    """Both are in time at once. At "a" 4 wait, all of them late: each of them, and as many to come, waits for the 0.992
    s that "b" has cached."""
    f = Fixture(view("a", queued=4_000, late_uncached_tokens=4_000, num_waiting=4), view("b"))
    f.router.apply("b", [KeysStored(seq=1, keys=page_keys(np.arange(1_000, dtype=np.int32), 16, ""))])
    in_time = f.router.explain_only(RouteQuery(rid="r", token_ids=PROMPT, objective_s=5.0)).candidates
    late = f.router.explain_only(RouteQuery(rid="r", token_ids=PROMPT, objective_s=0.0)).candidates
    assert (in_time[0].terms.behind_s, late[0].terms.behind_s) == (pytest.approx(8 * 0.992), pytest.approx(4 * 0.992))
    assert in_time[1].terms.behind_s == 0.0


def test_the_explanation_says_whether_it_can_be_in_time_and_how_long_it_may_be_passed() -> None:
    f = Fixture(view("a", queued=10_000, late_uncached_tokens=8_000, late_factor=2.0))
    in_time = explain(f.router.explain_only(RouteQuery(rid="r", token_ids=PROMPT, objective_s=5.0)))
    assert in_time.splitlines()[1] == (
        "It can be in time there (5 s): it goes before 8000 prompt tokens of late requests."
    )
    late = explain(f.router.explain_only(RouteQuery(rid="r", token_ids=PROMPT, objective_s=1.5)))
    assert late.splitlines()[1] == (
        "It cannot be in time there (1.5 s): requests that can be go before it, until its first token takes about "
        "17.9 s."
    )
    for ahead_len, objective_s in ((0, 9.0), (2_000, 9.0), (9_000, 1.5)):
        bound = bound_len(ahead_len, 1, objective_s * 1_000, 2.0) / 1_000
        assert latest_s((ahead_len + 1) / 1_000, objective_s, 2.0) == pytest.approx(bound, abs=0.002)
    f.router.update([view("a", 1.0)])  # its order knows no objective
    assert " in time" not in explain(f.router.explain_only(RouteQuery(rid="r", token_ids=PROMPT, objective_s=1.5)))


def holds(replica_id: str, *adapters: str, time_s: float = 0.0, load_s: float = 0.0, **more: float) -> ReplicaView:
    return replace(view(replica_id, time_s, **more), adapters=frozenset(adapters), adapter_load_s=load_s)


def test_a_request_goes_where_its_adapter_is_until_the_queue_there_takes_longer_than_loading_two() -> None:
    """Its own, and later the one that makes room for it."""
    f = Fixture(holds("a", load_s=0.4), holds("b", "x", load_s=0.4))
    first = f.choose(adapter="x")
    assert first.replica_id == "b"
    assert {each.replica_id: each.terms.adapter_s for each in first.candidates} == {"a": 0.4, "b": 0.0}
    assert " adapter " in explain(first).splitlines()[1]
    f.router.done(first, RouteOutcome(ending=Ending.OK))
    f.router.update([holds("a", time_s=1.0, load_s=0.4), holds("b", "x", time_s=1.0, load_s=0.4, queued=700)])
    assert f.choose([7] * 100, adapter="x").replica_id == "b"
    f.router.update([holds("a", time_s=2.0, load_s=0.4), holds("b", "x", time_s=2.0, load_s=0.4, queued=900)])
    assert f.choose([8] * 100, adapter="x").replica_id == "a"


def test_an_adapter_that_an_open_request_has_loaded_counts_as_there_until_that_request_ends() -> None:
    f = Fixture(holds("a", load_s=0.4), holds("b", load_s=0.4))
    sent = f.choose(adapter="x")
    other = {"a": "b", "b": "a"}[sent.replica_id]
    beside = f.choose([7] * 10, adapter="x")
    terms = {each.replica_id: each.terms.adapter_s for each in beside.candidates}
    assert terms == {sent.replica_id: 0.0, other: 0.4}
    f.router.done(sent, RouteOutcome(ending=Ending.ERROR))
    f.router.done(beside, RouteOutcome(ending=Ending.ERROR))
    f.router.check()
    assert {each.terms.adapter_s for each in f.choose(adapter="x").candidates} == {0.4}


def test_loading_takes_what_others_measured_and_is_assumed_before() -> None:
    f = Fixture(holds("a"), holds("b"))
    assert {each.terms.adapter_s for each in f.choose(adapter="x").candidates} == {0.1}
    f = Fixture(holds("a"), holds("b", load_s=0.6))
    assert {each.terms.adapter_s for each in f.choose(adapter="x").candidates} == {0.6}
