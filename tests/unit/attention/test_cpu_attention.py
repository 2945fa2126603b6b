"""The fast CPU attention against the oracle, and its promises about batches, chunks and threads."""

import functools

import pytest
import torch
from torch import Tensor

from replicas.attention.base import AttentionSpec
from replicas.attention.choice import make_attention
from replicas.attention.cpu import CpuAttention
from replicas.attention.torch_native import PLAIN, TorchNativeAttention
from replicas.config import AttentionKind
from replicas.errors import InvalidConfig
from replicas.memory.pool import MHATokenToKVPool
from replicas.memory.scaled_pool import kv_pool
from tests.attention_steps import SmallPool, Step, make_step
from tests.pairwise import cases

make_cpu = functools.partial(CpuAttention, dtype=torch.float32)


def sinks_of(step: Step, kind: AttentionKind) -> Tensor | None:
    """Scores of the heads' sinks, of the size of others."""
    return torch.linspace(-2.0, 3.0, step.q.shape[1]) if kind.sinks else None


def cpu(step: Step, *, threads: int = 2, kind: AttentionKind = PLAIN) -> Tensor:
    heads, kv_heads, head_dim = step.q.shape[1], step.k.shape[1], step.q.shape[2]
    backend = make_cpu(
        step.pool, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, num_threads=threads,
        kinds=() if kind == PLAIN else (kind,),
    )  # fmt: skip
    backend.begin(step.batch)
    return backend.forward(0, step.q, step.k, step.v, sinks_of(step, kind))


def oracle(step: Step, *, kind: AttentionKind = PLAIN) -> Tensor:
    backend = TorchNativeAttention(step.pool, (kind,))
    backend.begin(step.batch)
    return backend.forward(0, step.q, step.k, step.v, sinks_of(step, kind))


def error(step: Step, *, threads: int = 2, kind: AttentionKind = PLAIN) -> float:
    got = cpu(step, threads=threads, kind=kind).clone()  # stores K and V first, so the oracle reads what it stored
    return float((got - oracle(step, kind=kind)).abs().max())


HEADS = {f"{heads}q{kv}kv": (heads, kv) for heads, kv in ((4, 4), (9, 3), (8, 1), (14, 2))}


@cases(page_size=[1, 7, 16, 256], heads=HEADS, threads=[1, 2])
def test_decode_and_extend_equal_the_oracle_on_ragged_batches_with_and_without_prefix(
    page_size: int, heads: tuple[int, int], threads: int
) -> None:
    decoding = [(n, 1) for n in (0, 1, 15, 16, 127, 128, 300)]
    for lengths in (decoding, [(0, 1), (0, 200), (64, 63), (33, 2), (130, 65), (16, 16)]):
        step = make_step(lengths, num_heads=heads[0], num_kv_heads=heads[1], page_size=page_size)
        assert error(step, threads=threads) < 1e-5


@pytest.mark.parametrize("head_dim", [16, 32, 80, 128])
def test_any_head_dim_that_is_a_multiple_of_16_works(head_dim: int) -> None:
    assert error(make_step([(40, 1), (200, 1)], head_dim=head_dim)) < 1e-5
    assert error(make_step([(40, 30), (0, 100)], head_dim=head_dim)) < 1e-5


def test_long_sequences_stay_exact() -> None:
    assert error(make_step([(5000, 1), (9, 1)])) < 1e-5
    assert error(make_step([(4000, 70)])) < 1e-5


def test_large_scores_do_not_overflow() -> None:
    for lengths in ([(300, 1)], [(100, 90)]):
        step = make_step(lengths)
        step.q.mul_(100.0)  # scores of hundreds: exp without the maximum taken off is infinite
        got, wanted = cpu(step).clone(), oracle(step)
        assert torch.isfinite(got).all()
        assert float((got - wanted).abs().max()) < 1e-3


def test_new_keys_and_values_land_in_their_slots_and_nowhere_else() -> None:
    step = make_step([(20, 3), (0, 2)])
    pool = step.pool
    assert isinstance(pool, SmallPool)
    wanted = pool.data.clone()
    before, pool.data = pool.data, wanted
    pool.set_kv_buffer(0, step.batch.out_slots, step.k, step.v)
    pool.data = before
    cpu(step)
    assert torch.equal(pool.data, wanted)


