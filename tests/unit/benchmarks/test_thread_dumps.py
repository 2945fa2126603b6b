"""What a process that does not answer is doing is told by itself, and never asked of a stranger."""

import ctypes
import multiprocessing
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path

import pytest

from benchmarks import thread_dumps


def hang(folder: str, ready: Connection) -> None:
    thread_dumps.take_part(folder)
    hangs = threading.Event()
    threading.Thread(target=hang_beside, args=(hangs,), daemon=True).start()
    hangs.wait()
    ready.send(None)
    ready.recv()


def hang_beside(hangs: threading.Event) -> None:
    hangs.set()
    threading.Event().wait()


def keep_the_gil(folder: str, ready: Connection) -> None:
    thread_dumps.take_part(folder)
    libc = ctypes.PyDLL(None)
    sys.setswitchinterval(3600)
    libc.write(ready.fileno(), b"!", 1)  # with the GIL, which it never gives away again
    libc.pause()  # ends with a signal: this one is asked once


def work(folder: str, ready: Connection) -> None:
    thread_dumps.take_part(folder)
    for _ in range(3):
        threading.Thread(target=work_beside, daemon=True).start()
    ready.send(None)
    ready.recv()


def work_beside() -> None:
    while True:
        list(map(depth, range(50)))


def depth(of: int) -> int:
    return depth(of - 1) + 1 if of else 0


@contextmanager
def started(main: Callable[[str, Connection], None], folder: Path) -> Iterator[SpawnProcess]:
    context = multiprocessing.get_context("spawn")
    ready, theirs = context.Pipe()
    process = context.Process(target=main, args=(str(folder), theirs), name="a rank")
    process.start()
    theirs.close()
    assert ready.poll(60)
    yield process
    process.kill()
    process.join()


@pytest.fixture
def hanging(tmp_path: Path) -> Iterator[SpawnProcess]:
    with started(hang, tmp_path) as process:
        yield process


def test_it_shows_every_thread_each_time_it_is_asked_and_lives_on(hanging: SpawnProcess, tmp_path: Path) -> None:
    for _ in range(2):
        said = thread_dumps.ask(str(tmp_path))
        assert re.match(rf"a rank, process {hanging.pid}: (sleeping|running), [\d.]+ s of CPU so far\n", said)
        assert said.count("in hang\n") == said.count("in hang_beside\n") == 1
    assert hanging.is_alive()


def test_threads_that_run_are_told_of_and_live_on(tmp_path: Path) -> None:
    """Read without the GIL, as on a signal, these end their process in 10 to 100 dumps."""
    with started(work, tmp_path) as working:
        for _ in range(100):
            said = thread_dumps.ask(str(tmp_path))
            assert (said.count("in work\n"), said.count("in work_beside\n")) == (1, 3)
        assert working.is_alive()
    assert (tmp_path / f"{working.pid}.stacks").read_text() == "a rank\n"  # it got no signal


def test_one_whose_gil_is_never_free_is_asked_by_a_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_dumps, "DUMP_S", 1.0)
    with started(keep_the_gil, tmp_path) as keeping:
        said = thread_dumps.ask(str(tmp_path))
    assert said.startswith(f"a rank, process {keeping.pid}: sleeping, ")
    assert "it told nothing within 1 s, and wrote:\n" in said
    assert said.count("in keep_the_gil\n") == 1


def test_one_that_is_stopped_or_has_ended_is_said_to_be(
    hanging: SpawnProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thread_dumps, "DUMP_S", 0.2)
    assert hanging.pid is not None
    os.kill(hanging.pid, signal.SIGSTOP)
    os.waitpid(hanging.pid, os.WUNTRACED)  # until it has stopped
    said = thread_dumps.ask(str(tmp_path))
    assert said.startswith(f"a rank, process {hanging.pid}: stopped, ")
    assert said.endswith("it told nothing within 0.2 s, and wrote nothing within 0.2 s")
    hanging.kill()
    hanging.join()
    assert thread_dumps.ask(str(tmp_path)) == f"a rank, process {hanging.pid}: it has ended"


def test_a_process_that_is_no_descendant_gets_no_signal(tmp_path: Path) -> None:
    """It would end most: an id may be another process's by now."""
    (tmp_path / f"{os.getpid()}.stacks").write_text("a rank\n")
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
    try:
        assert thread_dumps.ask(str(tmp_path)) == f"a rank, process {os.getpid()}: it has ended"
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert heard == []
