"""Runs of the simulator: exact times where a hand can compute them, and the command line."""

import json
import pathlib
from dataclasses import replace

import pytest

import routing.router
from benchmarks import simulate, workloads
from benchmarks.sim_cluster import ORACLE, Cluster, Record, Setup
from benchmarks.sim_replica import SimJob, Speed
from benchmarks.sim_reports import Limits
from benchmarks.sim_requests import SimRequest, of_workload
from benchmarks.sim_result import summarise
from tests.unit.benchmarks.sim_fixtures import request

TRACE = pathlib.Path(__file__).resolve().parents[4] / "shared" / "traces" / "conversation_trace.jsonl"
HAND = Setup(
    num_replicas=2,
    pool_tokens=10_000,
    page_size=100,
    speed=Speed(prefill_tokens_per_s=100.0, decode_base_s=0.5, decode_per_request_s=0.0, rate_noise=0.0),
)


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
    cluster = Cluster("round_robin", requests, HAND)
    records = sorted(cluster.run(), key=lambda record: record.number)
    assert [record.replica_id for record in records] == ["r0000", "r0001", "r0000", "r0001"]
    assert [record.ttft_s for record in records] == pytest.approx([4.0, 2.0, 4.0, 2.0])
    assert [record.ended_s for record in records] == pytest.approx([5.0, 2.0, 5.0, 3.0])
    assert [record.cached_tokens for record in records] == [0, 0, 300, 0]
    result = summarise("round_robin", records, num_replicas=2, objective_s=3.0)
    assert result.hit_ratio == pytest.approx(300 / 1100)
    assert result.ttft_s.mean == pytest.approx(3.0)
    assert result.goodput_rps == pytest.approx(2 / 5)  # two within 3 s; the last ends at 5 s
    assert result.imbalance == pytest.approx(500 / 400)
    assert result.decisions == {"next_in_turn": 4}
    cluster.check()


def test_the_oracle_waits_for_a_prefix_only_while_that_is_sooner() -> None:
    """r0 computes 4 pages until 4 s. The same prompt at 1 s: there at 5 s, afresh on r1 at 5 s too: the first.
    A prompt that shares one page with it: at 8 s on r0, at 5 s on r1."""
    requests = [
        request(0, at_s=0.0, blocks=[1, 2, 3, 4]),
        request(1, at_s=1.0, blocks=[1, 2, 3, 4]),
        request(2, at_s=1.0, blocks=[1, 9, 9, 9]),
    ]
    records = sorted(Cluster(ORACLE, requests, HAND).run(), key=lambda record: record.number)
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
    first, again, other = (
        timeless(Cluster("estimated_ttft", chats(), tight(seed)).run()) for seed in (0, 0, 1)
    )
    assert first == again
    assert first != other


def test_estimated_ttft_beats_turns_on_conversations() -> None:
    requests = chats(num_users=40)
    ttft_s = {}
    for policy in ("round_robin", "estimated_ttft"):
        setup = replace(tight(), pool_tokens=60_000)
        records = Cluster(policy, requests, setup).run()
        ttft_s[policy] = summarise(policy, records, num_replicas=3, objective_s=1.0).ttft_s.mean
    assert ttft_s["estimated_ttft"] < 0.7 * ttft_s["round_robin"]


@pytest.mark.skipif(not TRACE.exists(), reason=f"the conversation trace is not at {TRACE}")
def test_on_the_beginning_of_the_conversation_trace_estimated_ttft_beats_turns(tmp_path: pathlib.Path) -> None:
    out, plot = tmp_path / "out.json", tmp_path / "out.svg"
    argv = f"--trace {TRACE} --replicas 2 --pool-tokens 1024000 --prefill-rate 20000 --requests 500"
    argv += f" --policy round_robin --policy estimated_ttft --json {out} --plot {plot}"
    assert simulate.main(argv.split()) == 0
    turns, estimated = json.loads(out.read_text())
    assert estimated["ttft_s"]["mean"] < turns["ttft_s"]["mean"]
    assert estimated["hit_ratio"] > turns["hit_ratio"]
    assert plot.read_text().startswith("<svg")


def test_the_json_holds_one_object_a_policy(tmp_path: pathlib.Path) -> None:
    trace, out = tmp_path / "trace.jsonl", tmp_path / "deep" / "out.json"
    line = {"timestamp": 0, "input_length": 1000, "output_length": 2, "hash_ids": [0, 1]}
    trace.write_text((json.dumps(line) + "\n") * 10)
    argv = ["--trace", str(trace), "--policy", "round_robin", "--policy", "least_tokens", "--json", str(out)]
    assert simulate.main(argv) == 0
    results = json.loads(out.read_text())
    assert [result["policy"] for result in results] == ["round_robin", "least_tokens"]
    for result in results:
        assert {"hit_ratio", "ttft_s", "goodput_rps", "imbalance", "decisions"} <= result.keys()
        assert result["ttft_s"].keys() == {"mean", "p50", "p90", "p99"}
        assert sum(result["decisions"].values()) == 10


def test_a_missing_trace_is_said_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate.main(["--trace", "/nowhere.jsonl"]) == 2
    assert "simulate: [Errno 2] No such file or directory: '/nowhere.jsonl'" in capsys.readouterr().err
