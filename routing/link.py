"""How fast K/V pages go from one replica to another, as the hand-offs so far have shown.

Owns:      the rates of the last hand-offs that were large enough to tell.
Never:     measures; the receivers do, and dispatch tells.
Thread:    the router's own.
"""

from collections import deque

# Until the first hand-off: a 10 Gbit/s network. One host by shared memory makes 2 to 4e9 (notes on NIXL).
ASSUMED_BYTES_PER_S = 1e9
TELLING_BYTES = 1 << 20  # of smaller ones the time is that of messages, not of bytes
KEPT = 32
# Pages also wait for the sender to compute them: a slow hand-off says little of the link. Nor does the fastest: the
# time runs from when its first pages were seen, so that what had come by then counts as bytes and not as time.
BELIEVED = 0.75


class Link:
    """One rate for all pairs of one application."""

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=KEPT)

    @property
    def measured(self) -> bool:
        return bool(self._rates)

    @property
    def bytes_per_s(self) -> float:
        """Of the last KEPT, the rate that BELIEVED of them do not exceed."""
        if not self._rates:
            return ASSUMED_BYTES_PER_S
        return sorted(self._rates)[int(BELIEVED * (len(self._rates) - 1))]

    def record(self, num_bytes: int, transfer_s: float) -> None:
        """A hand-off went well: so many bytes from its first page to its last."""
        if num_bytes >= TELLING_BYTES and transfer_s > 0:
            self._rates.append(num_bytes / transfer_s)
