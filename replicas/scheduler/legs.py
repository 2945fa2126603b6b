"""Legs of hand-offs that no step runs, and the siblings that wait for them.

Owns:      decode legs that wait for a grant (prealloc.py), requests that wait for another replica (away.py), and the
           news of both for replicas/disagg: who was granted, who ended.
Never:     decides when a leg is granted or ends: the scheduler does.
Invariant: pages that a peer may still touch leave a request through quarantine only. Legs that wait for their sender
           never hold every row, however long its queue is: what can run here goes on.
Thread:    scheduler thread only.

Two replicas to a request (replicas/disagg drives these; methods without a class are the scheduler's):

    ask_grant ─> PreallocQueue ──schedule──> Away, RECEIVING ─┬─ received ─> RunningBatch
                                                              └─ compute_here ─> WaitingQueue
    park ─> Away, WAITING ──unpark──> WaitingQueue ... last chunk ─> Away, HANDING_OFF ─ finish
"""

from replicas.cache.kv import KvCache
from replicas.request import Req, ReqState
from replicas.scheduler.away import Away
from replicas.scheduler.budget import NewTokenRatio
from replicas.scheduler.prealloc import PreallocQueue, Rank, Room


class Legs:
    """Of one engine, both sides."""

    def __init__(self, kv: KvCache, ratio: NewTokenRatio, *, max_running: int) -> None:
        self._kv = kv
        self._max_receiving = max(1, max_running - max(1, max_running // 4))
        self.prealloc = PreallocQueue(kv, ratio)
        self.away = Away()
        self._granted: list[Req] = []
        self._left: list[Req] = []

    def __len__(self) -> int:
        return len(self.prealloc) + len(self.away)

    def __contains__(self, req: Req) -> bool:
        return req in self.away or req in self.prealloc

    @property
    def num_queued(self) -> int:
        """Requests that hold nothing yet."""
        return len(self.prealloc) + len(self.away.in_state(ReqState.WAITING))

    @property
    def holding(self) -> list[Req]:
        """Requests that hold row and pages."""
        return [req for req in self.away if req.state is not ReqState.WAITING]

    def grant(self, room: Room, *, barrier: Rank | None, now_s: float) -> bool:
        """Give row and pages to the decode legs that fit, as `PreallocQueue.grant` does; whether there were any."""
        limit = self._max_receiving - len(self.away.in_state(ReqState.RECEIVING))
        granted = self.prealloc.grant(room, limit=limit, barrier=barrier, now_s=now_s)
        for req in granted:
            self.away.add(req)
        self._granted += granted
        return bool(granted)

    def remove(self, req: Req) -> None:
        """``req`` is here no more."""
        (self.away if req in self.away else self.prealloc).remove(req)

    def let_go(self, req: Req, *, keep: bool) -> None:
        """``req`` leaves the pools; what a peer may still read (of a prefill leg) or write goes to quarantine."""
        if req.leg is not None and req.leg.exposed:
            req.leg.detained = self._kv.quarantine(req, locked=req.is_prefill_leg)
            req.leg.exposed = False
        else:
            self._kv.release(req, keep=keep)

    def ended(self, req: Req) -> None:
        """Nothing to do where ``req`` takes part in no hand-off."""
        if req.leg is not None:
            self._left.append(req)

    def take_granted(self) -> list[Req]:
        """Decode legs that got row and pages since the last call: their K/V may be asked for."""
        granted, self._granted = self._granted, []
        return granted

    def take_left(self) -> list[Req]:
        """Legs that ended since the last call, for whatever reason: their peers must be told."""
        left, self._left = self._left, []
        return left

    def check(self) -> None:
        self.prealloc.check()
        self.away.check()
