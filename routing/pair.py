"""pd_pair: which prefill replica computes a prompt, which decode replica goes on, or whether that one does it all.

Pure. Both ways are costs in seconds: until the first token, and what the request takes from those that run.

    handed over  the soonest prefill replica: queue + own + missing free tokens     / its prefill rate
                   what it fetches, as the answers before from their decode replica (fetch.py)
                 transfer_s  pages that the decode replica has not                  / the link's rate (fleet_state.py)
                 overhead_s  what a KV transfer costs however small it is              (OVERHEAD_S)
    computed by  queue + own tokens                                                 / its prefill rate
    the decode   stall_s     own_s for each request that runs or is to be computed there: a running one makes a
    replica                  token in each step of ours, which takes many decode steps (counted as if it made none), the
                             others wait. Not for those that wait for K/V: prompts handed over would be a reason to
                             hand over more
    either way   pressure_s  the wait for pages or for a place among the running    (policies.py)
                 load_s      what its lower tiers hold, loaded        (policies.py)
                 adapter_s   its adapter, loaded where it is not yet  (load.py)
                 slower_s    slower steps beside those that run

So no threshold says which prompts are handed over: if no request is delayed, or little is to compute, the decode
replica computes the prompt. A way with a longer queue than the request may wait is left out, as in policies.py. Not
counted, on either side: requests that arrive later and wait behind ours.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvtransfer.pages import PageKeys
from routing.load import Eligible
from routing.policies import OUTPUT_TOKENS, TIE_S, Candidates, MadeWhenAsked, Turn, bounded, of_equals
from routing.types import (
    Candidate,
    Decision,
    Floats,
    Ints,
    LoadEstimate,
    Pair,
    PairReason,
    PairTerms,
    Reason,
    Role,
    RouteQuery,
)

# Two calls instead of one, the receiver's grant, its opening of the room and the sender's answer: some milliseconds on
# one host, and the steps that both engines are in when the messages come.
OVERHEAD_S = 0.02
POLICY = "pd_pair"  # name of this way of choosing in decisions


@dataclass(frozen=True, slots=True, kw_only=True)
class PairChoice:
    """The answer of `choose_pair`: a position among the decode candidates, and the pair."""

    decode: int
    prefill: int | None  # position among the prefill candidates; None: the decode replica does all
    reason: Reason  # why this decode replica
    predicted_ttft_s: float
    shortest_wait_s: float  # at the best of all that may be taken, whatever the prompt itself takes
    pair: Pair


def choose_pair(
    query: RouteQuery,
    prefills: Candidates | None,
    decodes: Candidates,
    costs: PairTerms[Floats, Ints],
    turn: Turn,
    *,
    link_bytes_per_s: float,
    link_measured: bool,
    always: bool,
    prefill_number: int,
) -> PairChoice:
    """Choose the pair, or the decode replica alone, with the lowest cost.

    Args: prefills: None where none may take the request. costs: `costs_of` ``decodes``. always: hand over whatever
          may be.
    """
    best = None if prefills is None else _soonest(query, prefills, turn)
    prefill_s = None if prefills is None or best is None else float(prefills.terms.ttft_s[best])
    # rows [W, D]: computed by the decode replica, handed over to it
    cost_s, ttft_s, wait_s = [costs.local_cost_s], [costs.ttft_s], [decodes.terms.wait_s]
    rated_s = [decodes.terms.own_s + decodes.terms.step_s]
    if prefills is not None and best is not None and prefill_s is not None and not query.one_replica:
        cost_s.append(costs.receive_cost_s + prefill_s)
        ttft_s.append(costs.receive_cost_s - costs.slower_s + prefill_s)
        wait_s.append(costs.pressure_s + float(prefills.terms.wait_s[best]))
        rated_s.append(costs.transfer_s)
    ways = slice(1, None) if always and len(cost_s) == 2 else slice(None)
    compared = bounded(np.array(cost_s[ways]), np.array(ttft_s[ways]), np.array(wait_s[ways]), query.max_wait_s)
    least_s = np.where(compared[0] <= compared[-1], rated_s[ways][0], rated_s[ways][-1])
    index, reason = of_equals(query, decodes, compared.min(axis=0), least_s, turn)
    handed_over = len(cost_s) == 2 and (always or bool(compared[1, index] < compared[0, index] - TIE_S))
    best_id = None if prefills is None or best is None else prefills.replica_id(best)
    predicted_s = float(ttft_s[1 if handed_over else 0][index])
    pair = Pair(
        prefill_id=best_id if handed_over else None,
        prefill_number=prefill_number,
        reason=_why(query, handed_over=handed_over, always=always, any_prefill=best is not None),
        why=query.one_replica,
        best_prefill_id=best_id,
        prefill_s=prefill_s,
        link_bytes_per_s=link_bytes_per_s,
        link_measured=link_measured,
        decode_ids=[view.replica_id for view in decodes.views],
        costs=costs,
        chosen=costs.at(index),
    )
    return PairChoice(
        decode=index,
        prefill=best if handed_over else None,
        reason=reason or Reason.CHEAPEST,
        predicted_ttft_s=predicted_s,
        shortest_wait_s=float(np.min(wait_s[ways])),
        pair=pair,
    )


def costs_of(
    decodes: Candidates, query: RouteQuery, *, link_bytes_per_s: float, page_size: int
) -> PairTerms[Floats, Ints]:
    """Return what the request costs at each decode replica, either way."""
    load, terms = decodes.load, decodes.terms
    page_bytes: Ints = np.array([view.page_bytes for view in decodes.views], dtype=np.int64)
    pages: Ints = -(-(terms.own_tokens - terms.gone_tokens) // page_size)  # what it receives ends with its own state
    output_tokens = min(query.max_new_tokens, OUTPUT_TOKENS)
    busy_share: Floats = np.minimum(load.num_busy / load.max_requests, 1.0)  # max_requests may be infinite
    stall_s = terms.own_s * load.num_busy
    transfer_s = pages * page_bytes / link_bytes_per_s
    overhead_s = np.full(len(decodes), OVERHEAD_S)
    slower_s = output_tokens * load.decode_token_s * busy_share  # a full replica's steps take twice an idle one's
    return PairTerms(
        cached_tokens=decodes.overlap_tokens,
        own_tokens=terms.own_tokens,
        transfer_pages=pages,
        transfer_bytes=pages * page_bytes,
        ttft_s=terms.ttft_s,
        stall_s=stall_s,
        transfer_s=transfer_s,
        overhead_s=overhead_s,
        pressure_s=terms.pressure_s,
        load_s=terms.load_s,
        adapter_s=terms.adapter_s,
        slower_s=slower_s,
        local_cost_s=terms.ttft_s + stall_s + slower_s,
        receive_cost_s=transfer_s + overhead_s + terms.load_s + terms.adapter_s + terms.pressure_s + slower_s,
    )


def prefill_side(eligible: Eligible, *, num_tokens: int) -> Eligible:
    """Return the prefill replicas of ``eligible`` whose pool holds a prompt of ``num_tokens``."""
    at = [
        at
        for at, view in enumerate(eligible.views)
        if view.role is Role.PREFILL and (view.pool_pages == 0 or view.pool_pages * view.page_size > num_tokens)
    ]
    # they run no decode steps; an unmeasured one would otherwise get the mean of the replicas that do, which is right
    # for the fixed part of a step alone
    return replace(eligible.those(at), decode_step_s=np.zeros(len(at)), decode_token_s=np.zeros(len(at)))


def decode_side(eligible: Eligible) -> Eligible:
    """Return the replicas of ``eligible`` that may decode: all but the prefill replicas."""
    return eligible.those([at for at, view in enumerate(eligible.views) if view.role is not Role.PREFILL])


def with_pressure(prefills: Candidates) -> Candidates:
    """Add the wait for pages at prefill replicas, where no decode step says how long a request stays (policies.py).

    What is held there has been computed, or is about to be, and comes free as it is handed over: about as fast as it
    is computed. So one waits for what is missing at the prefill rate. Those queued before ours take pages and give
    them back while ours is queued.
    """
    load, terms = prefills.load, prefills.terms
    short_s = _missing_tokens(load, terms.own_tokens + terms.fetched_tokens) / load.prefill_tokens_per_s
    slower = replace(terms, pressure_s=terms.pressure_s + short_s, ttft_s=terms.ttft_s + short_s)
    return replace(prefills, terms=slower)


def _missing_tokens(load: LoadEstimate[Floats], own_tokens: Ints) -> Floats:
    """Return how many of our tokens lack a free page; 0 if the pool's size was not reported."""
    missing: Floats = load.utilization * load.pool_tokens + own_tokens - load.pool_tokens
    return np.where(load.pool_tokens > 0, np.maximum(missing, 0.0), 0.0)


