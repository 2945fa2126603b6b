"""The perplexity of a text, by which narrow numbers are held against float32.

The text is what follows the opening of Lewis Carroll's "Alice's Adventures in Wonderland" (1865, public domain), typed
and not held against an edition.
"""

import math
from itertools import count
from pathlib import Path

import numpy as np

from replicas.engine.engine import Engine
from replicas.types import GenerateRequest, SamplingParams, TokenIds

TEXT = Path(__file__).parents[2] / "benchmarks" / "texts" / "alice.txt"

_numbers = count()


def text_ids(engine: Engine, num_tokens: int = 2000) -> TokenIds:
    """Return the first ``num_tokens`` tokens of the text. Raises: ValueError if it has fewer."""
    ids = engine.tokenizer.encode(TEXT.read_text(encoding="utf-8"))
    if len(ids) < num_tokens:
        raise ValueError(f"{num_tokens} tokens of {TEXT.name} were asked for; it has {len(ids)} in this vocabulary")
    return ids[:num_tokens]


def perplexity(engine: Engine, token_ids: TokenIds) -> float:
    """Return e to the mean negative log-likelihood of tokens 1 and later, each given all before it."""
    request = GenerateRequest(
        rid=f"perplexity-{next(_numbers)}",
        token_ids=token_ids,
        sampling=SamplingParams(max_new_tokens=1, temperature=0.0),
        prompt_logprobs_from=0,
    )
    engine.submit(request)
    logprobs: list[float] = []
    while engine.has_work:
        for delta in engine.step():
            logprobs += [each.logprob for each in delta.prompt_logprobs if each.logprob is not None]
    assert len(logprobs) == len(token_ids) - 1, f"{len(logprobs)} logprobs of {len(token_ids)} tokens"
    return math.exp(-float(np.mean(logprobs)))
