"""PreallocQueue: decode legs that wait for their row and pages, which they must have before anything is sent to them.

Owns:      the decode legs that hold nothing yet, and their order (`rank`; without priorities FIFO).
Never:     talks to the sender (replicas/disagg); runs anything.
Invariant: every request in it is WAITING and holds nothing. Nobody overtakes its head: where the head finds no room,
           it bars later local requests from theirs (`barrier`), and it may not overtake an older one that found none.
Thread:    scheduler thread only.
Source:    SPEC H07; SGLang's DecodePreallocQueue for the rule that nothing is granted that could not finish.
"""

import itertools
from dataclasses import dataclass

from replicas.cache.kv import KvCache
from replicas.errors import PagesExhausted
from replicas.request import Req, ReqState
from replicas.scheduler.budget import NewTokenRatio

Rank = float


def rank(req: Req) -> Rank:
    """Its place in the queues, as a time in seconds: the smaller is served first when memory is short."""
    return req.ranks_from_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What a grant must leave to others."""

    num_rows: int  # that may still be taken
    reserved: int  # tokens that those in flight may still need
    alone: bool  # nobody is in flight: nothing will be given back by waiting


class PreallocQueue:
    """First come, first granted."""

    def __init__(self, kv: KvCache, ratio: NewTokenRatio) -> None:
        self._kv = kv
        self._ratio = ratio
        self._reqs: dict[tuple[str, int], Req] = {}
        self.short: Req | None = None  # the head that found no room

    def __len__(self) -> int:
        return len(self._reqs)

    def __contains__(self, req: Req) -> bool:
        return (req.rid, req.index) in self._reqs

    def add(self, req: Req) -> None:
        assert req.state is ReqState.WAITING
        assert req.holding is None
        self._reqs[(req.rid, req.index)] = req

    def remove(self, req: Req) -> None:
        del self._reqs[(req.rid, req.index)]
        if self.short is req:
            self.short = None

    @property
    def barrier(self) -> Rank | None:
        """Local requests that rank after it must wait: the head needs what they would take."""
        return rank(self.short) if self.short is not None else None

    def grant(self, room: Room, *, limit: int, barrier: Rank | None, now_s: float) -> list[Req]:
        """Give row and pages of the whole sequence to as many as fit, in order; they are RECEIVING then.

        Args: limit: as many at most; a head that this alone stops bars nobody.
              barrier: rank of a local request that found no room; those that rank after it wait.
        """
        granted: list[Req] = []
        self.short = None
        if not self._reqs:
            return granted
        num_rows, reserved, alone = room.num_rows, room.reserved, room.alone
        for req in sorted(self._reqs.values(), key=rank):
            if len(granted) >= limit or (barrier is not None and rank(req) > barrier):
                break
            if num_rows <= 0 or not self._take(req, reserved=reserved, alone=alone):
                self.short = req
                break
            del self._reqs[(req.rid, req.index)]
            req.move(ReqState.RECEIVING)
            assert req.leg is not None
            req.leg.exposed, req.leg.granted_s = True, now_s
            granted.append(req)
            num_rows, reserved, alone = num_rows - 1, reserved + self._ratio.reserve(req), False
        return granted

    def older_than(self, time_s: float) -> list[Req]:
        """Those that were there by ``time_s``."""
        return list(itertools.takewhile(lambda req: req.arrival_s <= time_s, self._reqs.values()))

    def check(self) -> None:
        for req in self._reqs.values():
            assert req.state is ReqState.WAITING, f"{req.rid} waits for a grant but is {req.state}"
            assert req.holding is None, f"{req.rid} waits for a grant but holds {req.holding}"
            assert req.leg is not None, f"{req.rid} is no decode leg"
        assert self.short is None or self.short in self, "who bars others has left the queue"

    def _take(self, req: Req, *, reserved: int, alone: bool) -> bool:
        """Row, locked prefix and pages for ``req``, or nothing."""
        reused = self._kv.admit(req, whole=True)  # locks the prefix: what it holds no longer counts as evictable
        need = req.num_tokens - reused + (min(1, req.max_remaining) if alone else self._ratio.reserve(req) + reserved)
        if need <= self._kv.available_tokens():
            try:
                self._kv.extend(req, req.num_tokens)
            except PagesExhausted:
                pass
            else:
                return True
        self._kv.release(req, keep=True)
        return False