def pick(step: Step, requests: list[int]) -> Step:
    """The same step with only some of its requests, in another order."""
    batch, bounds = step.batch, step.batch.qo_indptr.tolist()
    tokens = torch.cat([torch.arange(bounds[b], bounds[b + 1]) for b in requests])
    new_lens = torch.tensor([bounds[b + 1] - bounds[b] for b in requests], dtype=torch.int32)
    smaller = type(batch)(
        is_decode=batch.is_decode,
        qo_indptr=torch.cat((torch.zeros(1, dtype=torch.int32), new_lens.cumsum(0, dtype=torch.int32))),
        rows=batch.rows[requests],
        prefix_lens=batch.prefix_lens[requests],
        seq_lens=batch.seq_lens[requests],
        positions=batch.positions[tokens],
        out_slots=batch.out_slots[tokens],
        table=batch.table,
        max_seq_len=batch.max_seq_len,
        num_tokens=len(tokens),
    )
    return Step(pool=step.pool, batch=smaller, q=step.q[tokens], k=step.k[tokens], v=step.v[tokens], num_layers=1)


def chunk_of(step: Step, first: int, last: int) -> Step:
    """Only tokens ``first`` to ``last`` of the first request of ``step``, which begins with its first token."""
    part = pick(step, [0])
    batch = part.batch
    batch.qo_indptr = torch.tensor([0, last - first], dtype=torch.int32)
    batch.prefix_lens, batch.seq_lens = torch.tensor([first]).int(), torch.tensor([last]).int()
    batch.out_slots, batch.num_tokens = batch.out_slots[first:last], last - first
    part.q, part.k, part.v = part.q[first:last], part.k[first:last], part.v[first:last]
    return part


@cases(length=[128, 192, 256, 320], size=[2, 8, 32], page_size=[1, 16, 64])
def test_a_group_with_one_prefix_equals_the_oracle(size: int, length: int, page_size: int) -> None:
    """Contexts end at, just after, and far from the shared part's end; one request is in no group."""
    lengths = [(length + 37 * (b % 5), 1) for b in range(size)]
    step = make_step([(300, 1), *lengths], page_size=page_size, shared=[(list(range(1, size + 1)), length)])
    assert error(step) < 1e-5


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("heads", [(4, 4), (9, 3), (8, 1), (64, 1)], ids=lambda h: f"{h[0]}q{h[1]}kv")
def test_a_result_is_the_same_bit_for_bit_whether_its_prefix_is_read_with_others(
    page_size: int, heads: tuple[int, int]
) -> None:
    """Two groups, one of them of more requests than a task takes; members are not neighbours."""
    groups = [(list(range(0, 38, 2)), 256), ([1, 5, 7], 144)]
    step = make_step([(300, 1)] * 38, num_heads=heads[0], num_kv_heads=heads[1], page_size=page_size, shared=groups)
    together = cpu(step).clone()
    step.batch.prefix_groups = ()
    assert torch.equal(cpu(step), together)


@pytest.mark.usefixtures("widened")
@pytest.mark.parametrize("page_size", [1, 16, 24])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8", "fp8", "fp8_e5m2"])
def test_pools_of_narrow_numbers_are_read_as_the_oracle_reads_them(kv_dtype: str, page_size: int) -> None:
    """SPEC K10, K11."""
    groups = [([0, 1, 4], 192)] if page_size != 1 else [([0, 1, 4], 130)]
    step = make_step([(300, 1), (250, 1), (0, 1), (15, 1), (193, 1)], page_size=page_size, kv_dtype=kv_dtype,
                     shared=groups)
    assert error(step) < 1e-5
    assert error(make_step([(64, 63), (0, 30), (33, 2)], page_size=page_size, kv_dtype=kv_dtype)) < 1e-5


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8", "fp8", "fp8_e5m2"])
@pytest.mark.parametrize("head_dim", [16, 80])
def test_new_tokens_become_the_bytes_that_the_pool_would_make(kv_dtype: str, head_dim: int) -> None:
    step = make_step([(20, 4000), (3, 2)], head_dim=head_dim, kv_dtype=kv_dtype)  # of a million some lie near ties
    step.k[3] *= 1000.0
    step.k[4, 1] = 0.0  # nothing to scale by
    cpu(step)
    pool = step.pool
    assert isinstance(pool, MHATokenToKVPool)
    ours = pool.buffer.clone()
    pool.set_kv_buffer(0, step.batch.out_slots, step.k, step.v)
    assert torch.equal(ours, pool.buffer)


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8", "fp8", "fp8_e5m2"])
@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_what_is_no_number_is_none_in_the_pool_either(kv_dtype: str, odd: float) -> None:
    """Else a model that broke would go on with zeros. Of four requests the second and the last (one token each)."""
    step = make_step([(20, 7), (3, 2), (9, 1), (30, 1)], page_size=16, kv_dtype=kv_dtype)
    for token in (7, 10):
        step.v[token] = odd
    finite = torch.isfinite(cpu(step)).all(dim=1)
    assert finite.tolist() == [True] * 7 + [False, False, True, False]


