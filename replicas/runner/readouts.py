"""Reads out of a step what a request asks for in place of text: logprobs of labels, and pooled hidden states.

Owns:      the sums over the chunks of prompts that are pooled by their mean: after the last chunk, and before it, since
           a step that failed is run again.
Never:     runs the model; a request that reads nothing out does not come here.
Invariant: the sum of a row begins with the chunk that has no prefix: such a prompt takes nothing from the cache.
Thread:    engine thread of rank 0.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from replicas.scheduler.plan import ExtendPlan
from replicas.types import TokenLogprob


class Readouts:
    """The readouts of one engine."""

    def __init__(self) -> None:
        self._sums: dict[int, dict[int, Tensor]] = {}  # [hidden] fp64, by row of the ReqToTokenPool and by tokens

    def pooled(self, plan: ExtendPlan, hidden: Tensor) -> dict[int, tuple[float, ...]]:
        """Pool ``hidden`` [T, hidden], the states of all tokens of a step. Returns: by index into plan.rows, for the
        prompts that end in it."""
        found, end = {}, 0
        for index, row in enumerate(plan.rows):
            start, end = end, end + len(row.token_ids)
            pooling = None if row.readout is None else row.readout.pooling
            if pooling == "mean":
                total, num_tokens = hidden[start:end].double().sum(dim=0), row.prefix_len + len(row.token_ids)
                before = {row.prefix_len: self._sums[row.row][row.prefix_len]} if row.prefix_len else {}
                total += before.get(row.prefix_len, 0.0)
                self._sums[row.row] = {**before, num_tokens: total}
                if row.sample:
                    found[index] = tuple((total / num_tokens).tolist())
            elif pooling == "last" and row.sample:
                found[index] = tuple(hidden[end - 1].tolist())
        return found

    def told(
        self,
        plan: ExtendPlan,
        logits: Tensor,
        logprobs: Sequence[TokenLogprob | None],
        pooled: dict[int, tuple[float, ...]],
    ) -> tuple[TokenLogprob | None, ...]:
        """Add readouts to the ``logprobs`` [S] of a step's tokens. Args: logits: [S, V], as the sampler's."""
        told = list(logprobs)
        sampled = [index for index, row in enumerate(plan.rows) if row.sample]
        for i, index in enumerate(sampled):
            readout, logprob = plan.rows[index].readout, told[i] if told else None
            if readout is None or logprob is None:
                continue
            ids = torch.tensor(readout.labels, dtype=torch.int64, device=logits.device)
            values = (logits[i, ids] - torch.logsumexp(logits[i], dim=-1)).tolist()
            top = tuple(zip(readout.labels, values, strict=True)) or logprob.top
            told[i] = replace(logprob, top=top, hidden=pooled.get(index, ()))
        return tuple(told)
