"""Chooses among replicas by the estimated time to the first token: one pure function a policy.

A policy sees the query, the candidates (at least one, in order of ids, each with its load and its estimated time to
first token) and the turn (the part of the router's past that it may use, and an injected random generator); it answers
a PolicyChoice. All that it compares stands in the candidates, so every decision can be explained afterwards.

The estimate for a candidate: the tokens before the request and its own, over the prefill rate, the time to load what a
lower tier has, where that is less than the time to compute it, the time to fetch what another replica has, likewise
(fetch.py), and the time to load its adapter (LoRA). Each term is in
seconds and stands in the decision. No constant here is fitted; each comes from how the engine schedules
(replicas/scheduler/scheduler.py).

`behind_s` is the delay that this request adds to queued requests. If a candidate computes a prefix anew that another
holds, every request behind this one there waits that much longer. How many will be behind: in a queue served in turn, a
request leaves on average as many behind as it found when it came (level crossing), so the requests waiting now stand
for them. Without a queue it is 0. What must be computed wherever the request goes is not counted: that would send long
prompts where few wait and short ones where many do, which orders requests by size, not by where they are cached.
Late requests that it passes, where it can be in time, wait for all of it, and are counted on top. An adapter that is
loaded pushes out another, which is loaded again for some later request: that costs as much once more.
That has a bound: no request is sent, for the sake of others, behind a queue longer than it may wait (`bounded`), so a
hot prefix is computed again at the latest when its queue is that long.
Source: Kleinrock 1975, "Queueing Systems" I, section 5.3 (arrivals find what departures leave).
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import overload

import numpy as np

from routing.fetch import LATE, LEAST_WITHIN_S, TRIED, Fetches
from routing.index import Reach
from routing.types import Candidate, Floats, Ints, LoadEstimate, PageFetch, Reason, ReplicaView, RouteQuery, Terms

# The next step takes new prompts in: a request waits only for the decode step in progress, on average half of it. Where
# that is a step with prompts, what is left of them stands in the queue; what decode rows cost is in the prefill rate.
DECODE_STEPS_WAITED = 0.5
# The length assumed for an answer that may be longer: the real one is not known before, and a chat without a limit may
# use the whole context.
OUTPUT_TOKENS = 256


class MadeWhenAsked(Sequence[Candidate]):
    """Candidates of which each is made when it is asked for."""

    __slots__ = ()

    @abstractmethod
    def at(self, index: int) -> Candidate:
        """Make number ``index``, which exists."""

    @overload
    def __getitem__(self, index: int) -> Candidate: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Candidate]: ...
    def __getitem__(self, index: int | slice) -> Candidate | Sequence[Candidate]:
        found = range(len(self))[index]
        return self.at(found) if isinstance(found, int) else [self.at(each) for each in found]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidates(MadeWhenAsked):
    """The candidates of one decision as arrays, in order of ids: a thousand of them cost little more than eight.

    A policy reads the arrays and a decision keeps them; a `Candidate` is made when it is asked for.
    """

    views: Sequence[ReplicaView]  # [n]
    load: LoadEstimate[Floats]
    overlap_tokens: Ints  # [n]
    terms: Terms[Floats, Ints]
    fetches: Fetches | None = None

    def __len__(self) -> int:
        return len(self.views)

    def at(self, index: int) -> Candidate:
        return Candidate(
            view=self.views[index],
            load=self.load.at(index),
            overlap_tokens=int(self.overlap_tokens[index]),
            terms=self.terms.at(index),
        )

    def replica_id(self, index: int) -> str:
        return self.views[index].replica_id

    def fetch(self, index: int) -> PageFetch | None:
        """Return what candidate ``index`` is to fetch."""
        of, terms = self.fetches, self.terms
        if of is None or not of.tokens[index]:
            return None
        donor_id = of.donor_ids[int(of.donor[index])]
        num_tokens, compute_s = int(of.tokens[index]), float(of.compute_s[index])
        donor_ttft_s = (float(terms.ttft_s[at]) for at, view in enumerate(self.views) if view.replica_id == donor_id)
        return PageFetch(
            donor_id=donor_id,
            end_tokens=int(terms.device_tokens[index] + terms.host_tokens[index]) + num_tokens,
            num_tokens=num_tokens,
            num_bytes=int(of.num_bytes[index]),
            took_s=float(of.took_s[index]),
            compute_s=compute_s,
            within_s=max(
                LEAST_WITHIN_S, TRIED * compute_s, LATE * float(of.took_s[index]), float(terms.queue_s[index])
            ),
            donor_ttft_s=next(donor_ttft_s, float("inf")),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeldTokens:
    """The prompt tokens that each candidate [n] need not compute, by tier, and the time that loading them takes."""

    device: Ints
    host: Ints
    store: Ints
    gone: Ints  # none of the others': K and V of the prompt in its own tiers that it cannot go on behind
    host_s: Floats
    store_s: Floats
    fetches: Fetches | None = None  # instead of what is in the store


def held_tokens(reach: Reach, load: LoadEstimate[Floats], loading: Floats, *, page_size: int) -> HeldTokens:
    """Return what each candidate loads of what it has: the tokens of a tier if that is quicker than computing them.

    Pages of the store can only follow those before them, and go through the host: where the host's pages are computed
    since that is quicker, so are they.

    Args: loading: [3, n] seconds: a token from the host; a token from the store to the host; before the store's bytes.
    """
    device, none = reach.device * page_size, np.zeros(len(reach.device))
    gone = (reach.kept - reach.own) * page_size
    if reach.store is reach.device:
        no_tokens = none.astype(np.int64)
        return HeldTokens(device=device, host=no_tokens, store=no_tokens, gone=gone, host_s=none, store_s=none)
    host_s_per_token, store_s_per_token, latency_s = loading
    host, host_s = _quicker((reach.own - reach.device) * page_size, none, host_s_per_token, load)
    behind = (reach.store - reach.own) * page_size
    store, store_s = _quicker(behind, latency_s, store_s_per_token + host_s_per_token, load)
    return HeldTokens(device=device, host=host, store=store, gone=gone, host_s=host_s, store_s=store_s)


def _quicker(
    tokens: Ints, latency_s: Floats, s_per_token: Floats, load: LoadEstimate[Floats]
) -> tuple[Ints, Floats]:
    """Return those of ``tokens`` [n] whose loading is quicker than computing them, and how long it takes."""
    load_s = latency_s + tokens * s_per_token
    worth = load_s < tokens / load.prefill_tokens_per_s
    return np.where(worth, tokens, 0), np.where(worth, load_s, 0.0)


def estimate(
    load: LoadEstimate[Floats],
    held: HeldTokens,
    *,
    num_tokens: int,
    adapter_s: Floats,
    max_new_tokens: int,
    way_s: float,
    objective_s: float = float("inf"),
) -> Terms[Floats, Ints]:
    """Return the terms of a prompt of ``num_tokens``, of which each candidate has ``held``; ``adapter_s``: to load what
    it needs beside the model; ``way_s``: measured.

    A prompt that meets ``objective_s`` when it passes the late requests there is estimated without them.
    """
    none = np.zeros(len(held.device))
    store, store_s, fetched, took_s, others_s = held.store, held.store_s, none.astype(np.int64), none, none
    if held.fetches is not None:
        fetched, took_s, others_s = held.fetches.tokens, held.fetches.took_s, held.fetches.others_s
        store, store_s = np.where(fetched > 0, 0, store), np.where(fetched > 0, 0.0, store_s)
    load_s = held.host_s + store_s
    own_tokens = num_tokens - held.device - held.host - store - fetched
    own_s = own_tokens / load.prefill_tokens_per_s
    step_s = _step_s(load, load.queued_tokens + own_tokens)
    decode_s = DECODE_STEPS_WAITED * load.decode_step_s * np.minimum(load.num_requests, 1.0)
    output_tokens = min(max_new_tokens, OUTPUT_TOKENS)
    pressure_s = _pressure_s(load, num_tokens - held.device + output_tokens, output_tokens)
    after_s = own_s + load_s + adapter_s + step_s + decode_s + pressure_s + way_s  # what follows queue and fetch
    least_s = np.maximum((load.queued_tokens - load.late_tokens) / load.prefill_tokens_per_s, took_s)
    in_time = least_s + after_s <= objective_s
    passed_tokens = np.where(in_time, load.late_tokens, 0.0)
    queue_s = (load.queued_tokens - passed_tokens) / load.prefill_tokens_per_s
    fetch_s = np.maximum(took_s - queue_s, 0.0)
    return Terms(
        queued_tokens=load.queued_tokens - passed_tokens,
        passed_tokens=passed_tokens,
        device_tokens=held.device,
        host_tokens=held.host,
        store_tokens=store,
        fetched_tokens=fetched,
        gone_tokens=held.gone,
        own_tokens=own_tokens,
        prefill_tokens_per_s=load.prefill_tokens_per_s,
        queue_s=queue_s,
        own_s=own_s,
        load_s=load_s,
        fetch_s=fetch_s,
        adapter_s=adapter_s,
        step_s=step_s,
        decode_s=decode_s,
        pressure_s=pressure_s,
        way_s=np.full(len(queue_s), way_s),
        ttft_s=queue_s + fetch_s + after_s,
        behind_s=_behind_s(load, own_s, passed_tokens) + others_s + adapter_s,  # of the adapter that makes room
    )


def bounded(cost_s: Floats, ttft_s: Floats, wait_s: Floats, max_wait_s: float) -> Floats:
    """Return what to compare, of any shape: the cost where the wait is allowed, or ``ttft_s`` if it is nowhere."""
    allowed = wait_s <= max_wait_s
    if allowed.all():
        return cost_s
    return np.where(allowed, cost_s, np.inf) if allowed.any() else ttft_s


def _step_s(load: LoadEstimate[Floats], num_tokens: Floats) -> Floats:
    """Return what a step with ``num_tokens`` of prompts takes beyond those tokens at the prefill rate.

    A step takes a + b n: its weights are read and its running rows computed once, however few its prompt tokens are. A
    decode step measures a. The rate of steps of m tokens has a / m in each, so that n tokens lack a (1 - n / m).
    """
    told = load.rate_step_tokens > 0
    share = np.where(told, 1.0 - num_tokens / np.where(told, load.rate_step_tokens, 1.0), 0.0)
    step_s: Floats = load.fixed_step_s * np.maximum(share, 0.0)
    return step_s


def _behind_s(load: LoadEstimate[Floats], own_s: Floats, passed_tokens: Floats) -> Floats:
    """Return the prefill time beyond the shortest at any candidate, times the requests that wait there; those that it
    passes count twice: they wait for it, and as many late ones to come do."""
    more_s: Floats = own_s - own_s.min()
    num_passed = load.num_waiting * passed_tokens / np.maximum(load.queued_tokens, 1.0)
    return more_s * (load.num_waiting + num_passed)


def _pressure_s(load: LoadEstimate[Floats], need_tokens: Ints, output_tokens: int) -> Floats:
    """Return the wait for running requests to end, where pages or places among the running are short.

    A running request makes about ``output_tokens`` tokens (ours stands for all), so all that is held now comes
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
    stay_s = output_tokens * load.decode_token_s
    pressure_s: Floats = load.share * stay_s * np.maximum(short_pages, short_places)
    return pressure_s


