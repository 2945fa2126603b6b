"""Rates per second from counters that only grow, over the last seconds; and numbers rounded as the state shows them.

Owns:      the recent samples of each source.
Invariant: no rate is negative: a counter that went back belongs to a restarted source, and its samples begin anew.
"""

import math
from collections import deque
from collections.abc import Collection, Sequence

DIGITS = 3


def short(value: float) -> float:
    """Round to three significant digits; what JSON cannot express is 0."""
    if value == 0 or not math.isfinite(value):
        return 0.0
    places = DIGITS - 1 - math.floor(math.log10(abs(value)))
    return round(value, places)


def quantile(ranked: Sequence[float], share: float) -> float | None:
    """Return the value that ``share`` of ``ranked``, in order, does not exceed (nearest rank); None without values."""
    if not ranked:
        return None
    return ranked[max(math.ceil(share * len(ranked)) - 1, 0)]


WINDOW_S = 5.0
Counters = tuple[int, ...]


class Rates:
    """The rates of all sources, by name; each source has the same counters."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._samples: dict[str, deque[tuple[float, Counters]]] = {}

    def add(self, source: str, now_s: float, counters: Counters) -> None:
        """Add a sample read at ``now_s``; one older than the last is ignored."""
        samples = self._samples.setdefault(source, deque())
        if samples and now_s <= samples[-1][0]:
            return
        if samples and any(new < old for new, old in zip(counters, samples[-1][1], strict=True)):
            samples.clear()
        samples.append((now_s, counters))
        while len(samples) > 2 and now_s - samples[1][0] >= self._window_s:
            samples.popleft()

    def of(self, source: str) -> tuple[float, ...] | None:
        """Return the rates per second; None before the second sample."""
        samples = self._samples.get(source, deque())
        if len(samples) < 2 or samples[-1][0] <= samples[0][0]:
            return None
        (first_s, first), (last_s, last) = samples[0], samples[-1]
        return tuple((new - old) / (last_s - first_s) for new, old in zip(last, first, strict=True))

    def keep(self, sources: Collection[str]) -> None:
        """Forget all sources but these."""
        for gone in self._samples.keys() - set(sources):
            del self._samples[gone]

    def check(self) -> None:
        """Raises AssertionError if samples are out of order, or a counter goes back within them."""
        for samples in self._samples.values():
            times = [time_s for time_s, _ in samples]
            assert times == sorted(times)
            for (_, old), (_, new) in zip(samples, list(samples)[1:], strict=False):
                assert all(a <= b for a, b in zip(old, new, strict=True))
