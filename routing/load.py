"""How busy each replica is: its last report, what this router sent since, and how old the report is.

Owns:      the last view of each replica; the open requests of this router; a column of numbers made from both.
Never:     guesses at other routers' requests; those show in the next report.
Invariant: per replica, requests_since <= in_flight; the counts in a column equal those over its open requests.
Thread:    the router's own (one event loop).

Between two reports the queue is a fluid: what is sent adds to it, and the replica drains it at its prefill rate.
A report older than FRESH_S fades: each number moves towards the mean over the replicas whose reports are fresh, which
is what one would believe of a replica that one knows nothing of.
"""

from collections.abc import Iterable, KeysView
from dataclasses import dataclass, field, replace
from itertools import takewhile

import numpy as np
import numpy.typing as npt

from routing.standing import Floats, Standing
from routing.types import ReplicaView, RouteQuery

# Reports come every 0.05 to 2 s (a setting), so that one of 2 s still says what is; an older one is late.
FRESH_S = 2.0
# A late report is worth half after 5 s: about the time that a request spends in a replica, so that half of those it
# counted have ended. Twice as fast or slow changes little, since a healthy replica never gets there.
FADE_HALF_S = 5.0
# The engine's rates are means of its last ten steps already; this evens out the odd report and follows within seconds.
RATE_HALF_S = 1.0
# Before any replica has measured: between a small model on a CPU and a large one on a GPU. It is the same for all
# replicas, so that it orders them by tokens; only its ratio to the other terms is a guess.
PRIOR_PREFILL_TOKENS_PER_S = 2_000.0

(IN_FLIGHT, SINCE, TOKENS_SINCE, ENDED, REQUESTS, TOKENS, QUEUE, QUEUE_S, REPORT_S, RATE, STEP_S, UTILIZATION,
 POOL_TOKENS, MAX_REQUESTS, NUM_FIELDS) = range(15)  # fmt: skip


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Eligible:
    """The replicas that may take a request, in order of ids."""

    views: list[ReplicaView]
    columns: npt.NDArray[np.intp]  # [n]
    prefill_tokens_per_s: Floats  # [n] measured or guessed
    decode_step_s: Floats  # [n]
    oldest_s: float  # time of the oldest report among them

    def permitted(self, query: RouteQuery) -> "Eligible":
        """Those that ``query`` permits."""
        if not query.excluded and query.allowed is None:
            return self
        at = [at for at, view in enumerate(self.views) if query.permits(view.replica_id)]
        return replace(
            self,
            views=[self.views[i] for i in at],
            columns=self.columns[at],
            prefill_tokens_per_s=self.prefill_tokens_per_s[at],
            decode_step_s=self.decode_step_s[at],
        )


