"""The terminal itself: whether a stream is one, and single keys as they are pressed.

Invariant: the terminal's settings are restored at the end, also after an exception.
"""

import contextlib
import os
import re
import termios
import tty
from collections.abc import Iterator
from typing import TextIO

_KEYS = {
    b"\x1b[A": "up", b"\x1bOA": "up", b"\x1b[B": "down", b"\x1bOB": "down", b"\t": "tab", b"\r": "enter",
    b"\n": "enter", b"\x1b": "escape",
}  # fmt: skip
_PRESSED = re.compile(rb"\x1b[\[O][0-9;]*[A-Za-z~]|.", re.DOTALL)
_MOST_BYTES = 1024  # read at once


def on_terminal(stream: TextIO) -> bool:
    """Return whether output there may be drawn in place and in colour."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


@contextlib.contextmanager
def single_keys(terminal: TextIO) -> Iterator[int | None]:
    """Have keys come one by one and without echo. Gives: the descriptor to read; None if it is no terminal."""
    if not terminal.isatty():
        yield None
        return
    number = terminal.fileno()
    before = termios.tcgetattr(number)
    try:
        tty.setcbreak(number)  # Ctrl-C stays an interrupt
        yield number
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, before)


def pressed(number: int) -> list[str]:
    """Read the keys that were pressed: names for arrows and the like, else the character; [] at the end of input."""
    keys = _PRESSED.findall(os.read(number, _MOST_BYTES))
    return [_KEYS.get(key, key.decode(errors="replace") if len(key) == 1 else "") for key in keys]
