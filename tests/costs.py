"""What each test costs: a plugin that writes it down, and the table.

    python -m pytest -p tests.costs ...      appends to $MANTA_TEST_COSTS (a folder; default .costs), a file a process
    python -m tests.costs [--by file|test|fixture] [--top N]

A cost is CPU seconds of the process and of its children that have ended, beside seconds of the clock: the former hold
on a machine that does other work. A fixture's cost is that of its setup, where it was set up.
"""

import argparse
import json
import os
import resource
import time
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(os.environ.get("MANTA_TEST_COSTS", ".costs"))


def _spent() -> tuple[float, float]:
    """Seconds of the clock, and of CPU."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return time.monotonic(), sum(each.ru_utime + each.ru_stime for each in used)


def _note(kind: str, name: str, path: str, before: tuple[float, float]) -> None:
    wall_s, cpu_s = (now - then for now, then in zip(_spent(), before, strict=True))
    if wall_s < 0.001:
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    row = {"kind": kind, "name": name, "file": path, "wall_s": round(wall_s, 3), "cpu_s": round(cpu_s, 3)}
    with (FOLDER / f"{os.getpid()}.jsonl").open("a") as file:
        print(json.dumps(row), file=file)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    before = _spent()
    done = yield
    _note("test", item.nodeid, item.nodeid.partition("::")[0], before)
    return done


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> Generator[None, Any, Any]:
    before = _spent()
    done = yield
    _note("fixture", fixturedef.argname, request.node.nodeid.partition("::")[0], before)
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--by", choices=["file", "test", "fixture"], default="file")
    parser.add_argument("--top", type=int, default=60)
    options = parser.parse_args()
    rows = [json.loads(line) for path in FOLDER.glob("*.jsonl") for line in path.read_text().splitlines()]
    wanted = [row for row in rows if row["kind"] == ("fixture" if options.by == "fixture" else "test")]
    costs: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0])
    for row in wanted:
        name = (
            f"{row['file']} {row['name']}"
            if options.by == "fixture"
            else row["file" if options.by == "file" else "name"]
        )
        costs[name] = [a + b for a, b in zip(costs[name], (row["cpu_s"], row["wall_s"], 1), strict=True)]
    print(f"{'CPU s':>8} {'clock s':>8} {'times':>6}")
    for name, (cpu_s, wall_s, count) in sorted(costs.items(), key=lambda each: -each[1][0])[: options.top]:
        print(f"{cpu_s:8.1f} {wall_s:8.1f} {count:6.0f}  {name}")
    cpu_s, wall_s = (sum(row[what] for row in wanted) for what in ("cpu_s", "wall_s"))
    print(f"{cpu_s:8.1f} {wall_s:8.1f} {len(wanted):6}  in all")


if __name__ == "__main__":
    main()
