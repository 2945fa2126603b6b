"""The fast CPU attention of layers that do more than plain causal attention: against the oracle, and its promises."""

import random
from typing import Any

import pytest
import torch

from replicas.attention import torch_native
from replicas.attention.cpu import CHUNK, CpuAttention, decode_tasks, why_not
from replicas.attention.torch_native import PLAIN, TorchNativeAttention
from replicas.config import AttentionKind
from tests.attention_steps import SmallPool, Step, make_step
from tests.pairwise import cases
from tests.unit.attention.test_cpu_attention import chunk_of, cpu, error, oracle, pick

KINDS = {
    "scale": AttentionKind(scale=0.31),
    "window": AttentionKind(window=70),
    "narrow window": AttentionKind(window=1),
    "chunk": AttentionKind(chunk=96),
    "window and chunk": AttentionKind(window=150, chunk=200),
    "soft cap": AttentionKind(soft_cap=3.0, scale=0.4),
    "sinks": AttentionKind(sinks=True),
    "all": AttentionKind(scale=0.2, window=130, soft_cap=5.0, sinks=True),
}
DECODING = [(n, 1) for n in (0, 1, 69, 70, 127, 128, 400)]
EXTENDING = [(0, 1), (0, 200), (64, 63), (33, 2), (330, 65), (96, 16)]


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_decode_and_extend_equal_the_oracle(kind: AttentionKind) -> None:
    assert error(make_step(DECODING), kind=kind) < 1e-5
    assert error(make_step(EXTENDING, page_size=7), kind=kind) < 1e-5
    mixed = make_step([*EXTENDING, *DECODING], num_decode=len(DECODING))
    assert error(mixed, kind=kind) < 1e-5
    assert (oracle(mixed, kind=kind) - oracle(mixed)).abs().max() > 0.01, "the kind does something"


@pytest.mark.usefixtures("widened")
@pytest.mark.parametrize("seed", range(12))
def test_random_steps_of_random_kinds_equal_the_oracle(seed: int) -> None:
    """Lengths, windows, page sizes, number formats, heads of a group, shared prefixes and mixed steps."""
    draw = random.Random(seed)
    kind = AttentionKind(
        scale=draw.choice([None, 0.3]),
        window=draw.choice([None, draw.randint(1, 40), draw.randint(41, 500)]),
        chunk=draw.choice([None, None, draw.randint(1, 300)]),
        soft_cap=draw.choice([None, draw.uniform(1.0, 30.0)]),
        sinks=draw.choice([True, False]),
    )
    page_size, common = draw.choice([1, 5, 16, 64]), draw.randint(10, 330)
    common -= common % page_size
    decoding = [(common + draw.randint(0, 300), 1) for _ in range(draw.randint(2, 9))]
    extending = [(draw.randint(0, 300), draw.randint(1, 150)) for _ in range(draw.randint(0, 3))]
    group = [i + len(extending) for i in range(len(decoding)) if draw.random() < 0.7]
    heads = draw.choice([(4, 4), (9, 3), (8, 1)])
    step = make_step(
        [*extending, *decoding],
        num_heads=heads[0], num_kv_heads=heads[1], head_dim=draw.choice([16, 64]), page_size=page_size,
        seed=seed, num_decode=len(decoding), kv_dtype=draw.choice([None, None, "bfloat16", "int8", "fp8"]),
        shared=[(group, common)] if len(group) > 1 and common else (),
    )  # fmt: skip
    assert error(step, threads=1 + seed % 2, kind=kind) < 2e-5, kind


