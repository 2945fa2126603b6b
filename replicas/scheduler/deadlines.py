"""Requests that the scheduler ends by the clock: their deadline has passed, or they can never start.

Owns:      a heap of the deadlines of open requests; how long the heads of the queues have been kept out.
Never:     ends a request itself: the scheduler does. Frees a page, or judges when a peer lets go of one: a peer may
           never do so.
Invariant: no ended request is kept. The heap has at most as many empty entries as open ones, and `FEW`. A head is
           reported as starved only while no request holds memory; otherwise an end may free enough.
Thread:    scheduler thread only.
"""

import heapq
from collections.abc import Sequence

from replicas.cache.kv import KvCache
from replicas.errors import Fault
from replicas.request import Req
from replicas.types import Finish, FinishReason

FEW = 64
# A live peer lets go within milliseconds of the request; the death of one is proven within its heartbeat (3 s) and the
# grace after it (1 s). A peer that has not let go by then may never do so.
PATIENCE_S = 5.0


Entry = tuple[float, int]  # of the heap: a deadline, and how many were added before


class Deadlines:
    """The deadlines of open requests, earliest first, on the scheduler's clock."""

    def __init__(self) -> None:
        self._heap: list[Entry] = []
        self._open: dict[Req, Entry] = {}
        self._by_entry: dict[Entry, Req] = {}
        self._num_added = 0
        self._starved_s: dict[Req, float] = {}  # when a head of a queue was first found without memory

    def add(self, req: Req) -> None:
        if (ends_by_s := req.ends_by_s) is not None:
            self._num_added += 1
            entry = self._open[req] = ends_by_s, self._num_added
            self._by_entry[entry] = req
            heapq.heappush(self._heap, entry)

    def remove(self, req: Req) -> None:
        """Forget ``req``, which has ended."""
        entry = self._open.pop(req, None)
        if entry is None:
            return
        del self._by_entry[entry]
        if len(self._heap) > 2 * len(self._open) + FEW:
            self._heap = list(self._by_entry)
            heapq.heapify(self._heap)
        while self._heap and self._heap[0] not in self._by_entry:
            heapq.heappop(self._heap)

    @property
    def next_s(self) -> float | None:
        """The earliest deadline, if there is one."""
        return self._heap[0][0] if self._heap else None

    def due(self, now_s: float) -> Req | None:
        """Return the open request whose deadline passed first, if one has; end and `remove` it before the next call."""
        return self._by_entry[self._heap[0]] if self._heap and self._heap[0][0] <= now_s else None

    def starved(self, heads: Sequence[Req], now_s: float) -> list[Req]:
        """Return those of ``heads``, heads of queues which found no memory while no request holds any, that have waited
        for PATIENCE_S: requests behind them that fit can then go on."""
        self._starved_s = {head: self._starved_s.get(head, now_s) for head in heads}
        return [head for head in heads if now_s - self._starved_s[head] >= PATIENCE_S]

    def check(self) -> None:
        """Raise AssertionError if an ended request is kept, or more empty entries than allowed."""
        assert all(req.finish is None for req in self._open), "an ended request is kept"
        assert len(self._heap) <= 2 * len(self._open) + FEW, f"{len(self._heap)} entries of {len(self._open)} requests"


def deadline_passed(req: Req, now_s: float) -> Finish:
    message = f"deadline passed after {now_s - req.stamps.arrival_s:.1f} s, {req.num_output} tokens made"
    return Finish(reason=FinishReason.ABORT, message=message, fault=Fault.TIMED_OUT)


def cannot_start(head: Req, kv: KvCache) -> Finish | None:
    """Tell why ``head`` can never be admitted: the pages that it needs stay in quarantine. None if none are there."""
    pool = kv.store.stats()
    detained = pool.quarantined_pages + pool.protected_pages  # no request holds a lock, so a peer reads what is locked
    if not detained:
        return None
    message = (
        f"{head.num_tokens} tokens need more than the {kv.store.available_tokens()} of {pool.total_tokens} that are "
        f"available: {detained} pages are in quarantine until the peer of a failed hand-off lets go of them; try "
        "again elsewhere, or later"
    )
    return Finish(reason=FinishReason.ERROR, message=message, fault=Fault.UNAVAILABLE, retry_as="overloaded")
