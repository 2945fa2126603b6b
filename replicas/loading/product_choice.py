"""Says how an engine's products are computed on this CPU, and measures what they gain by the weights' format.

Owns:      the measurement (about a second) of products by fp32 weights and by others, and its record on disk, for the
           default dtype and `manta doctor`.
Never:     chooses a format or a kernel: layers/linear.py does, by the kind of CPU alone.
Thread:    any.

Times are CPU time of one thread: other load during an engine's start must not decide its speed from then on (by wall
time on two threads, a kernel that was twice as fast lost one in eight tries on a busy machine). Load also takes
caches and bandwidth, and CPU time shows that: rates on which two halves of the rounds do not agree are used, not kept.
"""

import hashlib
import itertools
import json
import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from replicas import kernels
from replicas.config import DType, EngineConfig, ModelConfig
from replicas.kernels import bf16, bf16_tiles
from replicas.kernels.bf16_tiles import WAYS, Way
from replicas.kernels.int8_tiles import cpu_has_vnni
from replicas.kernels.simd import compiled_for, instruction_set
from replicas.kernels.weight_formats import WeightFormat
from replicas.layers.linear import Matmul

log = logging.getLogger(__name__)

Work = Callable[[Tensor], Any]
Measured = tuple[dict[int, float], bool]  # by rows of a step, times as fast; and whether repeats agree
SHAPE, ROWS = (2048, 2048), (1, 8, 32, 256)  # of what is measured: fp32 weights of 16 MB, which no L2 holds
AGREE = 1.15  # repeats differ by less, else a measurement is not kept
ROUNDS, TRIES = 4, 2  # of a measurement: the quickest run of all counts


def describe_products(config: EngineConfig) -> tuple[bool, str]:
    """Tell whether ranks add their parts of a product in one order, and how products are computed, in words."""
    model = config.model
    if config.device != "cpu":
        return False, f"PyTorch's, in {model.dtype} on {config.device}"
    if model.quantization == "int8":
        how = "multiplied as bytes" if cpu_has_vnni() else "widened for fp32 arithmetic: this CPU has no VNNI"
        return True, f"own, int8 weights and activations, {how}"
    how = _arithmetic(model)
    if model.moe is not None:
        return True, f"{how}; in one order, since a last bit may choose another expert"
    if model.stored is not None and model.stored.products is not None and not config.rounds:
        return False, f"own, {model.stored.products} weights of the checkpoint in fp32 arithmetic"
    if model.implementation == "transformers" and model.weight_format == "float32" and not config.rounds:
        return False, "own, in the place of Transformers' Linears"
    order = f"; in one order, for K and V rounded to {config.kv_dtype}" if config.rounds else ""
    return config.rounds or _bf16_way(model) is not None, f"{how}{order}"


