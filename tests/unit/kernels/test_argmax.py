"""The largest of each row, wherever it lies; of equals the first, and what PyTorch says of NaN and infinities."""

import pytest
import torch

from replicas.kernels.argmax import BLOCK, argmax


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
