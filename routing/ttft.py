"""Estimates the time to a request's first token at each candidate: tokens before it and its own, over the prefill rate.

Pure. Each term is in seconds and stands in the decision. No constant here is fitted; each comes from how the engine
schedules (replicas/scheduler/scheduler.py).

`behind_s` is what ours costs others. If a candidate computes a prefix anew that another holds, every request behind
ours there waits that much longer. How many will be behind: in a queue served in turn, a request leaves on average as
many behind as it found when it came (level crossing), so the requests waiting now stand for them. Without a queue it
is 0. What must be computed wherever the request goes is not counted: that would send long
prompts where few wait and short ones where many do, which orders requests by size, not by where they are cached.
That has a bound: no request is sent, for the sake of others, behind a queue longer than it may wait (`bounded`), so a
hot prefix is computed again at the latest when its queue is that long.
Source: Kleinrock 1975, "Queueing Systems" I, section 5.3 (arrivals find what departures leave).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from routing.types import Candidate, Floats, Ints, LoadEstimate, ReplicaView, Terms

# The next step takes new prompts in: a request waits only for the decode step in progress, on average half of it. Where
# that is a step with prompts, what is left of them stands in the queue; what decode rows cost is in the prefill rate.
DECODE_STEPS_WAITED = 0.5
# The length assumed for an answer that may be longer: the real one is not known before, and a chat without a limit may
# use the whole context.
OUTPUT_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidates(Sequence[Candidate]):
    """The candidates of one decision as arrays, in order of ids: a thousand of them cost little more than eight.

    A policy reads the arrays and a decision keeps them; a `Candidate` is made when it is asked for.
    """

    views: Sequence[ReplicaView]  # [n]
    load: LoadEstimate[Floats]
    overlap_tokens: Ints  # [n]
    terms: Terms[Floats, Ints]

    def __len__(self) -> int:
        return len(self.views)

    @overload
    def __getitem__(self, index: int) -> Candidate: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Candidate]: ...
    def __getitem__(self, index: int | slice) -> Candidate | Sequence[Candidate]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        return Candidate(
            view=self.views[index],
            load=self.load.at(index),
            overlap_tokens=int(self.overlap_tokens[index]),
            terms=self.terms.at(index),
        )

    def replica_id(self, index: int) -> str:
        return self.views[index].replica_id


def estimate(
    load: LoadEstimate[Floats], overlap_tokens: Ints, *, num_tokens: int, max_new_tokens: int
) -> Terms[Floats, Ints]:
    """Return the terms of a prompt of ``num_tokens``, of which each candidate holds ``overlap_tokens`` [n]."""
    own_tokens = num_tokens - overlap_tokens
    queue_s = load.queued_tokens / load.prefill_tokens_per_s
    own_s = own_tokens / load.prefill_tokens_per_s
    decode_s = DECODE_STEPS_WAITED * load.decode_step_s * np.minimum(load.num_requests, 1.0)
    output_tokens = min(max_new_tokens, OUTPUT_TOKENS)
    pressure_s = _pressure_s(load, own_tokens + output_tokens, output_tokens)
    return Terms(
        queued_tokens=load.queued_tokens,
        own_tokens=own_tokens,
        prefill_tokens_per_s=load.prefill_tokens_per_s,
        queue_s=queue_s,
        own_s=own_s,
        decode_s=decode_s,
        pressure_s=pressure_s,
        ttft_s=queue_s + own_s + decode_s + pressure_s,
        behind_s=_behind_s(load, own_s),
    )


def bounded(cost_s: Floats, ttft_s: Floats, wait_s: Floats, max_wait_s: float) -> Floats:
    """Return what to compare, of any shape: the cost where the wait is allowed, or ``ttft_s`` if it is nowhere."""
    allowed = wait_s <= max_wait_s
    if allowed.all():
        return cost_s
    return np.where(allowed, cost_s, np.inf) if allowed.any() else ttft_s


def _behind_s(load: LoadEstimate[Floats], own_s: Floats) -> Floats:
    """Return the prefill time beyond the shortest at any candidate, times the requests that wait there."""
    more_s: Floats = own_s - own_s.min()
    return more_s * load.num_waiting


def _pressure_s(load: LoadEstimate[Floats], need_tokens: Ints, output_tokens: int) -> Floats:
    """Return the wait for running requests to end, where pages or places among the running are short.

    A running request takes about ``output_tokens`` decode steps (ours stands for all), so all that is held now comes
    free evenly in this time: a request that lacks the share x of what is held waits the share x of the time. Requests
    queued before ours take their pages and places first, and give them back as evenly. No request needs more than the
    pool, since the engine cuts outputs to it: if nothing is held, there is no wait. The wait for pages is never longer
    than that time; the wait for a place takes as many turns as there are requests before ours.
    """
    before = load.utilization * load.pool_tokens + load.queued_tokens
    cut_tokens = np.minimum(need_tokens, load.pool_tokens)
    short_tokens = np.where(load.pool_tokens > 0, before + cut_tokens - load.pool_tokens, 0.0)
    short_pages = np.maximum(short_tokens, 0.0) / np.maximum(before, 1.0)
    short_places = np.maximum(load.num_requests + 1 - load.max_requests, 0.0) / load.max_requests
    stay_s = output_tokens * load.decode_step_s
    pressure_s: Floats = stay_s * np.maximum(short_pages, short_places)
    return pressure_s
