"""Retraction: who gives way when the next decode step finds no pages (SPEC F11).

Owns:      the order in which requests give way.
Never:     takes pages that a peer may read: a prefill leg that has begun keeps them.
Invariant: a request that was retracted waits again, keeps its tokens and holds nothing; one keeps going.
Thread:    scheduler thread only.
Source:    SGLang retract_decode.
"""

from replicas.cache.kv import KvCache
from replicas.request import Req, ReqState
from replicas.scheduler.budget import NewTokenRatio
from replicas.scheduler.decode import RunningBatch
from replicas.scheduler.prefill import PrefillScheduler
from replicas.scheduler.tokens import Counters
from replicas.scheduler.waiting import WaitingQueue


class Retraction:
    """Moves requests from prefill or the running batch back to the waiting queue."""

    def __init__(
        self,
        kv: KvCache,
        waiting: WaitingQueue,
        running: RunningBatch,
        prefill: PrefillScheduler,
        ratio: NewTokenRatio,
        counters: Counters,
    ) -> None:
        self._kv = kv
        self._waiting = waiting
        self._running = running
        self._prefill = prefill
        self._ratio = ratio
        self._counters = counters

    def until_it_fits(self) -> bool:
        """Make room for one token of each who runs: the running give way first, but one keeps going; that may be a
        prefill leg in the middle of its prompt, whose pages are on their way. Returns: whether anybody gave way."""
        retracted = False
        while len(self._running) and self._running.short_of_pages():
            chunked = self._prefill.chunked
            if len(self._running) == 1 and chunked is not None and not chunked.is_prefill_leg:
                victim = chunked
            else:
                victim = self._running.victim()
            self.retract(victim)
            retracted = True
        if retracted:
            self._ratio.retracted(self._running)
        return retracted

    def retract(self, req: Req) -> None:
        """Take the pages of a request in prefill or decode back; it waits again and keeps its tokens."""
        assert not req.is_prefill_leg, f"prefill leg {req.rid}: its pages may be on their way"
        if req.state is ReqState.RUNNING:
            self._running.remove(req)
        self._prefill.forget(req)
        self._counters.retractions += 1
        self._counters.retracted_tokens += req.computed_len
        req.num_retractions += 1
        req.prompt_logprobs.clear()
        self._kv.release(req, keep=True)
        req.move(ReqState.WAITING)
        self._waiting.add(req)
