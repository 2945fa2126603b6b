"""Bits: a replica's own, retired when it leaves, used again only once they are clean."""

import numpy as np
import pytest

from routing.page_owners import Bits, positions


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
