"""Engine throughput without HTTP, beside Transformers' `generate`: `python -m benchmarks.offline`.

Every comparison alternates its sides in one run, and the machine's limits are measured between them, since absolute
numbers move with whatever else runs. Limits of a decode step: the weights' bytes over the measured memory bandwidth,
or its products at the measured GEMM rate, whichever takes longer (K and V not counted); of a prefill: products and
causal attention at the GEMM rate.
"""

import argparse
import os
from collections.abc import Callable, Sequence
from typing import Literal

from benchmarks import driver
from benchmarks.cost import ModelCost
from benchmarks.limits import Limits
from benchmarks.prefix import shared_rows, unique_rows
from benchmarks.report import Row, publish
from benchmarks.scale import FULL, QUICK, Scale
from benchmarks.transformers_peer import TransformersPeer
from benchmarks.workloads import random_lengths
from replicas.config import CacheConfig
from replicas.engine.engine import Engine
from replicas.launch import load_engine

MODEL = "models/SmolLM2-135M-Instruct"
POOL_TOKENS = 32_768


def measure(model_path: str, *, num_threads: int, scale: Scale, seed: int = 0) -> list[Row]:
    """All tables; the limits first."""
    radix = load_engine(model_path, cache=_cache("radix"), num_threads=num_threads)
    limits = Limits(num_threads)
    try:
        peer = TransformersPeer(model_path)
        rows = decode_rows(radix, peer, limits, scale, seed)
        rows += prefill_rows(radix, peer, limits, scale, seed)
        del peer
        rows += step_rows(radix, scale, seed)
        chunk = load_engine(model_path, cache=_cache("chunk"), num_threads=num_threads)
        try:
            rows += unique_rows(radix, chunk, scale, seed)
            rows += shared_rows(radix, chunk, scale, seed)
        finally:
            chunk.close()
    finally:
        radix.close()
    return limits.rows() + rows


def decode_rows(engine: Engine, peer: TransformersPeer, limits: Limits, scale: Scale, seed: int) -> list[Row]:
    """Decode tokens/s by batch size; Transformers at batch 1, alternated with ours."""
    ours: dict[int, list[float]] = {batch: [] for batch in scale.batches}
    theirs: list[float] = []
    equal = 0
    for round_ in range(scale.rounds):
        limits.sample()
        for batch in scale.batches:
            prompts = _prompts(engine, batch, scale.decode_prompt_len, seed + round_)
            decoded = driver.decode(engine, prompts, scale.decode_len)
            ours[batch].append(decoded.tokens_per_s)
            if batch == 1:
                generated = peer.generate(prompts[0], scale.decode_len)
                theirs.append(generated.tokens_per_s)
                equal += decoded.token_ids[0] == generated.token_ids
    section = f"decode, context {scale.decode_prompt_len}, fp32"
    cost = ModelCost.of(engine.config.model)
    rows = []
    for batch, values in ours.items():
        limit = batch / cost.decode_limit_s(batch, limits.median_bandwidth, limits.median_flops)
        target = ">= 75% of the limit" if batch == 1 else None
        note = f"{equal} of {scale.rounds} runs equal to Transformers' ids" if batch == 1 else ""
        rows.append(Row.of(section, f"batch {batch}", values, "tok/s", limit=limit, target=target, note=note))
    limit = 1 / cost.decode_limit_s(1, limits.median_bandwidth, limits.median_flops)
    rows.append(Row.of(section, "Transformers generate, batch 1", theirs, "tok/s", limit=limit))
    return rows


def prefill_rows(engine: Engine, peer: TransformersPeer, limits: Limits, scale: Scale, seed: int) -> list[Row]:
    """Prefill tokens/s of one uncached prompt; Transformers alternated with ours."""
    cost = ModelCost.of(engine.config.model)
    ours: dict[int, list[float]] = {length: [] for length in scale.prefill_lens}
    theirs: dict[int, list[float]] = {length: [] for length in scale.prefill_lens}
    for round_ in range(scale.rounds):
        limits.sample()
        for length in scale.prefill_lens:
            engine.flush_cache()
            (prompt,) = _prompts(engine, 1, length, seed + round_)
            ours[length].append(length / driver.prefill_s(engine, prompt))
            theirs[length].append(length / peer.generate(prompt, 2).prefill_s)
    rows = []
    for length in scale.prefill_lens:
        limit = length * limits.median_flops / cost.prefill_flops(length)
        name = f"{length} tokens"
        rows.append(Row.of("prefill, fp32", name, ours[length], "tok/s", limit=limit, target=">= 70% of the limit"))
        rows.append(Row.of("prefill, fp32", f"Transformers, {name}", theirs[length], "tok/s", limit=limit))
    return rows


def step_rows(engine: Engine, scale: Scale, seed: int) -> list[Row]:
    """What a step consists of: its wall time with stopwatches around every product and every attention call."""
    section = "time of a step"
    rows = []
    for batch in scale.batches:
        parts = []
        for round_ in range(scale.rounds):
            prompts = _prompts(engine, batch, scale.decode_prompt_len, seed + 100 + round_)
            parts.append(driver.step_parts(engine, prompts, scale.decode_len)[1])
        rows += _parts_rows(section, f"decode, batch {batch}", parts)
    for length in scale.prefill_lens:
        parts = []
        for round_ in range(scale.rounds):
            parts.append(driver.step_parts(engine, _prompts(engine, 1, length, seed + 100 + round_), 1)[0])
        rows += _parts_rows(section, f"prefill, {length} tokens", parts)
    return rows


def _parts_rows(section: str, name: str, parts: Sequence[driver.Parts]) -> list[Row]:
    def percent(share: Callable[[driver.Parts], float]) -> list[float]:
        return [100 * share(part) for part in parts]

    return [
        Row.of(section, f"{name}: products, norms, rope, SiLU", percent(lambda p: p.products_s / p.total_s), "%"),
        Row.of(section, f"{name}: attention", percent(lambda p: p.attention_s / p.total_s), "%"),
        Row.of(section, f"{name}: outside both", percent(lambda p: p.outside_share), "%", target="< 15%"),
    ]


def _prompts(engine: Engine, num: int, length: int, seed: int) -> list[tuple[int, ...]]:
    vocab_size = engine.config.model.vocab_size
    workload = random_lengths(num_requests=num, input_len=length, output_len=1, vocab_size=vocab_size, seed=seed)
    return [conversation.turns[0].token_ids for conversation in workload.conversations]


def _cache(prefix_cache: Literal["radix", "chunk"]) -> CacheConfig:
    return CacheConfig(prefix_cache=prefix_cache, max_total_tokens=POOL_TOKENS)


def main(argv: Sequence[str] | None = None) -> None:
    parse = argparse.ArgumentParser(prog="python -m benchmarks.offline", description=__doc__)
    parse.add_argument("--model", default=MODEL, help="folder that Transformers can load")
    parse.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parse.add_argument("--quick", action="store_true", help="one round of small sizes: a check, not a measurement")
    parse.add_argument("--json", metavar="OUT", help="also write JSON here")
    options = parse.parse_args(argv)
    rows = measure(options.model, num_threads=options.threads, scale=QUICK if options.quick else FULL)
    publish(rows, json_path=options.json)


if __name__ == "__main__":
    main()
