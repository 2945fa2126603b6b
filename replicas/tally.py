"""Counts values by bucket: what a histogram metric is made of, without a metrics client.

Never:     keeps a value; takes a lock.
Invariant: the counts sum to the number of values.
Thread:    one writes. Another may `read` at the same time and may then miss the value being added.
"""

from bisect import bisect_left
from collections.abc import Sequence

from replicas.types import TallyCounts


class Tally:
    """A distribution over fixed buckets; about 0.2 us a value."""

    __slots__ = ("_counts", "_total", "bounds")

    def __init__(self, bounds: Sequence[float]) -> None:
        """``bounds``: upper bounds, rising, inclusive; above the last there is one more bucket."""
        assert list(bounds) == sorted(set(bounds)), f"bounds must rise: {bounds}"
        self.bounds = tuple(bounds)
        self._counts = [0] * (len(self.bounds) + 1)
        self._total = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self.bounds, value)] += 1
        self._total += value

    def add_many(self, value: float, times: int) -> None:
        """``times`` equal values."""
        self._counts[bisect_left(self.bounds, value)] += times
        self._total += value * times

    def read(self) -> TallyCounts:
        return TallyCounts(bounds=self.bounds, counts=tuple(self._counts), total=self._total)