def gains(format_: WeightFormat, dtype: DType = "float32") -> dict[int, float]:
    """Tell how many times as fast as by fp32 weights a product by weights in ``format_`` is on this CPU, by rows, in a
    model of ``dtype``: from disk, else measured, and kept if it can be relied on."""
    key = {"format": format_, "dtype": dtype, **_machine()}
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    file = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "manta" / f"products-{name}.json"
    try:
        return {int(rows): float(times) for rows, times in json.loads(file.read_text())["gains"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    started_s, (found, agree) = time.monotonic(), _measure(format_, dtype)
    log.info("products by %s in %s measured in %.1f s, times as fast as by float32, by rows: %s",
             format_, dtype, time.monotonic() - started_s, found)  # fmt: skip
    if not agree:
        log.info("other work disturbed the measurement: the next start makes it again")
        return found
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        written = file.with_suffix(f".{os.getpid()}")
        written.write_text(json.dumps({"key": key, "gains": found}))
        written.replace(file)  # two engines that start together each write the whole
    except OSError as error:
        log.info("products are measured at every start: %s", error)
    return found


def describe_gains(format_: WeightFormat, dtype: DType = "float32") -> str:
    """Say `gains` in words."""
    by_rows = gains(format_, dtype)
    ends = {rows: f"{rows} token{'s' * (rows != 1)}" for rows in (min(by_rows), max(by_rows))}
    return ", ".join(f"{by_rows[rows]:.2g} times float32 for {told}" for rows, told in ends.items())


def default_told(dtype: DType) -> str | None:
    """Say why a model has ``dtype`` on this CPU where none is set; None: that goes without saying."""
    return f"the checkpoint's, which this CPU multiplies: {describe_gains('bfloat16')}" if dtype == "bfloat16" else None


def instructions_told() -> dict[str, str]:
    """Say by what this CPU multiplies weights of each format, and what that gains: lines of `manta doctor`."""
    way, widened = bf16_tiles.way(), "widened for fp32 arithmetic"
    how: dict[WeightFormat, str] = {
        "bfloat16": widened if way is None else f"by {WAYS[way]}",
        "int8": "as bytes, by VNNI" if cpu_has_vnni() else widened,
        "q4_1": widened,
    }
    told = {"float32": f"multiply-adds of {instruction_set()}"}
    told |= {str(name): f"{text}: {describe_gains(name)}" for name, text in how.items()}
    if way is not None and bf16.serves("q4_1", torch.bfloat16):
        told["q4_1 in bfloat16"] = f"by {WAYS[way]}: {describe_gains('q4_1', 'bfloat16')}"
    return told


def _bf16_way(model: ModelConfig) -> Way | None:
    """Tell how products multiply bf16, if activations are rounded to it."""
    return bf16_tiles.way() if bf16.serves(model.weight_format, getattr(torch, model.dtype)) else None


def _arithmetic(model: ModelConfig) -> str:
    """Say what our products by weights in the model's format compute."""
    by, stored = _bf16_way(model), model.stored
    kept = "" if stored is None or stored.experts is None else f", experts' {stored.experts} weights in fp32 arithmetic"
    if by is None:
        return f"own, {model.weight_format} weights in fp32 arithmetic{kept}"
    of = "bfloat16 weights and" if model.weight_format == "bfloat16" else f"{model.weight_format} weights and bfloat16"
    how = f"own, {of} activations by {WAYS[by]}, summed in fp32"
    if kept:
        return how + kept
    widened = model.moe is not None and not bf16.serves(model.weight_format, torch.bfloat16, grouped=True)
    return f"{how}, experts' widened" if widened else how


def _measure(format_: WeightFormat, dtype: DType) -> Measured:
    """Compare our product by fp32 weights with that by weights in ``format_``, in a model of ``dtype``."""
    weight, own, other = torch.full(SHAPE, 0.5), Matmul(), Matmul(format_)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the size of a team
    try:
        own.prepare(lambda: weight, None)
        other.prepare(lambda: weight, None, dtype=getattr(torch, dtype))
        return compare((own, other), [torch.ones(rows, SHAPE[1]) for rows in ROWS])
    finally:
        torch.set_num_threads(num_threads)


def compare(works: tuple[Work, Work], xs: Sequence[Tensor], clock: Callable[[], float] = time.thread_time) -> Measured:
    """Measure how many times as fast the second of ``works`` is, for each x [rows, ..], by the quickest of several
    runs. Each round runs everything, so one disturbed moment does not decide. Repeats agree if the quickest of every
    other round is about the quickest of all."""
    least_s = [([math.inf, math.inf], [math.inf, math.inf]) for _ in xs]  # of each work, by halves of the rounds
    for number, (x, by_work) in itertools.product(range(ROUNDS), zip(xs, least_s, strict=True)):
        for work, halves in zip(works, by_work, strict=True):
            for _ in range(TRIES):
                started_s = clock()
                work(x)
                halves[number % 2] = min(halves[number % 2], clock() - started_s)
    found = {len(x): round(min(own) / max(min(other), 1e-9), 2) for x, (own, other) in zip(xs, least_s, strict=True)}
    return found, all(max(halves) < AGREE * min(halves) for by_work in least_s for halves in by_work)


def _machine() -> dict[str, object]:
    """Describe what a measurement is valid for: the CPU, the instructions that kernels may use, and their sources."""
    sources = sorted(Path(kernels.__path__[0]).glob("*.py"))
    return {
        "cpu": _cpu_model(),
        "numba": compiled_for(),
        "kernels": hashlib.sha256(b"".join(file.read_bytes() for file in sources)).hexdigest()[:16],
        "measured": (SHAPE, ROWS),
    }


def _cpu_model() -> list[str]:
    """Read the lines of /proc/cpuinfo that name the first CPU; none without that file."""
    names = ("vendor_id", "cpu family", "model", "model name", "stepping", "cache size")
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return []
    return [" ".join(line.split()) for line in first.splitlines() if line.split(":")[0].strip() in names]
