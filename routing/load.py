"""Estimates how busy each replica is now: its last report, what this router sent since, and how old the report is.

Owns:      the last view of each replica; the open requests of this router; a column of numbers made from both; how much
           an old report still counts, and an old rate.
Never:     guesses other routers' requests; they show in the next report.
Invariant: per replica, requests_since <= in_flight; the counts in a column equal those over its open requests. An
           estimate holds copies, one element a replica in order of ids; nothing changes it afterwards.
Thread:    the router's own (one event loop).

Between two reports the queue is a fluid: a request that is sent adds to it, and the replica drains it at its prefill
rate. A report older than FRESH_S fades: each number moves towards the mean over the replicas whose reports are fresh,
which is the best estimate for a replica of which nothing is known.

A rate (prompt tokens a second, a decode step) is as old as the work that it was measured on: a replica without work
reports the same one again and again. From RATE_FRESH_S on it fades likewise towards those that were measured lately.
What a replica reports after it was silent was measured before or across the silence: it counts once it changes.
"""

from collections import Counter
from collections.abc import Collection, Iterable, KeysView
from dataclasses import dataclass, field, replace
from itertools import takewhile

import numpy as np
import numpy.typing as npt

from routing.types import Floats, Ints, LoadEstimate, ReplicaView, RouteQuery

# Reports come every 0.05 to 2 s (a setting), so a report 2 s old is still current; an older one is late.
FRESH_S = 2.0
# A late report is worth half after 5 s: about the time that a request spends in a replica, so that half of those it
# counted have ended. Twice as fast or slow changes little, since a healthy replica never gets there.
FADE_HALF_S = 5.0
# The engine's rates are means of its last ten steps already; this evens out the odd report and follows within seconds.
RATE_HALF_S = 1.0
# A rate that was not measured anew for so long fades, by half in as long again. A replica that is believed to be slow
# gets no work that would show otherwise, so it must not be believed for ever; one that is slow shows it with its next
# request.
RATE_FRESH_S = 5.0
RATE_FADE_HALF_S = 5.0
# On a machine that does other work a step's time varies by up to so much from one to the next (docs/capacity.md). It is
# believed until rates have been told anew some tens of times, and counts two standard deviations.
STEP_SPREAD, SPREAD_SMOOTHING, DEVIATIONS = 0.4, 0.03, 2.0
NEWEST_WEIGHS, STEPS_IN_MEAN = 0.2, 9  # in a rate (stepping.py), which therefore varies as the plain mean of so many
# Before any replica has measured, those that left included: between a small model on a CPU and a large one on a GPU.
# It is the same for all replicas, so that it orders them by tokens; only its ratio to the other terms is a guess.
PRIOR_PREFILL_TOKENS_PER_S = 2_000.0
# Before a replica has loaded anything: memory copied page by page, and a disk that is not the fastest. The first load
# replaces them, and there is one, unless they make it slower than computing.
ASSUMED_HOST_BYTES_PER_S, ASSUMED_STORE_BYTES_PER_S, ASSUMED_STORE_LATENCY_S = 2e9, 2e8, 0.005
ASSUMED_ADAPTER_LOAD_S = 0.1  # likewise: 20 MB of a disk, and their digest
(IN_FLIGHT, SINCE, TOKENS_SINCE, ENDED, REQUESTS, RECEIVING, WAITING, TOKENS, QUEUE, QUEUE_S, REPORT_S, RATE, STEP_S,
 UTILIZATION, POOL_TOKENS, FREE_TOKENS, MAX_REQUESTS, RATE_TOKENS, LATE, RATE_AT_S, STEP_AT_S, NUM_RATES, HOST_S,
 STORE_S, LATENCY_S, NUM_FIELDS) = range(26)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Eligible:
    """The replicas that may take a request, in order of ids, and what changes only with a report."""

    views: list[ReplicaView]
    columns: npt.NDArray[np.intp]  # [n]
    prefill_tokens_per_s: Floats  # [n] measured or guessed
    rate_error: Floats  # [n] by which share that may be wrong
    rate_step_tokens: Floats  # [n] prompt tokens of the steps on which that was measured, or their mean elsewhere
    decode_step_s: Floats  # [n]
    decode_token_s: Floats  # [n] between two tokens of a request
    fixed_step_s: Floats  # [n] of any step, however few its tokens: a decode step measures it, elsewhere their mean
    loading: Floats  # [3, n] HOST_S, STORE_S, LATENCY_S
    oldest_s: float  # time of the oldest report among them

    def permitted(self, query: RouteQuery) -> "Eligible":
        """Return those that ``query`` permits."""
        if not query.excluded and query.allowed is None:
            return self
        return self.those([at for at, view in enumerate(self.views) if query.permits(view.replica_id)])

    def those(self, at: list[int]) -> "Eligible":
        """Return those at the positions ``at``."""
        return replace(
            self,
            views=[self.views[i] for i in at],
            columns=self.columns[at],
            prefill_tokens_per_s=self.prefill_tokens_per_s[at],
            rate_error=self.rate_error[at],
            rate_step_tokens=self.rate_step_tokens[at],
            decode_step_s=self.decode_step_s[at],
            decode_token_s=self.decode_token_s[at],
            fixed_step_s=self.fixed_step_s[at],
            loading=self.loading[:, at],
        )


