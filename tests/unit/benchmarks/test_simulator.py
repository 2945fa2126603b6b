"""The simulator: its parts, exact times where a hand can compute them, several routers, and a split."""

import json
import pathlib
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import cast

import numpy as np
import pytest

import routing.router
from benchmarks import workloads
from benchmarks.router import summary
from benchmarks.sim_cluster import ORACLE, Cluster, Decoder, Record, Setup, Split, pick
from benchmarks.sim_load import Events, SimRequest, copies, jittered, of_workload, read_trace
from benchmarks.sim_replica import SimDecode, SimJob, SimPool, SimReplica, Speed
from benchmarks.sim_routers import Apart, Limits, Reports, Routers, SoonestRouter
from kvtransfer.pages import page_keys
from routing.router import Router
from routing.types import IndexEvent, IndexSnapshot, KeysRemoved, KeysStored, Reason, ReplicaView, RouteQuery

HAND = Setup(
    num_replicas=2,
    pool_tokens=10_000,
    page_size=100,
    speed=Speed(prefill_tokens_per_s=100.0, decode_base_s=0.5, decode_per_request_s=0.0, rate_noise=0.0),
)
TWO = replace(HAND, num_routers=2)
SPLIT = replace(HAND, num_replicas=1, split=Split(num_decoders=1, bytes_per_token=10, bytes_per_s=1000.0))


def request(number: int, *, blocks: Sequence[int], at_s: float = 0.0, output_len: int = 1) -> SimRequest:
    """A prompt of 100 tokens a block."""
    return SimRequest(
        number=number,
        arrival_s=at_s,
        after=None,
        input_len=100 * len(blocks),
        output_len=output_len,
        prompt=np.array(blocks, dtype=np.int32),
        repeat=100,
        answer=np.array([-1 - number], dtype=np.int32),
    )


def replica_of(events: Events, *, pages: int = 100) -> SimReplica:
    return SimReplica(
        "r0",
        speed=replace(HAND.speed, chunk_tokens=50),
        pool=SimPool(pages),
        page_size=100,
        events=events,
        rng=Random(0),
        ended=lambda replica, job: None,
    )


def told(events: Sequence[IndexEvent]) -> list[tuple[type, list[int]]]:
    return [(type(event), event.keys.tolist()) for event in events if isinstance(event, KeysStored | KeysRemoved)]


def run_of(policy: str, requests: Sequence[SimRequest], setup: Setup) -> tuple[Cluster, list[Record]]:
    """A checked run, its records in the order of the requests."""
    cluster = Cluster(policy, requests, setup)
    records = sorted(cluster.run(), key=lambda record: record.number)
    cluster.check()
    return cluster, records


def apart_of(cluster: Cluster) -> Apart:
    assert cluster.routers is not None
    apart = cluster.routers.apart()
    assert apart is not None
    return apart


def chats(num_users: int = 12, seed: int = 0) -> list[SimRequest]:
    workload = workloads.multi_turn(
        num_users=num_users, num_turns=5, turn_len=400, output_len=100, vocab_size=1000, seed=seed
    )
    return of_workload(workload, requests_per_s=6.0, think_s=1.0, seed=seed)


def tight(seed: int = 0) -> Setup:
    """Three replicas whose pools hold two conversations each."""
    speed = Speed(prefill_tokens_per_s=1000.0)
    limits = Limits(event_loss=0.1)
    return Setup(num_replicas=3, pool_tokens=6000, page_size=50, speed=speed, limits=limits, seed=seed)


def timeless(records: list[Record]) -> list[Record]:
    """Without the CPU time that decisions took."""
    return [replace(record, decision_s=0.0) for record in records]


