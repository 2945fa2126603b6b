"""Transformers' `generate` at batch 1 in this process: the yardstick that everybody has."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging


class _Stamps:
    """A streamer that notes when each token came."""

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times_s.append(time.perf_counter())

    def end(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Generated:
    """One call of `generate`."""

    prefill_s: float  # from the call to the first token
    decode_s: float  # from the first token to the last
    token_ids: tuple[int, ...]

    @property
    def tokens_per_s(self) -> float:
        return (len(self.token_ids) - 1) / self.decode_s


class TransformersPeer:
    """The model in fp32 with Transformers' default attention (SDPA) on CPU."""

    def __init__(self, model_path: str) -> None:
        logging.disable_progress_bar()
        self._model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        self._model.eval()

    def generate(self, token_ids: Sequence[int], max_new_tokens: int) -> Generated:
        """Greedy; exactly ``max_new_tokens`` tokens."""
        prompt = torch.tensor([list(token_ids)])
        stamps = _Stamps()
        with torch.inference_mode():
            started_s = time.perf_counter()
            out = self._model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                streamer=stamps,
            )
        first_s, last_s = stamps.times_s[1], stamps.times_s[-1]  # the first stamp is the prompt's
        return Generated(
            prefill_s=first_s - started_s,
            decode_s=last_s - first_s,
            token_ids=tuple(out[0, prompt.shape[1] :].tolist()),
        )
