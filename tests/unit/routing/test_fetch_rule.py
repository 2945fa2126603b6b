"""When a replica fetches, from which other one, and what a failure teaches."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from kvtransfer.pages import page_keys
from routing.explain import sentence
from routing.fleet_state import ASSUMED_BYTES_PER_S, HELD_S, LinkRates
from routing.router import Router
from routing.types import Decision, Ending, KeysStored, ReplicaView, Role, RouteOutcome, RouteQuery, Tier

PROMPT = np.arange(2_000, dtype=np.int32)
MB = 1 << 20


class Fixture:
    """Replicas "a" and "b"; "a" holds the first 1,936 tokens of PROMPT, in pages of 1 MB, and its queue takes 3 s.
    1,000 tokens are computed in a second."""

    def __init__(
        self, *, fetches: bool = True, queued: int = 3_000, page_bytes: int = MB, tier: Tier = Tier.DEVICE,
        **of_a: object,
    ) -> None:  # fmt: skip
        self.now_s = 100.0
        self.router = Router("estimated_ttft", Random(0), lambda: self.now_s)
        shared = ReplicaView(
            replica_id="", time_s=100.0, prefill_tokens_per_s=1_000.0, pool_pages=1_000, page_bytes=page_bytes,
            fetches=fetches,
        )  # fmt: skip
        self.a = replace(shared, replica_id="a", queued_uncached_tokens=queued, num_waiting=3 if queued else 0, **of_a)  # type: ignore[arg-type]
        self.b = replace(shared, replica_id="b")
        self.router.update([self.a, self.b])
        self.keys = page_keys(PROMPT, 16, "")[:121]
        assert self.router.apply("a", [KeysStored(1, self.keys, tier)])

    def query(self, salt: str = "", **query: object) -> RouteQuery:
        return RouteQuery(rid="r", token_ids=PROMPT, salt=salt, max_new_tokens=100, **query)  # type: ignore[arg-type]

    def choose(self, salt: str = "", **query: object) -> Decision:
        return self.router.choose(self.query(salt, **query))

    def done(self, decision: Decision) -> None:
        self.router.done(decision, RouteOutcome(ending=Ending.OK, ttft_s=1.0))
        self.router.check()


def test_of_layers_with_a_window_a_fetch_brings_one_window_and_of_others_all_tokens() -> None:
    f = Fixture()
    f.router.update([f.a, replace(f.b, token_bytes=MB // 64, border_bytes=5 * MB)])
    fetch = f.choose().fetch
    assert fetch is not None
    assert (fetch.num_tokens, fetch.num_bytes) == (1_936, 1_936 * MB // 64 + 5 * MB)


def test_a_prefix_is_fetched_where_that_is_quicker_than_computing_it_or_waiting_for_its_holder() -> None:
    f = Fixture()
    decision = f.choose()
    fetch = decision.fetch
    assert decision.replica_id == "b"
    assert fetch is not None
    assert (fetch.donor_id, fetch.num_tokens, fetch.end_tokens, fetch.num_bytes) == ("a", 1_936, 1_936, 121 * MB)
    took_s = 0.02 + 121 * MB / ASSUMED_BYTES_PER_S
    assert fetch.took_s == pytest.approx(took_s)
    chosen = decision.candidates[1]
    assert (chosen.overlap_tokens, chosen.terms.fetched_tokens, chosen.terms.own_tokens) == (1_936, 1_936, 64)
    assert chosen.terms.fetch_s == pytest.approx(took_s)  # no queue hides it
    assert decision.predicted_ttft_s == pytest.approx(took_s + 0.064)
    assert sentence(decision).endswith(
        "It fetches 1,936 tokens from a in 0.15 s; computing them takes 1.9; a itself would begin after 3.06 s."
    )
    f.done(decision)


def test_without_a_road_it_is_computed() -> None:
    decision = Fixture(fetches=False).choose()
    assert (decision.replica_id, decision.fetch, decision.overlap_tokens) == ("b", None, 0)
    assert Fixture().choose(one_replica="its last try").fetch is None


def test_what_waits_for_its_turn_anyway_hides_the_fetch() -> None:
    f = Fixture()
    f.router.report(replace(f.b, time_s=100.1, queued_uncached_tokens=2_000, num_waiting=2))
    decision = f.choose()
    assert decision.replica_id == "b"
    assert decision.candidates[1].terms.fetch_s == 0.0
    assert decision.predicted_ttft_s == pytest.approx(2.064)


@pytest.mark.parametrize(("bytes_per_s", "fetches"), [(2e8, True), (5e7, False)])
def test_the_measured_rate_of_the_pair_decides(bytes_per_s: float, fetches: bool) -> None:
    """121 MB take 0.63 and 2.5 s; to compute them takes 1.94."""
    f = Fixture()
    f.router.link.fetched(("a", "b"), 100 * MB, 100 * MB / bytes_per_s)
    assert (f.choose().fetch is not None) == fetches


def test_what_a_donor_has_on_its_host_counts_with_its_load() -> None:
    """1,936 tokens take 0.19 s to load there."""
    fetch = Fixture(tier=Tier.HOST, host_pages=1_000, host_s_per_token=1e-4).choose().fetch
    assert fetch is not None
    assert (fetch.donor_id, fetch.num_tokens) == ("a", 1_936)
    assert fetch.took_s == pytest.approx(0.02 + 0.1936 + 121 * MB / ASSUMED_BYTES_PER_S)


def test_a_donor_answers_after_its_step_and_what_its_requests_lose_meanwhile_is_charged() -> None:
    """A step takes 0.4 s, of which half is left, and 121 MB slow 8 running requests by a twentieth of 0.6 s."""
    f = Fixture(queued=0, num_running=8, decode_step_s=0.4)
    f.router.link.fetched(("a", "b"), 100 * MB, 100 * MB / 2e8)
    chosen = f.choose(allowed=frozenset({"a", "b"})).candidates[1].terms
    sent_s = 121 * MB / 2e8
    assert chosen.fetch_s == pytest.approx(0.02 + 0.2 + sent_s)
    assert chosen.behind_s == pytest.approx(0.05 * sent_s * 8)
    assert Fixture(queued=60_000, num_running=300).choose().fetch is None  # 1.9 s in all to save 1.8


def test_a_receiver_of_a_hot_prefix_is_a_donor_and_the_one_that_was_asked_for_least_is_asked() -> None:
    f = Fixture()
    f.router.link.record(10 * ASSUMED_BYTES_PER_S, 10.0)
    f.router.report(replace(f.b, replica_id="c"))
    first = f.choose(allowed=frozenset({"a", "b"}))
    assert first.fetch is not None
    assert first.fetch.donor_id == "a"
    assert f.router.apply("b", [KeysStored(1, f.keys)])
    f.router.fetched(first, first.fetch.num_bytes, 0.1)
    f.router.report(replace(f.b, replica_id="d"))
    busy = {"queued_uncached_tokens": 3_000, "num_waiting": 3, "time_s": 100.1}
    f.router.report(replace(f.b, **busy))
    second, third = (f.choose(allowed=frozenset({"a", "b", each})) for each in "cd")
    assert [second.replica_id, third.replica_id] == ["c", "d"]
    assert second.fetch is not None
    assert third.fetch is not None
    assert {second.fetch.donor_id, third.fetch.donor_id} == {"a", "b"}
    for each in (first, second, third):
        f.done(each)


def test_a_request_that_moves_fetches_where_it_goes() -> None:
    f = Fixture()
    waits = f.choose(allowed=frozenset({"a"}))
    assert waits.replica_id == "a"
    query = f.query()
    moved = f.router.choose_again(waits, query).decision
    assert moved is not None
    assert moved.replica_id == "b"
    assert moved.fetch is not None
    assert (moved.fetch.donor_id, moved.fetch.num_tokens) == ("a", 1_936)


def test_fetches_under_way_make_the_next_one_longer() -> None:
    f = Fixture()
    f.router.link.record(10 * ASSUMED_BYTES_PER_S, 10.0)
    first = f.choose()
    assert first.fetch is not None
    second = f.choose(allowed=frozenset({"a", "b"}))
    assert second.fetch is None  # "b" is expected to have it now
    third = replace(f.b, replica_id="c")
    f.router.report(third)
    decision = f.choose(allowed=frozenset({"a", "c"}))
    assert decision.fetch is not None
    assert decision.fetch.took_s == pytest.approx(0.02 + 2 * 121 * MB / ASSUMED_BYTES_PER_S)
    f.router.fetched(first, first.fetch.num_bytes, 0.1)
    for each in (first, second, decision):
        f.done(each)


def test_a_replica_that_is_only_expected_to_have_pages_lends_none() -> None:
    f = Fixture()
    first = f.choose()  # goes to "b", which is expected to have them now
    f.router.report(replace(f.b, replica_id="c"))
    decision = f.choose(allowed=frozenset({"b", "c"}), excluded=frozenset({"a"}))
    assert decision.fetch is None
    assert f.router.apply("b", [KeysStored(1, f.keys)])
    again = f.choose(allowed=frozenset({"c", "b"}))
    assert again.replica_id == "b" or (again.fetch is not None and again.fetch.donor_id == "b")
    for each in (first, decision, again):
        f.done(each)


def test_what_another_salt_has_cached_is_computed() -> None:
    assert Fixture().choose(salt="other").fetch is None


def test_a_pair_that_failed_is_left_alone_for_a_while() -> None:
    f = Fixture()
    decision = f.choose()
    f.router.fetched(decision, 0, 0.1, failed=True)
    f.done(decision)
    f.now_s += HELD_S / 2
    links = f.router.link
    assert links.rates(["a"], ["b"])[0, 0] == 0.0
    assert links.rates(["b"], ["a"])[0, 0] > 0.0
    f.now_s += HELD_S
    assert links.rates(["a"], ["b"])[0, 0] > 0.0


def test_a_link_that_was_slow_is_believed_to_be_quicker_as_time_passes() -> None:
    now_s = [0.0]
    links = LinkRates(lambda: now_s[0])
    links.fetched(("a", "b"), 10 * MB, 10.0)
    assert not links.unsure
    assert links.rates(["a"], ["b", "c"]).tolist() == [[MB], [MB]]
    now_s[0] = 30.0
    assert links.unsure
    assert links.rates(["a"], ["b"])[0, 0] == MB
    assert links.rates(["a"], ["b"], hopes=True)[0, 0] == 4 * MB
    now_s[0] = 1_000.0
    assert links.rates(["a"], ["b"], hopes=True)[0, 0] == ASSUMED_BYTES_PER_S


@pytest.mark.parametrize(("queued", "goes_to", "fetches"), [(3_000, "b", True), (500, "a", False)])
def test_whether_a_slow_link_is_quicker_by_now_is_tried_where_the_request_goes_anyway(
    queued: int, goes_to: str, fetches: bool
) -> None:
    """121 MB took 24 s. After 60 s they may take 0.17, and "b" would begin soonest in both cases. No estimate counts on
    that, nor does a request that waits move for it."""
    f = Fixture(queued=queued)
    f.router.link.fetched(("a", "b"), 100 * MB, 20.0)
    measured = f.choose()
    assert measured.fetch is None
    f = Fixture(queued=queued)
    f.router.link.fetched(("a", "b"), 100 * MB, 20.0)
    f.now_s += 60.0
    f.router.update([replace(view, time_s=f.now_s) for view in (f.a, f.b)])
    decision = f.choose()
    assert (decision.replica_id, decision.fetch is not None) == (goes_to, fetches)
    assert decision.predicted_ttft_s == pytest.approx(measured.predicted_ttft_s)
    assert f.router.choose_again(decision, f.query()).decision is None


def test_a_fetch_that_was_late_says_how_slow_the_link_is() -> None:
    f = Fixture()
    decision = f.choose()
    assert decision.fetch is not None
    f.router.fetched(decision, 20 * MB, decision.fetch.within_s, failed=True)
    f.now_s += HELD_S
    assert f.router.link.rates(["a"], ["b"])[0, 0] == pytest.approx(20 * MB / decision.fetch.within_s)


def test_while_nothing_is_known_of_links_one_fetch_at_a_time_finds_out() -> None:
    f = Fixture()
    first = f.choose()
    f.router.report(replace(f.b, replica_id="c"))
    assert first.fetch is not None
    second = f.choose(allowed=frozenset({"a", "c"}))
    assert second.fetch is None
    f.router.fetched(first, first.fetch.num_bytes, 0.1)
    third = f.choose(allowed=frozenset({"a", "c"}), excluded=frozenset({"b"}))
    f.done(first)
    f.done(second)
    f.done(third)


def apart(f: Fixture) -> Router:
    """Return a router of a prefill replica "p", which has computed 960 tokens of PROMPT, and a busy decode replica "d",
    which has 1,936."""
    p, d = replace(f.b, replica_id="p", role=Role.PREFILL), replace(f.a, replica_id="d", role=Role.DECODE)
    router = Router("estimated_ttft", Random(0), lambda: f.now_s)
    router.update([p, d])
    router.apply("p", [KeysStored(1, f.keys[:60])])
    router.apply("d", [KeysStored(1, f.keys)])
    return router


def test_the_prefill_replica_of_a_pair_takes_the_answer_from_the_decode_replica() -> None:
    """The link carries 200 MB/s: 61 MB take 0.32 s, to compute them takes 0.98."""
    f = Fixture()
    router = apart(f)
    router.link.fetched(("d", "p"), 100 * MB, 100 * MB / 2e8)
    decision = router.choose(f.query())
    assert (decision.replica_id, decision.prefill_id) == ("d", "p")
    fetch = decision.fetch
    assert fetch is not None
    assert (fetch.donor_id, fetch.num_tokens, fetch.end_tokens, fetch.num_bytes) == ("d", 976, 1_936, 61 * MB)
    assert decision.overlap_tokens == 1_936
    assert "It fetches 976 tokens from d in 0.34 s; computing them takes 0.98." in sentence(decision)
    router.check()
    router.fetched(decision, fetch.num_bytes, 0.3)
    router.check()
    assert router.link.rates(["d"], ["p"])[0, 0] == pytest.approx(2e8, rel=0.1)
    assert router.choose(f.query(one_replica=True)).fetch is None


def test_a_fetch_that_was_late_says_nothing_of_kv_transfers() -> None:
    """It brought nothing of 61 MB. A prompt of another conversation is handed over, in 0.13 s."""
    f = Fixture()
    router = apart(f)
    decision = router.choose(f.query())
    assert decision.fetch is not None
    router.fetched(decision, 0, decision.fetch.within_s, failed=True)
    f.now_s += HELD_S
    assert router.link.rates(["d"], ["p"])[0, 0] == pytest.approx(MB / decision.fetch.within_s)
    router.done(decision, RouteOutcome(ending=Ending.OK, ttft_s=1.0))
    other = router.choose(f.query(salt="other"))
    assert (other.replica_id, other.prefill_id) == ("d", "p")
    assert other.pair is not None
    assert (other.pair.link_measured, other.pair.link_bytes_per_s) == (False, ASSUMED_BYTES_PER_S)


def test_a_slow_link_to_a_prefill_replica_is_tried_again_though_kv_transfers_go_on() -> None:
    """61 MB took 12 s. After 60 s they may take 0.8, and that KV transfers are quick does not tell."""
    f = Fixture()
    router = apart(f)
    router.link.fetched(("d", "p"), 100 * MB, 20.0)
    assert router.explain_only(f.query()).fetch is None
    f.now_s += 60.0
    router.link.record(100 * MB, 0.1)
    router.update([replace(view, time_s=f.now_s) for view in router.views])
    decision, measured = router.explain_only(f.query()), router.explain_only(f.query(salt="other"))
    assert decision.prefill_id == measured.prefill_id == "p"
    assert (decision.fetch is not None, measured.fetch) == (True, None)
    assert decision.overlap_tokens == 960  # no estimate counts on it
