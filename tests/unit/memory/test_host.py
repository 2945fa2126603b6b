"""The host tier's memory: what is copied there and back is the same bytes, and what is not is found."""

import gc
import os
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash

from replicas.errors import InvalidConfig
from replicas.memory.host import HostKVCache, HostMemory
from replicas.memory.pool import MHATokenToKVPool
from replicas.memory.scaled_pool import kv_pool

TP = 2
KV_DTYPES = ["float32", "bfloat16", "int8", "fp8", "fp8_e5m2"]


def pages(*ids: int) -> np.ndarray:
    return np.array(ids, dtype=np.int32)


def random_pool(rank: int, kv_dtype: str = "float32", num_pages: int = 6) -> MHATokenToKVPool:
    """One rank's pool, every byte of it random; a page of float32 is 2 layers x K, V x 3 heads x 4 tokens x 8 x 4."""
    pool = kv_pool(
        kv_dtype, num_pages=num_pages, page_size=4, num_layers=2, num_kv_heads=3, head_dim=8, device="cpu"
    )
    rows = pool.page_rows()
    rows[:] = np.random.default_rng(rank).integers(0, 256, rows.shape, dtype=np.uint8)
    return pool


def ranks_of(pool: MHATokenToKVPool, num_pages: int) -> list[HostKVCache]:
    """Rank 0's, and the other ranks attached to it."""
    first = HostKVCache.create(num_pages, rank_page_bytes=pool.page_bytes, tp=TP)
    return [first, *(HostKVCache(first.memory, rank) for rank in range(1, TP))]


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_pages_come_back_from_the_host_byte_for_byte(kv_dtype: str) -> None:
    """Device pages 1, 4, 6 of both ranks go to host pages 5, 2, 1, and come back as device pages 3, 2, 5. By one
    thread or two; scales of narrow numbers are part of a page."""
    pools = [random_pool(rank, kv_dtype) for rank in range(TP)]
    before = [pool.page_rows().copy() for pool in pools]
    hosts = ranks_of(pools[0], 5)
    for pool, host in zip(pools, hosts, strict=True):
        host.backup(pool, pages(1, 4, 6), pages(5, 2, 1))
    size = pools[0].page_bytes
    assert hosts[0].view.shape == (6, 2 * size)
    for device, there in ((1, 5), (4, 2), (6, 1)):
        whole = np.concatenate([rows[device] for rows in before])  # rank 0's part, then rank 1's
        assert np.array_equal(hosts[0].view[there], whole)
        digests = [xxhash.xxh3_64_intdigest(part.data) for part in whole.reshape(TP, size)]
        assert hosts[1].digests[there].tolist() == digests
    for pool, host, rows in zip(pools, hosts, before, strict=True):
        assert host.load(pool, pages(5, 2, 1), pages(3, 2, 5)).tolist() == [True] * 3
        assert np.array_equal(pool.page_rows()[[3, 2, 5]], rows[[1, 4, 6]])
        untouched = [0, 1, 4, 6]
        assert np.array_equal(pool.page_rows()[untouched], rows[untouched])
    assert not hosts[0].view[[0, 3, 4]].any()  # page 0, and those that nobody wrote
    assert not hosts[0].digests[[0, 3, 4]].any()
    for host in hosts:
        host.close()


@pytest.mark.parametrize("rank", range(TP))
@pytest.mark.parametrize("bit", [0, 7])
def test_a_flipped_bit_is_found_by_its_rank_and_its_page_is_not_copied(rank: int, bit: int) -> None:
    """The first byte of the rank's part of host page 2, or the last bit of that byte."""
    pools = [random_pool(each) for each in range(TP)]
    hosts = ranks_of(pools[0], 3)
    for pool, host in zip(pools, hosts, strict=True):
        host.backup(pool, pages(1, 2, 3), pages(1, 2, 3))
    assert [hosts[0].intact(page) for page in (1, 2, 3)] == [True, True, True]
    hosts[0].view[2, rank * pools[0].page_bytes] ^= 1 << bit
    assert [hosts[0].intact(page) for page in (1, 2, 3)] == [True, False, True]
    for each, (pool, host) in enumerate(zip(pools, hosts, strict=True)):
        device = pool.page_rows()[5].copy()
        assert host.load(pool, pages(1, 2, 3), pages(4, 5, 6)).tolist() == [True, each != rank, True]
        assert np.array_equal(pool.page_rows()[5], device) == (each == rank)
        assert np.array_equal(pool.page_rows()[[4, 6]], pool.page_rows()[[1, 3]])
    for host in hosts:
        host.close()


