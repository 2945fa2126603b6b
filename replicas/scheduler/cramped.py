"""Requests that no waiting helps: the pool is theirs alone, and what it lacks is in quarantine.

Owns:      how long the heads of the queues have been kept out; those that were answered so, until they are taken.
Never:     frees a page, or judges when a peer lets go of one: that may be never.
Invariant: a request is answered only while nobody holds anything: else what they hold may come back first.
Thread:    scheduler thread only.
"""

from collections.abc import Callable, Sequence

from replicas.cache.kv import KvCache
from replicas.request import Req
from replicas.types import Finish, FinishReason

# A peer that lives lets go within milliseconds of being asked; one that died is proven dead within its heartbeat (3 s)
# and the grace after it (1 s). Who has not let go by then may never.
PATIENCE_S = 5.0


class Cramped:
    """Ends heads of the queues that have been kept out for PATIENCE_S, so that those behind them that fit go on."""

    def __init__(self, kv: KvCache, finish: Callable[[Req, Finish], None]) -> None:
        self._kv = kv
        self._finish = finish
        self._answered: list[Req] = []
        self._since_s: dict[tuple[str, int], float] = {}  # when a head was first found kept out

    def answer(self, heads: Sequence[Req], *, now_s: float) -> bool:
        """``heads`` found no memory while nobody holds any; whether one is ended now."""
        self._since_s = {key(head): self._since_s.get(key(head), now_s) for head in heads}
        late = [head for head in heads if now_s - self._since_s[key(head)] >= PATIENCE_S]
        ended = [self._answer(head) for head in late]
        return any(ended)

    def _answer(self, head: Req) -> bool:
        pool = self._kv.stats()
        detained = pool.quarantined_pages + pool.protected_pages  # nobody holds a lock but for a peer that reads
        if not detained:
            return False
        message = (
            f"{head.num_tokens} tokens need more than the {self._kv.available_tokens()} of {pool.total_tokens} that "
            f"can be had: {detained} pages are in quarantine until the peer of a failed hand-off lets go of them; try "
            "again elsewhere, or later"
        )
        self._finish(head, Finish(reason=FinishReason.ERROR, message=message, http_status=503, retry_as="overloaded"))
        self._answered.append(head)
        return True

    def take_answered(self) -> list[Req]:
        """Those that were ended since the last call."""
        answered, self._answered = self._answered, []
        return answered


def key(req: Req) -> tuple[str, int]:
    return (req.rid, req.index)
