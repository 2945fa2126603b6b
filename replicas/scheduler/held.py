"""Held sessions: agents' requests that wait until there is room for their whole session beside older ones.

Owns:      which requests are held, and when to look at them again.
Never:     touches pages: what a session needs, and what is kept for older ones, is asked of the cache
           (cache/sessions.py). Orders those that it lets go: they wait for their turn like all others.
Invariant: requests are let go in the order of their sessions' age, a large one's before a younger small one's; one that
           has been held for ``most_s``, what it waited elsewhere included, is let go whatever the room.
Thread:    scheduler thread only.
"""

import math
from collections.abc import Callable

from replicas.cache.kv import KvCache
from replicas.request import Req, ReqQueue

LOOK_S = 0.05  # between two looks while none arrives
LOOK_SHARE = 0.05  # of the time, which looks may take: each walks through what is kept


class HeldSessions(ReqQueue):
    """The requests of agents' sessions for which there was no room yet."""

    def __init__(self, most_s: float) -> None:
        """``most_s``: how long one may be held; 0: none is."""
        super().__init__()
        self._most_s = most_s
        self._next_s = self._soonest_s = -math.inf  # of the next look: while none arrives, and when one does

    def hold(self, req: Req) -> bool:
        """Hold ``req``, of an agent's session, until `take_ready`. Returns: whether it is; not lines of batches, nor an
        answer whose beginning its client has seen."""
        if not self._most_s or req.asked.offline or req.num_resumed:
            return False
        self.add(req)
        self._next_s = self._soonest_s
        return True

    def take_ready(self, kv: KvCache, clock: Callable[[], float]) -> list[Req]:
        """Hold no longer those for which there is room beside older sessions and what others that are held need, and
        those that were held for too long. Returns: them; none where it is too soon to look."""
        now_s = clock()
        if now_s < self._next_s:
            return []
        agents = [(session, req) for req in self if (session := kv.agent_of(req)) is not None]
        agents.sort(key=lambda each: each[0].born)
        ready = [req for req in self if kv.agent_of(req) is None]
        for (_, req), (need, before) in zip(agents, kv.session_needs(agents), strict=True):
            held_s = now_s - req.stamps.arrival_s
            late = held_s + req.asked.waited_s >= self._most_s
            if not before or need + before <= kv.available_tokens() or late:
                req.stamps.held_s = held_s
                ready.append(req)
        for req in ready:
            self.remove(req)
        looked_s = clock()
        self._soonest_s = looked_s + (looked_s - now_s) / LOOK_SHARE
        self._next_s = max(self._soonest_s, looked_s + LOOK_S)
        return ready
