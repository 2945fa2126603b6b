"""Router: from a request and what is known of the replicas to a decision, in this process, with no I/O.

Owns:      the last view of each replica and what this router sent since (routing/load.py).
Never:     reads a clock or a random source that was not injected; talks to a replica.
Invariant: a decision names a replica of the last ``update`` that is healthy, accepting and permitted by the query;
           open requests return to zero once each decision is done or its replica has left.
Thread:    one event loop; no call blocks.

    update(views) ──> choose(query) ──> the caller sends ──> done(decision, outcome)
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from random import Random

from routing.load import SentLoad
from routing.policies import POLICIES, Turn
from routing.types import Candidate, Decision, Ending, NoReplica, Outcome, ReplicaView, RouteQuery


class Router:
    """Chooses a replica for each request. The same seed, views and queries give the same decisions."""

    def __init__(self, policy: str, rng: Random, clock: Callable[[], float]) -> None:
        """``clock`` is the one that ``ReplicaView.time_s`` is measured on. Raises ValueError for an unknown policy."""
        if policy not in POLICIES:
            raise ValueError(f"routing policy {policy!r} is unknown; there are: {', '.join(POLICIES)}")
        self.policy = policy
        self._choose = POLICIES[policy]
        self._rng = rng
        self._clock = clock
        self._views: dict[str, ReplicaView] = {}  # in order of ids
        self._sent = SentLoad()
        self._last: str | None = None
        self._num_decisions = 0
        self._endings: Counter[Ending] = Counter()

    def update(self, views: Iterable[ReplicaView]) -> None:
        """These are the replicas now. One that is not among them is forgotten at once, its open requests with it."""
        views_now = {view.replica_id: view for view in sorted(views, key=lambda view: view.replica_id)}
        for replica_id in self._views.keys() - views_now.keys():
            self._sent.forget(replica_id)
        for view in views_now.values():
            self._sent.report(view.replica_id, view.time_s)
        self._views = views_now

    def forget(self, replica_id: str) -> None:
        """The replica is gone (a call to it just failed); do not wait for the next ``update``."""
        if self._views.pop(replica_id, None) is not None:
            self._sent.forget(replica_id)

    def choose(self, query: RouteQuery) -> Decision:
        """Where ``query`` goes; it counts as open there until ``done``. Raises NoReplica if none may take it."""
        candidates = tuple(
            Candidate(view=view, sent=self._sent.of(view.replica_id))
            for view in self._views.values()
            if view.may_take and query.permits(view.replica_id)
        )
        if not candidates:
            raise NoReplica(self._why_none(query))
        choice = self._choose(query, candidates, Turn(rng=self._rng, last=self._last))
        now_s = self._clock()
        decision = Decision(
            number=self._num_decisions,
            rid=query.rid,
            replica_id=choice.replica_id,
            policy=self.policy,
            reason=choice.reason,
            compared=choice.compared,
            candidates=candidates,
            num_tokens=len(query.token_ids),
            time_s=now_s,
        )
        self._sent.send(decision.replica_id, number=decision.number, num_tokens=decision.num_tokens, now_s=now_s)
        self._num_decisions += 1
        self._last = decision.replica_id
        return decision

    def done(self, decision: Decision, outcome: Outcome) -> bool:
        """The request of ``decision`` ended, however it did. False if it was not open any more.

        Safe to call twice (from an error path and a ``finally``), and after the replica has left.
        """
        was_open = self._sent.end(decision.number)
        if was_open:
            self._endings[outcome.ending] += 1
        return was_open

    @property
    def views(self) -> tuple[ReplicaView, ...]:
        return tuple(self._views.values())

    @property
    def num_open(self) -> int:
        """Requests chosen and not done, at replicas that are still there."""
        return self._sent.num_open

    @property
    def endings(self) -> Mapping[Ending, int]:
        """How many decisions ended how."""
        return self._endings

    def check(self) -> None:
        """Raises AssertionError if the open requests do not add up."""
        self._sent.check()
        open_by_replica = [self._sent.of(replica_id).in_flight for replica_id in self._views]
        assert sum(open_by_replica) == self.num_open, "a replica that has left still has open requests"

    def _why_none(self, query: RouteQuery) -> str:
        if not self._views:
            return f"request {query.rid}: no replica has reported yet, or all have left; try again in a moment"
        passed_over = [
            f"{view.replica_id} is {view.state if query.permits(view.replica_id) else 'not permitted by the request'}"
            for view in self._views.values()
        ]
        wanted = "any replica" if query.allowed is None else f"one of {sorted(query.allowed)}"
        wanted += f" but not {sorted(query.excluded)}" if query.excluded else ""
        return (
            f"request {query.rid} wants {wanted}; of {len(self._views)} replicas {', '.join(passed_over)}: "
            "try again in a moment, or permit more replicas"
        )
