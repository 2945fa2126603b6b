"""One engine without HTTP, beside Transformers' `generate`.

Every comparison alternates its sides in one run, and the machine's limits are measured between them, since absolute
numbers move with other work on the machine. Limits of a decode step: the weights' bytes over the measured memory
bandwidth, or its products at the measured GEMM rate, whichever takes longer (K and V not counted); of a prefill:
products and causal attention at the GEMM rate.
"""

import argparse
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass

from benchmarks import driver, harness
from benchmarks.driver import TransformersPeer
from benchmarks.families import family_rows
from benchmarks.harness import Part, Row, Table
from benchmarks.limits import FORMATS, Limits, ModelCost
from replicas.config import CacheConfig
from replicas.engine.engine import Engine
from replicas.launch import EngineSettings, load_engine

POOL_TOKENS = 32_768
FORMATS_TOKENS = 8_192  # for each of several engines


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


def speed_rows(model: str, threads: int, scale: Scale, seed: int) -> list[Row]:
    """Measure decode and prefill, the machine's limits first."""
    limits, peer = Limits(threads), TransformersPeer(model)
    cache = CacheConfig(max_total_tokens=POOL_TOKENS)
    with closing(load_engine(EngineSettings(model=model, cache=cache, num_threads=threads))) as engine:
        rows = decode_rows(engine, peer, limits, scale, seed) + prefill_rows(engine, peer, limits, scale, seed)
        return limits.rows() + rows


def decode_rows(engine: Engine, peer: TransformersPeer, limits: Limits, scale: Scale, seed: int) -> list[Row]:
    """Measure decode tokens/s by batch size; Transformers at batch 1, alternated with ours."""
    ours: dict[int, list[float]] = {batch: [] for batch in scale.batches}
    theirs: list[float] = []
    equal = 0
    for round_ in range(scale.rounds):
        limits.sample()
        for batch in scale.batches:
            prompts = driver.prompts(engine, batch, scale.decode_prompt_len, seed + round_)
            decoded = driver.decode(engine, prompts, scale.decode_len)
            ours[batch].append(decoded.tokens_per_s)
            if batch == 1:
                generated = peer.generate(prompts[0], scale.decode_len)
                theirs.append(generated.tokens_per_s)
                equal += decoded.token_ids[0] == generated.token_ids
    table, cost = Table(f"decode, context {scale.decode_prompt_len}, fp32"), ModelCost.of(engine.config.model)
    limit = {b: b / cost.decode_limit_s(b, limits.median_bandwidth, limits.median_flops) for b in (1, *scale.batches)}
    for batch, values in ours.items():
        one = batch == 1
        note = f"{equal} of {scale.rounds} runs equal to Transformers' ids" if one else ""
        target = ">= 80% of the limit" if one else None
        table.add(f"batch {batch}", values, "tok/s", limit=limit[batch], target=target, note=note)
    table.add("Transformers generate, batch 1", theirs, "tok/s", limit=limit[1])
    return table.rows


def format_rows(model: str, threads: int, scale: Scale, seed: int) -> list[Row]:
    """Measure decode and prefill with weights in each format, their engines in turn."""
    limits, cache = Limits(threads), CacheConfig(max_total_tokens=FORMATS_TOKENS)
    cells = [*((batch, scale.decode_prompt_len) for batch in scale.batches), (0, scale.prefill_lens[0])]
    found: dict[tuple[str, int], list[float]] = {(name, num): [] for name in FORMATS for num, _ in cells}
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(
                closing(load_engine(EngineSettings(model=model, cache=cache, num_threads=threads, **each.settings)))
            )
            for name, each in FORMATS.items()
        }
        for round_, name in harness.in_turn(engines, scale.rounds):
            engine = engines[name]
            limits.sample()
            for num, length in cells:
                prompts = driver.prompts(engine, max(num, 1), length, seed + round_)
                engine.flush_cache()
                rate = driver.decode(engine, prompts, scale.decode_len).tokens_per_s if num else 0.0
                found[name, num].append(rate or length / driver.prefill_s(engine, prompts[0]))
        costs = {name: ModelCost.of(engine.config.model, name) for name, engine in engines.items()}
    rows = limits.rows()
    for num, length in cells:
        table = Table(f"decode, batch {num}, by weights" if num else f"prefill, {length} tokens, by weights")
        for name, format_ in FORMATS.items():
            limit_s = costs[name].decode_limit_s(1, limits.median_bandwidth, limits.median_flops)
            target = ">= 80% of the limit" if name == "float32" else None
            more = {"limit": 1 / limit_s, "target": target} if num == 1 else {}
            table.add(name, found[name, num], "tok/s", **more)
            if name != "float32":
                ratios = [ours / exact for ours, exact in zip(found[name, num], found["float32", num], strict=True)]
                least = f">= {format_.least if num == 1 else 1:g} x"
                table.add(f"{name} / float32", ratios, "x", target=least)
        rows += table.rows
    return rows


def prefill_rows(engine: Engine, peer: TransformersPeer, limits: Limits, scale: Scale, seed: int) -> list[Row]:
    """Measure prefill tokens/s of one uncached prompt; Transformers alternated with ours."""
    table, cost = Table("prefill, fp32"), ModelCost.of(engine.config.model)
    ours: dict[int, list[float]] = {length: [] for length in scale.prefill_lens}
    theirs: dict[int, list[float]] = {length: [] for length in scale.prefill_lens}
    for round_ in range(scale.rounds):
        limits.sample()
        for length in scale.prefill_lens:
            engine.flush_cache()
            (prompt,) = driver.prompts(engine, 1, length, seed + round_)
            ours[length].append(length / driver.prefill_s(engine, prompt))
            theirs[length].append(length / peer.generate(prompt, 2).prefill_s)
    for length in scale.prefill_lens:
        limit = length * limits.median_flops / cost.prefill_flops(length)
        table.add(f"{length} tokens", ours[length], "tok/s", limit=limit, target=">= 70% of the limit")
        table.add(f"Transformers, {length} tokens", theirs[length], "tok/s", limit=limit)
    return table.rows


def _scale(options: argparse.Namespace) -> Scale:
    return QUICK if options.quick else FULL


def _sized(rows: Callable[[str, int, Scale, int], list[Row]]) -> Callable[[argparse.Namespace], list[Row]]:
    return lambda options: rows(options.model, options.threads, _scale(options), options.seed)


PARTS = {
    "speed": Part(about="decode and prefill, beside Transformers", measure=_sized(speed_rows)),
    "formats": Part(about="decode and prefill by the format of weights, beside float32", measure=_sized(format_rows)),
    "families": Part(about="a recurrent model of Qwen3.5's shape, beside Transformers", measure=family_rows),
}


def main(argv: Sequence[str] | None = None) -> None:
    harness.run("engine", __doc__, PARTS, argv)
