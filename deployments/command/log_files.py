"""``manta logs``: prints the log files of Serve's processes on this machine, and follows them.

Owns:      a link for each port that Manta has served on, to the folder of its last logs: a machine may have several
           Rays, whose ``session_latest`` is one link, and the logs that one wants are often those of the dead.
Never:     imports Ray; starts or asks anything.
"""

import contextlib
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

LOOK_S = 0.5
_QUIET = re.compile(r'(DEBUG|INFO) |\{.*"levelname": ?"(DEBUG|INFO)"')  # a line that is no warning
MOST_BYTES = 256 << 10  # of one file's end


def link_of(port: int) -> Path:
    """Name the link to the logs of what serves, or served last, at ``port``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "manta" / f"logs-{port}"


def remember(port: int, folder: str) -> None:
    """Have the link of ``port`` lead to ``folder``; where that cannot be, `manta logs` is given the folder."""
    link = link_of(port)
    new = link.with_name(f"{link.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        link.parent.mkdir(parents=True, exist_ok=True)
        new.symlink_to(folder)
        new.replace(link)


def run(
    folder: Path, name: str, *, num_lines: int, follow: bool, pause: Callable[[float], None] = time.sleep
) -> int:
    """Print the last ``num_lines`` lines of each file whose name has ``name``; of several, those of routers and
    replicas first, and without a name only the warnings of Serve's own. Returns: the exit status."""
    if not folder.is_dir():
        print(f"there are no logs at {folder}: give the folder that `manta serve` printed: --folder", file=sys.stderr)
        return 1
    found = files_of(folder, name)
    if not found:
        known = ", ".join(each.stem for each in files_of(folder, "")) or "none"
        print(f"no log of {name!r} in {folder.resolve()}; there are: {known}", file=sys.stderr)
        return 1
    read = {file: _end(file, num_lines) for file in found}
    shown: Path | None = None
    while True:
        for file in files_of(folder, name):
            new, read[file] = _lines(file, read.get(file, 0))
            if not name and not _is_ours(file):
                new = [line for line in new if not _QUIET.match(line)]
            if new:
                print(*([] if file == shown else [f"==> {file.name} <=="]), *new, sep="\n", flush=True)
                shown = file
        if not follow:
            return 0
        pause(LOOK_S)


def files_of(folder: Path, name: str) -> list[Path]:
    """List the log files whose names have ``name``, in whatever case: ours, then Serve's own, each by the time of their
    last line."""
    found = []
    for file in folder.glob("*.log"):
        with contextlib.suppress(OSError):  # it has just been rotated away
            found.append((file.stat().st_mtime, file))
    ordered = sorted(found, key=lambda each: (not _is_ours(each[1]), each))
    return [file for _, file in ordered if name.lower() in file.stem.lower()]


def _is_ours(file: Path) -> bool:
    """Whether a router, a replica or an observatory writes ``file``."""
    return file.name.startswith("replica_")


def _end(file: Path, num_lines: int) -> int:
    """Find where the last ``num_lines`` whole lines of ``file`` begin, within its last MOST_BYTES."""
    with file.open("rb") as opened:
        size = opened.seek(0, os.SEEK_END)
        start = opened.seek(max(size - MOST_BYTES, 0))
        lines = opened.read(MOST_BYTES).splitlines(keepends=True)
    if start:
        start += len(lines.pop(0))  # it is cut
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()  # its end comes later
    return start + sum(map(len, lines[: max(len(lines) - num_lines, 0)]))


def _lines(file: Path, at: int) -> tuple[list[str], int]:
    """Read the whole lines from byte ``at`` on. Returns: they, and where the next one begins."""
    try:
        with file.open("rb") as opened:
            if opened.seek(0, os.SEEK_END) < at:
                at = 0  # rotated: a new file of that name
            opened.seek(at)
            read = opened.read()
    except OSError:
        return [], at
    whole = read[: read.rfind(b"\n") + 1]
    return whole.decode(errors="replace").splitlines(), at + len(whole)
