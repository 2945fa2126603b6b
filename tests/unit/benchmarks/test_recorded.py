"""Recordings as load: what is read of them, the prompts of a replay, and the speed that is fitted to them."""

import argparse
import base64
import dataclasses
import json
import pathlib
from typing import Any

import pytest

from benchmarks.calibration import build_of, calibrate
from benchmarks.harness import percentile
from benchmarks.recorded import Prompts, Recording, is_recording, read, sim_requests
from benchmarks.serving import replayed
from benchmarks.sim_cluster import Cluster, Setup
from benchmarks.sim_engine import Build, SimJob, SimReplica, StepTime
from benchmarks.sim_load import of_workload
from benchmarks.workloads import multi_turn
from kvtransfer.pages import page_keys
from replicas.config import SchedulerConfig
from replicas.request import stage_times
from tests.unit.benchmarks.test_client import Endpoint, served

PAGE_SIZE = 16
STEP = StepTime(base_s=0.02, prompt_token_s=0.0008, row_s=0.002)
FACTS = {"recording": 1, "page_size": PAGE_SIZE, "objective_s": 2.0, "policy": "estimated_ttft"}
SCHEDULER = SchedulerConfig(chunked_prefill_size=256)
BUILD = Build(
    step=STEP, page_size=PAGE_SIZE, pool_pages=400, max_running=32, context_len=2048, scheduler=SCHEDULER, way_s=0.005
)  # fmt: skip


def line(at_s: float, blocks: str, prompt: int, output: int = 4, **more: Any) -> dict[str, Any]:
    told = {"time_s": 100.0 + at_s, "prompt": prompt, "output": output, "n": 1, "max_tokens": 8, "outcome": "ok"}
    return {**told, "ttft_s": 0.5, "total_s": 1.0, "blocks": blocks, **more}


def written(path: pathlib.Path, *lines: dict[str, Any]) -> Recording:
    facts = {**FACTS, "scheduler": dataclasses.asdict(SCHEDULER)}
    path.write_text("".join(json.dumps(each) + "\n" for each in (facts, *lines)))
    assert is_recording(path)
    return read(path)


A, B, C = ("a" * 8, "b" * 8, "c" * 8)


def test_a_recording_is_read_in_order_of_arrival_and_what_was_refused_would_have_had_the_median(
    tmp_path: pathlib.Path,
) -> None:
    recording = written(
        tmp_path / "r.jsonl",
        {"replica": "r0", "pool_pages": 10, "max_running": 4},
        line(2.0, A, 20, output=6, n=2, outcome="ok"),
        {"lost": 2},
        line(1.0, A, 20, output=5),
        line(3.0, A, 20, output=0, outcome="shed", max_tokens=4),
    )
    assert [seen.arrival_s for seen in recording.requests] == [0.0, 1.0, 2.0]
    assert [seen.output_len for seen in recording.requests] == [5, 3, 4]  # 3 a choice; median 4
    assert (recording.num_lost, list(recording.replicas), recording.ttfts_s) == (2, ["r0"], [0.5, 0.5])


def test_simulated_prompts_share_a_prefix_as_far_as_their_hashes_agree_answers_included(tmp_path: pathlib.Path) -> None:
    """The second prompt repeats the first one and its answer."""
    recording = written(tmp_path / "r.jsonl", line(0, A + B, 20, output=13), line(1, A + B + C, 48, output=2))
    first, second = (each.token_ids() for each in sim_requests(recording, rate=1.0))
    assert (len(first), len(second)) == (33, 50)
    assert first[:32].tolist() == second[:32].tolist()
    assert first[32] not in second


def test_a_replayed_prompt_repeats_the_answer_that_came(tmp_path: pathlib.Path) -> None:
    recording = written(tmp_path / "r.jsonl", line(0, A + B, 20, output=13), line(1, A + B + C, 50, output=2))
    first, second = recording.requests
    prompts = Prompts(page_size=PAGE_SIZE, vocab_size=32_000)
    mine = prompts.of(first)
    assert (len(mine), mine) == (20, prompts.of(first))
    assert prompts.of(second)[:16] == mine[:16]
    assert prompts.of(second)[:20] != mine
    prompts.answered(first, mine, range(13))
    assert prompts.of(second)[:32] == [*mine, *range(12)]