# Estimates closer than this are equal: the report's period and the network blur them by milliseconds.
TIE_S = 0.002
SHORT_PREFIX = 0.2  # of what else would be computed: a template, a system prompt
# prefix_threshold, the defaults of SGLang's router (cache_aware): a prefix counts from this share of the prompt on,
# and the load is out of balance when the busiest has BALANCE_REQUESTS more, and BALANCE_RATIO times more, than the
# idlest.
PREFIX_SHARE = 0.3
BALANCE_REQUESTS = 64
BALANCE_RATIO = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What a policy may use beside the candidates."""

    rng: Random
    last: str | None = None  # winner of the router's previous decision
    session: str | None = None  # winner of this session's previous decision


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyChoice:
    """A policy's answer, as positions among the candidates."""

    index: int
    reason: Reason
    compared: tuple[int, ...] | None = None  # candidates whose load or prefix the policy looked at; None: all


Policy = Callable[[RouteQuery, Candidates, Turn], PolicyChoice]


def estimated_ttft(query: RouteQuery, candidates: Candidates, turn: Turn) -> PolicyChoice:
    """Choose the soonest first token plus others' delay; of those that are as soon, one by `of_equals`.

    A replica that holds the prefix wins until its queue costs more than computing the prefix elsewhere, for this
    request and for those waiting there: hot prefixes are replicated by themselves. Candidates with a longer queue
    than ``query.max_wait_s`` are left out; with no other, only our own first token counts.
    """
    terms = candidates.terms
    cost_s = bounded(terms.cost_s, terms.ttft_s, terms.wait_s, query.max_wait_s)
    index, reason = of_equals(query, candidates, cost_s, terms.own_s + terms.step_s, turn)
    return PolicyChoice(index=index, reason=reason or _why_least(terms, index, query.max_wait_s))


