"""ReqToTokenPool, the host's copy: which KV slot holds each position of each running request.

Owns:      the rows and their users; the log of writes that the devices' copies have not made yet.
Never:     knows pages, trees or devices; every rank's own copy follows the log (runner/batch.py).
Invariant: row r is valid on [0, valid_len(r)): each entry there was written since the row was taken, and that write is
           in the log, was drained from it, or is one of `append_each`. Row 0 is a dummy and is never handed out.
Thread:    scheduler thread only.
"""

import numpy as np
import numpy.typing as npt

from replicas.errors import RowsExhausted
from replicas.memory.allocator import Slots

ROW_SLACK = 4  # columns beyond the context (SPEC B01)

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

    def append_each(self, rows: npt.NDArray[np.int32], positions: npt.NDArray[np.int32], slots: Slots) -> None:
        """Map one new position for each of B rows: position ``positions[b]`` of ``rows[b]`` to ``slots[b]``.

        Not logged: the plan made from it names the slots, and ranks write their copies from the plan.
        """
        assert self._taken[rows].all(), "a row is not taken"
        assert (self._valid_len[rows] == positions).all(), "a write would leave a gap, or change the past"
        self._slots[rows, positions] = slots
        self._valid_len[rows] = positions + 1

    def cut(self, row: int, valid_len: int) -> None:
        """Forget the positions of ``row`` from ``valid_len`` on; its writes are drained."""
        assert self._taken[row], f"row {row} is not taken"
        assert row not in self._log, f"row {row} has writes that no plan has taken"
        assert valid_len <= self._valid_len[row], f"row {row} is valid on [0, {self._valid_len[row]}) only"
        self._valid_len[row] = valid_len

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
