"""A GPU's program, interpreted where there is none, draws the host's tokens, on many random rows."""

import functools

import numpy as np
import pytest
import torch

from replicas.runner import device_draw
from replicas.runner.device_draw import sample_on_device
from replicas.runner.sampler import Sampler
from replicas.scheduler.plan import BROKEN, SampleRow
from replicas.types import SamplingParams
from tests.gpu.device_steps import DEVICE
from tests.gpu.triton_or_skip import triton_paged

assert triton_paged

NONE = np.empty(0, np.int32)
NUM_ROWS = 400 if torch.cuda.is_available() else 100  # of a case


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a row of 1,000 tokens is two blocks; on a GPU as large as in production."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(device_draw, "BLOCK", 512)


def row(position: int, **params: object) -> SampleRow:
    sampling = SamplingParams(**params)  # type: ignore[arg-type]
    return SampleRow(
        params=sampling, position=position, num_output=0, stop_ids=frozenset(), prompt_ids=NONE, output_ids=NONE
    )


def both(logits: torch.Tensor, rows: list[SampleRow]) -> tuple[list[int], list[int]]:
    """Tokens by the host and by the device's operations."""
    host, _ = Sampler(logits.shape[1], "cpu").sample(logits, rows)
    return host.tolist(), sample_on_device(logits.to(DEVICE), rows).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("spread", [0.3, 2.0, 8.0], ids=["flat", "usual", "peaked"])
@pytest.mark.parametrize("vocab_size", [2, 65, 1000])
def test_random_rows_of_every_kind_get_the_same_tokens(spread: float, vocab_size: int) -> None:
    """Cuts inside the head, below it, none, and greedy ones between; 3,600 rows in all on a GPU."""
    random = np.random.default_rng(vocab_size)
    logits = torch.from_numpy(random.normal(0.0, spread, (NUM_ROWS, vocab_size)).astype(np.float32))
    rows = [
        row(
            int(random.integers(1, 10_000)),
            seed=int(random.integers(0, 1 << 63)),
            temperature=float(random.choice([0.0, 0.2, 1.0, 1.7])),
            top_k=int(random.choice([0, 0, 1, 5, 64, 100])),
            top_p=float(random.choice([1.0, 1.0, 0.3, 0.95, 0.999])),
            min_p=float(random.choice([0.0, 0.0, 0.05])),
        )
        for _ in range(NUM_ROWS)
    ]
    host, device = both(logits, rows)
    assert device == host
    assert len(set(host)) > min(vocab_size, 10) // 2  # not all one token


def test_equal_logits_are_cut_and_drawn_alike() -> None:
    """Logits of three values only: the cut falls among equals, of which the lowest ids are kept."""
    random = np.random.default_rng(7)
    logits = torch.from_numpy(random.integers(0, 3, (12, 600)).astype(np.float32))
    top_k = random.permutation([3, 40, 64, 390] * 3)
    rows = [row(i, seed=i, temperature=1.0, top_k=int(k)) for i, k in enumerate(top_k)]
    host, device = both(logits, rows)
    assert device == host


def test_greedy_takes_the_first_of_equals() -> None:
    logits = torch.tensor([[0.0, 5.0, 5.0, 1.0], [2.0, 2.0, 2.0, 2.0]], device=DEVICE)
    assert sample_on_device(logits, [row(0, temperature=0.0), row(0, temperature=0.0)]).tolist() == [1, 0]


def test_a_row_that_is_not_finite_is_broken_and_others_are_not() -> None:
    logits = torch.randn(4, 100, generator=torch.Generator().manual_seed(0))
    logits[0, 3] = torch.nan
    logits[1, 3] = torch.inf
    logits[2] = -torch.inf
    rows = [row(5, temperature=1.0, seed=1), row(5, temperature=0.0), row(5, temperature=1.0), row(5, temperature=1.0)]
    host, device = both(logits, rows)
    assert device == host
    assert device[:3] == [BROKEN] * 3
    assert device[3] >= 0


def test_a_row_gets_the_same_token_alone() -> None:
    logits = torch.randn(12, 500, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    rows = [row(i, seed=9, temperature=1.0, top_p=(1.0, 0.9)[i % 2]) for i in range(12)]
    together = sample_on_device(logits, rows).tolist()
    assert [int(sample_on_device(logits[i : i + 1], rows[i : i + 1])) for i in range(12)] == together


def test_masks_of_constraints_hold_on_the_device_too() -> None:
    """Half of the rows constrained, to one token, a few, and half of all; with edits and without."""
    random = np.random.default_rng(3)
    logits = torch.from_numpy(random.normal(0.0, 2.0, (60, 1000)).astype(np.float32))
    rows = []
    for index in range(60):
        made = row(index, seed=index, **([{"temperature": 0.0}, {"top_k": 9}, {"logit_bias": ((7, 4.0),)}][index % 3]))
        bits = np.zeros(1024, np.bool_)
        bits[random.choice(1000, [1, 5, 500][index // 2 % 3], replace=False)] = True
        words = np.packbits(bits, bitorder="little").view(np.int32)
        rows.append(made._replace(mask=functools.partial(np.array, words)) if index % 2 else made)
    host, _ = Sampler(1000, "cpu").sample(logits.clone(), rows)
    device, _ = Sampler(1000, DEVICE).sample_on_device(logits.to(DEVICE), rows)
    assert device.tolist() == host.tolist()
    for made, token in zip(rows, host.tolist(), strict=True):
        if made.mask is not None:
            words = made.mask()
            assert words is not None
            assert words[token // 32] >> token % 32 & 1
