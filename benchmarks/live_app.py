"""The application on a local Ray of its own, and the CPU time of all that a benchmark has started. Linux; reads /proc.

Owns:      the process and its end: nothing of one run is left for the next.
Invariant: the benchmark's own process, with its client, is never counted; no part's time ever falls, whatever threads
           and processes end.

CPU time is the kernel's count of nanoseconds on a core, summed over threads: the ticks of /proc/PID/stat are 10 ms,
which over a window of some thousand tokens would be microseconds a token, process by process. But only ticks count
threads that ended between two looks, so that what ticks have above the sum is added, once it is more than they round
off. What a process did between the last look and its own end is not counted.
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
# in the title of a process -> what it is called here
PARTS = {
    "ModelReplica": "replicas", ":Router": "router", ":Observatory": "observatory", "haproxy": "HAProxy",
    "ProxyActor": "HTTP proxy", "ServeController": "Serve controller",
}  # fmt: skip
REST = "rest of Ray"
ROUNDED_S = 2 / os.sysconf("SC_CLK_TCK")  # user and system time, each down to a tick


@contextlib.contextmanager
def serving(config_file: str, args: Mapping[str, Any], *, observatory: bool = True) -> Iterator[str]:
    """Serve ``config_file`` (from the project's root), its arguments replaced by ``args`` of the same name, on a free
    port.

    Args: observatory: False leaves out what stands in the file beside the application itself.
    Yields: the URL, once it is ready. Raises: ServerFailed with the log of an application that did not start.
    """
    applications = yaml.safe_load((ROOT / config_file).read_text())["applications"]
    applications[0]["args"].update(args)
    with running(applications if observatory else applications[:1], answers_at=["/health"], says=ANNOUNCED) as url:
        yield url


@contextlib.contextmanager
def running(
    applications: Sequence[Mapping[str, Any]],
    *,
    answers_at: Sequence[str],
    says: str = "",
    environment: Mapping[str, str] | None = None,
) -> Iterator[str]:
    """Serve ``applications``, written as in Serve's configuration file, on a free port.

    Args: answers_at: paths that answer 200 once all is ready; says: what its log holds by then (nothing is announced
          of applications that are not Manta's own); environment: beside this process's own.
    Yields, raises: as `serving`.
    """
    port = free_port()
    config = {
        "proxy_location": "HeadOnly",
        "http_options": {"host": HOST, "port": port},
        "applications": list(applications),
    }
    own = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    with tempfile.TemporaryDirectory(prefix="manta-bench-") as folder:
        file, log = Path(folder) / "serve_config.yaml", Path(folder) / "serve.log"
        file.write_text(yaml.safe_dump(config))
        argv, env = [sys.executable, "-m", "deployments", "serve", str(file)], {**own, **(environment or {})}
        urls = [f"http://{HOST}:{port}{path}" for path in answers_at]
        with started(argv, log, env=env, answers_at=urls, says=says, told=lambda log: f"\n{log.read_text()}"):
            yield f"http://{HOST}:{port}"


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
    """The CPU time of one measurement, of processes that have ended since too."""

    def __init__(self, parts: Mapping[str, str] = PARTS) -> None:
        self._parts = parts
        self._total = dict.fromkeys((*parts.values(), REST), 0.0)
        self._processes: dict[psutil.Process, _ProcessCpu] = {}  # equal where pid and start are

    def by_part(self) -> dict[str, float]:
        """Return user and system time, in seconds, of all that this process has started and that ran at some look."""
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                title = " ".join(process.cmdline())  # Ray's workers take theirs once they know what they run
                part = next((part for name, part in self._parts.items() if name in title), REST)
                self._total[part] += self._processes.setdefault(process, _ProcessCpu(process)).since_last_look()
        return dict(self._total)


class _ProcessCpu:
    """The CPU time of one process."""

    def __init__(self, process: psutil.Process) -> None:
        self._process = process
        self._thread_ns: dict[str, int] = {}  # the most of each thread, ended ones too
        self._unseen_s: float | None = None  # of threads that ended, since they were seen last
        self._used_s = 0.0

    def since_last_look(self) -> float:
        """Return seconds, at least 0. Raises: psutil's NoSuchProcess."""
        ticks = self._process.cpu_times()  # before the sum, or it would hold what runs meanwhile
        for task in Path(f"/proc/{self._process.pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                ran_ns = int(task.read_text().split()[0])
                self._thread_ns[task.parent.name] = max(ran_ns, self._thread_ns.get(task.parent.name, 0))
        seen_s = sum(self._thread_ns.values()) / 1e9
        above_s = max(0.0, ticks.user + ticks.system - seen_s)
        if self._unseen_s is None or above_s > self._unseen_s + ROUNDED_S:
            self._unseen_s = above_s
        before_s, self._used_s = self._used_s, seen_s + self._unseen_s
        return self._used_s - before_s


def difference(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    return {part: after[part] - before[part] for part in after}
