"""The GPU benchmark measures every case of its smallest set, on whatever device there is."""

import argparse
import collections
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import __main__ as bench
from tests.gpu import fake_cuda, flashinfer_stand_in
from tests.gpu.device_steps import DEVICE

ROOT = Path(__file__).resolve().parents[2]


def test_the_tiny_benchmark_measures_decode_and_prefill(tmp_path: Path) -> None:
    """Two batches at two contexts, drawn at one, one prompt, both through the loop, one with edited logits: ten rows,
    each a share of a measured limit. The engine is started as deployments do it. Two ranks, and what lies between
    the products, are measured too."""
    out = tmp_path / "gpu.json"
    two_fit = torch.cuda.device_count() != 1  # without a GPU both run on the CPU
    parts = ["steps", "elementwise", *["ranks"] * two_fit]
    command = [sys.executable, "-m", "benchmarks.gpu", *parts, "--quick", "--json", str(out)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    values: dict[str, dict[str, float]] = {}
    sections = collections.Counter()
    for row in json.loads(out.read_text())["rows"]:
        sections[row["section"]] += 1
        if row["section"] == "tiny":
            values.setdefault(row["name"], {})[row["figure"]] = row["value"]
    decodes = [f"decode, batch {batch}, context {context}" for context in (16, 64) for batch in (1, 4)]
    others = [f"{what}, batch {batch}, context 16" for what in ("decode drawn", "served") for batch in (1, 4)]
    others.append("served edited, batch 4, context 16")
    assert list(values) == [*decodes, *others[:2], "prefill, batch 1, context 64", *others[2:]]
    assert sections["between products"] >= 4
    assert sections["two ranks"] == 4 * two_fit
    for name, figures in values.items():
        assert "served" in name or 0 < figures["host"] <= figures["step"]
        assert min(figures["of the limit"], figures["rate"]) > 0


def test_a_little_of_each_part_of_the_ten_minutes_runs_without_ray_and_nixl(tmp_path: Path) -> None:
    """On a GPU that is not there, if none is; a machine with one has no Ray, perhaps, and no packages of tests."""
    for name in ("ray", "nixl", "aiohttp", "prometheus_client", "hypothesis"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('not on this machine')")
    out = tmp_path / "ten.json"
    options = ["--fake", "--minutes", "90", "--json", str(out)]  # a slow machine is to cut no part
    command = [sys.executable, "-m", "benchmarks", "gpu", "ten-minutes", *options]
    missing = "-p no:hypothesispytest"  # the plugin comes with its package
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTEST_ADDOPTS": missing}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=590)
    parts = {each["name"]: each for each in json.loads(out.read_text())["parts"]}
    verdicts = {name: each["verdict"] for name, each in parts.items() if name != "compile"}
    assert verdicts == dict.fromkeys(verdicts, "passed") | {"mla": "skipped"}, run.stderr
    assert run.returncode == int(parts["compile"]["verdict"] != "skipped"), "FlashInfer compiles for a GPU alone"
    assert {row["name"] for row in parts["speed"]["rows"]} >= {"copy", "served, batch 4, context 16"}
    assert all(each["tests"] for name, each in parts.items() if name not in ("compile", "speed"))
    assert "| ranks | two ranks on one GPU" in run.stdout


@pytest.mark.skipif(DEVICE == "cuda", reason="counted where no GPU is seen")
def test_between_two_replays_a_device_copies_the_step_and_its_plan_and_samples() -> None:
    """Inputs and FlashInfer's plan come, tokens go; rows that draw take three launches and their rules more."""
    rows = {row.name: row for row in bench.operation_rows(argparse.Namespace())}
    assert {name: row.high for name, row in rows.items()} == {
        "greedy by flashinfer": 4, "drawn by flashinfer": 8, "greedy by triton": 3, "drawn by triton": 7
    }  # fmt: skip
    assert rows["greedy by flashinfer"].note == "greatest, copy, copy, copy"


def test_a_steady_step_is_what_lies_between_the_last_begin_and_the_first_end() -> None:
    """Two requests: one begins 3 s after the other, and ends 2 s after it; between them 4 steps of 2 s."""
    early, late = [0.0, 1.0, 3.0, 5.0, 7.0, 9.0, 11.0], [3.0, 5.0, 7.0, 9.0, 11.0, 13.0]
    assert bench.steady_step_s([early, late]) == 2.0
    assert bench.steady_step_s([[0.0, 1.0], [3.0, 4.0]]) is None


def test_kinds_of_prefill_are_measured_beside_each_other(
    gpu: fake_cuda.FakeCuda | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads, repeats = bench.HEADS, 20
    if gpu is not None:
        flashinfer_stand_in.install(monkeypatch)
        heads, repeats = {"num_heads": 4, "num_kv_heads": 1, "head_dim": 64}, 1
    times = bench.attention_s(bench.TINY_CASES, heads, repeats=repeats)
    assert list(times) == ["tiny"]
    assert all(min(each.values()) > 0 for each in times.values())
    if gpu is not None:
        made = [options.get("backend") for _, method, _, options in flashinfer_stand_in.CALLS if method == "__init__"]
        # as chosen there is a long extend too, where the fake GPU is a Hopper
        assert (made.count("fa2"), made.count("fa3")) == (2, 2)
        assert all(list(each) == ["fa2", "fa3", "chosen", "triton"] for each in times.values())