def eligible_of(data: Floats, views: list[ReplicaView], columns: npt.NDArray[np.intp], priors: Floats) -> Eligible:
    """Return the replicas of ``views`` [n] with their rates, from ``columns`` [n] of ``data`` [field, column].

    ``priors`` [field]: what is believed of a rate that none of them has measured; of NUM_RATES: by which share one
    may be wrong that was measured once.
    """
    step_s = _believed(data, STEP_S, STEP_AT_S, columns, priors[STEP_S])
    return Eligible(
        views=views,
        columns=columns,
        prefill_tokens_per_s=_believed(data, RATE, RATE_AT_S, columns, priors[RATE]),
        rate_error=priors[NUM_RATES] / np.sqrt(np.clip(data[NUM_RATES, columns], 1, STEPS_IN_MEAN)),
        rate_step_tokens=_measured(data[RATE_TOKENS, columns], priors[RATE_TOKENS]),
        decode_step_s=step_s,
        decode_token_s=step_s / np.array([view.tokens_per_step for view in views]),
        fixed_step_s=step_s,
        loading=data[HOST_S:, columns],
        oldest_s=float(data[REPORT_S, columns].min(initial=float("inf"))),
    )


def load_estimate_of(data: Floats, eligible: Eligible, now_s: float) -> LoadEstimate[Floats]:
    """Estimate the load of ``eligible`` at ``now_s`` from all columns ``data`` [field, column]."""
    own = data[:HOST_S].take(eligible.columns, axis=1)  # [field, n] a copy
    late = now_s - eligible.oldest_s > FRESH_S
    busy_until = np.minimum(now_s, own[REPORT_S] + FRESH_S) if late else now_s  # silence is no sign of work
    drained = np.maximum(busy_until - own[QUEUE_S], 0.0)
    drained *= own[RATE]
    queue = np.maximum(own[QUEUE] - drained, 0.0)
    requests = own[REQUESTS] + own[SINCE]
    requests -= own[ENDED]
    busy = np.maximum(requests - own[RECEIVING], 0.0)
    # requests that waited at the report or were sent since, times the share of their tokens that is still queued
    waiting = own[WAITING] + own[SINCE]
    waiting *= queue / np.maximum(own[TOKENS] + own[TOKENS_SINCE], 1.0)
    utilization = own[UTILIZATION]
    if late:
        late_s = np.maximum(now_s - FRESH_S - own[REPORT_S], 0.0)
        queue = np.maximum(_fade(queue, late_s), 0.0)
        requests = np.rint(_fade(requests, late_s))
        busy = _fade(busy, late_s)
        waiting = _fade(waiting, late_s)
        utilization = _fade(utilization, late_s)
    requests = np.maximum(requests, own[IN_FLIGHT])
    return LoadEstimate(
        in_flight=own[IN_FLIGHT],
        requests_since=own[SINCE],
        tokens_since=own[TOKENS_SINCE],
        ended_since=own[ENDED],
        num_requests=requests,
        num_busy=busy,
        num_waiting=np.minimum(waiting, requests),
        queued_tokens=queue,
        late_tokens=np.minimum(own[LATE], queue),  # what goes before them drains first
        prefill_tokens_per_s=eligible.prefill_tokens_per_s,
        rate_error=eligible.rate_error,
        share=np.ones(len(queue)),
        rate_step_tokens=eligible.rate_step_tokens,
        decode_step_s=eligible.decode_step_s,
        decode_token_s=eligible.decode_token_s,
        fixed_step_s=eligible.fixed_step_s,
        utilization=utilization,
        pool_tokens=own[POOL_TOKENS],
        free_tokens=np.maximum(own[FREE_TOKENS] - own[TOKENS_SINCE], 0.0),
        max_requests=own[MAX_REQUESTS],
    )


