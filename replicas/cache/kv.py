"""KvCache: the one door to KV memory. Match, admit, extend, commit, release: in requests and tokens, not pages.

Owns:      the request table, and what each request holds of the pages (``Req.holding``).
Never:     decides which request runs or is retracted (scheduler/); touches K/V bytes. Statistics and events are read
           from ``store`` directly (engine/): this door is for changes.
Invariant: free + evictable + protected + reserved + quarantined == capacity, and each page is in exactly one of these
           (cache/audit.py). A call that raises has taken nothing.
Window:    where no layer sees further back than ``window`` tokens, a request that decodes holds no page before that:
           its lock is given back once all that it locks is unseen, and its own pages go back one by one. The tree keeps
           prefixes whole, as its invariants want: a prompt's pages stay there, evictable, and an answer that has lost
           pages adds none. A prompt in progress keeps its pages. Where some layers see all and others a window, these
           have a pool of their own: the pages stay, and their parts there go (cache/parts.py).
Thread:    scheduler thread only.

    admit ──> extend ──> commit ──> extend ... extend_decode ... ──> release
    locks the   takes      gives whole  (next chunk)  one slot          keep: commit, then all that is private goes back
    prefix      slots      pages to     a request     each              else: all that is private goes back
                                                      extend_draft ──> cut: slots of guesses that were wrong go back
                           the tree                                 ──> quarantine ──> release_quarantined
                                                                        where a peer may still read or write them
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from kvtransfer.layout import Carried
from kvtransfer.pages import page_keys
from replicas.cache.audit import audit
from replicas.cache.base import Lock
from replicas.cache.host_pages import HostTier
from replicas.cache.node import path_to
from replicas.cache.pages import NOTHING_CARRIED, PageStore
from replicas.cache.parts import SnapshotAllocator
from replicas.cache.quarantine import Detained
from replicas.cache.store_tier import StoreTier
from replicas.cache.tiers import HiRadixCache
from replicas.config import LONGEST_DRAFT, CacheConfig
from replicas.errors import InvalidRequest
from replicas.memory.allocator import Pages, ReqToTokenPool, Slots, len_with_carried
from replicas.memory.sizing import SLACK, PoolSize
from replicas.request import Behind, Holding, Req
from replicas.types import PdLeg, TokenIds


class KvCache:
    """The pools and the prefix cache of one engine, in terms of requests."""

    def __init__(
        self,
        *,
        size: PoolSize,
        max_requests: int,
        context_len: int,
        cache: CacheConfig | None = None,
        host: HostTier | None = None,
        record_events: bool = False,
        clock: Callable[[], float] = time.monotonic,
        carried: Carried = NOTHING_CARRIED,
    ) -> None:
        """``cache``: whether and in which order pages are kept; ``host``: pages that leave the pool move there.
        ``carried``: what pages carry in a KV transfer behind those of a request's tokens.
        """
        cache = cache or CacheConfig()
        self.page_size = size.page_size
        self.store = PageStore(
            size=size,
            prefix_cache=cache.prefix_cache,
            eviction=cache.eviction,
            record_events=record_events,
            clock=clock,
            host=host,
        )
        self.cache = self.store.cache
        self.carried = carried
        self.table = ReqToTokenPool(max_requests, len_with_carried(context_len, size.page_size, carried))
        self._allocator, self._radix, self._has_sessions = self.store.allocator, self.store.radix, cache.sessions
        self._parts = self.store.parts
        self._holders: dict[int, Req] = {}  # by row
        self.store_tier: StoreTier | None = None  # set once, when the engine starts
        self.window: int | None = None  # likewise: the most tokens that any layer sees; None: all
        self.longest_draft = LONGEST_DRAFT  # likewise: tokens of a request that a step tries at most

    def admit(self, req: Req, *, reuse: bool = True, whole: bool = False) -> int:
        """Take a row for ``req`` and lock its longest cached prefix; none without ``reuse``.

        At least one token is left to run, and every token whose successor's logprob is wanted; with ``whole`` none need
        be left, since another replica makes the next token, and sends what is behind the last one.

        Returns: reused tokens; ``req.holding`` and ``req.computed_len`` say the same.
        Raises:  RowsExhausted.
        """
        assert req.holding is None, f"request {req.rid} holds row {req.holding.row} already"
        row = self.table.alloc()
        longest = longest_reuse(req, whole=whole) if reuse else 0
        match, found = self.cache.match_prefix(req.ids[:longest], req.salt), 0
        if self._parts is not None and not whole and (reach := self._parts.reach(match.pages)) < len(match.pages):
            found = match.prefix_len if match.node.children else 0  # others go on there; else its tail was evicted
            longest = reach * self.page_size
            match = self.cache.match_prefix(req.ids[:longest], req.salt, count_hit=False)
        for node in path_to(match.node):
            node.priority = max(node.priority, req.rank.priority)
        if self._radix is not None:
            self._radix.retention.used_by(match.node, req.asked.tenant, req.asked.weight)
        self.table.write(row, 0, self._allocator.pages_to_slots(match.pages))
        lock = self.cache.inc_lock_ref(match.node)
        req.holding = Holding(row=row, lock=lock, prefix_len=match.prefix_len, kv_len=match.prefix_len)
        if self._parts is not None:
            self._parts.admitted(req, match.pages[: 0 if whole else None], cut_at=found)
            if whole:
                req.holding.behind = replace(req.holding.behind, seen_to=0)
        req.computed_len = match.prefix_len
        self._holders[row] = req
        return match.prefix_len

    def arrived(self, req: Req) -> None:
        """Take note that ``req`` came: the session that it goes on with is kept until its answer."""
        if self._radix is not None and self._has_sessions:
            ids, salt, ps = req.ids[: longest_reuse(req)], req.salt, self.page_size
            path = self._radix.nodes_of(ids, salt)
            self._radix.retention.sessions.returns(path, rid=req.rid, keys=lambda: page_keys(ids, ps, salt))

    def load(self, req: Req, max_tokens: int, *, whole: bool = False) -> tuple[int, int]:
        """Load up to ``max_tokens`` of the prefix that ``req`` can reuse and that is on the host; they follow what it
        has locked, and are locked then too. A page that is wrong there ends it; it is dropped, to be computed anew.

        Args:    whole: as for `admit`.
        Returns: tokens that were loaded, and those that are left there to be loaded; as many for a snapshot as its
        pages would hold.
        Raises:  PagesExhausted when even eviction cannot make room; nothing is loaded then.
        """
        tiers, holding, ps = self.store.tiers, _holding(req), self.page_size
        if tiers is None or holding.prefix_len != holding.kv_len:
            return 0, 0
        ids = req.ids[: longest_reuse(req, whole=whole)]
        if isinstance(self._parts, SnapshotAllocator) and not whole:
            return self._load_states(req, ids, max_tokens, tiers, self._parts)
        match = tiers.match_prefix(ids, req.salt, count_hit=False)
        if match.host_len == 0 or match.prefix_len != holding.prefix_len or not tiers.worth_loading():
            return 0, 0
        num_pages = min(match.host_len, max_tokens) // ps
        if num_pages <= 0:
            return 0, match.host_len
        assert match.host_node is not None
        path = tiers.inc_lock_ref(match.host_node)  # room is made on the host too
        try:
            pages = self.store.load(match, num_pages, f"request {req.rid}", req.asked.tenant)
            num_loaded = len(pages)
            self.table.write(holding.row, holding.kv_len, self._allocator.pages_to_slots(pages))
            if num_loaded:
                end = match.prefix_len + num_loaded * ps
                lock = tiers.inc_lock_ref(tiers.match_prefix(ids[:end], req.salt, count_hit=False).node)
                tiers.dec_lock_ref(_lock(holding))
                holding.lock, holding.prefix_len, holding.kv_len, req.computed_len = lock, end, end, end
        finally:
            tiers.dec_lock_ref(path)
        if req.stamps.admitted_s is None:
            req.cached = replace(req.cached, host=req.cached.host + num_loaded * ps)
        if num_loaded < num_pages:
            tiers.drop_host(ids, req.salt, holding.prefix_len // ps)
            return num_loaded * ps, 0
        return num_loaded * ps, match.host_len - num_loaded * ps

    def _load_states(
        self, req: Req, ids: TokenIds, max_tokens: int, tiers: HiRadixCache, parts: SnapshotAllocator
    ) -> tuple[int, int]:
        """As `load`, up to the last page of ``ids`` whose snapshot is on the host: K and V before it that are not on
        the device, and the snapshot, by ``max_tokens`` at a time."""
        holding, ps = _holding(req), self.page_size
        hosts, devices = tiers.where(ids, req.salt, 0)
        ends = np.flatnonzero(tiers.host.has_snapshot(hosts))
        end, first = int(ends[-1]) + 1 if len(ends) else 0, holding.prefix_len // ps
        num_tokens, num_loaded = (end - first) * ps, 0
        num_pages = int(np.count_nonzero(devices[:end] == 0))
        room = num_pages + parts.snapshot_pages
        if end <= first or parts.has(devices[end - 1 : end]).any() or not tiers.worth_loading(room, num_tokens):
            return 0, 0
        most = min(num_pages, max_tokens // ps)
        # a snapshot comes whole, so one that is longer than all that may be loaded at once comes alone
        is_last = room * ps <= max_tokens or not num_pages
        if max_tokens < ps:
            return 0, room * ps
        match = tiers.match_prefix(ids[: end * ps], req.salt, count_hit=False)
        assert match.host_node is not None
        path, needed_by = tiers.inc_lock_ref(match.host_node), f"request {req.rid}"
        try:
            if room * ps > self.store.available_tokens():  # what it would go on with is locked now
                return 0, 0
            self.store.make_room(room, needed_by, req.asked.tenant)
            if most:
                num_loaded = len(self.store.load(match, most, needed_by, req.asked.tenant))
            is_right = num_loaded == most
            if is_right and not is_last:
                return num_loaded * ps, (room - num_loaded) * ps
            match = tiers.match_prefix(ids[: end * ps], req.salt, count_hit=False)
            if is_right and self.store.load_snapshot(match.node):
                parts.released(req, self.table.view(holding.row, 0, holding.kv_len))
                self.table.write(holding.row, 0, self._allocator.pages_to_slots(match.pages))
                lock = tiers.inc_lock_ref(match.node)
                tiers.dec_lock_ref(_lock(holding))
                holding.lock, holding.prefix_len = lock, end * ps
                holding.kv_len = req.computed_len = end * ps
                parts.admitted(req, match.pages, cut_at=len(hosts) * ps if match.node.children else 0)
        finally:
            tiers.dec_lock_ref(path)
        if not is_right:
            tiers.drop_host(ids, req.salt, end - num_pages + num_loaded)
        if holding.prefix_len < end * ps:
            return 0, 0
        if req.stamps.admitted_s is None:
            req.cached = replace(req.cached, host=req.cached.host + num_tokens)
        return room * ps, 0

    def keeps(self, req: Req, *, whole: bool = False) -> bool:
        """Whether what is computed of ``req`` is found again when it is retracted. ``whole``: all of it; with snapshots
        of states it may go on at an earlier one."""
        if whole and isinstance(self._parts, SnapshotAllocator):
            return False
        return self.store.reuses_prefixes and longest_reuse(req) >= req.computed_len

    def extend(self, req: Req, new_len: int, *, carries: bool = False) -> Slots:
        """Take slots for tokens [kv_len, new_len) of ``req``; evict when pages are short (SPEC D10). ``carries``: they
        are of pages that carry what its tokens, all computed, need beside K and V.

        Raises: PagesExhausted when even eviction cannot make room.
        """
        holding = _holding(req)
        kv_len = holding.kv_len
        num_pages = _num_pages(new_len, self.page_size) - _num_pages(kv_len, self.page_size)
        self.store.make_room(num_pages, f"request {req.rid}", req.asked.tenant)
        last_slot = int(self.table.view(holding.row, kv_len - 1, kv_len)[0]) if kv_len else -1
        if carries:
            holding.behind = replace(holding.behind, seen_to=_num_pages(req.num_tokens, self.page_size))
        bare = holding.behind.seen_to is not None
        slots = self._allocator.alloc_extend(kv_len, new_len, last_slot, rid=req.rid, bare=bare)
        self.table.write(holding.row, kv_len, slots)
        holding.kv_len = new_len
        return slots

    def slots_of(self, req: Req, start: int, end: int) -> Slots:
        """Copy the slots of tokens [start, end) of ``req``: [end - start]."""
        return self.table.view(_holding(req).row, start, end).copy()

    def pages_needed_decode(self, reqs: Sequence[Req]) -> int:
        """Count the pages that `extend_decode` would take."""
        page_size = self.page_size
        return sum([_holding(req).kv_len % page_size == 0 for req in reqs])

    def extend_decode(self, reqs: Sequence[Req]) -> Slots:
        """Take one more slot for each of ``reqs`` (SPEC D07, F10; K3: once a batch, K2: at column kv_len, from 0).

        The next plan must be of exactly these requests: it names the slots, so they are not among `table.drain_writes`.

        Returns: [B] slots. Raises: PagesExhausted; no slot is taken then.
        """
        holdings = [_holding(req) for req in reqs]
        rows = np.array([holding.row for holding in holdings], dtype=np.int32)
        kv_lens = np.array([holding.kv_len for holding in holdings], dtype=np.int32)
        tenant = reqs[0].asked.tenant if len({req.asked.tenant for req in reqs}) == 1 else ""
        self.store.make_room(self.pages_needed_decode(reqs), f"a decode batch of {len(reqs)}", tenant)
        last_slots = self.table.gather(rows, kv_lens - 1)
        slots = self._allocator.alloc_decode(kv_lens + 1, last_slots)
        self.table.append_each(rows, kv_lens, slots)
        for holding in holdings:
            holding.kv_len += 1
        if self.window is not None:
            for req in reqs:
                self._leave_behind(req, self.window + SLACK)
        elif self._parts is not None:
            for holding in holdings:
                self._parts.moved_on(holding, holding.kv_len, self.table.view(holding.row, 0, holding.kv_len))
        return slots

    def extend_draft(self, req: Req, num_tokens: int) -> Slots:
        """Take slots for ``num_tokens`` guesses at what follows the tokens that ``req`` has; `cut` takes back what did
        not come true. Returns: none of them where even eviction cannot make room."""
        kv_len = _holding(req).kv_len
        num_pages = _num_pages(kv_len + num_tokens, self.page_size) - _num_pages(kv_len, self.page_size)
        fits = num_pages * self.page_size <= self.store.available_tokens()
        return self.extend(req, kv_len + num_tokens) if fits else np.empty(0, dtype=np.int32)

    def kept_behind(self, req: Req, most: int) -> TokenIds:
        """Return up to ``most`` tokens that the cache keeps behind those of ``req``, which runs: an answer to the same
        prompt, in its namespace. Change nothing."""
        holding = _holding(req)
        if self._radix is None:
            return req.ids[:0]
        return self._radix.kept_behind(_lock(holding).node, req.ids[holding.prefix_len : req.num_tokens], most)

    def cut(self, req: Req) -> None:
        """Take back the slots of ``req`` behind its computed tokens."""
        holding = _holding(req)
        first = _num_pages(req.computed_len, self.page_size) * self.page_size
        if first < holding.kv_len:
            self._allocator.free(self._row_pages(holding.row, first, holding.kv_len))
        self.table.cut(holding.row, req.computed_len)
        holding.kv_len = req.computed_len
        if holding.behind.seen_to is not None:
            holding.behind = replace(holding.behind, seen_to=None)

    def _leave_behind(self, req: Req, seen: int) -> None:
        """Stop holding the pages of ``req`` before its last ``seen`` tokens, and its lock when all of that is there."""
        holding, ps = _holding(req), self.page_size
        unseen = (holding.kv_len - seen) // ps * ps
        start = max(holding.prefix_len, holding.behind.gone_len)
        if unseen < start or unseen <= holding.behind.gone_len:
            return
        if holding.prefix_len:
            root = self.cache.match_prefix(req.ids[:0], req.salt, count_hit=False).node
            self.cache.dec_lock_ref(_lock(holding))
            holding.lock, holding.prefix_len = self.cache.inc_lock_ref(root), 0
        if unseen > start:
            self._allocator.free(self._row_pages(holding.row, start, unseen))
        holding.behind = Behind(gone_len=unseen)

    def commit(self, req: Req) -> None:
        """Give the whole pages of the ``computed_len`` tokens to the prefix cache (cache_unfinished_req, SPEC E09).

        Pages that the cache had already replace the request's own in its row, and its own are freed; the lock moves to
        the longer path. The last, partial page stays with the request.
        """
        holding, ps = _holding(req), self.page_size
        assert req.computed_len <= holding.kv_len, f"request {req.rid} computed {req.computed_len} of {holding.kv_len}"
        if self._parts is not None:
            self._parts.moved_on(holding, req.computed_len, self.table.view(holding.row, 0, holding.kv_len))
        whole, prefix_len = req.computed_len // ps * ps, holding.prefix_len
        if whole <= prefix_len or holding.behind.gone_len:  # its prefix is there, whoever computed it
            _note_kept(req, prefix_len)
            return
        pages = self._row_pages(holding.row, 0, whole)
        already = self.cache.insert(req.ids[:whole], pages, req.salt, priority=req.rank.priority)
        if self._radix is None:
            return
        match = self.cache.match_prefix(req.ids[:whole], req.salt, count_hit=False)
        assert prefix_len <= already, f"request {req.rid}: {prefix_len} tokens were locked, {already} are there"
        assert match.prefix_len == whole, f"request {req.rid}: of {whole} tokens given {match.prefix_len} are found"
        self._radix.retention.used_by(match.node, req.asked.tenant, req.asked.weight)
        lock = self.cache.inc_lock_ref(match.node)  # before the old one goes: the path is never unpinned
        self.cache.dec_lock_ref(_lock(holding))
        if already > prefix_len:
            first, last = prefix_len // ps, already // ps
            if self._parts is not None:
                self._parts.hand_over(pages[first:last], match.pages[first:last])
            self.table.write(holding.row, prefix_len, self._allocator.pages_to_slots(match.pages[first:last]))
            self._allocator.free(pages[first:last])
        if self._parts is not None:
            self._parts.kept(req, prefix_len, whole, self.table.view(holding.row, 0, whole))
        holding.lock, holding.prefix_len = lock, whole
        _note_kept(req, whole)

    def release(self, req: Req, *, keep: bool) -> None:
        """Take back all that ``req`` holds (cache_finished_req, SPEC E08); if it has ended, for its session.

        Args: keep: its computed whole pages stay in the prefix cache, evictable; else they are freed with the rest.
        """
        if keep:
            self.commit(req)
        holding = _holding(req)
        if keep:
            self._keep_marked(req)
        if keep and self._parts is not None:
            self._parts.left_at(req, holding.prefix_len, self.table.view(holding.row, 0, holding.kv_len))
        if keep and req.finish is not None and self._radix is not None and self._has_sessions:
            path = self._radix.nodes_of(req.ids[: holding.prefix_len], req.salt)
            sessions = self._radix.retention.sessions
            sessions.answered(path, req.prompt_len, name=req.asked.routing_key, rid=req.rid)
        private = self._row_pages(holding.row, max(holding.prefix_len, holding.behind.gone_len), holding.kv_len)
        self._forget(req)
        self.cache.dec_lock_ref(_lock(holding))
        self._allocator.free(private)

    def quarantine(self, req: Req, *, locked: bool) -> Detained:
        """Take all that ``req`` holds while a peer may still read or write it; its row goes back at once.

        Args: locked: the peer may read the pages that ``req`` shares with the tree too: they stay locked.
        """
        holding = _holding(req)
        self._keep_marked(req)
        assert not holding.behind.gone_len, f"request {req.rid} has decoded: no peer knows its pages"
        lock = _lock(holding)
        receipt = Detained(
            req.rid, self._row_pages(holding.row, holding.prefix_len, holding.kv_len), lock if locked else None
        )
        self.store.quarantine.add(receipt)
        self._forget(req)
        if not locked:
            self.cache.dec_lock_ref(lock)
        return receipt

    def pages(self, req: Req, first: int, end: int) -> Pages:
        """Return the ids of pages [first, end) of the sequence of ``req``: [end - first]; the last may be partial."""
        holding = _holding(req)
        assert first * self.page_size >= holding.behind.gone_len, f"request {req.rid} has given pages back"
        return self._row_pages(holding.row, first * self.page_size, min(end * self.page_size, holding.kv_len))

    @property
    def in_use(self) -> bool:
        """Whether a request or a peer uses pages, so that `flush` would raise."""
        return bool(self._holders or len(self.store.quarantine))

    def check_idle(self) -> None:
        """Check, where no request is open, that all rows are free, and all pages free or evictable but for quarantine.

        O(1): what an ended request still holds is seen; `audit` finds which pages.
        """
        num_rows = self.table.max_requests - self.table.num_free
        if num_rows or (self.store.held_pages and not len(self.store.quarantine)):
            self.store.count_lost(num_rows)

    def flush(self) -> None:
        """Empty the prefix cache. Raises: InvalidRequest with the rids while pages are in use."""
        if self.in_use:
            rids = sorted({holder.rid for holder in (*self._holders.values(), *self.store.quarantine)})
            named = ", ".join(rids[:8]) + (f" and {len(rids) - 8} more" if len(rids) > 8 else "")
            raise InvalidRequest(f"the cache is in use by {named}: flush it when they have finished, or abort them")
        self.store.flush()

    def check(self, reqs: Sequence[Req]) -> None:
        """Assert every invariant of the pools, given all requests that hold something. O(pool)."""
        held = {id(req) for req in self._holders.values()}
        assert held == {id(req) for req in reqs}, f"rows are held by {[req.rid for req in self._holders.values()]}"
        of_parts = self._allocator.free_pages()[:0] if self._parts is None else self._parts.part_pages()
        audit(self._allocator, self.table, self.cache, self.store.quarantine, reqs, of_parts=of_parts)
        if self._parts is not None:
            self._parts.check_parts(reqs, [self.table.view(_holding(req).row, 0, _holding(req).kv_len) for req in reqs])
        if self.store_tier is not None:
            self.store_tier.check()

    def _keep_marked(self, req: Req) -> None:
        """Keep what is before the cache breakpoints of ``req``, as far as it is there."""
        if self._radix is None:
            return
        for each in req.asked.cache_breakpoints:
            path = self._radix.nodes_of(req.ids[: min(each.length, req.prompt_len)], req.salt, split=True)
            self._radix.retention.set_breakpoint(path, each.ttl_s, tenant=req.asked.tenant, weight=req.asked.weight)

    def _forget(self, req: Req) -> None:
        """Free the row of ``req``; its pages and lock are the caller's to free."""
        holding = _holding(req)
        row = holding.row
        if self._parts is not None:
            self._parts.released(req, self.table.view(row, 0, holding.kv_len))
        del self._holders[row]
        self.table.free(row)
        req.holding = None
        req.computed_len = 0

    def _row_pages(self, row: int, start: int, end: int) -> Pages:
        """Return the pages of positions [start, end) of ``row``; ``start`` begins a page."""
        return self.table.view(row, start, end)[:: self.page_size] // np.int32(self.page_size)


