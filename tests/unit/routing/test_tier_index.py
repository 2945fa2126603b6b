"""Tiers in the router: what each replica could load, from where, how long that takes, and where a request then goes."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.pages import Tier, page_keys
from routing.explain import explain
from routing.index import TierIndex, pages_of
from routing.router import Router
from routing.types import (
    Decision,
    IndexSnapshot,
    KeysCleared,
    KeysRemoved,
    KeysStored,
    ReplicaView,
    Role,
    RouteQuery,
)

PROMPT = list(range(1, 1602))  # 100 pages of 16, and a token that is always computed
PAGES = page_keys(np.array(PROMPT, dtype=np.int32), 16, "")


def index(*, host: int = 100, replicas: int = 2) -> TierIndex:
    made = TierIndex()
    for replica in range(replicas):
        made.join(replica, capacity=100, host_pages=host)
    return made


def reach(i: TierIndex, prompt: list[int], *replicas: int) -> list[tuple[int, int, int]]:
    i.check()
    found = i.reach(prompt, np.array(replicas, dtype=np.intp))
    return list(zip(found.device.tolist(), found.own.tolist(), found.store.tolist(), strict=True))


def test_a_store_that_a_replica_does_not_use_is_not_counted_for_it() -> None:
    i = index(replicas=3)
    i.use_store(0, "disk")
    i.use_store(1, "bucket")
    i.stored(0, [1], Tier.STORE)
    i.stored(2, [1], Tier.STORE)  # it names none
    assert reach(i, [1, 2], 0, 1, 2) == [(0, 0, 1), (0, 0, 0), (0, 0, 0)]
    i.use_store(0, "")  # it does not work any more
    assert reach(i, [1, 2], 0) == [(0, 0, 0)]
    i.use_store(2, "disk")
    assert reach(i, [1, 2], 2) == [(0, 0, 1)]
    i.removed(2, [1], Tier.STORE)
    assert reach(i, [1, 2], 2) == [(0, 0, 0)]


def test_a_replica_that_leaves_takes_its_tiers_along_and_not_the_store() -> None:
    i = index(replicas=20)  # more than the first arrays have
    for replica in (3, 19):
        i.use_store(replica, "disk")
    i.stored(3, [1], Tier.HOST)
    i.stored(3, [2], Tier.STORE)
    i.leave(3)
    i.join(3, capacity=100, host_pages=100)
    i.use_store(3, "disk")
    assert reach(i, [1], 3, 19) == [(0, 0, 0), (0, 0, 0)]
    assert reach(i, [2], 3, 19) == [(0, 0, 1), (0, 0, 1)]


def test_a_store_forgets_what_was_reported_longest_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("routing.index.STORE_PAGES", 3)
    i = index(replicas=1)
    i.use_store(0, "disk")
    i.stored(0, [1, 2, 3], Tier.STORE)
    i.stored(0, [1], Tier.STORE)
    i.stored(0, [4], Tier.STORE)
    assert [reach(i, [page], 0)[0][2] for page in (1, 2, 3, 4)] == [1, 0, 1, 1]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["device", "host", "store", "removed", "missed", "expect"]), st.integers(0, 1),
                  st.lists(st.integers(1, 8), min_size=1, max_size=4, unique=True)), max_size=25,
    )
)  # fmt: skip
def test_the_reach_is_what_sets_of_pages_say(done: list[tuple[str, int, list[int]]]) -> None:
    i, store = index(), set[int]()
    i.use_store(0, "disk")
    i.use_store(1, "disk")
    device: list[set[int]] = [set(), set()]
    host: list[set[int]] = [set(), set()]
    for number, (what, replica, pages) in enumerate(done):
        if what == "expect":
            i.expect(replica, pages, number=number)
            i.unexpect(replica, pages, number=number)
        elif what in ("removed", "missed"):
            i.removed(replica, pages, Tier.STORE if what == "missed" else Tier.DEVICE)
        else:
            i.stored(replica, pages, Tier(what))
        if what == "store":
            store |= set(pages)
        elif what == "missed":
            store -= set(pages)
        elif what != "expect":
            for held in (device[replica], host[replica]):
                held -= set(pages)
            if what != "removed":
                (device if what == "device" else host)[replica].update(pages)
    prompt = list(range(1, 9))
    for replica, found in enumerate(reach(i, prompt, 0, 1)):
        on_device = longest(prompt, device[replica])
        own = longest(prompt, device[replica] | host[replica])
        assert found == (on_device, own, own + longest(prompt[own:], store))


def longest(prompt: list[int], held: set[int]) -> int:
    return next((at for at, page in enumerate(prompt) if page not in held), len(prompt))


class Fleet:
    """A router over replicas a and b that compute 1,000 tokens/s, with tiers whose seconds are easy to see."""

    def __init__(self, policy: str = "estimated_ttft", *, host_s: float = 1e-4, store_s: float = 2e-4) -> None:
        self.router = Router(policy, Random(1), lambda: 10.0)
        self.views = [
            ReplicaView(
                replica_id=each, time_s=10.0, pool_pages=1000, host_pages=1000, store="disk", page_bytes=16_000,
                prefill_tokens_per_s=1000.0, host_s_per_token=host_s, store_s_per_token=store_s, store_latency_s=0.01,
            )
            for each in ("a", "b")
        ]  # fmt: skip
        self.router.update(self.views)

    def tell(self, replica: str, *, device: int = 0, host: int = 0, store: int = 0) -> None:
        """Tell a snapshot in which the first pages of PROMPT lie so."""
        ends = np.cumsum([device, host, store])
        parts = [PAGES[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        assert self.router.apply_snapshot(replica, IndexSnapshot(1, *parts))

    def choose(self) -> Decision:
        decision = self.router.choose(RouteQuery(rid="me", token_ids=PROMPT))
        self.router.check()
        return decision


def test_tokens_of_each_tier_and_their_seconds_are_terms_of_the_time_to_the_first_token() -> None:
    f = Fleet()
    f.tell("a", device=25, host=25, store=25)
    decision = f.choose()
    terms = decision.candidates[0].terms
    assert (terms.device_tokens, terms.host_tokens, terms.store_tokens, terms.own_tokens) == (400, 400, 400, 401)
    assert terms.load_s == pytest.approx(400 * 1e-4 + 0.01 + 400 * 3e-4)  # the store's pages go through the host
    assert terms.ttft_s == pytest.approx(0.401 + terms.load_s)
    assert (decision.replica_id, decision.overlap_tokens, decision.predicted_ttft_s) == ("a", 1200, terms.ttft_s)
    assert (decision.host_tokens, decision.store_tokens, decision.load_s) == (400, 400, terms.load_s)
    assert "1200 tokens (400 of them on the host, 400 in the store: 0.170 s to load) are predicted" in explain(decision)


def test_a_longer_prefix_in_a_slow_tier_loses_against_a_shorter_one_on_the_device() -> None:
    f = Fleet(host_s=5e-4)
    f.tell("a", host=60)  # 960 tokens: 0.48 s to load, 0.641 s to compute the rest
    f.tell("b", device=40)  # 640 tokens: 0.961 s for the rest
    assert f.choose().replica_id == "b"
    f = Fleet(host_s=1e-4)  # 0.096 s to load
    f.tell("a", host=60)
    f.tell("b", device=40)
    assert f.choose().replica_id == "a"


def test_what_is_slower_to_load_than_to_compute_counts_as_computed() -> None:
    f = Fleet(host_s=2e-3)  # twice what computing takes
    f.tell("a", device=10, host=50, store=40)
    terms = f.choose().candidates[0].terms
    assert (terms.device_tokens, terms.host_tokens, terms.store_tokens) == (160, 0, 0)  # the store's only follow
    assert (terms.own_tokens, terms.load_s) == (1441, 0.0)


def test_the_latency_of_a_store_is_not_worth_a_short_read() -> None:
    f = Fleet()
    f.tell("a", store=1)  # 16 tokens: 10 ms and 4.8 ms against 16 ms
    assert f.choose().candidates[0].terms.store_tokens == 16
    f = Fleet(store_s=4e-4)  # 10 ms and 8 ms
    f.tell("a", store=1)
    assert f.choose().candidates[0].terms.store_tokens == 0


def test_a_shared_store_counts_for_every_replica_that_names_it() -> None:
    f = Fleet()
    f.tell("a", store=100)
    query = RouteQuery(rid="me", token_ids=PROMPT)
    assert [each.terms.store_tokens for each in f.router.explain_only(query).candidates] == [1600, 1600]
    f.router.update([f.views[0], replace(f.views[1], time_s=11.0, store="")])  # b's does not work any more
    assert [each.terms.store_tokens for each in f.router.explain_only(query).candidates] == [1600, 0]


def test_the_rate_of_a_replica_that_has_loaded_nothing_is_assumed_from_its_page_bytes() -> None:
    f = Fleet(host_s=0.0)
    f.tell("a", host=100)
    assert f.choose().candidates[0].terms.load_s == pytest.approx(1600 * 1000 / 2e9)  # 1,000 bytes a token


def test_events_move_pages_between_tiers() -> None:
    f = Fleet()
    f.router.apply("a", [KeysStored(1, PAGES), KeysStored(2, PAGES[50:], Tier.HOST), KeysRemoved(3, PAGES[90:])])
    f.router.apply("a", [KeysStored(4, PAGES[90:], Tier.STORE)])
    terms = f.choose().candidates[0].terms
    assert (terms.device_tokens, terms.host_tokens, terms.store_tokens) == (800, 640, 160)
    f = Fleet()
    f.router.apply("a", [KeysStored(1, PAGES), KeysStored(2, PAGES[:10], Tier.STORE), KeysCleared(3)])
    terms = f.choose().candidates[0].terms
    assert (terms.device_tokens, terms.host_tokens, terms.store_tokens) == (0, 0, 160)


def test_pages_to_load_need_room_in_the_pool_as_those_to_compute_do() -> None:
    f = Fleet()
    f.views = [
        ReplicaView(
            replica_id="a", time_s=11.0, pool_pages=150, host_pages=1000, page_bytes=16_000, pool_utilization=0.5,
            prefill_tokens_per_s=1000.0, decode_step_s=0.01, host_s_per_token=1e-4,
        )
    ]  # fmt: skip
    f.router.update(f.views)
    query = RouteQuery(rid="me", token_ids=PROMPT)
    cold = f.router.explain_only(query).candidates[0].terms
    f.router.apply_snapshot("a", IndexSnapshot(1, PAGES[:0], PAGES))
    warm = f.router.explain_only(query).candidates[0].terms
    assert (cold.own_tokens, warm.own_tokens) == (1601, 1)
    assert warm.pressure_s == cold.pressure_s > 0


def test_a_decode_replica_loads_instead_of_receiving() -> None:
    f = Fleet()
    f.router.update(
        [
            ReplicaView(
                replica_id=each, time_s=11.0, pool_pages=1000, host_pages=1000, page_bytes=16_000, role=role,
                prefill_tokens_per_s=1000.0, host_s_per_token=1e-4,
            )
            for each, role in (("d", Role.DECODE), ("p", Role.PREFILL))
        ]
    )  # fmt: skip
    f.router.apply_snapshot("d", IndexSnapshot(1, PAGES[:0], PAGES[:50]))
    decision = f.choose()
    assert decision.pair is not None
    chosen = decision.pair.chosen
    assert (chosen.cached_tokens, chosen.own_tokens, chosen.transfer_pages) == (800, 801, 51)
    assert chosen.load_s == pytest.approx(0.08)
    assert chosen.ttft_s == pytest.approx(0.801 + 0.08)
    assert chosen.receive_cost_s == pytest.approx(51 * 16_000 / 1e9 + 0.02 + 0.08)


def test_a_router_without_tiers_reads_one_index() -> None:
    i = TierIndex()
    i.join(0, capacity=100)
    i.stored(0, pages_of(PAGES))
    found = i.reach(pages_of(PAGES), np.array([0], dtype=np.intp))
    assert found.store is found.own is found.device
