"""How often each request with penalties has had each token, kept on the device: a step may follow one whose token the
host does not know yet.

Owns:      counts [n, V] int32, a row for each request of the last step that has penalties; made as needed.
Never:     waits for the device.
Invariant: a row holds its request's prompt, as the bit IN_PROMPT, and its output so far, with the tokens drawn last.
           A request is known by its own buffer of token ids and by the number of its output tokens; whose number does
           not continue (it is new, was retracted, or a step of it was sampled on the host) is counted anew, and so are
           the rows of its draft, each step.
Thread:    engine thread of rank 0.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from replicas.attention.page_lists import to_device
from replicas.kernels import gpu
from replicas.scheduler.plan import SampleRow
from replicas.types import TokenIds

IN_PROMPT = 1 << 30  # as triton_rows.py knows it
BLOCK = 1024


@dataclass(slots=True)
class _Held:
    output_ids: TokenIds  # kept, so that no other request's buffer gets its address
    place: int  # row of the counts
    num_output: int  # tokens counted


class TokenCounts:
    """The counts of the requests that have penalties; one per sampler."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._counts = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        self._held: dict[tuple[int, int, int], _Held] = {}  # the last number: which of its rows in a step
        self._last: tuple[Tensor, Tensor] | None = None  # rows of the step and their places in the counts, [R] int64

    def penalise(self, logits: Tensor, rows: Sequence[SampleRow], last_ids: Tensor | None) -> None:
        """Apply the penalties of ``rows`` to ``logits`` [S, V] in place.

        Args: last_ids: [S or more] int64, the input of a decode step: the token that a row's ``output_ids`` may lack.
        """
        self._last = None
        index = [i for i, row in enumerate(rows) if row.params.has_penalties]
        if not index:
            self._held.clear()
            return
        held = self._hold([rows[i] for i in index])
        new = [j for j, each in enumerate(held) if each.num_output != rows[index[j]].num_output]
        device, params = logits.device, [rows[i].params for i in index]
        columns = np.array([index, [each.place for each in held]], np.int64)
        factors = np.array([[p.repetition_penalty, p.frequency_penalty, p.presence_penalty] for p in params]).T
        packed = to_device(np.vstack((columns, np.ascontiguousarray(factors).view(np.int64))), device)  # [5, R]
        self._last = (packed[0], packed[1])
        if new:
            self._count([rows[index[j]] for j in new], [held[j] for j in new])
            late = [j for j in new if len(rows[index[j]].output_ids) < rows[index[j]].num_output]
            if late:
                assert last_ids is not None, "only a decode step follows another"
                at = to_device(np.array([[index[j] for j in late], [held[j].place for j in late]], np.int64), device)
                self._add(at[1], last_ids[at[0]])
        vocab_size = logits.shape[1]
        gpu.kernels().penalise[(len(index), -(-vocab_size // BLOCK))](
            logits, self._counts, packed[0], packed[1], packed[2:], len(index), vocab_size, BLOCK=BLOCK, num_warps=4,
            **gpu.EXACT,
        )  # fmt: skip

    def add(self, tokens: Tensor) -> None:
        """Count the tokens [S] int64 that were drawn for the rows of the last `penalise`."""
        if self._last is not None:
            index, places = self._last
            self._add(places, tokens[index])
            for each in self._held.values():
                each.num_output += 1

    def _hold(self, rows: Sequence[SampleRow]) -> list[_Held]:
        """Find or make the places of the requests of ``rows``; those of others are free from here on."""
        keys, num_seen = list[tuple[int, int, int]](), Counter[int]()
        for row in rows:
            address = row.output_ids.__array_interface__["data"][0]
            keys.append((address, len(row.prompt_ids), num_seen[address]))
            num_seen[address] += 1
        kept = {key: self._held[key] for key in keys if key in self._held and not key[-1]}
        used = {each.place for each in kept.values()}
        if len(rows) > len(self._counts):
            more = self._counts.new_zeros((max(8, 2 * len(rows)), self._counts.shape[1]))
            more[: len(self._counts)] = self._counts
            self._counts = more
        free = (place for place in range(len(self._counts)) if place not in used)
        for key, row in zip(keys, rows, strict=True):
            if key not in kept:
                kept[key] = _Held(row.output_ids, next(free), -1)
        self._held = kept
        return [kept[key] for key in keys]

    def _count(self, rows: Sequence[SampleRow], held: Sequence[_Held]) -> None:
        """Count the tokens of ``rows`` that the host knows, from nothing."""
        vocab_size, places, values = self._counts.shape[1], [], []
        for row, each in zip(rows, held, strict=True):
            ids, counts = np.unique(row.output_ids, return_counts=True)
            in_prompt = np.unique(row.prompt_ids)
            places += [each.place * vocab_size + part.astype(np.int64) for part in (ids, in_prompt)]
            values += [counts.astype(np.int64), np.full(len(in_prompt), IN_PROMPT, np.int64)]
            each.num_output = row.num_output
        device = self._counts.device
        self._counts.index_fill_(0, to_device(np.array([each.place for each in held], np.int64), device), 0)
        flat, made = to_device(np.stack((np.concatenate(places), np.concatenate(values))), device)
        self._counts.view(-1).index_add_(0, flat, made.int())

    def _add(self, places: Tensor, tokens: Tensor) -> None:
        """Count one token of each of ``places``; that of a row that is broken, which ends, is any."""
        flat = places * self._counts.shape[1] + tokens.clamp_min(0)
        self._counts.view(-1).index_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
