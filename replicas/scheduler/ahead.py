"""The decode step after the one under way, planned before that one's tokens are known.

Owns:      whether the queues must be looked at before another step may be planned so.
Never:     decides what runs when anything other than one more token of every running request could.
Invariant: every request of a step planned ahead is in the step before it; only an end can come between the two.
Thread:    scheduler thread only.

    schedule ─> step n ─────────────> apply(n)
         ahead ─> step n + 1, before apply(n) ──> apply(n + 1): requests that ended at n are passed over, and let go now
"""

import numpy as np
import numpy.typing as npt

from replicas.cache.kv import KvCache
from replicas.request import Req
from replicas.scheduler.queues import Queues

LOOK_AGAIN = 16  # steps; a request that waits for memory may fit although none ended, as reservations shrink


class AheadGate:
    """Whether requests that wait may be passed over: none of them can start, and nothing was freed since."""

    def __init__(self) -> None:
        self._passed_over = False
        self._num_planned = 0  # since the queues were last looked at

    @property
    def must_look(self) -> bool:
        return not self._passed_over or self._num_planned >= LOOK_AGAIN

    def looked(self) -> None:
        """Note that the queues were looked at, and none of their requests can start."""
        self._passed_over = True
        self._num_planned = 0

    def planned(self) -> None:
        """Note a step that was planned without a look at the queues."""
        self._num_planned += 1

    def disturb(self) -> None:
        """Note that a request came or ended: one that waits may be able to start."""
        self._passed_over = False


def plan_ahead(queues: Queues, kv: KvCache, *, must_look: bool) -> tuple[list[Req], npt.NDArray[np.int32]] | None:
    """Choose the requests of the next decode step while one is under way.

    Returns: the requests that make one more token, and their places in the step under way; None if something else may
             have to run first, or if a token must be known to make the next one.
    """
    has_queue = bool(len(queues.waiting) or len(queues.prealloc))
    if len(queues.under_way) != 1 or queues.chunked is not None or (has_queue and must_look):
        return None
    reqs = [req for req in queues.running if req.max_remaining > 1]  # else the step under way may make its last token
    if not reqs or any(_needs_host(req) for req in reqs):
        return None
    if has_queue and len(reqs) < len(queues.running):
        return None  # a request is about to end, which frees memory for one that waits
    if kv.pages_needed_decode(reqs) * kv.page_size > kv.available_tokens():
        return None
    follows = _places(reqs, queues.under_way.newest)
    return None if follows is None else (reqs, follows)  # None: one has joined, whose token is not of that step


def _needs_host(req: Req) -> bool:
    """Whether the token after the one under way needs the host: its logits depend on that token (penalties, bad words),
    or logprobs are wanted. The launch of such a step would wait for the one before it, whose tokens would then be a
    step late."""
    sampling = req.sampling
    if sampling.edits_logits or req.return_logprobs:
        return True
    return req.num_tokens + 1 - req.prompt_len < sampling.min_new_tokens and bool(req.stop_ids)


def _places(reqs: list[Req], before: list[Req]) -> npt.NDArray[np.int32] | None:
    """[B] the place of each of ``reqs`` in ``before``; None if one is not there."""
    if reqs == before:
        return np.arange(len(reqs), dtype=np.int32)
    place = {id(req): index for index, req in enumerate(before)}
    found = [place.get(id(req)) for req in reqs]
    return None if None in found else np.array(found, dtype=np.int32)
