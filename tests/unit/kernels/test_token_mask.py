"""Masked rows of logits: what is allowed stays bit by bit, all else is -inf, as by PyTorch's own operations."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from replicas.kernels.token_mask import Words, mask_on_device, mask_tokens

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
    logits = torch.from_numpy(random.standard_normal((36, size)).astype(np.float32))  # more rows than go at once
    bits = [None if row % 2 else random.random(size) < density for row in range(36)]
    masks = [None if each is None else words_of(each) for each in bits]
    wanted = expected(logits, bits)
    for mask in (mask_tokens, mask_on_device):
        made = logits.clone()
        mask(made, masks)
        assert torch.equal(made, wanted)


def test_a_mask_longer_than_the_vocabulary_is_read_to_its_end_only() -> None:
    longer = np.array([1, 0, -1, -1], np.int32)
    for mask in (mask_tokens, mask_on_device):
        logits = torch.zeros(1, 40)
        mask(logits, [longer])
        assert logits.isfinite().nonzero().tolist() == [[0, 0]]


def test_rows_without_a_mask_stay_as_they_are() -> None:
    for mask in (mask_tokens, mask_on_device):
        logits = torch.ones(2, 40)
        mask(logits, [None, None])
        assert (logits == 1).all()


def test_rows_of_a_wider_matrix_are_masked_where_they_lie() -> None:
    wide = torch.arange(3 * 64, dtype=torch.float32).view(3, 64)
    rows = wide[:, :40]
    mask_tokens(rows, [np.array([2, 0], np.int32)] * 3)
    assert rows.isfinite().nonzero().tolist() == [[0, 1], [1, 1], [2, 1]]
    assert rows[:, 1].tolist() == [1.0, 65.0, 129.0]
    assert wide[:, 40:].isfinite().all()


def test_what_is_no_number_stays_so_where_it_is_allowed() -> None:
    logits = torch.tensor([[torch.nan, torch.inf, 1.0, torch.nan]])
    mask_tokens(logits, [np.array([0b0111], np.int32)])
    assert logits[0, 0].isnan()
    assert logits[0, 1:].tolist() == [torch.inf, 1.0, -torch.inf]
