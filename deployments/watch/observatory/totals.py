"""What the last minute's requests tell: how many came, how soon their first token, how much of them was cached.

Owns:      sums by whole second, and the newest times to the first token.
Invariant: at most MOST_TTFTS times and TOTALS_S + 1 seconds are kept, however many requests come.
Thread:    the observatory's event loop.
"""

import math
from collections import Counter, deque

from deployments.watch.observatory.figures import quantile, short

TOTALS_S = 60.0
MOST_TTFTS = 4096  # the quantiles are of the newest so many


class Totals:
    """Each event is told once; seconds are those of ``now_s``, which never goes back."""

    def __init__(self) -> None:
        self._came: Counter[int] = Counter()  # by second
        self._cached: Counter[int] = Counter()  # tokens, by the second of the first token
        self._prompt: Counter[int] = Counter()
        self._ttfts: deque[tuple[float, float]] = deque(maxlen=MOST_TTFTS)  # when it came, after how long

    def came(self, at_s: float) -> None:
        self._came[math.floor(at_s)] += 1

    def first_token(self, at_s: float, ttft_s: float) -> None:
        self._ttfts.append((at_s, ttft_s))

    def reused(self, at_s: float, cached_tokens: int, prompt_tokens: int) -> None:
        self._cached[math.floor(at_s)] += cached_tokens
        self._prompt[math.floor(at_s)] += prompt_tokens

    def of(self, now_s: float) -> dict[str, float | None]:
        """Of the last TOTALS_S; forgets what is older."""
        since_s = now_s - TOTALS_S
        for sums in (self._came, self._cached, self._prompt):
            for second in [second for second in sums if second <= since_s]:
                del sums[second]
        ttfts = sorted(ttft_s for at_s, ttft_s in self._ttfts if at_s > since_s)
        p50, p90 = quantile(ttfts, 0.5), quantile(ttfts, 0.9)
        tokens = self._prompt.total()
        return {
            "requests_per_s": short(self._came.total() / TOTALS_S),
            "ttft_p50_s": None if p50 is None else short(p50),
            "ttft_p90_s": None if p90 is None else short(p90),
            "reuse_ratio": short(self._cached.total() / tokens) if tokens else None,
        }

    def check(self) -> None:
        """Raises AssertionError if tokens were reused in a second without a prompt."""
        assert self._cached.keys() == self._prompt.keys()
        assert all(0 <= self._cached[second] <= self._prompt[second] for second in self._prompt)
