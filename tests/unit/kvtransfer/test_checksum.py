"""Digests of pages, and the hashes of K and V that show a KV transfer changed nothing (SPEC J01, J03)."""

import numpy as np
import pytest

from kvtransfer.ports.memory import KvMemory, page_digests
from tests.kv_pools import layout, page_ids, random_pools

WHOLE = ((0, 3072),)


def memory_of(tp: int = 1, seed: int = 0) -> tuple[KvMemory, np.ndarray]:
    pool = random_pools(layout(tp), 5, seed)[0]
    return KvMemory.of_array(layout(tp), pool), pool


def test_every_byte_of_a_page_counts() -> None:
    memory, _ = memory_of()
    assert memory.view is not None
    (before,) = page_digests(memory, page_ids(2), WHOLE)
    for position in range(0, 3072, 61):
        memory.view[2, position] ^= 1
        assert page_digests(memory, page_ids(2), WHOLE)[0] != before, position
        memory.view[2, position] ^= 1
    assert page_digests(memory, page_ids(2), WHOLE)[0] == before


def test_pages_of_a_device_are_read_through_the_reader() -> None:
    memory, pool = memory_of()
    device = KvMemory.of_device(
        layout(), base_address=1 << 40, num_pages=5, device=0, owner=pool, reader=lambda pages: memory.view[pages]
    )
    np.testing.assert_array_equal(
        page_digests(device, page_ids(3, 1), WHOLE), page_digests(memory, page_ids(3, 1), WHOLE)
    )


def test_a_pool_of_another_shape_is_refused_as_the_memory_of_a_layout() -> None:
    with pytest.raises(ValueError, match="a page of this array has 1536 bytes, of the layout 3072"):
        KvMemory.of_array(layout(1), random_pools(layout(2), 5, 0)[0])
    with pytest.raises(ValueError, match="contiguous"):
        KvMemory.of_array(layout(1), random_pools(layout(1), 5, 0)[0][:, :, ::-1])
