"""WindowAllocator: pages whose window layers keep K and V in a pool of their own, smaller than that of the full layers.

A page is the handle of its tokens: the table, the tree and all requests know pages alone. Beside a page's K and V of
full layers, which it has as long as it is held, it may have a part: a page of the window layers' pool. Parts that no
token of a running request sees may go, and leave a hole.

Owns:      the parts: which page has which, how many requests see it, and the log of both for the devices' copies.
Never:     knows the tree, or when a request moves on: cache/kv.py says so.
Invariant: a part is free or belongs to one held page; a page that a request sees has one. Parts that are seen are never
           more than there are: while `overbooked`, no request is admitted.
Order:     parts that nobody sees go by their `End`: first those of the kind that requests go on with least often,
           and of one kind those not used for longest.
Thread:    scheduler thread only.
"""

import enum
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from replicas.memory.allocator import PagedTokenToKVPoolAllocator, Pages, Slots
from replicas.memory.sizing import SLACK, WindowPool
from replicas.request import Behind, Holding, Req

BATCH = 16  # parts are given up by a sixteenth of all at once: finding the oldest reads all pages
PRIOR = 10  # ends of a kind that are counted before the first one is seen


class End(enum.IntEnum):
    """What a part is good for: which of a text's ends has it in the window before it."""

    NONE = 0  # it is inside a text
    GONE_ON = 1  # a request has gone on behind it, and the next will behind that one's end
    PROMPT = 2  # of a prompt: the next goes on there if it leaves the answer out, or answers again
    ANSWER = 3
    BRANCH = 4  # several have gone on there, or would have; or a client marked it


PRIORS = {End.NONE: 0.0, End.GONE_ON: 0.1, End.PROMPT: 0.3, End.ANSWER: 0.6, End.BRANCH: 0.8}


