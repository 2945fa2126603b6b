"""The largest of each row, wherever it lies; of equals the first, and what PyTorch says of NaN and infinities."""

import os
import subprocess
import sys

import pytest
import torch

from replicas.kernels.elementwise import BLOCK, argmax


@pytest.mark.parametrize("size", [16, 48, BLOCK, 3 * BLOCK + 16, 5 * BLOCK])
def test_each_row_gives_the_place_of_its_largest(size: int) -> None:
    x = torch.randn(40, size) - 50.0  # all negative: nothing but the row's own numbers may win
    assert argmax(x).tolist() == torch.argmax(x, dim=-1).tolist()


def test_the_first_of_equals_wins_within_a_block_and_between_blocks() -> None:
    x = torch.zeros(3, 4 * BLOCK)
    x[0, [700, 701, 3000]] = 2.0
    x[1, [BLOCK, 2 * BLOCK]] = 2.0
    assert argmax(x).tolist() == [700, BLOCK, 0]


def test_rows_with_nan_or_infinities_are_pytorchs() -> None:
    x = torch.randn(5, 2 * BLOCK)
    x[0, 5] = float("nan")
    x[1, 7], x[1, 1500] = float("inf"), float("inf")
    x[2, :] = float("-inf")
    x[3, 9] = float("-inf")
    assert argmax(x).tolist() == torch.argmax(x, dim=-1).tolist()


def test_rows_that_lie_apart_and_sizes_that_are_no_vectors_are_found_too() -> None:
    wide = torch.randn(4, 96)
    assert argmax(wide[:, 16:64]).tolist() == torch.argmax(wide[:, 16:64], dim=-1).tolist()
    assert argmax(wide[:, :50]).tolist() == torch.argmax(wide[:, :50], dim=-1).tolist()
    assert argmax(wide[:0]).tolist() == []


def test_few_rows_on_many_threads_end_no_thread() -> None:
    """A team of 4 between teams of 8 would make libgomp end four threads and start them anew. In a process of its own:
    the number of threads is one of its settings."""
    program = """
import os, torch
torch.set_num_threads(8)
from replicas.kernels import elementwise
from replicas.kernels.elementwise import argmax
from replicas.kernels.linear import LinearKernel
from replicas.kernels.team import team
product, x = LinearKernel(torch.randn(64, 64), team(8)), torch.randn(4, 64)
def step():
    product(x), argmax(torch.randn(4, 49152)), elementwise.rms_norm(torch.randn(100, 576), torch.ones(576), 1e-5)
    return set(os.listdir("/proc/self/task"))
first = step()
assert len(first) >= 8, first
assert all(step() == first for _ in range(5))
"""
    settings = {"OMP_NUM_THREADS": "8", "OMP_WAIT_POLICY": "passive"}
    subprocess.run([sys.executable, "-c", program], check=True, env=os.environ | settings)
