"""An installation shows pip's newest line, keeps all of its output in a log, and shows the log's end when it fails."""

import contextlib
import os
import pty
import re
import subprocess
import tomllib
from collections import defaultdict
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

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


def installing(tmp_path: Path, pip: str) -> subprocess.CompletedProcess[str]:
    """What `make install` gives, without a terminal; ``pip`` is the shell script that stands in for it."""
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    python = tmp_path / "venv" / "bin" / "python"
    python.write_text(f'#!/bin/sh\n[ "$2" = pip ] || exit 99\n{pip}\n')
    python.chmod(0o755)
    of_another_make = {"MAKEFLAGS", "MAKELEVEL", "MFLAGS"}  # under which make says which folder it enters
    env = {name: value for name, value in os.environ.items() if name not in of_another_make}
    return subprocess.run(
        ["make", "install", f"VENV={tmp_path / 'venv'}"],
        capture_output=True, text=True, timeout=60, check=False, env=env,
    )  # fmt: skip


def test_make_install_says_what_it_installs_and_no_word_of_pip(tmp_path: Path) -> None:
    """With a pip as talkative as on an index that lacks a package."""
    done = installing(tmp_path, "echo WARNING: Location is ignored; echo and more >&2")
    assert done.returncode == 0, done.stderr
    logs = [tmp_path / "venv" / name for name in ("install-locked.log", "install.log")]
    assert done.stdout.splitlines() == [
        f"Installing what constraints.txt lists (once; log: {logs[0]})", "Installing what constraints.txt lists: done",
        f"Installing Manta into {tmp_path / 'venv'} (once; log: {logs[1]})",
        f"Installing Manta into {tmp_path / 'venv'}: done",
    ]  # fmt: skip
    assert [log.read_text() for log in logs] == ["WARNING: Location is ignored\nand more\n"] * 2


def test_an_installation_that_fails_shows_the_end_of_its_log_and_stops(tmp_path: Path) -> None:
    done = installing(tmp_path, "seq -f 'line %g' 100; echo ERROR: no such >&2; exit 3")
    lines, log = done.stdout.splitlines(), tmp_path / "venv" / "install-locked.log"
    assert lines[1] == f"Installing what constraints.txt lists: failed with status 3; the end of {log}:"
    assert (lines[2], lines[-1], len(lines)) == ("line 62", "ERROR: no such", 42)
    assert done.returncode == 2
    assert "To take the newest that pyproject.toml allows, unchecked: make install LOCK=" in done.stderr
    assert not (tmp_path / "venv" / ".installed").exists()


def test_on_a_terminal_pips_newest_line_is_drawn_in_place(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho Collecting torch; sleep 1.5\n")
    python.chmod(0o755)
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as terminal:
        command = ["sh", "tools/install.sh", str(python), "Installing Manta", str(tmp_path / "pip.log"), "torch"]
        assert subprocess.run(command, stdout=terminal, timeout=60, check=False, cwd=ROOT).returncode == 0
    pieces = []
    with contextlib.suppress(OSError):  # EIO is the end
        while piece := os.read(master, 65536):
            pieces.append(piece)
    os.close(master)
    written = b"".join(pieces).decode()
    assert "\r\x1b[KCollecting torch" in written
    assert written.endswith("\r\x1b[KInstalling Manta: done\r\n")
    assert written.count("\n") == 2  # the first line and the last stay
