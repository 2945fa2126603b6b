"""The application on a local Ray of its own, and the CPU time of all that a benchmark has started.

Owns:      the process and its end: nothing of one run is left for the next.
Invariant: the benchmark's own process, with its client, is never counted; no CPU time ever falls, whatever threads and
           processes end. What a process did between the last look and its own end is not counted.
"""

import contextlib
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from tests.serve.running import Running


@contextlib.contextmanager
def serving(**changes: Any) -> Iterator[str]:
    """Serve serve_config.yaml on a free port, without the observatory, with ``changes`` in its groups.

    Yields: the URL, once it is ready. Raises: ServerFailed with the log of an application that did not start.
    """
    with tempfile.TemporaryDirectory(prefix="manta-bench-") as folder:
        running = Running(Path(folder), **changes)
        try:
            try:
                running.start()
            except AssertionError as error:
                raise ServerFailed(f"it did not start: {running.log.read_text()}") from error
            yield running.url
        finally:
            try:
                running.stop()
            finally:  # it had not ended in time
                for pid in running.processes():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)


class ServerFailed(RuntimeError):
    """A server did not come up; the message says what its log says last."""


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