class WindowAllocator(PagedTokenToKVPoolAllocator):
    """A PagedTokenToKVPoolAllocator whose pages get a part as they are handed out, and lose it when they come back."""

    def __init__(self, num_pages: int, page_size: int, windows: WindowPool) -> None:
        super().__init__(num_pages, page_size)
        self.parts = PagedTokenToKVPoolAllocator(windows.num_pages, page_size)
        self.windows = windows
        self.reserved = 0  # parts that requests in flight may see at once
        self.evicted = 0  # parts that have gone while their pages stayed
        self._part = np.zeros(num_pages + 1, dtype=np.int32)  # by page; 0: a hole
        self._seen = np.zeros(num_pages + 1, dtype=np.int32)  # by page: requests that see its part
        self._used = np.zeros(num_pages + 1, dtype=np.int64)  # by page: tick of its last use
        self._end = np.zeros(num_pages + 1, dtype=np.int8)  # by page: an End
        self._made = np.array([PRIOR] * len(End), dtype=np.float64)  # by kind: ends so far
        self._hits = np.array([PRIOR * prior for prior in PRIORS.values()])  # and how many were gone on with
        self._tick = self._span = 0  # of uses; from the oldest one of a part to the newest
        self._draw = random.Random(0)
        self._log: list[Pages] = []  # pages whose part has changed to another

    def reach(self, pages: Pages) -> int:
        """Count the leading pages of a prefix behind which a request can go on: the last window of them has parts."""
        at = np.arange(len(pages))
        hole_before = np.maximum.accumulate(np.where(self._part[pages] > 0, -1, at))  # the last one up to each page
        ends = np.flatnonzero(hole_before < np.maximum(at + 1 - self.windows.seen_pages, 0))
        return int(ends[-1]) + 1 if len(ends) else 0

    def admitted(self, req: Req, pages: Pages, *, cut_at: int) -> None:
        """Let ``req`` see the last window of the prefix ``pages`` that it reuses. ``cut_at``: tokens of a longer one,
        with which others go on, that it would have reused if no part were gone; 0: of none."""
        assert req.holding is not None
        first = max(0, len(pages) - self.windows.seen_pages)
        req.holding.behind = Behind(seen_from=first, cut_at=cut_at)
        self.reserved += self._most_parts(req)
        if first < len(pages):
            self._see(pages[first:])

    def moved_on(self, holding: Holding, num_tokens: int, row: Slots) -> None:
        """Let a request, whose tokens behind ``num_tokens`` are computed next, see no page before their window.
        ``row``: its slots."""
        first, behind = max(0, num_tokens - self.windows.reach - SLACK) // self.page_size, holding.behind
        if first > behind.seen_from:
            self._pass_by(self._pages(row, behind.seen_from, first))
            holding.behind = replace(behind, seen_from=first)

    def kept(self, req: Req, start: int, end: int, row: Slots) -> None:
        """Note where others may go on with the tokens [start, end) of ``req``, which the tree has now: behind its
        prompt, its answer, marks, and where it could have gone on itself if no part had been gone."""
        assert req.holding is not None
        branches = [req.holding.behind.cut_at, *(mark.length for mark in req.asked.cache_marks)]
        ends = [(req.prompt_len, End.PROMPT), *((at, End.BRANCH) for at in branches)]
        for at, kind in (*ends, *([(end, End.ANSWER)] if req.finish is not None else ())):
            border = at // self.page_size
            if self.windows.seen_pages and start < border * self.page_size <= end:
                pages = self._pages(row, max(0, border - self.windows.seen_pages), border)
                self._note(pages, End(max(kind, int(self._end[pages[-1]]))))

    def released(self, req: Req, row: Slots) -> None:
        """Let ``req`` see nothing more."""
        holding = req.holding
        assert holding is not None
        self._pass_by(self._pages(row, holding.behind.seen_from, -(-holding.kv_len // self.page_size)))
        self.reserved -= self._most_parts(req)

    @property
    def overbooked(self) -> bool:
        """Whether the requests in flight, with a step's prompts, may see more parts than there are."""
        windows = self.windows
        return windows.num_pages < self.num_pages and self.reserved + windows.step_pages > windows.num_pages

    def alloc(self, need_pages: int, *, rid: str) -> Pages:
        """Take pages, each with a part that the request sees."""
        pages = super().alloc(need_pages, rid=rid)
        if need_pages:
            self._make_room(need_pages)
            self._put(pages, self.parts.alloc(need_pages, rid=rid))
            self._seen[pages] = 1
            self._end[pages], self._used[pages] = End.NONE, self._tick
        return pages

    def free(self, pages: Pages | Sequence[int]) -> None:
        """Take back pages with their parts; no other request sees them."""
        taken = np.asarray(pages, dtype=np.int32)
        super().free(taken)
        if len(taken):
            assert self._seen[taken].max() <= 1, f"of pages {taken} some are seen by others"
            self._seen[taken] = 0
            self._give_up(taken)

    def hand_over(self, own: Pages, kept: Pages) -> None:
        """Let the request that sees pages ``own`` see ``kept`` in their place, which hold the same tokens; a hole among
        these takes the other's part."""
        holes = np.flatnonzero((self._part[kept] == 0) & (self._part[own] > 0))
        self._put(kept[holes], self._part[own[holes]])
        self._part[own[holes]] = 0
        seen = self._seen[own] > 0
        self._seen[own[seen]] -= 1
        self._seen[kept[seen]] += 1
        self._use(kept)

    def drain(self) -> tuple[Pages, Pages] | None:
        """Return the pages that have another part since the last call, and that part (0: none any more); None: none."""
        if not self._log:
            return None
        pages = np.unique(np.concatenate(self._log))
        self._log = []
        return pages, self._part[pages]

    def is_hole(self, page: int) -> bool:
        """Whether held ``page`` has lost its part."""
        return not self._part[page]

    @property
    def num_holes(self) -> int:
        """The held pages that have lost their part."""
        return self.num_pages - self.num_free - (self.windows.num_pages - self.parts.num_free)

    def check_seen(self, seen: Sequence[Pages]) -> None:
        """Assert the invariant of the module's docstring. ``seen``: of each request the pages that it sees. O(pool)."""
        self.parts.check()
        counted = np.zeros(self.num_pages + 1, dtype=np.int32)
        for pages in seen:
            np.add.at(counted, pages, 1)
        wrong = np.flatnonzero(counted != self._seen)
        assert not len(wrong), f"pages {wrong} are seen by {counted[wrong]} requests, {self._seen[wrong]} are counted"
        has = np.flatnonzero(self._part)
        assert self._held[has].all(), "a free page has a part"
        assert (self._part[counted > 0] > 0).all(), "a request sees a hole"
        everything = np.concatenate([self._part[has], self.parts.free_pages()])
        assert np.array_equal(np.sort(everything), np.arange(1, self.windows.num_pages + 1)), "a part is lost"

    def _most_parts(self, req: Req) -> int:
        """Count the parts that ``req`` sees at once at most."""
        whole = req.num_tokens + req.max_remaining
        return min(-(-whole // self.page_size) + 1, self.windows.request_pages)

    def _see(self, pages: Pages) -> None:
        assert (self._part[pages] > 0).all(), f"of pages {pages} some are holes"
        self._seen[pages] += 1
        self._use(pages)
        kind = End(self._end[pages[-1]])
        if kind is not End.NONE:
            self._hits[kind] += 1
        self._note(pages, End.GONE_ON if kind in (End.PROMPT, End.ANSWER) else End.BRANCH)

    def _note(self, pages: Pages, kind: End) -> None:
        """Let ``pages`` be the window before an end. Ends that are used in turn, and are more than there is room for,
        would all have gone when it is theirs: some are kept longer, by chance."""
        self._made[kind] += kind != self._end[pages[-1]]
        self._use(pages)
        self._used[pages] += int(self._draw.random() * self._span)
        self._end[pages] = kind

    def _pass_by(self, pages: Pages) -> None:
        assert (self._seen[pages] > 0).all(), f"of pages {pages} some are seen by nobody"
        self._seen[pages] -= 1
        self._use(pages)

    def _use(self, pages: Pages) -> None:
        self._tick += 1
        self._used[pages] = np.maximum(self._used[pages], self._tick)

    def _pages(self, row: Slots, first: int, end: int) -> Pages:
        """Return pages [first, end) of a request by its slots."""
        size = self.page_size
        return row[first * size : end * size : size] // np.int32(size)

    def _put(self, pages: Pages, parts: Pages) -> None:
        self._part[pages] = parts
        self._log.append(pages)

    def _make_room(self, num_parts: int) -> None:
        """Give up parts that nobody sees until ``num_parts`` are free."""
        short = num_parts - self.parts.num_free
        if short <= 0:
            return
        unseen = np.flatnonzero((self._part > 0) & (self._seen == 0))
        most = min(len(unseen), max(short, self.windows.num_pages // BATCH))
        assert most >= short, f"{num_parts} parts are needed, {self.parts.num_free} are free and {len(unseen)} unseen"
        worth = (self._hits / self._made)[self._end[unseen]]
        order = np.lexsort((self._used[unseen], worth))
        gone = unseen[order[:most]].astype(np.int32)
        self._span = max(0, self._tick - int(self._used[unseen].min()))
        self._give_up(gone)
        self.evicted += most

    def _give_up(self, pages: Pages) -> None:
        pages = pages[self._part[pages] > 0]
        self.parts.free(self._part[pages])
        self._part[pages] = 0
