"""Estimates the load of each replica now, from columns of numbers that its reports and our requests have filled.

Owns:      the fields of a column; how much an old report still counts. No state: load.py keeps the columns.
Never:     changes a column, except in `enqueue`.
Invariant: an estimate holds copies, one element a replica in order of ids; nothing changes it afterwards.
Thread:    any.

Between two reports the queue is a fluid: a request that is sent adds to it, and the replica drains it at its prefill
rate. A report older than FRESH_S fades: each number moves towards the mean over the replicas whose reports are fresh,
which is the best estimate for a replica of which nothing is known.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from routing.types import Floats, LoadEstimate, ReplicaView, RouteQuery

# Reports come every 0.05 to 2 s (a setting), so a report 2 s old is still current; an older one is late.
FRESH_S = 2.0
# A late report is worth half after 5 s: about the time that a request spends in a replica, so that half of those it
# counted have ended. Twice as fast or slow changes little, since a healthy replica never gets there.
FADE_HALF_S = 5.0
# The engine's rates are means of its last ten steps already; this evens out the odd report and follows within seconds.
RATE_HALF_S = 1.0
# Before any replica has measured: between a small model on a CPU and a large one on a GPU. It is the same for all
# replicas, so that it orders them by tokens; only its ratio to the other terms is a guess.
PRIOR_PREFILL_TOKENS_PER_S = 2_000.0

(IN_FLIGHT, SINCE, TOKENS_SINCE, ENDED, REQUESTS, RECEIVING, WAITING, TOKENS, QUEUE, QUEUE_S, REPORT_S, RATE, STEP_S,
 UTILIZATION, POOL_TOKENS, MAX_REQUESTS, NUM_FIELDS) = range(17)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Eligible:
    """The replicas that may take a request, in order of ids, and what changes only with a report."""

    views: list[ReplicaView]
    columns: npt.NDArray[np.intp]  # [n]
    prefill_tokens_per_s: Floats  # [n] measured or guessed
    decode_step_s: Floats  # [n]
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
            decode_step_s=self.decode_step_s[at],
        )


def eligible_of(data: Floats, views: list[ReplicaView], columns: npt.NDArray[np.intp]) -> Eligible:
    """Return the replicas of ``views`` [n] with their rates, from ``columns`` [n] of ``data`` [field, column]."""
    return Eligible(
        views=views,
        columns=columns,
        prefill_tokens_per_s=_measured(data[RATE, columns], PRIOR_PREFILL_TOKENS_PER_S),
        decode_step_s=_measured(data[STEP_S, columns], 0.0),
        oldest_s=float(data[REPORT_S, columns].min(initial=float("inf"))),
    )


def load_estimate_of(data: Floats, eligible: Eligible, now_s: float) -> LoadEstimate[Floats]:
    """Estimate the load of ``eligible`` at ``now_s`` from all columns ``data`` [field, column]."""
    own = data.take(eligible.columns, axis=1)  # [field, n] a copy
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
        prefill_tokens_per_s=eligible.prefill_tokens_per_s,
        decode_step_s=eligible.decode_step_s,
        utilization=utilization,
        pool_tokens=own[POOL_TOKENS],
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


def smooth(old: float, new: float, since_s: float) -> float:
    """Return an exponential mean over time; 0 stands for not measured, on either side."""
    if old == 0.0 or new == 0.0:
        return old or new
    return new + (old - new) * float(0.5 ** (since_s / RATE_HALF_S))


def _fade(values: Floats, late_s: Floats) -> Floats:
    """Move ``values`` of late reports towards the mean of the others, or of all if all are late."""
    fresh = late_s == 0
    believed = values[fresh].mean() if fresh.any() else values.mean()
    faded: Floats = believed + (values - believed) * np.exp2(-late_s / FADE_HALF_S)
    return faded


def _measured(values: Floats, prior: float) -> Floats:
    """Replace the ``values`` that are 0 (not measured) by the mean of the others, or by the prior."""
    known = values > 0
    if known.all():
        return values
    return np.where(known, values, values[known].mean() if known.any() else prior)
