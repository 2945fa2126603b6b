"""The owners of pages: bits, stretches of one entry, the sweep, and that the order of use does not grow without bound.

What the index answers is held against a dictionary (tests/property/test_index_property.py).
"""

import numpy as np
import pytest

from routing.index import PrefixIndex, pages_of
from routing.page_owners import SLACK, SWEEP_PER_PAGE, Bits, Expected, PageOwners, Run, positions

A, B = 0, 1


def owners() -> tuple[PageOwners, Expected, Expected]:
    made = PageOwners()
    return made, made.join(A), made.join(B)


def confirm(made: PageOwners, mine: Expected, pages: list[int]) -> None:
    for entry, _, part in made.stretches(mine, pages):
        made.hold(mine, part, entry, None)


def expect(made: PageOwners, mine: Expected, pages: list[int], number: int = 0) -> Run:
    run = Run(owner=mine, number=number)
    for entry, _, part in made.stretches(mine, pages):
        made.hold(mine, part, entry, run)
    mine.use([run])
    return run


def check(made: PageOwners, *both: Expected) -> None:
    made.check(dict(enumerate(both)))


def test_stretches_end_where_the_entry_or_the_own_run_changes() -> None:
    """A: one run of 1 to 3, another of 4; B shares 3 and 4, so that these have one entry; nobody has 5 and 6."""
    made, a, b = owners()
    first, second = expect(made, a, [1, 2, 3]), expect(made, a, [4], 1)
    confirm(made, b, [3, 4])
    shared = a.bit | b.bit
    assert list(made.stretches(a, [1, 3, 4, 5, 6])) == [
        (first, first, [1]), (shared, first, [3]), (shared, second, [4]), (None, None, [5, 6]),
    ]  # fmt: skip
    assert next(made.stretches(a, [1, 2, 3, 4])) == (first, first, [1, 2, 3])  # a run as a whole, shared or not
    assert [(run, part) for _, run, part in made.stretches(b, [1, 3, 4])] == [(None, [1]), (None, [3, 4])]


def test_neighbours_share_the_object_that_is_their_entry() -> None:
    made, a, b = owners()
    confirm(made, a, [1, 2, 3])
    confirm(made, b, [1, 2, 3])
    assert len({id(entry) for entry in made._entries.values()}) == 1


def test_one_that_left_is_swept_out_a_few_pages_with_each_written_and_its_bit_then_used_again() -> None:
    made, a, b = owners()
    confirm(made, a, list(range(10)))
    confirm(made, b, [0, 1])
    made.leave(a)
    assert made.overlap([0, 1, 2], np.array([B])).tolist() == [2]
    assert len(made) == 10
    made.clean(1)
    assert len(made) == 10 - (SWEEP_PER_PAGE - 2)  # of the first four pages two are B's
    made.clean(2)
    assert (made._entries, made._bits.retired) == ({0: b.bit, 1: b.bit}, 0)
    assert made.join(A).bit == a.bit


def test_one_that_leaves_during_a_sweep_waits_for_the_next() -> None:
    made, a, b = owners()
    confirm(made, a, list(range(10)))
    confirm(made, b, list(range(10)))
    made.leave(a)
    made.clean(1)
    made.leave(b)
    made.clean(3)
    assert made._bits.retired == b.bit
    assert made._entries == dict.fromkeys(range(4), b.bit)  # they were cleaned before B left
    made.clean(2)
    assert (made._bits.retired, len(made)) == (0, 0)


def test_a_bit_is_given_out_again_only_after_it_was_recycled() -> None:
    bits = Bits()
    first = bits.take(0)
    bits.retire(first)
    second = bits.take(0)
    assert (first, second, bits.present, bits.retired) == (1, 2, 2, 1)
    bits.recycle(first)
    assert (bits.take(1), bits.retired, bits.num_positions) == (first, 0, 2)
    bits.check({0: second, 1: first})


