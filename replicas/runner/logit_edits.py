"""What a request's parameters do to its logits before a token is chosen: penalties, bias, masks.

Owns:  the formulas and their order: repetition penalty, then frequency and presence penalties, logit bias, and the
       masks of allowed_token_ids, bad_words and min_new_tokens.
Never: changes the logits it is given (logprobs are read from them); touches rows that ask for nothing.

Repetition penalty r divides positive logits and multiplies negative ones of every token in prompt and output (Keskar et
al. 2019, arXiv:1909.05858). Frequency and presence penalties subtract count * f + p for tokens of the output (OpenAI).
A bad word is a sequence of tokens: where the output ends with all of it but the last, that one is masked (vLLM).
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from replicas.scheduler.plan import SampleRow


class _Entries:
    """Entries (row, token id, value) of a logits matrix, gathered over the rows to be applied in one operation."""

    def __init__(self) -> None:
        self._rows: list[npt.NDArray[np.int64]] = []
        self._ids: list[npt.NDArray[np.int64]] = []
        self._values: list[npt.NDArray[np.float32]] = []

    def add(self, row: int, ids: npt.NDArray[np.int64], values: npt.ArrayLike) -> None:
        self._rows.append(np.full(len(ids), row, dtype=np.int64))
        self._ids.append(ids)
        self._values.append(np.broadcast_to(np.asarray(values, dtype=np.float32), len(ids)))

    def on(self, device: torch.device) -> tuple[tuple[Tensor, Tensor], Tensor] | None:
        """((rows [N], ids [N]), values [N]), or None if there are none."""
        if not self._rows:
            return None
        rows, ids, values = (np.concatenate(parts) for parts in (self._rows, self._ids, self._values))
        where = (torch.from_numpy(rows).to(device), torch.from_numpy(ids).to(device))
        return where, torch.from_numpy(values).to(device)


def needs_edit(row: SampleRow) -> bool:
    """Whether ``edit_logits`` would change anything for ``row``."""
    return row.params.edits_logits or _masks_stops(row)


def _masks_stops(row: SampleRow) -> bool:
    return row.num_output < row.params.min_new_tokens and bool(row.stop_ids)


def edit_logits(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """A copy of ``logits`` [S, V] as the rows' parameters change it.

    A request that the other masks leave no token but its stop ids cannot meet min_new_tokens: its stop ids stay.
    """
    vocab_size = logits.shape[1]
    repetition, additive, masked = _Entries(), _Entries(), _Entries()
    allowed: dict[int, npt.NDArray[np.int64]] = {}  # by row
    for r, row in enumerate(rows):
        params = row.params
        if params.repetition_penalty != 1.0:
            seen = np.zeros(vocab_size, dtype=np.bool_)
            seen[row.prompt_ids] = True
            seen[row.output_ids] = True
            repetition.add(r, np.flatnonzero(seen), params.repetition_penalty)
        if (params.frequency_penalty or params.presence_penalty) and len(row.output_ids):
            ids, counts = np.unique(row.output_ids, return_counts=True)
            additive.add(r, ids.astype(np.int64), -(params.frequency_penalty * counts + params.presence_penalty))
        if params.logit_bias:
            tokens, biases = zip(*params.logit_bias, strict=True)
            additive.add(r, np.array(tokens, dtype=np.int64), biases)
        banned = _bad_ends(row)
        if params.allowed_token_ids is not None:
            allowed[r] = _ids(params.allowed_token_ids)
        if _masks_stops(row):
            stopping = banned | row.stop_ids
            others = params.allowed_token_ids
            if len(stopping) < vocab_size if others is None else any(token not in stopping for token in others):
                banned = stopping
        if banned:
            masked.add(r, np.fromiter(banned, dtype=np.int64), -np.inf)
    edited = logits.clone()
    if (found := repetition.on(logits.device)) is not None:
        where, factors = found
        values = edited[where]
        edited[where] = torch.where(values > 0, values / factors, values * factors)
    if (found := additive.on(logits.device)) is not None:
        edited.index_put_(found[0], found[1], accumulate=True)
    for r, allowed_ids in allowed.items():
        index = torch.from_numpy(allowed_ids).to(logits.device)
        kept = edited[r, index]
        edited[r] = -torch.inf
        edited[r, index] = kept
    if (found := masked.on(logits.device)) is not None:
        edited.index_put_(found[0], found[1])
    return edited


@lru_cache(maxsize=16)
def _ids(token_ids: tuple[int, ...]) -> npt.NDArray[np.int64]:
    return np.array(token_ids, dtype=np.int64)


def _bad_ends(row: SampleRow) -> frozenset[int]:
    """Tokens that would complete a bad word."""
    words = row.params.bad_words
    if not words:
        return frozenset()
    longest = max(map(len, words))
    tail = tuple(row.output_ids[max(len(row.output_ids) - longest + 1, 0) :].tolist())
    return frozenset(word[-1] for word in words if word[:-1] == tail[len(tail) - len(word) + 1 :])