def test_what_a_store_brought_is_sealed_for_all_ranks() -> None:
    """Its bytes lie there without digests: no rank loads them before `seal`."""
    pools = [random_pool(rank) for rank in range(TP)]
    hosts = ranks_of(pools[0], 2)
    hosts[0].view[1] = np.concatenate([pool.page_rows()[3] for pool in pools])
    assert not hosts[0].intact(1)
    for pool, host in zip(pools, hosts, strict=True):
        assert host.load(pool, pages(1), pages(2)).tolist() == [False]
    hosts[0].seal(1)
    assert hosts[0].intact(1)
    for pool, host in zip(pools, hosts, strict=True):
        assert host.load(pool, pages(1), pages(2)).tolist() == [True]
        assert np.array_equal(pool.page_rows()[2], pool.page_rows()[3])
        host.close()


def descriptors() -> set[str]:
    """Those of this process that are a host tier's memory."""
    folder = Path("/proc/self/fd")
    return {each.name for each in folder.iterdir() if each.is_symlink() and "manta-host-tier" in os.readlink(each)}


def test_the_memory_is_shared_until_the_last_rank_lets_go_and_no_descriptor_is_left() -> None:
    pool = random_pool(0)
    gc.collect()
    before = descriptors()
    hosts = ranks_of(pool, 4)
    assert len(descriptors() - before) > 0
    memory = hosts[0].memory
    assert Path(memory.path).exists()
    assert memory.page_bytes == 2 * pool.page_bytes
    assert memory.num_bytes == 4096 + 5 * memory.page_bytes  # five pages' digests take one memory page
    hosts[1].view[3, 7] = 9
    for host in hosts:
        host.close()
        host.close()
    with pytest.raises(InvalidConfig):
        HostKVCache(memory, 1)
    assert hosts[0].view[3, 7] == 9  # a thread that still reads sees its memory
    del host, hosts
    gc.collect()
    assert descriptors() <= before  # other tests' engines may have gone meanwhile


def test_a_rank_that_cannot_attach_says_what_to_do() -> None:
    memory = HostMemory(path="/proc/1/fd/99999", num_pages=4, rank_page_bytes=1536, tp=2)
    with pytest.raises(
        InvalidConfig,
        match=r"cache.host_memory_bytes: rank 1 cannot reach the host tier of rank 0 .*must run on one machine",
    ):
        HostKVCache(memory, 1)


def test_the_memory_is_given_when_it_is_touched_or_asked_for() -> None:
    """64 MB: nothing of it is there at first; `commit` has it given, within its time."""
    host = HostKVCache.create(63, rank_page_bytes=1 << 20, tp=1)

    def held_bytes() -> int:
        return os.stat(host.memory.path).st_blocks * 512

    assert held_bytes() == 0
    host.view[5] = 1
    assert held_bytes() == 1 << 20
    assert host.commit(60.0) == host.view.nbytes == 64 << 20
    assert held_bytes() == 64 << 20
    assert host.view[5].all()
    assert not host.view[6].any()
    host.close()


def test_a_pool_and_a_host_page_of_one_shape_are_one_tensor() -> None:
    """What a GPU copies from: the rank's own part of a page, as its pool sees it."""
    pool = random_pool(1)
    hosts = ranks_of(pool, 2)
    hosts[1].backup(pool, pages(4), pages(2))
    assert torch.equal(hosts[1]._tensor(2, 1, pool)[0].view(torch.uint8), pool.buffer[4].view(torch.uint8))
    for host in hosts:
        host.close()
