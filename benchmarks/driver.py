"""Drives an engine without HTTP, and times its steps; Transformers' `generate` beside it.

Owns:      how an offline run is timed: what counts as a decode step, where a prefill ends.
Never:     starts a thread: the caller's thread steps the engine.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch

from benchmarks.workloads import random_lengths
from replicas.engine.engine import Engine
from replicas.engine.ranks import Ranks
from replicas.runner.model_runner import ModelRunner
from replicas.types import GenerateRequest, SamplingParams, TokenDelta

_numbers = count()


def request(token_ids: Sequence[int], max_new_tokens: int) -> GenerateRequest:
    """Return a greedy request that makes exactly ``max_new_tokens`` tokens."""
    return GenerateRequest(
        rid=f"bench-{next(_numbers)}",
        token_ids=np.array(token_ids, dtype=np.int32),
        sampling=SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0, ignore_eos=True),
    )


def prompts(engine: Engine, num: int, length: int, seed: int) -> list[tuple[int, ...]]:
    """Return ``num`` unrelated prompts of ``length`` tokens in the engine's vocabulary."""
    vocab_size = engine.config.model.vocab_size
    workload = random_lengths(num_requests=num, input_len=length, output_len=1, vocab_size=vocab_size, seed=seed)
    return [conversation.turns[0].token_ids for conversation in workload.conversations]


def prefill_s(engine: Engine, token_ids: Sequence[int]) -> float:
    """Return the seconds from submitting an uncached prompt to its first token."""
    engine.submit(request(token_ids, 1))
    started_s = time.perf_counter()
    while engine.has_work:
        engine.step()
    return time.perf_counter() - started_s


@dataclass(frozen=True, slots=True)
class Decoded:
    """The decode steps of one batch, and what they made."""

    step_s: tuple[float, ...]  # of steps in which every request of the batch got a token
    batch: int
    token_ids: tuple[tuple[int, ...], ...]  # [B] each request's output

    @property
    def tokens_per_s(self) -> float:
        return self.batch * len(self.step_s) / sum(self.step_s)


def decode(engine: Engine, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> Decoded:
    """Generate for all prompts at once; only steps after every request's first token count."""
    outputs = _submitted(engine, prompts, max_new_tokens)
    times: list[float] = []
    while engine.has_work:
        all_decode = all(outputs.values())
        started_s = time.perf_counter()
        deltas = engine.step()
        step_s = time.perf_counter() - started_s
        if all_decode and len(deltas) == len(outputs):
            times.append(step_s)
        _collect(outputs, deltas)
    return Decoded(tuple(times), len(outputs), tuple(map(tuple, outputs.values())))


def _submitted(engine: Engine, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> dict[str, list[int]]:
    requests = [request(prompt, max_new_tokens) for prompt in prompts]
    for each in requests:
        engine.submit(each)
    return {each.rid: [] for each in requests}


def _collect(outputs: dict[str, list[int]], deltas: Sequence[TokenDelta]) -> None:
    for delta in deltas:
        outputs[delta.rid] += delta.token_ids


def runner_of(engine: Engine) -> ModelRunner:
    """Return what runs rank 0's steps: the engine itself knows only how to launch a plan."""
    ranks = getattr(engine.steps.launch, "__self__", None)
    assert isinstance(ranks, Ranks), "this engine was not built by load_engine; its steps cannot be taken apart"
    return ranks.runner


@dataclass(frozen=True, slots=True)
class Generated:
    """One call of Transformers' `generate`."""

    prefill_s: float  # from the call to the first token
    decode_s: float  # from the first token to the last
    token_ids: tuple[int, ...]

    @property
    def tokens_per_s(self) -> float:
        return (len(self.token_ids) - 1) / self.decode_s


class TransformersPeer:
    """The model in fp32 with Transformers' default attention (SDPA) on a CPU, at batch 1, in this process."""

    def __init__(self, model_path: str) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        self._model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()

    def put(self, value: torch.Tensor) -> None:
        """Note when a token came: Transformers calls its streamer so."""
        self._times_s.append(time.perf_counter())

    def end(self) -> None:
        pass

    def generate(self, token_ids: Sequence[int], max_new_tokens: int) -> Generated:
        """Generate exactly ``max_new_tokens`` tokens, greedily."""
        prompt, self._times_s = torch.tensor([list(token_ids)]), list[float]()
        with torch.inference_mode():
            started_s = time.perf_counter()
            out = self._model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=max_new_tokens, do_sample=False,
                eos_token_id=None, pad_token_id=0, streamer=self,
            )  # fmt: skip
        _, first_s, *_ = self._times_s  # the first is the prompt's
        made = tuple(out[0, prompt.shape[1] :].tolist())
        return Generated(prefill_s=first_s - started_s, decode_s=self._times_s[-1] - first_s, token_ids=made)
