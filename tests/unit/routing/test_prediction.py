"""What the router predicts against what comes, over the benchmarks' workloads: real scheduler, reports and estimate."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median

import pytest

from benchmarks.serving import SHAPES
from benchmarks.sim_cluster import Cluster, Setup
from benchmarks.sim_engine import Build, StepTime
from benchmarks.sim_load import of_workload
from benchmarks.workloads import Workload, random_lengths
from replicas.config import SchedulerConfig
from routing.types import Decision, RouteOutcome

Done = Callable[[Decision, RouteOutcome], bool]
BAR = 0.5  # |log2(measured / predicted)|, at the median
# about what SmolLM2 takes on two cores (docs/performance.md, Mixed steps)
BUILD = Build(
    step=StepTime(base_s=0.012, prompt_token_s=0.00076, row_s=0.0015), page_size=16, pool_pages=12_000 // 16,
    max_running=64, context_len=8_192, scheduler=SchedulerConfig(chunked_prefill_size=512),
)  # fmt: skip


def workloads(num: int) -> list[Workload]:
    """The three of `python -m benchmarks serving`, and prompts whose step costs more than their tokens."""
    three = [shape.make(num // 5 if shape.file == "multi_turn" else num, 1) for shape in SHAPES]
    return [*three, random_lengths(num_requests=num, input_len=8, output_len=16, vocab_size=1_000, seed=1)]


def errors(monkeypatch: pytest.MonkeyPatch, num: int, *, requests_per_s: float) -> list[list[float]]:
    """Of each workload with ``num`` requests, the errors of the predictions, once rates are measured."""
    found = []
    measure = random_lengths(num_requests=20, input_len=300, output_len=20, vocab_size=1_000, seed=2)
    before = of_workload(measure, requests_per_s=2.0, think_s=0.0, seed=0)
    for workload in workloads(num):
        told: list[float] = []
        after = [
            replace(each, number=each.number + 20, after=None if each.after is None else each.after + 20,
                    arrival_s=each.arrival_s + (each.after is None) * 60.0)
            for each in of_workload(workload, requests_per_s=requests_per_s, think_s=0.5, seed=0)
        ]  # fmt: skip
        cluster = Cluster("estimated_ttft", before + after, Setup(num_replicas=2, build=BUILD, delay_s=0.002))
        assert cluster.router is not None

        def noted(told: list[float], done: Done, decision: Decision, outcome: RouteOutcome) -> bool:
            if int(decision.rid) >= 20:
                told.append(abs(math.log2((outcome.ttft_s or 0.0) / decision.predicted_ttft_s)))
            return done(decision, outcome)

        monkeypatch.setattr(cluster.router, "done", partial(noted, told, cluster.router.done))
        cluster.run()
        cluster.check()
        found.append(told)
    return found


def test_in_a_quiet_fleet_first_tokens_come_when_they_are_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [median(each) for each in errors(monkeypatch, 15, requests_per_s=0.5)]
    assert max(found) <= 0.1, found


def test_at_saturation_the_median_prediction_is_within_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    found = errors(monkeypatch, 40, requests_per_s=50.0)
    assert median(itertools.chain(*found)) <= BAR, [median(each) for each in found]
