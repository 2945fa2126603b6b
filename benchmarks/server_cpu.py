"""CPU time of all that a benchmark has started, by part of the application. Linux; reads /proc.

Invariant: the benchmark's own process, with its client, is never counted.
"""

import contextlib
from collections.abc import Mapping

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
            title, times = " ".join(process.cmdline()), process.cpu_times()
            total[next((part for name, part in parts.items() if name in title), REST)] += times.user + times.system
    return total


def difference(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    return {part: after[part] - before[part] for part in after}
