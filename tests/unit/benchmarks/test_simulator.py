"""The simulator: its parts, exact times where a hand can compute them, the router before many replicas, and
one tenant that floods the production scheduler."""

import json
import math
import pathlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from benchmarks import workloads
from benchmarks.harness import percentile
from benchmarks.router import summary
from benchmarks.sim_cluster import ORACLE, Cluster, Record, Setup
from benchmarks.sim_engine import Build, StepTime, TimedEngine
from benchmarks.sim_load import Events, SimRequest, of_workload, read_trace
from benchmarks.sim_tenants import HEAVY, fair, fairness, jain, load, run, served
from replicas.config import SchedulerConfig
from routing.types import Reason

# 100 tokens/s of prompts, steps of 1,000 tokens; one without a prompt takes 0.5 s
HAND = Build(
    step=StepTime(base_s=0.5, prompt_token_s=0.01, row_s=0.0), page_size=100, pool_pages=100, max_running=64,
    context_len=10_000, scheduler=SchedulerConfig(policy="fcfs", chunked_prefill_size=1_000), way_s=0.25,
)  # fmt: skip


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
        answer=np.array([1_000 + number], dtype=np.int32),
    )


def run_of(policy: str, requests: Sequence[SimRequest], setup: Setup) -> tuple[Cluster, list[Record]]:
    """A checked run, its records in the order of the requests."""
    cluster = Cluster(policy, requests, setup)
    records = sorted(cluster.run(), key=lambda record: record.number)
    cluster.check()
    return cluster, records


def chats(num_users: int = 12, seed: int = 0) -> list[SimRequest]:
    workload = workloads.multi_turn(
        num_users=num_users, num_turns=5, turn_len=400, output_len=100, vocab_size=1000, seed=seed
    )
    return of_workload(workload, requests_per_s=6.0, think_s=1.0, seed=seed)


def tight(seed: int = 0) -> Setup:
    """Three replicas whose pools hold two conversations each."""
    step = StepTime(base_s=0.02, prompt_token_s=0.001, row_s=0.0002)
    build = replace(HAND, step=step, page_size=50, pool_pages=120, context_len=6_000, way_s=0.002)
    return Setup(num_replicas=3, build=build, seed=seed)


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


def test_a_next_turn_holds_the_last_answer_and_waits_for_it() -> None:
    chats = workloads.multi_turn(num_users=1, num_turns=2, turn_len=10, output_len=4, vocab_size=1000, seed=0)
    first, second = of_workload(chats, requests_per_s=1.0, think_s=7.0, seed=0)
    assert (second.after, second.arrival_s) == (0, 7.0)
    assert second.input_len == 24
    assert (second.token_ids()[:14] == first.token_ids()).all()


def test_a_request_that_no_pool_holds_is_refused_with_the_sizes() -> None:
    cluster = Cluster("round_robin", [request(0, blocks=range(101))], Setup(num_replicas=1, build=HAND))
    with pytest.raises(ValueError, match="needs 10101 tokens; a context has 10000 and a pool 10000: raise --pool-tok"):
        cluster.run()


def test_a_report_is_made_between_steps_and_heard_late() -> None:
    """A prompt of 200 tokens is at the engine at 0.25 s and computed until 2.75 s; two more come meanwhile. Reports
    are made each 0.7 s and heard 0.1 s later: that of 2.8 s is the first since the step ended."""
    setup = Setup(num_replicas=1, build=HAND, period_s=0.7, delay_s=0.1)
    requests = [request(0, blocks=[1, 2]), *(request(number, blocks=[2 + number], at_s=1.0) for number in (1, 2))]
    cluster = Cluster("estimated_ttft", requests, setup)
    seen: dict[float, int] = {}

    def look() -> None:
        assert cluster.router is not None
        (view,) = cluster.router.views
        seen[cluster.events.now_s] = view.num_waiting + view.num_running

    for at_s in (0.75, 0.85, 2.85, 2.95):
        cluster.events.at(at_s, look)
    cluster.run()
    assert seen == {0.75: 0, 0.85: 1, 2.85: 1, 2.95: 2}


def test_two_replicas_in_turn_give_the_times_that_a_hand_computes() -> None:
    """Each request is at its engine 0.25 s after it came. r0: 400 tokens and their step, until 4.75 s; then 100 tokens
    of the same prompt (3 of its 4 pages are cached: the last token must run) beside the first one's second token, until
    6.25 s, and its third until 6.75 s. r1: 200 tokens until 2.75 s, then 100 more until 4.25 s."""
    requests = [
        request(0, at_s=0.0, blocks=[1, 2, 3, 4], output_len=3),
        request(1, at_s=0.0, blocks=[5, 6]),
        request(2, at_s=1.0, blocks=[1, 2, 3, 4]),
        request(3, at_s=1.0, blocks=[7]),
    ]
    _, records = run_of("round_robin", requests, Setup(num_replicas=2, build=HAND))
    assert [record.replica_id for record in records] == ["r0000", "r0001", "r0000", "r0001"]
    assert [record.ttft_s for record in records] == pytest.approx([4.75, 2.75, 5.25, 3.25])
    assert [record.ended_s for record in records] == pytest.approx([6.75, 2.75, 6.25, 4.25])
    assert [record.cached_tokens for record in records] == [0, 0, 300, 0]
    rows = summary("s", "round_robin", records, num_replicas=2, objective_s=4.0)
    values = {row.figure: row.value for row in rows}
    assert values["hit"] == pytest.approx(100 * 300 / 1100)
    assert values["TTFT mean"] == pytest.approx(4.0)
    assert values["within 4 s"] == pytest.approx(2 / 6.75)  # the last ends at 6.75 s
    assert values["skew"] == pytest.approx(500 / 400)
    assert rows[0].note == "next_in_turn 4"


