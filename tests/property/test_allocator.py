"""The allocator against a model that knows each request's slots."""

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from replicas.errors import PagesExhausted
from replicas.memory.allocator import PagedTokenToKVPoolAllocator

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("extend"), st.integers(0, 3), st.integers(0, 20)),
        st.tuples(st.just("decode"), st.sets(st.integers(0, 3), min_size=1), st.just(0)),
        st.tuples(st.just("free"), st.integers(0, 3), st.just(0)),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(page_size=st.sampled_from([1, 2, 3, 16]), num_pages=st.integers(1, 12), steps=STEPS)
def test_slots_are_never_shared_never_the_dummy_and_never_lost(page_size: int, num_pages: int, steps: list) -> None:
    """SPEC D05-D07, D13: a request of n tokens holds ceil(n / page) pages, its slots run through them in order."""
    allocator = PagedTokenToKVPoolAllocator(num_pages, page_size)
    held: list[list[int]] = [[] for _ in range(4)]

    def last(i: int) -> int:
        return held[i][-1] if held[i] else -1

    for kind, which, length in steps:
        free = allocator.num_free
        try:
            if kind == "extend":
                seq_len = len(held[which]) + length
                held[which] += allocator.alloc_extend(len(held[which]), seq_len, last(which), rid="r").tolist()
            elif kind == "decode":
                seq_lens = np.array([len(held[i]) + 1 for i in sorted(which)], dtype=np.int32)
                slots = allocator.alloc_decode(seq_lens, np.array([last(i) for i in sorted(which)], dtype=np.int32))
                for i, slot in zip(sorted(which), slots.tolist(), strict=True):
                    held[i].append(slot)
            else:
                allocator.free(np.array(held[which][::page_size], dtype=np.int32) // page_size)
                held[which] = []
        except PagesExhausted:
            assert allocator.num_free == free
        allocator.check()
        used = [slot for slots in held for slot in slots]
        assert len(set(used)) == len(used)
        assert all(slot >= page_size for slot in used)
        assert num_pages - allocator.num_free == sum(-(-len(slots) // page_size) for slots in held)
        for slots in held:
            assert all(slot % page_size == i % page_size for i, slot in enumerate(slots))
            assert all(b == a + 1 for i, (a, b) in enumerate(pairwise(slots), start=1) if i % page_size)
