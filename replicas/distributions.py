"""Distributions: how one engine's steps and hand-offs spread over fixed buckets, beside the sums in engine/stepping.py.

Owns:      the tallies and their bounds. The prefix cache fills the tally of evictions (cache/pages.py).
Never:     imports a metrics client: metrics are made from `EngineTallies` elsewhere, with the same bounds as buckets
           (tests/contract/test_tally_bounds.py). Keeps a value, or takes a lock.
Invariant: a tally's counts sum to the number of its values; a step is counted once in each tally of its phase.
Thread:    the engine thread writes. Any thread may `read`, and may then miss the value being added.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from kvtransfer.types import WriteTimes
from replicas.types import EngineTallies, HandOffReport, TallyCounts


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
        """Add ``times`` equal values."""
        self._counts[bisect_left(self.bounds, value)] += times
        self._total += value * times

    def read(self) -> TallyCounts:
        return TallyCounts(bounds=self.bounds, counts=tuple(self._counts), total=self._total)


SECONDS = (.0001, .0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60)  # fmt: skip
REQUESTS = tuple(float(2**i) for i in range(11))  # to 1,024
TOKENS = (*(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5)), 1e6)
IDLE_S = (.1, .5, 1, 5, 10, 30, 60, 300, 900, 3600, 14400)  # fmt: skip


class Distributions:
    """The distributions of one engine: step times and sizes, and times of hand-offs and writes."""

    def __init__(self) -> None:
        self._prefill = _Steps()
        self._decode = _Steps()
        self._grant_s = Tally(SECONDS)
        self._wait_s = Tally(SECONDS)
        self._post_s = Tally(SECONDS)
        self._wire_s = Tally(SECONDS)

    def step(self, step_s: float, num_requests: int, num_tokens: int, *, is_extend: bool) -> None:
        """Count a step of ``num_requests`` requests and ``num_tokens`` new tokens that took ``step_s`` seconds."""
        steps = self._prefill if is_extend else self._decode
        steps.seconds.add(step_s)
        steps.requests.add(num_requests)
        steps.tokens.add(num_tokens)

    def hand_off(self, report: HandOffReport, *, granted: bool) -> None:
        """Count the decode side of a hand-off that arrived or failed. One that failed before it was ``granted`` row and
        pages counts in ``grant_s``, with the time it waited, and not in ``wait_s``."""
        self._grant_s.add(report.grant_s)
        if granted:
            self._wait_s.add(report.wait_s)

    def writes(self, writes: Iterable[WriteTimes]) -> None:
        """Count the transfer library's own times of writes that succeeded."""
        for write in writes:
            self._post_s.add(write.post_s)
            self._wire_s.add(write.wire_s)

    def read(self, *, evicted_idle_s: TallyCounts) -> EngineTallies:
        return EngineTallies(
            prefill_step_s=self._prefill.seconds.read(),
            decode_step_s=self._decode.seconds.read(),
            prefill_batch_requests=self._prefill.requests.read(),
            decode_batch_requests=self._decode.requests.read(),
            prefill_batch_tokens=self._prefill.tokens.read(),
            decode_batch_tokens=self._decode.tokens.read(),
            evicted_idle_s=evicted_idle_s,
            grant_s=self._grant_s.read(),
            wait_s=self._wait_s.read(),
            post_s=self._post_s.read(),
            wire_s=self._wire_s.read(),
        )


class _Steps:
    """The steps of one phase: duration, requests and tokens."""

    __slots__ = ("requests", "seconds", "tokens")

    def __init__(self) -> None:
        self.seconds = Tally(SECONDS)
        self.requests = Tally(REQUESTS)
        self.tokens = Tally(TOKENS)
