"""Parametrisation over many dimensions: every pair of values meets; with MANTA_WHOLE_MATRICES=1 the whole product runs.

Most faults that depend on several settings depend on two of them (Kuhn et al. 2004, doi:10.1109/TSE.2004.24).
"""

import itertools
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest

ALL = os.environ.get("MANTA_WHOLE_MATRICES") == "1"

Dimension = Mapping[str, Any] | Iterable[Any]  # id -> value, or values that are their own ids


def cases(**dimensions: Dimension) -> pytest.MarkDecorator:
    """Parametrise a test over ``dimensions``: name of the argument -> its values. Rows are sorted by the first one."""
    named = {name: _named(values) for name, values in dimensions.items()}
    wanted = itertools.product(*named.values()) if ALL else pairwise([list(values) for values in named.values()])
    rows = [
        pytest.param(*(values[each] for values, each in zip(named.values(), row, strict=True)), id="-".join(row))
        for row in wanted
    ]
    return pytest.mark.parametrize(list(dimensions), rows)


def _named(values: Dimension) -> dict[str, Any]:
    return dict(values) if isinstance(values, Mapping) else {str(value): value for value in values}


def pairwise(dimensions: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    """Rows in which every two values of different dimensions meet at least once; the same rows every time.

    Greedy: each row begins with a pair that has not met yet, and every other dimension gets the value that adds most
    new pairs, of equals the one used least. About as many rows as the product of the two longest dimensions.
    """
    sizes = [range(len(values)) for values in dimensions]
    if len(sizes) < 2:
        return [tuple(row) for row in itertools.product(*dimensions)]
    left = {
        ((a, i), (b, j)) for a, b in itertools.combinations(range(len(sizes)), 2) for i in sizes[a] for j in sizes[b]
    }
    rows, used = [], Counter[tuple[int, int]]()
    while left:
        row = dict(min(left))
        for at in sorted(set(range(len(sizes))) - set(row), key=lambda at: -len(sizes[at])):
            row[at] = max(sizes[at], key=lambda i: (len(left & _pairs({**row, at: i}, of=at)), -used[at, i]))
        used.update(row.items())
        left -= {pair for at in row for pair in _pairs(row, of=at)}
        rows.append(tuple(row[at] for at in range(len(sizes))))
    return [tuple(values[i] for values, i in zip(dimensions, row, strict=True)) for row in sorted(rows)]


def _pairs(row: Mapping[int, int], *, of: int) -> set[tuple[tuple[int, int], tuple[int, int]]]:
    """The pairs of dimension ``of`` with the others of ``row``."""
    return {tuple(sorted([(at, row[at]), (of, row[of])])) for at in row if at != of}  # type: ignore[misc]
