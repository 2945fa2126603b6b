"""Other systems: each installed into an environment of its own; a server started, waited for, and ended for sure.

Owns:      ``.peers/NAME`` in the project's root: a virtual environment and the mark of the recipe that made it. A
           server's process and its group; its log, of which the last lines explain a death.
Never:     installs anything into our own environment, or leaves a half-made one that looks whole: the mark is last.
           Leaves a process behind, however the block ends.
Invariant: an environment whose mark holds today's recipe is whole; any other is made anew.

    mark holds the recipe? ──no──> remove ──> venv ──> pip, step by step ──> repairs ──> mark
"""

import contextlib
import fcntl
import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.harness import ROOT, say
from benchmarks.live_app import ServerFailed

PEERS = ROOT / ".peers"
STOP_S = 8.0  # some finish what they have first; then they are killed
MARK = ".installed.json"
SITE = f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"


class InstallFailed(Exception):
    """A system could not be installed; the message says at which step, and where its log is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How one system comes into its environment. Plain data, so that a change of it can be seen."""

    name: str  # of the folder
    pip: tuple[tuple[str, ...], ...]  # arguments of one call of pip each
    env: Mapping[str, str] = field(default_factory=dict)  # while pip builds
    files: Mapping[str, str] = field(default_factory=dict)  # written at the end: path in site-packages -> text


def installed(recipe: Recipe, peers: Path = PEERS) -> bool:
    """Return whether the environment is there and whole, made by this recipe."""
    mark = peers / recipe.name / MARK
    return mark.is_file() and json.loads(mark.read_text())["recipe"] == _plain(recipe)


def ensure(recipe: Recipe, *, limit_s: float, peers: Path = PEERS) -> Path:
    """Return the environment's folder; made if it is not there or was made by another recipe. One process makes it.

    Raises: InstallFailed.
    """
    peers.mkdir(parents=True, exist_ok=True)
    with (peers / f".{recipe.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not installed(recipe, peers):
            _make(recipe, peers / recipe.name, limit_s)
    return peers / recipe.name


def _make(recipe: Recipe, folder: Path, limit_s: float) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    log = folder.with_name(f"{recipe.name}.install.log")
    started_s = time.monotonic()
    say(f"installing {recipe.name} into {folder} (at most {limit_s:.0f} s; {log})")
    python = str(folder / "bin" / "python")
    commands = [[sys.executable, "-m", "venv", str(folder)]]
    commands += [[python, "-m", "pip", "--disable-pip-version-check", *arguments] for arguments in recipe.pip]
    with log.open("wb") as out:
        for command in commands:
            _run(command, recipe, log, out.fileno(), limit_s - (time.monotonic() - started_s))
    for path, text in recipe.files.items():
        file = folder / SITE / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    took_s = round(time.monotonic() - started_s, 1)
    (folder / MARK).write_text(json.dumps({"recipe": _plain(recipe), "took_s": took_s}, indent=1) + "\n")


def _run(command: Sequence[str], recipe: Recipe, log: Path, out: int, left_s: float) -> None:
    """Run one command and what it starts in a group of its own, which ends with it. Raises: InstallFailed."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env={**os.environ, **recipe.env},
        start_new_session=True,
    )  # fmt: skip
    try:
        status = process.wait(max(left_s, 0.0))
    except subprocess.TimeoutExpired as error:
        raise InstallFailed(f"`{' '.join(command)}` was not done when the time for it was over ({log})") from error
    finally:
        stop(process)
    if status != 0:
        raise InstallFailed(f"`{' '.join(command)}` ended with {status}: {_last_line(log)}")


def _plain(recipe: Recipe) -> object:
    return json.loads(json.dumps(asdict(recipe)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """How to start a server that listens on ``port``."""

    argv: Sequence[str]
    env: Mapping[str, str]  # besides our own environment
    port: int
    model: str  # how requests name it
    ready: str = "/health"  # answers 200 once the model is loaded


@contextlib.contextmanager
def running(command: Command, log: Path, *, start_s: float) -> Iterator[str]:
    """Yields: the server's URL, once it is ready. Raises: ServerFailed, which says what its log says last."""
    log.parent.mkdir(parents=True, exist_ok=True)
    url = f"http://127.0.0.1:{command.port}"
    with log.open("wb") as out:
        try:
            process = subprocess.Popen(
                command.argv, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT,
                env={**os.environ, **command.env}, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise ServerFailed(f"{command.argv[0]} cannot be run: {error.strerror}") from error
    try:
        deadline_s = time.monotonic() + start_s
        while not _answers(url + command.ready):
            if process.poll() is not None:
                raise ServerFailed(f"ended with {process.returncode} while it started; its log ends: {_last_line(log)}")
            if time.monotonic() > deadline_s:
                raise ServerFailed(f"was not ready after {start_s:.0f} s; its log ends: {_last_line(log)}")
            time.sleep(0.2)
        yield url
    finally:
        stop(process)


def _answers(url: str) -> bool:
    """Return whether a server answers ``url`` without an error."""
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except (OSError, http.client.HTTPException):
        return False


def _last_line(log: Path) -> str:
    """Return what a log says last, for a report."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"{lines[-1][:200] if lines else 'nothing'} ({log})"


def stop(process: subprocess.Popen[bytes]) -> None:
    """End the whole group of a process that leads one: its children are in it."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
