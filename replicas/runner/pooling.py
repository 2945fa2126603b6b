"""Reads out of a step what a request asks for in place of text: logprobs of labels, and pooled hidden states.

Owns:      the sums over the chunks of prompts that are pooled by their mean: after the last chunk, and before it, since
           a step that failed is run again.
Never:     runs the model; a request that reads nothing out does not come here.
Invariant: the sum of a row begins with the chunk that has no prefix: such a prompt takes nothing from the cache.
Thread:    engine thread of rank 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from replicas.attention.page_lists import to_device
from replicas.scheduler.plan import ExtendPlan
from replicas.types import TokenLogprob


class Pooler:
    """The sums of prompts that one engine pools."""

    def __init__(self) -> None:
        self._sums: dict[int, dict[int, Tensor]] = {}  # [hidden] fp64, by row of the ReqToTokenPool and by tokens

    def pooled(self, plan: ExtendPlan, hidden: Tensor) -> dict[int, Tensor]:
        """Pool ``hidden`` [T, hidden], the states of all tokens of a step. Returns: [hidden] of the prompts that end in
        it, by index into plan.rows."""
        found, end = {}, 0
        for index, row in enumerate(plan.rows):
            start, end = end, end + len(row.token_ids)
            method = None if row.pooling is None else row.pooling.method
            if method == "mean":
                total, num_tokens = hidden[start:end].double().sum(dim=0), row.prefix_len + len(row.token_ids)
                before = {row.prefix_len: self._sums[row.row][row.prefix_len]} if row.prefix_len else {}
                total += before.get(row.prefix_len, 0.0)
                self._sums[row.row] = {**before, num_tokens: total}
                if row.sample:
                    found[index] = total / num_tokens
            elif method == "last" and row.sample:
                found[index] = hidden[end - 1]
        return found

    def read(self, plan: ExtendPlan, hidden: Tensor | None, logits: Tensor) -> "StepPooling":
        """Read out what the rows of a step ask for, without waiting for its device. Args: hidden: [T, hidden], if any
        row pools them; logits: [S, V], as the sampler's."""
        pooled = {} if hidden is None else self.pooled(plan, hidden)
        made = StepPooling()
        for place, index in enumerate(index for index, row in enumerate(plan.rows) if row.sample):
            if (pooling := plan.rows[index].pooling) is not None:
                ids = to_device(np.array(pooling.labels, np.int64), logits.device)
                made.rows.append((place, pooling.labels))
                made.tensors.append(logits[place, ids] - torch.logsumexp(logits[place], dim=-1))
                made.tensors.append(pooled.get(index, logits[0, :0]))
        return made


@dataclass(frozen=True, slots=True)
class StepPooling:
    """What the rows of a step read out, on its device."""

    rows: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)  # their places in the sampling; their labels
    tensors: list[Tensor] = field(default_factory=list)  # two a row: logprobs of its labels; [hidden], or [0] for none

    def told(
        self, logprobs: Sequence[TokenLogprob | None], fetched: Sequence[Tensor]
    ) -> tuple[TokenLogprob | None, ...]:
        """Add them to the ``logprobs`` [S] of a step's tokens. Args: fetched: ``tensors``, on the host."""
        told = list(logprobs)
        for (place, labels), values, hidden in zip(self.rows, fetched[::2], fetched[1::2], strict=True):
            logprob = told[place] if told else None
            if logprob is not None:
                top = tuple(zip(labels, values.tolist(), strict=True)) or logprob.top
                told[place] = replace(logprob, top=top, hidden=tuple(hidden.tolist()))
        return tuple(told)
