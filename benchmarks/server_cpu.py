"""CPU time of all that a benchmark has started, by part of the application. Linux; reads /proc.

Invariant: the benchmark's own process, with its client, is never counted; no part's time ever falls, whatever threads
           and processes end.

The kernel's count of nanoseconds on a core, summed over threads: the ticks of /proc/PID/stat are 10 ms, which over a
window of some thousand tokens would be microseconds a token, process by process. But only ticks know what threads did
that ended unseen, so that what ticks have above the sum is added, once it is more than they round off. What a process
did between the last look and its own end is not counted.
"""

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

import psutil

# in the title of a process -> what it is called here
PARTS = {
    "ModelReplica": "replicas", ":Router": "router", ":Observatory": "observatory", "haproxy": "HAProxy",
    "ProxyActor": "HTTP proxy", "ServeController": "Serve controller",
}  # fmt: skip
REST = "rest of Ray"
ROUNDED_S = 2 / os.sysconf("SC_CLK_TCK")  # user and system time, each down to a tick


class ServerCpu:
    """The account of one measurement: it remembers what has ended since."""

    def __init__(self, parts: Mapping[str, str] = PARTS) -> None:
        self._parts = parts
        self._total = dict.fromkeys((*parts.values(), REST), 0.0)
        self._processes: dict[psutil.Process, _ProcessCpu] = {}  # equal where pid and start are

    def by_part(self) -> dict[str, float]:
        """User and system time, in seconds, of all that this process has started and that ran at some look."""
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                title = " ".join(process.cmdline())  # Ray's workers take theirs once they know what they run
                part = next((part for name, part in self._parts.items() if name in title), REST)
                self._total[part] += self._processes.setdefault(process, _ProcessCpu(process)).since_last_look()
        return dict(self._total)


class _ProcessCpu:
    """What one process has used."""

    def __init__(self, process: psutil.Process) -> None:
        self._process = process
        self._thread_ns: dict[str, int] = {}  # the most of each thread, ended ones too
        self._unseen_s: float | None = None  # of threads that ended, since they were seen last
        self._used_s = 0.0

    def since_last_look(self) -> float:
        """Seconds, at least 0. Raises: psutil's NoSuchProcess."""
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
