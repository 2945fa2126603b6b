"""Row and pages for decode legs, before their K/V is sent; and how any request gives up what it holds.

Owns:      nothing; moves decode legs from the prealloc queue to the hand-off queue.
Never:     talks to the sender (replicas/disagg).
Invariant: nothing is granted that could not finish. Legs that wait for their sender never hold every row, however long
           its queue is, so local requests go on. Pages that a peer may still touch leave a request through quarantine.
Thread:    scheduler thread only.

The two legs of a hand-off; replicas/disagg calls the methods of the scheduler that the arrows name:

    ask_grant ─> PreallocQueue ──grant──> HandOffQueue, RECEIVING ─┬─ received ─> running
                                                                   └─ compute_here ─> WaitingQueue
    park ─> HandOffQueue, WAITING ──unpark──> WaitingQueue ... last chunk ─> HandOffQueue, HANDING_OFF ─ finish
"""

from dataclasses import dataclass

from replicas.cache.kv import KvCache
from replicas.errors import PagesExhausted
from replicas.request import Req, ReqState
from replicas.scheduler.budget import NewTokenRatio
from replicas.scheduler.queues import Queues


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The memory that grants may use, and what they must leave to others."""

    num_rows: int  # rows that may still be taken
    max_receiving: int  # decode legs that may wait for their K/V at once
    reserved: int  # tokens that the requests in flight may still need
    alone: bool  # nothing is in flight, so waiting frees no memory
    barrier: float | None  # rank of a local request that found no memory; legs that rank after it wait


def grant(queues: Queues, kv: KvCache, ratio: NewTokenRatio, room: Room, *, now_s: float) -> bool:
    """Give row and pages of the whole sequence to the decode legs that fit, by rank; they are RECEIVING then.

    Returns: whether any leg was granted. A head that only ``max_receiving`` stops bars no local request.
    """
    prealloc = queues.prealloc
    prealloc.short = None
    if not len(prealloc):
        return False
    limit = room.max_receiving - len(queues.away.in_state(ReqState.RECEIVING))
    num_granted, reserved, alone = 0, room.reserved, room.alone
    for req in sorted(prealloc, key=lambda req: req.ranks_from_s):
        if num_granted >= limit or (room.barrier is not None and req.ranks_from_s > room.barrier):
            break
        if num_granted >= room.num_rows or not _take(req, kv, ratio, reserved=reserved, alone=alone):
            prealloc.short = req
            break
        prealloc.remove(req)
        req.move(ReqState.RECEIVING)
        assert req.leg is not None
        req.leg.exposed, req.leg.granted_s = True, now_s
        queues.away.add(req)
        queues.away.granted.append(req)
        num_granted, reserved, alone = num_granted + 1, reserved + ratio.reserve(req), False
    return num_granted > 0


def _take(req: Req, kv: KvCache, ratio: NewTokenRatio, *, reserved: int, alone: bool) -> bool:
    """Take row, locked prefix and pages for ``req``, or nothing."""
    reused = kv.admit(req, whole=True)  # locks the prefix: its pages no longer count as evictable
    need = req.num_tokens - reused + (min(1, req.max_remaining) if alone else ratio.reserve(req) + reserved)
    if need <= kv.available_tokens():
        try:
            kv.extend(req, req.num_tokens)
        except PagesExhausted:
            pass
        else:
            return True
    kv.release(req, keep=True)
    return False


def max_receiving(max_running: int) -> int:
    """How many decode legs may wait for their K/V at once: three quarters of the rows."""
    return max(1, max_running - max(1, max_running // 4))


def let_go(req: Req, kv: KvCache, *, keep: bool) -> None:
    """Take back what ``req`` holds; pages that a peer may still read (prefill leg) or write go to quarantine.

    Args: keep: its computed pages stay in the prefix cache, unless they go to quarantine.
    """
    if req.leg is not None and req.leg.exposed:
        req.leg.detained = kv.quarantine(req, locked=req.is_prefill_leg)
        req.leg.exposed = False
    else:
        kv.release(req, keep=keep)