def test_the_oracle_waits_for_a_prefix_only_while_that_is_sooner() -> None:
    """r0 computes 4 pages until 4.75 s. The same prompt at 1 s: there at 6.5 s, afresh on r1 at 5.75 s. One of 8 pages
    that begins with these 4: at 9.25 s on r0; on r1, behind the second, at 9.75 s."""
    requests = [
        request(0, at_s=0.0, blocks=[1, 2, 3, 4]),
        request(1, at_s=1.0, blocks=[1, 2, 3, 4]),
        request(2, at_s=1.0, blocks=[1, 2, 3, 4, 5, 6, 7, 8]),
    ]
    _, records = run_of(ORACLE, requests, Setup(num_replicas=2, build=HAND))
    assert [record.replica_id for record in records] == ["r0000", "r0001", "r0000"]
    assert [record.ended_s for record in records] == pytest.approx([4.75, 5.75, 9.25])


@pytest.mark.parametrize("page_size", [16, 512])
def test_steps_that_are_taken_at_once_change_nothing(page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the same engines that take each step by itself; pages are full once in a while, and evicted."""
    build = replace(tight().build, page_size=page_size, pool_pages=12_000 // page_size, context_len=8_000)
    workload = workloads.multi_turn(num_users=5, num_turns=5, turn_len=600, output_len=200, vocab_size=1000, seed=0)
    requests = of_workload(workload, requests_per_s=1.0, think_s=5.0, seed=0)
    at_once, one_by_one = [], []
    steps = TimedEngine._num_alike

    def counted(self: TimedEngine) -> int:
        at_once.append(steps(self))
        return at_once[-1]

    monkeypatch.setattr(TimedEngine, "_num_alike", counted)
    cluster, fast = run_of("round_robin", requests, Setup(num_replicas=2, build=build))
    monkeypatch.setattr(TimedEngine, "_num_alike", lambda _: one_by_one.append(0) or 0)
    _, slow = run_of("round_robin", requests, Setup(num_replicas=2, build=build))
    assert max(at_once) > 8
    assert all(replica.engine.kv.store.evicted_tokens for replica in cluster.replicas)
    assert len(at_once) < len(one_by_one) / 2
    for mine, theirs in zip(fast, slow, strict=True):
        assert (mine.cached_tokens, mine.replica_id) == (theirs.cached_tokens, theirs.replica_id)
        assert (mine.ttft_s, mine.ended_s) == pytest.approx((theirs.ttft_s, theirs.ended_s))


@pytest.mark.parametrize("policy", ["round_robin", "power_of_two", "estimated_ttft", "oracle"])
def test_every_request_ends_once_and_pages_add_up(policy: str) -> None:
    requests = chats()

    cluster = Cluster(policy, requests, tight())
    for at in range(60):
        for replica in cluster.replicas:
            cluster.events.at(0.37 * at, partial(replica.engine.command, replica.engine.scheduler.check))
    records = cluster.run()
    assert sorted(record.number for record in records) == list(range(len(requests)))
    assert all(0.0 < record.ttft_s <= record.ended_s - record.arrival_s + 1e-9 for record in records)
    assert not any(replica.engine.scheduler.has_work for replica in cluster.replicas)
    assert cluster.router is None or cluster.router.num_open == 0
    assert sum(replica.engine.kv.store.evicted_tokens for replica in cluster.replicas) > 0  # or pools were not tight
    cluster.check()


def test_the_same_seed_gives_the_same_run_and_another_seed_another() -> None:
    first, again, other = (timeless(Cluster("estimated_ttft", chats(4), tight(seed)).run()) for seed in (0, 0, 1))
    assert first == again
    assert first != other


def test_estimated_ttft_beats_turns_on_conversations() -> None:
    setup, mean_s = tight(), dict[str, float]()
    setup = replace(setup, build=replace(setup.build, pool_pages=1_200))
    for policy in ("round_robin", "estimated_ttft"):
        _, records = run_of(policy, chats(num_users=40), setup)
        mean_s[policy] = sum(record.ttft_s for record in records) / len(records)
    assert mean_s["estimated_ttft"] < 0.7 * mean_s["round_robin"]


@pytest.mark.parametrize(("num_replicas", "pool_pages", "most"), [(2, 190, 0.6), (4, 110, 0.4)])
def test_an_idle_fleet_fills_evenly(num_replicas: int, pool_pages: int, most: float) -> None:
    """24 prompts of 11 pages of their own after 2 that all share, one at a time, where steps vary by a quarter. A pool
    holds 13 of them, or 7; all pools together hold all, so that each is found again."""
    step = StepTime(base_s=0.02, prompt_token_s=0.001, row_s=0.0, spread=0.25)
    build = replace(HAND, step=step, page_size=16, pool_pages=pool_pages, context_len=1_000, way_s=0.002)
    requests = []
    for number in range(48):
        prompt = np.repeat([7, 8, *range(100 * (number % 24 + 1), 100 * (number % 24 + 1) + 11)], 16).astype(np.int32)
        requests.append(
            SimRequest(
                number=number, arrival_s=0.5, after=number - 1 if number else None, input_len=208, output_len=16,
                prompt=prompt, repeat=1, answer=np.array([5_000 + number], dtype=np.int32),
            )
        )  # fmt: skip
    _, records = run_of("estimated_ttft", requests, Setup(num_replicas=num_replicas, build=build, seed=0))
    sent = Counter(record.replica_id for record in records[:24])
    assert max(sent.values()) <= most * 24
    assert Reason.MORE_FREE.value in {record.reason for record in records}
    again = records[24:]
    assert sum(record.cached_tokens for record in again) >= 0.9 * sum(record.input_len for record in again)


def test_a_fetch_tells_the_router_how_fast_the_link_is_and_not_how_long_the_donor_s_steps_are() -> None:
    """2,000 tokens of 1,000 bytes, held by one replica; eight ask for them at once, each with 400 tokens of its own."""
    build = replace(
        tight().build, pool_pages=400, token_bytes=1_000, link_bytes_per_s=1e7,
        step=StepTime(base_s=0.3, prompt_token_s=0.001, row_s=0.0),
    )  # fmt: skip
    prefix = range(20)
    asked = [
        request(1 + user, blocks=[*prefix, *range(100 * user + 100, 100 * user + 104)], at_s=20.0) for user in range(8)
    ]
    cluster, records = run_of(
        "estimated_ttft", [request(0, blocks=prefix), *asked], Setup(num_replicas=2, build=build)
    )
    assert (cluster.num_fetched, cluster.num_failed) == (2_000, 0)
    assert sum(record.cached_tokens for record in records) == 8 * 2_000
    assert cluster.router is not None
    ids = [view.replica_id for view in cluster.router.views]
    assert len(ids) == 2
    assert cluster.router.link.rates(ids, ids).tolist() == [pytest.approx([1e7, 1e7])] * 2


def test_what_is_fair_by_hand() -> None:
    assert jain([1, 1, 1]) == 1
    assert jain([3, 0, 0]) == pytest.approx(1 / 3)
    assert fair({"a": 10, "b": 100, "c": 200}, 110) == {"a": 10, "b": 50, "c": 50}
    assert fair({"a": 10, "b": 20}, 30) == {"a": 10, "b": 20}


def test_one_that_floods_a_replica_costs_the_others_a_step_or_two_and_without_names_all_their_time() -> None:
    seconds, light = 40.0, dict[bool, float]()
    requests = load("short prompts", seconds, seed=0)
    index, tokens = dict[bool, float](), dict[bool, int]()
    for named in (False, True):
        records = run(requests, named=named, queue="lpm", seed=0)
        light[named] = percentile([each.ttft_s for each in records if requests[each.number].tenant != HEAVY], 95)
        index[named] = fairness(served(requests, records, seconds), served(requests, records, math.inf))
        ended = [requests[each.number] for each in records if each.ended_s <= seconds]
        tokens[named] = sum(each.input_len + each.output_len for each in ended)
    assert light[False] > 20
    assert light[True] < 1
    assert index[False] < 0.2
    assert index[True] > 0.95
    assert tokens[True] >= 0.95 * tokens[False]


def test_short_prompts_wait_little_longer_beside_one_that_floods_the_replica_than_alone() -> None:
    """At p95; 1.52 times as long where its steps are as long as any, and all its requests run on in those of others."""
    requests, p95_s = load("short prompts", 60.0, seed=0), list[float]()
    for among in (requests, [each for each in requests if each.tenant != HEAVY]):
        records = run(among, named=True, queue="lpm", seed=0)
        p95_s.append(percentile([each.ttft_s for each in records if among[each.number].tenant != HEAVY], 95))
    assert p95_s[0] <= 1.4 * p95_s[1]


def test_chats_keep_their_histories_beside_one_that_floods_the_pool() -> None:
    """Of their prompts 0.61 is cached under LRU alone."""
    requests = load("chats", 150.0, seed=0)
    chats = [each for each in run(requests, named=True, queue="lpm", seed=0) if requests[each.number].tenant != HEAVY]
    input_len = sum(requests[each.number].input_len for each in chats)
    assert sum(each.cached_tokens for each in chats) >= 0.7 * input_len
