"""A server that is started for a benchmark: when it is ready, that it ends whatever happens, its CPU time. No Ray."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest

from benchmarks import live_app
from benchmarks.live_app import ServerCpu

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


# a thread burns 0.2 s and ends; then the process waits
PROGRAM = """
import threading, time

def burn():
    until = time.thread_time() + 0.2
    while time.thread_time() < until:
        pass

thread = threading.Thread(target=burn)
thread.start()
thread.join()
print("burnt", flush=True)
input()
"""


def test_a_thread_and_a_process_that_end_take_no_time_off() -> None:
    cpu = ServerCpu()
    command = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "burnt\n"
        before_s = cpu.seconds()
        process.kill()
        process.wait()
    assert before_s >= 0.2 - 0.02  # two ticks
    assert cpu.seconds() >= before_s
