"""Hands out the pages of one device pool, and the rows of the table that says which slots each running request has.

Owns:      the free pages; the host's copy of ReqToTokenPool: its rows and their users, and the log of writes that the
           devices' copies have not made yet.
Never:     touches K/V bytes (memory/pool.py), knows trees or devices, or picks victims (cache/). Every rank's own copy
           of the table follows the log (runner/batch.py).
Invariant: free + held == num_pages, and no page is both; page 0, the dummy sink of padded tokens, is never handed out.
           Row r is valid on [0, valid_len(r)): each entry there was written since the row was taken, and that write is
           in the log, was drained from it, or is one of `append_each`. Row 0 is a dummy and is never handed out.
Thread:    scheduler thread only.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtransfer.layout import Carried
from replicas.errors import PagesExhausted, RowsExhausted

Pages = npt.NDArray[np.int32]  # [n] page ids
Slots = npt.NDArray[np.int32]  # [n] KV slots: page * page_size + offset


class PagedTokenToKVPoolAllocator:
    """Pages 1..num_pages of ``page_size`` tokens; page 1 goes out first (SPEC D03). At page_size 1 a page is a slot."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 1 or page_size < 1 or (num_pages + 1) * page_size > 2**31:
            raise ValueError(f"{num_pages} pages of {page_size} tokens: both must be >= 1 and slots must fit int32")
        self.num_pages = num_pages
        self.page_size = page_size
        self._stack = np.arange(num_pages, 0, -1, dtype=np.int32)  # free pages are [:num_free], the next one last
        self._num_free = num_pages
        self._held = np.zeros(num_pages + 1, dtype=np.bool_)
        self._order = np.zeros(num_pages + 1, dtype=np.int32)  # scratch: finds a page named twice in one call
        self._offsets = np.arange(page_size, dtype=np.int32)

    @property
    def num_free(self) -> int:
        """The number of free pages."""
        return self._num_free

    @property
    def available_tokens(self) -> int:
        """The size of the free pages in tokens, never in pages (SPEC K14)."""
        return self._num_free * self.page_size

    def alloc(self, need_pages: int, *, rid: str) -> Pages:
        """Take ``need_pages`` pages for request ``rid``: all of them or none.

        Args:    need_pages: pages (not tokens), >= 0.
        Returns: [need_pages] page ids; token t's slot is ``pages[t // ps] * ps + t % ps``.
        Raises:  PagesExhausted if fewer are free. Evicts nothing itself.
        Source:  paged KV, Kwon et al. 2023 (arXiv:2309.06180), section 4.
        """
        top = self._num_free
        if need_pages > top:
            raise PagesExhausted(
                f"request {rid} needs {need_pages} pages, {top} of {self.num_pages} are free: "
                f"evict {need_pages - top} or retract a request"
            )
        pages = self._stack[top - need_pages : top][::-1].copy()
        self._num_free = top - need_pages
        self._held[pages] = True
        return pages

    def free(self, pages: Pages | Sequence[int]) -> None:
        """Take back whole pages (SPEC K7: never single slots), all at once: a caller collects them (SPEC D02).

        Freeing a page that is not held, or twice, is a bug of the caller and fails an assertion; nothing is freed then.
        """
        taken = np.asarray(pages, dtype=np.int32)
        if not len(taken):
            return
        in_range = taken.min() > 0 and taken.max() <= self.num_pages
        assert in_range, f"pages {taken} are not all in 1..{self.num_pages}"
        assert self._held[taken].all(), f"double free: pages {taken[~self._held[taken]]} are not held"
        order = np.arange(len(taken), dtype=np.int32)
        self._order[taken] = order
        assert (self._order[taken] == order).all(), f"double free: a page is named twice in {taken}"
        self._held[taken] = False
        end = self._num_free + len(taken)
        self._stack[self._num_free : end] = taken[::-1]  # so that the next alloc gets them in the same order
        self._num_free = end

    def alloc_extend(self, prefix_len: int, seq_len: int, last_slot: int, *, rid: str, bare: bool = False) -> Slots:
        """Take slots for tokens [prefix_len, seq_len) of one request (SPEC D05, D06).

        Three parts in order: the rest of the last partial page after ``last_slot``, whole new pages, and the beginning
        of one more page. Takes ceil(seq_len / ps) - ceil(prefix_len / ps) pages, or none.

        Args:    last_slot: slot of token prefix_len - 1; -1 when prefix_len is 0 (SPEC D08). bare: the pages have no
                 parts (cache/parts.py).
        Returns: [seq_len - prefix_len] slots.
        Raises:  PagesExhausted.
        """
        ps = self.page_size
        assert 0 <= prefix_len <= seq_len, f"request {rid}: prefix {prefix_len} exceeds sequence {seq_len}"
        assert (last_slot + 1) % ps == prefix_len % ps, f"request {rid}: slot {last_slot} is not at {prefix_len - 1}"
        num_new = seq_len - prefix_len
        num_pages = -(-seq_len // ps) - -(-prefix_len // ps)
        pages = PagedTokenToKVPoolAllocator.alloc(self, num_pages, rid=rid) if bare else self.alloc(num_pages, rid=rid)
        rest = min(-prefix_len % ps, num_new)
        slots = np.empty(num_new, dtype=np.int32)
        slots[:rest] = np.arange(last_slot + 1, last_slot + 1 + rest, dtype=np.int32)
        slots[rest:] = self.pages_to_slots(pages)[: num_new - rest]
        return slots

    def alloc_decode(self, seq_lens: npt.NDArray[np.int32], last_slots: Slots, *, rid: str = "decode batch") -> Slots:
        """Take one more slot for each request of a batch (SPEC D07): a new page where the last one is full.

        Args:    seq_lens: [B] lengths that count the new token. last_slots: [B] slot of the token before; -1 for none.
        Returns: [B] slots.
        Raises:  PagesExhausted; takes all pages of the batch or none.
        """
        ps = self.page_size
        assert ((last_slots + 2 - seq_lens) % ps == 0).all(), "a last slot does not end its sequence"
        slots = last_slots + np.int32(1)
        starts_page = (seq_lens - 1) % ps == 0
        need = int(np.count_nonzero(starts_page))
        if need:
            slots[starts_page] = self.alloc(need, rid=rid) * np.int32(ps)
        return slots

    def pages_to_slots(self, pages: Pages) -> Slots:
        """Return the slots of whole pages: [n * page_size]."""
        return (pages[:, None] * np.int32(self.page_size) + self._offsets).reshape(-1)

    def free_pages(self) -> Pages:
        """Copy the free list, for checks: [num_free]."""
        return self._stack[: self._num_free].copy()

    def check(self) -> None:
        """Assert the invariant of the module's docstring. O(num_pages)."""
        state = self._held.astype(np.int32)
        np.add.at(state, self._stack[: self._num_free], 1)
        assert state[0] == 0, "the dummy page 0 was handed out"
        wrong = np.flatnonzero(state[1:] != 1) + 1
        assert not len(wrong), f"pages {wrong} are not exactly one of free and held"


ROW_SLACK = 4  # columns beyond the context (SPEC B01)


def len_with_carried(num_tokens: int, page_size: int, carried: Carried) -> int:
    """Count the positions of ``num_tokens`` and of the pages behind their last one that carry what they need beside K
    and V; without such, of ``num_tokens`` alone."""
    num_pages = carried.num_pages(num_tokens, page_size)
    return (-(-num_tokens // page_size) + num_pages) * page_size if num_pages else num_tokens


Write = tuple[int, int, Slots]  # row, start, slots of [start, start + len(slots))


class ReqToTokenPool:
    """int32 [max_requests + 1, context_len + 4]: row per request, column per position, value is the slot (SPEC B01)."""

    def __init__(self, max_requests: int, context_len: int) -> None:
        self.max_requests = max_requests
        self._slots = np.zeros((max_requests + 1, context_len + ROW_SLACK), dtype=np.int32)
        self._valid_len = np.zeros(max_requests + 1, dtype=np.int32)
        self._free = list(range(max_requests, 0, -1))
        self._taken = np.zeros(max_requests + 1, dtype=np.bool_)
        self._log: dict[int, list[Write]] = {}  # by row, so that a freed row takes its undrained writes along

    @property
    def shape(self) -> tuple[int, int]:
        return self._slots.shape[0], self._slots.shape[1]

    @property
    def num_free(self) -> int:
        """The number of free rows."""
        return len(self._free)

    def alloc(self) -> int:
        """Take a free row. Raises: RowsExhausted when there is none (SPEC D09)."""
        if not self._free:
            raise RowsExhausted(
                f"all {self.max_requests} rows of the request table are taken: wait until a request ends, or raise "
                f"max_running_requests (now {self.max_requests})"
            )
        row = self._free.pop()
        self._taken[row] = True
        self._valid_len[row] = 0
        return row

    def free(self, row: int) -> None:
        """Give ``row`` back; drop writes to it that were not drained."""
        assert self._taken[row], f"row {row} is not taken"
        self._taken[row] = False
        self._log.pop(row, None)
        self._free.append(row)

    def write(self, row: int, start: int, slots: Slots) -> None:
        """Map positions [start, start + len(slots)) of ``row`` to ``slots``; without a change nothing is logged."""
        end = start + len(slots)
        assert self._taken[row], f"row {row} is not taken"
        assert 0 <= start <= self._valid_len[row], f"row {row}: {start} leaves a gap after {self._valid_len[row]}"
        assert end <= self._slots.shape[1], f"row {row}: {end} positions do not fit {self._slots.shape[1]} columns"
        current = self._slots[row, start:end]
        if start == end or (end <= self._valid_len[row] and np.array_equal(current, slots)):
            return
        current[:] = slots
        self._valid_len[row] = max(end, self._valid_len[row])
        self._log.setdefault(row, []).append((row, start, slots))

    def write_again(self, row: int, start: int, end: int) -> None:
        """Log positions [start, end) of ``row`` once more: their pages have other parts now (cache/parts.py)."""
        self._log.setdefault(row, []).append((row, start, self.view(row, start, end).copy()))

    def append_each(self, rows: npt.NDArray[np.int32], positions: npt.NDArray[np.int32], slots: Slots) -> None:
        """Map one new position for each of B rows: position ``positions[b]`` of ``rows[b]`` to ``slots[b]``.

        Not logged: the plan made from it names the slots, and ranks write their copies from the plan.
        """
        assert self._taken[rows].all(), "a row is not taken"
        assert (self._valid_len[rows] == positions).all(), "a write would leave a gap, or change the past"
        self._slots[rows, positions] = slots
        self._valid_len[rows] = positions + 1

    def cut(self, row: int, valid_len: int) -> None:
        """Forget the positions of ``row`` from ``valid_len`` on, and writes to them that were not drained."""
        assert self._taken[row], f"row {row} is not taken"
        assert valid_len <= self._valid_len[row], f"row {row} is valid on [0, {self._valid_len[row]}) only"
        self._valid_len[row] = valid_len
        if row in self._log:
            kept = [(row, start, slots[: max(0, valid_len - start)]) for _, start, slots in self._log.pop(row)]
            self._log[row] = [write for write in kept if len(write[2])]

    def view(self, row: int, start: int, end: int) -> Slots:
        """Return the slots of positions [start, end): [end - start], a view that later writes change."""
        assert self._taken[row], f"row {row} is not taken"
        assert end <= self._valid_len[row], f"row {row} is not valid on [{start}, {end})"
        return self._slots[row, start:end]

    def gather(self, rows: npt.NDArray[np.int32], positions: npt.NDArray[np.int32]) -> Slots:
        """Return [B] the slot of position ``positions[b]`` of ``rows[b]``; -1 for position -1 (SPEC D08)."""
        return np.where(positions >= 0, self._slots[rows, positions], np.int32(-1))

    def valid_len(self, row: int) -> int:
        return int(self._valid_len[row])

    def drain_writes(self) -> tuple[Write, ...]:
        """Return the writes since the last call. None names a position twice, so their order does not matter; adjacent
        writes of one row are merged, with the newest values."""
        drained: list[Write] = []
        for row, writes in self._log.items():
            if len(writes) == 1:
                drained.append(writes[0])
                continue
            spans = _spans([(start, start + len(slots)) for _, start, slots in writes])
            drained += [(row, start, self._slots[row, start:end].copy()) for start, end in spans]
        self._log = {}
        return tuple(drained)

    def check(self) -> None:
        """Assert that every row is free or taken, and that undrained writes belong to taken rows."""
        assert sorted(self._free) == (np.flatnonzero(~self._taken[1:]) + 1).tolist(), "a row is free and taken"
        assert all(self._taken[row] for row in self._log), "a write is logged for a free row"


def _spans(parts: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sort ``parts`` (start, end) and merge those that touch or overlap."""
    spans: list[tuple[int, int]] = []
    for start, end in sorted(parts):
        if spans and start <= spans[-1][1]:
            spans[-1] = spans[-1][0], max(end, spans[-1][1])
        else:
            spans.append((start, end))
    return spans
