"""What can be seen of a process from outside, on its node: CPU and memory, the stacks of its threads, its log's end;
and what its garbage collector scans.

Owns:      the memory file into which a process writes its stacks when it is sent SIGNAL; it ends with the process.
Never:     needs the process's event loop, or Python's lock in it: a replica that hangs is read like any other.
Invariant: a process that has no such file is not sent the signal, which would end it: another may have its id by now.
Thread:    `offer_stacks` the main thread; the others block, so call them on a thread or in a task.
"""

import contextlib
import faulthandler
import fcntl
import gc
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SIGNAL = signal.SIGUSR1
STACKS = "manta-stacks"
ANSWER_S = 5.0
LOOK_S = 0.05
MOST_BYTES = 256 << 10  # of one log's end
MOST_STACKS = 1 << 20


def offer_stacks() -> None:
    """Have this process write the stacks of all its threads on SIGNAL; the C code that does it takes no lock."""
    file = os.memfd_create(STACKS)  # stays open as long as the process
    fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)  # a reader empties it
    faulthandler.register(SIGNAL, file=file, all_threads=True)


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Collect no garbage while the context imports modules, and never scan what stands afterwards: it stays."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        if collects:
            gc.enable()


def read_stacks(pid: int) -> str | None:
    """Return the stacks of process ``pid``; None if it offers none, or has not written them after ANSWER_S."""
    path = _offered(pid)
    if path is None:
        return None
    with path.open("r+b") as file:
        file.truncate(0)
        os.kill(pid, SIGNAL)
        deadline_s, size = time.monotonic() + ANSWER_S, 0
        while time.monotonic() < deadline_s:
            time.sleep(LOOK_S)
            before, size = size, os.fstat(file.fileno()).st_size
            if 0 < size == before:  # it writes all of them in one go
                return file.read(MOST_STACKS).decode(errors="replace")
    return None


def _offered(pid: int) -> Path | None:
    try:
        for path in Path(f"/proc/{pid}/fd").iterdir():
            if os.readlink(path).startswith(f"/memfd:{STACKS} "):
                return path
    except OSError:  # it has ended, or belongs to somebody else
        return None
    return None


def read_usage(pid: int) -> dict[str, Any]:
    """Return the node's name, and what process ``pid`` uses: nulls if it has ended."""
    found: dict[str, Any] = {"host": socket.gethostname(), "cpu_s": None, "rss_bytes": None, "num_threads": None}
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # of proc(5), from the third on
    except OSError:
        return found
    ticks = int(fields[11]) + int(fields[12])  # in user and kernel mode
    return found | {
        "cpu_s": ticks / os.sysconf("SC_CLK_TCK"),
        "num_threads": int(fields[17]),
        "rss_bytes": int(fields[21]) * os.sysconf("SC_PAGE_SIZE"),
    }


def read_end(path: str, num_lines: int) -> list[str] | None:
    """Return the last lines of a file, of its last MOST_BYTES at most; None if there is no such file."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - MOST_BYTES, 0))
            lines = file.read(MOST_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return None
    whole = lines[1:] if size > MOST_BYTES else lines  # the first one is cut
    return whole[-num_lines:]
