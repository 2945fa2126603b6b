"""The waiting queue: requests that hold nothing yet, and the order in which they are tried.

Owns:      the waiting requests and their order.
Never:     touches pages; it only asks how long a cached prefix is.
Invariant: every request in it is in state WAITING and holds nothing.
Thread:    scheduler thread only.
"""

from collections.abc import Callable, Iterator

from replicas.request import Req, ReqState
from replicas.types import TokenIds

PeekLen = Callable[[TokenIds, str], int]  # cached prefix length of (token ids, salt), without side effects


class WaitingQueue:
    """Requests that aged, by rank; then highest priority first; then by policy.

    A request ranks by ``Req.ranks_from_s``: its arrival, earlier by ``ageing_s`` for each point of its priority. So
    ageing crosses priorities: whatever comes more than ``ageing_s`` for each point of difference later waits behind it.
    ``lpm`` tries the longest cached prefix first (SPEC F03, "SGLang longest prefix match"), because a prefix in use is
    not evicted meanwhile. Ageing bounds the wait of requests without any prefix. Queues longer than ``lpm_max_queue``
    are taken by rank: peeking at every prompt would cost more than it gains.
    """

    def __init__(self, *, policy: str, lpm_max_queue: int, ageing_s: float, peek_len: PeekLen) -> None:
        self._policy = policy
        self._lpm_max_queue = lpm_max_queue
        self._ageing_s = ageing_s
        self._peek_len = peek_len
        self._reqs: dict[tuple[str, int], Req] = {}  # insertion order is arrival order, retracted ones at the end

    def __len__(self) -> int:
        return len(self._reqs)

    def __iter__(self) -> Iterator[Req]:
        return iter(self._reqs.values())

    def add(self, req: Req) -> None:
        assert req.state is ReqState.WAITING
        assert req.holding is None
        self._reqs[(req.rid, req.index)] = req

    def remove(self, req: Req) -> None:
        del self._reqs[(req.rid, req.index)]

    def ordered(self, now_s: float) -> list[Req]:
        """The requests in the order in which to try them. Stable: ties keep their rank."""
        reqs = sorted(self._reqs.values(), key=lambda req: req.ranks_from_s)
        if self._policy == "fcfs" or len(reqs) > self._lpm_max_queue:
            return reqs

        def rank(req: Req) -> tuple[int, int, int]:
            if now_s - req.ranks_from_s >= self._ageing_s:
                return (0, 0, 0)
            return (1, -req.priority, -self._peek_len(req.ids[: req.num_tokens - 1], req.salt))

        return sorted(reqs, key=rank)

    def uncached_tokens(self) -> int:
        """Tokens that would have to be computed if all of it started now; an upper bound for long queues."""
        if len(self._reqs) > self._lpm_max_queue:
            return sum(req.num_tokens for req in self._reqs.values())
        return sum(
            req.num_tokens - self._peek_len(req.ids[: req.num_tokens - 1], req.salt) for req in self._reqs.values()
        )

    def check(self) -> None:
        for req in self._reqs.values():
            assert req.state is ReqState.WAITING, f"{req.rid} waits but is {req.state}"
            assert req.holding is None, f"{req.rid} waits but holds {req.holding}"
