"""How to choose among replicas: one pure function a policy.

A policy sees the query, the candidates (at least one, in order of ids, each with its load and its estimated time to
first token) and the turn (the part of the router's past that it may use, and an injected random generator); it answers
a PolicyChoice. All that it compares stands in the candidates, so every decision can be explained afterwards.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

import numpy as np

from routing.ttft import Candidates, bounded
from routing.types import Floats, Ints, Reason, RouteQuery, Terms

# Estimates closer than this are equal: the report's period and the network blur them by milliseconds.
TIE_S = 0.002
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
    """Choose the soonest first token plus others' delay (ttft.py); then the session's last, fewest requests, any.

    A replica that holds the prefix wins until its queue costs more than computing the prefix elsewhere, for this
    request and for those waiting there: hot prefixes are replicated by themselves. Candidates with a longer queue
    than ``query.max_wait_s`` are left out; with no other, only our own first token counts.
    """
    terms = candidates.terms
    least = _lowest(bounded(terms.cost_s, terms.ttft_s, terms.wait_s, query.max_wait_s), within=TIE_S)
    if len(least) == 1:
        index = int(least[0])
        if len(candidates) == 1:
            return PolicyChoice(index=index, reason=Reason.ONLY)
        return PolicyChoice(index=index, reason=_why_least(terms, index, query.max_wait_s))
    if turn.session is not None:
        for index in least.tolist():
            if candidates.replica_id(index) == turn.session:
                return PolicyChoice(index=index, reason=Reason.SESSION)
    return _fewest_requests(candidates, least, turn)


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


POLICIES: Mapping[str, Policy] = {
    "estimated_ttft": estimated_ttft,
    "round_robin": round_robin,
    "random": random,
    "power_of_two": power_of_two,
    "least_tokens": least_tokens,
    "prefix_threshold": prefix_threshold,
}