def of_equals(
    query: RouteQuery, candidates: Candidates, cost_s: Floats, rated_s: Floats, turn: Turn
) -> tuple[int, Reason | None]:
    """Choose the lowest ``cost_s`` [n]; of those equal to it as far as rates are known, the session's last replica,
    then fewer requests, most free pages where all of the request fits, any.

    Equal to the lowest is what costs more by no more than the rates of both may be wrong (``rated_s`` [n]: the part of
    the cost that is tokens over a rate), and whose other parts are no longer. So the pools of an idle fleet fill
    evenly, also where all prompts begin alike: a prefix of SHORT_PREFIX does not draw all to the first replica that
    holds it.

    Returns: its position, and the reason unless the cost alone decides.
    """
    if len(candidates) == 1:
        return 0, Reason.ONLY
    load, own_tokens = candidates.load, candidates.terms.own_tokens
    best, other_s = int(cost_s.argmin()), cost_s - rated_s
    error = np.hypot(load.rate_error, load.rate_error[best])
    equal = (cost_s <= cost_s[best] + error * rated_s[best]) & (other_s <= other_s[best] + TIE_S)
    equal &= own_tokens <= own_tokens[best] / (1.0 - SHORT_PREFIX)
    among = np.flatnonzero(equal | (cost_s <= cost_s[best] + TIE_S))
    if len(among) == 1:
        return best, None
    for index in among.tolist():
        if candidates.replica_id(index) == turn.session:
            return index, Reason.SESSION
    need_tokens = own_tokens + min(query.max_new_tokens, OUTPUT_TOKENS)
    free_tokens = np.where(load.free_tokens >= need_tokens, load.free_tokens, 0.0)
    # what is no request apart is equal: routers that choose at once, each by its own draw, then choose different ones
    for value, reason, apart in (
        (load.num_requests, Reason.FEWER_REQUESTS, 1.0), (-free_tokens, Reason.MORE_FREE, float(need_tokens[best])),
    ):  # fmt: skip
        among = among[value[among] < value[among].min() + apart]
        if len(among) == 1:
            return int(among[0]), reason
    return int(among[turn.rng.randrange(len(among))]), Reason.TIE


