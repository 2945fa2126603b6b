"""One engine without HTTP, beside Transformers' `generate`.

Every comparison alternates its sides in one run, and the machine's limits are measured between them, since absolute
numbers move with other work on the machine. Limits of a decode step: the weights' bytes over the measured memory
bandwidth, or its products at the measured GEMM rate, whichever takes longer (K and V not counted); of a prefill:
products and causal attention at the GEMM rate. What the prefix cache costs where no prefix is shared is far below the
noise of wall times; so the time inside the scheduler is compared, as a share of the run.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from typing import Literal

from benchmarks import driver, harness
from benchmarks.driver import StepParts, TransformersPeer
from benchmarks.harness import Part, Row, Table, rounds_of
from benchmarks.limits import FORMATS, Limits, ModelCost
from benchmarks.workloads import Workload, random_lengths, shared_prefix
from replicas.config import CacheConfig
from replicas.engine.engine import Engine
from replicas.launch import EngineSettings, load_engine

POOL_TOKENS = 32_768
FORMATS_TOKENS = 8_192  # for each of several engines
START = """
import json, sys, time
started_s = time.perf_counter()
from replicas.launch import EngineSettings, load_engine
imported_s = time.perf_counter()
engine = load_engine(EngineSettings(model=sys.argv[1], num_threads=int(sys.argv[2])))
print(json.dumps({"imports": imported_s - started_s, **engine.started.times}))
engine.close()
"""
PHASES = {"imports": "imports", "load_weights": "weights", "warm_up": "warm-up", "total": "load_engine"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much to run."""

    rounds: int = 3
    batches: tuple[int, ...] = (1, 8, 32)
    decode_prompt_len: int = 128
    decode_len: int = 32
    prefill_lens: tuple[int, ...] = (256, 1024)
    prefix_rounds: int = 2  # a round takes minutes with ChunkCache
    shared: tuple[int, int, int, int] = (8, 8, 1024, 64)  # groups, prompts of each, tokens they share, of their own
    output_len: int = 32
    concurrency: int = 16
    unique: tuple[int, int] = (8, 512)  # prompts, tokens


FULL = Scale()
QUICK = Scale(
    rounds=1, batches=(1, 8), decode_prompt_len=32, decode_len=8, prefill_lens=(256,), prefix_rounds=1,
    shared=(2, 4, 256, 32), output_len=8, concurrency=4, unique=(2, 128),
)  # fmt: skip


def speed_rows(model: str, threads: int, scale: Scale, seed: int) -> list[Row]:
    """Measure decode, prefill and what a step consists of, the machine's limits first."""
    limits, peer = Limits(threads), TransformersPeer(model)
    with closing(_load(model, threads)) as engine:
        rows = decode_rows(engine, peer, limits, scale, seed) + prefill_rows(engine, peer, limits, scale, seed)
        return limits.rows() + rows + step_rows(engine, scale, seed)


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


def step_rows(engine: Engine, scale: Scale, seed: int) -> list[Row]:
    """Measure what a step consists of, with stopwatches around every product and every attention call."""
    table = Table("time of a step")

    def add(name: str, num: int, length: int, num_new: int, which: int) -> None:
        prompts = [driver.prompts(engine, num, length, seed + 100 + round_) for round_ in range(scale.rounds)]
        parts: list[StepParts] = [driver.step_parts(engine, each, num_new)[which] for each in prompts]
        products = [100 * part.products_s / part.total_s for part in parts]
        table.add(f"{name}: products, norms, rope, SiLU", products, "%")
        table.add(f"{name}: attention", [100 * part.attention_s / part.total_s for part in parts], "%")
        table.add(f"{name}: outside both", [100 * part.outside_share for part in parts], "%", target="< 15%")

    for batch in scale.batches:
        add(f"decode, batch {batch}", batch, scale.decode_prompt_len, scale.decode_len, 1)
    for length in scale.prefill_lens:
        add(f"prefill, {length} tokens", 1, length, 1, 0)
    return table.rows


