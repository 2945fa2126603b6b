"""The GPU benchmark measures every case of its smallest set, on whatever device there is."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_tiny_benchmark_measures_decode_and_prefill(tmp_path: Path) -> None:
    """Two batches at two contexts, drawn at one, and one prompt: seven rows, each a share of a measured limit."""
    out = tmp_path / "gpu.json"
    command = [sys.executable, "-m", "benchmarks.gpu", "--tiny", "--json", str(out)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    made = json.loads(out.read_text())
    assert [(row["what"], row["batch"], row["context"]) for row in made["rows"]] == [
        ("decode", 1, 16), ("decode", 4, 16), ("decode", 1, 64), ("decode", 4, 64),
        ("decode drawn", 1, 16), ("decode drawn", 4, 16), ("prefill", 1, 64),
    ]  # fmt: skip
    for row in made["rows"]:
        assert 0 < row["host_s"] <= row["step_s"]
        assert row["share"] > 0
