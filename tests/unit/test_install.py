"""An installation shows one line of progress, keeps pip's output in a log, and shows the log's end when it fails."""

import contextlib
import io
import os
import pty
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools.install import TAIL_LINES, doing, run

PIP = """Obtaining file:///work
Collecting torch==2.13.0 (from manta==0.1.0)
  Downloading torch-2.13.0-cp311-manylinux_2_28_x86_64.whl (180.5 MB)
Collecting numpy>=2.0 (from manta==0.1.0)
  Using cached numpy-2.4.0-cp311-manylinux_2_27_x86_64.whl.metadata (62 kB)
"""


ROOT = Path(__file__).parents[2]


def test_the_lock_lists_all_that_the_project_asks_for_by_hash_and_names_no_place() -> None:
    """Else: `make lock`."""
    text = (ROOT / "constraints.txt").read_text()
    entries = [entry.split(" \\\n    --hash=sha256:") for entry in re.split(r"\n(?=[a-z])", text.strip())]
    assert [entry[0] for entry in entries if len(entry) < 2] == []
    assert all(re.fullmatch("[0-9a-f]{64}", digest) for _, *digests in entries for digest in digests)
    locked: dict[str, list[str]] = defaultdict(list)
    for requirement in (Requirement(first) for first, *_ in entries):
        [pin] = requirement.specifier
        assert (pin.operator, requirement.url) == ("==", None)
        locked[canonicalize_name(requirement.name)].append(pin.version)
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text())
    unlocked = re.compile(re.search(r"^UNLOCKED := (\S+)$", (ROOT / "Makefile").read_text(), re.M)[1])  # type: ignore[index]
    assert [name for name in locked if unlocked.match(name)] == []
    for wanted in map(Requirement, [*asked["project"]["dependencies"], *asked["build-system"]["requires"]]):
        if not unlocked.match(wanted.name):
            assert locked[canonicalize_name(wanted.name)], f"{wanted.name} is not locked"
            assert all(wanted.specifier.contains(version) for version in locked[canonicalize_name(wanted.name)]), wanted


def script(text: str) -> list[str]:
    return [sys.executable, "-c", text]


@pytest.mark.parametrize(
    ("log", "says"),
    [
        ("", "starting pip"),
        ("Looking in indexes: x\n", "starting pip"),
        ("Collecting torch==2.13.0 (from manta==0.1.0)\n", "resolving torch"),
        (PIP, "fetching numpy, 181 MB so far"),
        (PIP + "Building wheels for collected packages: manta\n", "building manta, 181 MB so far"),
        (PIP + "  Building editable for manta (pyproject.toml): started\n", "building manta, 181 MB so far"),
        (PIP + "Installing collected packages: a, b, manta\n", "unpacking 3 packages, 181 MB so far"),
    ],
)
def test_what_pip_is_doing_is_read_from_its_log(log: str, says: str) -> None:
    assert doing(log) == says


def test_without_a_terminal_pips_output_is_in_the_log_and_a_line_comes_now_and_then(tmp_path: Path) -> None:
    out, log = io.StringIO(), tmp_path / "pip.log"
    says = "import time; print('Location ... is ignored'); print('Collecting torch', flush=True); time.sleep(1)"
    assert run("Installing Manta", log, script(says), out=out, elsewhere_s=0.3) == 0
    first, *between, last = out.getvalue().splitlines()
    assert first.endswith(f"Installing Manta (once; log: {log})")
    assert last.endswith(f"Installing Manta: done (log: {log})")
    assert between[-1].endswith("Installing Manta: resolving torch")  # pip lives
    assert "ignored" not in out.getvalue()
    assert log.read_text() == "Location ... is ignored\nCollecting torch\n"


def test_an_installation_that_fails_shows_the_end_of_its_log_and_pips_status(tmp_path: Path) -> None:
    out = io.StringIO()
    says = "import sys; [print('line', i) for i in range(100)]; print('ERROR: no such', file=sys.stderr); sys.exit(3)"
    assert run("Installing Manta", tmp_path / "pip.log", script(says), out=out) == 3
    lines = out.getvalue().splitlines()
    assert lines[1].endswith(f"Installing Manta: failed with status 3; the end of {tmp_path / 'pip.log'}:")
    assert lines[-1] == "ERROR: no such"
    assert len(lines) == 2 + TAIL_LINES
    assert "line 99" in lines
    assert "line 0" not in lines


def test_on_a_terminal_the_line_is_drawn_in_place(tmp_path: Path) -> None:
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as terminal:
        says = "import time; print('Collecting torch', flush=True); time.sleep(1.2)"
        assert run("Installing Manta", tmp_path / "pip.log", script(says), out=terminal) == 0
    pieces = []
    with contextlib.suppress(OSError):  # EIO is the end
        while piece := os.read(master, 65536):
            pieces.append(piece)
    os.close(master)
    written = b"".join(pieces).decode()
    assert "Installing Manta: resolving torch" in written
    assert written.count("\n") == 1  # the last line stays
    assert written.count("\r\x1b[2K") >= 3


def test_make_install_prints_a_line_of_progress_and_no_word_of_pip(tmp_path: Path) -> None:
    """`make`, with a Python whose pip is as talkative as on an index that lacks a package; without a terminal."""
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    python = tmp_path / "venv" / "bin" / "python"
    python.write_text(
        f"#!/bin/sh\nif [ \"$2\" = tools.install ]; then shift 2; exec {sys.executable} -c 'import sys; "
        "from pathlib import Path; from tools import install; "
        "sys.exit(install.run(sys.argv[1], Path(sys.argv[2]), "
        "[\"sh\", \"-c\", \"echo WARNING: Location is ignored\"]))' \"$@\"; fi\necho unexpected; exit 1\n"
    )
    python.chmod(0o755)
    done = subprocess.run(
        ["make", "install", f"VENV={tmp_path / 'venv'}"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Location" not in done.stdout + done.stderr
    assert done.stdout.count("Installing Manta") == 2
    assert "Location is ignored" in (tmp_path / "venv" / "install.log").read_text()
