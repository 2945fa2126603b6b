"""StoreTier: pages come from a store (L3) into the host tier before a prompt needs them, and go there from it.

Owns:      what requests want from the store, and what is on its way there; store_worker.py is the thread.
Never:     delays a request for longer than computing what the store has would take (policy expected); allocates before
           it knows of a hit.
           Asks a store that has not answered for `HANG_S`.
Invariant: a host page that the thread fills is taken (`HiRadixCache.take_host`), one that it reads is pinned, until it
           has said that it is through, however long the store hangs.
Thread:    the scheduler's.

    ask ─> LOOKING ──found──> READING ─ pages into host memory, adopted in order ─> over ─> loaded as any host hit
              └─ nothing ──────────────────────────────────────────────────────────> over
    a node is copied to the host ─> `put` ─> written when the thread has nothing to read ─> event of Tier.STORE
"""

import collections
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from kvtransfer.pages import Tier
from replicas.cache.node import TreeNode, path_to
from replicas.cache.store_worker import Fetch, FetchStage, Put, Worker
from replicas.cache.tiers import HiRadixCache
from replicas.request import Req
from replicas.types import TierStats

log = logging.getLogger(__name__)

HANG_S = 30.0  # a store that has not answered a call for so long is off until it does
LOOK_SHARE = 0.01  # of the time that computing the prompt would take, for a store that never has anything
UNMEASURED_S = 0.2  # that a prompt waits for the store before any prefill rate has been measured
SMOOTHING = 0.1  # weight of the newest prompt in the share of prompts that the store has something of
MAX_LEFT = 64  # cancelled fetches still queued on the store's thread: a store that is so far behind is not asked
MAX_UNWRITTEN = 4096  # nodes that are still to be written; beyond it the oldest are not
MAX_PUT_PAGES = 512  # pages that wait to be written; further nodes are written when they have been


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """What is known of a request that waits for the store; tokens, seconds, and s per token. Times are the clock's."""

    asked_s: float  # when the store was asked
    reading_s: float | None  # when the first page was asked for; None: nothing is read yet
    prompt_len: int
    uncached_len: int  # without what the tiers above have
    found_len: int  # that the store has
    left_len: int  # of those, tokens that have not come
    compute_s: float  # for a token, by the engine's steps; 0 until measured
    read_s: float  # for a token, from the store; 0 until measured
    hit_share: float  # of the prompts, as far back as is remembered, that the store had something of


def _timeout(wait: Wait) -> float:
    return wait.asked_s + min(30.0, 2.0 + 0.1 * wait.prompt_len / 1024)


def _expected(wait: Wait) -> float:
    """Wait while that is expected to be quicker than computing."""
    if not wait.compute_s:
        return wait.asked_s + UNMEASURED_S
    if wait.reading_s is None:
        return wait.asked_s + wait.uncached_len * wait.compute_s * max(LOOK_SHARE, wait.hit_share)
    if wait.left_len * wait.read_s > wait.left_len * wait.compute_s:
        return float("-inf")
    return wait.reading_s + wait.found_len * wait.compute_s


# the values of ``cache.prefetch``: when a request gives up waiting for the store, by the tier's clock
PREFETCH: dict[str, Callable[[Wait], float]] = {
    "best_effort": lambda wait: float("-inf"),
    "wait_complete": lambda wait: float("inf"),
    "timeout": _timeout,
    "expected": _expected,
}


