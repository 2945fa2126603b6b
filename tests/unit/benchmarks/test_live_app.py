"""A server that is started for a benchmark: when it is ready, that it ends whatever happens, its CPU time. No Ray."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest

from benchmarks import live_app
from benchmarks.live_app import ServerCpu, difference

# a child in a session of its own, as Ray's are; neither heeds an interrupt
DEAF = """
import signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", "import time; print(1, flush=True); time.sleep(60)"], start_new_session=True)
time.sleep(60)
"""


@pytest.fixture
def healthy() -> Iterator[str]:
    """The address of a server that answers 200 from the start."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/health"
    server.shutdown()
    thread.join()
    server.server_close()


def test_an_application_that_answers_is_not_ready_before_its_log_says_so(tmp_path: Path, healthy: str) -> None:
    """One replica answers /health while others, or the observatory, still start."""
    log = tmp_path / "log"
    log.write_text("manta: 1 of 2 replicas\n")
    looks = iter((2, 1))

    def announce_at_last(_: float) -> None:
        if next(looks) == 1:
            log.write_text(log.read_text() + f"\n{live_app.ANNOUNCED}\n")

    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        live_app._wait_ready(process, log, live_app.ANNOUNCED, [healthy], sleep=announce_at_last)
        process.kill()
    assert list(looks) == []  # it looked three times


def test_one_that_does_not_end_is_killed_with_what_it_started_in_sessions_of_their_own() -> None:
    process = subprocess.Popen([sys.executable, "-c", DEAF], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    assert process.stdout.readline() == b"1\n"
    children = psutil.Process(process.pid).children()
    assert len(children) == 1
    live_app.stop(process, within_s=0.1)
    assert process.returncode == -9
    assert psutil.wait_procs(children, timeout=10)[1] == []
    process.stdout.close()


PARTS = {"a burning process": "ours"}  # by its title: other tests' children, a browser among them, are the rest

# a thread burns 0.3 s and waits; then it ends, and another burns 0.2 s and ends; both are told on stdin, line by line
PROGRAM = """
import sys, threading, time

def burn(seconds, end=None):
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass
    print("burnt", flush=True)
    if end:
        end.wait()

end = threading.Event()
first = threading.Thread(target=burn, args=(0.3, end))
first.start()
sys.stdin.readline()
end.set()
first.join()
second = threading.Thread(target=burn, args=(0.2,))
second.start()
second.join()
print("ended", flush=True)
sys.stdin.readline()
"""


@contextmanager
def burning() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", PROGRAM, *PARTS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            read(process, "burnt")
            yield process
        finally:
            process.kill()


def read(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdout is not None
    assert process.stdout.readline().strip() == line


def go_on(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def test_a_thread_that_burns_and_ends_between_two_looks_is_counted_and_one_that_ends_is_not_taken_off() -> None:
    """Seen: 0.3 s. After that 0.2 s, known by ticks of 10 ms alone; and nothing of the 0.3 s is lost."""
    with burning() as process:
        cpu = ServerCpu(PARTS)
        before = cpu.by_part()
        go_on(process)
        read(process, "burnt")
        read(process, "ended")
        used = difference(before, cpu.by_part())["ours"]
        assert before["ours"] >= 0.3
        assert 0.17 < used < 0.3


def test_a_process_that_ends_takes_no_time_off_and_one_without_work_adds_none() -> None:
    cpu = ServerCpu(PARTS)
    with burning() as process:
        before = cpu.by_part()
        again = difference(before, cpu.by_part())
        process.kill()
        process.wait()
        after = difference(before, cpu.by_part())
    assert before["ours"] >= 0.3
    assert 0.0 <= again["ours"] == after["ours"] < 0.02
