"""Attention by dot products of pairs in bf16, where the CPU has them: its rounding, and its promises."""

import dataclasses

import pytest
import torch
from torch import Tensor

from replicas.attention import cpu_pairs
from replicas.attention.cpu import CpuAttention
from replicas.attention.torch_native import PLAIN
from replicas.config import AttentionKind
from replicas.kernels import bf16_tiles
from replicas.memory.pool import MHATokenToKVPool
from tests.attention_steps import Step, make_step
from tests.unit.attention.test_cpu_attention import chunk_of, cpu, oracle, pick, sinks_of
from tests.unit.attention.test_cpu_kinds import DECODING, EXTENDING, KINDS

by_dots = pytest.mark.skipif(bf16_tiles.way() != "dots", reason="this CPU has no fast dot products of bf16")
HEADS = [(4, 4), (9, 3), (8, 1)]


def bf16_step(lengths: list[tuple[int, int]], **more: object) -> Step:
    return make_step(lengths, kv_dtype="bfloat16", **more)  # type: ignore[arg-type]


def rounded(step: Step) -> Step:
    """The step with its queries in bf16."""
    return dataclasses.replace(step, q=step.q.bfloat16().float())


def error(step: Step, *, threads: int = 2, kind: AttentionKind = PLAIN) -> float:
    """Of the largest value: beside queries, weights alone are rounded, each by 2 ** -9 of itself at most."""
    got = cpu(step, threads=threads, kind=kind).clone()
    peak = float(step.pool.get_value_buffer(0).float().abs().max())
    return float((got - oracle(rounded(step), kind=kind)).abs().max()) / peak


