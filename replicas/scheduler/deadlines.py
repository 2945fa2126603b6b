"""Which open requests have run out of time.

Owns:      a heap of the deadlines of open requests. Those that it ended, until they are taken.
Invariant: of a request that has ended nothing is kept; at most as many empty entries as open ones, and `FEW`.
Thread:    scheduler thread only.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass

from replicas.request import Req
from replicas.types import Finish, FinishReason

FEW = 64


@dataclass(slots=True, order=True)
class _Entry:
    deadline_s: float
    number: int
    req: Req | None  # None: it has ended


class Deadlines:
    """On the scheduler's clock."""

    def __init__(self) -> None:
        self._heap: list[_Entry] = []
        self._open: dict[Req, _Entry] = {}
        self._num_added = 0
        self._expired: list[Req] = []

    def add(self, req: Req) -> None:
        if req.deadline_s is not None:
            self._num_added += 1
            self._open[req] = _Entry(req.deadline_s, self._num_added, req)
            heapq.heappush(self._heap, self._open[req])

    def remove(self, req: Req) -> None:
        """``req`` has ended."""
        entry = self._open.pop(req, None)
        if entry is None:
            return
        entry.req = None
        if len(self._heap) > 2 * len(self._open) + FEW:
            self._heap = list(self._open.values())
            heapq.heapify(self._heap)
        while self._heap and self._heap[0].req is None:
            heapq.heappop(self._heap)

    @property
    def next_s(self) -> float | None:
        """When to look again."""
        return self._heap[0].deadline_s if self._heap else None

    def expire(self, now_s: float, finish: Callable[[Req, Finish], None]) -> None:
        """End by ``finish`` every open request whose deadline has passed; it removes each from here."""
        while self._heap and self._heap[0].deadline_s <= now_s:
            req = self._heap[0].req
            assert req is not None, "an ended request comes first"
            message = f"deadline passed after {now_s - req.arrival_s:.1f} s, {req.num_output} tokens made"
            finish(req, Finish(reason=FinishReason.ABORT, message=message, http_status=504))
            self._expired.append(req)
            assert req not in self._open, f"request {req.rid} has ended and is still due"

    def take_expired(self) -> list[Req]:
        """Requests whose deadline passed since the last call; they are finished."""
        expired, self._expired = self._expired, []
        return expired

    def check(self) -> None:
        """Raises AssertionError if an ended request is kept, or more empty entries than allowed."""
        assert all(req.finish is None for req in self._open), "an ended request is kept"
        assert len(self._heap) <= 2 * len(self._open) + FEW, f"{len(self._heap)} entries of {len(self._open)} requests"
