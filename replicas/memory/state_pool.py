"""The recurrent states of the requests that run, and snapshots of states for others.

Owns:      the memory of the states of requests, and how many tokens the state in each place has seen: STATE_PLACES
           places for each row of the request table, used in turn, and one more for each token of a draft. Snapshots
           lie in pages of the KV pool (cache/parts.py): the states, one after the other, and the copy's number.
Never:     computes a state (models/states.py has the module do it), or knows a request.
Invariant: a step reads the state of exactly the tokens before its own, and none where there are none; without such a
           state it raises. It writes another place, so that the same step can run again (a step that failed,
           engine/failed_steps.py), and one that was launched ahead and whose token is dropped leaves the state before.
           Where snapshots are kept, the state behind the last whole page of a row stays until the next page is whole.
           A draft's tokens are rows of their own and leave a state each: the next step reads the one behind the last
           token that came true, and forgets those further on.
Thread:    the runner's.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from replicas.memory.pool import zeros
from replicas.memory.sizing import SNAPSHOT_END, STATE_PLACES
from replicas.types import StateCopy


@dataclass(frozen=True, slots=True)
class Segment:
    """The tokens [start, end) of a packed step that one request has, or a part of them, and their places; ``read``:
    None at position 0. ``seen``: tokens of the request up to ``end``."""

    start: int
    end: int
    read: int | None
    write: int
    seen: int
    is_part: bool = False  # the request has two in this step, of which the second reads what the first has written


class _RowStep:
    """What a step with a draft has read and written of one row so far."""

    def __init__(self, taken: set[int | None]) -> None:
        self.taken, self.seen, self.last_write = taken, 0, 0

    def wrote(self, segment: Segment) -> None:
        """Take in the row's next segment."""
        self.taken.add(segment.write)
        self.seen, self.last_write = segment.seen, segment.write