def _soonest(query: RouteQuery, prefills: Candidates, turn: Turn) -> int:
    """Return where the prompt costs least: the time to its first token, and how long computing a prefix anew delays
    others, unless the queue is too long; of equals one by `of_equals` (policies.py)."""
    terms = prefills.terms
    cost_s = bounded(terms.cost_s, terms.ttft_s, terms.wait_s, query.max_wait_s)
    return of_equals(query, prefills, cost_s, terms.own_s + terms.step_s, turn)[0]


def _why(query: RouteQuery, *, handed_over: bool, always: bool, any_prefill: bool) -> PairReason:
    if handed_over:
        return PairReason.ALWAYS if always else PairReason.TRANSFER
    if query.one_replica:
        return PairReason.ONE_REPLICA
    return PairReason.LOCAL if any_prefill else PairReason.NO_PREFILL


class Both(MadeWhenAsked):
    """The candidates of both sides, prefill replicas first."""

    def __init__(self, prefills: Candidates | None, decodes: Candidates) -> None:
        self._prefills: Sequence[Candidate] = () if prefills is None else prefills
        self._decodes = decodes

    def __len__(self) -> int:
        return len(self._prefills) + len(self._decodes)

    def at(self, index: int) -> Candidate:
        num_prefills = len(self._prefills)
        return self._prefills[index] if index < num_prefills else self._decodes[index - num_prefills]


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
    """Return ``choice`` among these candidates as a decision."""
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
        compared=tuple([view.replica_id for side in sides for view in side.views]),
        candidates=Both(prefills, decodes),
        num_tokens=len(query.token_ids),
        overlap_tokens=int(computes.overlap_tokens[at]),
        host_tokens=int(computes.terms.host_tokens[at]),
        store_tokens=int(computes.terms.store_tokens[at]),
        load_s=float(computes.terms.load_s[at]),
        predicted_ttft_s=choice.predicted_ttft_s,
        shortest_wait_s=choice.shortest_wait_s,
        best_overlap=max((_best_overlap(side) for side in sides), key=lambda best: best[1]),
        keys=keys,
        time_s=now_s,
        objective_s=query.objective_s,
        dry_run=dry_run,
        pair=choice.pair,
        gone_tokens=int(computes.terms.gone_tokens[at]),
        prefill_tokens_per_s=float(computes.terms.prefill_tokens_per_s[at]),
    )


def _best_overlap(side: Candidates) -> tuple[str, int]:
    best = int(side.overlap_tokens.argmax())
    return side.replica_id(best), int(side.overlap_tokens[best])