def enqueue(data: Floats, at: int, *, sent_s: float, uncached_tokens: int) -> None:
    """Add a request to the queue of column ``at``, drained until ``sent_s``."""
    queue, queue_s, report_s, rate = data[QUEUE : RATE + 1, at].tolist()
    drained = rate * max(min(sent_s, report_s + FRESH_S) - queue_s, 0.0)
    data[QUEUE, at] = max(queue - drained, 0.0) + uncached_tokens
    data[QUEUE_S, at] = sent_s
    data[SINCE, at] += 1
    data[TOKENS_SINCE, at] += uncached_tokens
    data[RECEIVING, at] += uncached_tokens == 0  # a replica that computes a prompt computes at least its last token


def _loading(view: ReplicaView) -> tuple[float, float, float]:
    """Return seconds: a token from the host, a token from the store, before the store's bytes; measured or assumed."""
    token_bytes = view.page_bytes / view.page_size
    return (
        view.host_s_per_token or token_bytes / ASSUMED_HOST_BYTES_PER_S,
        view.store_s_per_token or token_bytes / ASSUMED_STORE_BYTES_PER_S,
        view.store_latency_s or ASSUMED_STORE_LATENCY_S,
    )


def _rates(view: ReplicaView) -> tuple[float, float]:
    """Return what ``view`` tells for the fields RATE and STEP_S."""
    return view.prefill_tokens_per_s, view.decode_step_s


def smooth(old: float, new: float, since_s: float) -> float:
    """Return an exponential mean over time; 0 stands for not measured, on either side."""
    if old == 0.0 or new == 0.0:
        return old or new
    return new + (old - new) * float(0.5 ** (since_s / RATE_HALF_S))


def _fade(values: Floats, late_s: Floats, half_s: float = FADE_HALF_S) -> Floats:
    """Move ``values`` of late reports towards the mean of the others, or of all if all are late."""
    fresh = late_s == 0
    believed = values[fresh].mean() if fresh.any() else values.mean()
    faded: Floats = believed + (values - believed) * np.exp2(-late_s / half_s)
    return faded


def _believed(data: Floats, rate: int, at: int, columns: npt.NDArray[np.intp], prior: float) -> Floats:
    """Return the field ``rate`` of ``columns``, last measured at the times in field ``at``, as far as it is believed
    at the last report."""
    values = _measured(data[rate, columns], prior)
    idle_s = data[REPORT_S, columns] - data[at, columns] - RATE_FRESH_S
    return _fade(values, np.maximum(idle_s, 0.0), RATE_FADE_HALF_S) if (idle_s > 0.0).any() else values


def _measured(values: Floats, prior: float) -> Floats:
    """Replace the ``values`` that are 0 (not measured) by the mean of the others, or by the prior."""
    known = values > 0
    if known.all():
        return values
    return np.where(known, values, values[known].mean() if known.any() else prior)


Tenant = tuple[str, float]  # its name and weight


@dataclass(slots=True)
class _Open:
    sent_s: float
    uncached_tokens: int  # predicted
    tenant: str
    begun: bool = False  # its first token has come
    leaves: bool = False  # its replica was asked to give it back: those behind it need not wait for it
    adapter: str = ""


@dataclass(slots=True)
class _Replica:
    column: int
    view: ReplicaView
    open: dict[int, _Open] = field(default_factory=dict)  # by decision number, oldest first
    doubted: tuple[float, ...] = (0.0, 0.0)  # rates that it reported after it was silent
    coming: Counter[str] = field(default_factory=Counter)  # adapters of ``open``, which it holds or loads

    def since(self, time_s: float) -> list[_Open]:
        """Open requests sent at ``time_s`` or later, oldest first."""
        newest_first = reversed(self.open.values())  # the clock never runs back
        return list(takewhile(lambda request: request.sent_s >= time_s, newest_first))[::-1]


