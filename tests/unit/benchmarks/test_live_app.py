"""The CPU time of what a benchmark has started."""

import subprocess
import sys

from benchmarks.live_app import ServerCpu

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
