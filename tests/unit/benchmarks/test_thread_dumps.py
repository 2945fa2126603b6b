"""What a process that does not answer is doing is told by itself, and never asked of a stranger."""

import multiprocessing
import os
import re
import signal
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from benchmarks import thread_dumps

Hanging = multiprocessing.process.BaseProcess


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


@pytest.fixture
def hanging(tmp_path: Path) -> Iterator[Hanging]:
    context = multiprocessing.get_context("spawn")
    ready, theirs = context.Pipe()
    process = context.Process(target=hang, args=(str(tmp_path), theirs), name="a rank")
    process.start()
    theirs.close()
    ready.recv()
    yield process
    process.kill()
    process.join()


def test_it_shows_every_thread_each_time_it_is_asked_and_lives_on(hanging: Hanging, tmp_path: Path) -> None:
    for _ in range(2):
        said = thread_dumps.ask(str(tmp_path))
        assert re.match(rf"a rank, process {hanging.pid}: (sleeping|running), [\d.]+ s of CPU so far\n", said)
        assert said.count("in hang\n") == said.count("in hang_beside\n") == 1
    assert hanging.is_alive()


def test_one_that_is_stopped_or_has_ended_is_said_to_be(
    hanging: Hanging, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thread_dumps, "DUMP_S", 0.2)
    assert hanging.pid is not None
    os.kill(hanging.pid, signal.SIGSTOP)
    said = thread_dumps.ask(str(tmp_path))
    assert said.startswith(f"a rank, process {hanging.pid}: stopped, ")
    assert said.endswith("it wrote nothing within 0.2 s")
    hanging.kill()
    hanging.join()
    assert thread_dumps.ask(str(tmp_path)) == f"a rank, process {hanging.pid}: it has ended"


def test_a_process_that_is_no_descendant_gets_no_signal(tmp_path: Path) -> None:
    """It would end most: an id may be another process's by now."""
    (tmp_path / str(os.getpid())).write_text("a rank\n")
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
    try:
        assert thread_dumps.ask(str(tmp_path)) == f"a rank, process {os.getpid()}: it has ended"
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert heard == []
