"""What narrow numbers cost in accuracy: the perplexity of a text, and how long greedy answers agree with fp32.

Owns:      the text: after the opening of Lewis Carroll's "Alice's Adventures in Wonderland" (1865, public domain),
           typed and not held against an edition.
Never:     starts a thread: the caller's thread steps the engine.

After the token where two answers first differ they are different texts, so that later tokens differ by nature.
"""

import argparse
import math
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import driver
from benchmarks.harness import Row, Table
from replicas.calibrate import heavy_channels
from replicas.config import CacheConfig, KvDType
from replicas.engine.engine import Engine
from replicas.launch import EngineSettings, load_engine
from replicas.memory.sparse_pool import write_channels
from replicas.runner.model_files import load_model_config
from replicas.types import GenerateRequest, SamplingParams, TokenIds

CALIBRATION = Path(__file__).parent.parent / "docs" / "architecture.md"  # finds channels for `TEXT`
TEXT = Path(__file__).with_name("texts") / "alice.txt"
NUM_TOKENS = 2000
KV_DTYPES: tuple[KvDType, ...] = ("float32", "bfloat16", "int8", "fp8", "fp8_e5m2")

_numbers = count()


def text_ids(engine: Engine, num_tokens: int = NUM_TOKENS) -> TokenIds:
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


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far two engines' greedy answers to the same prompts agree."""

    equal_share: float  # of all tokens
    first_differences: tuple[int, ...]  # of each answer the first token that differs; its length where none does

    @classmethod
    def of(cls, ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> "Agreement":
        equal = [[a == b for a, b in zip(x, y, strict=True)] for x, y in zip(ours, theirs, strict=True)]
        firsts = tuple(row.index(False) if False in row else len(row) for row in equal)
        return cls(sum(map(sum, equal)) / sum(map(len, equal)), firsts)


def _answers(options: argparse.Namespace, num: int, length: int, **engine_options: Any) -> tuple[float, Any]:
    """Return the perplexity of an engine, and its answers of 64 tokens to ``num`` pieces of the text."""
    num, num_tokens = (2, 500) if options.quick else (num, NUM_TOKENS)
    engine = load_engine(EngineSettings(model=options.model, num_threads=options.threads, **engine_options))
    try:
        ids = text_ids(engine, num_tokens)
        step = (len(ids) - length) // num
        prompts = [ids[i * step : i * step + length].tolist() for i in range(num)]
        return perplexity(engine, ids), [driver.decode(engine, [prompt], 64).token_ids[0] for prompt in prompts]
    finally:
        engine.close()


def int8_rows(options: argparse.Namespace) -> list[Row]:
    """Measure what int8 weights cost against fp32."""
    num, cache = 16, CacheConfig(max_total_tokens=8192)
    exact, exact_answers = _answers(options, num, 96, cache=cache)
    rounded, rounded_answers = _answers(options, num, 96, cache=cache, quantization="int8")
    agreement = Agreement.of(rounded_answers, exact_answers)
    table = Table(f"int8 weights against fp32, {len(exact_answers)} x 64 greedy tokens")
    table.add("perplexity, fp32", [exact])
    table.add("perplexity, int8", [rounded], target="within 1 %", note=f"{rounded / exact - 1:+.2%}")
    table.add("equal greedy tokens", [100 * agreement.equal_share], "%")
    table.add("first difference, mean", [statistics.mean(agreement.first_differences)], "tokens")
    return table.rows


def double_sparse_rows(options: argparse.Namespace) -> list[Row]:
    """Measure what attention to few tokens costs, by how many; channels are found on another text than is measured."""
    num_tokens, table = 500 if options.quick else NUM_TOKENS, Table("perplexity with attention: double_sparse")
    with tempfile.TemporaryDirectory() as folder:
        exact = _perplexity_of(options, num_tokens, attention="torch_native", cache=CacheConfig(max_total_tokens=4096))
        table.add("every token", [exact])
        model, text = load_model_config(options.model, device="cpu"), CALIBRATION.read_text(encoding="utf-8")
        for num_channels in (8, 16, 32):
            path = Path(folder) / f"{num_channels}.json"
            write_channels(path, heavy_channels(options.model, text, num_channels=num_channels), model)
            for tokens in (64, 128, 256, 512):
                cache = CacheConfig(max_total_tokens=4096, label_channels=str(path), sparse_tokens=tokens)
                found = _perplexity_of(options, num_tokens, attention="double_sparse", cache=cache)
                note = f"{100 * (found / exact - 1):+.2f} %"
                table.add(f"{tokens} tokens, {num_channels} channels of {model.head_dim}", [found], note=note)
    return table.rows


def _perplexity_of(options: argparse.Namespace, num_tokens: int, **engine_options: Any) -> float:
    engine = load_engine(EngineSettings(model=options.model, num_threads=options.threads, **engine_options))
    try:
        return perplexity(engine, text_ids(engine, num_tokens))
    finally:
        engine.close()


def kv_dtype_rows(options: argparse.Namespace) -> list[Row]:
    """Measure what each `cache.kv_dtype` costs against a float32 pool; the kernels' rows have its speed."""
    table = Table("perplexity and greedy answers by cache.kv_dtype")
    exact: float = 0.0
    wanted: Sequence[Sequence[int]] = ()
    for kv_dtype in KV_DTYPES:
        cache = CacheConfig(kv_dtype=kv_dtype, max_total_tokens=8192)
        found, answers = _answers(options, 8, 200, cache=cache, context_len=2048)
        exact, wanted = exact or found, wanted or answers
        table.add(f"{kv_dtype}: perplexity", [found], note=f"{100 * (found / exact - 1):+.3f} %")
        agreed = Agreement.of(answers, wanted).first_differences
        table.add(f"{kv_dtype}: tokens of 64 before the first that differs", agreed, "tokens")
    return table.rows
