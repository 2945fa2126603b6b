"""Pools of int8 and 8-bit floats: a scale for each token and head, and pages that stay one run of bytes."""

import itertools

import numpy as np
import pytest
import torch

from kvtransfer.layout import KvLayout, head_slices
from replicas.memory.pool import MHATokenToKVPool
from replicas.memory.scaled_pool import kv_pool

SHAPE = {"num_layers": 2, "num_kv_heads": 3, "head_dim": 8}
KINDS = pytest.mark.parametrize("kv_dtype", ["int8", "fp8", "fp8_e5m2"])


def pool(kv_dtype: str, *, page_size: int = 4) -> MHATokenToKVPool:
    return kv_pool(kv_dtype, num_pages=16 // page_size, page_size=page_size, device="cpu", **SHAPE)


def filled(kv_dtype: str, *, page_size: int = 4) -> MHATokenToKVPool:
    random, made = torch.Generator().manual_seed(0), pool(kv_dtype, page_size=page_size)
    for layer in range(2):
        k, v = torch.randn(2, 16, 3, 8, generator=random)
        made.set_kv_buffer(layer, torch.arange(4, 20), k, v)
    return made


def test_a_head_is_its_numbers_then_its_scales() -> None:
    """SPEC K10, K11: the vector (127, 1, 0, ...) / 4 becomes those whole numbers and the scale 1/4."""
    made = pool("int8")
    vector = torch.tensor([127.0, 1.0, 0, 0, 0, 0, -64.0, 0]) / 4
    made.set_kv_buffer(1, torch.tensor([6]), vector.expand(1, 3, 8), -vector.expand(1, 3, 8))
    block = made.buffer[1, 1, 0, 2]  # page 1, layer 1, K, head 2: [4 * 8 numbers, 4 * 4 bytes of scales]
    assert block.shape == (4 * (8 + 4),)
    assert block[16:24].view(torch.int8).tolist() == [127, 1, 0, 0, 0, 0, -64, 0]
    assert block[32:].view(torch.float32).tolist() == [0, 0, 0.25, 0]
    assert made.page_bytes == 2 * 2 * 3 * 4 * (8 + 4)
    k, v = made.read_kv(1, torch.tensor([6]))
    assert torch.equal(k[0, 2], vector)
    assert torch.equal(v[0, 2], -vector)


@pytest.mark.parametrize(("kv_dtype", "share"), [("int8", 0.5 / 127), ("fp8", 1 / 16), ("fp8_e5m2", 1 / 8)])
def test_a_number_is_off_by_at_most_half_a_step(kv_dtype: str, share: float) -> None:
    """int8: half of the largest / 127; e4m3 has three bits behind the point: 1/16 of the number itself; e5m2 two."""
    made, x = pool(kv_dtype), torch.randn(16, 3, 8, generator=torch.Generator().manual_seed(1)) * 50
    made.set_kv_buffer(0, torch.arange(16), x, x)
    k, _ = made.read_kv(0, torch.arange(16))
    bound = share * (x.abs().amax(-1, keepdim=True) if kv_dtype == "int8" else x.abs().clamp_min(1e-2))
    assert ((k - x).abs() <= bound * 1.001).all()


@KINDS
def test_one_token_of_large_numbers_costs_the_others_nothing(kv_dtype: str) -> None:
    """SPEC K10, K11: with one scale for all, the small ones would round to zero."""
    made, x = pool(kv_dtype), torch.ones(2, 3, 8)
    x[0] = 1e4
    made.set_kv_buffer(0, torch.tensor([1, 2]), x, x)
    k, _ = made.read_kv(0, torch.tensor([2]))
    torch.testing.assert_close(k[0], torch.ones(3, 8))


@KINDS
def test_slots_move_to_a_pool_of_other_pages_bit_for_bit(kv_dtype: str) -> None:
    here, there = filled(kv_dtype, page_size=4), pool(kv_dtype, page_size=1)
    slots = np.array([5, 11, 4, 17], dtype=np.int32)
    there.write_slots(np.array([1, 9, 3, 2], dtype=np.int32), here.read_slots(slots))
    moved = there.read_slots(np.array([1, 9, 3, 2], dtype=np.int32))
    assert moved.shape == (2, 2, 4, 3, 8 + 4)
    assert torch.equal(moved, here.read_slots(slots))
    for mine, theirs in zip(
        here.read_kv(1, torch.tensor([11, 4])), there.read_kv(1, torch.tensor([9, 3])), strict=True
    ):
        assert torch.equal(mine, theirs)


@KINDS
def test_pages_move_with_their_scales(kv_dtype: str) -> None:
    here, there = filled(kv_dtype), pool(kv_dtype)
    there.write_pages([1, 2], here.read_pages([3, 4]))
    for mine, theirs in zip(here.read_kv(0, torch.tensor([13])), there.read_kv(0, torch.tensor([5])), strict=True):
        assert mine.abs().sum() > 0
        assert torch.equal(mine, theirs)


def test_bytes_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(2, 2, 1, 3, 12\) uint8 is wanted for 1 slots, got \(2, 2, 1, 3, 8\)"):
        pool("int8").write_slots(np.array([1], dtype=np.int32), torch.zeros(2, 2, 1, 3, 8, dtype=torch.uint8))


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8", "fp8", "fp8_e5m2"])
@pytest.mark.parametrize(("ranks", "others"), [(1, 3), (3, 1), (2, 6), (6, 2)])
def test_pages_between_unequal_ranks_move_heads_with_their_scales(kv_dtype: str, ranks: int, others: int) -> None:
    """6 heads; pages of 7 tokens, so that a head's block of numbers is no power of two."""
    heads, head_dim, page_size, num_pages = 6, 16, 7, 3
    slots = torch.arange((num_pages + 1) * page_size)

    def layout(tp: int) -> KvLayout:
        return KvLayout(
            model="m", architecture="MHA", num_layers=2, num_kv_heads=heads, head_dim=head_dim, dtype=kv_dtype,
            item_bytes=2 if kv_dtype == "bfloat16" else 1, page_size=page_size, tp=tp,
        )  # fmt: skip

    def pools(tp: int) -> list[MHATokenToKVPool]:
        made = [
            kv_pool(
                kv_dtype, num_pages=num_pages, page_size=page_size, num_layers=2, num_kv_heads=heads // tp,
                head_dim=head_dim, device="cpu",
            )
            for _ in range(tp)
        ]  # fmt: skip
        assert made[0].page_bytes == layout(tp).page_bytes
        return made

    def read(parts: list[MHATokenToKVPool], layer: int) -> torch.Tensor:
        return torch.cat([torch.stack(part.read_kv(layer, slots)) for part in parts], dim=2)  # [2, n, heads, D]

    source, target = pools(ranks), pools(others)
    share = heads // ranks
    for layer in range(2):
        k, v = torch.randn(2, len(slots), heads, head_dim) * 10.0**layer
        for rank, pool in enumerate(source):
            mine = slice(rank * share, (rank + 1) * share)
            pool.set_kv_buffer(layer, slots, k[:, mine], v[:, mine])
    for (i, src), (j, dst) in itertools.product(enumerate(source), enumerate(target)):
        src_pages, dst_pages = (pool.buffer.view(torch.uint8).view(num_pages + 1, -1) for pool in (src, dst))
        for cut in head_slices(layout(ranks), i, layout(others), j):
            run = src_pages[:, cut.src_offset : cut.src_offset + cut.num_bytes]
            dst_pages[:, cut.dst_offset : cut.dst_offset + cut.num_bytes] = run
    for layer in range(2):
        assert torch.equal(read(target, layer), read(source, layer))