class StatePool:
    """One tensor [rows * places, *shape] for each state of a text."""

    def __init__(
        self,
        states: Sequence[tuple[tuple[int, ...], torch.dtype]],
        num_rows: int,
        device: torch.device,
        *,
        pages: Tensor | None = None,
        page_size: int = 0,
        places: int = STATE_PLACES,
    ) -> None:
        """``pages`` [n, page_bytes] uint8: in which snapshots lie. ``page_size``: states behind whole pages are kept;
        0: they are not, and there is no snapshot. ``places``: of each row, STATE_PLACES and one for each token of a
        draft."""
        self._pages, self._page_size, self._of_row = pages, page_size, places
        self.tensors = [zeros((places * num_rows, *shape), dtype, device) for shape, dtype in states]
        self._seen = np.full(places * num_rows, -1, dtype=np.int64)  # tokens that a place's state has seen
        self._under_way: list[Segment] = []
        self._copied = 0  # the number of the last copy

    @torch.inference_mode()
    def copy(self, orders: Sequence[StateCopy]) -> list[int]:
        """Make the copies in their order. Returns: the numbers of those that found no state.

        A state that is to be kept may have been written over, by a step that failed: the snapshot holds nothing then.
        A row that goes on from such a snapshot has no state either: its own step raises (`begin`), and no other.
        """
        lost = list[int]()
        for order in orders:
            if order.number <= self._copied:  # by the step that failed
                continue
            self._copied = order.number
            assert self._pages is not None, "snapshots have no pages"
            if order.from_snapshot:
                self._forget(order.row)  # what was there is of another request, whatever becomes of this copy
            pages = torch.from_numpy(order.pages.astype(np.int64)).to(self._pages.device)
            if order.from_snapshot:
                held = self._pages[pages].flatten()
                end = held[self._num_bytes : self._num_bytes + SNAPSHOT_END].clone().view(torch.int64)
                if int(end) == order.snapshot:
                    self.write(order.row, order.num_tokens, held)
                else:
                    lost.append(order.number)
                continue
            place, number = self._place(order.row, order.num_tokens), np.array([order.number])
            if self._seen[place] != order.num_tokens:
                number[:] = 0
                lost.append(order.number)
            filled = torch.cat([*self._bytes(place), torch.from_numpy(number).to(pages.device).view(torch.uint8)])
            room = len(pages) * self._pages.shape[1] - len(filled)
            self._pages[pages] = torch.nn.functional.pad(filled, (0, room)).view(len(pages), -1)
        return lost

    @torch.inference_mode()
    def undo(self, order: StateCopy) -> None:
        """Leave nothing where ``order`` copied to."""
        if order.from_snapshot:
            self._forget(order.row)
        elif self._pages is not None:
            self._pages[torch.from_numpy(order.pages.astype(np.int64)).to(self._pages.device)] = 0

    @property
    def _num_bytes(self) -> int:
        """The bytes of a text's states."""
        return sum(tensor[0].nbytes for tensor in self.tensors)

    def _bytes(self, place: int) -> list[Tensor]:
        return [tensor[place].flatten().view(torch.uint8) for tensor in self.tensors]

    def _forget(self, row: int) -> int:
        """Forget the states of ``row``. Returns: its first place."""
        first = self._of_row * row
        self._seen[first : first + self._of_row] = -1
        return first

    def read(self, row: int, num_tokens: int) -> Tensor:
        """Copy the states of ``row`` behind ``num_tokens``, one after the other: [state_bytes] uint8. Raises:
        RuntimeError where they are not there."""
        place = self._place(row, num_tokens)
        if self._seen[place] != num_tokens:
            raise RuntimeError(f"row {row} has no states behind {num_tokens} tokens, which is a defect of Manta")
        return torch.cat(self._bytes(place))

    def write(self, row: int, num_tokens: int, states: Tensor) -> None:
        """Undo `read`, from the first bytes of ``states`` [>= state_bytes]; ``row`` has no others then."""
        first = self._forget(row)
        for tensor in self.tensors:
            target = tensor[first]
            own, states = states[: target.nbytes].clone(), states[target.nbytes :]
            target.copy_(own.view(tensor.dtype).view(target.shape))
        self._seen[first] = num_tokens

    def begin(
        self, rows: Sequence[int], bounds: Sequence[int], seq_lens: Sequence[int], out_slots: Tensor
    ) -> list[Segment]:
        """Choose the places of a step's requests, in its order, as BatchMeta (attention/base.py) describes it.

        Raises: RuntimeError where a state is not there.
        """
        segments, size = list[Segment](), self._page_size
        drafted = {row for row, count in Counter(rows).items() if count > 1}
        of_rows = dict[int, _RowStep]()  # of rows with a draft
        for index, row in enumerate(rows):
            start, end, seq_len = bounds[index], bounds[index + 1], seq_lens[index]
            prefix_len = seq_len - (end - start)
            if row in of_rows and of_rows[row].seen == prefix_len:  # the next token of a draft: its row's last write
                step = of_rows[row]
                segment = Segment(start, end, step.last_write, self._free_place(row, step.taken), seq_len, is_part=True)
                segments.append(segment)
            else:
                read = self._read_place(row, prefix_len, out_slots[start])
                last = self._place(row, prefix_len // size * size) if size else None  # behind the last whole page
                border = seq_len // size * size if size else 0
                if border == seq_len or border <= prefix_len:  # it ends with a page, or within the one it begins in
                    write = self._free_place(row, {read, last})
                    segments.append(Segment(start, end, read, write, seq_len, is_part=row in drafted))
                else:
                    middle = self._free_place(row, {read})
                    cut = end - (seq_len - border)
                    segments.append(Segment(start, cut, read, middle, border, is_part=True))
                    write = self._free_place(row, {read, middle})
                    segments.append(Segment(cut, end, middle, write, seq_len, is_part=True))
                if row in drafted:
                    of_rows[row] = _RowStep({read, last})
            if row in drafted:
                of_rows[row].wrote(segments[-1])
        self._seen[[segment.write for segment in segments]] = -1  # until the step is through
        self._under_way = segments
        return segments

    def end(self) -> None:
        """Take the states that the step has written for good."""
        for segment in self._under_way:
            self._seen[segment.write] = segment.seen

    def _read_place(self, row: int, prefix_len: int, slot: Tensor) -> int | None:
        """Return the place of the state that a step of ``row`` reads; None at position 0. What the row's other places
        hold of tokens behind those is forgotten: they were dropped. ``slot``: of the first token; 0, the sink: it means
        nothing. Raises: RuntimeError where the state is not there."""
        first = self._of_row * row
        seen = self._seen[first : first + self._of_row]
        if prefix_len == 0:
            seen[:] = -1  # what was there is of another request
            return None
        seen[seen > prefix_len] = -1
        read = self._place(row, prefix_len)
        if self._seen[read] != prefix_len and int(slot):
            raise RuntimeError(
                f"row {row} goes on behind {prefix_len} tokens, and its states are of {seen.tolist()}: a step was left "
                "out or ran twice, or a snapshot did not hold what it was taken for: flush the cache, and report this"
            )
        return read

    def _free_place(self, row: int, taken: Collection[int | None]) -> int:
        """Return the first place of ``row`` that is not among ``taken``."""
        first = self._of_row * row
        return next(place for place in range(first, first + self._of_row) if place not in taken)

    def _place(self, row: int, num_tokens: int) -> int:
        """Return the place of a row whose state has seen ``num_tokens``; its first where there is none."""
        first = self._of_row * row
        found = np.flatnonzero(self._seen[first : first + self._of_row] == num_tokens)
        return first + (int(found[0]) if len(found) else 0)