def _keep_ahead(load: LoadEstimate[Floats], at: npt.NDArray[np.intp], replica: _Replica, number: int) -> None:
    """Leave in the estimate of ``replica``, at position ``at``, what goes before its request ``number`` in order of
    arrival.

    What the replica reports counts a prefix that several wait for once for each. What this router predicted does not,
    but lacks the requests of other routers, which are taken as average ones before ours. The lower one counts.
    """
    ours = {other: each for other, each in replica.open.items() if not each.begun}
    gone = [each for other, each in ours.items() if other >= number or each.leaves]
    gone_tokens = sum(each.uncached_tokens for each in gone)
    queued, num_others = load.queued_tokens[at], np.maximum(load.num_waiting[at] - len(ours), 0.0)
    others_tokens = num_others * queued / np.maximum(load.num_waiting[at], 1.0)
    ahead_tokens = sum(each.uncached_tokens for each in ours.values()) - gone_tokens + others_tokens
    load.queued_tokens[at] = np.maximum(np.minimum(queued - gone_tokens, ahead_tokens), 0.0)
    load.late_tokens[at] = np.minimum(load.late_tokens[at], load.queued_tokens[at])
    load.num_requests[at] = np.maximum(load.num_requests[at] - len(gone), 0.0)
    load.num_busy[at] = np.maximum(load.num_busy[at] - sum(each.uncached_tokens > 0 for each in gone), 0.0)
    load.num_waiting[at] = np.maximum(load.num_waiting[at] - len(gone), 0.0)


