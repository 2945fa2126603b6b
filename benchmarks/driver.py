"""Drives an engine without HTTP, and times its steps; Transformers beside it.

Owns:      how an offline run is timed: what counts as a decode step, where a prefill ends.
Never:     starts a thread: the caller's thread steps the engine.
"""

import time
from collections.abc import Sequence
from itertools import count
from typing import Any

import numpy as np
import torch

from benchmarks.workloads import random_lengths
from replicas.engine.engine import Engine
from replicas.engine.ranks import Ranks
from replicas.runner.model_runner import ModelRunner
from replicas.types import GenerateRequest, SamplingParams

_numbers = count()


def request(token_ids: Sequence[int], max_new_tokens: int) -> GenerateRequest:
    """Return a greedy request that makes exactly ``max_new_tokens`` tokens."""
    return GenerateRequest(
        rid=f"bench-{next(_numbers)}",
        token_ids=np.array(token_ids, dtype=np.int32),
        sampling=SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0, ignore_eos=True),
    )


def prompts(vocab_size: int, num: int, length: int, seed: int) -> list[tuple[int, ...]]:
    """Return ``num`` unrelated prompts of ``length`` tokens."""
    workload = random_lengths(num_requests=num, input_len=length, output_len=1, vocab_size=vocab_size, seed=seed)
    return [conversation.turns[0].token_ids for conversation in workload.conversations]


def prefill_s(engine: Engine, token_ids: Sequence[int]) -> float:
    """Return the seconds from submitting an uncached prompt to its first token."""
    engine.submit(request(token_ids, 1))
    started_s = time.perf_counter()
    while engine.has_work:
        engine.step()
    return time.perf_counter() - started_s


Ids = tuple[tuple[int, ...], ...]  # [B] each request's output


def decode(engine: Engine, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> tuple[float, Ids]:
    """Generate for all prompts at once. Returns: tokens a second, of the steps in which every request got one after its
    first; and the ids."""
    outputs: dict[str, list[int]] = {}
    for asked in [request(prompt, max_new_tokens) for prompt in prompts]:
        engine.submit(asked)
        outputs[asked.rid] = []
    times: list[float] = []
    while engine.has_work:
        all_decode = all(outputs.values())
        started_s = time.perf_counter()
        deltas = engine.step()
        step_s = time.perf_counter() - started_s
        if all_decode and len(deltas) == len(outputs):
            times.append(step_s)
        for delta in deltas:
            outputs[delta.rid] += delta.token_ids
    return len(outputs) * len(times) / sum(times), tuple(map(tuple, outputs.values()))


@torch.inference_mode()
def generate(model: Any, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> tuple[float, float, Ids]:
    """Generate with a causal model of Transformers: its forward pass alone, without the work of its `generate` between
    tokens. Returns: the seconds to the first tokens, the tokens a second after them, the ids."""
    started_s = time.perf_counter()
    out = model(torch.tensor(prompts), use_cache=True, logits_to_keep=1)
    tokens = [out.logits[:, -1].argmax(dim=-1)]
    first_s = time.perf_counter()
    while len(tokens) < max_new_tokens:
        out = model(tokens[-1][:, None], past_key_values=out.past_key_values, use_cache=True)
        tokens.append(out.logits[:, -1].argmax(dim=-1))
    rate = len(prompts) * (max_new_tokens - 1) / (time.perf_counter() - first_s)
    return first_s - started_s, rate, tuple(map(tuple, torch.stack(tokens, dim=1).tolist()))


def runner_of(engine: Engine) -> ModelRunner:
    """Return what runs rank 0's steps: the engine itself knows only how to launch a plan."""
    ranks = getattr(engine.steps.launch, "__self__", None)
    assert isinstance(ranks, Ranks), "this engine was not built by load_engine; its steps cannot be taken apart"
    return ranks.runner
