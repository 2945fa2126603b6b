"""Requests that no waiting helps: the pool is theirs alone, and what it lacks is in quarantine.

Owns:      those that were answered so, until they are taken.
Never:     frees a page, or judges when a peer lets go of one: that may be never.
Invariant: a request is answered only while nobody holds anything: else what they hold may come back first.
Thread:    scheduler thread only.
"""

from collections.abc import Callable

from replicas.cache.kv import KvCache
from replicas.request import Req
from replicas.types import Finish, FinishReason


class Cramped:
    """Ends the heads of the queues, so that those behind them that fit go on."""

    def __init__(self, kv: KvCache, finish: Callable[[Req, Finish], None]) -> None:
        self._kv = kv
        self._finish = finish
        self._answered: list[Req] = []

    def answer(self, *heads: Req | None) -> bool:
        """``heads`` found no memory while nobody holds any; whether one is ended now."""
        ended = [self._answer(head) for head in heads if head is not None]
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
