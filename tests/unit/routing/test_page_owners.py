"""The owners of pages: bits of replicas, entries that are bits or a run, stretches of one entry, and the sweep."""

import numpy as np
import pytest

from routing.page_owners import SWEEP_PER_PAGE, Bits, Expected, PageOwners, Run, positions

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


def test_a_page_that_only_one_expects_has_its_run_as_entry_and_a_shared_one_has_bits() -> None:
    made, a, b = owners()
    run = expect(made, a, [1, 2])
    assert (made._entries, a.shared) == ({1: run, 2: run}, {})
    confirm(made, b, [2])
    assert (made._entries, a.shared) == ({1: run, 2: a.bit | b.bit}, {2: run})
    check(made, a, b)


def test_a_page_that_the_other_drops_has_the_run_as_entry_again() -> None:
    made, a, b = owners()
    run = expect(made, a, [1])
    confirm(made, b, [1])
    assert made.drop(b, None, [1]) == 1
    assert (made._entries, a.shared) == ({1: run}, {})
    assert made.drop(a, run, [1]) == 1
    assert len(made) == a.num_pages == 0
    check(made, a, b)


def test_a_confirmed_page_leaves_its_run_shared_or_not() -> None:
    made, a, b = owners()
    run = expect(made, a, [1, 2, 3])
    confirm(made, b, [2])
    made.confirm(run, [1, 2])
    assert (made._entries, a.shared) == ({1: a.bit, 2: a.bit | b.bit, 3: run}, {})
    assert (a.num_pages, a.live(run)) == (1, [3])
    check(made, a, b)


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


def test_overlap_stops_at_each_one_s_first_hole() -> None:
    made, a, b = owners()
    confirm(made, a, [1, 2, 4])
    expect(made, b, [1, 2, 3, 4])
    assert made.overlap([1, 2, 3, 4, 5], np.array([B, A])).tolist() == [4, 2]


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


def test_a_bit_that_is_free_and_in_use_is_found_out() -> None:
    bits = Bits()
    bit = bits.take(0)
    bits._free.append(0)
    with pytest.raises(AssertionError, match="a bit is lost, or free and in use"):
        bits.check({0: bit})


@pytest.mark.parametrize("found", [[], [0], [2, 63, 64, 999], list(range(0, 1000, 7))])
def test_positions_of_few_bits_and_of_many(found: list[int]) -> None:
    """16 and fewer are found one by one, more all at once."""
    assert positions(sum(1 << position for position in found)) == found