def test_a_prompt_that_repeats_an_answer_follows_it(tmp_path: pathlib.Path) -> None:
    """Each takes a second. The third repeats the first one's answer, the fourth came before that had ended."""
    lines = [line(0, A + B, 20, output=13), line(0.5, C, 20), line(3, A + B + C, 48), line(0.8, A + B + C, 48)]
    recording = written(tmp_path / "r.jsonl", *lines)
    assert [(seen.after, seen.gap_s) for seen in recording.requests] == [(None, 0), (None, 0), (None, 0), (0, 2.0)]
    load = sim_requests(recording, rate=2.0)
    assert [(each.after, each.arrival_s) for each in load] == [
        (None, 0.0),
        (None, 0.25),
        (None, pytest.approx(0.4)),
        (0, 2.0),
    ]


def test_a_machine_that_was_slower_for_a_while_is_found(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = dataclasses.replace(BUILD, pace=(1.0, 1.0, 3.0, 3.0, 1.0), pace_s=5.0)
    found = calibrate(written(tmp_path / "r.jsonl", *simulated(monkeypatch, slow, rate=3.0)))
    assert found.pace[1] / found.pace[3] == pytest.approx(3.0, rel=0.15)
    assert found.pace[0] / found.pace[3] == pytest.approx(1.0, rel=0.15)


async def test_a_replay_sends_each_request_when_it_was_recorded(tmp_path: pathlib.Path) -> None:
    recording = written(tmp_path / "r.jsonl", line(0, A, 20, output=3), line(0.4, A, 18, output=5))
    endpoint = Endpoint()
    async with served(endpoint) as client:
        samples = await replayed(recording, client, argparse.Namespace(vocab_size=32_000, speed=2.0))
    assert [(len(body["prompt"]), body["max_tokens"]) for body in endpoint.bodies] == [(20, 3), (18, 5)]
    assert samples[1].start_s >= 0.19  # half of 0.4; a loaded machine may be late
    assert [sample.error for sample in samples] == [None, None]


def simulated(monkeypatch: pytest.MonkeyPatch, build: Build, *, rate: float, seed: int = 1) -> list[dict[str, Any]]:
    """The lines that two simulated engines would record of 60 conversations of three turns."""
    prefill_s: dict[int, float] = {}
    begun = SimReplica._begun

    def note(self: SimReplica, job: SimJob) -> None:
        begun(self, job)
        prefill_s[job.request.number] = stage_times(job.req, self._events.now_s).prefill_s

    monkeypatch.setattr(SimReplica, "_begun", note)
    workload = multi_turn(num_users=60, num_turns=3, turn_len=80, output_len=24, vocab_size=32_000, seed=seed)
    requests = of_workload(workload, requests_per_s=rate, think_s=2.0, seed=seed)
    cluster = Cluster("estimated_ttft", requests, Setup(num_replicas=2, build=build))
    records = cluster.run()
    cluster.check()
    lines = []
    for each in records:
        tokens = requests[each.number].token_ids()
        keys = page_keys(tokens[:-1], PAGE_SIZE, "")
        blocks = "".join(base64.urlsafe_b64encode(key.tobytes()[:6]).decode() for key in keys)
        total_s = each.ended_s - each.arrival_s
        decoded = {"itl_s": (total_s - each.ttft_s) / 23, "prefill_s": prefill_s[each.number]}
        waited = {"route_s": 0.001, "queue_s": each.ttft_s - prefill_s[each.number] - 0.001}
        told = {"ttft_s": each.ttft_s, "total_s": total_s, "cached_l1": each.cached_tokens, **decoded, **waited}
        lines.append(line(each.arrival_s, blocks, each.input_len, 24, model_replica=each.replica_id, **told))
    replicas = [{"replica": name, "pool_pages": 400, "max_running": 32} for name in ("r0000", "r0001")]
    return [*replicas, *lines]


def test_the_speed_of_a_fleet_is_found_in_its_recording_and_gives_its_times_again(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 6 requests a second some wait. One recording of 180 requests is off by up to 6 %: a median of three is not."""
    recordings = [
        written(tmp_path / f"{seed}.jsonl", *simulated(monkeypatch, BUILD, rate=6.0, seed=seed)) for seed in range(3)
    ]
    fits = [calibrate(each) for each in recordings]
    for name in ("base_s", "row_s", "prompt_token_s"):
        median = percentile([getattr(each.step, name) for each in fits], 50)
        assert median == pytest.approx(getattr(STEP, name), rel=0.05), name
    recording, found = recordings[0], fits[0]
    assert found.step.spread < 0.01
    assert found.way_s == pytest.approx(BUILD.way_s, rel=0.05)
    build = build_of(recording, found, queue=None)
    cluster = Cluster("estimated_ttft", sim_requests(recording, rate=1.0), Setup(num_replicas=2, build=build))
    again = [each.ttft_s for each in cluster.run()]
    for q in (50, 95):
        assert percentile(again, q) == pytest.approx(percentile(recording.ttfts_s, q), rel=0.05), q