def test_values_by_position_are_found_by_replica() -> None:
    """Also of replica 40, for which there was no room at first."""
    bits = Bits()
    taken = {replica: bits.take(replica) for replica in (3, 40, 0)}
    values = np.array([10, 11, 12], dtype=np.int64)  # by position, in the order in which they came
    assert bits.of_replicas(values, np.array([0, 3, 40])).tolist() == [12, 10, 11]
    bits.check(taken)


@pytest.mark.parametrize("found", [[], [0], [2, 63, 64, 999], list(range(0, 1000, 7))])
def test_positions_of_few_bits_and_of_many(found: list[int]) -> None:
    """16 and fewer are found one by one, more all at once."""
    assert positions(sum(1 << position for position in found)) == found


def index(*, capacity: int = 10_000) -> tuple[PrefixIndex, Expected]:
    made = PrefixIndex()
    made.join(A, capacity=capacity)
    return made, made._replicas[A].expected


def runs(expected: Expected) -> list[list[int]]:
    """Live pages of each run, oldest run first."""
    return [expected.live(run) for run in expected.runs()]


def num_listed(expected: Expected) -> int:
    return sum(len(run.pages) for run in expected.runs())


def test_a_prefix_used_over_and_over_does_not_grow_the_order_of_use() -> None:
    made, expected = index()
    for number in range(10_000):
        made.expect(A, list(range(1, 51)), number=number)
        assert len(expected._order) <= 2 + SLACK
    assert runs(expected) == [list(range(1, 51))]
    made.check()


def test_runs_that_events_confirmed_do_not_grow_the_order_of_use() -> None:
    made, expected = index(capacity=100)
    for number in range(1_000):
        pages = [2 * number, 2 * number + 1]
        made.expect(A, pages, number=number)
        made.stored(A, pages)
        made.removed(A, pages)
        assert len(expected._order) <= 2 + SLACK
    assert (runs(expected), made.num_pages(A)) == ([], (0, 0))


def test_pages_that_left_runs_which_live_on_do_not_stay_listed() -> None:
    """Of each run of ten, nine are confirmed and removed: 400 live pages, 4,000 listed without a collection."""
    made, expected = index()
    for number in range(400):
        pages = list(range(10 * number, 10 * number + 10))
        made.expect(A, pages, number=number)
        made.removed(A, pages[:3] + pages[4:])
        assert num_listed(expected) <= 2 * (expected.num_pages + 9) + SLACK  # nine were live when it was used
    assert runs(expected) == [[10 * number + 3] for number in range(400)]
    made.check()


def test_what_is_used_of_a_run_s_beginning_is_cut_off_and_the_rest_stays_whole() -> None:
    made, expected = index()
    made.expect(A, [1, 2, 3, 4], number=0)
    made.expect(A, [1, 2, 5], number=1)
    assert [run.pages for run in expected.runs()] == [[3, 4], [5], [1, 2]]
    assert all(run.whole for run in expected.runs())


def test_parts_of_one_run_that_others_share_differently_become_one_run_again() -> None:
    """B holds 1, C holds 1 and 2: three entries, yet one run of A before and after."""
    made, expected = index()
    for replica, pages in ((1, [1]), (2, [1, 2])):
        made.join(replica, capacity=10)
        made.stored(replica, pages)
    for number in range(3):
        made.expect(A, [1, 2, 3], number=number)
        assert [run.pages for run in expected.runs()] == [[1, 2, 3]]
    made.check()


def test_writes_clean_up_after_those_that_left() -> None:
    i, _ = index(capacity=100)
    i.join(B, capacity=100)
    for _ in range(50):  # A leaves and comes back; B's writes do the cleaning
        i.stored(A, [11, 12, 13, 14])
        i.leave(A)
        i.join(A, capacity=100)
        i.stored(B, [1, 2, 3, 4])
        i.check()
    i.stored(B, [1, 2, 3, 4])
    assert len(i) <= 8
    assert i._owners._bits.num_positions <= 6  # bits are used again


def test_keys_keep_60_bits() -> None:
    assert pages_of(np.array([2**63 + 5, 6], dtype=np.uint64)) == [5, 6]
