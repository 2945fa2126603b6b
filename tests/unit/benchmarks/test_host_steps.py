"""A step's cost on the host is taken apart, its device is as slow as asked; prompts beside answers being written."""

import json
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import engine, host_steps
from benchmarks.host_steps import Load, TimedStep, gap_rows, gaps_of, parse_way, step_us
from replicas.scheduler.plan import StepResult
from tests.embedded import MODEL
from tests.harness import fake_engine


@pytest.mark.model
@pytest.mark.parametrize("overlap", [False, True])
def test_every_part_of_a_step_is_timed(monkeypatch: pytest.MonkeyPatch, overlap: bool) -> None:
    monkeypatch.setattr(host_steps, "NUM_STEPS", 5)
    times = step_us(2, MODEL, overlap=overlap)
    assert set(times) == {"schedule", "build", "apply", "text", "deliver", "step"}
    assert 0 < max(times[name] for name in times if name != "step") < times["step"]


@pytest.mark.model
def test_rows_are_of_every_part_and_batch_and_can_be_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(host_steps, "NUM_STEPS", 5)
    threads = torch.get_num_threads()
    try:
        engine.main(["host", "--batches", "1", "2", "--model", MODEL, "--json", str(tmp_path / "out.json")])
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


def test_a_way_names_the_tokens_of_a_step_beside_others() -> None:
    assert parse_way("first512") == (False, 512)
    assert parse_way("mixed256") == (True, 512)  # the setting is halved while others run
    with pytest.raises(ValueError, match="'mix' is no way: write first or mixed and a number"):
        parse_way("mix")


def test_every_prompt_has_a_first_token_every_chat_gaps_and_nothing_stays_behind() -> None:
    fake, _ = fake_engine(num_pages=256)
    load = Load(chats=2, prompts=3, prompt_len=20, rate=1000.0)
    found = gaps_of(fake, load, seed=0)
    assert len(found.ttfts_s) == 3
    assert min(found.ttfts_s) > 0
    assert len(found.gaps_s) >= 2 * 2  # a prompt of 20 takes more than one step of 8, each with a token of both chats
    assert found.chat_tokens_per_s == pytest.approx(len(found.gaps_s) / found.took_s)
    assert not fake.has_work
    assert fake.flush_cache()
    names = [row.name for row in gap_rows(load, {"mixed8": [found]})]
    assert names[:2] == ["mixed8: ITL p50", "mixed8: ITL p99"]
