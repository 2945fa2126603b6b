"""Radix caches of replicas for who looks: however many look, a replica is asked for one tree once a second.

Owns:      what was told in the last FRESH_S, and what is being asked.
Never:     keeps a failure; lets one who leaves take the answer from the others that wait for it.
Invariant: at most one question in flight by (replica, depth, min_tokens).
Thread:    the observatory's event loop.
"""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass

from deployments.watch.observatory.routers import Routers
from deployments.watch.observatory.tree_body import PageNames, tree_body

FRESH_S = 1.0
Key = tuple[str, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One question, and its answer in time."""

    asked_s: float
    answer: asyncio.Task[bytes]


class Trees:
    """Answers of ``GET /api/tree``, as JSON."""

    def __init__(self, routers: Routers, *, clock: Callable[[], float], calendar: Callable[[], float]) -> None:
        """``clock`` never goes back; ``calendar``: seconds since 1970, for the answer's ``time``."""
        self.names = PageNames()
        self._routers = routers
        self._clock = clock
        self._calendar = calendar
        self._asked: dict[Key, Asked] = {}

    async def get(self, replica_id: str, *, max_depth: int, min_tokens: int) -> bytes:
        """Raises: NoRouter, ReplicaGone."""
        now_s = self._clock()
        self._asked = {key: each for key, each in self._asked.items() if _is_good(each, now_s)}
        key = (replica_id, max_depth, min_tokens)
        if key not in self._asked:
            answer = asyncio.create_task(self._ask(*key))
            answer.add_done_callback(_heard)
            self._asked[key] = Asked(asked_s=now_s, answer=answer)
        return await asyncio.shield(self._asked[key].answer)

    async def _ask(self, replica_id: str, max_depth: int, min_tokens: int) -> bytes:
        tree = await self._routers.cache_tree(replica_id, max_depth=max_depth, min_tokens=min_tokens)
        body = tree_body(tree, self.names, replica_id=replica_id, time_s=self._calendar())
        return json.dumps(body, separators=(",", ":"), allow_nan=False).encode()


def _is_good(asked: Asked, now_s: float) -> bool:
    answer = asked.answer
    if not answer.done():
        return True
    return now_s - asked.asked_s < FRESH_S and not answer.cancelled() and answer.exception() is None


def _heard(answer: asyncio.Task[bytes]) -> None:
    """A failure that nobody waits for any longer is no news to asyncio."""
    if not answer.cancelled():
        answer.exception()
