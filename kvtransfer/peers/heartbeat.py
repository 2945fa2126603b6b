"""When to give a sign of life on a connection, and when its other end has been silent for too long. No clock inside.

`Heartbeat`: between engines, both ways. `Silence`: of a rank's port towards its desk, where a false alarm costs more.
"""


class Heartbeat:
    """Of one connection; anything that is heard counts."""

    def __init__(self, *, period_s: float, misses: int, now: float) -> None:
        self.period_s = period_s
        self.limit_s = period_s * misses
        self.heard_s = now
        self.sent_s = now

    def heard(self, now: float) -> None:
        self.heard_s = now

    def take_due(self, now: float) -> bool:
        """Whether a sign of life is due; the caller gives it."""
        due = now >= self.sent_s + self.period_s
        if due:
            self.sent_s = now
        return due

    def silent(self, now: float) -> bool:
        return now >= self.heard_s + self.limit_s

    @property
    def next_s(self) -> float:
        return min(self.sent_s + self.period_s, self.heard_s + self.limit_s)


class Silence:
    """How long somebody said nothing while one listened.

    A stretch in which nobody looked counts as one period at most: then the listener itself was held up, or the whole
    machine, and what the other had to say may still be on its way.
    """

    def __init__(self, *, period_s: float, limit_s: float, now: float) -> None:
        """``period_s``: how often the other should say something."""
        self.limit_s = limit_s
        self._period_s = period_s
        self._looked_s = now
        self._silent_s = 0.0

    def looked(self, now: float, *, heard: bool) -> bool:
        """Whether it has been too long."""
        self._silent_s = 0.0 if heard else self._silent_s + min(now - self._looked_s, self._period_s)
        self._looked_s = now
        return self._silent_s >= self.limit_s
