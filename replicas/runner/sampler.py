"""Logits to tokens: which rows are edited, which are greedy, which draw, and whose logprobs are wanted.

Owns:      the order: penalties, bias and masks (logit_edits.py); then the largest logit for greedy rows, and
           temperature, top-k, top-p, min-p and the draw for the others (draw.py). Logprobs are of the model's logits.
Never:     keeps state between steps; looks at more of a request than its SampleRow.
Invariant: a row's token is a function of that row alone; the batch, its order and its size do not enter.
Thread:    engine thread of rank 0.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from replicas.kernels.argmax import argmax
from replicas.runner.device_draw import sample_on_device
from replicas.runner.draw import draw
from replicas.runner.logit_edits import edit_logits, needs_edit
from replicas.runner.logprobs import token_logprobs
from replicas.scheduler.plan import BROKEN, SampleRow
from replicas.types import TokenIds, TokenLogprob


class Sampler:
    """Chooses the next token of each row; one per engine, on rank 0."""

    def __init__(self, vocab_size: int, device: torch.device | str) -> None:
        self.vocab_size = vocab_size
        self.device = torch.device(device)

    def warm_up(self, logits: Tensor) -> None:
        """Compile what the first greedy request would otherwise wait for."""
        argmax(logits)

    def sample(self, logits: Tensor, rows: Sequence[SampleRow]) -> tuple[TokenIds, tuple[TokenLogprob | None, ...]]:
        """One token for each row, and its logprob where asked for.

        Args:    logits: [S, V] float32; not changed.
        Returns: token ids [S], BROKEN for a row whose logits hold NaN or inf or are all masked out: one request's
                 overflow must not end the others. logprobs [S] with None for rows that did not ask (or are broken), or
                 () when no row asked. Greedy ties go to the lowest id.
        """
        self._check_shape(logits, len(rows))
        if not rows:
            return np.empty(0, dtype=np.int32), ()
        edited = edit_logits(logits, rows) if any(needs_edit(row) for row in rows) else logits
        best = argmax(edited)[:, None]  # [S, 1]; the first of equals, and a NaN before any number
        peaks = edited.gather(1, best)[:, 0].double().cpu().numpy()  # [S]
        sound = np.isfinite(peaks)
        token_ids = np.where(sound, best[:, 0].cpu().numpy(), BROKEN).astype(np.int32)
        drawn = [i for i, row in enumerate(rows) if sound[i] and not row.params.greedy]
        if drawn:
            chosen = edited if len(drawn) == len(rows) else edited[torch.tensor(drawn, device=edited.device)]
            token_ids[drawn] = draw(chosen, peaks[drawn], [rows[i] for i in drawn])
        return token_ids, self._logprobs(logits, token_ids, rows)

    def sample_on_device(self, logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
        """`sample` without logprobs, by the device: tokens [S] int64, for which nothing has waited."""
        self._check_shape(logits, len(rows))
        if not rows:
            return torch.empty(0, dtype=torch.int64, device=logits.device)
        edited = edit_logits(logits, rows) if any(needs_edit(row) for row in rows) else logits
        return sample_on_device(edited, rows)

    def prompt_logprobs(self, logits: Tensor, target_ids: TokenIds, top_n: int = 0) -> tuple[TokenLogprob, ...]:
        """Logprobs and ranks of prompt tokens, with the ``top_n`` most likely alternatives.

        Args:    logits: [E, V]; row e was computed from the tokens before target e.
                 target_ids: [E] the prompt's own tokens at those positions. Position 0 has no context, hence no row.
        """
        self._check_shape(logits, len(target_ids))
        return tuple(token_logprobs(logits, target_ids, [top_n] * len(target_ids), ranked=True))

    def _logprobs(
        self, logits: Tensor, token_ids: TokenIds, rows: Sequence[SampleRow]
    ) -> tuple[TokenLogprob | None, ...]:
        if not any(row.return_logprobs for row in rows):
            return ()
        asked = [i for i, row in enumerate(rows) if row.return_logprobs and token_ids[i] != BROKEN]
        chosen = logits if len(asked) == len(rows) else logits[torch.tensor(asked, device=logits.device)]
        found: list[TokenLogprob | None] = [None] * len(rows)
        made = token_logprobs(chosen, token_ids[asked], [rows[i].top_logprobs for i in asked])
        for i, logprob in zip(asked, made, strict=True):
            found[i] = logprob
        return tuple(found)

    def _check_shape(self, logits: Tensor, num_rows: int) -> None:
        assert logits.shape == (num_rows, self.vocab_size), (
            f"logits are {tuple(logits.shape)}, wanted ({num_rows}, {self.vocab_size}): rows x vocabulary"
        )