class StoreTier:
    """The store under one engine's host tier."""

    def __init__(
        self,
        tiers: HiRadixCache,
        worker: Worker,
        *,
        name: str,
        policy: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Starts ``worker``. ``name``: equal where replicas share the store."""
        self.name = name
        self._tiers = tiers
        self._policy = policy
        self._clock = clock
        self._fetches: dict[Req, Fetch] = {}
        self._left: list[Fetch] = []  # whose requests no longer wait, and that the thread is not through with
        self._unwritten: collections.deque[TreeNode] = collections.deque(maxlen=MAX_UNWRITTEN)
        self._num_putting = 0  # pages
        self._hit_share = 0.0
        self._worker = worker
        self._hangs = 0
        self._is_off = False
        self._late = 0  # fetches that came too late, or were slower than computing
        self._s_per_token = 0.0  # of reads; 0 until measured
        self._read_pages = self._written_pages = 0
        tiers.on_copied = self._unwritten.append
        worker.start()

    def on_event(self, call: Callable[[], None]) -> None:
        """Register ``call``: the thread calls it when there is news for `poll`. It must not block."""
        self._worker.on_event = call

    @property
    def error(self) -> BaseException | None:
        """Why the thread has died; any thread may ask."""
        return self._worker.error

    @property
    def out_of_use(self) -> str | None:
        """Why the store is not used at present."""
        if self._worker.error is not None:
            return repr(self._worker.error)
        return f"it has not answered a call for {HANG_S:.0f} s; it is used when it answers" if self._is_off else None

    @property
    def num_taken(self) -> int:
        """Host pages that the thread fills."""
        return sum(len(fetch.host_pages) - fetch.num_adopted for fetch in [*self._fetches.values(), *self._left])

    def ask(self, req: Req, longest: int) -> None:
        """Look for what follows what the replica has of the first ``longest`` tokens of ``req``."""
        if len(self._left) >= MAX_LEFT or self._is_off:
            return
        ps = self._tiers.page_size
        ids = req.ids[: longest // ps * ps].copy()
        first = self._tiers.peek_len(ids, req.salt) // ps
        if first * ps < len(ids) and self._worker.error is None:
            fetch = self._fetches[req] = Fetch(ids, req.salt, first, self._clock())
            self._worker.fetch(fetch)

    def waits(self, req: Req, now_s: float) -> bool:
        """Whether ``req`` should wait for what is being read for it. When it should not, its fetch is over."""
        fetch = self._fetches.get(req)
        if fetch is None:
            return False
        dead = self._worker.error is not None
        if fetch.stage is not FetchStage.OVER and not (dead or self._is_off) and now_s < self._wait_until_s(fetch):
            return True
        if fetch.stage is not FetchStage.OVER and fetch.keys:
            self._late += 1
        self.forget(req)
        return False

    def forget(self, req: Req) -> None:
        """``req`` starts or has ended: what the thread still reads for it is given back when it is through."""
        fetch = self._fetches.pop(req, None)
        if fetch is None:
            return
        fetch.unwanted = True  # what was found, and is not being read, takes no host pages now
        self._take_in(fetch, req)
        if fetch.stage is not FetchStage.OVER or fetch.num_adopted < len(fetch.host_pages):
            self._left.append(fetch)

    def poll(self) -> None:
        """Take in what the thread has done since the last call."""
        self._watch()
        for req, fetch in list(self._fetches.items()):
            self._take_in(fetch, req)
        for fetch in list(self._left):
            if fetch.stage is FetchStage.FOUND:
                if fetch.keys:  # too late, and a reason to wait longer; a look that was called off finds nothing
                    self._hit_share += (1.0 - self._hit_share) * SMOOTHING
                fetch.stage = FetchStage.OVER
            if fetch.stage is FetchStage.OVER:
                self._take_in(fetch, None)
                self._left.remove(fetch)
        for put in self._worker.take_puts():
            self._tiers.host.unpin(put.host_pages)
            self._num_putting -= len(put.host_pages)
            self._written_pages += put.num_stored
            if put.node.parent is not None and put.node.num_pages <= len(put.host_pages) == put.num_stored:
                put.node.stored = True
                self._tiers.tell_tier(put.node, Tier.STORE)
        while self._unwritten and self._num_putting < MAX_PUT_PAGES and not self._is_off:
            self._put(self._unwritten.popleft())

    def stats(self, of_host: TierStats) -> TierStats:
        """Add what the store holds and has done to the statistics of the host tier."""
        counted, ps = self._worker.stats(), self._tiers.page_size
        return replace(
            of_host,
            store=self.name,
            store_error=self.out_of_use,
            store_bytes=counted.bytes,
            store_items=counted.items,
            store_written_tokens=self._written_pages * ps,
            store_read_tokens=self._read_pages * ps,
            store_write_s=counted.write_s,
            store_read_s=counted.read_s,
            store_wrong_pages=counted.corrupt,
            store_errors=counted.errors + self._hangs,
            slow_loads=of_host.slow_loads + self._late,
            store_s_per_token=self._s_per_token,
            store_latency_s=counted.asked_s / counted.asked if counted.asked else 0.0,
        )

    def close(self) -> None:
        self._worker.close()

    def check(self) -> None:
        """Assert that every host page that is not in the tree has its owner here."""
        assert self.num_taken <= self._tiers.host.coming, "host pages were taken that are not counted"
        assert self._num_putting >= 0

    def _watch(self) -> None:
        """Leave a store alone that hangs, and take it into use again when it has answered."""
        hangs = self._worker.silent_s >= HANG_S
        if hangs and not self._is_off:
            self._hangs += 1
            log.error("the store %s has not answered for %.0f s: it is not used until it answers", self.name, HANG_S)
            self._worker.drop_queued()
        elif self._is_off and not hangs:
            log.warning("the store %s answers again: it is used", self.name)
        self._is_off = hangs

    def _take_in(self, fetch: Fetch, req: Req | None) -> None:
        """Take host pages for what was found, or give the tree what was read; give back what will not come."""
        if fetch.stage is FetchStage.LOOKING:
            return
        if fetch.stage is FetchStage.FOUND:
            self._hit_share += (bool(fetch.keys) - self._hit_share) * SMOOTHING
            pages = self._tiers.take_host(len(fetch.keys)) if fetch.keys and not fetch.unwanted else None
            if pages is None:
                fetch.keys, fetch.stage = [], FetchStage.OVER
            else:
                fetch.host_pages, fetch.reading_s = pages, self._clock()
                fetch.stage = FetchStage.READING
                self._worker.fetch(fetch)
            return
        over = fetch.stage is FetchStage.OVER  # read before ``num_read``, which is then final
        first, end = fetch.num_adopted, fetch.num_read
        if end > first:
            fetch.num_adopted = end
            pages = fetch.host_pages[first:end]
            kept = self._tiers.adopt(fetch.token_ids, fetch.salt, pages, fetch.first + first, stored=True)
            self._read_pages += end - first
            if req is not None and kept:
                req.cached = replace(req.cached, store=req.cached.store + kept * self._tiers.page_size)
        if over:
            counted = self._worker.stats()
            self._s_per_token = counted.read_s / counted.reads / self._tiers.page_size if counted.reads else 0.0
        if over and fetch.num_adopted < len(fetch.host_pages):
            self._tiers.host.give_back(fetch.host_pages[fetch.num_adopted :])
            fetch.host_pages = fetch.host_pages[: fetch.num_adopted]

    def _wait_until_s(self, fetch: Fetch) -> float:
        """When a request gives up waiting for ``fetch``."""
        ps = self._tiers.page_size
        is_looking = fetch.stage in (FetchStage.LOOKING, FetchStage.FOUND)
        found = 0 if is_looking else len(fetch.keys)
        wait = Wait(
            asked_s=fetch.asked_s,
            reading_s=None if is_looking else fetch.reading_s,
            prompt_len=len(fetch.token_ids),
            uncached_len=len(fetch.token_ids) - fetch.first * ps,
            found_len=found * ps,
            left_len=(found - fetch.num_read) * ps,
            compute_s=self._tiers.compute_s_per_token,
            read_s=self._s_per_token,
            hit_share=self._hit_share,
        )
        return PREFETCH[self._policy](wait)

    def _put(self, node: TreeNode) -> None:
        """Ask the thread to write a node's host pages, unless they are gone or there already."""
        if node.parent is None or not node.on_host or node.stored:
            return
        self._tiers.host.pin(node.host)
        self._num_putting += node.num_pages
        token_ids = np.concatenate([each.key for each in path_to(node)])
        first = len(token_ids) // self._tiers.page_size - node.num_pages
        self._worker.put(Put(node, token_ids, first, node.host.copy()))
