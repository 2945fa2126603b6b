"""What processes of ours do that do not answer: a stack for each of their threads.

Owns:      a folder with a file for each process that takes part, named by its id; on SIGUSR1 the process writes there,
           also when no thread of it comes to run Python.
Never:     signals a process that is not a descendant of who asks.
Thread:    any.
"""

import faulthandler
import multiprocessing
import os
import signal
import time
from pathlib import Path

import psutil

DUMP_S = 5.0  # for a process to write; one that is stopped does not
STEP_S = 0.05
QUIET_S = 0.5  # it writes line by line, and has no last one: nothing for so long, and it has finished


def take_part(folder: str) -> None:
    """From now on this process writes its stacks when it is asked."""
    file = Path(folder, str(os.getpid())).open("w")  # noqa: SIM115 - the handler's, to the end of the process
    file.write(f"{multiprocessing.current_process().name}\n")
    file.flush()
    faulthandler.register(signal.SIGUSR1, file=file)


def ask(folder: str) -> str:
    """What every process that took part does now."""
    ours = {process.pid: process for process in psutil.Process().children(recursive=True)}
    told = []
    for file in sorted(Path(folder).iterdir(), key=lambda file: int(file.name)):
        name = file.read_text().partition("\n")[0]
        process = ours.get(int(file.name))
        says = "it has ended" if process is None else _stacks(process, file)
        told.append(f"{name}, process {file.name}: {says}")
    return "\n".join(told)


def _stacks(process: psutil.Process, file: Path) -> str:
    try:
        cpu = process.cpu_times()
        state = f"{process.status()}, {cpu.user + cpu.system:.1f} s of CPU so far"
        before = file.stat().st_size
        process.send_signal(signal.SIGUSR1)
    except psutil.Error as error:
        return f"it has ended: {error}"
    asked_s = grew_s = time.monotonic()
    written = before
    while (now_s := time.monotonic()) < asked_s + DUMP_S and (written == before or now_s < grew_s + QUIET_S):
        time.sleep(STEP_S)
        if written != (size := file.stat().st_size):
            written, grew_s = size, time.monotonic()
    if written == before:
        return f"{state}; it wrote nothing within {DUMP_S:g} s"
    return f"{state}\n{file.read_bytes()[before:].decode(errors='replace')}"
