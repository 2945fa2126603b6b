"""PartAllocator: pages that may have a part elsewhere, beside the K and V that they hold.

A page is the handle of its tokens: the table, the tree and all requests know pages alone. What some layers keep of
these tokens is a *part* in a pool of its own: K and V of window layers, or the states behind the page's last
token, which lie in pages of this pool. A page without its part is a *hole*.

Owns:      which page has which part, what the parts are good for, and the log of what devices do with them.
Never:     knows the tree, or when a request moves on: cache/kv.py says so.
Invariant: a part is free or belongs to one held page.
Order:     parts that may go do so by what their end is worth (cache/ends.py), and K and V with them.
Thread:    scheduler thread only.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from replicas.cache.ends import End, Snapshot, Worth
from replicas.cache.events import PartLog
from replicas.memory.allocator import PagedTokenToKVPoolAllocator, Pages, Slots
from replicas.memory.sizing import SLACK, WindowPool
from replicas.request import Behind, Holding, Req
from replicas.types import PartWrite, StateCopy

BATCH = 32  # parts are given up by one in so many of all at once: finding the oldest reads all pages
LEAST_WITHIN = 1024  # tokens before the first end inside a prompt; the others are at twice, four times as many ...
ROOM = 4  # ends inside prompts are kept while one part in so many is free
FORGET = 8  # times all parts, LEAST_SEEN at least: after as many ends, what was seen of ends before counts half
LEAST_SEEN = 4096
EXPLORED, LUCK = 16, 2.0  # one end in so many is taken for so much more, so that what is reused late is seen too


class PartAllocator(PagedTokenToKVPoolAllocator):
    """A PagedTokenToKVPoolAllocator whose pages may have parts."""

    kind: ClassVar[str]  # of its parts
    border_pages: int  # that need their parts before a border, so that a request can go on there

    def __init__(self, num_pages: int, page_size: int, num_parts: int) -> None:
        super().__init__(num_pages, page_size)
        self.parts = PagedTokenToKVPoolAllocator(num_parts, 1)  # in the pool of parts, or their numbers alone
        self.evicted = 0  # parts that have gone while their pages stayed
        self._part = np.zeros(num_pages + 1, dtype=np.int32)  # by page; 0: a hole
        self._since = np.zeros(num_pages + 1, dtype=np.int64)  # by page: requests until its part was last gone on with
        self._end = np.zeros(num_pages + 1, dtype=np.int8)  # by page: an End
        self._luck = np.ones(num_pages + 1, dtype=np.float32)  # by page: what its worth is taken for more than it is
        self._num_reqs = 0
        self._worth = Worth(max(LEAST_SEEN, FORGET * num_parts))
        self._draw = random.Random(0)
        self._told: PartLog | None = None  # None: nobody asks

    def record(self) -> PartLog:
        """Keep a log, from now on, of which cached pages have parts."""
        self._told = PartLog(self._part)
        return self._told

    def free(self, pages: Pages | Sequence[int]) -> None:
        """Take back pages with their parts."""
        taken = np.asarray(pages, dtype=np.int32)
        super().free(taken)
        if len(taken):
            self._give_up(taken)
            if self._told is not None:
                self._told.forget(taken)

    def reach(self, pages: Pages) -> int:
        """Count the leading pages of a prefix behind which a request can go on."""
        raise NotImplementedError

    def admitted(self, req: Req, pages: Pages, *, cut_at: int) -> None:
        """Let ``req`` go on behind the prefix ``pages``. ``cut_at``: tokens of a longer one, with which others go on,
        that it would have reused if no part were gone; 0: of none."""
        raise NotImplementedError

    def moved_on(self, holding: Holding, num_tokens: int, row: Slots) -> None:
        """Take note that the tokens of a request behind ``num_tokens`` are computed next. ``row``: its slots."""
        behind = holding.behind
        if not behind.has_moved:
            self._num_reqs += 1  # not before: one that finds no memory is admitted and released at each step
            if len(pages := self._pages(row, behind.seen_from, behind.reused_len // self.page_size)):
                self._gone_on(pages)
            holding.behind = replace(behind, has_moved=True)

    def kept(self, req: Req, start: int, end: int, row: Slots) -> None:
        """Note where others may go on with the tokens [start, end) of ``req``, which the tree has now."""
        raise NotImplementedError

    def left_at(self, req: Req, end: int, row: Slots) -> None:
        """Take note that ``req`` leaves its tokens [0, end) to the tree, to go on there later if it has not ended."""

    def came(self, req: Req, row: Slots, num_tokens: int, *, at_border: bool) -> Pages:
        """Take note that another replica has run the first ``num_tokens`` of ``req``. ``at_border``: whole pages, which
        are found again behind the last of them alone. Returns: the parts that it sends what is behind the last of them
        for; 0 for one that is here, or is not needed."""
        raise NotImplementedError

    def parts_of(self, pages: Pages) -> Pages:
        """Return the parts of ``pages``; 0 for a hole."""
        return self._part[pages]

    def released(self, req: Req, row: Slots, unwritten: Pages | None = None) -> None:
        """Take note that ``req`` goes on behind nothing more; a second time that changes nothing. ``unwritten``: what
        `came` returned, if that was not written: these parts are given up."""

    def hand_over(self, own: Pages, kept: Pages) -> None:
        """Let a request have pages ``kept`` in the place of its ``own``, which hold the same tokens and are freed
        next."""

    def worth(self) -> npt.NDArray[np.float64]:
        """Return by page what its part is worth; 0 where it has none. O(pool)."""
        found = self._worth.of(self._end, self._num_reqs - self._since) * self._luck
        return np.where(self._part > 0, found, 0.0)

    def drain(self) -> Sequence[PartWrite | StateCopy]:
        """Return what the devices are to do before the next step."""
        raise NotImplementedError

    @property
    def overbooked(self) -> bool:
        """Whether the requests in flight may need more parts than there are."""
        return False

    @property
    def num_part_pages(self) -> int:
        """The pages in which parts lie: all may go."""
        return 0

    def part_pages(self) -> Pages:
        """Return those pages. O(pool)."""
        return np.empty(0, dtype=np.int32)

    def has(self, pages: Pages) -> npt.NDArray[np.bool_]:
        """Tell of each of ``pages`` whether it has its part."""
        return self._part[pages] > 0

    def num_with_part(self, pages: Pages) -> int:
        return int(np.count_nonzero(self._part[pages]))

    @property
    def num_holes(self) -> int:
        """The held pages that have no part."""
        return self.num_pages - self.num_free - self.num_part_pages - (self.parts.num_pages - self.parts.num_free)

    def check_parts(self, reqs: Sequence[Req], rows: Sequence[Slots]) -> None:
        """Assert the invariant of the module's docstring; of the requests that hold pages, ``rows`` are their slots.
        O(pool)."""
        self.parts.check()
        has = np.flatnonzero(self._part)
        assert self._held[has].all(), "a free page has a part"
        everything = np.concatenate([self._part[has], self.parts.free_pages()])
        assert np.array_equal(np.sort(everything), np.arange(1, self.parts.num_pages + 1)), "a part is lost"

    def _ends(self, req: Req, start: int, end: int) -> Iterator[tuple[int, End]]:
        """Find the ends, in pages, in the tokens [start, end) of ``req``: of prompt and answer, and branches."""
        ends = [(req.prompt_len - 1, End.PROMPT), *((at, End.BRANCH) for at in self._branches(req))]
        for at, kind in (*ends, *([(end, End.ANSWER)] if req.finish is not None else ())):
            if start < at // self.page_size * self.page_size <= end:
                yield at // self.page_size, kind

    def _branches(self, req: Req) -> list[int]:
        """Return its cache breakpoints, and where it could have gone on itself if no part had been gone, in tokens."""
        assert req.holding is not None
        return [req.holding.behind.cut_at, *(each.length for each in req.asked.cache_breakpoints)]

    def _gone_on(self, pages: Pages) -> None:
        """Note that a request goes on behind ``pages``."""
        last = int(pages[-1])
        kind = End(self._end[last])
        self._worth.gone_on(kind, self._num_reqs - int(self._since[last]), num_parts=len(pages))
        self._note(pages, End.GONE_ON if kind in (End.PROMPT, End.ANSWER) else End.BRANCH)

    def _note(self, pages: Pages, kind: End) -> None:
        """Let the parts of ``pages`` be what an end needs."""
        self._since[pages] = self._num_reqs
        self._end[pages] = kind
        self._luck[pages] = LUCK if self._draw.randrange(EXPLORED) == 0 else 1.0

    def _pages(self, row: Slots, first: int, end: int) -> Pages:
        """Return pages [first, end) of a request by its slots."""
        size = self.page_size
        return row[first * size : end * size : size] // np.int32(size)

    def _may_go(self) -> npt.NDArray[np.bool_]:
        """Tell by page whether its part may go. O(pool)."""
        return self._part > 0

    def _make_room(self, num_parts: int) -> None:
        """Give up parts until ``num_parts`` are free."""
        short = num_parts - self.parts.num_free
        if short <= 0:
            return
        able = np.flatnonzero(self._may_go())
        most = min(len(able), max(short, self.parts.num_pages // BATCH))
        assert most >= short, f"{num_parts} parts are needed, {self.parts.num_free} are free and {len(able)} may go"
        gone = able[np.argsort(self.worth()[able], kind="stable")[:most]].astype(np.int32)
        self._give_up(gone)
        self.evicted += most

    def _give_up(self, pages: Pages) -> None:
        pages = pages[self._part[pages] > 0]
        self._worth.evicted(self._end[pages], self._num_reqs - self._since[pages])
        self.parts.free(self._part[pages])
        self._part[pages] = 0
        self._touch(pages)

    def _touch(self, pages: Pages) -> None:
        if self._told is not None:
            self._told.touch(pages)


class WindowAllocator(PartAllocator):
    """Of window layers: a page gets its part, a page of their pool, when it is handed out. Parts that no token of a
    running request sees may go.

    Invariant: a page that a request sees has a part. Parts that are seen are never more than there are: while
               `overbooked`, no request is admitted.
    """

    kind = "window"

    def __init__(self, num_pages: int, page_size: int, windows: WindowPool) -> None:
        super().__init__(num_pages, page_size, windows.num_pages)
        self.windows, self.border_pages = windows, windows.seen_pages
        self.reserved = 0  # parts that requests in flight may see at once
        self._seen = np.zeros(num_pages + 1, dtype=np.int32)  # by page: requests that see its part
        self._log: list[Pages] = []  # pages whose part has changed to another

    def reach(self, pages: Pages) -> int:
        """Count the leading pages of a prefix behind which the last window has all parts."""
        at = np.arange(len(pages))
        hole_before = np.maximum.accumulate(np.where(self._part[pages] > 0, -1, at))  # the last one up to each page
        ends = np.flatnonzero(hole_before < np.maximum(at + 1 - self.windows.seen_pages, 0))
        return int(ends[-1]) + 1 if len(ends) else 0

    def admitted(self, req: Req, pages: Pages, *, cut_at: int) -> None:
        assert req.holding is not None
        first = max(0, len(pages) - self.windows.seen_pages)
        most, reused_len = self._most_parts(req), len(pages) * self.page_size
        req.holding.behind = Behind(seen_from=first, reused_len=reused_len, cut_at=cut_at, num_reserved=most)
        self.reserved += most
        if first < len(pages):
            self._see(pages[first:])

    def moved_on(self, holding: Holding, num_tokens: int, row: Slots) -> None:
        """Let a request see no page before the window of its next token."""
        super().moved_on(holding, num_tokens, row)
        size, behind = self.page_size, holding.behind
        # and none before the window of the last border behind which others may ask for all of it
        border = max(0, num_tokens - 1) // size - self.windows.seen_pages
        first = max(0, min(border, (num_tokens - self.windows.reach - SLACK) // size))
        if first > behind.seen_from:
            self._pass_by(self._pages(row, behind.seen_from, first))
            holding.behind = replace(behind, seen_from=first)

    def kept(self, req: Req, start: int, end: int, row: Slots) -> None:
        for border, kind in self._ends(req, start, end):
            self._note_before(border, row, kind)

    def left_at(self, req: Req, end: int, row: Slots) -> None:
        self._note_before(end // self.page_size, row, End.ANSWER)

    def released(self, req: Req, row: Slots, unwritten: Pages | None = None) -> None:
        """Let ``req`` see nothing more."""
        holding = req.holding
        assert holding is not None
        pages = self._seen_pages(holding, row)
        self._pass_by(pages)
        if unwritten is not None:
            self._give_up(pages[unwritten[len(unwritten) - len(pages) :] > 0])
        self.reserved -= holding.behind.num_reserved
        end = -(-len(row) // self.page_size)
        holding.behind = replace(holding.behind, seen_from=end, seen_to=0, num_reserved=0)

    def came(self, req: Req, row: Slots, num_tokens: int, *, at_border: bool) -> Pages:
        """Give the last pages of the tokens of ``req`` their parts, and let it see these. The first of those that are
        carried is needed at the border before alone, and the sender of one border may not have it."""
        assert req.holding is not None
        end = -(-num_tokens // self.page_size)
        carried_from = max(0, end - self.windows.seen_pages - 1)
        first = max(0, end - self.windows.seen_pages) if at_border else carried_from
        pages = self._pages(row, first, end)
        is_hole = self._part[pages] == 0
        holes = pages[is_hole]
        self._see(pages[~is_hole])  # before room is made
        self._make_room(len(holes))
        self._put(holes, self.parts.alloc(len(holes), rid=req.rid))
        self._end[holes] = End.NONE
        self._touch(holes)
        self._see(holes)
        req.holding.behind = replace(req.holding.behind, seen_from=first, seen_to=end)
        taken = np.where(is_hole, self._part[pages], 0).astype(np.int32)
        return np.pad(taken, (first - carried_from, 0))

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
            self._end[pages] = End.NONE
        return pages

    def free(self, pages: Pages | Sequence[int]) -> None:
        """Take back pages with their parts; no other request sees them."""
        taken = np.asarray(pages, dtype=np.int32)
        super().free(taken)
        if len(taken):
            assert self._seen[taken].max() <= 1, f"of pages {taken} some are seen by others"
            self._seen[taken] = 0

    def hand_over(self, own: Pages, kept: Pages) -> None:
        """Let the request that sees pages ``own`` see ``kept`` in their place; a hole among these takes the other's
        part."""
        holes = np.flatnonzero((self._part[kept] == 0) & (self._part[own] > 0))
        self._put(kept[holes], self._part[own[holes]])
        self._touch(kept[holes])
        self._part[own[holes]] = 0
        seen = self._seen[own] > 0
        self._seen[own[seen]] -= 1
        self._seen[kept[seen]] += 1

    def drain(self) -> list[PartWrite]:
        """Return the pages that have another part since the last call, and that part (0: none any more)."""
        if not self._log:
            return []
        pages = np.unique(np.concatenate(self._log))
        self._log = []
        return [PartWrite(pages, self._part[pages])]

    def worth_of(self, pages: Pages, worth: npt.NDArray[np.float64]) -> float:
        """Return what ``pages``, the end of what the tree has of a text, are worth by `worth`; 0 where no request can
        go on behind the last of them."""
        return float(worth[pages[-1]])

    def check_parts(self, reqs: Sequence[Req], rows: Sequence[Slots]) -> None:
        """Assert that all of ``reqs``, by their ``rows``, see the window of their next token, and what they see is
        counted. O(pool)."""
        super().check_parts(reqs, rows)
        counted = np.zeros(self.num_pages + 1, dtype=np.int32)
        assert self.reserved == sum(req.holding.behind.num_reserved for req in reqs if req.holding is not None)
        for req, row in zip(reqs, rows, strict=True):
            assert req.holding is not None
            behind = req.holding.behind
            sees = behind.seen_from <= max(0, req.computed_len + 1 - self.windows.reach) // self.page_size
            assert sees or behind.seen_to == 0, f"{req.rid}: {behind.seen_from}"
            np.add.at(counted, self._seen_pages(req.holding, row), 1)
        wrong = np.flatnonzero(counted != self._seen)
        assert not len(wrong), f"pages {wrong} are seen by {counted[wrong]} requests, {self._seen[wrong]} are counted"
        assert (self._part[counted > 0] > 0).all(), "a request sees a hole"

    def _may_go(self) -> npt.NDArray[np.bool_]:
        able: npt.NDArray[np.bool_] = super()._may_go() & (self._seen == 0)
        return able

    def _most_parts(self, req: Req) -> int:
        """Count the parts that ``req`` sees at once at most."""
        whole = req.num_tokens + req.max_remaining
        return min(-(-whole // self.page_size) + 1, self.windows.request_pages)

    def _note_before(self, border: int, row: Slots, kind: End) -> None:
        """Let the parts that a request needs to go on behind page ``border`` be of an end of that kind at least."""
        if len(pages := self._pages(row, max(0, border - self.windows.seen_pages), border)):
            self._note(pages, End(max(kind, int(self._end[pages[-1]]))))

    def _seen_pages(self, holding: Holding, row: Slots) -> Pages:
        """Return the pages that a request sees."""
        to = holding.behind.seen_to
        return self._pages(row, holding.behind.seen_from, -(-len(row) // self.page_size) if to is None else to)

    def _see(self, pages: Pages) -> None:
        assert (self._part[pages] > 0).all(), f"of pages {pages} some are holes"
        self._seen[pages] += 1

    def _pass_by(self, pages: Pages) -> None:
        assert (self._seen[pages] > 0).all(), f"of pages {pages} some are seen by nobody"
        self._seen[pages] -= 1

    def _put(self, pages: Pages, parts: Pages) -> None:
        self._part[pages] = parts
        self._log.append(pages)


class SnapshotAllocator(PartAllocator):
    """Of recurrent states: a part is a snapshot, whose bytes lie in pages of the same pool, as many as it needs.

    A request computes its states in places of its own (memory/state_pool.py), which keep those behind the last whole
    page too. Where others may go on, these are copied to a part of that page: behind a prompt, an answer, a breakpoint,
    and where K and V were found further than states, for the next one to pass by. A hit ends behind such a page, and
    its states are copied back.

    Invariant: copies that are ordered run before the next step, in the order of the log, and before a page that one of
               them reads or writes is given to another use.
    """

    kind, border_pages = "state", 1

    def __init__(self, num_pages: int, page_size: int, *, num_snapshots: int, snapshot_pages: int) -> None:
        """``snapshot_pages``: that each takes; 0: pages have no bytes, and snapshots a memory of their own."""
        super().__init__(num_pages, page_size, num_snapshots)
        self.snapshot_pages = snapshot_pages
        self.find_room: Callable[[int], bool] = lambda num_pages: num_pages <= self.num_free  # set once, by PageStore
        # now, and returns the numbers of those that could not be made; set once, when the engine starts
        self.run: Callable[[Sequence[StateCopy]], Sequence[int]] = lambda copies: ()
        self._lies = np.arange(num_snapshots + 1, dtype=np.int32)[:, None]  # [n + 1, pages] by part
        if snapshot_pages:
            self._lies = np.zeros((num_snapshots + 1, snapshot_pages), dtype=np.int32)
        self._copies = np.zeros(num_snapshots + 1, dtype=np.int64)  # by part: the number of the copy that fills it
        self._log: list[StateCopy] = []
        self._num_copies = 0

    @property
    def num_part_pages(self) -> int:
        return self.snapshot_pages * (self.parts.num_pages - self.parts.num_free)

    def part_pages(self) -> Pages:
        held = self._part[self._part > 0]
        return self._lies[held].ravel() if self.snapshot_pages else held[:0]

    def reach(self, pages: Pages) -> int:
        """Count the leading pages of a prefix up to the last one with a snapshot."""
        has = np.flatnonzero(self._part[pages])
        return int(has[-1]) + 1 if len(has) else 0

    def admitted(self, req: Req, pages: Pages, *, cut_at: int) -> None:
        assert req.holding is not None
        num_pages, reused_len = len(pages), len(pages) * self.page_size
        req.holding.behind = Behind(seen_from=max(0, num_pages - 1), reused_len=reused_len, cut_at=cut_at)
        self._end_chunk(req, reused_len)
        if num_pages:
            self._log_copy(req.holding.row, int(self._part[pages[-1]]), num_pages, from_snapshot=True)

    def kept(self, req: Req, start: int, end: int, row: Slots) -> None:
        """Copy the states of ``req`` behind the tokens [0, end), its last whole page, if that is an end."""
        border = end // self.page_size
        kinds = [kind for at, kind in self._ends(req, start, end) if at == border]
        if end in self._within(req):
            kinds.append(End.WITHIN)
        if kinds:
            self._keep(req, border, row, max(kinds))
        self._end_chunk(req, end)

    def left_at(self, req: Req, end: int, row: Slots) -> None:
        border = end // self.page_size
        if border and not self._part[self._pages(row, border - 1, border)].all():
            self._keep(req, border, row, End.ANSWER)

    def came(self, req: Req, row: Slots, num_tokens: int, *, at_border: bool) -> Pages:
        assert req.holding is not None
        req.holding.behind = replace(req.holding.behind, computed_from=num_tokens)
        self._run_now()  # copies that are ordered know the states that the row has had until now
        return row[:0]

    def released(self, req: Req, row: Slots, unwritten: Pages | None = None) -> None:
        """Drop the copy to ``req`` if it was to go on and did not."""
        assert req.holding is not None
        own = [copy for copy in self._log if copy.row == req.holding.row]
        if own and own[-1].from_snapshot:
            self._log.remove(own[-1])

    def show(self, pages: Pages) -> None:
        """Copy the states behind ``pages``, a prefix that ends with a snapshot, to row 0, which no request has. Now."""
        self._log_copy(0, int(self._part[pages[-1]]), len(pages), from_snapshot=True)
        self._run_now()

    def snapshot_of(self, page: int) -> Snapshot:
        """Describe the snapshot of ``page``."""
        part = self._part[page]
        return Snapshot(
            self._lies[part].copy(), int(self._copies[part]), int(self._end[page]), int(self._since[page])
        )

    def put(self, page: int, snapshot: Snapshot) -> None:
        """Let ``page``, which has none, have a ``snapshot``: its pages are held, and hold it."""
        (part,) = self.parts.alloc(1, rid="a snapshot")
        self._lies[part], self._copies[part] = snapshot.pages, snapshot.number
        self._part[page], self._end[page], self._since[page] = part, snapshot.kind, snapshot.since
        self._touch(np.array([page], dtype=np.int32))

    def give_up(self, page: int) -> int:
        """Give up the snapshot of ``page``. Returns: the pages that are free by that."""
        self._give_up(np.array([page], dtype=np.int32))
        self.evicted += 1
        return self.snapshot_pages

    def falls_to(self, above: int, page: int) -> float:
        """Let requests that would have gone on behind ``page``, whose snapshot goes, do so behind ``above``. Returns:
        what that is worth then."""
        self._end[above] = max(self._end[above], self._end[page])
        self._since[above] = max(self._since[above], self._since[page])
        worth = self._worth.of(self._end[[above]], self._num_reqs - self._since[[above]])
        return float(worth[0] * self._luck[above])

    def _end_chunk(self, req: Req, start: int) -> None:
        """Let a chunk of the prompt of ``req`` end where states are kept next from ``start`` on: behind a branch,
        within, and before a last page that is whole, since a prompt that comes again has a token left to compute."""
        assert req.holding is not None
        size = self.page_size
        last = [] if req.prompt_len % size else [req.prompt_len - size]
        ends = [*(at // size * size for at in self._branches(req)), *self._within(req), *last]
        chunk_end = min((end for end in ends if end > start), default=0)
        req.holding.behind = replace(req.holding.behind, chunk_end=chunk_end)

    def _within(self, req: Req) -> list[int]:
        """Return where states are kept inside the prompt of ``req``, in tokens: so that one that is the first to branch
        off computes half of what they share at most."""
        pool = self if self.snapshot_pages else self.parts
        if ROOM * pool.num_free <= pool.num_pages:
            return []
        ends = (LEAST_WITHIN << k for k in range((req.prompt_len // LEAST_WITHIN).bit_length()))
        return [end // self.page_size * self.page_size for end in ends if end < req.prompt_len]

    def _keep(self, req: Req, border: int, row: Slots, kind: End) -> None:
        """Keep the states of ``req`` behind page ``border``, if there is room: pages that others hold are theirs."""
        page = self._pages(row, border - 1, border)
        if not self._part[page[0]]:
            assert req.holding is not None
            if border * self.page_size < req.holding.behind.computed_from or not self.find_room(self.snapshot_pages):
                return
            self._make_room(1)
            (part,) = self.parts.alloc(1, rid=req.rid)
            if self.snapshot_pages:
                self._lies[part] = self.alloc(self.snapshot_pages, rid=req.rid)
            self._part[page], self._end[page] = part, 0
            self._touch(page)
            self._log_copy(req.holding.row, int(part), border, from_snapshot=False)
        self._note(page, End(max(kind, int(self._end[page[0]]))))

    def _give_up(self, pages: Pages) -> None:
        parts = self._part[pages]
        parts = parts[parts > 0]
        super()._give_up(pages)
        if self.snapshot_pages and len(parts):
            gone = set(self._copies[parts].tolist())
            try:
                if any(copy.snapshot in gone for copy in self._log):
                    self._run_now()
            finally:  # where ranks could not be told, nothing is written later to pages that are another's by then
                self._log = [copy for copy in self._log if copy.from_snapshot or copy.snapshot not in gone]
                PagedTokenToKVPoolAllocator.free(self, self._lies[parts].ravel())

    def _run_now(self) -> None:
        """Have the copies that are ordered made, and give up the snapshots that hold nothing by that."""
        lost = self.run(tuple(self._log))
        self._log = []
        if len(lost):
            self._give_up(np.flatnonzero((self._part > 0) & np.isin(self._copies[self._part], lost)).astype(np.int32))

    def drain(self) -> list[StateCopy]:
        """Return the copies to make before the next step."""
        log, self._log = self._log, []
        return log

    def _log_copy(self, row: int, part: int, num_pages: int, *, from_snapshot: bool) -> None:
        self._num_copies += 1
        if not from_snapshot:
            self._copies[part] = self._num_copies
        self._log.append(
            StateCopy(
                number=self._num_copies,
                row=row,
                num_tokens=num_pages * self.page_size,
                pages=self._lies[part].copy(),
                snapshot=int(self._copies[part]),
            )
        )
