"""Digests of pages, and the hashes of K and V that show a KV transfer changed nothing (SPEC J01, J03)."""

import numpy as np
import pytest

from kvtransfer.layout import head_slices
from kvtransfer.ports.memory import KvMemory, destination_spans, page_digests, source_spans
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


def test_exchanged_pages_have_exchanged_digests() -> None:
    memory, _ = memory_of()
    one, other = page_digests(memory, page_ids(1, 2), WHOLE)
    np.testing.assert_array_equal(page_digests(memory, page_ids(2, 1), WHOLE), [other, one])
    assert one != other


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_third_of_the_heads_has_one_digest_on_both_sides_of_unequal_ranks(rank: int) -> None:
    whole, third = layout(1), layout(3)
    pools = random_pools(third, 5, seed=7)
    joined = np.concatenate(pools, axis=3)
    there, here = KvMemory.of_array(third, pools[rank]), KvMemory.of_array(whole, joined)
    slices = head_slices(third, rank, whole, 0)
    sent = page_digests(there, page_ids(4, 1), source_spans(slices))
    got = page_digests(here, page_ids(4, 1), destination_spans(slices))
    np.testing.assert_array_equal(sent, got)


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