def test_events_happen_in_order_of_time_then_of_scheduling() -> None:
    events = Events()
    seen: list[str] = []

    def a_then_b() -> None:
        seen.append("a")
        events.after(0.0, lambda: seen.append("b"))

    events.at(2.0, lambda: seen.append("c"))
    events.at(1.0, a_then_b)
    events.at(2.0, lambda: seen.append("d"))
    events.run(until=lambda: False)
    assert seen == ["a", "b", "c", "d"]
    with pytest.raises(ValueError, match=r"at 1\.0 s was wanted, it is 2\.0 s"):
        events.at(1.0, lambda: None)


def test_decode_steps_slow_with_the_batch() -> None:
    """Steps of 1 s and 1 s more a request. A: 2 steps from 0 s; B: 2 steps from 2 s, when A has one left.
    Together a step takes 3 s, so A ends at 5 s; B has one left, alone: 2 s."""
    events = Events()
    ends: dict[str, float] = {}
    decode = SimDecode(events, base_s=1.0, per_request_s=1.0)
    events.at(0.0, lambda: decode.join(2, lambda: ends.update(a=events.now_s)))
    events.at(2.0, lambda: decode.join(2, lambda: ends.update(b=events.now_s)))
    events.run(until=lambda: False)
    assert ends == {"a": pytest.approx(5.0), "b": pytest.approx(7.0)}
    assert len(decode) == 0


def test_the_pool_evicts_the_least_recently_used_and_the_end_of_a_sequence_first() -> None:
    pool = SimPool(4)
    for keys in ([1, 2], [3]):
        assert pool.take([], len(keys))
        pool.store(keys)
        pool.release(keys, 0)
    assert pool.take([1], 2)  # 1 in use; 2 is the oldest that nobody uses and goes; 3 stays
    assert pool.match_len([1, 2]) == 1
    assert pool.match_len([3]) == 1
    assert told(pool.events) == [(KeysStored, [1, 2]), (KeysStored, [3]), (KeysRemoved, [2])]
    assert [event.seq for event in pool.events] == [1, 2, 3]
    pool.check()


def test_a_pool_gives_all_pages_or_none_and_never_those_in_use() -> None:
    pool = SimPool(3)
    assert pool.take([], 2)
    pool.store([1, 2])
    assert not pool.take([1], 2)  # 1 and 2 in use, one page free
    assert pool.num_used == 2
    assert pool.utilization == pytest.approx(2 / 3)
    assert pool.take([1], 1)
    pool.release([1, 2], 0)
    assert pool.match_len([1, 2]) == 2  # 2 may go, 1 is still in use
    pool.check()


def test_a_page_that_is_cached_already_is_not_kept_twice() -> None:
    pool = SimPool(4)
    assert pool.take([], 1)
    assert pool.take([], 1)
    pool.store([7])
    pool.store([7])
    assert (pool.num_cached, pool.num_private) == (1, 0)
    assert told(pool.events) == [(KeysStored, [7])]
    pool.release([7], 0)
    pool.release([7], 0)
    pool.check()


def test_a_trace_gives_prompts_that_share_tokens_where_blocks_are_shared(tmp_path: pathlib.Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 1000, "input_length": 1030, "output_length": 5, "hash_ids": [10**12, 8, 9]},
        {"timestamp": 3000, "input_length": 1536, "output_length": 1, "hash_ids": [10**12, 8, 11]},
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    first, second = read_trace(trace, rate=2.0)
    assert (first.arrival_s, second.arrival_s) == (0.5, 1.5)
    assert len(first.token_ids()) == 1035
    same = first.token_ids()[:1030] == second.token_ids()[:1030]
    assert same[:1024].all()
    assert not same[1024:].any()


