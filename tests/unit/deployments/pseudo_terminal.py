"""A command in a pseudo-terminal of a given size: what it shows, and keys pressed for it."""

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator

WAIT_S = 60.0
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]")


class Terminal:
    """What a process wrote so far, and its keyboard."""

    def __init__(self, process: "subprocess.Popen[bytes]", descriptor: int) -> None:
        self.process, self._descriptor, self.written = process, descriptor, ""

    def press(self, keys: str) -> None:
        os.write(self._descriptor, keys.encode())

    def until(self, said: str) -> str:
        """Read until the newest screen shows ``said``; returns it."""
        end_s = time.monotonic() + WAIT_S
        while said not in self.screen:
            assert time.monotonic() < end_s, f"{said!r} was not shown; the last screen:\n{self.screen}"
            assert self._read(), f"{said!r} was not shown before the end:\n{self.screen}"
        return self.screen

    def rest(self) -> str:
        while self._read():
            pass
        return self.written

    @property
    def screen(self) -> str:
        """The text since the cursor was last sent home, without colours."""
        return _ESCAPE.sub("", self.written.rpartition("\x1b[H")[2]).replace("\r\n", "\n")

    def _read(self) -> bool:
        if not select.select([self._descriptor], [], [], WAIT_S)[0]:
            return False
        with contextlib.suppress(OSError):  # the end of a pseudo-terminal
            piece = os.read(self._descriptor, 65536)
            self.written += piece.decode(errors="replace")
            return bool(piece)
        return False


@contextlib.contextmanager
def manta(*words: str, columns: int = 80, lines: int = 24, **environment: str) -> Iterator[Terminal]:
    """Run `manta` with ``words`` there."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    left_out = ("NO_COLOR", "COLUMNS", "LINES")
    env = {name: value for name, value in os.environ.items() if name not in left_out} | {"TERM": "xterm-256color"}
    command = [sys.executable, "-m", "deployments", *words]
    process = subprocess.Popen(
        command, stdin=slave, stdout=slave, stderr=slave, env=env | environment, start_new_session=True
    )
    os.close(slave)
    try:
        yield Terminal(process, master)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(WAIT_S)
        os.close(master)