def test_a_backend_serves_steps_of_all_sizes_one_after_the_other() -> None:
    big = make_step([(300, 1)] * 3)
    backend = make_cpu(big.pool, num_heads=9, num_kv_heads=3, head_dim=64, num_threads=2)
    for requests in ([0], [0, 1, 2], [2], [1, 0]):
        step = pick(big, requests)
        backend.begin(step.batch)
        got = backend.forward(0, step.q, step.k, step.v)
        assert got.shape == (len(requests), 9 * 64)
        assert float((got - oracle(step)).abs().max()) < 1e-5


def test_a_pool_or_head_dim_it_cannot_serve_is_refused_with_what_to_do() -> None:
    pool = SmallPool(num_pages=1, page_size=1, num_kv_heads=1, head_dim=24)
    with pytest.raises(InvalidConfig, match=r"multiple of 16, got 24; set attention: torch_native"):
        make_cpu(pool, num_heads=1, num_kv_heads=1, head_dim=24, num_threads=1)
    pool.data = pool.data.to(torch.float16)
    with pytest.raises(InvalidConfig, match=r"pools of float32, bfloat16, .* in memory, this one holds torch\.float16"):
        make_cpu(pool, num_heads=1, num_kv_heads=1, head_dim=24, num_threads=1)
    with pytest.raises(InvalidConfig, match=r"wants a model in float32, this one is in bfloat16; set attention: torch"):
        CpuAttention(pool, dtype=torch.bfloat16, num_heads=1, num_kv_heads=1, head_dim=16, num_threads=1)


@pytest.mark.parametrize(
    ("kv_dtype", "dtype", "head_dim", "served"),
    [
        ("float32", torch.float32, 32, True),
        ("bfloat16", torch.float32, 32, True),
        ("int8", torch.float32, 32, True),
        ("bfloat16", torch.bfloat16, 32, False),  # kernels would read q, k and v past their ends
        ("float16", torch.float32, 32, False),
        ("float32", torch.float32, 24, False),
    ],
)
def test_auto_takes_the_reference_where_the_kernels_cannot_serve(
    kv_dtype: str, dtype: torch.dtype, head_dim: int, served: bool
) -> None:
    pool = kv_pool(
        kv_dtype, num_pages=2, page_size=4, num_layers=1, num_kv_heads=1, head_dim=head_dim, device="cpu"
    )
    spec = AttentionSpec(pool=pool, dtype=dtype, num_heads=2, num_kv_heads=1, head_dim=head_dim)
    made, _ = make_attention("auto", spec)
    assert isinstance(made, CpuAttention if served else TorchNativeAttention)


@pytest.mark.parametrize("page_size", [1, 16, 96])
@pytest.mark.parametrize("threads", [1, 2])
def test_prompts_over_one_prefix_equal_the_oracle_and_themselves_alone_bit_for_bit(
    page_size: int, threads: int
) -> None:
    """Two groups, of which one fills several tiles and ends inside a block; a prompt of none, and two that decode."""
    lengths = [(200, 5), (192, 3), (96, 7), (250, 70), (200, 9), (192, 130), (300, 1), (30, 40), (500, 1), (20, 1)]
    groups = [([0, 1, 3, 4, 5, 6], 192), ([2, 7], 0)] if page_size != 1 else [([0, 1, 3, 4, 5, 6], 130), ([2, 7], 30)]
    step = make_step(lengths, page_size=page_size, shared=groups, num_decode=2)
    assert [len(group.members) for group in step.batch.prompt_groups] == [6, 2]
    together = cpu(step, threads=threads).clone()
    assert float((together - oracle(step)).abs().max()) < 1e-5
    bounds = step.batch.qo_indptr.tolist()
    for b in range(8):
        alone = pick(step, [b])
        alone.batch.is_decode = False
        assert torch.equal(cpu(alone, threads=threads), together[bounds[b] : bounds[b + 1]])


@pytest.mark.parametrize("new", [1, 3], ids=["decode", "extend"])
def test_a_prefix_in_common_is_read_from_the_first_of_a_group_alone(new: int) -> None:
    """The second's row is broken where the group says that it equals the first's: it is never read there."""
    step = make_step([(300, new), (290, new)], shared=[([0, 1], 256)])
    wanted = cpu(step, threads=1).clone()
    step.batch.table[step.batch.rows[1], :256] = 0
    assert torch.equal(cpu(step, threads=1), wanted)
