"""CPU time of all that a benchmark has started, by part of the application. Linux; reads /proc.

Invariant: the benchmark's own process, with its client, is never counted.

The kernel's count of nanoseconds on a core, summed over threads: the ticks of /proc/PID/stat are 10 ms, which over a
window of some thousand tokens would be microseconds a token, process by process.
"""

import contextlib
from collections.abc import Mapping
from pathlib import Path

import psutil

# in the title of a process -> what it is called here
PARTS = {
    "ModelReplica": "replicas", ":Router": "router", ":Observatory": "observatory", "haproxy": "HAProxy",
    "ProxyActor": "HTTP proxy", "ServeController": "Serve controller",
}  # fmt: skip
REST = "rest of Ray"


def cpu_by_part(parts: Mapping[str, str] = PARTS) -> dict[str, float]:
    """User and system time, in seconds, of all that this process has started and that runs now."""
    total = dict.fromkeys((*parts.values(), REST), 0.0)
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            title = " ".join(process.cmdline())
            total[next((part for name, part in parts.items() if name in title), REST)] += on_core_s(process.pid)
    return total


def on_core_s(pid: int) -> float:
    """Seconds that the living threads of a process have run."""
    total_ns = 0
    for task in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            total_ns += int(task.read_text().split()[0])
    return total_ns / 1e9


def difference(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    return {part: after[part] - before[part] for part in after}
