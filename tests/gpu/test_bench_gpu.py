"""The GPU benchmark measures every case of its smallest set, on whatever device there is."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import attention
from tests.gpu import fake_cuda, flashinfer_stand_in

ROOT = Path(__file__).resolve().parents[2]


def test_the_tiny_benchmark_measures_decode_and_prefill(tmp_path: Path) -> None:
    """Two batches at two contexts, drawn at one, one prompt, and both through the loop: nine rows, each a share of a
    measured limit. The engine is started as deployments do it."""
    out = tmp_path / "gpu.json"
    command = [sys.executable, "-m", "benchmarks.gpu", "--tiny", "--json", str(out)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    made = json.loads(out.read_text())
    assert [(row["what"], row["batch"], row["context"]) for row in made["rows"]] == [
        ("decode", 1, 16), ("decode", 4, 16), ("decode", 1, 64), ("decode", 4, 64),
        ("decode drawn", 1, 16), ("decode drawn", 4, 16), ("prefill", 1, 64),
        ("served", 1, 16), ("served", 4, 16),
    ]  # fmt: skip
    for row in made["rows"]:
        assert 0 < row["host_s"] <= row["step_s"] or row["what"] == "served"
        assert row["share"] > 0


def test_kinds_of_prefill_are_measured_beside_each_other(
    gpu: fake_cuda.FakeCuda | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if gpu is not None:
        flashinfer_stand_in.install(monkeypatch)
        monkeypatch.setattr(attention, "REPEATS", 1)
        monkeypatch.setattr(attention, "SHAPE", {"num_heads": 4, "num_kv_heads": 1, "head_dim": 64, "page_size": 16})
    times = attention.measure(attention.TINY)
    assert list(times) == ["tiny", "tiny group"]
    assert all(min(each.values()) > 0 for each in times.values())
    if gpu is not None:
        made = [options.get("backend") for _, method, _, options in flashinfer_stand_in.CALLS if method == "__init__"]
        assert {made.count("fa2"), made.count("fa3")} == {4}  # extend and group, of two cases
        assert all(list(each) == ["fa2", "fa3", "triton"] for each in times.values())
