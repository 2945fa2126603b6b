"""A thread that loads what another will run leaves no OpenMP team behind."""

import os
import subprocess
import sys

import pytest

from replicas.kernels.team import PassingThread
from tests.pairwise import ALL

PROGRAM = """
import os
import time
import torch
from replicas.kernels.linear import LinearKernel
from replicas.kernels.team import PassingThread, team

def multiply():
    product = LinearKernel(torch.ones(64, 64), team(3))
    product(torch.ones(64, 64))
    return len(os.listdir("/proc/self/task"))

torch.set_num_threads(3)  # starts two of another kind that stay
before = len(os.listdir("/proc/self/task"))
during = PassingThread(multiply, name="passing").result()
deadline_s = time.monotonic() + 10
while (after := len(os.listdir("/proc/self/task"))) > before and time.monotonic() < deadline_s:
    time.sleep(0.01)
print(before, during, after)
"""


@pytest.mark.parametrize("time", range(6 if ALL else 1))
def test_a_process_may_end_as_soon_as_there_is_a_result(time: int) -> None:
    at_once = PROGRAM[: PROGRAM.index("deadline_s")]
    done = subprocess.run([sys.executable, "-c", at_once], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_its_team_ends_with_it() -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "3"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    before, during, after = map(int, done.stdout.split())
    assert during >= before + 1 + 2  # the thread, and two beside it in its team
    assert after == before


def test_what_is_raised_there_is_raised_where_the_result_is_asked_for() -> None:
    def fail() -> None:
        raise ValueError("of the work")

    with pytest.raises(ValueError, match="of the work"):
        PassingThread(fail, name="passing").result()