def longest_reuse(req: Req, *, whole: bool = False) -> int:
    """Count the tokens of ``req`` that `KvCache.admit` may find in the cache."""
    longest = req.num_tokens - (0 if whole else 1)
    if whole and req.leg is not None and req.leg.role is PdLeg.FETCH:
        longest = min(longest, req.leg.ticket.end_len)  # pages behind it in its row carry its windows
    if req.prompt_logprobs_from is not None:
        longest = min(longest, max(req.prompt_logprobs_from - 1, 0))
    pooling = req.sampling.pooling
    if pooling is not None and pooling.method == "mean":
        longest = 0  # the cache holds no hidden states
    return longest


def handed_len(req: Req, kv: KvCache) -> int:
    """Count the slots that ``req`` has while it is handed over: of its tokens, and of whole pages for its states and
    windows. If it fetches: of what it fetches, and the tokens before, instead of all tokens."""
    is_fetch = req.leg is not None and req.leg.role is PdLeg.FETCH
    num_tokens = req.leg.ticket.end_len if req.leg is not None and is_fetch else req.num_tokens
    return len_with_carried(num_tokens, kv.page_size, kv.carried)


def goes_on_at(token_ids: TokenIds, salt: str, kv: KvCache) -> int:
    """Count the leading tokens of ``token_ids`` that are on the device or the host, and behind which a request can go
    on."""
    if kv.store.parts is None:
        return kv.cache.peek_len(token_ids, salt)
    match = kv.cache.match_prefix(token_ids, salt, count_hit=False)
    return kv.store.parts.reach(match.pages) * kv.page_size


