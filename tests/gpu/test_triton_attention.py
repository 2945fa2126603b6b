"""The Triton backend against the oracle: compiled on a GPU, interpreted on a CPU. Needs no Ray."""

import numpy as np
import pytest
import torch

from replicas.config import AttentionKind
from tests.attention_steps import Step
from tests.gpu import fake_cuda
from tests.gpu.device_steps import DEVICE, device_step, error, oracle, run
from tests.gpu.triton_or_skip import triton_paged

DTYPES = [
    pytest.param(torch.float32, 1e-5, id="fp32"),
    pytest.param(torch.float16, 4e-3, id="fp16"),
    pytest.param(
        torch.bfloat16,
        3e-2,
        id="bf16",
        marks=pytest.mark.skipif(DEVICE == "cpu", reason="Triton's interpreter rounds bf16 otherwise than a GPU"),
    ),
]


@pytest.fixture(autouse=True)
def few_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interpreted program takes a millisecond, so there are few; on a GPU as many as in production."""
    if DEVICE == "cpu":
        monkeypatch.setattr(triton_paged, "PROGRAMS", 24)


def backend(step: Step, *kinds: AttentionKind) -> triton_paged.TritonAttention:
    return triton_paged.TritonAttention(
        step.pool, num_heads=step.q.shape[1], num_kv_heads=step.k.shape[1], head_dim=step.q.shape[2], kinds=kinds
    )


@pytest.mark.parametrize(("dtype", "allowed"), DTYPES)
@pytest.mark.parametrize("heads", [(9, 3), (14, 2)], ids=lambda h: f"{h[0]}q{h[1]}kv")
def test_decode_equals_the_oracle_on_a_ragged_batch(heads: tuple[int, int], dtype: torch.dtype, allowed: float) -> None:
    lengths = [(n, 1) for n in (0, 1, 64, 200)]
    step = device_step(lengths, dtype=dtype, num_heads=heads[0], num_kv_heads=heads[1], page_size=7)
    assert error(backend(step), step) < allowed


@pytest.mark.parametrize(("dtype", "allowed"), DTYPES)
@pytest.mark.parametrize("heads", [(2, 2), (9, 3)], ids=lambda h: f"{h[0]}q{h[1]}kv")
def test_extend_equals_the_oracle_with_and_without_prefix(
    heads: tuple[int, int], dtype: torch.dtype, allowed: float
) -> None:
    lengths = [(0, 1), (0, 40), (33, 20), (16, 2)]
    step = device_step(lengths, dtype=dtype, num_heads=heads[0], num_kv_heads=heads[1], page_size=16)
    assert error(backend(step), step) < allowed


@pytest.mark.parametrize(("head_dim", "page_size"), [(16, 1), (80, 16), (128, 5)])
def test_any_head_dim_and_page_size_works(head_dim: int, page_size: int) -> None:
    step = device_step([(30, 5), (50, 1)], num_heads=4, num_kv_heads=1, head_dim=head_dim, page_size=page_size)
    step.batch.num_decode = 1
    assert error(backend(step), step) < 1e-5


def test_a_mixed_step_equals_the_oracle() -> None:
    """Two requests extend by 9 and 20 tokens, three decode."""
    step = device_step([(30, 9), (0, 20), (70, 1), (0, 1), (17, 1)], page_size=4, num_heads=4, num_kv_heads=2)
    step.batch.num_decode = 3
    assert error(backend(step), step) < 1e-5


KINDS = {
    "scale and cap": AttentionKind(scale=0.3, soft_cap=4.0),
    "window": AttentionKind(window=27),
    "all": AttentionKind(scale=0.2, window=40, chunk=50, soft_cap=5.0, sinks=True),
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_layers_that_do_more_equal_the_oracle_in_mixed_steps(kind: AttentionKind) -> None:
    """Two extend, three decode: more than some of their windows reach."""
    lengths = [(50, 9), (0, 20), (40, 1), (70, 1), (17, 1)]
    step = device_step(lengths, page_size=16, num_heads=2, num_kv_heads=1)
    step.batch.num_decode = 3
    assert error(backend(step, kind), step, kind=kind) < 1e-5
    assert float((run(backend(step), step) - oracle(step, kind=kind)).abs().max()) > 0.01, "the kind does something"


def test_new_keys_and_values_land_in_their_slots_and_nowhere_else() -> None:
    step = device_step([(20, 3), (0, 2)], num_layers=2)
    wanted = step.pool.data.clone()
    before, step.pool.data = step.pool.data, wanted
    step.pool.set_kv_buffer(0, step.batch.out_slots, step.k, step.v)
    step.pool.data = before
    run(backend(step), step)
    assert torch.equal(step.pool.data, wanted)


def test_large_scores_do_not_overflow() -> None:
    for lengths in ([(100, 1)], [(30, 20)]):
        step = device_step(lengths, num_heads=4, num_kv_heads=1)
        step.q.mul_(100.0)
        got, wanted = run(backend(step), step), oracle(step)
        assert torch.isfinite(got).all()
        assert float((got - wanted).abs().max()) < 1e-3


def test_splits_are_a_power_of_two_and_make_at_most_2048_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_paged, "PROGRAMS", 2048)
    assert [triton_paged.num_splits(b, 8) for b in (1, 8, 16, 64, 256, 512)] == [32, 32, 16, 4, 1, 1]


def test_tiles_with_the_most_keys_come_first() -> None:
    """Requests of 5 and 33 new tokens in tiles of 16."""
    assert triton_paged.extend_tiles(np.array([5, 33]), 16).tolist() == [[1, 32], [1, 16], [0, 0], [1, 0]]


def test_lists_of_any_number_of_requests_are_made_by_one_program(gpu: fake_cuda.FakeCuda | None) -> None:
    """Where each list begins depends on that number; a second program would compile while requests wait."""
    if gpu is None:
        pytest.skip("Triton says what it compiles, where there is no GPU")
    step = device_step([(9, 1)] * 9, page_size=4, device="cuda")
    for stop in range(2, 10):
        triton_paged.list_pages(step.batch, slice(1, stop), 4, 3 * (stop - 1))
    assert len(gpu.programs) == 1
