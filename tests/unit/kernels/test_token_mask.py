"""Masked rows of logits: what is allowed stays bit by bit, all else is -inf, as by PyTorch's own operations."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from replicas.kernels.token_mask import Words, _masked_on_device, masked

VOCAB = [1, 31, 32, 33, 1000, 49_152, 49_157]


def words_of(bits: np.ndarray) -> Words:
    """Pack [V] booleans into int32 words."""
    padded = np.zeros(-(-len(bits) // 32) * 32, np.bool_)
    padded[: len(bits)] = bits
    return np.packbits(padded, bitorder="little").view(np.int32)


def expected(logits: torch.Tensor, bits: Sequence[np.ndarray | None]) -> torch.Tensor:
    out = logits.clone()
    for row, allowed in enumerate(bits):
        if allowed is not None:
            out[row, torch.from_numpy(~allowed)] = -torch.inf
    return out


@pytest.mark.parametrize("density", [0.0, 0.001, 0.5, 0.999, 1.0])
@pytest.mark.parametrize("size", VOCAB)
def test_allowed_tokens_keep_their_logit_and_others_become_minus_infinity(size: int, density: float) -> None:
    random = np.random.default_rng(size)
    logits = torch.from_numpy(random.standard_normal((4, size)).astype(np.float32))
    before = logits.clone()
    bits = [random.random(size) < density, None, random.random(size) < density, None]
    masks = [None if each is None else words_of(each) for each in bits]
    wanted = expected(logits, bits)
    assert torch.equal(masked(logits, masks), wanted)
    assert torch.equal(_masked_on_device(logits, masks, in_place=False), wanted)
    assert torch.equal(logits, before)
    assert masked(logits, masks, in_place=True) is logits
    assert torch.equal(logits, wanted)


def test_a_mask_longer_than_the_vocabulary_is_read_to_its_end_only() -> None:
    logits = torch.zeros(1, 40)
    longer = np.array([1, 0, -1, -1], np.int32)
    assert masked(logits, [longer]).isfinite().nonzero().tolist() == [[0, 0]]
    assert _masked_on_device(logits, [longer], in_place=False).isfinite().nonzero().tolist() == [[0, 0]]


def test_rows_of_a_wider_matrix_are_masked_where_they_lie() -> None:
    wide = torch.arange(3 * 64, dtype=torch.float32).view(3, 64)
    rows = wide[:, :40]
    made = masked(rows, [np.array([2, 0], np.int32)] * 3)
    assert made.isfinite().nonzero().tolist() == [[0, 1], [1, 1], [2, 1]]
    assert made[:, 1].tolist() == [1.0, 65.0, 129.0]


def test_what_is_no_number_stays_so_where_it_is_allowed() -> None:
    logits = torch.tensor([[torch.nan, torch.inf, 1.0, torch.nan]])
    made = masked(logits, [np.array([0b0111], np.int32)])
    assert made[0, 0].isnan()
    assert made[0, 1:].tolist() == [torch.inf, 1.0, -torch.inf]
