"""One other system's server: started, waited for, and ended for sure.

Owns:      the process and its group; its log, of which the last lines explain a death.
Never:     leaves a process behind, however the block ends.
"""

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.live_app import answers

POLL_S = 0.25
STOP_S = 8.0  # some finish what they have first; then they are killed


class ServerFailed(Exception):
    """A server did not come up; the message says what its log says last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """How to start a server that listens on ``port``."""

    argv: Sequence[str]
    env: Mapping[str, str]  # besides our own environment
    port: int
    model: str  # how requests name it
    ready: str = "/health"  # answers 200 once the model is loaded


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running(command: Command, log: Path, *, start_s: float) -> Iterator[str]:
    """Yields: the server's URL, once it is ready. Raises: ServerFailed."""
    log.parent.mkdir(parents=True, exist_ok=True)
    url = f"http://127.0.0.1:{command.port}"
    with log.open("wb") as out:
        try:
            process = subprocess.Popen(
                list(command.argv),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **command.env},
                start_new_session=True,
            )
        except OSError as error:
            raise ServerFailed(f"{command.argv[0]} cannot be run: {error.strerror}") from error
        try:
            _wait_ready(process, url + command.ready, log, start_s)
            yield url
        finally:
            stop(process)


def last_line(log: Path) -> str:
    """What a log says last, for a report."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"{lines[-1][:200] if lines else 'nothing'} ({log})"


def _wait_ready(process: subprocess.Popen[bytes], url: str, log: Path, start_s: float) -> None:
    deadline_s = time.monotonic() + start_s
    while not answers(url):
        if process.poll() is not None:
            raise ServerFailed(f"ended with {process.returncode} while it started; its log ends: {last_line(log)}")
        if time.monotonic() > deadline_s:
            raise ServerFailed(f"was not ready after {start_s:.0f} s; its log ends: {last_line(log)}")
        time.sleep(POLL_S)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End the whole group of a process that leads one: its children are in it."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