def prefix_threshold(query: RouteQuery, candidates: Candidates, turn: Turn) -> PolicyChoice:
    """Choose the longest prefix if it is long enough and the load is in balance; else the fewest requests.

    Source: SGLang's router (cache_aware) and Ray Serve's PrefixCacheAffinityRouter; both match text, we match pages.
    """
    everyone = np.arange(len(candidates))
    requests = candidates.load.num_requests
    busiest, idlest = requests.max(), requests.min()
    if busiest - idlest > BALANCE_REQUESTS and busiest > BALANCE_RATIO * idlest:
        choice = _fewest_requests(candidates, everyone, turn)
        return PolicyChoice(index=choice.index, reason=Reason.BALANCE)
    overlap = candidates.overlap_tokens
    if overlap.max() <= PREFIX_SHARE * len(query.token_ids):
        return _fewest_requests(candidates, everyone, turn)
    longest = np.flatnonzero(overlap == overlap.max())
    if len(longest) == 1:
        return PolicyChoice(index=int(longest[0]), reason=Reason.LONGEST_PREFIX if len(candidates) > 1 else Reason.ONLY)
    return _fewest_requests(candidates, longest, turn)


def round_robin(query: RouteQuery, candidates: Candidates, turn: Turn) -> PolicyChoice:
    """Choose the next id after the last winner's, in order of ids; load is not looked at."""
    ids = [view.replica_id for view in candidates.views]
    after = (at for at, replica_id in enumerate(ids) if turn.last is not None and replica_id > turn.last)
    return PolicyChoice(index=next(after, 0), reason=Reason.TURN if len(ids) > 1 else Reason.ONLY, compared=())


