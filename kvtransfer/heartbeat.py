"""When to give a sign of life on a connection, and when its other end has been silent for too long. No clock inside."""


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
