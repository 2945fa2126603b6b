"""A family of today on a CPU beside Transformers: Qwen3.5's shape, three layers of four with a recurrent state.

The weights are random, so no checkpoint is read. Transformers runs its forward pass alone, without `generate`'s work
between tokens; both run in this process with the same threads, in turn.
"""

import argparse
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from typing import Any
from unittest import mock

import torch
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

from benchmarks import driver, harness
from benchmarks.gpu.random_model import NoText
from benchmarks.harness import Row, Table
from replicas import launch
from replicas.config import CacheConfig, ModelConfig, SchedulerConfig
from replicas.engine.engine import Engine
from replicas.memory.sizing import STATE_PLACES

VOCAB = 32_768  # the published ones have 248,320: tables that say nothing of the layers
SHAPE = Qwen3_5TextConfig(  # of Qwen3.5-0.8B, but for the number of layers and the vocabulary
    hidden_size=1024, intermediate_size=3584, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2,
    head_dim=256, linear_num_key_heads=16, linear_num_value_heads=16, linear_key_head_dim=128,
    linear_value_head_dim=128, vocab_size=VOCAB, tie_word_embeddings=True, max_position_embeddings=32_768,
)  # fmt: skip
CONTEXT, PROMPT_LEN, STEPS = 32_768, 32, 16
CELLS = ((1, PROMPT_LEN), (8, PROMPT_LEN), (32, PROMPT_LEN), (0, 256), (0, 4096))  # requests that decode (0: none)


def family_rows(options: argparse.Namespace) -> list[Row]:
    """Measure decode and prefill beside Transformers, and count the memory of a request."""
    cells = CELLS[:2] + CELLS[3:4] if options.quick else CELLS
    torch.manual_seed(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        peer: Any = AutoModelForCausalLM.from_config(SHAPE, dtype=torch.float32).eval()
        peer.save_pretrained(folder)
        settings = launch.EngineSettings(
            model=folder, cache=CacheConfig(max_total_tokens=3 * 4096), num_threads=options.threads,
            scheduler=SchedulerConfig(max_running_requests=max(batch for batch, _ in CELLS)),
        )  # fmt: skip
        with mock.patch.object(launch, "Tokenizer", return_value=NoText(VOCAB)):
            engine = launch.load_engine(settings)
    with closing(engine):
        rows = [row for cell in cells for row in _cell_rows(engine, peer, *cell, options)]
        return rows + _memory_rows(engine.config.model)


def _cell_rows(engine: Engine, peer: Any, batch: int, length: int, options: argparse.Namespace) -> list[Row]:
    table = Table(f"decode, {batch} requests of {length} tokens" if batch else f"prompt of {length} tokens")
    rates: dict[str, list[float]] = {"Manta": [], "Transformers": []}
    rounds, equal = harness.rounds_of(options, 5), 0
    for round_ in range(-1, rounds):  # the first warms up
        prompts, made = driver.prompts(engine, max(batch, 1), length, options.seed + round_ + 1), dict[str, Any]()
        for _, name in harness.in_turn(rates if round_ % 2 else reversed(rates), 1):
            if name == "Manta":
                engine.flush_cache()
                rate, made[name] = _ours(engine, prompts, batch)
            else:
                rate, made[name] = _theirs(peer, prompts, batch)
            rates[name] += [rate] if round_ >= 0 else []
        equal += round_ >= 0 and made["Manta"] == made["Transformers"]
    table.add("Transformers", rates["Transformers"], "tok/s")
    note = f"{equal} of {rounds} runs with Transformers' ids" if batch else ""
    table.add("Manta", rates["Manta"], "tok/s", note=note)
    ratios = [ours / theirs for ours, theirs in zip(rates["Manta"], rates["Transformers"], strict=True)]
    table.add("Manta / Transformers", ratios, "x", target=">= 1 x")
    return table.rows


def _ours(engine: Engine, prompts: Sequence[tuple[int, ...]], batch: int) -> tuple[float, Any]:
    if not batch:
        return len(prompts[0]) / driver.prefill_s(engine, prompts[0]), None
    decoded = driver.decode(engine, prompts, STEPS)
    return decoded.tokens_per_s, decoded.token_ids


@torch.inference_mode()
def _theirs(peer: Any, prompts: Sequence[tuple[int, ...]], batch: int) -> tuple[float, Any]:
    started_s = time.perf_counter()
    out = peer(torch.tensor(prompts), use_cache=True, logits_to_keep=1)
    tokens = [out.logits[:, -1].argmax(dim=-1)]
    first_s = time.perf_counter()
    if not batch:
        return len(prompts[0]) / (first_s - started_s), None
    while len(tokens) < STEPS:
        out = peer(tokens[-1][:, None], past_key_values=out.past_key_values, use_cache=True)
        tokens.append(out.logits[:, -1].argmax(dim=-1))
    rate = batch * (STEPS - 1) / (time.perf_counter() - first_s)
    return rate, tuple(map(tuple, torch.stack(tokens, dim=1).tolist()))


def _memory_rows(model: ModelConfig) -> list[Row]:
    """Count what one request takes at CONTEXT tokens, and what it would with K and V in every layer."""
    table = Table(f"memory of a request of {CONTEXT:,} tokens")
    cell_bytes = model.kv_cell_bytes(tp=1, kv_dtype="float32")
    ours = cell_bytes * CONTEXT + STATE_PLACES * model.state_bytes("cpu")
    full = cell_bytes * CONTEXT * SHAPE.num_hidden_layers / model.num_layers
    table.add("K, V and states", [ours / 2**20], "MiB", share=ours / full)
    table.add("K and V in all layers", [full / 2**20], "MiB")
    return table.rows
