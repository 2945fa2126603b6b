"""How busy each replica is: its last report, what this router sent since, and how old the report is.

Owns:      the last view of each replica; the open requests of this router; a column of numbers made from both.
Never:     guesses other routers' requests; they show in the next report.
Invariant: per replica, requests_since <= in_flight; the counts in a column equal those over its open requests.
Thread:    the router's own (one event loop).
"""

from collections.abc import Iterable, KeysView
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np

from routing.load_estimate import (
    ENDED,
    IN_FLIGHT,
    MAX_REQUESTS,
    NUM_FIELDS,
    POOL_TOKENS,
    QUEUE,
    QUEUE_S,
    RATE,
    RECEIVING,
    REPORT_S,
    REQUESTS,
    SINCE,
    STEP_S,
    TOKENS,
    TOKENS_SINCE,
    UTILIZATION,
    WAITING,
    Eligible,
    eligible_of,
    enqueue,
    load_estimate_of,
    smooth,
)
from routing.types import Floats, LoadEstimate, ReplicaView


@dataclass(frozen=True, slots=True)
class _Open:
    sent_s: float
    uncached_tokens: int  # predicted


@dataclass(slots=True)
class _Replica:
    column: int
    view: ReplicaView
    open: dict[int, _Open] = field(default_factory=dict)  # by decision number, oldest first

    def since(self, time_s: float) -> list[_Open]:
        """Open requests sent at ``time_s`` or later, oldest first."""
        newest_first = reversed(self.open.values())  # the clock never runs back
        return list(takewhile(lambda request: request.sent_s >= time_s, newest_first))[::-1]


