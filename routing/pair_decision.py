"""A pair as a `Decision`, and a decision as its legs: what the router's books need of it.

Pure. Invariant: a decision's first leg is at its replica and carries its number; the prefill leg, if any, comes second.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

from kvtransfer.pages import PageKeys
from routing.pair import PairChoice
from routing.standing import Candidates
from routing.types import Candidate, Decision, RouteQuery

POLICY = "pd_pair"


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """What one replica has to do of a decision; the router's books have a line for each."""

    replica_id: str
    number: int
    own_tokens: int  # predicted to be computed there
    overlap_tokens: int  # predicted to be cached there


def legs(decision: Decision) -> tuple[Leg, ...]:
    """One, or the decode leg and then the prefill leg."""
    own_tokens, pair = decision.num_tokens - decision.overlap_tokens, decision.pair
    if pair is None or pair.prefill_id is None:
        return (Leg(replica_id=decision.replica_id, number=decision.number, own_tokens=own_tokens,
                    overlap_tokens=decision.overlap_tokens),)  # fmt: skip
    return (
        Leg(replica_id=decision.replica_id, number=decision.number, own_tokens=0,
            overlap_tokens=pair.chosen.cached_tokens),
        Leg(replica_id=pair.prefill_id, number=pair.prefill_number, own_tokens=own_tokens,
            overlap_tokens=decision.overlap_tokens),
    )  # fmt: skip


class Both(Sequence[Candidate]):
    """The candidates of both sides, prefill replicas first."""

    def __init__(self, prefills: Candidates | None, decodes: Candidates) -> None:
        self._prefills: Sequence[Candidate] = () if prefills is None else prefills
        self._decodes = decodes

    def __len__(self) -> int:
        return len(self._prefills) + len(self._decodes)

    @overload
    def __getitem__(self, index: int) -> Candidate: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Candidate]: ...
    def __getitem__(self, index: int | slice) -> Candidate | Sequence[Candidate]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        at = range(len(self))[index]
        num_prefills = len(self._prefills)
        return self._prefills[at] if at < num_prefills else self._decodes[at - num_prefills]


def pair_decision(
    query: RouteQuery,
    prefills: Candidates | None,
    decodes: Candidates,
    choice: PairChoice,
    *,
    number: int,
    keys: PageKeys,
    now_s: float,
    dry_run: bool,
) -> Decision:
    """``choice`` among these candidates."""
    handed_over = prefills is not None and choice.prefill is not None
    computes, at = (prefills, choice.prefill) if handed_over else (decodes, choice.decode)
    assert computes is not None
    assert at is not None
    sides = [decodes] if prefills is None else [prefills, decodes]
    return Decision(
        number=number,
        rid=query.rid,
        replica_id=decodes.replica_id(choice.decode),
        policy=POLICY,
        reason=choice.reason,
        compared=tuple([view.replica_id for side in sides for view in side.standing.views]),
        candidates=Both(prefills, decodes),
        num_tokens=len(query.token_ids),
        overlap_tokens=int(computes.overlap_tokens[at]),
        predicted_ttft_s=choice.predicted_ttft_s,
        best_overlap=max((_best_overlap(side) for side in sides), key=lambda best: best[1]),
        keys=keys,
        time_s=now_s,
        dry_run=dry_run,
        pair=choice.pair,
    )


def _best_overlap(side: Candidates) -> tuple[str, int]:
    best = int(side.overlap_tokens.argmax())
    return side.replica_id(best), int(side.overlap_tokens[best])
