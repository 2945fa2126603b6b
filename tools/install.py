"""``python -m tools.install WHAT LOG [ARGS]``: runs ``pip install ARGS`` with its output in the file LOG.

Owns:      the log, and what is shown of it: one line of progress while pip runs, and the log's end if it fails.
Never:     needs more than the standard library: it runs before anything is installed.

On a terminal the line is drawn in place, twice a second; elsewhere (CI) it is printed every 20 s.
"""

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

TAIL_LINES = 40  # of the log, shown when pip fails
ON_TERMINAL_S, ELSEWHERE_S = 0.5, 20.0  # between two lines of progress
_SIZE = re.compile(r"(?:Downloading|Using cached) (\S+) \(([\d.]+) (kB|MB|GB)\)")
_BYTES = {"kB": 1e3, "MB": 1e6, "GB": 1e9}
_STEPS = (  # the last line of the log that begins so says what pip is doing
    (re.compile(r"\s*(?:Downloading|Using cached) ([^\s-]+)"), "fetching {}"),
    (re.compile(r"\s*Collecting ([\w.-]+)"), "resolving {}"),
    (re.compile(r"\s*Building wheels for collected packages: ([\w.-]+)"), "building {}"),
    (re.compile(r"\s*Building (?:wheel|editable) for ([\w.-]+)"), "building {}"),
    (re.compile(r"Installing collected packages: (.*)"), "unpacking {} packages"),
)


def main(what: str, log: str, *args: str) -> int:
    """Install; returns pip's exit status."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--progress-bar", "off", *args]
    return run(what, Path(log), pip)


def run(
    what: str, log: Path, command: Sequence[str], *, out: TextIO = sys.stdout, elsewhere_s: float = ELSEWHERE_S
) -> int:
    """Run ``command`` with all its output in ``log``. Returns: its exit status.

    Args: what: shown while it runs; elsewhere_s: between two lines where ``out`` is no terminal.
    """
    started_s = time.monotonic()
    in_place = out.isatty()

    def show(text: str, *, last: bool = False) -> None:
        line = f"[{time.monotonic() - started_s:4.0f} s] {what}{text}"
        if in_place:
            line = "\r\x1b[2K" + line[: shutil.get_terminal_size().columns - 1] + ("\n" if last else "")
        else:
            line += "\n"
        out.write(line)
        out.flush()

    show(f" (once; log: {log})" if not in_place else "")
    with log.open("wb") as opened:
        process = subprocess.Popen(command, stdout=opened, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        try:
            while True:
                try:
                    status = process.wait(ON_TERMINAL_S if in_place else elsewhere_s)
                    break
                except subprocess.TimeoutExpired:
                    show(f": {doing(log.read_text(errors='replace'))}")
        except BaseException:
            process.terminate()
            process.wait()
            show(": interrupted", last=True)
            raise
    if status == 0:
        show(f": done (log: {log})", last=True)
        return 0
    show(f": failed with status {status}; the end of {log}:", last=True)
    out.write("\n".join(log.read_text(errors="replace").splitlines()[-TAIL_LINES:]) + "\n")
    out.flush()
    return status


def doing(log: str) -> str:
    """Describe what pip is doing by its output so far, and how much it has fetched."""
    step = "starting pip"
    for line in reversed(log.splitlines()):
        found = next(((match, text) for pattern, text in _STEPS if (match := pattern.match(line))), None)
        if found is not None:
            match, text = found
            step = text.format(match[1].count(",") + 1 if "packages" in text else match[1])
            break
    fetched = sum(float(number) * _BYTES[unit] for _, number, unit in _SIZE.findall(log))
    return f"{step}, {fetched / 1e6:,.0f} MB so far" if fetched else step


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    try:
        sys.exit(main(*sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
