"""K/V read from any pool is written to any other bit for bit: other pages, other ranks (SPEC H10, H17)."""

from collections.abc import Sequence

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvtransfer.replay.payload import Payload, Slots
from replicas.layers.tp_group import TpGroup
from replicas.memory.pool import MHATokenToKVPool
from replicas.runner.kv_access import ReadKv, WriteKv, run_order

LAYERS, HEADS, DIM, NUM_SLOTS = 2, 6, 3, 24  # heads split by 1, 2, 3 and 6; 12 ranks hold each twice


class Together(TpGroup):
    """One of the ranks of ``pools``, all in this process: what the others would give is read from their pools."""

    def __init__(self, rank: int, pools: Sequence[MHATokenToKVPool], slots: Slots) -> None:
        super().__init__(rank, len(pools), device=torch.device("cpu"))
        self._pools = pools
        self._slots = slots

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        parts = [pool.read_slots(self._slots).contiguous().view(torch.uint8) for pool in self._pools]
        assert torch.equal(parts[self.rank], tensor)
        return torch.cat(parts, dim)


def ranks(tp: int, page_size: int, dtype: torch.dtype, seed: int | None) -> list[MHATokenToKVPool]:
    """The pools of ``tp`` ranks; any bits, NaNs among them, or zeros without ``seed``."""
    heads = max(1, HEADS // tp)
    pools = [
        MHATokenToKVPool(NUM_SLOTS // page_size, page_size, LAYERS, heads, DIM, dtype, "cpu") for _ in range(tp)
    ]
    if seed is not None:
        rng = np.random.default_rng(seed)
        whole = rng.integers(0, 256, (LAYERS, 2, NUM_SLOTS, HEADS, DIM * dtype.itemsize), dtype=np.uint8)
        write(pools, np.arange(page_size, page_size + NUM_SLOTS, dtype=np.int32), whole)
    return pools


def read(pools: Sequence[MHATokenToKVPool], slots: Slots) -> Payload:
    """As every rank sees it."""
    seen = [run_order(ReadKv(slots), pool, Together(r, pools, slots), HEADS) for r, pool in enumerate(pools)]
    first = seen[0]
    assert first is not None
    assert all(other is not None and other.tobytes() == first.tobytes() for other in seen)
    return first


def write(pools: Sequence[MHATokenToKVPool], slots: Slots, payload: Payload) -> None:
    for rank, pool in enumerate(pools):
        assert run_order(WriteKv(slots, payload), pool, Together(rank, pools, slots), HEADS) is None


def some_slots(data: st.DataObject, page_size: int, num_tokens: int, start: int) -> Slots:
    """Slots of tokens [start, start + num_tokens) of a sequence whose pages lie anywhere."""
    pages = data.draw(st.permutations(range(1, NUM_SLOTS // page_size + 1)))
    at = np.arange(start, start + num_tokens)
    return (np.array(pages)[at // page_size] * page_size + at % page_size).astype(np.int32)


@given(
    data=st.data(),
    num_tokens=st.integers(1, 12),
    starts=st.tuples(st.integers(0, 11), st.integers(0, 11)),
    page_sizes=st.tuples(st.sampled_from([1, 2, 3, 4, 12]), st.sampled_from([1, 2, 3, 4, 12])),
    tp=st.tuples(st.sampled_from([1, 2, 3, 6, 12]), st.sampled_from([1, 2, 3, 6, 12])),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_what_one_pool_holds_another_gets_and_nothing_else_changes(
    data: st.DataObject,
    num_tokens: int,
    starts: tuple[int, int],
    page_sizes: tuple[int, int],
    tp: tuple[int, int],
    dtype: torch.dtype,
) -> None:
    here, there = (ranks(tp[i], page_sizes[i], dtype, seed) for i, seed in ((0, 7), (1, None)))
    src, dst = (some_slots(data, page_sizes[i], num_tokens, starts[i]) for i in (0, 1))
    payload = read(here, src)
    assert payload.shape == (LAYERS, 2, num_tokens, HEADS, DIM * dtype.itemsize)
    write(there, dst, payload)
    assert read(there, dst).tobytes() == payload.tobytes()
    rest = np.setdiff1d(np.arange(NUM_SLOTS + page_sizes[1], dtype=np.int32), dst)
    assert not read(there, rest).any()


def test_a_payload_is_token_by_token_k_then_v_with_all_heads() -> None:
    """SPEC H10: K and V [n, kv_heads, head_dim] of each layer; as `set_kv_buffer` stored them, two ranks of 3 heads."""
    pools = ranks(2, 4, torch.float32, None)
    k, v = torch.arange(36.0).view(2, HEADS, DIM), -torch.arange(36.0).view(2, HEADS, DIM)
    slots = np.array([14, 4], dtype=np.int32)
    for rank, pool in enumerate(pools):
        own = slice(3 * rank, 3 * rank + 3)
        pool.set_kv_buffer(1, torch.from_numpy(slots), k[:, own], v[:, own])
    payload = torch.from_numpy(read(pools, slots)).view(torch.float32)
    assert torch.equal(payload[1, 0], k)
    assert torch.equal(payload[1, 1], v)
    assert not payload[0].any()
