"""The measurement of a step's cost on the host takes the step apart, and its device is as slow as it is told to be."""

import json
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import step_overhead
from benchmarks.step_overhead import TimedStep, measure
from replicas.scheduler.plan import StepResult
from tests.embedded import MODEL

pytestmark = pytest.mark.model


@pytest.mark.parametrize("overlap", [False, True])
def test_every_part_of_a_step_is_timed(monkeypatch: pytest.MonkeyPatch, overlap: bool) -> None:
    monkeypatch.setattr(step_overhead, "NUM_STEPS", 5)
    times = measure(2, MODEL, overlap=overlap)
    assert set(times) == {"schedule", "build", "apply", "text", "deliver", "step"}
    assert 0 < max(times[name] for name in times if name != "step") < times["step"]


def test_rows_are_of_every_part_and_batch_and_can_be_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(step_overhead, "NUM_STEPS", 5)
    threads = torch.get_num_threads()
    try:
        step_overhead.main(["--batches", "1,2", "--model", MODEL, "--json", str(tmp_path / "out.json")])
    finally:
        torch.set_num_threads(threads)
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert len({row["name"] for row in rows}) == len(rows) == 12
    assert {"batch 1: step", "batch 2: schedule"} < {row["name"] for row in rows}


def test_a_result_is_not_there_before_its_time() -> None:
    done_s = time.perf_counter() + 0.01
    made = StepResult(token_ids=np.zeros(1, dtype=np.int32))
    assert TimedStep(made, done_s).result() is made
    assert time.perf_counter() >= done_s
