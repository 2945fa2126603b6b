"""The application on a local Ray of its own, and the CPU time of all that a benchmark has started.

Owns:      the process and its end: nothing of one run is left for the next.
Invariant: the benchmark's own process, with its client, is never counted; no CPU time ever falls, whatever threads and
           processes end. What a process did between the last look and its own end is not counted.
"""

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks.harness import ROOT

HOST = "127.0.0.1"
START_S = 240.0
STOP_S = 60.0
ANNOUNCED = "Try it:"  # in its log once every application runs, which an answer of one replica does not say


@contextlib.contextmanager
def serving(config_file: str, args: Mapping[str, Any], *, observatory: bool = True) -> Iterator[str]:
    """Serve ``config_file`` (from the project's root), its arguments replaced by ``args`` of the same name, on a free
    port.

    Args: observatory: False leaves out what stands in the file beside the application itself.
    Yields: the URL, once it is ready. Raises: ServerFailed with the log of an application that did not start.
    """
    applications = yaml.safe_load((ROOT / config_file).read_text())["applications"]
    applications[0]["args"].update(args)
    url = f"http://{HOST}:{(port := free_port())}"
    config = {
        "proxy_location": "HeadOnly",
        "http_options": {"host": HOST, "port": port},
        "applications": applications if observatory else applications[:1],
    }
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    with tempfile.TemporaryDirectory(prefix="manta-bench-") as folder:
        file, log = Path(folder) / "serve_config.yaml", Path(folder) / "serve.log"
        file.write_text(yaml.safe_dump(config))
        argv, ready = [sys.executable, "-m", "deployments", "serve", str(file)], [f"{url}/health"]
        with started(argv, log, env=env, answers_at=ready, says=ANNOUNCED, told=lambda log: f"\n{log.read_text()}"):
            yield url


class ServerFailed(RuntimeError):
    """A server did not come up; the message says what its log says last."""


def last_line(log: Path) -> str:
    """Return what a log says last, for a report."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"{lines[-1][:200] if lines else 'nothing'} ({log})"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def started(
    argv: Sequence[str], log: Path, *, env: Mapping[str, str], answers_at: Sequence[str], says: str = "",
    start_s: float = START_S, told: Callable[[Path], str] = last_line,
    end: Callable[[subprocess.Popen[bytes]], None] | None = None,
) -> Iterator[None]:  # fmt: skip
    """Run a server in a group of its own until the block ends; ``end`` ends it (None: `stop`).

    Args: answers_at: URLs that answer 200 once it is ready; says: what its log holds by then; told: what an error says
          of the log.
    Raises: ServerFailed.
    """
    with log.open("wb") as out:
        try:
            process = subprocess.Popen(
                list(argv), stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=env, cwd=ROOT,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise ServerFailed(f"{argv[0]} cannot be run: {error.strerror}") from error
    try:
        if why_not := _wait_ready(process, log, says, answers_at, start_s):
            raise ServerFailed(f"{why_not}; its log ends: {told(log)}")
        yield
    finally:
        (end or stop)(process)


def stop(process: subprocess.Popen[bytes], *, within_s: float = STOP_S) -> None:
    """End it as Ctrl-C does. If that takes longer, or the wait is interrupted: kill it, with all that it started."""
    process.send_signal(signal.SIGINT)
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(within_s)
    finally:
        if process.poll() is None:
            print(f"  the application had not ended {within_s:g} s after SIGINT: killed", file=sys.stderr, flush=True)
            started = psutil.Process(process.pid).children(recursive=True)
            os.killpg(process.pid, signal.SIGKILL)
            for each in started:  # Ray's have groups of their own
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
            process.wait()


def _wait_ready(
    process: subprocess.Popen[bytes], log: Path, says: str, urls: Sequence[str], start_s: float = START_S,
    sleep: Callable[[float], None] = time.sleep,
) -> str:  # fmt: skip
    """Return why it is not ready and never will be; "" once it is."""
    deadline_s = time.monotonic() + start_s
    while says not in log.read_text(errors="replace") or not all(answers(url) for url in urls):
        if process.poll() is not None:
            return f"ended with {process.returncode} while it started"
        if time.monotonic() > deadline_s:
            return f"was not ready after {start_s:.0f} s"
        sleep(0.2)
    return ""


def answers(url: str) -> bool:
    """Return whether a server answers ``url`` without an error."""
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except (OSError, http.client.HTTPException):
        return False


class ServerCpu:
    """The CPU time of all that this process has started, ended processes as of the last look included."""

    def __init__(self) -> None:
        self._used_s: dict[psutil.Process, float] = {}  # equal where pid and start are

    def seconds(self) -> float:
        """Return user and system time so far, to some ticks of 10 ms."""
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                self._used_s[process] = times.user + times.system
        return sum(self._used_s.values())
