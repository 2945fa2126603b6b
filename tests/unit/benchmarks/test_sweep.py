"""The sweep: enough conversations for every load, rates that are shares of what was reached, and failures that cost
one point."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks import sweep
from benchmarks.client import ClosedLoop, OpenLoop, Run, Sample
from benchmarks.sweep import CONCURRENCY, LEAST, SHAPES, SHARES, Measured, Shape, Sweep, measure
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


def swept(shape: Shape, client: Any, *, quick: bool = False, repeats: int = 1) -> Measured:
    return measure(Sweep(client, shape), quick=quick, repeats=repeats)


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
    found = swept(shape, client)
    rates = [load.rate for load, _ in client.loads if isinstance(load, OpenLoop)]
    assert rates == pytest.approx([8, 16, 24, 28.8, 35.2])
    assert len(found.rows) == 2 * len(CONCURRENCY) + 2 * len(SHARES)
    assert set(found.plots) == {f"throughput_{shape.file}.svg", f"ttft_{shape.file}.svg"}


def test_throughput_is_of_output_tokens_and_no_run_has_anothers_prompts() -> None:
    """64 tokens a conversation, 8 conversations a second."""
    client = FakeClient()
    rows = {row.name: row for row in swept(SHAPES[0], client, repeats=2).rows}
    assert rows["8 at once, output"].value == pytest.approx(512)
    assert rows["8 at once, output"].runs == 2
    assert rows["8.00 conversations/s, TTFT p95"].value == pytest.approx(0.5)
    first = [workload.conversations[0].turns[0].token_ids for workload in client.workloads]
    assert len(set(first)) == len(first)


def test_a_request_without_an_answer_costs_its_point_and_the_plots_alone() -> None:
    found = swept(SHAPES[0], FakeClient(fails_at=4))
    rows = {row.name: row for row in found.rows}
    failed = rows["4 at once, requests without an answer"]
    assert (failed.value, failed.note) == (1.0, "FAILED, of 8: HTTP 503: full")
    assert "4 at once, output" not in rows
    assert rows["32 at once, output"].value == pytest.approx(2048)
    assert rows["8.00 conversations/s, TTFT p50"].value == pytest.approx(0.5)
    assert found.plots == {}


def test_a_server_that_fails_everything_is_reported_and_not_asked_at_rates() -> None:
    client = FakeClient(fails_at=-1)
    found = swept(SHAPES[0], client, quick=True)
    assert [row.note[:6] for row in found.rows] == ["FAILED", "FAILED"]
    assert all(isinstance(load, ClosedLoop) for load, _ in client.loads)


def test_a_check_writes_no_tracked_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sweep.parsed(["--quick"]).pictures == Path("bench_results/pictures")
    assert sweep.parsed([]).pictures == Path("docs/pictures")
    assert sweep.parsed(["--quick", "--pictures", "here"]).pictures == Path("here")
    monkeypatch.setattr(sweep, "Client", lambda url, model: FakeClient())
    monkeypatch.setattr(sweep, "first_model", lambda url: "m")
    sweep.sweep_all("http://unused", tmp_path / "pictures", quick=True, repeats=1)
    names = {f"{plot}_{shape.file}.svg" for plot in ("throughput", "ttft") for shape in SHAPES}
    assert {file.name for file in (tmp_path / "pictures").iterdir()} == names
