"""PrefixIndex: who holds how much of a prompt, what is evicted, and what a replica that left leaves behind."""

import numpy as np

from routing.index import PrefixIndex, pages_of

A, B = 0, 1
PROMPT = [11, 12, 13, 14]


def index(*, capacity: int = 100, replicas: int = 2) -> PrefixIndex:
    made = PrefixIndex()
    for replica in range(replicas):
        made.join(replica, capacity=capacity)
    return made


def overlap(i: PrefixIndex, prompt: list[int], *replicas: int) -> list[int]:
    found: list[int] = i.overlap(prompt, np.array(replicas)).tolist()
    return found


def test_one_walk_gives_the_overlap_with_every_replica() -> None:
    i = index(replicas=3)
    i.expect(A, PROMPT[:2], number=0)
    i.stored(B, PROMPT)
    assert overlap(i, PROMPT, A, B, 2) == [2, 4, 0]
    i.check()


def test_a_page_behind_a_hole_does_not_count() -> None:
    i = index()
    i.stored(A, PROMPT)
    i.removed(A, [12])
    assert overlap(i, PROMPT, A) == [1]
    assert i.pages(A) == {11, 13, 14}


def test_the_least_recently_used_pages_go_first_and_of_a_prompt_the_deepest() -> None:
    i = index(capacity=4)
    i.expect(A, [1, 2], number=0)
    i.expect(A, [3, 4], number=1)
    i.expect(A, [1, 5], number=2)  # 1 is used again, so that 2 is the oldest
    assert i.pages(A) == {1, 3, 4, 5}
    i.expect(A, [6], number=3)
    assert i.pages(A) == {1, 3, 5, 6}
    i.check()


def test_a_prompt_longer_than_the_pool_keeps_its_beginning() -> None:
    i = index(capacity=2)
    i.expect(A, PROMPT, number=0)
    assert overlap(i, PROMPT, A) == [2]


def test_a_page_that_an_event_removes_is_gone_though_it_was_expected() -> None:
    i = index()
    i.expect(A, PROMPT, number=0)
    i.removed(A, PROMPT[2:])
    assert overlap(i, PROMPT, A) == [2]
    i.check()


def test_confirmed_pages_are_not_evicted_by_predictions() -> None:
    i = index(capacity=4)
    i.stored(A, PROMPT)
    i.expect(A, [21, 22, 23, 24], number=0)
    i.expect(A, [31, 32], number=1)
    assert overlap(i, PROMPT, A) == [4]
    assert i.num_pages(A) == (4, 4)
    i.check()


def test_more_confirmed_pages_than_the_pool_holds_are_refused() -> None:
    i = index(capacity=3)
    assert not i.stored(A, PROMPT)
    assert i.num_pages(A) == (3, 0)
    i.check()


def test_a_replica_that_leaves_is_forgotten_at_once_and_its_bit_is_not_inherited_before_it_is_clean() -> None:
    i = index()
    i.stored(A, PROMPT)
    i.stored(B, PROMPT[:3])
    i.leave(A)
    i.join(A, capacity=100)
    assert overlap(i, PROMPT, A, B) == [0, 3]
    i.check()


def test_writes_clean_up_after_those_that_left() -> None:
    i = index()
    for _ in range(50):  # A leaves and comes back; B's writes do the cleaning
        i.stored(A, PROMPT)
        i.leave(A)
        i.join(A, capacity=100)
        i.stored(B, [1, 2, 3, 4])
        i.check()
    i.stored(B, [1, 2, 3, 4])
    assert len(i) <= 8
    assert i._owners._bits.num_positions <= 6  # bits are used again


def test_a_snapshot_replaces_what_was_confirmed_and_keeps_what_is_expected() -> None:
    i = index()
    i.stored(A, [1, 2])
    i.expect(A, [1, 2, 3, 4], number=0)
    i.replace(A, [1, 3])
    assert i.pages(A) == {1, 3, 4}
    assert i.num_pages(A) == (2, 1)
    i.check()


def test_what_only_an_ended_request_expected_is_dropped() -> None:
    i = index()
    i.expect(A, [1, 2, 3], number=0)
    i.expect(A, [1], number=1)
    i.stored(A, [2])
    i.unexpect(A, [1, 2, 3], number=0)
    assert i.pages(A) == {1, 2}  # 1 is expected by another, 2 is confirmed
    i.check()


def test_a_key_that_stands_twice_in_an_event_goes_once() -> None:
    """Replica A expects 1 in one run and 2 in another, B holds both: so A's entries of them are the same."""
    i = index()
    i.stored(B, [1, 2])
    i.expect(A, [1], number=0)
    i.expect(A, [2], number=1)
    i.removed(A, [1, 2, 1])
    assert (i.num_pages(A), i.pages(A), i.pages(B)) == ((0, 0), set(), {1, 2})
    i.check()


def test_a_thousand_replicas_share_a_first_page() -> None:
    """As on the public conversation trace, where every request has the same first block."""
    i = index(replicas=1_000)
    for replica in range(1_000):
        i.expect(replica, [7, 100 + replica], number=replica)
    found = i.overlap([7, 142], np.arange(1_000))
    assert (found[42], found.sum()) == (2, 1_001)
    i.check()


def test_keys_keep_60_bits() -> None:
    assert pages_of(np.array([2**63 + 5, 6], dtype=np.uint64)) == [5, 6]
