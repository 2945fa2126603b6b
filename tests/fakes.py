"""Stand-ins for what a test cannot or need not run. They check more than the real thing would, not less."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from replicas.scheduler.plan import DecodePlan, ExtendPlan, StepPlan, StepResult, TableWrite


class FakeDevice:
    """A model whose next token is a hash of the tokens *found in the pool*, read through the table like attention does.

    Each slot holds (token, position). A wrong page, a stale table entry, a page reused under a live request or a prefix
    shared between unequal prompts therefore changes the output, or fails an assertion here.
    """

    def __init__(
        self, *, num_slots: int, num_rows: int, row_len: int, vocab_size: int = 1000, window: int | None = None
    ) -> None:
        """``window``: the last tokens that make the next one; None: all."""
        self.window = window
        self.tokens = np.full(num_slots, -1, dtype=np.int64)
        self.positions = np.full(num_slots, -1, dtype=np.int64)
        self.table = np.zeros((num_rows, row_len), dtype=np.int64)
        self.vocab_size = vocab_size
        self.num_computed = 0
        self._sampled: list[int] = []  # by the step executed last

    def launch(self, plan: StepPlan) -> "LateStep":
        """Launch a step that runs when its result is asked for, as late as a real device may: what it reads and writes
        must be there until then."""
        return LateStep(self, plan)

    def execute(self, plan: StepPlan) -> StepResult:
        slots = np.concatenate([row.slots for row in plan.rows]) if isinstance(plan, ExtendPlan) else plan.slots
        cells = [(write.row, write.start + at) for write in plan.table_writes for at in range(len(write.slots))]
        assert len(set(cells)) == len(cells), "a plan writes a position of the table twice: a GPU keeps either"
        for write in plan.table_writes:
            self._write_table(write)
        if not slots.any():  # an idle step, on the dummy page
            return StepResult(token_ids=np.zeros(len(plan.sampling), dtype=np.int32))
        self._sampled = self._extend(plan) if isinstance(plan, ExtendPlan) else self._decode(plan)
        return StepResult(token_ids=np.array(self._sampled, dtype=np.int32))

    def _extend(self, plan: ExtendPlan) -> list[int]:
        written = np.concatenate([row.slots for row in plan.rows])
        assert len(np.unique(written)) == len(written), "two tokens of a step share a slot"
        for row in plan.rows[len(plan.rows) - plan.num_decode :]:
            self.table[row.row, row.prefix_len] = row.slots[0]
        for row in plan.rows:
            self._store(row.row, row.prefix_len, row.token_ids, row.slots)
        return [
            self._next(row.row, row.prefix_len + len(row.token_ids)) for row in plan.rows if row.sample
        ]

    def _decode(self, plan: DecodePlan) -> list[int]:
        assert len(np.unique(plan.slots)) == len(plan.slots), "two requests of a step share a slot"
        token_ids = plan.token_ids
        if plan.follows is not None:
            token_ids = np.array(self._sampled, dtype=np.int32)[plan.follows]
        for row, token, seq_len, slot in zip(plan.rows, token_ids, plan.seq_lens, plan.slots, strict=True):
            self.table[row, seq_len - 1] = slot
            self._store(int(row), int(seq_len) - 1, np.array([token]), np.array([slot]))
        return [self._next(int(row), int(n)) for row, n in zip(plan.rows, plan.seq_lens, strict=True)]

    def _write_table(self, write: TableWrite) -> None:
        self.table[write.row, write.start : write.start + len(write.slots)] = write.slots

    def _store(self, row: int, start: int, token_ids: Sequence[int] | np.ndarray, slots: np.ndarray) -> None:
        end = start + len(slots)
        assert (self.table[row, start:end] == slots).all(), f"row {row}: slots of [{start}, {end}) are not in the table"
        assert (np.asarray(slots) > 0).all(), "slot of the dummy page"
        self.tokens[slots] = token_ids
        self.positions[slots] = np.arange(start, end)
        self.num_computed += len(slots)

    def _next(self, row: int, seq_len: int) -> int:
        first = 0 if self.window is None else max(0, seq_len - self.window)
        slots = self.table[row, first:seq_len]
        assert (self.positions[slots] == np.arange(first, seq_len)).all(), f"row {row} reads slots of other positions"
        return next_token(self.tokens[slots], self.vocab_size)


@dataclass(frozen=True, slots=True)
class LateStep:
    """A step that a fake device has yet to run."""

    device: FakeDevice
    plan: StepPlan

    def result(self) -> StepResult:
        return self.device.execute(self.plan)


def next_token(token_ids: Sequence[int] | np.ndarray, vocab_size: int) -> int:
    """Return the token that FakeDevice makes after ``token_ids``: the oracle."""
    return zlib.crc32(np.asarray(token_ids, dtype=np.int64).tobytes()) % vocab_size


def continuation(prompt: Sequence[int], length: int, vocab_size: int = 1000, window: int | None = None) -> list[int]:
    """Return the ``length`` tokens that FakeDevice makes after ``prompt``."""
    ids = list(prompt)
    for _ in range(length):
        ids.append(next_token(ids if window is None else ids[-window:], vocab_size))
    return ids[len(prompt) :]
