"""One engine without HTTP, beside Transformers' forward pass, which runs without the work of its `generate`.

Every comparison alternates its sides in one run, and the machine's limits are measured between them, since absolute
numbers move with other work on the machine. Limits of a decode step: the weights' bytes over the measured memory
bandwidth, or its products at the measured GEMM rate, whichever takes longer (K and V not counted); of a prefill:
products and causal attention at the GEMM rate.
"""

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from operator import eq
from typing import Any
from unittest import mock

import torch
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

from benchmarks import driver, harness
from benchmarks.gpu.random_model import NoText
from benchmarks.harness import Part, Row, Table
from benchmarks.limits import FORMATS, Limits, ModelCost
from replicas import launch
from replicas.config import CacheConfig, ModelConfig, SchedulerConfig
from replicas.engine.engine import Engine
from replicas.launch import EngineSettings, load_engine
from replicas.memory.sizing import STATE_PLACES

POOL_TOKENS = 8_192  # for each of several engines
EXACT, THEIRS = "float32", "Transformers"
VOCAB = 32_768  # the published ones have 248,320: tables that say nothing of the layers
SHAPE = Qwen3_5TextConfig(  # of Qwen3.5-0.8B, but for the number of layers and the vocabulary
    hidden_size=1024, intermediate_size=3584, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2,
    head_dim=256, linear_num_key_heads=16, linear_num_value_heads=16, linear_key_head_dim=128,
    linear_value_head_dim=128, vocab_size=VOCAB, tie_word_embeddings=True, max_position_embeddings=32_768,
)  # fmt: skip
CONTEXT = 32_768  # of the request whose memory is counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much to run."""

    rounds: int = 3
    batches: tuple[int, ...] = (1, 8, 32)
    decode_prompt_len: int = 128
    decode_len: int = 32
    prefill_lens: tuple[int, ...] = (256, 1024)


FULL = Scale()
QUICK = Scale(rounds=1, batches=(1, 8), decode_prompt_len=32, decode_len=8, prefill_lens=(256,))
FAMILY = Scale(rounds=5, decode_prompt_len=32, decode_len=16, prefill_lens=(256, 4096))
QUICK_FAMILY = replace(FAMILY, rounds=1, batches=(1, 8), prefill_lens=(256,))


def measured(options: argparse.Namespace, formats: Sequence[str], *, beside: bool) -> list[Row]:
    """Measure engines with weights in each format; ``beside``: Transformers too."""
    limits, cache = Limits(options.threads), CacheConfig(max_total_tokens=POOL_TOKENS)
    peer = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval() if beside else None
    with ExitStack() as stack:
        engines: dict[str, Engine] = {}
        for name in formats:
            more = FORMATS[name].settings
            settings = EngineSettings(model=options.model, cache=cache, num_threads=options.threads, **more)
            engines[name] = stack.enter_context(closing(load_engine(settings)))
        return rows_of(engines, peer, QUICK if options.quick else FULL, options.seed, limits)


