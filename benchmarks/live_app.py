"""The application on a local Ray of its own, for benchmarks that need a real one.

Owns:      the process and its end: nothing of one run is left for the next.
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

ROOT = Path(__file__).resolve().parents[1]
HOST = "127.0.0.1"
START_S = 240.0
STOP_S = 60.0
ANNOUNCED = "Try it:"  # in its log once every application runs, which an answer of one replica does not say


@contextlib.contextmanager
def serving(config_file: str, args: Mapping[str, Any], *, observatory: bool = True) -> Iterator[str]:
    """``config_file`` (from the project's root) with ``args`` in the place of its own of the same name, on a free port.

    Args: observatory: False leaves out what stands in the file beside the application itself.
    Yields: the URL, once it is ready. Raises: RuntimeError with the log of an application that did not start.
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
    """``applications`` as Serve's configuration file has them, on a free port.

    Args: answers_at: paths that answer 200 once all is ready; says: what its log holds by then (nothing is announced
          of applications that are not Manta's own); environment: beside this process's own.
    Yields, raises: as `serving`.
    """
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = int(probe.getsockname()[1])
    config = {
        "proxy_location": "HeadOnly",
        "http_options": {"host": HOST, "port": port},
        "applications": list(applications),
    }
    own = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    with tempfile.TemporaryDirectory(prefix="manta-bench-") as folder:
        file, log = Path(folder) / "serve_config.yaml", Path(folder) / "serve.log"
        file.write_text(yaml.safe_dump(config))
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "deployments", "serve", str(file)],
                stdout=out, stderr=subprocess.STDOUT, env={**own, **(environment or {})}, cwd=ROOT,
                start_new_session=True,
            )  # fmt: skip
        try:
            _wait_ready(process, log, says, [f"http://{HOST}:{port}{path}" for path in answers_at])
            yield f"http://{HOST}:{port}"
        finally:
            stop(process)


def stop(process: subprocess.Popen[bytes], *, within_s: float = STOP_S) -> None:
    """End it as Ctrl-C does. If that takes longer, or somebody does not wait: kill it, with all that it started."""
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
    process: subprocess.Popen[bytes],
    log: Path,
    says: str,
    urls: Sequence[str],
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    deadline_s = time.monotonic() + START_S
    while says not in log.read_text() or not all(answers(url) for url in urls):
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise RuntimeError(f"the application did not start:\n{log.read_text()}")
        sleep(0.2)


def answers(url: str) -> bool:
    """Somebody is there, speaks HTTP and is content."""
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except (OSError, http.client.HTTPException):
        return False