class Load:
    """The load of all replicas: a column of numbers for each, whose fields are in load_estimate.py."""

    def __init__(self) -> None:
        self._data: Floats = np.zeros((NUM_FIELDS, 8))  # [field, column]
        self._replicas: dict[str, _Replica] = {}  # in order of ids
        self._free = list(range(8))
        self._where: dict[int, str] = {}  # decision number -> replica
        self._able: list[_Replica] | None = None  # may take a request; until that changes for one of them
        self._columns = np.zeros(0, dtype=np.intp)  # theirs
        self._eligible: Eligible | None = None  # until one of them reports

    @property
    def ids(self) -> KeysView[str]:
        return self._replicas.keys()

    @property
    def views(self) -> tuple[ReplicaView, ...]:
        return tuple(replica.view for replica in self._replicas.values())

    def column(self, replica_id: str) -> int:
        """Return the number that is the replica's until it leaves."""
        return self._replicas[replica_id].column

    def join(self, views: Iterable[ReplicaView]) -> None:
        """Add replicas, each with its first report."""
        for view in views:
            if not self._free:
                size = self._data.shape[1]
                self._data = np.hstack([self._data, np.zeros((NUM_FIELDS, size))])
                self._free = list(range(size, 2 * size))
            replica = _Replica(column=self._free.pop(0), view=view)
            self._data[:, replica.column] = 0.0
            self._data[REPORT_S, replica.column] = float("-inf")
            self._replicas[view.replica_id] = replica
            self.report(view)
        self._replicas = dict(sorted(self._replicas.items()))
        self._able = None

    def forget(self, replica_id: str) -> None:
        """Remove a replica that has left; its open requests end here."""
        replica = self._replicas.pop(replica_id)
        self._free.append(replica.column)
        for number in replica.open:
            del self._where[number]
        self._able = None

    def report(self, view: ReplicaView) -> None:
        """Take a report of a known replica: its health always, its numbers only if they are newer than the last."""
        replica = self._replicas[view.replica_id]
        if view.may_take != replica.view.may_take:
            self._able = None
        replica.view = view
        column = self._data[:, replica.column]
        if view.time_s <= column[REPORT_S]:
            return
        self._eligible = None
        since_s = view.time_s - column[REPORT_S]
        column[RATE] = smooth(column[RATE], view.prefill_tokens_per_s, since_s)
        column[STEP_S] = smooth(column[STEP_S], view.decode_step_s, since_s)
        column[REPORT_S] = column[QUEUE_S] = view.time_s
        column[REQUESTS] = view.num_running + view.num_waiting + view.num_receiving
        column[RECEIVING] = view.num_receiving
        column[WAITING] = view.num_waiting
        column[TOKENS] = column[QUEUE] = view.queued_uncached_tokens
        column[UTILIZATION] = view.pool_utilization
        column[POOL_TOKENS] = view.pool_pages * view.page_size
        column[MAX_REQUESTS] = view.max_running_requests or float("inf")
        column[ENDED] = column[SINCE] = column[TOKENS_SINCE] = 0
        for request in replica.since(view.time_s):
            self._enqueue(replica, request)

    def send(self, replica_id: str, *, number: int, uncached_tokens: int, now_s: float) -> None:
        """Open the request of decision ``number`` at a known replica; ``uncached_tokens`` 0: it receives K/V."""
        replica = self._replicas[replica_id]
        request = replica.open[number] = _Open(now_s, uncached_tokens)
        self._where[number] = replica_id
        self._data[IN_FLIGHT, replica.column] += 1
        if now_s >= self._data[REPORT_S, replica.column]:
            self._enqueue(replica, request)

    def end(self, number: int) -> bool:
        """Close the request of decision ``number``. Return False if it was not open: ended, or its replica left."""
        replica_id = self._where.pop(number, None)
        if replica_id is None:
            return False
        replica = self._replicas[replica_id]
        request = replica.open.pop(number)
        column = self._data[:, replica.column]
        column[IN_FLIGHT] -= 1
        if request.sent_s < column[REPORT_S]:
            column[ENDED] += 1
            return True
        column[SINCE] -= 1
        column[TOKENS_SINCE] -= request.uncached_tokens
        column[RECEIVING] -= request.uncached_tokens == 0
        column[QUEUE] = min(column[QUEUE], column[TOKENS] + column[TOKENS_SINCE])  # an ended request no longer waits
        return True

    def is_open(self, number: int) -> bool:
        """Tell whether the request of decision ``number`` is still open."""
        return number in self._where

    def eligible(self) -> Eligible:
        """Return the replicas that may take a request."""
        if self._able is None:
            self._able = [replica for replica in self._replicas.values() if replica.view.may_take]
            self._columns = np.array([replica.column for replica in self._able], dtype=np.intp)
            self._eligible = None
        if self._eligible is None:
            self._eligible = eligible_of(self._data, [replica.view for replica in self._able], self._columns)
        return self._eligible

    def estimate(self, eligible: Eligible, now_s: float) -> LoadEstimate[Floats]:
        """Estimate the load of ``eligible`` at ``now_s``."""
        return load_estimate_of(self._data, eligible, now_s)

    @property
    def num_open(self) -> int:
        return len(self._where)

    def check(self) -> None:
        """Raises AssertionError if an open request is counted twice or not at all, or a column tells otherwise."""
        held = {number: replica_id for replica_id, r in self._replicas.items() for number in r.open}
        assert held == self._where, f"open by replica {held} differs from open by decision {self._where}"
        assert sum(len(r.open) for r in self._replicas.values()) == len(held), "a request is open at two replicas"
        assert list(self._replicas) == sorted(self._replicas)
        columns = [replica.column for replica in self._replicas.values()]
        assert sorted(columns + self._free) == list(range(self._data.shape[1])), "a column has two owners or none"
        for replica in self._replicas.values():
            column = self._data[:, replica.column]
            since = replica.since(column[REPORT_S])
            assert column[IN_FLIGHT] == len(replica.open)
            assert column[SINCE] == len(since)
            assert column[TOKENS_SINCE] == sum(request.uncached_tokens for request in since)
            assert column[RECEIVING] >= sum(request.uncached_tokens == 0 for request in since)
            assert min(column[ENDED], column[QUEUE]) >= 0

    def _enqueue(self, replica: _Replica, request: _Open) -> None:
        enqueue(self._data, replica.column, sent_s=request.sent_s, uncached_tokens=request.uncached_tokens)
