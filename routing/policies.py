"""How to choose among replicas: one pure function a policy.

A policy sees the query, the candidates (at least one, sorted by id, each with its load) and the turn (an injected
random generator and the previous winner); it answers a Choice. Whatever it compares stands in the candidates, so that
every decision can be explained afterwards.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from routing.types import Candidate, Choice, Reason, RouteQuery


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What a policy may use besides the candidates."""

    rng: Random
    last: str | None  # winner of the router's previous decision


Policy = Callable[[RouteQuery, Sequence[Candidate], Turn], Choice]


def round_robin(query: RouteQuery, candidates: Sequence[Candidate], turn: Turn) -> Choice:
    """The next id after the last winner's, in order of ids; load is not looked at."""
    ids = [candidate.replica_id for candidate in candidates]
    after = [replica_id for replica_id in ids if turn.last is not None and replica_id > turn.last]
    return Choice(replica_id=(after or ids)[0], reason=Reason.TURN if len(ids) > 1 else Reason.ONLY, compared=())


def power_of_two(query: RouteQuery, candidates: Sequence[Candidate], turn: Turn) -> Choice:
    """Of two drawn at random, the one with fewer requests. Source: Mitzenmacher 2001, "The power of two choices"."""
    drawn = turn.rng.sample(candidates, k=min(2, len(candidates)))
    return _least(drawn, lambda candidate: (candidate.num_requests,), (Reason.FEWER_REQUESTS,), turn.rng)


def least_tokens(query: RouteQuery, candidates: Sequence[Candidate], turn: Turn) -> Choice:
    """The fewest prompt tokens still to compute; then the fewest requests; then at random."""
    return _least(
        candidates,
        lambda candidate: (candidate.queued_tokens, candidate.num_requests),
        (Reason.FEWER_TOKENS, Reason.FEWER_REQUESTS),
        turn.rng,
    )


def _least(
    candidates: Sequence[Candidate],
    cost: Callable[[Candidate], tuple[int, ...]],
    reasons: tuple[Reason, ...],
    rng: Random,
) -> Choice:
    """The candidate of least cost; the reason is that of the first part of the cost that told it from the runner-up."""
    costs = [cost(candidate) for candidate in candidates]
    best = min(costs)
    winners = [index for index, mine in enumerate(costs) if mine == best]
    index = winners[0] if len(winners) == 1 else rng.choice(winners)
    winner, runner_up = candidates[index], min(costs[:index] + costs[index + 1 :], default=None)
    compared = tuple(sorted(candidate.replica_id for candidate in candidates))
    if runner_up is None:
        return Choice(replica_id=winner.replica_id, reason=Reason.ONLY, compared=compared)
    told = (reason for reason, mine, other in zip(reasons, best, runner_up, strict=True) if mine != other)
    return Choice(replica_id=winner.replica_id, reason=next(told, Reason.TIE), compared=compared)


POLICIES: Mapping[str, Policy] = {
    "round_robin": round_robin,
    "power_of_two": power_of_two,
    "least_tokens": least_tokens,
}
