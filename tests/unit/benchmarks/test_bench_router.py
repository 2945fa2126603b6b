"""The command line of the router's measurements: rows of every policy, refusals in one line, a live router."""

import json
import pathlib

import pytest

from benchmarks import router


def test_the_json_holds_every_figure_of_every_policy_of_a_trace(tmp_path: pathlib.Path) -> None:
    trace, out = tmp_path / "trace.jsonl", tmp_path / "deep" / "out.json"
    line = {"timestamp": 0, "input_length": 1000, "output_length": 2, "hash_ids": [0, 1]}
    trace.write_text((json.dumps(line) + "\n") * 10)
    policies = ["round_robin", "least_tokens", "oracle"]
    asked = [word for policy in policies for word in ("--policy", policy)]
    router.main(["simulate", "--trace", str(trace), *asked, "--json", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert list(dict.fromkeys(row["name"] for row in rows)) == policies
    times = {"TTFT mean", "TTFT p50", "TTFT p90", "TTFT p95", "TTFT p99", "choice p50", "choice p99"}
    figures = times | {"hit", "within 5 s", "in time", "skew"}
    assert {row["figure"] for row in rows} == figures
    assert rows[0]["note"] == "next_in_turn 10"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ("--trace /nowhere.jsonl", "simulate: [Errno 2] No such file or directory: '/nowhere.jsonl'"),
        ("--rate 0", "0 must be above 0"),
    ],
)
def test_what_cannot_be_simulated_is_refused_in_one_line(
    options: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        router.main(["simulate", *options.split()])
    assert why in capsys.readouterr().err


def test_a_live_router_learns_all_that_its_replicas_tell(tmp_path: pathlib.Path) -> None:
    """Twelve replicas of another process, over the real channel: no event is lost, and a restart finds all caches."""
    out = tmp_path / "out.json"
    router.main(["live", "--fleet", "12", "--seconds", "1", "--rounds", "1", "--pages", "64", "--json", str(out)])
    rows = {row["name"]: row for row in json.loads(out.read_text())["rows"]}
    assert rows["choice: p99"]["runs"] >= 50  # more where a stalled machine has some go elsewhere
    assert rows["request due until its token is here: p99"]["value"] > 0
    assert rows["restarted: whole again"]["target"] == "< 5"
    assert rows["events taken in"]["value"] > 0
    assert rows["events taken in"]["note"].endswith("0 gaps, 0 caches apart in the end")
