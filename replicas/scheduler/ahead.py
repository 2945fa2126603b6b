"""Steps that are under way, and one more decode step made before the tokens of the last one are known.

Owns:      the requests of each step between its making and `apply` (two at most), and what those that ended meanwhile
           still hold.
Never:     decides what runs when anything but one more token of everybody could.
Invariant: a request of a step under way keeps its row and pages until that step is applied: a kernel may still write
           to them. Whoever is in a step made ahead is in the step before it.
Thread:    scheduler thread only.

    schedule ─> step n ─────────────> apply(n)
         ahead ─> step n + 1, before apply(n) ──> apply(n + 1): those that ended at n are passed over, and let go now
"""

from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from replicas.cache.kv import KvCache
from replicas.request import Req
from replicas.scheduler.deadlines import Deadlines
from replicas.scheduler.decode import RunningBatch
from replicas.scheduler.legs import Legs
from replicas.scheduler.prefill import PrefillScheduler
from replicas.scheduler.waiting import WaitingQueue

LOOK_AGAIN = 16  # steps; those who wait for memory may fit without anybody ending, as reservations shrink


class UnderWay:
    """Whose the steps are that were made and not applied, oldest first."""

    def __init__(self, let_go: Callable[[Req, bool], None]) -> None:
        """``let_go``: takes back what a request holds; its computed pages are kept in the cache if the flag says so."""
        self._let_go = let_go
        self._steps: deque[list[Req]] = deque()
        self._ended: list[tuple[Req, bool]] = []

    def __len__(self) -> int:
        return len(self._steps)

    def __contains__(self, req: Req) -> bool:
        return any(req in step for step in self._steps)

    @property
    def newest(self) -> list[Req]:
        """In the order of its rows."""
        return self._steps[-1]

    @property
    def ended(self) -> list[Req]:
        """Requests that are finished, and hold what a step under way still writes to."""
        return [req for req, _ in self._ended]

    def begin(self, reqs: list[Req]) -> None:
        self._steps.append(reqs)

    def end(self) -> list[Req]:
        """The oldest step is over. Returns: its requests, ended or not."""
        return self._steps.popleft()

    def hold(self, req: Req, *, keep: bool) -> None:
        """``req`` ended: what it holds goes when no step has it any more, its pages to the cache if ``keep``."""
        self._ended.append((req, keep))

    def let_go(self) -> None:
        """After `end`: take back what was held for the step that is over."""
        held, self._ended = self._ended, []
        for req, keep in held:
            if req in self:
                self._ended.append((req, keep))
            else:
                self._let_go(req, keep)

    def check(self) -> None:
        for req in (req for step in self._steps for req in step):
            assert req.holding is not None, f"{req.rid} is in a step under way and holds nothing"
        assert all(req in self for req, _ in self._ended), "what an ended request holds is kept for no step"


class Ahead:
    """Who can be in decode step n + 1 while step n runs: all that may come between is the end of a request."""

    def __init__(
        self,
        kv: KvCache,
        running: RunningBatch,
        waiting: WaitingQueue,
        prefill: PrefillScheduler,
        legs: Legs,
        deadlines: Deadlines,
        under_way: UnderWay,
    ) -> None:
        self._kv = kv
        self._running = running
        self._waiting = waiting
        self._prefill = prefill
        self._legs = legs
        self._deadlines = deadlines
        self._under_way = under_way
        self._turned_away = False  # who waits now found no room, and nothing was given back since
        self._num_made = 0  # since the waiting were last looked at

    def looked(self) -> None:
        """The waiting were looked at, and none of them can start."""
        self._turned_away = True
        self._num_made = 0

    def disturb(self) -> None:
        """Somebody came or ended: who waits may be able to start."""
        self._turned_away = False

    def next(self, now_s: float) -> tuple[list[Req], npt.NDArray[np.int32]] | None:
        """Who makes one more token after the step under way, and where they stand in it; None where something else may
        have to run first, or where a token must be known to make the next one."""
        if len(self._under_way) != 1 or not self._nothing_else(now_s):
            return None
        reqs = [req for req in self._running if req.max_remaining > 1]  # it may be their last in the step under way
        if not reqs or any(_needs_host(req) for req in reqs):
            return None
        if self._has_queue and len(reqs) < len(self._running):
            return None  # who ends makes room
        if self._kv.pages_needed_decode(reqs) * self._kv.page_size > self._kv.available_tokens():
            return None
        follows = _places(reqs, self._under_way.newest)
        if follows is not None:
            self._num_made += 1
            return reqs, follows
        return None  # somebody has joined, whose token is not of that step

    @property
    def _has_queue(self) -> bool:
        return bool(len(self._waiting) or len(self._legs.prealloc))

    def _nothing_else(self, now_s: float) -> bool:
        """Whether a look at the queues, the deadlines and the prompt in progress would find nothing to do."""
        if self._prefill.chunked is not None:
            return False
        if self._has_queue and (not self._turned_away or self._num_made >= LOOK_AGAIN):
            return False
        next_s = self._deadlines.next_s
        return next_s is None or next_s > now_s


def _needs_host(req: Req) -> bool:
    """Whether the token after the one under way needs the host: it must know that one (penalties, bad words), make
    logprobs, or change logits. Launching such a step waits for the one before it, whose tokens would then come a step
    late."""
    sampling = req.sampling
    if sampling.edits_logits or req.return_logprobs:
        return True
    return req.num_tokens + 1 - req.prompt_len < sampling.min_new_tokens and bool(req.stop_ids)


def _places(reqs: list[Req], before: list[Req]) -> npt.NDArray[np.int32] | None:
    """[B] where each of ``reqs`` stands in ``before``; None if one does not."""
    if reqs == before:
        return np.arange(len(reqs), dtype=np.int32)
    place = {id(req): index for index, req in enumerate(before)}
    found = [place.get(id(req)) for req in reqs]
    return None if None in found else np.array(found, dtype=np.int32)
