"""The memory of this machine, as far as a new process may take it. Asks no device, and loads no torch."""

from pathlib import Path

import psutil

CGROUP_MAX = Path("/sys/fs/cgroup/memory.max")
CGROUP_USED = Path("/sys/fs/cgroup/memory.current")


def available_ram() -> int:
    """Count the bytes of memory available without swapping, within the container's limit."""
    available = int(psutil.virtual_memory().available)
    try:
        limit = CGROUP_MAX.read_text().strip()
        if limit != "max":
            available = min(available, int(limit) - int(CGROUP_USED.read_text()))
    except (OSError, ValueError):
        pass  # not in a cgroup v2 container: RAM is the limit
    return max(0, available)
