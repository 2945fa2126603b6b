"""The sweep: enough conversations for every load, rates that are shares of what was reached, and failures that cost
one point. Overload: orders of a queue on the same requests."""

import argparse
import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks import live_app, serving
from benchmarks.client import ClosedLoop, OpenLoop, Run, Sample
from benchmarks.harness import Row
from benchmarks.serving import CONCURRENCY, LEAST, SHAPES, SHARES, Shape, sweep
from benchmarks.workloads import Workload


class FakeClient:
    """Answers c conversations at once at c conversations a second, each first token after 0.5 s."""

    def __init__(self, *, fails_at: int = 0) -> None:
        self.loads: list[tuple[ClosedLoop | OpenLoop, int]] = []  # with how many conversations
        self.workloads: list[Workload] = []
        self._fails_at = fails_at  # conversations at once, of which one request has no answer; -1: all

    async def run(self, workload: Workload, load: ClosedLoop | OpenLoop, *, max_s: float) -> Run:
        self.loads.append((load, len(workload.conversations)))
        self.workloads.append(workload)
        samples = [
            Sample(name=f"{each.name}/{turn}", ttft_s=0.5, completion_tokens=asked.max_new_tokens)
            for each in workload.conversations
            for turn, asked in enumerate(each.turns)
        ]
        at_once = load.concurrency if isinstance(load, ClosedLoop) else 1
        if self._fails_at in (at_once, -1):
            samples[-1].error = "HTTP 503: full"
        wall_s = len(workload.conversations) / at_once
        return Run(samples=tuple(samples), wall_s=wall_s, client_cpu_s=0.0, answers_known=True)


def swept(shape: Shape, client: Any, *, quick: bool = False, repeats: int = 1) -> tuple[list[Row], bool]:
    """The rows, and whether the plots are drawn."""
    at_once, by_rate = sweep(client, shape, quick=quick, repeats=repeats, max_s=240.0)
    return at_once.rows + by_rate.rows, at_once.whole and by_rate.whole


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.file)
def test_there_are_at_least_as_many_conversations_as_may_be_open(shape: Shape) -> None:
    client = FakeClient()
    swept(shape, client)
    closed = [(load.concurrency, num) for load, num in client.loads if isinstance(load, ClosedLoop)]
    assert [concurrency for concurrency, _ in closed] == [1, *CONCURRENCY]
    assert all(num >= max(LEAST, concurrency) for concurrency, num in closed)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.file)
def test_rates_are_shares_of_the_conversations_a_second_that_were_reached(shape: Shape) -> None:
    """32 at once are 32 conversations a second, however many turns each has."""
    client = FakeClient()
    rows, whole = swept(shape, client)
    rates = [load.rate for load, _ in client.loads if isinstance(load, OpenLoop)]
    assert rates == pytest.approx([8, 16, 24, 28.8, 35.2])
    assert len(rows) == 2 * len(CONCURRENCY) + 2 * len(SHARES)
    assert whole


def test_throughput_is_of_output_tokens_and_no_run_has_anothers_prompts() -> None:
    """64 tokens a conversation, 8 conversations a second."""
    client = FakeClient()
    rows = {row.name: row for row in swept(SHAPES[0], client, repeats=2)[0]}
    assert rows["8 at once, output"].value == pytest.approx(512)
    assert rows["8 at once, output"].runs == 2
    assert rows["8.00 conversations/s, TTFT p95"].value == pytest.approx(0.5)
    first = [workload.conversations[0].turns[0].token_ids for workload in client.workloads]
    assert len(set(first)) == len(first)


def test_a_request_without_an_answer_costs_its_point_and_the_plots_alone() -> None:
    found, whole = swept(SHAPES[0], FakeClient(fails_at=4))
    rows = {row.name: row for row in found}
    failed = rows["4 at once, requests without an answer"]
    assert (failed.value, failed.note) == (1.0, "FAILED, of 8: HTTP 503: full")
    assert "4 at once, output" not in rows
    assert rows["32 at once, output"].value == pytest.approx(2048)
    assert rows["8.00 conversations/s, TTFT p50"].value == pytest.approx(0.5)
    assert not whole


def test_a_server_that_fails_everything_is_reported_and_not_asked_at_rates() -> None:
    client = FakeClient(fails_at=-1)
    rows, _ = swept(SHAPES[0], client, quick=True)
    assert [row.note[:6] for row in rows] == ["FAILED", "FAILED"]
    assert all(isinstance(load, ClosedLoop) for load, _ in client.loads)


def test_each_order_of_the_queue_gets_the_same_prompts_at_the_same_times_and_no_prompt_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that had no answer, or a late one, is not in time."""
    served, client = [], FakeClient()

    @contextlib.contextmanager
    def serve(**changes: Any) -> Iterator[str]:
        served.append(changes["scheduler"]["policy"])
        yield "http://nowhere"

    async def run(workload: Workload, load: ClosedLoop | OpenLoop, *, max_s: float) -> Run:
        found = await FakeClient.run(client, workload, load, max_s=max_s)
        if served[-1] == "lpm" and isinstance(load, OpenLoop):
            found.samples[0].error, found.samples[1].ttft_s = "HTTP 429: full", 2.5
        return found

    monkeypatch.setattr(live_app, "serving", serve)
    monkeypatch.setattr(serving, "first_model", lambda url, key: "m")
    monkeypatch.setattr(serving, "Client", lambda url, model: argparse.Namespace(run=run))
    rows = serving.overload_rows(argparse.Namespace(quick=True, rounds=2, seed=0, max_s=240.0))
    assert served == ["lpm", "on_time", "on_time", "lpm"]
    sent = [each for each in zip(client.loads, client.workloads, strict=True) if isinstance(each[0][0], OpenLoop)]
    many = len(serving.LOADS)
    lpm_first, on_time_first, on_time_second, lpm_second = (sent[at : at + many] for at in range(0, 4 * many, many))
    assert lpm_first == on_time_first
    assert lpm_second == on_time_second
    rates = [load.rate for (load, _), _ in lpm_first if isinstance(load, OpenLoop)]
    assert rates == pytest.approx([32 * share for share in serving.LOADS])
    asked = [each for _, workload in lpm_first + lpm_second for each in workload.conversations]
    prompts = [turn.token_ids for each in asked for turn in each.turns]
    assert len(set(prompts)) == len(prompts)
    found = {(row.name, row.figure): row for row in rows}
    assert found["1.3 x, lpm", "in time"].value == 50.0
    assert found["1.3 x, lpm", "in time"].note == "2 without an answer"
    assert found["1.3 x, on_time", "in time"].value == 100.0
