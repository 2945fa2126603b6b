"""CPU time of what a benchmark started: threads and processes that end take nothing with them."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.server_cpu import ServerCpu, difference

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
