"""The recurrent states of the requests that run: two places for each row of the request table, used in turn.

Owns:      the memory of states, and how many tokens the state in each place has seen.
Never:     computes a state (models/states.py has the module do it), or knows a request.
Invariant: a step reads the state of exactly the tokens before its own, and none where there are none; without such a
           state it raises. It writes the row's other place, so that the same step can run again (a step that failed,
           engine/failed_steps.py), and one that was launched ahead and whose token is dropped leaves the state before.
Thread:    the runner's.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from replicas.memory.pool import lazy_zeros
from replicas.memory.sizing import STATE_PLACES


@dataclass(frozen=True, slots=True)
class Segment:
    """The tokens [start, end) of a packed step that one request has, and its places; ``read``: None at position 0."""

    start: int
    end: int
    read: int | None
    write: int


class StatePool:
    """One tensor [rows * STATE_PLACES, *shape] for each state of a text."""

    def __init__(
        self, states: Sequence[tuple[tuple[int, ...], torch.dtype]], num_rows: int, device: torch.device
    ) -> None:
        places = STATE_PLACES * num_rows
        self.tensors: list[Tensor] = [
            lazy_zeros((places, *shape), dtype)
            if device.type == "cpu"
            else torch.zeros((places, *shape), dtype=dtype, device=device)
            for shape, dtype in states
        ]
        self._seen = np.full((num_rows, STATE_PLACES), -1, dtype=np.int64)  # tokens that a place's state has seen
        self._under_way: tuple[list[int], Sequence[int]] = ([], [])  # places that the step writes, and its seq_lens

    def begin(
        self, rows: Sequence[int], bounds: Sequence[int], seq_lens: Sequence[int], out_slots: Tensor
    ) -> list[Segment]:
        """Choose the places of a step's requests, in its order, as BatchMeta (attention/base.py) describes it.

        Raises: RuntimeError where a state is not there.
        """
        segments = []
        for index, row in enumerate(rows):
            start, end = bounds[index], bounds[index + 1]
            seen, prefix_len = self._seen[row], seq_lens[index] - (end - start)
            if prefix_len == 0:
                seen[:] = -1  # what was there is of another request
                read, side = None, 0
            else:
                found = np.flatnonzero(seen == prefix_len)
                if not len(found) and int(out_slots[start]):  # slot 0 is the sink: such a step means nothing
                    raise RuntimeError(
                        f"row {row} goes on behind {prefix_len} tokens, and its states are of {seen.tolist()}: a step "
                        "was left out or ran twice, which is a defect of Manta"
                    )
                kept = int(found[0]) if len(found) else 0
                read, side = STATE_PLACES * row + kept, 1 - kept
            seen[side] = -1  # until the step is through
            segments.append(Segment(start, end, read, STATE_PLACES * row + side))
        self._under_way = [segment.write for segment in segments], seq_lens
        return segments

    def end(self) -> None:
        """Take the states that the step has written for good."""
        written, seq_lens = self._under_way
        self._seen.reshape(-1)[written] = seq_lens
