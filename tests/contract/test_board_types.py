"""The boards have the types that Grafana publishes: an unknown key is found before a board is opened."""

import json
import pathlib
import re
import shutil
import subprocess
from typing import Any

import pytest

from dashboards.files import BOARD_FILES
from tests.programs import program
from tests.scraped import committed_board, panels

SOURCES = pathlib.Path("tests/grafana")
TSC = ("--noEmit", "--strict", "--skipLibCheck", "--module", "nodenext", "--moduleResolution", "nodenext")


@pytest.fixture(scope="module")
def folder() -> pathlib.Path:
    """A folder with TypeScript and Grafana's types in the versions of the lock file."""
    for name, package in (("node", "nodejs"), ("npm", "npm")):
        program(name, package)  # Node 18 or later
    place = pathlib.Path(".tools/grafana-types").resolve()
    place.mkdir(parents=True, exist_ok=True)
    for name in ("package.json", "package-lock.json", ".npmrc", "shapes.ts"):
        shutil.copy(SOURCES / name, place / name)
    lock = place / "node_modules" / ".lock-as-installed"
    if not lock.is_file() or lock.read_text() != (SOURCES / "package-lock.json").read_text():
        done = subprocess.run(["npm", "ci", "--no-progress"], cwd=place, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"npm ci failed; is the npm registry reachable?\n{done.stderr[-2000:]}"
        shutil.copy(SOURCES / "package-lock.json", lock)
    return place


def complaints(folder: pathlib.Path, documents: list[Any]) -> list[str]:
    """What tsc says of the boards and of each panel's parts."""
    lines = ["import type { Dashboard, Parts } from './shapes';"]
    for number, document in enumerate(documents):
        lines.append(f"export const board{number}: Dashboard = {json.dumps(document)};")
        for panel in panels(document):
            parts = {"options": panel["options"], "custom": panel["fieldConfig"]["defaults"].get("custom", {})}
            name = f"board{number}_{panel['id']}"
            lines.append(f"export const {name}: Parts['{panel['type']}'] = {json.dumps(parts)};")
    (folder / "boards.ts").write_text("\n".join(lines) + "\n")
    tsc = folder / "node_modules" / "typescript" / "bin" / "tsc"
    command = ["node", str(tsc), *TSC, "boards.ts"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    found = [line for line in done.stdout.splitlines() if ": error TS" in line]
    assert bool(found) == bool(done.returncode), done.stdout + done.stderr
    return found


@pytest.mark.slow
def test_boards_have_the_types_that_grafana_publishes_and_a_wrong_one_is_found(folder: pathlib.Path) -> None:
    boards: list[Any] = [committed_board(uid) for uid in BOARD_FILES]
    assert complaints(folder, boards) == []
    spoilt = boards[0]
    lines = next(panel for panel in panels(spoilt) if panel["type"] == "timeseries")
    lines["fieldConfig"]["defaults"]["custom"]["fillOpacity"] = "fifty"
    lines["options"]["tooltip"]["mode"] = "all"
    spoilt["graphTooltip"] = "crosshair"
    found = complaints(folder, [spoilt])
    assert any("'string' is not assignable to type 'number" in each for each in found)
    assert any('"all"' in each for each in found)
    assert len(found) == 3


def test_the_lock_file_names_no_registry() -> None:
    assert re.findall(r'"resolved"|https?://', (SOURCES / "package-lock.json").read_text()) == []