def rows_of(
    engines: Mapping[str, Engine], peer: Any, scale: Scale, seed: int, limits: Limits | None = None
) -> list[Row]:
    """Measure decode and prefill of engines by the format of their weights, and of ``peer``, in turn.

    Args: limits: of the machine, sampled meanwhile; None: they say nothing of this model.
    """
    cells = [(batch, scale.decode_prompt_len) for batch in scale.batches] + [(0, each) for each in scale.prefill_lens]
    vocab_size = engines[EXACT].config.model.vocab_size
    rates: dict[tuple[str, int, int], list[float]] = {}
    made: dict[tuple[str, int, int], list[Any]] = {}

    def run(name: str, num: int, length: int, seed: int) -> tuple[float, Any]:
        prompts = driver.prompts(vocab_size, max(num, 1), length, seed)
        if name == THEIRS:
            first_s, rate, ids = driver.generate(peer, prompts, scale.decode_len if num else 1)
            return (rate, ids) if num else (length / first_s, None)
        engines[name].flush_cache()
        if num:
            return driver.decode(engines[name], prompts, scale.decode_len)
        return length / driver.prefill_s(engines[name], prompts[0]), None

    ways = (*engines, *([THEIRS] if peer is not None else []))
    for name in ways:
        run(name, *cells[0], seed - 1)  # warms up
    for round_, name in harness.in_turn(ways, scale.rounds):
        if limits is not None:
            limits.sample()
        for cell in cells:
            rate, ids = run(name, *cell, seed + round_)
            rates.setdefault((name, *cell), []).append(rate)
            made.setdefault((name, *cell), []).append(ids)
    rows = limits.rows() if limits is not None else []
    for num, length in cells:
        table = Table(f"decode, {num} requests of {length} tokens" if num else f"prompt of {length} tokens")
        for name in ways:
            more: dict[str, Any] = {}
            if limits is not None and (name in (EXACT, THEIRS) or num == 1):
                of = name if name in engines else EXACT
                limit, target = _limit(limits, ModelCost.of(engines[of].config.model, of), num, length)
                more = {"limit": limit, "target": target if name == EXACT else None}
            if name == THEIRS and num:
                same = map(eq, made[THEIRS, num, length], made[EXACT, num, length])
                more["note"] = f"{sum(same)} of {scale.rounds} runs with {EXACT}'s ids"
            table.add(name, rates[name, num, length], "tok/s", **more)
            if name == EXACT:
                continue
            over, under = (name, EXACT) if name != THEIRS else (EXACT, name)
            pairs = zip(rates[over, num, length], rates[under, num, length], strict=True)
            least = FORMATS[name].least if name != THEIRS and num == 1 else 1.0
            table.add(f"{over} / {under}", [one / other for one, other in pairs], "x", target=f">= {least:g} x")
        rows += table.rows
    return rows


def _limit(limits: Limits, cost: ModelCost, num: int, length: int) -> tuple[float, str | None]:
    """Return what the machine allows a decode step of ``num`` requests, or a prefill, and the share that is asked."""
    if num:
        limit_s = cost.decode_limit_s(num, limits.median_bandwidth, limits.median_flops)
        return num / limit_s, ">= 80% of the limit" if num == 1 else None
    return length * limits.median_flops / cost.prefill_flops(length), ">= 70% of the limit"


def family_rows(options: argparse.Namespace) -> list[Row]:
    """Measure a model of today's shape, with random weights, beside Transformers, and count the memory of a request."""
    torch.manual_seed(options.seed)
    scale = QUICK_FAMILY if options.quick else replace(FAMILY, rounds=harness.rounds_of(options, FAMILY.rounds))
    with tempfile.TemporaryDirectory() as folder:
        peer: Any = AutoModelForCausalLM.from_config(SHAPE, dtype=torch.float32).eval()
        peer.save_pretrained(folder)
        settings = EngineSettings(
            model=folder, cache=CacheConfig(max_total_tokens=3 * 4096), num_threads=options.threads,
            scheduler=SchedulerConfig(max_running_requests=max(scale.batches)),
        )  # fmt: skip
        with mock.patch.object(launch, "Tokenizer", return_value=NoText(VOCAB)):
            engine = load_engine(settings)
    with closing(engine):
        return rows_of({EXACT: engine}, peer, scale, options.seed) + _memory_rows(engine.config.model)


def _memory_rows(model: ModelConfig) -> list[Row]:
    """Count what one request takes at CONTEXT tokens, and what it would with K and V in every layer."""
    table = Table(f"memory of a request of {CONTEXT:,} tokens")
    cell_bytes = model.kv_cell_bytes(tp=1, kv_dtype="float32")
    ours = cell_bytes * CONTEXT + STATE_PLACES * model.state_bytes("cpu")
    full = cell_bytes * CONTEXT * SHAPE.num_hidden_layers / model.num_layers
    table.add("K, V and states", [ours / 2**20], "MiB", share=ours / full)
    table.add("K and V in all layers", [full / 2**20], "MiB")
    return table.rows


PARTS = {
    "speed": Part(
        about="decode and prefill, beside Transformers", measure=partial(measured, formats=(EXACT,), beside=True)
    ),
    "formats": Part(
        about="decode and prefill by the format of weights, beside float32",
        measure=partial(measured, formats=tuple(FORMATS), beside=False),
    ),
    "families": Part(about="a recurrent model of Qwen3.5's shape, beside Transformers", measure=family_rows),
}


def main(argv: Sequence[str] | None = None) -> None:
    harness.run("engine", __doc__, PARTS, argv)