@pytest.mark.parametrize("name", ["plain", "window", "chunk", "all"])
def test_a_result_is_the_same_bit_for_bit_alone_in_a_batch_a_group_and_in_chunks(name: str) -> None:
    """On any number of threads, in a mixed step and in one of its own."""
    kind = KINDS.get(name, PLAIN)
    lengths = [(0, 150), (30, 40), (700, 1), (640, 1), (600, 1), (129, 1)]
    step = make_step(lengths, num_decode=4, shared=[([2, 3, 4], 592)])
    together = cpu(step, kind=kind).clone()
    step.batch.prefix_groups = ()
    assert torch.equal(cpu(step, kind=kind), together)
    for rows in ([2], [4], [5], [5, 2]):
        alone = pick(step, rows)
        alone.batch.is_decode = True
        assert torch.equal(cpu(alone, threads=3 - len(rows), kind=kind), together[[188 + row for row in rows]])
    assert torch.equal(cpu(pick(step, [1]), threads=1, kind=kind), together[150:190])
    for first, last in ((0, 77), (77, 150)):
        assert torch.equal(cpu(chunk_of(step, first, last), kind=kind), together[first:last])


def test_pages_wholly_outside_the_window_are_not_read() -> None:
    """They may be another's by now: here they hold NaN."""
    step = make_step([(150, 40), (300, 1), (17, 1)], page_size=16, num_decode=2)
    pool, batch, kind = step.pool, step.batch, AttentionKind(window=50)
    assert isinstance(pool, SmallPool)
    wanted = cpu(step, kind=kind).clone()
    for request, first in ((0, 150 - 49), (1, 301 - 50)):
        row, num_pages = batch.table[batch.rows[request]], first // 16
        pool.data[row[: 16 * num_pages : 16].long() // 16] = float("nan")
    assert torch.isnan(cpu(step)).any(), "they are read without a window"
    assert torch.equal(cpu(step, kind=kind), wanted)


def test_a_window_makes_tasks_of_what_it_sees_alone() -> None:
    """Contexts of 1,000 and 300 over a common prefix of 256: of the second's window of 200, chunk 0 is cut."""
    seq_lens = torch.tensor([1000, 300, 280], dtype=torch.int32).numpy()
    group = make_step([(299, 1), (279, 1)], shared=[([0, 1], 256)]).batch.prefix_groups[0]
    group.members[:] = [1, 2]
    cut = decode_tasks(seq_lens, [group], first=0, max_members=8, first_seen=seq_lens - 200)
    tasks = [(cut.members[at : at + n].tolist(), chunk, skip) for at, n, chunk, skip in cut.tasks.tolist()]
    assert tasks == [
        ([1, 2], 1, 0), ([0], 6, 800 - 6 * CHUNK), ([0], 7, 0), ([1], 0, 100), ([1], 2, 0), ([2], 0, 80), ([2], 2, 0)
    ]  # fmt: skip
    assert cut.first_partial.tolist() == [0, 2, 5, 8]
    assert cut.chunk_zero.tolist() == [-6, 2, 5]


def test_layers_of_several_kinds_run_one_after_the_other_and_in_the_stages_of_a_program() -> None:
    """Of four layers two share what they see; each has its own scale."""
    kinds = (AttentionKind(window=40), PLAIN, AttentionKind(window=40, scale=0.5), AttentionKind(soft_cap=2.0))
    step = make_step([(300, 1), (20, 1)], num_layers=4)
    backend = CpuAttention(
        step.pool, dtype=torch.float32, num_heads=9, num_kv_heads=3, head_dim=64, num_threads=2, kinds=kinds
    )
    plain = TorchNativeAttention(step.pool, kinds)
    backend.begin(step.batch)
    plain.begin(step.batch)
    results = []
    for layer in range(4):
        results.append(backend.forward(layer, step.q, step.k, step.v).clone())
        assert float((results[-1] - plain.forward(layer, step.q, step.k, step.v)).abs().max()) < 1e-5
    assert all(float((results[i] - results[i - 1]).abs().max()) > 0.01 for i in range(4))
    out = torch.empty_like(results[0])
    stages, counters = backend.decode_stages(4, step.q, step.k, step.v, out), torch.zeros(16, dtype=torch.int64)
    assert backend.set_stages()
    for stage, wanted in zip(stages, results, strict=True):
        counters.zero_()
        backend._team.run(*stage.prepare(2, counters.data_ptr()))
        assert (out - wanted).abs().max() == 0
    sinking = CpuAttention(
        step.pool, dtype=torch.float32, num_heads=9, num_kv_heads=3, head_dim=64, num_threads=2,
        kinds=(AttentionKind(sinks=True),),
    )  # fmt: skip
    sinking.begin(step.batch)
    sinking.decode_stages(1, step.q, step.k, step.v, out)
    assert not sinking.set_stages(), "sinks come with each call"


LATENT = {"tiny": (4, 32, 48), "lite": (16, 512, 576)}  # heads, kv_lora_rank, and the length of a vector


def latent_step(lengths: list[tuple[int, int]], shape: str = "tiny", kv_dtype: str = "float32", **more: Any) -> Step:
    """One KV head for all query heads, whose values are the keys' first columns."""
    heads, rank, dim = LATENT[shape]
    return make_step(
        lengths, num_heads=heads, num_kv_heads=1, head_dim=dim, kv_dtype=kv_dtype, kv_lora_rank=rank, **more
    )


@pytest.mark.usefixtures("widened")
@cases(shape=LATENT.keys(), page_size=[7, 16], kv_dtype=["float32", "bfloat16"])
def test_latent_vectors_equal_the_oracle(shape: str, page_size: int, kv_dtype: str) -> None:
    """The kernels store the step's vectors; the oracle reads what they stored."""
    for lengths in ([(n, 1) for n in (0, 15, 16, 127, 300)], [(0, 1), (0, 100), (33, 2), (130, 65)]):
        step = latent_step(lengths, shape, kv_dtype, page_size=page_size)
        got = cpu(step).clone()
        assert got.shape == (step.q.shape[0], LATENT[shape][0] * LATENT[shape][1])
        torch.testing.assert_close(got, oracle(step), atol=1e-5, rtol=1e-5)


def test_latent_vectors_give_the_same_bits_in_any_batch_chunk_and_group() -> None:
    together = latent_step([(300, 1)] * 4, shared=[([0, 1, 2, 3], 256)])
    shared = cpu(together).clone()
    together.batch.prefix_groups = ()
    for threads in (1, 2):
        assert torch.equal(cpu(together, threads=threads), shared)
    whole = latent_step([(0, 150)])
    wanted = cpu(whole).clone()
    for first, last in ((0, 70), (70, 150)):
        part = chunk_of(whole, first, last)
        part.v = part.k[..., :32]  # a view of the keys
        assert torch.equal(cpu(part), wanted[first:last])


def test_latent_vectors_that_are_no_multiple_of_16_are_left_to_the_plain_backend() -> None:
    step = make_step([(3, 1)], num_heads=4, num_kv_heads=1, head_dim=24, kv_dtype="float32", kv_lora_rank=16)
    assert why_not(step.pool, dtype=torch.float32, head_dim=24) == "needs a head_dim that is a multiple of 16, got 24"


@pytest.mark.parametrize("most", [1 << 25, 1000])
def test_the_reference_attends_to_latent_vectors_in_parts_of_a_bounded_size(
    monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """All heads read one copy of K and V, whole or in halves of the tokens, with tokens left out and without."""
    monkeypatch.setattr(torch_native, "SCORES", most)
    q, k, drawn = torch.randn(40, 16, 48), torch.randn(300, 1, 48), torch.rand(40, 300) > 0.3
    causal = torch.arange(300) <= torch.arange(260, 300)[:, None]
    for chosen in (None, drawn):
        scores = torch.einsum("ehd,nd->ehn", q, k[:, 0]) * 48**-0.5
        seen = causal if chosen is None else causal & chosen
        weights = scores.masked_fill(~seen[:, None], -torch.inf).softmax(dim=-1)
        wanted = torch.einsum("ehn,nd->ehd", weights, k[:, 0, :32])
        torch.testing.assert_close(torch_native.attend(q, k, k[..., :32], chosen=chosen), wanted)