def plainly(step: Step, request: int, *, kind: AttentionKind = PLAIN) -> Tensor:
    """What the new tokens of one request get, [E, H * D]: each key and value once, weights rounded before they are
    summed over values but not for their own sum. Where no row looks into two blocks, or chunks."""
    batch, heads = step.batch, step.q.shape[1]
    first, last = batch.qo_indptr[request : request + 2].tolist()
    k, v = step.pool.read_kv(0, batch.table[batch.rows[request], : int(batch.seq_lens[request])].long())
    q = step.q[first:last].bfloat16().double()  # [E, H, D]
    k, v = (each.double().repeat_interleave(heads // each.shape[1], dim=1) for each in (k, v))  # [S, H, D]
    scores = torch.einsum("ehd,shd->ehs", q, k) * (kind.scale or q.shape[2] ** -0.5)
    if kind.soft_cap is not None:
        scores = kind.soft_cap * torch.tanh(scores / kind.soft_cap)
    seen = torch.arange(len(k)) <= batch.positions[first:last, None]
    scores.masked_fill_(~seen[:, None], -torch.inf)
    peak = scores.amax(dim=2, keepdim=True)
    weights = torch.exp(scores - peak).float()
    total, sinks = weights.double().sum(dim=2), sinks_of(step, kind)
    if sinks is not None:
        total = total + torch.exp(sinks.double()[None] - peak[..., 0])
    out = torch.einsum("ehs,shd->ehd", weights.bfloat16().double(), v) / total[..., None]
    return out.flatten(1).float()


@by_dots
@pytest.mark.parametrize("page_size", [1, 7, 16, 64])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
@pytest.mark.parametrize("name", ["plain", "soft cap", "sinks"])
def test_queries_and_weights_are_rounded_and_nothing_else(page_size: int, head_dim: int, name: str) -> None:
    """A weight halfway between two numbers of bf16 may become either: it is one in thousands, and shifts a result by
    2 ** -8 of its share."""
    kind = KINDS.get(name, PLAIN)
    for lengths in (
        [(n, 1) for n in (0, 1, 14, 15, 16, 63, 64, 126, 127)],
        [(0, 1), (0, 47), (33, 2), (16, 31), (30, 34)],
    ):
        step = bf16_step(lengths, page_size=page_size, head_dim=head_dim)
        got = cpu(step, kind=kind).clone()
        off = (got - torch.cat([plainly(step, b, kind=kind) for b in range(len(lengths))])).abs().flatten()
        assert float(off.quantile(0.95)) < 5e-6
        assert float(off.max()) < 2e-3


@by_dots
@pytest.mark.parametrize("heads", HEADS, ids=lambda h: f"{h[0]}q{h[1]}kv")
@pytest.mark.parametrize("kind", [PLAIN, *KINDS.values()], ids=["plain", *KINDS])
def test_every_kind_equals_the_oracle_up_to_the_rounding_of_weights(
    kind: AttentionKind, heads: tuple[int, int]
) -> None:
    more = {"num_heads": heads[0], "num_kv_heads": heads[1]}
    for page_size in (5, 16):
        for lengths, num_decode in ((DECODING, None), (EXTENDING, None), ([*EXTENDING, *DECODING], len(DECODING))):
            step = bf16_step(lengths, page_size=page_size, num_decode=num_decode, **more)
            assert error(step, kind=kind) < 2**-9


@by_dots
def test_latent_vectors_are_keys_and_values_in_pairs_too() -> None:
    for heads, rank, dim in ((4, 32, 48), (16, 512, 576)):
        for lengths in ([(n, 1) for n in (0, 15, 16, 127, 300)], [(0, 1), (0, 100), (33, 2), (130, 65)]):
            step = bf16_step(lengths, num_heads=heads, num_kv_heads=1, head_dim=dim, kv_lora_rank=rank, page_size=7)
            assert error(step) < 2**-9


@by_dots
def test_a_result_is_the_same_bit_for_bit_alone_in_a_batch_a_group_and_in_chunks() -> None:
    lengths = [(0, 150), (30, 41), (700, 1), (640, 1), (600, 1), (129, 1)]
    for name in ("plain", "all"):
        kind = KINDS.get(name, PLAIN)
        step = bf16_step(lengths, num_decode=4, shared=[([2, 3, 4], 592)])
        together = cpu(step, kind=kind).clone()
        step.batch.prefix_groups = ()
        assert torch.equal(cpu(step, kind=kind), together)
        for b, at in ((2, 191), (4, 193), (5, 194)):
            alone = pick(step, [b])
            alone.batch.is_decode = True
            assert torch.equal(cpu(alone, threads=1, kind=kind)[0], together[at])
        for first, last in ((0, 77), (77, 150)):
            assert torch.equal(cpu(chunk_of(step, first, last), kind=kind), together[first:last])


@by_dots
def test_prompts_over_one_prefix_get_the_bits_that_they_get_alone() -> None:
    step = bf16_step([(200, 5), (192, 3), (250, 70), (192, 130)], shared=[([0, 1, 2, 3], 192)], num_decode=0)
    assert len(step.batch.prompt_groups[0].members) == 4
    together, bounds = cpu(step).clone(), step.batch.qo_indptr.tolist()
    for b in range(4):
        assert torch.equal(cpu(pick(step, [b]), threads=1), together[bounds[b] : bounds[b + 1]])


@by_dots
@pytest.mark.parametrize("page_size", [1, 16])
def test_what_lies_behind_the_last_token_is_never_multiplied(page_size: int) -> None:
    """The pair of an odd last token, and the columns of a block that has fewer keys: here they would read NaN."""
    step = bf16_step([(20, 1), (127, 2), (0, 31), (62, 1)], page_size=page_size, num_decode=1)
    wanted = cpu(step).clone()
    pool, batch = step.pool, step.batch
    assert isinstance(pool, MHATokenToKVPool)
    used = torch.cat([batch.table[row, :length] for row, length in zip(batch.rows, batch.seq_lens, strict=True)])
    k, v = pool.read_kv(0, used.long())
    pool.buffer.fill_(float("nan"))
    pool.set_kv_buffer(0, used.long(), k, v)
    assert torch.equal(cpu(step), wanted)


def test_only_pools_in_bf16_and_cpus_with_fast_dots_take_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    for way, dtype, taken in (
        ("dots", torch.bfloat16, True), ("dots", torch.float32, False), ("amx", torch.bfloat16, False),
        (None, torch.bfloat16, False),
    ):  # fmt: skip
        monkeypatch.setattr(bf16_tiles, "way", lambda way=way: way)
        assert cpu_pairs.serves(dtype) is taken
    step = bf16_step([(3, 1)])
    backend = CpuAttention(step.pool, dtype=torch.float32, num_heads=9, num_kv_heads=3, head_dim=64, num_threads=1)
    assert backend._plans[0].extend.pairs == backend._plans[0].decode.pairs == 0
