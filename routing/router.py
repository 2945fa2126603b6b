"""Router: chooses a replica for each request from what is known of the replicas, in this process, with no I/O.

Owns:      what it knows of the replicas and of its own predictions (fleet_state.py); the last winners.
Never:     reads a clock or a random source that was not injected; talks to a replica.
Invariant: a decision names a replica of the last ``update`` that is healthy, accepting and permitted by the query;
           open requests return to zero once each decision is done or its replica has left.
Thread:    one event loop; no call blocks.

    report(view), apply(events) ──> choose(query) ──> the caller sends ──> done(decision, outcome)

    keys of the prompt's pages ─> overlap with every replica ─┐
    reports, sent since, age ───> load of every replica ─────┴─> seconds to the first token (policies) ─ policy
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random

import numpy as np

from kvtransfer.pages import PageKeys, page_keys
from routing.fleet_state import FleetState, LinkRates, Overrun, PredictionErrors
from routing.index import pages_of
from routing.load import Eligible
from routing.page_owners import Pages
from routing.pair import choose_pair, costs_of, decode_side, pair_decision, prefill_side, with_pressure
from routing.policies import POLICIES, Candidates, Turn
from routing.types import (
    Decision,
    Ending,
    IndexEvent,
    IndexSnapshot,
    NoReplica,
    PageFetch,
    ReplicaView,
    RouteLeg,
    RouteOutcome,
    RouteQuery,
    legs,
)
from routing.why import PromptHistory

MAX_SESSIONS = 10_000  # a session is only a tie-break: the oldest are forgotten
# What a request that waits must gain to move. Estimates are wrong by more than a tie; a move costs a place in a queue.
MOVE_GAIN_S = 0.25
MOVE_GAIN = 0.2
FULL = 0.9  # share of a pool in use from which requests may wait for pages


@dataclass(frozen=True, slots=True, kw_only=True)
class Second:
    """The answer of `Router.choose_again`: whether a request that waits should move, and where to."""

    wait_s: float  # until its prompt begins where it is
    begins_s: float = 0.0  # and by ``decision``
    ttft_s: float = 0.0  # until its first token where it is
    decision: Decision | None = None  # None: it does not gain enough


def _expected(made: Decision, where: Decision) -> tuple[float, float]:
    """Return the wait and the time to first token at the replicas of ``where``, by the candidates of ``made``."""
    there = made.candidates[made.compared.index(where.prefill_id or where.replica_id)]
    silent_s = made.time_s - there.view.time_s if there.view.silent else 0.0  # as long again as it has been
    wait_s, ttft_s = there.terms.wait_s + silent_s, there.terms.ttft_s + silent_s
    if where.prefill_id is not None and made.pair is not None:
        row = next(terms for replica_id, terms in made.pair.rows() if replica_id == where.replica_id)
        return wait_s + row.pressure_s, ttft_s + row.receive_cost_s - row.slower_s
    return wait_s, ttft_s


class Router:
    """Chooses a replica for each request. The same seed, views, events and queries give the same decisions."""

    def __init__(
        self,
        policy: str,
        rng: Random,
        clock: Callable[[], float],
        page_size: int = 16,
        *,
        always_kv_transfer: bool = False,
    ) -> None:
        """``clock`` is the one that ``ReplicaView.time_s`` is measured on. Raises ValueError for an unknown policy.

        Where replicas are for prefill or decode, pairs are chosen (pair.py), whatever ``policy`` says.
        """
        if policy not in POLICIES:
            raise ValueError(f"routing policy {policy!r} is unknown; there are: {', '.join(POLICIES)}")
        self.policy = policy
        self.page_size = page_size
        self.errors = PredictionErrors()
        self.overrun = Overrun(clock)
        self._policy = POLICIES[policy]
        self._rng = rng
        self._clock = clock
        self._always_kv_transfer = always_kv_transfer
        self._fleet = FleetState(page_size, clock)
        self.prompts = PromptHistory(
            page_size, clock, departure=self._fleet.departure, holder=self._fleet.holder_beside
        )
        self._sessions: OrderedDict[str, str] = OrderedDict()  # session -> its last replica
        self._last: str | None = None
        self._num_decisions = 0

    def update(self, views: Iterable[ReplicaView]) -> None:
        """Take ``views`` as the replicas that exist now. Any other is forgotten at once, its open requests with it."""
        self._fleet.update(views)

    def report(self, view: ReplicaView) -> None:
        """Take the ``view`` of one replica, known or new; the others stay as they are."""
        self._fleet.report(view)

    def forget(self, replica_id: str) -> None:
        """Remove a replica at once; its open requests with it."""
        self._fleet.forget(replica_id)

    def apply(self, replica_id: str, events: Iterable[IndexEvent]) -> bool:
        """Apply what a replica's cache stored and removed, in batches of any size, empty ones too.

        Returns: False if events are missing or the replica is not known: fetch a snapshot for `apply_snapshot`.
                 Later events are kept meanwhile; until then choices use what is known.
        """
        feed = self._fleet.feed(replica_id)
        return feed is not None and feed.apply(events)

    def apply_snapshot(self, replica_id: str, snapshot: IndexSnapshot) -> bool:
        """Apply ``snapshot``, then the events after it. Return False as `apply` does: events are missing."""
        feed = self._fleet.feed(replica_id)
        return feed is not None and feed.apply_snapshot(snapshot)

    def choose(self, query: RouteQuery) -> Decision:
        """Choose where ``query`` goes; it counts as open there until ``done``, unless it is offline: no other request
        waits for it. Raises NoReplica if none may take it."""
        decision, pages = self._decide(query, dry_run=False)
        if query.offline:
            self._num_decisions = legs(decision)[-1].number + 1
            return decision
        self._open(decision, pages, query)
        self._last = decision.replica_id
        return decision

    def choose_again(self, decision: Decision, query: RouteQuery, *, not_before_s: float = 0.0) -> Second:
        """Look where the request of ``decision``, which waits, would begin sooner than where it keeps its place.

        Returns: how long it still waits there. And a decision, open as `choose`'s beside the first one, if by that its
                 first token comes sooner by more than MOVE_GAIN_S and the share MOVE_GAIN, and its prompt begins no
                 sooner than in ``not_before_s``: the first one's replica is to be asked. `done` of the first one closes
                 that, or `stays`.
        """
        waits = legs(decision)
        if not self.is_open(decision) or not all(query.permits(leg.replica_id) for leg in waits):
            return Second(wait_s=0.0)
        second, pages = self._decide(query, dry_run=False, again=decision)
        wait_s, ttft_s = _expected(second, decision)
        begins_s, _ = _expected(second, second)
        enough = ttft_s - second.predicted_ttft_s > max(MOVE_GAIN_S, MOVE_GAIN * ttft_s) and begins_s >= not_before_s
        chosen = {leg.replica_id for leg in legs(second)}
        stays = chosen == {leg.replica_id for leg in waits}
        if stays or not enough or not self._fleet.load.may_take(chosen):
            return Second(wait_s=wait_s)
        self._open(second, pages, query)
        for leg in waits:
            self._fleet.load.note(leg.number, leaves=True)
        return Second(wait_s=wait_s, begins_s=begins_s, ttft_s=ttft_s, decision=second)

    def stays(self, decision: Decision) -> None:
        """Note that the request of ``decision`` does not leave its replica, which had admitted it."""
        for leg in legs(decision):
            self._fleet.load.note(leg.number, leaves=False)

    def is_open(self, decision: Decision) -> bool:
        """Tell whether the request of ``decision`` is open, at replicas that still exist."""
        return all(self._fleet.load.is_open(leg.number) for leg in legs(decision))

    @property
    def migrates(self) -> bool:
        """Whether requests that wait may move: other policies than `estimated_ttft` do not say that it gains."""
        return self.policy == "estimated_ttft" or self._fleet.apart

    @property
    def spread_s(self) -> float:
        """How much longer the longest queue is than the shortest; infinite while a replica is silent, or has hardly a
        page or a place left, so that queues say little."""
        if any(view.silent for view in self.views):
            return float("inf")
        eligible = self._fleet.load.eligible()
        if len(eligible.views) < 2:
            return 0.0
        load = self._fleet.load.estimate(eligible, self._clock())
        wait_s = load.queued_tokens / load.prefill_tokens_per_s
        full = (load.utilization > FULL) | (load.num_requests >= load.max_requests)
        return float("inf") if full.any() else float(wait_s.max() - wait_s.min())

    def explain_only(self, query: RouteQuery) -> Decision:
        """Return what `choose` would answer now, the draw included. Changes nothing; the decision is never open."""
        state = self._rng.getstate()
        try:
            return self._decide(query, dry_run=True)[0]
        finally:
            self._rng.setstate(state)

    def began(self, decision: Decision, ttft_s: float) -> None:
        """Note that the first token of ``decision`` has come, after ``ttft_s``."""
        self.overrun.record(decision.predicted_ttft_s, ttft_s)
        for leg in legs(decision):
            self._fleet.load.note(leg.number, begun=True)

    def done(self, decision: Decision, outcome: RouteOutcome) -> bool:
        """Close the request of ``decision``, however it ended. Return False if it was not open.

        Safe to call twice (from an error path and a ``finally``), and after the replica has left.
        """
        begun = outcome.ttft_s is not None or outcome.ending is Ending.OK
        ended = self._end(decision, legs(decision), begun=begun)  # the prefill leg too, unless it has before
        if ended:
            self.errors.record(decision, outcome)
            self._fleet.way.record(outcome)
        return ended

    def prefill_done(self, decision: Decision) -> bool:
        """Close the prefill leg of a pair, however it ended; the request goes on. Return False if it was not open."""
        return self._end(decision, legs(decision)[1:])

    @property
    def link(self) -> LinkRates:
        """The rates of KV transfers, which are told to it, and of fetches, by `fetched`."""
        return self._fleet.links

    def fetched(self, decision: Decision, num_bytes: int, transfer_s: float, *, failed: bool = False) -> None:
        """Note how the fetch of ``decision`` ended, of which ``num_bytes`` came in ``transfer_s``."""
        assert decision.fetch is not None
        leg = legs(decision)[-1]
        pair = decision.fetch.donor_id, leg.replica_id
        self._fleet.asked.end(leg.number)
        self.link.fetched(pair, num_bytes, transfer_s, late=failed and transfer_s >= decision.fetch.within_s)
        if failed:
            self.link.failed(pair)

    @property
    def views(self) -> tuple[ReplicaView, ...]:
        return self._fleet.load.views

    @property
    def num_open(self) -> int:
        """The number of requests chosen and not done, at replicas that still exist."""
        return self._fleet.load.num_open

    def applied(self, replica_id: str) -> int:
        """Return the number of a replica's last event in the index; 0: none, or its pages are unknown."""
        feed = self._fleet.feed(replica_id)
        return 0 if feed is None else feed.seq or 0

    def num_pages(self, replica_id: str) -> tuple[int, int]:
        """Return how many pages of a known replica are (confirmed by its events, only expected after decisions)."""
        return self._fleet.num_pages(replica_id)

    def held(self, replica_id: str) -> set[int]:
        """Return those pages, as the index names them (index.pages_of): to compare routers. Walks the whole index."""
        return self._fleet.pages(replica_id)

    def check(self) -> None:
        """Raises AssertionError if the open requests or the index do not add up."""
        self._fleet.check()

    def _end(self, decision: Decision, ended: Iterable[RouteLeg], *, begun: bool = True) -> bool:
        """Close these legs. Return whether any was still open."""
        if decision.dry_run:
            return False
        return sum(self._fleet.end(leg, decision.keys, begun=begun) for leg in ended) > 0  # each of them: no `any`

    def _open(self, decision: Decision, pages: Pages, query: RouteQuery) -> None:
        opened = legs(decision)
        for leg in opened:
            fetch = decision.fetch if leg is opened[-1] else None
            self._fleet.send(leg, pages, query, now_s=decision.time_s, fetch=fetch)
            self._num_decisions = leg.number + 1
        if query.session_id:
            self._sessions[query.session_id] = decision.replica_id
            self._sessions.move_to_end(query.session_id)
            if len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)

    def _decide(self, query: RouteQuery, *, dry_run: bool, again: Decision | None = None) -> tuple[Decision, Pages]:
        """Decide for ``query``; ``again``: its open decision, whose replicas are among the candidates."""
        waits = () if again is None else legs(again)
        eligible = self._fleet.load.eligible(also={leg.replica_id for leg in waits}).permitted(query)
        views = eligible.views
        if not views:
            raise NoReplica(self._why_none(query))
        now_s, num_tokens = self._clock(), len(query.token_ids)
        if again is None:
            keys = page_keys(np.asarray(query.token_ids, dtype=np.int32), self.page_size, query.salt)
        else:
            keys = again.keys
        pages = pages_of(keys)
        usable = pages[: (num_tokens - 1) // self.page_size]  # the last token is always computed
        if self._fleet.apart:
            turn = self._turn(query, again)
            return self._decide_pair(query, eligible, keys, usable, waits, turn, now_s=now_s, dry_run=dry_run), pages
        look = partial(
            self._fleet.candidates, query, eligible, usable, now_s, max_new_tokens=query.max_new_tokens, waits=waits,
            donors=eligible,
        )  # fmt: skip
        candidates = look()
        choice = self._policy(query, candidates, self._turn(query, again))
        overlap_tokens = candidates.overlap_tokens
        compared = range(len(views)) if choice.compared is None else choice.compared
        best, terms = int(overlap_tokens.argmax()), candidates.terms
        decision = Decision(
            number=self._num_decisions,
            rid=query.rid,
            replica_id=views[choice.index].replica_id,
            policy=self.policy,
            reason=choice.reason,
            compared=tuple([views[at].replica_id for at in compared]),
            candidates=candidates,
            num_tokens=num_tokens,
            overlap_tokens=int(overlap_tokens[choice.index]),
            host_tokens=int(terms.host_tokens[choice.index]),
            store_tokens=int(terms.store_tokens[choice.index]),
            load_s=float(terms.load_s[choice.index]),
            predicted_ttft_s=float(terms.ttft_s[choice.index]),
            shortest_wait_s=float(terms.wait_s.min()),
            best_overlap=(views[best].replica_id, int(overlap_tokens[best])),
            keys=keys,
            time_s=now_s,
            objective_s=query.objective_s,
            overrun=self.overrun.factor,
            dry_run=dry_run,
            gone_tokens=int(terms.gone_tokens[choice.index]),
            prefill_tokens_per_s=float(terms.prefill_tokens_per_s[choice.index]),
            fetch=_fetch(look, candidates, choice.index, tries=again is None and self.link.stale),
        )
        return decision, pages

    def _turn(self, query: RouteQuery, again: Decision | None) -> Turn:
        """Make the turn; a look at ``again`` does not change what `choose` draws next."""
        rng = self._rng if again is None else Random(again.number)
        return Turn(rng=rng, last=self._last, session=self._sessions.get(query.session_id))

    def _decide_pair(
        self, query: RouteQuery, eligible: Eligible, keys: PageKeys, usable: Pages, waits: Sequence[RouteLeg],
        turn: Turn, *, now_s: float, dry_run: bool,
    ) -> Decision:  # fmt: skip
        """Decide for a decode replica and maybe a prefill replica before it."""
        prefills, decodes = prefill_side(eligible, num_tokens=len(query.token_ids)), decode_side(eligible)
        if not decodes.views:
            raise NoReplica(f"{self._why_none(query)}. A decode replica is needed; a prefill replica only hands over")
        look = partial(
            self._fleet.candidates, query, prefills, usable, now_s, max_new_tokens=1, waits=waits[1:], donors=eligible
        )
        before = with_pressure(look()) if prefills.views else None
        after = self._fleet.candidates(
            query, decodes, usable, now_s, max_new_tokens=query.max_new_tokens, waits=waits[:1]
        )
        link = self.link
        costs = costs_of(after, query, link_bytes_per_s=link.bytes_per_s, page_size=self.page_size)
        number = self._num_decisions
        choice = choose_pair(
            query, before, after, costs, turn, link_bytes_per_s=link.bytes_per_s, link_measured=link.measured,
            always=self._always_kv_transfer, prefill_number=number + 1,
        )  # fmt: skip
        made = pair_decision(query, before, after, choice, number=number, keys=keys, now_s=now_s, dry_run=dry_run)
        if before is None or choice.prefill is None:
            fetch = None
        else:
            fetch = _fetch(look, before, choice.prefill, tries=not waits and self.link.stale)
        return replace(made, overrun=self.overrun.factor, fetch=fetch)

    def _why_none(self, query: RouteQuery) -> str:
        if not self._fleet.load.ids:
            return f"request {query.rid}: no replica has reported yet, or all have left; try again in a moment"
        passed_over = [
            f"{view.replica_id} is {view.state if query.permits(view.replica_id) else 'not permitted by the request'}"
            for view in self.views
        ]
        wanted = "any replica" if query.allowed is None else f"one of {sorted(query.allowed)}"
        wanted += f" but not {sorted(query.excluded)}" if query.excluded else ""
        return (
            f"request {query.rid} wants {wanted}; of {len(passed_over)} replicas {', '.join(passed_over)}: "
            "try again in a moment, or permit more replicas"
        )


def _fetch(look: Callable[..., Candidates], found: Candidates, at: int, *, tries: bool) -> PageFetch | None:
    """Return what a request fetches at candidate ``at`` of those that ``look`` ``found``. ``tries``: also over a link
    that was slow, to find out whether it is quicker by now; a hope that is wrong changes no choice and no estimate."""
    fetch = found.fetch(at)
    if fetch is None and tries and found.fetches is not None:
        fetch = look(tries=at).fetch(at)
    return fetch
