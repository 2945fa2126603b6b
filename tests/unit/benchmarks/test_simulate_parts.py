"""The simulator's parts: its clock, decode batch, pool, requests, and what the router hears."""

import json
import pathlib
from collections.abc import Sequence
from random import Random
from typing import cast

import numpy as np
import pytest

from benchmarks import workloads
from benchmarks.sim_decode import SimDecode
from benchmarks.sim_events import Events
from benchmarks.sim_plot import plot_ttft
from benchmarks.sim_pool import SimPool
from benchmarks.sim_replica import SimJob, SimReplica, Speed
from benchmarks.sim_reports import Limits, Outbox, Reports
from benchmarks.sim_requests import SimRequest, copies, of_workload, read_trace
from routing.router import Router
from routing.types import IndexEvent, IndexSnapshot, ReplicaView


def _forever() -> bool:
    return False


def request(number: int, *, blocks: Sequence[int], input_len: int) -> SimRequest:
    """Comes at 0 s; one token of output."""
    return SimRequest(
        number=number,
        arrival_s=0.0,
        after=None,
        input_len=input_len,
        output_len=1,
        prompt=np.array(blocks, dtype=np.int32),
        repeat=100,
        answer=np.array([-1 - number], dtype=np.int32),
    )


def test_events_happen_in_order_of_time_then_of_scheduling() -> None:
    events = Events()
    seen: list[str] = []

    def a_then_b() -> None:
        seen.append("a")
        events.after(0.0, lambda: seen.append("b"))

    events.at(2.0, lambda: seen.append("c"))
    events.at(1.0, a_then_b)
    events.at(2.0, lambda: seen.append("d"))
    events.run(until=_forever)
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
    events.run(until=_forever)
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
    assert pool.drain() == [(True, (1, 2)), (True, (3,)), (False, (2,))]
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
    assert pool.drain() == [(True, (7,))]
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


def test_a_tail_without_a_block_is_nobody_elses(tmp_path: pathlib.Path) -> None:
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
    one = [request(0, blocks=[0, 1], input_len=200)]
    three = copies(one, 3)
    assert [r.arrival_s for r in three] == [0.0, 20.0, 40.0]
    tokens = [set(r.token_ids().tolist()) for r in three]
    assert not tokens[0] & tokens[1]
    assert not tokens[1] & tokens[2]


def test_a_next_turn_holds_the_last_answer_and_waits_for_it() -> None:
    chats = workloads.multi_turn(num_users=1, num_turns=2, turn_len=10, output_len=4, vocab_size=1000, seed=0)
    first, second = of_workload(chats, requests_per_s=1.0, think_s=7.0, seed=0)
    assert (second.after, second.arrival_s) == (0, 7.0)
    assert second.input_len == 24
    assert (second.token_ids()[:14] == first.token_ids()).all()


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


def _replica(events: Events, *, rate: float = 100.0) -> SimReplica:
    return SimReplica(
        "r0",
        speed=Speed(prefill_tokens_per_s=rate, chunk_tokens=50, rate_noise=0.0),
        pool=SimPool(100),
        page_size=100,
        events=events,
        rng=Random(0),
        started=lambda job: None,
        ended=lambda replica, job: None,
    )


def test_reports_are_late_and_count_progress_in_chunks() -> None:
    """200 tokens at 100/s from 0 s: measured at 0.75 s, when one chunk of 50 is through; heard at 1 s."""
    events, router = Events(), HeardRouter()
    replica = _replica(events)
    limits = Limits(period_s=0.75, delay_s=0.25)
    Reports(cast(Router, router), [Outbox(replica)], limits=limits, events=events, rng=Random(0)).start()
    replica.submit(SimJob(request(0, blocks=[1, 2], input_len=200), 100))
    events.run(until=lambda: events.now_s >= 1.0)
    first, second = router.views
    assert (first.time_s, first.queued_uncached_tokens) == (0.0, 0)  # before the request came
    assert (second.time_s, second.queued_uncached_tokens, second.num_running) == (1.0, 150, 1)
    assert second.prefill_tokens_per_s == 0.0  # no prompt is through: not measured yet


def test_lost_events_show_as_a_gap_and_are_healed_by_one_snapshot() -> None:
    """Pages are stored at 1, 2 and 3 s; batches leave at 1.6 s (lost) and 3.2 s, with events 2 and 3."""
    events, router = Events(), HeardRouter()
    replica = _replica(events)

    class FirstIsLost(Random):
        draws = iter([0.0, 1.0, 1.0, 1.0])

        def random(self) -> float:
            return next(self.draws)

    limits = Limits(period_s=1.6, delay_s=0.1, event_loss=0.5)
    reports = Reports(cast(Router, router), [Outbox(replica)], limits=limits, events=events, rng=FirstIsLost())
    reports.start()
    for number in range(3):
        replica.submit(SimJob(request(number, blocks=[number], input_len=100), 100))
    events.run(until=lambda: events.now_s > 4.0)
    assert router.seqs == [2, 3]
    assert (reports.num_lost, reports.num_snapshots) == (1, 1)
    (snapshot,) = router.snapshots
    assert (snapshot.seq, len(snapshot.keys)) == (3, 3)


def test_a_request_that_no_pool_holds_is_refused_with_the_sizes() -> None:
    replica = _replica(Events())
    with pytest.raises(ValueError, match="needs 101 pages, a pool has 100: raise --pool-tokens"):
        replica.submit(SimJob(request(0, blocks=range(101), input_len=10_100), 100))


def test_the_plot_names_every_policy_with_its_mean() -> None:
    svg = plot_ttft({"a<b": [1.0, 3.0], "c": [0.0, 20.0]}, "title")
    assert "a&lt;b (2.00 s)" in svg
    assert "c (10.00 s)" in svg
    assert svg.count("<polyline") == 2
