import ctypes
import mmap
import os

import pytest
import torch

from replicas.memory.pool import ALIGNMENT, MHATokenToKVPool


def make(dtype: torch.dtype = torch.float32) -> MHATokenToKVPool:
    return MHATokenToKVPool(
        num_pages=3, page_size=4, num_layers=2, num_kv_heads=3, head_dim=8, dtype=dtype, device=torch.device("cpu")
    )


def test_one_allocation_holds_every_layer_page_by_page() -> None:
    """SPEC C02, C05, C10: three pages and the dummy; a page is 2 layers x K, V x 3 heads x 4 tokens x 8 floats."""
    pool = make()
    assert pool.buffer.shape == (4, 2, 2, 3, 4, 8)
    assert pool.page_bytes == 2 * 2 * 3 * 4 * 8 * 4 == 1536
    addresses, lengths, items = pool.get_contiguous_buf_infos()
    assert (addresses, lengths, items) == ([pool.buffer.data_ptr()], [4 * 1536], [1536])
    assert addresses[0] % 4096 == 0


def test_a_token_is_stored_at_its_page_and_offset_of_its_layer_alone() -> None:
    """SPEC C01, C07: slot 14 is offset 2 of page 3."""
    pool = make()
    k, v = torch.arange(48.0).view(2, 3, 8), -torch.arange(48.0).view(2, 3, 8)
    pool.set_kv_buffer(1, torch.tensor([14, 4], dtype=torch.int32), k, v)
    keys, values = pool.get_kv_buffer(1)
    assert keys.shape == values.shape == (4, 3, 4, 8)
    assert torch.equal(keys[3, :, 2], k[0])
    assert torch.equal(values[1, :, 0], v[1])
    assert int(pool.buffer.count_nonzero()) == 2 * 47  # all but the zeros of the two ranges, and no other layer
    assert keys.data_ptr() == pool.get_key_buffer(1).data_ptr()


def test_stored_values_take_the_pools_dtype() -> None:
    pool = make(torch.bfloat16)
    pool.set_kv_buffer(0, torch.tensor([5]), torch.full((1, 3, 8), 1.00390625), torch.ones(1, 3, 8))
    assert pool.get_key_buffer(0).dtype == torch.bfloat16
    assert pool.get_key_buffer(0)[1, 0, 1, 0].item() == 1.0


def test_pages_are_read_and_written_back_bit_for_bit() -> None:
    """SPEC H17, the pool's part."""
    pool, other = make(), make()
    pool.buffer.normal_()
    other.write_pages([1, 2], pool.read_pages([3, 1]))
    assert torch.equal(other.buffer[1], pool.buffer[3])
    assert torch.equal(other.buffer[2], pool.buffer[1])
    assert int(other.buffer[3].count_nonzero()) == 0


def test_pages_of_another_shape_are_refused() -> None:
    pool = make()
    with pytest.raises(ValueError, match=r"1 pages of \(2, 2, 3, 4, 8\) torch.float32 .* got \(1, 2, 2, 3, 4, 4\)"):
        pool.write_pages([1], torch.zeros(1, 2, 2, 3, 4, 4))


def test_memory_that_was_never_written_reads_zero() -> None:
    pool = make(torch.float16)
    assert int(pool.buffer.count_nonzero()) == 0


def resident_pages(buffer: torch.Tensor) -> list[bool]:
    """Whether each whole memory page of a buffer is there (mincore)."""
    first = -(-buffer.data_ptr() // ALIGNMENT) * ALIGNMENT
    count = (buffer.data_ptr() + buffer.nbytes - first) // ALIGNMENT
    there = (ctypes.c_ubyte * count)()
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    assert mincore(first, count * ALIGNMENT, ctypes.addressof(there)) == 0, os.strerror(ctypes.get_errno())
    return [bool(each & 1) for each in there]


def test_a_pool_is_given_its_memory_and_keeps_what_it_holds() -> None:
    """Over memory that the system has just mapped: an allocator may give some that was used before."""
    pool = MHATokenToKVPool(2000, 16, 2, 3, 64, torch.float32, "cpu")  # 98 MB
    fresh = mmap.mmap(-1, pool.buffer.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pool.buffer = buffer = torch.frombuffer(fresh, dtype=torch.float32).view(pool.buffer.shape)
    buffer[1000] = 7.0
    assert not all(resident_pages(buffer))
    assert pool.commit(0.0) < buffer.nbytes
    assert not all(resident_pages(buffer))
    assert pool.commit(60.0) == buffer.nbytes
    assert all(resident_pages(buffer))
    assert bool((buffer[1000] == 7.0).all())
    assert float(buffer.sum()) == 7.0 * buffer[0].numel()