def carried_parts(pages: Pages, kv: KvCache) -> Pages:
    """Return the parts in the window pool of the last ones of a sequence's ``pages``, that are carried; 0 for a
    hole."""
    last = pages[max(0, len(pages) - kv.carried.window_pages) :]
    return last if kv.store.parts is None else kv.store.parts.parts_of(last)


def came(req: Req, kv: KvCache, num_tokens: int) -> Pages:
    """Take note that another replica has run the first ``num_tokens`` of ``req``, all or what it fetches, and that the
    pages behind these carry what it needs beside K and V. Returns: the parts in the window pool that are carried; 0 for
    what is here already, or is not needed."""
    holding, parts = _holding(req), kv.store.parts
    row = kv.table.view(holding.row, 0, holding.kv_len)
    if parts is None:
        return row[:0]
    is_fetch = req.leg is not None and req.leg.role is PdLeg.FETCH
    taken = parts.came(req, row, num_tokens, at_border=is_fetch)
    if len(taken):
        kv.table.write_again(holding.row, holding.behind.seen_from * kv.page_size, num_tokens)
    return taken


def see_no_more(req: Req, kv: KvCache, unwritten: Pages | None = None) -> None:
    """Let ``req`` see no parts from now on: what it needs of them was copied. ``unwritten``: what `came` returned, if
    that was not."""
    holding = _holding(req)
    if kv.store.parts is not None:
        kv.store.parts.released(req, kv.table.view(holding.row, 0, holding.kv_len), unwritten)


def _note_kept(req: Req, num_tokens: int) -> None:
    """Note what the cache has of ``req``, until its first token: what is told does not go by the steps that follow."""
    if not req.num_output:
        req.cached = replace(req.cached, kept=max(req.cached.kept, num_tokens))


def _num_pages(num_tokens: int, page_size: int) -> int:
    return -(-num_tokens // page_size)


def _holding(req: Req) -> Holding:
    assert req.holding is not None, f"request {req.rid} holds nothing: admit it first"
    return req.holding


def _lock(holding: Holding) -> Lock:
    assert isinstance(holding.lock, Lock)
    return holding.lock
