"""The pool of latent attention: one vector a token, the same on all ranks, once in host memory (SPEC C03, A06, H10)."""

import numpy as np
import pytest
import torch

from replicas.memory.host import HostKVCache
from replicas.memory.latent_pool import MLATokenToKVPool
from replicas.memory.scaled_pool import kv_pool


def make(dtype: torch.dtype = torch.float32, page_size: int = 4) -> MLATokenToKVPool:
    """Three pages and the dummy; a page is 2 layers x 4 tokens x (16 + 8) floats."""
    return MLATokenToKVPool(3, page_size, 2, 16, 8, dtype, "cpu")


def test_one_allocation_holds_every_layers_vectors_and_values_are_their_first_columns() -> None:
    pool = make()
    assert pool.buffer.shape == (4, 2, 4, 24)
    assert pool.page_bytes == 2 * 4 * 24 * 4 == pool.page_rows().shape[1]
    assert pool.get_contiguous_buf_infos() == ([pool.buffer.data_ptr()], [4 * 768], [768])
    latent = torch.arange(1.0, 49.0).view(2, 1, 24)
    pool.set_kv_buffer(1, torch.tensor([14, 4], dtype=torch.int32), latent, latent[..., :16])
    keys, values = pool.get_kv_buffer(1)
    assert (keys.shape, values.shape) == ((4, 1, 4, 24), (4, 1, 4, 16))
    assert keys.data_ptr() == values.data_ptr()
    assert torch.equal(keys[3, :, 2], latent[0])
    assert torch.equal(values[1, :, 0], latent[1, :, :16])
    assert int(pool.buffer.count_nonzero()) == 48  # and no other layer, page or token
    k, v = pool.read_kv(1, torch.tensor([4, 14]))
    assert torch.equal(k, latent.flip(0))
    assert torch.equal(v, latent.flip(0)[..., :16])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slots_and_pages_are_read_and_written_back_bit_for_bit(dtype: torch.dtype) -> None:
    """Slots too where the other pool has other pages."""
    pool, other, wider = make(dtype), make(dtype), make(dtype, page_size=12)
    pool.buffer.normal_()
    other.write_pages([1, 2], pool.read_pages([3, 1]))
    assert torch.equal(other.buffer[1], pool.buffer[3])
    slots, there = np.array([14, 4, 5], np.int32), np.array([13, 35, 12], np.int32)
    data = pool.read_slots(slots)
    assert data.shape == (2, 1, 3, 1, 24)
    wider.write_slots(there, data)
    assert torch.equal(wider.read_slots(there), data)
    assert int(wider.buffer.count_nonzero()) == 3 * 2 * 24
    with pytest.raises(ValueError, match=r"\(2, 1, 3, 1, 24\) .* got \(2, 2, 3, 1, 24\)"):
        wider.write_slots(there, torch.zeros(2, 2, 3, 1, 24, dtype=dtype))


def test_the_setting_of_a_models_rank_makes_the_pool() -> None:
    shape = {"num_pages": 3, "page_size": 4, "num_layers": 2, "num_kv_heads": 1, "head_dim": 24}
    pool = kv_pool("bfloat16", **shape, device="cpu", latent=(16, 6))  # and an index's key of 2
    assert isinstance(pool, MLATokenToKVPool)
    assert (pool.value_dim, pool.key_dim, pool.head_dim, pool.dtype) == (16, 22, 24, torch.bfloat16)


def test_the_host_holds_a_page_once_and_every_rank_loads_it() -> None:
    """Rank 0 writes; rank 1 reads the same bytes, and writes nothing."""
    pools = [make() for _ in range(2)]
    pools[0].buffer.normal_()
    pools[1].buffer.copy_(pools[0].buffer)
    first = HostKVCache.create(5, rank_page_bytes=768, tp=1)
    hosts = [first, HostKVCache(first.memory, 1)]
    pages, there, back = (np.array(ids, np.int32) for ids in ([1, 3], [5, 2], [2, 1]))
    hosts[1].backup(pools[1], pages, there)
    assert not first.view.any()
    hosts[0].backup(pools[0], pages, there)
    assert first.view.shape == (6, 768)
    for pool, host in zip(pools, hosts, strict=True):
        wanted = pool.buffer[[1, 3]].clone()
        assert host.load(pool, there, back).tolist() == [True, True]
        assert torch.equal(pool.buffer[[2, 1]], wanted)
    first.view[5, 0] ^= 1
    for pool, host in zip(pools, hosts, strict=True):
        assert host.load(pool, there, back).tolist() == [False, True]
    first.close()
