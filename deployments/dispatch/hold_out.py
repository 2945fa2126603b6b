"""Prefill replicas whose hand-offs failed: held out of choice for a while, so that not every request pays for it.

Owns:      until when each is held out, and why.
Never:     judges replicas by anything else: those that die or hang are the fleet's (fleet.py). What is wrong may lie
           between a replica and a single peer, and neither of them is unhealthy then.
Invariant: one hand-off that succeeds clears the name; a hold grows only by failures after it.
Thread:    the router's event loop.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from replicas.types import HandOffReport

FIRST_S = 2.0
MOST_S = 60.0


@dataclass(frozen=True, slots=True)
class _Hold:
    until_s: float
    length_s: float
    reason: str


class HoldOut:
    """Told of every hand-off's report."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._holds: dict[str, _Hold] = {}  # by prefill replica

    def take(self, prefill_id: str, report: HandOffReport) -> None:
        """Of a hand-off from ``prefill_id``."""
        now_s, before = self._clock(), self._holds.get(prefill_id)
        if report.transferred:
            self._holds.pop(prefill_id, None)
        elif before is None or before.until_s <= now_s:  # those that were under way together fail together, once
            length_s = FIRST_S if before is None else min(2 * before.length_s, MOST_S)
            self._holds[prefill_id] = _Hold(now_s + length_s, length_s, report.reason or "no reason was told")

    def now(self) -> Mapping[str, str]:
        """Replicas that are held out, and why."""
        now_s = self._clock()
        self._holds = {each: hold for each, hold in self._holds.items() if now_s < hold.until_s + 2 * MOST_S}
        return {
            each: f"a hand-off from it failed ({hold.reason}); not asked for another {hold.until_s - now_s:.1f} s"
            for each, hold in self._holds.items()
            if now_s < hold.until_s
        }
