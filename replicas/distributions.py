"""The distributions that one engine keeps of what it does, beside the sums in stats.py.

Owns:      the tallies and their bounds. Those of evictions are the prefix cache's (cache/pages.py), which fills them.
Never:     imports a metrics client: metrics are made of `EngineTallies` elsewhere, with the same bounds as buckets
           (tests/contract/test_tally_bounds.py).
Invariant: steps are counted once in each tally of their phase.
Thread:    the engine's; any may `read`, and may then miss the value being added.
"""

from collections.abc import Iterable

from kvtransfer.types import WriteTimes
from replicas.tally import Tally
from replicas.types import EngineTallies, HandOffReport, TallyCounts

SECONDS = (.0001, .0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60)  # fmt: skip
REQUESTS = tuple(float(2**i) for i in range(11))  # to 1,024
TOKENS = tuple(float(4**i) for i in range(11))  # to 1,048,576
IDLE_S = (.1, .5, 1, 5, 10, 30, 60, 300, 900, 3600, 14400)  # fmt: skip


class Distributions:
    """Of one engine."""

    def __init__(self) -> None:
        self._prefill = _Steps()
        self._decode = _Steps()
        self._grant_s = Tally(SECONDS)
        self._wait_s = Tally(SECONDS)
        self._post_s = Tally(SECONDS)
        self._wire_s = Tally(SECONDS)

    def step(self, step_s: float, num_requests: int, num_tokens: int, *, is_extend: bool) -> None:
        """A step of ``num_requests`` requests and ``num_tokens`` new tokens took ``step_s`` seconds."""
        steps = self._prefill if is_extend else self._decode
        steps.seconds.add(step_s)
        steps.requests.add(num_requests)
        steps.tokens.add(num_tokens)

    def hand_off(self, report: HandOffReport, *, granted: bool) -> None:
        """The decode side of a hand-off has come, or failed. One that gave up before it was ``granted`` row and pages
        counts in ``grant_s``, with the time for which it waited, and not in ``wait_s``."""
        self._grant_s.add(report.grant_s)
        if granted:
            self._wait_s.add(report.wait_s)

    def writes(self, writes: Iterable[WriteTimes]) -> None:
        """The transfer library's own times of writes that have ended well."""
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
    """Of one phase."""

    __slots__ = ("requests", "seconds", "tokens")

    def __init__(self) -> None:
        self.seconds = Tally(SECONDS)
        self.requests = Tally(REQUESTS)
        self.tokens = Tally(TOKENS)
