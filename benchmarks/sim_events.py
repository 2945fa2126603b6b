"""The simulator's time: what happens next, in order.

Owns:      the clock and the queue of things to come.
Invariant: time never runs back; what is due at the same time happens in the order in which it was scheduled, so a run
           is the same each time.
"""

import heapq
from collections.abc import Callable

Action = Callable[[], None]


class Events:
    """A discrete-event queue."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._queue: list[tuple[float, int, Action]] = []
        self._num_scheduled = 0

    def at(self, time_s: float, action: Action) -> None:
        """Do ``action`` at ``time_s``. Raises ValueError if that is in the past."""
        if time_s < self.now_s:
            raise ValueError(f"an event at {time_s} s was wanted, it is {self.now_s} s: schedule it for now or later")
        heapq.heappush(self._queue, (time_s, self._num_scheduled, action))
        self._num_scheduled += 1

    def after(self, delay_s: float, action: Action) -> None:
        """Do ``action`` in ``delay_s`` >= 0."""
        self.at(self.now_s + delay_s, action)

    def run(self, until: Callable[[], bool]) -> None:
        """Do what is due until ``until()`` holds or nothing is left."""
        while self._queue and not until():
            self.now_s, _, action = heapq.heappop(self._queue)
            action()
