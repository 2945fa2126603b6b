"""Decode with adapters (LoRA) beside the model alone, in each format of its weights and of theirs: one engine, sides in
turn, a decode step's time each.

Adapters are of random numbers, on all seven projections; what they hold does not change the work. A side's requests
have an adapter each. The first load of each adapter is measured as a request sees it, from its file in the page cache.
"""

import argparse
import itertools
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import driver, harness
from benchmarks.harness import Row, Table
from benchmarks.limits import FORMATS
from replicas.config import AdapterLimits, CacheConfig
from replicas.engine.engine import Engine
from replicas.launch import EngineSettings, load_engine
from replicas.types import AdapterRef
from tests.adapters import make_adapter

RANK, NUM_ADAPTERS, PROMPT_LEN = 16, 8, 128
# adapters of a batch, its requests, and what is to be left of the base's tokens a second
SIDES = {
    "1 adapter, batch 1": (1, 1, ">= 0.93 x"),
    "1 adapter, batch 8": (1, 8, None),
    "8 adapters, batch 8": (8, 8, ">= 0.75 x"),
}


def adapter_rows(options: argparse.Namespace) -> Iterator[Row]:
    """Measure the sides, and how long an adapter takes to load."""
    for name, kept in itertools.product(options.formats.split(";"), options.kept):
        yield from _rows(options, name, FORMATS[name].settings, kept)


def _rows(options: argparse.Namespace, format_name: str, of_format: Mapping[str, Any], kept: str) -> list[Row]:
    settings = EngineSettings(
        model=options.model, cache=CacheConfig(max_total_tokens=8_192), num_threads=options.threads,
        adapters=AdapterLimits(), **of_format,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, closing(load_engine(settings)) as engine:
        path = Path(engine.config.model.path)
        refs = [
            make_adapter(Path(folder, str(i)), path, rank=RANK, seed=i, dtype=getattr(torch, kept))
            for i in range(NUM_ADAPTERS)
        ]
        loads = [_load_s(engine, ref) for ref in refs]
        adapters = engine.stats().adapters
        assert adapters is not None
        what = f"rank {RANK} on 7 projections in {kept}, weights in {format_name}"
        table = Table(f"decode, context {PROMPT_LEN}, {what}")
        for name, (num, batch, target) in SIDES.items():
            alone, with_them = _measured(engine, refs[:num], batch, options)
            table.add(f"the model alone, batch {batch}", alone, "tok/s")
            table.add(name, with_them, "tok/s")
            gains = [ours / base for ours, base in zip(with_them, alone, strict=True)]
            table.add(f"{name} / alone", gains, "x", target=target)
        note = f"{adapters.num_bytes / len(refs) / 2**20:.0f} MiB each"
        table.add("first token of a request that loads its adapter", [1e3 * load for load in loads], "ms", note=note)
        table.add("of it, to load", [1e3 * adapters.load_s], "ms", note="smoothed")
        return table.rows


def _measured(
    engine: Engine, refs: Sequence[AdapterRef], batch: int, options: argparse.Namespace
) -> tuple[list[float], list[float]]:
    """Return the tokens a second of the model alone, and with an adapter of ``refs`` for each request, in turn."""
    sides: dict[str, list[float]] = {"alone": [], "adapters": []}
    length = 8 if options.quick else 32
    for round_, side in harness.in_turn(sides, harness.rounds_of(options, 5) + 1):
        prompts = driver.prompts(engine, batch, PROMPT_LEN, options.seed + round_)
        engine.flush_cache()
        adapters = [refs[i * len(refs) // batch] for i in range(batch)] if side == "adapters" else None
        rate = driver.decode(engine, prompts, length, adapters=adapters).tokens_per_s
        if round_:  # the first warms up
            sides[side].append(rate)
    return sides["alone"], sides["adapters"]


def _load_s(engine: Engine, ref: AdapterRef) -> float:
    """Return the seconds until the first token of a request whose adapter is not held."""
    request = replace(driver.request([1, 2, 3, 4], 1), adapter=ref)
    started_s = time.perf_counter()
    engine.submit(request)
    while engine.open_rids:
        if not engine.step():
            time.sleep(0.002)  # as an engine's thread does, which leaves the reading one the interpreter
    return time.perf_counter() - started_s
