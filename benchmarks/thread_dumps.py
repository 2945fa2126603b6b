"""What processes of ours do that do not answer: a stack for each of their threads.

Owns:      a folder with a file and a socket for each process that takes part, named by its id. A thread of the process
           answers at the socket: it holds the GIL meanwhile, so that no stack changes under its eyes. Where it never
           comes to run, because native code keeps the GIL, the process writes to its file on SIGUSR1.
Never:     asks a process that is not a descendant of who asks. Signals one that can answer: the handler reads stacks
           without the GIL, which ended the process in 1 of 92 dumps of idle engines.
Thread:    any.
"""

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import socket
import threading
import time
from pathlib import Path

import psutil

DUMP_S = 5.0  # for a process to answer, and again to write; one that is stopped does neither
STEP_S = 0.05
QUIET_S = 0.5  # it writes line by line, and has no last one: nothing for so long, and it has finished


def take_part(folder: str) -> None:
    """From now on this process tells its stacks when it is asked."""
    door = socket.socket(socket.AF_UNIX)
    door.bind(_door(folder, os.getpid()))
    door.listen()
    threading.Thread(target=_answer, args=(door,), name="thread-dumps", daemon=True).start()
    file = _file(folder, os.getpid()).open("w")  # it is asked from here on
    faulthandler.register(signal.SIGUSR1, file=file)
    file.write(f"{multiprocessing.current_process().name}\n")
    file.flush()


def ask(folder: str) -> str:
    """What every process that took part does now."""
    ours = {process.pid: process for process in psutil.Process().children(recursive=True)}
    told = []
    for pid in sorted(int(file.stem) for file in Path(folder).glob("*.stacks")):
        name = _file(folder, pid).read_text().partition("\n")[0]
        says = _state(ours[pid], folder) if pid in ours else "it has ended"
        told.append(f"{name}, process {pid}: {says}")
    return "\n".join(told)


def _file(folder: str, pid: int) -> Path:
    return Path(folder, f"{pid}.stacks")


def _door(folder: str, pid: int) -> str:
    return str(Path(folder, f"{pid}.socket"))


def _answer(door: socket.socket) -> None:
    while True:
        asking, _ = door.accept()
        with asking:
            faulthandler.dump_traceback(asking.fileno())


def _state(process: psutil.Process, folder: str) -> str:
    try:
        cpu = process.cpu_times()
        state = f"{process.status()}, {cpu.user + cpu.system:.1f} s of CPU so far"
        if told := _told(_door(folder, process.pid)):
            return f"{state}\n{told}"
        state += f"; it told nothing within {DUMP_S:g} s, and wrote"
        if written := _written(process, _file(folder, process.pid)):
            return f"{state}:\n{written}"
    except (psutil.Error, ConnectionError) as error:
        return f"it has ended: {error}"
    return f"{state} nothing within {DUMP_S:g} s"


def _told(door: str) -> str:
    """What its thread says; nothing, when that does not come to run.

    Raises: ConnectionError when the process has ended.
    """
    told = b""
    with socket.socket(socket.AF_UNIX) as asking, contextlib.suppress(TimeoutError):
        asking.settimeout(DUMP_S)
        asking.connect(door)
        while part := asking.recv(1 << 16):
            told += part
    return told.decode(errors="replace")


def _written(process: psutil.Process, file: Path) -> str:
    """What it writes when it gets the signal; nothing, when it is stopped."""
    before = written = file.stat().st_size
    process.send_signal(signal.SIGUSR1)
    asked_s = grew_s = time.monotonic()
    while (now_s := time.monotonic()) < asked_s + DUMP_S and (written == before or now_s < grew_s + QUIET_S):
        time.sleep(STEP_S)
        if written != (size := file.stat().st_size):
            written, grew_s = size, time.monotonic()
    return file.read_bytes()[before:].decode(errors="replace")
