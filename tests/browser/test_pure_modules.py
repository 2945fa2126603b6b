"""The page's modules that need no browser, under node; and that server and page agree on what a delta means."""

import json
import pathlib
import subprocess
from typing import Any

import pytest

from deployments.watch.observatory.deltas import applied
from tests.programs import program

HERE = pathlib.Path(__file__).parent
CASES: list[dict[str, Any]] = json.loads((HERE / "delta_cases.json").read_text())
WHOLE = {"model": "", "mode": "", "period_s": 1.0, "routers": [], "links": [], "totals": {}, "autoscaling": {}}


def test_the_pages_pure_modules_under_node() -> None:
    node = program("node", "nodejs")
    done = subprocess.run([node, "--test", str(HERE / "pure.test.mjs")], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_page_and_server_agree_on_what_a_delta_means(case: dict[str, Any]) -> None:
    assert applied(WHOLE | case["before"], case["delta"]) == WHOLE | case["after"]
