"""A pool whose layers are made when they are first written (SPEC C09)."""

from dataclasses import replace

import pytest
import torch

from replicas.attention.torch_native import TorchNativeAttention
from replicas.memory.lazy_pool import LazyKVCache
from replicas.memory.pool import MHATokenToKVPool
from tests.attention_steps import make_step

SHAPE = (3, 4, 5, 2, 8, torch.float32, "cpu")  # 3 pages of 4 tokens, 5 layers of 2 heads of 8
LAYER = 4 * 2 * 2 * 4 * 8 * 4  # bytes: 4 pages with the dummy one


def test_memory_is_counted_as_it_comes_and_goes() -> None:
    pool = LazyKVCache(*SHAPE)
    assert (pool.num_bytes, pool.reserved_bytes, pool.layer_bytes) == (0, 5 * LAYER, LAYER)
    assert pool.get_contiguous_buf_infos() == ([], [], [])
    k = torch.ones(1, 2, 8)
    pool.set_kv_buffer(3, torch.tensor([5]), k, -k)
    pool.set_kv_buffer(1, torch.tensor([5]), k, -k)
    assert (pool.num_bytes, pool.reserved_bytes) == (2 * LAYER, 5 * LAYER)
    addresses, lengths, items = pool.get_contiguous_buf_infos()
    assert addresses == [pool.get_or_alloc(1).data_ptr(), pool.get_or_alloc(3).data_ptr()]
    assert (lengths, items) == ([LAYER] * 2, [LAYER // 4] * 2)
    pool.drop(3)
    assert (pool.num_bytes, pool.reserved_bytes) == (LAYER, 5 * LAYER)


def test_a_page_counts_as_in_the_engines_pool() -> None:
    lazy, whole = LazyKVCache(*SHAPE), MHATokenToKVPool(*SHAPE)
    assert lazy.page_bytes == whole.page_bytes
    assert lazy.reserved_bytes == whole.buffer.nbytes


def test_what_was_not_written_is_not_read_and_is_zero_where_a_neighbour_was() -> None:
    pool = LazyKVCache(*SHAPE)
    with pytest.raises(ValueError, match="layer 2 has no K and V"):
        pool.read_kv(2, torch.tensor([5]))
    assert pool.num_bytes == 0
    k = torch.randn(1, 2, 8)
    pool.set_kv_buffer(2, torch.tensor([5]), k, 2 * k)
    keys, values = pool.read_kv(2, torch.tensor([5, 6]))
    assert torch.equal(keys, torch.cat((k, torch.zeros(1, 2, 8))))
    assert torch.equal(values[:1], 2 * k)
    pool.drop(2)
    with pytest.raises(ValueError, match="layer 2"):
        pool.read_kv(2, torch.tensor([5]))


def test_layers_run_in_stages_over_it_as_over_the_engines_pool_with_the_memory_of_one() -> None:
    step = make_step([(0, 9), (0, 3)], num_layers=4, page_size=4, head_dim=16, kv_dtype="float32")
    whole = TorchNativeAttention(step.pool)
    data = step.pool.get_key_buffer(0)
    lazy_pool = LazyKVCache(len(data) - 1, 4, 4, 3, 16, torch.float32, "cpu")
    lazy = TorchNativeAttention(replace(step, pool=lazy_pool).pool)
    for layer in range(4):
        for backend in (whole, lazy):
            backend.begin(step.batch)
        found = lazy.forward(layer, step.q * layer, step.k, step.v)
        assert torch.equal(found, whole.forward(layer, step.q * layer, step.k, step.v))
        assert lazy_pool.num_bytes == lazy_pool.layer_bytes
        lazy_pool.drop(layer)
