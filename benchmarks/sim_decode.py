"""The decode batch of a simulated replica: everyone gets a token a step, and steps slow with the batch.

Owns:      who is decoding, and when each ends.
Invariant: requests end in the order of the tokens they had left when they joined; the batch's own count of steps
           (fractions included) advances at one a ``step_s``.
"""

import heapq
from collections.abc import Callable

from benchmarks.sim_events import Events


class SimDecode:
    """Steps are not simulated one by one: between two changes of the batch their duration is constant."""

    def __init__(self, events: Events, *, base_s: float, per_request_s: float) -> None:
        self._events = events
        self._base_s = base_s
        self._per_request_s = per_request_s
        self._ends: list[tuple[float, int, Callable[[], None]]] = []  # by the step at which it ends, order of joining
        self._joined = 0
        self._steps = 0.0  # since the start
        self._steps_at_s = 0.0  # when ``_steps`` was right
        self._version = 0  # of the batch; an end that was scheduled for another is void

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def step_s(self) -> float:
        """Duration of a step of the batch as it is; 0 while it is empty."""
        return self._base_s + self._per_request_s * len(self._ends) if self._ends else 0.0

    def join(self, num_steps: int, ended: Callable[[], None]) -> None:
        """Decode ``num_steps`` >= 1 tokens, then call ``ended``."""
        self._advance()
        heapq.heappush(self._ends, (self._steps + num_steps, self._joined, ended))
        self._joined += 1
        self._schedule()

    def _advance(self) -> None:
        if self._ends and self.step_s > 0:
            self._steps += (self._events.now_s - self._steps_at_s) / self.step_s
        self._steps_at_s = self._events.now_s

    def _schedule(self) -> None:
        self._version += 1
        if self._ends:
            version = self._version
            left = max(0.0, self._ends[0][0] - self._steps)
            self._events.after(left * self.step_s, lambda: self._end(version))

    def _end(self, version: int) -> None:
        if version != self._version:
            return
        self._steps, _, ended = heapq.heappop(self._ends)
        self._steps_at_s = self._events.now_s
        self._schedule()
        ended()
