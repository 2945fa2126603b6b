"""Programs: stages in order, each ended by all threads before the next begins, tasks counted afresh in every run."""

import ctypes
from typing import Any

import numpy as np
import pytest
import torch
from numba import carray

from replicas.kernels.linear import FUSED_ROWS, STEPS, LinearKernel
from replicas.kernels.panels import pack
from replicas.kernels.simd import add, load, splat, store, take_next
from replicas.kernels.team import Kernel, Program, Team, kernel, struct
from replicas.kernels.weight_formats import WeightFormat

AddArgs = struct("AddArgs", "x out n counter")


@kernel(AddArgs)
def add_one(pointer: Any) -> None:
    """out = x + 1 for n times 16 floats, taken one by one."""
    a = carray(pointer, 1)[0]
    i = take_next(a.counter)
    while i < a.n:
        store(a.out + 64 * i, add(load(a.x + 64 * i), splat(1.0)))
        i = take_next(a.counter)


class AddOne:
    def __init__(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self.arguments = AddArgs(x=x.data_ptr(), out=out.data_ptr())

    def prepare(self, num_rows: int, counter: int) -> tuple[Kernel, ctypes.Structure]:
        self.arguments.n, self.arguments.counter = num_rows, counter
        return add_one, self.arguments


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_each_stage_sees_what_all_threads_wrote_in_the_one_before(threads: int) -> None:
    a, b = torch.zeros(500, 16), torch.zeros(500, 16)
    stages = [AddOne(*pair) for _ in range(10) for pair in ((a, b), (b, a))]  # a to b to a, 20 times
    program = Program(stages, Team(threads))
    for run in range(1, 4):
        program.run(500)
        assert torch.equal(a, torch.full((500, 16), 20.0 * run))


def test_a_program_touches_only_the_rows_of_its_run() -> None:
    a, b = torch.zeros(8, 16), torch.zeros(8, 16)
    program = Program([AddOne(a, b)], Team(1))
    program.run(8)
    b.zero_()
    program.run(3)
    assert b[:, 0].tolist() == [1, 1, 1, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("format_", ["float32", "q4_1"])
@pytest.mark.parametrize("k", [48, STEPS + 16])
@pytest.mark.parametrize("rows", [1, 5, FUSED_ROWS + 1, 150])
def test_a_product_is_the_same_bit_for_bit_as_a_stage_and_by_itself(rows: int, k: int, format_: WeightFormat) -> None:
    weight, bias, other = torch.randn(80, k), torch.randn(80), torch.randn(150, k)
    x, out, team = torch.randn(150, k), torch.zeros(150, 80), Team(2)
    product = LinearKernel(pack(weight, format_), team, bias)
    stage = product.stage(x, out, team)
    program = Program([stage], team)
    program.run(rows)
    assert torch.equal(out[:rows], product(x[:rows]))
    assert np.count_nonzero(out[rows:]) == 0
    stage.read_from(other)
    program.run(rows)
    assert torch.equal(out[:rows], product(other[:rows]))
