"""The CPU's kernels over latent vectors: one KV head for all query heads, whose values are the keys' first columns."""

import pytest
import torch
from torch import Tensor

from replicas.attention.cpu import CpuAttention, why_not
from replicas.attention.torch_native import TorchNativeAttention
from tests.attention_steps import Step, make_step

LENGTHS = [(n, 1) for n in (0, 15, 16, 127, 300)]
SHAPES = {"tiny": (4, 32, 48), "lite": (16, 512, 576)}  # heads, kv_lora_rank, and the length of a vector


def step_of(
    lengths: list[tuple[int, int]], shape: str = "tiny", kv_dtype: str = "float32", *, page_size: int = 16
) -> Step:
    heads, rank, dim = SHAPES[shape]
    return make_step(
        lengths, num_heads=heads, num_kv_heads=1, head_dim=dim, kv_dtype=kv_dtype, kv_lora_rank=rank,
        page_size=page_size,
    )  # fmt: skip


def cpu(step: Step, *, threads: int = 2) -> Tensor:
    backend = CpuAttention(
        step.pool, dtype=torch.float32, num_heads=step.q.shape[1], num_kv_heads=1, head_dim=step.q.shape[2],
        num_threads=threads,
    )  # fmt: skip
    backend.begin(step.batch)
    return backend.forward(0, step.q, step.k, step.v).clone()


def oracle(step: Step) -> Tensor:
    backend = TorchNativeAttention(step.pool)
    backend.begin(step.batch)
    return backend.forward(0, step.q, step.k, step.v)


@pytest.mark.usefixtures("widened")
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("page_size", [7, 16])
@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_decode_and_extend_equal_the_oracle(shape: str, page_size: int, kv_dtype: str) -> None:
    """The kernels store the step's vectors; the oracle reads what they stored."""
    for lengths in (LENGTHS, [(0, 1), (0, 100), (33, 2), (130, 65)]):
        step = step_of(lengths, shape, kv_dtype, page_size=page_size)
        got = cpu(step)
        assert got.shape == (step.q.shape[0], SHAPES[shape][0] * SHAPES[shape][1])
        torch.testing.assert_close(got, oracle(step), atol=1e-5, rtol=1e-5)


def test_a_request_gets_the_same_bits_in_any_batch_chunk_and_group() -> None:
    """Decoded with its prefix read for it alone and for four, by one thread and two; extended whole and by parts."""
    together = make_step(
        [(300, 1)] * 4, num_heads=4, num_kv_heads=1, head_dim=48, kv_dtype="float32", kv_lora_rank=32,
        shared=[([0, 1, 2, 3], 256)],
    )  # fmt: skip
    shared = cpu(together)
    together.batch.prefix_groups = ()
    assert torch.equal(cpu(together), shared)
    assert torch.equal(cpu(together, threads=1), shared)
    whole = step_of([(0, 150)])
    wanted = cpu(whole)
    batch = whole.batch
    for start, end in ((0, 70), (70, 150)):
        batch.prefix_lens = torch.tensor([start], dtype=torch.int32)
        batch.seq_lens = torch.tensor([end], dtype=torch.int32)
        batch.qo_indptr = torch.tensor([0, end - start], dtype=torch.int32)
        batch.num_tokens, batch.max_seq_len = end - start, end
        part = Step(
            pool=whole.pool, batch=batch, q=whole.q[start:end], k=whole.k[start:end], v=whole.v[start:end], num_layers=1
        )
        batch.out_slots = batch.table[int(batch.rows[0]), start:end].long()
        assert torch.equal(cpu(part), wanted[start:end])


def test_vectors_that_are_no_multiple_of_16_are_left_to_the_plain_backend() -> None:
    step = make_step([(3, 1)], num_heads=4, num_kv_heads=1, head_dim=24, kv_dtype="float32", kv_lora_rank=16)
    assert why_not(step.pool, dtype=torch.float32, head_dim=24) == "needs a head_dim that is a multiple of 16, got 24"