def test_a_tail_without_a_block_is_shared_with_no_request(tmp_path: pathlib.Path) -> None:
    trace = tmp_path / "trace.jsonl"
    line = {"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [3]}
    trace.write_text((json.dumps(line) + "\n") * 2)
    first, second = (r.token_ids() for r in read_trace(trace))
    assert (first[:512] == second[:512]).all()
    assert not (first[512:1024] == second[512:1024]).any()


def test_a_bad_line_is_named(tmp_path: pathlib.Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [0]}\n{"timestamp": 0}\n')
    with pytest.raises(ValueError, match="line 2 is not a request: KeyError"):
        read_trace(trace)


def test_copies_share_no_token_and_come_a_little_later() -> None:
    one = [request(0, blocks=[0, 1])]
    three = copies(one, 3)
    assert [r.arrival_s for r in three] == [0.0, 20.0, 40.0]
    tokens = [set(r.token_ids().tolist()) for r in three]
    assert not tokens[0] & tokens[1]
    assert not tokens[1] & tokens[2]


def test_each_request_comes_at_most_the_jitter_later_and_the_same_for_every_policy() -> None:
    requests = [request(n, at_s=3.0, blocks=[n]) for n in range(50)]
    requests.append(replace(requests[0], number=50, after=0, arrival_s=1.0))
    late = jittered(requests, 3.0, seed=1)
    came = [each.arrival_s for each in late[:50]]
    assert 3.0 <= min(came) < 3.5 < 5.5 < max(came) <= 6.0
    assert late[50].arrival_s == 1.0  # since the answer before it: not the trace's to say
    assert [each.arrival_s for each in jittered(requests, 3.0, seed=1)] == [each.arrival_s for each in late]
    assert [each.arrival_s for each in jittered(requests, 0.0, seed=1)] == [each.arrival_s for each in requests]


def test_a_next_turn_holds_the_last_answer_and_waits_for_it() -> None:
    chats = workloads.multi_turn(num_users=1, num_turns=2, turn_len=10, output_len=4, vocab_size=1000, seed=0)
    first, second = of_workload(chats, requests_per_s=1.0, think_s=7.0, seed=0)
    assert (second.after, second.arrival_s) == (0, 7.0)
    assert second.input_len == 24
    assert (second.token_ids()[:14] == first.token_ids()).all()


def test_an_agents_next_turn_comes_when_its_tool_has_answered() -> None:
    work = workloads.agents(num_sessions=1, num_turns=2, head_len=10, tool_len=4, output_len=4, vocab_size=1000, seed=0)
    _, second = of_workload(work, requests_per_s=1.0, think_s=7.0, seed=0)
    assert (second.after, second.arrival_s) == (0, work.conversations[0].turns[1].pause_s)


class HeardRouter:
    """Notes what it hears; takes page events only in order, as the router does."""

    def __init__(self) -> None:
        self.views: list[ReplicaView] = []
        self.seqs: list[int] = []
        self.snapshots: list[IndexSnapshot] = []
        self._next = 1

    def update(self, views: Sequence[ReplicaView]) -> None:
        self.views += views

    def apply(self, replica_id: str, events: Sequence[IndexEvent]) -> bool:
        self.seqs += [event.seq for event in events]
        if events[0].seq > self._next:
            return False
        self._next = events[-1].seq + 1
        return True

    def apply_snapshot(self, replica_id: str, snapshot: IndexSnapshot) -> None:
        self.snapshots.append(snapshot)
        self._next = snapshot.seq + 1


def test_reports_are_late_and_count_progress_in_chunks() -> None:
    """200 tokens at 100/s from 0 s: measured at 0.75 s, when one chunk of 50 is through; heard at 1 s."""
    events, router = Events(), HeardRouter()
    replica = replica_of(events)
    limits = Limits(period_s=0.75, delay_s=0.25)
    Reports(cast(Router, router), [replica], limits=limits, events=events, rng=Random(0)).start()
    replica.submit(SimJob(request(0, blocks=[1, 2]), 100))
    events.run(until=lambda: events.now_s >= 1.0)
    first, second = router.views
    assert (first.time_s, first.queued_uncached_tokens) == (0.0, 0)  # before the request came
    assert (second.time_s, second.queued_uncached_tokens, second.num_running) == (1.0, 150, 1)
    assert second.prefill_tokens_per_s == 0.0  # no prompt is through: not measured yet


def test_lost_events_show_as_a_gap_and_are_healed_by_one_snapshot() -> None:
    """Pages are stored at 1, 2 and 3 s; batches leave at 1.6 s (lost) and 3.2 s, with events 2 and 3."""
    events, router = Events(), HeardRouter()
    replica = replica_of(events)

    class FirstIsLost(Random):
        draws = iter([0.0, 1.0, 1.0, 1.0])

        def random(self) -> float:
            return next(self.draws)

    limits = Limits(period_s=1.6, delay_s=0.1, event_loss=0.5)
    reports = Reports(cast(Router, router), [replica], limits=limits, events=events, rng=FirstIsLost())
    reports.start()
    for number in range(3):
        replica.submit(SimJob(request(number, blocks=[number]), 100))
    events.run(until=lambda: events.now_s > 4.0)
    assert router.seqs == [2, 3]
    assert (reports.num_lost, reports.num_snapshots) == (1, 1)
    (snapshot,) = router.snapshots
    assert (snapshot.seq, len(snapshot.keys)) == (3, 3)


def test_a_request_that_no_pool_holds_is_refused_with_the_sizes() -> None:
    replica = replica_of(Events())
    with pytest.raises(ValueError, match="needs 101 pages, a pool has 100: raise --pool-tokens"):
        replica.submit(SimJob(request(0, blocks=range(101)), 100))


def test_the_simulator_runs_the_production_router() -> None:
    cluster = Cluster("round_robin", [], HAND)
    assert cluster.routers is not None
    assert [type(router) for router in cluster.routers.all] == [routing.router.Router]


def test_two_replicas_in_turn_give_the_times_that_a_hand_computes() -> None:
    """100 tokens/s. r0: 400 tokens until 4 s, then the same prompt again until 5 s (3 of its 4 pages are cached:
    the last token must run). r1: 200 tokens until 2 s, then 100 more until 3 s. Two more tokens take 0.5 s each."""
    requests = [
        request(0, at_s=0.0, blocks=[1, 2, 3, 4], output_len=3),
        request(1, at_s=0.0, blocks=[5, 6]),
        request(2, at_s=1.0, blocks=[1, 2, 3, 4]),
        request(3, at_s=1.0, blocks=[7]),
    ]
    _, records = run_of("round_robin", requests, HAND)
    assert [record.replica_id for record in records] == ["r0000", "r0001", "r0000", "r0001"]
    assert [record.ttft_s for record in records] == pytest.approx([4.0, 2.0, 4.0, 2.0])
    assert [record.ended_s for record in records] == pytest.approx([5.0, 2.0, 5.0, 3.0])
    assert [record.cached_tokens for record in records] == [0, 0, 300, 0]
    rows = summary("s", "round_robin", records, num_replicas=2, objective_s=3.0)
    values = {row.figure: row.value for row in rows}
    assert values["hit"] == pytest.approx(100 * 300 / 1100)
    assert values["TTFT mean"] == pytest.approx(3.0)
    assert values["within 3 s"] == pytest.approx(2 / 5)  # the last ends at 5 s
    assert values["skew"] == pytest.approx(500 / 400)
    assert rows[0].note == "next_in_turn 4"


def test_the_oracle_waits_for_a_prefix_only_while_that_is_sooner() -> None:
    """r0 computes 4 pages until 4 s. The same prompt at 1 s: there at 5 s, afresh on r1 at 5 s too: the first.
    A prompt that shares one page with it: at 8 s on r0, at 5 s on r1."""
    requests = [
        request(0, at_s=0.0, blocks=[1, 2, 3, 4]),
        request(1, at_s=1.0, blocks=[1, 2, 3, 4]),
        request(2, at_s=1.0, blocks=[1, 9, 9, 9]),
    ]
    _, records = run_of(ORACLE, requests, HAND)
    assert [record.replica_id for record in records] == ["r0000", "r0000", "r0001"]
    assert [record.ttft_s for record in records] == pytest.approx([4.0, 4.0, 4.0])


@pytest.mark.parametrize("policy", ["round_robin", "power_of_two", "estimated_ttft", "oracle"])
def test_every_request_ends_once_and_pools_stay_within_their_capacity(policy: str) -> None:
    requests = chats()

    def check_pools() -> None:
        for replica in cluster.replicas:
            replica.pool.check()

    cluster = Cluster(policy, requests, tight(), progress=check_pools)
    records = cluster.run()
    assert sorted(record.number for record in records) == list(range(len(requests)))
    assert all(0.0 < record.ttft_s <= record.ended_s - record.arrival_s + 1e-9 for record in records)
    assert all(replica.pool.num_private == 0 and replica.num_running == 0 for replica in cluster.replicas)
    if cluster.routers is not None:
        assert cluster.routers.num_open == 0
    cluster.check()


def test_what_a_pool_holds_is_whole_prefixes() -> None:
    requests = chats()
    cluster = Cluster("power_of_two", requests, tight())
    cluster.run()
    evicted = False
    for replica in cluster.replicas:
        cached = set(replica.pool.cached_keys())
        for each in requests:
            keys = SimJob(each, 50).keys
            held = sum(key in cached for key in keys)
            assert held == replica.pool.match_len(keys)  # no page without the one in front of it
            evicted |= 0 < held < len(keys)
    assert evicted  # or the test shows nothing


def test_the_same_seed_gives_the_same_run_and_another_seed_another() -> None:
    first, again, other = (timeless(Cluster("estimated_ttft", chats(), tight(seed)).run()) for seed in (0, 0, 1))
    assert first == again
    assert first != other


def test_estimated_ttft_beats_turns_on_conversations() -> None:
    setup, mean_s = replace(tight(), pool_tokens=60_000), dict[str, float]()
    for policy in ("round_robin", "estimated_ttft"):
        _, records = run_of(policy, chats(num_users=40), setup)
        mean_s[policy] = sum(record.ttft_s for record in records) / len(records)
    assert mean_s["estimated_ttft"] < 0.7 * mean_s["round_robin"]


def choice(router: Router) -> tuple[str, Reason]:
    """900 tokens, of which r0 holds 800: 10 s of queue and 1 s there; 1 s of queue and 9 s at r1, where a request
    waits that would wait 8 s longer. Both compute 100 tokens/s."""
    token_ids = np.arange(900, dtype=np.int32)
    r0 = ReplicaView(
        replica_id="r0", time_s=0.0, num_running=1, num_waiting=1, queued_uncached_tokens=1000, pool_pages=100,
        page_size=100, prefill_tokens_per_s=100.0,
    )  # fmt: skip
    router.update([r0, replace(r0, replica_id="r1", queued_uncached_tokens=100)])
    assert router.apply_snapshot("r0", IndexSnapshot(seq=1, keys=page_keys(token_ids[:800], 100, "")))
    decision = router.choose(RouteQuery(rid="x", token_ids=token_ids))
    return decision.replica_id, decision.reason


def test_soonest_leaves_out_what_a_choice_costs_waiting_requests() -> None:
    selfish = SoonestRouter(Random(0), lambda: 0.0, 100)
    assert choice(Router("estimated_ttft", Random(0), lambda: 0.0, 100)) == ("r0", Reason.LEAST_DELAY)
    assert choice(selfish) == ("r1", Reason.SOONEST)
    assert selfish.policy == "soonest"


def test_every_router_gets_every_event_once_and_a_snapshot_takes_none_from_the_others() -> None:
    """Pages 1 and 2 are stored, and the first router hears of both at 1 s; at 1.5 s page 1 goes. The first asks for a
    snapshot then, and hears of nothing more; the second hears of all three at 2 s."""
    events, routers = Events(), (HeardRouter(), HeardRouter())
    replica = replica_of(events, pages=2)
    first, second = (
        Reports(cast(Router, router), [replica], limits=Limits(period_s=1.0, delay_s=0.1), events=events, rng=Random(0))
        for router in routers
    )
    for key in (1, 2):
        assert replica.pool.take([], 1)
        replica.pool.store([key])
        replica.pool.release([key], 0)
    first.start()
    second.start(late_s=1.0)

    def page_1_goes() -> None:
        assert replica.pool.take([], 1)
        first._take_snapshot("r0")

    events.at(1.5, page_1_goes)
    events.run(until=lambda: events.now_s > 2.5)
    assert (routers[0].seqs, routers[1].seqs) == ([1, 2], [1, 2, 3])
    (snapshot,) = routers[0].snapshots
    assert (snapshot.seq, snapshot.keys.tolist()) == (3, [2])
    assert routers[1].snapshots == []
    assert told(replica.pool.events)[2] == (KeysRemoved, [1])


def test_what_another_router_sent_is_not_known_before_the_reports_tell_it() -> None:
    """At 1 s two prompts of one page come. The second router believes both replicas idle, and draws; later it knows."""
    requests = [request(n, at_s=1.0, blocks=[n]) for n in range(2)]
    cluster = Cluster("estimated_ttft", requests, TWO)
    seen: list[list[int]] = []
    assert cluster.routers is not None
    both = cluster.routers.all

    def look() -> None:
        seen.append([sum(view.num_running + view.num_waiting for view in router.views) for router in both])

    cluster.events.at(1.01, look)
    cluster.events.at(1.3, look)
    cluster.run()
    assert seen == [[0, 0], [2, 2]]
    cluster.check()


def test_routers_take_turns_and_agree_once_the_last_reports_have_come() -> None:
    """Ten requests in 42 s, the indexes compared every 10 s."""
    requests = [request(n, at_s=4.0 * n + 3.95, blocks=[n, 50 + n]) for n in range(10)]
    cluster, _ = run_of("least_tokens", requests, TWO)
    assert cluster.routers is not None
    assert [sum(router.endings.values()) for router in cluster.routers.all] == [5, 5]
    apart = apart_of(cluster)
    assert (apart.routers, apart.samples, apart.pages_at_end) == (2, 4, 0.0)
    cluster.check()


def test_pages_that_one_of_two_routers_expects_are_apart_until_they_are_reported() -> None:
    """The first prompt is through at 3 s: 2 pages that both know. The second comes at 9.5 s and takes until 12.5 s: at
    10 s only its router expects its 3 pages, and 3 of 5 differ."""
    requests = [request(0, at_s=1.0, blocks=[1, 2]), request(1, at_s=9.5, blocks=[3, 4, 5])]
    apart = apart_of(run_of("round_robin", requests, TWO)[0])
    assert (apart.samples, apart.pages_max, apart.pages_at_end) == (1, pytest.approx(3 / 5), 0.0)


def test_a_decision_that_the_other_router_would_not_make_is_counted() -> None:
    """Round robin by two routers: each sends its first to r0000, its second to r0001. Asked for the first's first, the
    second says r0000 too; asked for the second's first, the first is one turn ahead: r0001; so two of four."""
    cluster, records = run_of("round_robin", [request(n, at_s=float(n), blocks=[n]) for n in range(4)], TWO)
    assert [record.replica_id for record in records] == ["r0000", "r0000", "r0001", "r0001"]
    assert apart_of(cluster).decisions == 0.5


@pytest.mark.parametrize("policy", ["estimated_ttft", "random", "round_robin"])
def test_comparing_changes_nothing(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixty requests through two routers, many decided by a draw: asking the other each time leaves no trace."""
    requests = [request(n, at_s=n / 2, blocks=[n % 7, 100 + n]) for n in range(60)]

    def records() -> list[Record]:
        cluster = Cluster(policy, requests, replace(TWO, num_replicas=4))
        found = [replace(record, decision_s=0.0) for record in cluster.run()]
        cluster.check()
        return found

    compared = records()
    monkeypatch.setattr(Routers, "_differs", lambda *_: False)
    monkeypatch.setattr(Routers, "_pages_apart", lambda _: 0.0)
    assert compared == records()


def test_with_one_router_there_is_nothing_to_compare() -> None:
    cluster, _ = run_of("estimated_ttft", [request(0, blocks=[1])], HAND)
    assert cluster.routers is not None
    assert cluster.routers.apart() is None


def test_half_of_the_replicas_may_measure_a_wrong_rate() -> None:
    setup = replace(HAND, num_replicas=4, speed=replace(HAND.speed, rate_error=2.0), erring=0.5)
    cluster, _ = run_of("round_robin", [request(n, blocks=[n]) for n in range(4)], setup)
    rates = [replica.view(9.0).prefill_tokens_per_s for replica in cluster.replicas]
    assert rates == [100.0, 200.0, 100.0, 200.0]


def test_no_router_is_refused() -> None:
    with pytest.raises(ValueError, match="0 routers were wanted; take at least one"):
        Cluster("round_robin", [], replace(HAND, num_routers=0))


def test_with_a_split_the_first_token_comes_after_prefill_and_transfer() -> None:
    """4 s of prefill and 4 of transfer; two more tokens take 1 s. The same prompt again at 4 s: one page is computed
    (1 s), and all of it travels, since a decode replica has no cache."""
    prompt = [1, 2, 3, 4]
    requests = [request(0, blocks=prompt, output_len=3), request(1, at_s=4.0, blocks=prompt)]
    _, (first, second) = run_of("estimated_ttft", requests, SPLIT)
    assert (first.ttft_s, first.ended_s) == pytest.approx((8.0, 9.0))
    assert (second.ttft_s, second.cached_tokens) == (pytest.approx(5.0), 300)


def test_without_room_at_a_decode_replica_the_prompt_waits_and_keeps_its_pages() -> None:
    """Pools of 3 pages. The first is ready at 1 s, there at 2 s with 101 tokens to come until 52.5 s: 2 pages. The
    second needs 2 pages too: it is ready at 2 s and waits for the first to end, then travels for 1 s."""
    requests = [request(0, blocks=[1], output_len=102), request(1, blocks=[2], output_len=2)]
    cluster = Cluster("round_robin", requests, replace(SPLIT, pool_tokens=300))
    held: list[int] = []
    cluster.events.at(30.0, lambda: held.append(cluster.replicas[0].num_running))
    records = sorted(cluster.run(), key=lambda record: record.number)
    assert held == [1]
    assert (records[0].ended_s, records[1].ttft_s) == pytest.approx((2.0 + 50.5, 52.5 + 1.0))
    assert cluster.replicas[0].num_running == cluster.replicas[0].pool.num_private == 0
    cluster.check()


def decoder(*, num_requests: int, num_used: int, max_running: int = 8) -> Decoder:
    batch = SimDecode(Events(), base_s=1.0, per_request_s=0.0)
    return Decoder(capacity=10, max_running=max_running, batch=batch, num_requests=num_requests, num_used=num_used)


def test_the_decode_replica_with_room_and_fewest_requests_is_picked() -> None:
    full, busy = decoder(num_requests=0, num_used=9), decoder(num_requests=3, num_used=1)
    idle = decoder(num_requests=2, num_used=6)
    assert pick([full, busy, idle], 4) is idle
    assert pick([full, busy, idle], 5) is busy
    assert pick([full, busy, idle], 10) is None
    assert pick([decoder(num_requests=8, num_used=0)], 1) is None  # no place in the batch
    roomier = decoder(num_requests=2, num_used=5)
    assert pick([idle, roomier], 1) is roomier