def random(query: RouteQuery, candidates: Candidates, turn: Turn) -> PolicyChoice:
    """Choose any candidate, each as likely."""
    index = turn.rng.randrange(len(candidates))
    return PolicyChoice(index=index, reason=Reason.RANDOM if len(candidates) > 1 else Reason.ONLY, compared=())


def power_of_two(query: RouteQuery, candidates: Candidates, turn: Turn) -> PolicyChoice:
    """Choose the one with fewer requests of two random ones. Source: Mitzenmacher 2001, "The power of two choices"."""
    drawn = sorted(turn.rng.sample(range(len(candidates)), k=min(2, len(candidates))))
    choice = _fewest_requests(candidates, np.array(drawn), turn)
    return PolicyChoice(index=choice.index, reason=choice.reason, compared=tuple(drawn))


def least_tokens(query: RouteQuery, candidates: Candidates, turn: Turn) -> PolicyChoice:
    """Choose the fewest uncached prompt tokens still to compute; then the fewest requests; then at random."""
    fewest = _lowest(candidates.load.queued_tokens, within=0.5)  # a token is whole
    if len(fewest) == 1:
        return PolicyChoice(index=int(fewest[0]), reason=Reason.FEWER_TOKENS if len(candidates) > 1 else Reason.ONLY)
    return _fewest_requests(candidates, fewest, turn)


def _why_least(terms: Terms[Floats, Ints], index: int, max_wait_s: float) -> Reason:
    ttft_s = terms.ttft_s
    if ttft_s[index] <= ttft_s.min() + TIE_S:
        return Reason.SOONEST
    allowed = ttft_s[terms.wait_s <= max_wait_s]
    return Reason.WAIT_ALLOWED if ttft_s[index] <= allowed.min() + TIE_S else Reason.LEAST_DELAY


def _fewest_requests(candidates: Candidates, among: Ints, turn: Turn) -> PolicyChoice:
    """Choose, of the positions ``among``, the one with the fewest requests; of equals at random."""
    requests = candidates.load.num_requests[among]
    fewest = among[requests == requests.min()]
    if len(fewest) > 1:
        return PolicyChoice(index=int(fewest[turn.rng.randrange(len(fewest))]), reason=Reason.TIE)
    return PolicyChoice(index=int(fewest[0]), reason=Reason.FEWER_REQUESTS if len(candidates) > 1 else Reason.ONLY)


def _lowest(values: Floats, *, within: float) -> Ints:
    """Return the positions of the values at most ``within`` above the lowest."""
    return np.flatnonzero(values <= values.min() + within)


POLICIES: dict[str, Policy] = {
    "estimated_ttft": estimated_ttft,
    "round_robin": round_robin,
    "random": random,
    "power_of_two": power_of_two,
    "least_tokens": least_tokens,
    "prefix_threshold": prefix_threshold,
}
