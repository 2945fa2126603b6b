"""Which open requests have run out of time.

Owns:      a heap of deadlines; ended requests leave it when they come up. Those that it ended, until they are taken.
Thread:    scheduler thread only.
"""

import heapq
from collections.abc import Callable

from replicas.request import Req
from replicas.types import Finish, FinishReason


class Deadlines:
    """On the scheduler's clock."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Req]] = []
        self._expired: list[Req] = []

    def add(self, req: Req) -> None:
        if req.deadline_s is not None:
            heapq.heappush(self._heap, (req.deadline_s, id(req), req))

    @property
    def next_s(self) -> float | None:
        """When to look again; an ended request may still be the reason."""
        return self._heap[0][0] if self._heap else None

    def expire(self, now_s: float, finish: Callable[[Req, Finish], None]) -> None:
        """End by ``finish`` every unfinished request whose deadline has passed."""
        while self._heap and (self._heap[0][0] <= now_s or self._heap[0][2].finish is not None):
            _, _, req = heapq.heappop(self._heap)
            if req.finish is None:
                message = f"deadline passed after {now_s - req.arrival_s:.1f} s, {req.num_output} tokens made"
                finish(req, Finish(reason=FinishReason.ABORT, message=message, http_status=504))
                self._expired.append(req)

    def take_expired(self) -> list[Req]:
        """Requests whose deadline passed since the last call; they are finished."""
        expired, self._expired = self._expired, []
        return expired
