"""The rows that tests take of a product."""

import itertools

import pytest

from tests.pairwise import pairwise


@pytest.mark.parametrize(
    ("sizes", "most_rows"), [((3,), 3), ((2, 3), 6), ((2, 2, 2), 6), ((5, 2, 3, 2, 2), 16), ((8, 5, 4, 3, 2, 2), 42)]
)
def test_every_two_values_of_different_dimensions_meet_in_few_rows(sizes: tuple[int, ...], most_rows: int) -> None:
    dimensions = [[(at, i) for i in range(size)] for at, size in enumerate(sizes)]
    rows = pairwise(dimensions)
    met = {pair for row in rows for pair in itertools.combinations(row, 2)}
    assert met == {pair for two in itertools.combinations(dimensions, 2) for pair in itertools.product(*two)}
    assert len(rows) <= most_rows
    assert rows == sorted(rows) == pairwise(dimensions)