class Load:
    """The load of all replicas: a column of numbers for each, whose fields are the constants above."""

    def __init__(self) -> None:
        self._data: Floats = np.zeros((NUM_FIELDS, 8))  # [field, column]
        self._replicas: dict[str, _Replica] = {}  # in order of ids
        self._free = list(range(8))
        self._priors: Floats = np.zeros(NUM_FIELDS)  # [field] rates, as the last replica that left had them
        self._priors[RATE] = PRIOR_PREFILL_TOKENS_PER_S
        self._priors[NUM_RATES] = DEVIATIONS * STEP_SPREAD
        self._where: dict[int, str] = {}  # decision number -> replica
        self._waiting: dict[str, Floats] = {}  # by tenant, [column]: uncached tokens that have not begun; some are > 0
        self._weights: dict[str, float] = {}  # of those tenants, as last heard
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
                self._waiting = {of: np.hstack([row, np.zeros(size)]) for of, row in self._waiting.items()}
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
        for rate in (RATE, STEP_S, RATE_TOKENS):  # those that stay may not have measured any
            self._priors[rate] = self._data[rate, replica.column] or self._priors[rate]
        for number, request in replica.open.items():
            self._begins(replica, request)
            del self._where[number]
        self._able = None

    def report(self, view: ReplicaView) -> None:
        """Take a report of a known replica: its health always, its numbers only if they are newer than the last."""
        replica = self._replicas[view.replica_id]
        if view.may_take != replica.view.may_take:
            self._able = None
        before, replica.view = replica.view, view
        column = self._data[:, replica.column]
        if view.time_s <= column[REPORT_S]:
            return
        self._eligible = None
        since_s = view.time_s - column[REPORT_S]
        if not before.healthy:
            replica.doubted = _rates(view)
        for at, (told, last, doubted) in enumerate(zip(_rates(view), _rates(before), replica.doubted, strict=True)):
            if told == doubted:
                continue
            if told != last or column[RATE + at] == 0.0:
                column[RATE_AT_S + at] = view.time_s
                if at == 0:
                    self._note_spread(column, told, last)
            column[RATE + at] = smooth(column[RATE + at], told, since_s)
        requests = view.num_running + view.num_waiting + view.num_receiving
        tokens = view.queued_uncached_tokens
        # a slice at a time, in the order of the fields: a field at a time takes twice as long
        column[SINCE:RATE] = (
            0, 0, 0, requests, view.num_receiving, view.num_waiting, tokens, tokens, view.time_s, view.time_s,
        )  # fmt: skip
        column[UTILIZATION:RATE_AT_S] = (
            view.pool_utilization,
            view.pool_pages * view.page_size,
            view.free_pages * view.page_size,
            view.max_running_requests or float("inf"),
            view.rate_step_tokens,
            view.late_uncached_tokens,
        )
        column[HOST_S:NUM_FIELDS] = _loading(view)
        for request in replica.since(view.time_s):
            self._enqueue(replica, request)

    def send(
        self, replica_id: str, *, number: int, uncached_tokens: int, now_s: float, adapter: str = "",
        tenant: Tenant = ("", 1.0),
    ) -> None:  # fmt: skip
        """Open the request of decision ``number`` at a known replica; ``uncached_tokens`` 0: it receives K/V."""
        replica = self._replicas[replica_id]
        request = replica.open[number] = _Open(now_s, uncached_tokens, adapter=adapter, tenant=tenant[0])
        if uncached_tokens:
            self._waiting.setdefault(tenant[0], np.zeros(self._data.shape[1]))[replica.column] += uncached_tokens
            self._weights[tenant[0]] = tenant[1]
        if adapter:
            replica.coming[adapter] += 1
        self._where[number] = replica_id
        self._data[IN_FLIGHT, replica.column] += 1
        if now_s >= self._data[REPORT_S, replica.column]:
            self._enqueue(replica, request)

    def end(self, number: int, *, begun: bool = True) -> bool:
        """Close the request of decision ``number``. Return False if it was not open: ended, or its replica left.

        Args: begun: its first token has come; else what was queued for it is queued no longer.
        """
        replica_id = self._where.pop(number, None)
        if replica_id is None:
            return False
        replica = self._replicas[replica_id]
        request = replica.open.pop(number)
        self._begins(replica, request)
        if request.adapter:
            replica.coming -= Counter([request.adapter])
        column = self._data[:, replica.column]
        column[IN_FLIGHT] -= 1
        if request.sent_s < column[REPORT_S]:
            column[ENDED] += 1
            if not begun:
                self._dequeue(replica, request)
            return True
        column[SINCE] -= 1
        column[TOKENS_SINCE] -= request.uncached_tokens
        column[RECEIVING] -= request.uncached_tokens == 0
        column[QUEUE] = min(column[QUEUE], column[TOKENS] + column[TOKENS_SINCE])  # an ended request no longer waits
        return True

    def is_open(self, number: int) -> bool:
        """Tell whether the request of decision ``number`` is still open."""
        return number in self._where

    def may_take(self, replica_ids: Iterable[str]) -> bool:
        """Tell whether all of these known replicas may take a request."""
        return all(self._replicas[each].view.may_take for each in replica_ids)

    def note(self, number: int, *, begun: bool | None = None, leaves: bool | None = None) -> None:
        """Note of a request, if it is still open, whether its first token has come, or whether it is about to leave."""
        if number in self._where:
            replica = self._replicas[self._where[number]]
            request = replica.open[number]
            if begun:
                self._begins(replica, request)
            request.leaves = request.leaves if leaves is None else leaves

    def eligible(self, *, also: Collection[str] = ()) -> Eligible:
        """Return the replicas that may take a request, and those of ``also``."""
        if not self.may_take(also):
            able = [each for name, each in self._replicas.items() if each.view.may_take or name in also]
            columns = np.array([replica.column for replica in able], dtype=np.intp)
            return eligible_of(self._data, [replica.view for replica in able], columns, self._priors)
        if self._able is None:
            self._able = [replica for replica in self._replicas.values() if replica.view.may_take]
            self._columns = np.array([replica.column for replica in self._able], dtype=np.intp)
            self._eligible = None
        if self._eligible is None:
            views = [replica.view for replica in self._able]
            self._eligible = eligible_of(self._data, views, self._columns, self._priors)
        return self._eligible

    def estimate(self, eligible: Eligible, now_s: float, *, before: Iterable[int] = ()) -> LoadEstimate[Floats]:
        """Estimate the load of ``eligible`` at ``now_s``; ``before``: as if these open requests, and what was sent to
        their replicas after them or leaves, were not there."""
        load = load_estimate_of(self._data, eligible, now_s)
        for number in before:
            replica = self._replicas[self._where[number]]
            _keep_ahead(load, np.flatnonzero(eligible.columns == replica.column), replica, number)
        return load

    def shared(
        self, load: LoadEstimate[Floats], eligible: Eligible, tenant: Tenant, own_tokens: Ints, waits: Iterable[int]
    ) -> None:
        """Lower ``load`` to what goes before ``own_tokens`` [n] of ``tenant`` at each of ``eligible``: a replica serves
        tenants by shares. What other routers have sent is taken to be shared among tenants as what this one has sent.

        Args: waits: decisions of the request, which waits.
        """
        name, weight = tenant
        rows = {of: row[eligible.columns] for of, row in self._waiting.items() if of != name}
        if not rows:
            return
        own = self._waiting[name][eligible.columns] if name in self._waiting else np.zeros(len(own_tokens))
        for number in waits:
            replica = self._replicas[self._where[number]]
            request = replica.open[number]
            own[eligible.columns == replica.column] -= 0 if request.begun else request.uncached_tokens
        by_weight, others = (own + own_tokens) / weight, np.sum(list(rows.values()), axis=0)
        before = own + sum(np.minimum(row, by_weight * self._weights[of]) for of, row in rows.items())
        before *= np.maximum(load.queued_tokens / np.maximum(own + others, 1.0), 1.0)
        at = np.flatnonzero((others > 0) & (before < load.queued_tokens))
        load.share[at] = before[at] / load.queued_tokens[at]
        load.queued_tokens[at] = before[at]
        load.num_waiting[at] *= load.share[at]
        at = np.flatnonzero(others)
        load.late_tokens[at] = np.minimum(np.minimum(load.late_tokens, own), load.queued_tokens)[at]

    def adapter_s(self, eligible: Eligible, adapter: str) -> Floats:
        """Return how long each of ``eligible`` takes to load ``adapter``: 0 where it is held, or an open request has it
        loaded, and without one."""
        views = eligible.views
        if not adapter:
            return np.zeros(len(views))
        there = [adapter in view.adapters or adapter in self._replicas[view.replica_id].coming for view in views]
        load_s = _measured(np.array([view.adapter_load_s for view in views]), ASSUMED_ADAPTER_LOAD_S)
        return np.where(there, 0.0, load_s)

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
        assert self._waiting.keys() == self._weights.keys()
        assert all(row.any() for row in self._waiting.values()), "a tenant is kept of which nothing waits"
        for replica in self._replicas.values():
            column = self._data[:, replica.column]
            since = replica.since(column[REPORT_S])
            assert column[IN_FLIGHT] == len(replica.open)
            assert column[SINCE] == len(since)
            assert column[TOKENS_SINCE] == sum(request.uncached_tokens for request in since)
            assert column[RECEIVING] >= sum(request.uncached_tokens == 0 for request in since)
            assert min(column[ENDED], column[QUEUE]) >= 0
            waiting = Counter[str]()
            for each in replica.open.values():
                waiting[each.tenant] += 0 if each.begun else each.uncached_tokens
            counted = Counter({tenant: row[replica.column] for tenant, row in self._waiting.items()})
            assert counted == waiting, "a tenant's tokens are counted twice or not at all"
            assert replica.coming == Counter(each.adapter for each in replica.open.values() if each.adapter)

    def _begins(self, replica: _Replica, request: _Open) -> None:
        """Note that ``request`` waits no more."""
        if request.uncached_tokens and not request.begun:
            row = self._waiting[request.tenant]
            row[replica.column] -= request.uncached_tokens
            if not row.any():
                del self._waiting[request.tenant], self._weights[request.tenant]
        request.begun = True

    def _note_spread(self, column: Floats, told: float, last: float) -> None:
        """Note that a replica's rate was ``last`` and is ``told``: how far steps differ shows in how far rates move."""
        column[NUM_RATES] += 1
        if told and last:
            moved = DEVIATIONS * (told / last - 1.0) / max(NEWEST_WEIGHS, 1.0 / column[NUM_RATES])
            spread = min(abs(moved), DEVIATIONS)
            before = self._priors[NUM_RATES] ** 2
            self._priors[NUM_RATES] = (before + SPREAD_SMOOTHING * (spread**2 - before)) ** 0.5

    def _dequeue(self, replica: _Replica, request: _Open) -> None:
        """Take an ended request that the last report counts out of the queue. How much of it was computed is not known;
        what was sent after it still waits."""
        column = self._data[:, replica.column]
        after = sum(other.uncached_tokens for other in replica.since(request.sent_s))
        column[QUEUE] = max(column[QUEUE] - request.uncached_tokens, min(column[QUEUE], after))

    def _enqueue(self, replica: _Replica, request: _Open) -> None:
        enqueue(self._data, replica.column, sent_s=request.sent_s, uncached_tokens=request.uncached_tokens)