def prefix_rows(model: str, threads: int, scale: Scale, seed: int) -> list[Row]:
    """Measure what the radix cache gains on shared prefixes, and costs on unique prompts: two engines, alternated."""
    groups, per_group, prefix_len, question_len = scale.shared
    num_unique, unique_len = scale.unique
    with closing(_load(model, threads)) as radix, closing(_load(model, threads, "chunk")) as chunk:
        engines = {"radix": radix, "chunk": chunk}
        drawn = {"output_len": scale.output_len, "vocab_size": radix.config.model.vocab_size}
        alone = partial(random_lengths, num_requests=num_unique, input_len=unique_len, **drawn)
        grouped = partial(
            shared_prefix, num_groups=groups, per_group=per_group, prefix_len=prefix_len, question_len=question_len,
            **drawn,
        )  # fmt: skip
        unique = _both(engines, scale, [alone(seed=seed + round_) for round_ in range(scale.rounds)])
        shared = _both(engines, scale, [grouped(seed=seed + round_) for round_ in range(scale.prefix_rounds)])
    table = Table(f"unique prompts: {unique[0][0].name}")
    costs = [100 * (a.scheduling_s - b.scheduling_s) / b.wall_s for _, a, b in unique]
    table.add("RadixCache over ChunkCache, scheduler time", costs, "% of the run", target="< 1%")
    walls = [100 * (a.wall_s / b.wall_s - 1) for _, a, b in unique]
    table.add("RadixCache over ChunkCache, wall time", walls, "%", note="noise included")
    workload = shared[-1][0]
    table.section = f"{workload.name}, {scale.concurrency} at once"
    equal = sum(a.outputs == b.outputs for _, a, b in shared)
    best = 100 * workload.reusable_tokens / workload.prompt_tokens
    table.add("RadixCache, wall", [a.wall_s for _, a, _ in shared], "s")
    table.add("ChunkCache, wall", [b.wall_s for _, _, b in shared], "s")
    gains, note = [b.wall_s / a.wall_s for _, a, b in shared], f"{equal} of {len(shared)} runs with equal token ids"
    table.add("times faster with RadixCache", gains, "x", target=">= 3x", note=note)
    hits = [100 * a.cached_tokens / a.prompt_tokens for _, a, _ in shared]
    table.add("cached prompt tokens", hits, "%", note=f"at best {best:.1f}")
    return table.rows


def _both(
    engines: dict[str, Engine], scale: Scale, workloads: Sequence[Workload]
) -> list[tuple[Workload, driver.Served, driver.Served]]:
    """Run each workload on both from an empty cache; return (workload, by radix, by chunk) of each round."""
    served: list[dict[str, driver.Served]] = [{} for _ in workloads]
    for round_, name in harness.in_turn(engines, len(workloads)):
        engines[name].flush_cache()
        served[round_][name] = driver.serve(engines[name], workloads[round_], scale.concurrency)
    return [(each, found["radix"], found["chunk"]) for each, found in zip(workloads, served, strict=True)]


def _load(model: str, threads: int, prefix_cache: Literal["radix", "chunk"] = "radix") -> Engine:
    cache = CacheConfig(prefix_cache=prefix_cache, max_total_tokens=POOL_TOKENS)
    return load_engine(EngineSettings(model=model, cache=cache, num_threads=threads))


def start_rows(options: argparse.Namespace) -> list[Row]:
    """Measure a fresh process: the second start by its phases, and the first, which compiles the kernels.

    Weights lie in the page cache after the first run. Ray's own start is not counted.
    """
    with tempfile.TemporaryDirectory() as folder:
        first_s, _ = start(options.model, options.threads, folder)
        runs = [start(options.model, options.threads, folder) for _ in range(rounds_of(options, 3))]
    table = Table(f"start of an engine in a fresh process, {options.threads} threads")
    table.add("first on a machine: kernels are compiled", [first_s], "s")
    table.add("later", [seconds for seconds, _ in runs], "s", target="< 10 s")
    for phase, name in PHASES.items():
        table.add(f"later, of it: {name}", [times[phase] for _, times in runs], "s")
    return table.rows


def start(model: str, threads: int, cache_folder: str) -> tuple[float, dict[str, float]]:
    """Return the seconds of a process that loads the engine and ends, and of its phases.

    Raises: RuntimeError with what the process wrote, when it fails.
    """
    environment = {**os.environ, "NUMBA_CACHE_DIR": cache_folder}  # kernels are kept there
    started_s = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", START, model, str(threads)], check=False, env=environment, capture_output=True, text=True
    )
    took_s = time.perf_counter() - started_s
    if done.returncode:
        raise RuntimeError(f"the engine did not start (exit status {done.returncode}); it wrote:\n{done.stderr}")
    return took_s, json.loads(done.stdout.splitlines()[-1])


def _scale(options: argparse.Namespace) -> Scale:
    return QUICK if options.quick else FULL


def _sized(rows: Callable[[str, int, Scale, int], list[Row]]) -> Callable[[argparse.Namespace], list[Row]]:
    return lambda options: rows(options.model, options.threads, _scale(options), options.seed)


PARTS = {
    "speed": Part(about="decode, prefill and the parts of a step, beside Transformers", measure=_sized(speed_rows)),
    "formats": Part(about="decode and prefill by the format of weights, beside float32", measure=_sized(format_rows)),
    "prefix": Part(
        about="what the radix cache gains on shared prefixes and costs without them", measure=_sized(prefix_rows)
    ),
    "start": Part(about="a fresh process until the engine is ready", measure=start_rows),
}


def main(argv: Sequence[str] | None = None) -> None:
    harness.run("engine", __doc__, PARTS, argv)