class Load:
    """Columns of numbers, one a replica; numbers and names of fields are above."""

    def __init__(self) -> None:
        self._data: npt.NDArray[np.float64] = np.zeros((NUM_FIELDS, 8))  # [field, column]
        self._replicas: dict[str, _Replica] = {}  # in order of ids
        self._free = list(range(8))
        self._where: dict[int, str] = {}  # decision number -> replica
        self._eligible: Eligible | None = None  # until a report or a member changes

    @property
    def ids(self) -> KeysView[str]:
        return self._replicas.keys()

    @property
    def views(self) -> tuple[ReplicaView, ...]:
        return tuple(replica.view for replica in self._replicas.values())

    def column(self, replica_id: str) -> int:
        """A small number that is the replica's until it leaves."""
        return self._replicas[replica_id].column

    def join(self, views: Iterable[ReplicaView]) -> None:
        """New replicas, each with its first report."""
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
        self._eligible = None

    def forget(self, replica_id: str) -> None:
        """The replica has left: its open requests end here."""
        replica = self._replicas.pop(replica_id)
        self._free.append(replica.column)
        for number in replica.open:
            del self._where[number]
        self._eligible = None

    def report(self, view: ReplicaView) -> None:
        """A known replica measured itself; numbers no newer than the last ones are not taken, its health is."""
        replica = self._replicas[view.replica_id]
        if view.may_take != replica.view.may_take:
            self._eligible = None
        replica.view = view
        column = self._data[:, replica.column]
        if view.time_s <= column[REPORT_S]:
            return
        self._eligible = None
        since_s = view.time_s - column[REPORT_S]
        column[RATE] = _smooth(column[RATE], view.prefill_tokens_per_s, since_s)
        column[STEP_S] = _smooth(column[STEP_S], view.decode_step_s, since_s)
        column[REPORT_S] = column[QUEUE_S] = view.time_s
        column[REQUESTS] = view.num_running + view.num_waiting
        column[TOKENS] = column[QUEUE] = view.queued_uncached_tokens
        column[UTILIZATION] = view.pool_utilization
        column[POOL_TOKENS] = view.pool_pages * view.page_size
        column[MAX_REQUESTS] = view.max_running_requests or float("inf")
        column[ENDED] = column[SINCE] = column[TOKENS_SINCE] = 0
        for request in replica.since(view.time_s):
            _add(column, request)

    def send(self, replica_id: str, *, number: int, uncached_tokens: int, now_s: float) -> None:
        """Decision ``number`` sends a request to a known replica, with so many tokens to compute."""
        replica = self._replicas[replica_id]
        request = replica.open[number] = _Open(now_s, uncached_tokens)
        self._where[number] = replica_id
        column = self._data[:, replica.column]
        column[IN_FLIGHT] += 1
        if now_s >= column[REPORT_S]:
            _add(column, request)

    def end(self, number: int) -> bool:
        """The request of decision ``number`` ended. False if it was not open: ended before, or its replica left."""
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
        column[QUEUE] = min(column[QUEUE], column[TOKENS] + column[TOKENS_SINCE])  # what ended waits no more
        return True

    def eligible(self) -> Eligible:
        """The replicas that may take a request."""
        if self._eligible is None:
            able = [replica for replica in self._replicas.values() if replica.view.may_take]
            columns = np.array([replica.column for replica in able], dtype=np.intp)
            self._eligible = Eligible(
                views=[replica.view for replica in able],
                columns=columns,
                prefill_tokens_per_s=_measured(self._data[RATE, columns], PRIOR_PREFILL_TOKENS_PER_S),
                decode_step_s=_measured(self._data[STEP_S, columns], 0.0),
                oldest_s=float(self._data[REPORT_S, columns].min(initial=float("inf"))),
            )
        return self._eligible

    def standing(self, eligible: Eligible, now_s: float) -> Standing:
        """What is believed of them at ``now_s``."""
        data = self._data[:, eligible.columns]  # a copy
        busy_until = np.minimum(now_s, data[REPORT_S] + FRESH_S)  # silence beyond that is no sign of work
        drained = data[RATE] * np.maximum(busy_until - data[QUEUE_S], 0.0)
        queue = np.maximum(data[QUEUE] - drained, 0.0)
        requests = data[REQUESTS] + data[SINCE] - data[ENDED]
        utilization = data[UTILIZATION]
        if now_s - eligible.oldest_s > FRESH_S:
            late_s = np.maximum(now_s - FRESH_S - data[REPORT_S], 0.0)
            queue = np.maximum(_fade(queue, late_s), 0.0)
            requests = np.rint(_fade(requests, late_s))
            utilization = _fade(utilization, late_s)
        return Standing(
            views=eligible.views,
            in_flight=data[IN_FLIGHT],
            requests_since=data[SINCE],
            tokens_since=data[TOKENS_SINCE],
            ended_since=data[ENDED],
            num_requests=np.maximum(requests, data[IN_FLIGHT]),
            queued_tokens=queue,
            prefill_tokens_per_s=eligible.prefill_tokens_per_s,
            decode_step_s=eligible.decode_step_s,
            utilization=utilization,
            pool_tokens=data[POOL_TOKENS],
            max_requests=data[MAX_REQUESTS],
        )

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
            assert min(column[ENDED], column[QUEUE]) >= 0


def _add(column: Floats, request: _Open) -> None:
    """``request`` joins the queue, which has drained until then."""
    drained = column[RATE] * max(min(request.sent_s, column[REPORT_S] + FRESH_S) - column[QUEUE_S], 0.0)
    column[QUEUE] = max(column[QUEUE] - drained, 0.0) + request.uncached_tokens
    column[QUEUE_S] = request.sent_s
    column[SINCE] += 1
    column[TOKENS_SINCE] += request.uncached_tokens


def _smooth(old: float, new: float, since_s: float) -> float:
    """An exponential mean over time; 0 stands for not measured, on either side."""
    if old == 0.0 or new == 0.0:
        return old or new
    return new + (old - new) * float(0.5 ** (since_s / RATE_HALF_S))


def _fade(values: Floats, late_s: Floats) -> Floats:
    """``values`` of late reports on their way to the mean of the others; to that of all where all are late."""
    fresh = late_s == 0
    believed = values[fresh].mean() if fresh.any() else values.mean()
    faded: Floats = believed + (values - believed) * np.exp2(-late_s / FADE_HALF_S)
    return faded


def _measured(values: Floats, prior: float) -> Floats:
    """``values`` with those that are 0, not measured, replaced by the mean of the others, or else the prior."""
    known = values > 0
    if known.all():
        return values
    return np.where(known, values, values[known].mean() if known.any() else prior)
