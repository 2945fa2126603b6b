"""The one product of all layers: equal to PyTorch's at every number of rows, with each kernel."""

import pytest
import torch
import torch.nn.functional as F

from replicas.config import Products
from replicas.kernels.linear import ANY_ROWS, FEW_ROWS, PART, PART_ROWS, WHOLE, LinearKernel
from replicas.kernels.team import Team
from replicas.layers.linear import Matmul

ROWS = [1, 2, 3, 4, 5, 8, FEW_ROWS - 1, FEW_ROWS, 63, 64, 100, 300]


def within_rounding(got: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Against fp64: partial sums of k products are about sqrt(k) large, and each of up to 192 + k / 192 additions in a
    row rounds them by 6e-8; with random signs that is a factor of 14, and 5 covers the largest of 10^5 results."""
    exact, k = x.double() @ weight.double().T, weight.shape[1]
    return float((got.double() - exact).abs().max()) < 5 * 14 * 6e-8 * k**0.5


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", [(16, 16), (80, 48), (960, 576), (576, 1536)], ids=lambda s: f"{s[0]}x{s[1]}")
def test_the_kernels_equal_fp64_within_rounding_at_every_number_of_rows(shape: tuple[int, int], threads: int) -> None:
    weight = torch.randn(shape)
    product = LinearKernel(weight, Team(threads))
    for rows in ROWS:
        x = torch.randn(rows, shape[1])
        assert within_rounding(product(x), x, weight)


def test_a_row_does_not_depend_on_the_other_rows_or_on_threads() -> None:
    weight, x = torch.randn(960, 576), torch.randn(300, 576)
    one, two = LinearKernel(weight, Team(1)), LinearKernel(weight, Team(2))
    assert torch.equal(two(x[:8])[3], one(x[3:4])[0])  # few rows: bit for bit
    assert torch.equal(two(x)[:64], one(x[:64]))  # many rows
    apart = float((two(x)[3] - one(x[3:4])[0]).abs().max())  # from one way to the other: rounding, results are ~24
    assert apart < 1e-4


@pytest.mark.parametrize("k", [WHOLE + 16, 3 * PART, 3 * PART + 48])
def test_long_rows_read_in_parts_have_the_bits_of_rows_read_whole(k: int) -> None:
    """Fewer than PART_ROWS rows are read whole; groups of four rows, and what is left of three, two and one."""
    weight, x, bias = torch.randn(32, k), torch.randn(FEW_ROWS - 1, k), torch.randn(32)
    product = LinearKernel(weight, Team(2), bias)
    product(x[: PART_ROWS - 1])
    assert product._arguments.part_len == k
    product(x[:PART_ROWS])
    assert product._arguments.part_len < k
    whole = torch.cat([product(part) for part in x.split(PART_ROWS - 1)])
    for rows in (*range(PART_ROWS, PART_ROWS + 4), FEW_ROWS - 1):
        assert torch.equal(product(x[:rows]), whole[:rows])
    assert within_rounding(whole - bias, x, weight)


def test_rows_that_lie_apart_are_read_in_place_and_transposed_input_is_copied() -> None:
    weight, wide = torch.randn(64, 32), torch.randn(5, 96)
    product = LinearKernel(weight, Team(1))
    assert within_rounding(product(wide[:, 32:64]), wide[:, 32:64], weight)
    tall = torch.randn(32, 5)
    assert within_rounding(product(tall.T), tall.T, weight)


@pytest.mark.parametrize("rows", [1, 40])
def test_the_bias_is_added_once(rows: int) -> None:
    weight, bias, x = torch.randn(48, 32), torch.randn(48), torch.randn(rows, 32)
    matmul = Matmul()
    matmul.prepare(weight, bias)
    assert torch.allclose(matmul(x), F.linear(x, weight, bias), atol=1e-5)


@pytest.mark.parametrize("shape", [(30, 32), (32, 30)])
def test_shapes_that_the_kernels_do_not_serve_go_to_pytorch(shape: tuple[int, int]) -> None:
    weight, x = torch.randn(shape), torch.randn(3, shape[1])
    matmul = Matmul()
    matmul.prepare(weight, None)
    assert torch.equal(matmul(x), F.linear(x, weight))


def test_bfloat16_weights_go_to_pytorch() -> None:
    weight, x = torch.randn(32, 32).bfloat16(), torch.randn(3, 32).bfloat16()
    matmul = Matmul()
    matmul.prepare(weight, None)
    assert torch.equal(matmul(x), F.linear(x, weight))


def test_the_weight_is_kept_as_it_lies_and_counted_once() -> None:
    weight = torch.randn(32, 64)
    matmul = Matmul()
    matmul.prepare(weight, None)
    matmul(torch.randn(1, 64)), matmul(torch.randn(100, 64))
    assert matmul.weight is not None
    assert matmul.weight.data_ptr() == weight.data_ptr()
    assert matmul.num_bytes == 32 * 64 * 4


def test_no_rows_give_no_rows() -> None:
    matmul = Matmul()
    matmul.prepare(torch.randn(32, 64), None)
    assert matmul(torch.zeros(0, 64)).shape == (0, 32)


@pytest.mark.parametrize("shape", [(960, 576), (72, 1536), (72, 72)], ids=lambda s: f"{s[0]}x{s[1]}")
def test_in_one_order_a_row_has_the_same_bits_in_steps_of_any_number_of_rows(shape: tuple[int, int]) -> None:
    """Rows of 72 are padded: BLAS, which takes them else, has another order for one row than for many."""
    weight, bias, x = torch.randn(shape), torch.randn(shape[0]), torch.randn(700, shape[1])
    matmul = Matmul(Products(one_order=True, blas_rows={shape: 1}))
    matmul.prepare(weight, bias)
    whole = matmul(x)
    for rows in (1, 5, FEW_ROWS - 1, FEW_ROWS, 200):
        assert torch.equal(matmul(x[:rows]), whole[:rows])
    assert within_rounding(whole - bias, x, weight)


def test_steps_of_as_many_rows_as_products_say_go_to_blas(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, blas, taken = torch.randn(64, 576), F.linear, []
    monkeypatch.setattr(F, "linear", lambda x, *more: (taken.append(len(x)), blas(x, *more))[1])
    ours, mixed, other = (Matmul(Products(blas_rows=rows)) for rows in ({}, {(64, 576): 80}, {(576, 64): 1}))
    for matmul in (ours, mixed, other):
        matmul.prepare(weight, None)
        for rows in (79, 80, 200):
            matmul(torch.randn(rows, 576))
    assert taken == [80, 200]
    assert (ours.program_rows, mixed.program_rows, other.program_rows) == (ANY_ROWS, 80, ANY_ROWS)
