"""Chooses an engine's products on a CPU: measures ours and PyTorch's BLAS at the model's shapes when the engine starts.

Owns:      the measurement (about a second), its record on disk, and the rule that makes `Products` of it; what products
           gain by weights in another format than fp32, for the default dtype and `manta doctor`.
Never:     changes a choice later: `Products` are a value that the engine's layers get.
Invariant: BLAS is not used if the results are rounded afterwards: its order of sums depends on the rows.
Thread:    the one that loads the engine. Rank 0 chooses for all ranks.

Times are CPU time of one thread: other load during an engine's start must not decide its speed from then on (by wall
time on two threads, a kernel that was twice as fast lost one in eight tries on a busy machine). Load also takes
caches and bandwidth, and CPU time shows that: rates on which two halves of the rounds do not agree are used, not kept.
"""

import contextlib
import functools
import hashlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from replicas import kernels
from replicas.config import DType, EngineConfig, ModelConfig, Products, ProductSetting
from replicas.errors import InvalidConfig
from replicas.kernels import bf16, bf16_tiles
from replicas.kernels.bf16_tiles import WAYS, Way
from replicas.kernels.int8_tiles import cpu_has_vnni
from replicas.kernels.linear import LinearKernel
from replicas.kernels.simd import W, compiled_for, instruction_set
from replicas.kernels.team import team
from replicas.kernels.weight_formats import WeightFormat
from replicas.layers.linear import Matmul

log = logging.getLogger(__name__)

Shape = tuple[int, int]  # of a weight: (out, in)
Rates = Mapping[Shape, Mapping[int, tuple[float, float]]]  # by rows of a step: GFLOP/s of our kernel and of BLAS
Measured = tuple[Rates, bool]  # and whether repeats agree
ROWS = (32, 64, 256)  # that are measured: in steps of fewer, running as one program gains more than another product
CLEARLY_FASTER = 1.15  # measured times differ by less from run to run, else they are not kept
ROUNDS, TRIES = 4, 2  # of a measurement: the quickest run of all counts
GAIN_SHAPE, GAIN_ROWS = (2048, 2048), (1, 8, 32, 256)  # of `gains`: fp32 weights of 16 MB, which no L2 holds
MOST_FLOATS = 1 << 21  # of a weight that stands for one with more rows: 8 MB
BLAS_ROWS = 64  # and more, where BLAS is set
ENVIRONMENT = ("ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")  # what holds a BLAS to other instructions


def choose_products(config: EngineConfig, setting: ProductSetting) -> tuple[Products, str]:
    """Choose the products of an engine, with the reason in words. Raises: InvalidConfig for an unknown setting."""
    if setting not in get_args(ProductSetting):
        raise InvalidConfig(f"model.products = {setting!r} is unknown; allowed: {', '.join(get_args(ProductSetting))}")
    model, tp = config.model, config.parallel.tp
    if config.device != "cpu":
        return Products(), f"PyTorch's, in {model.dtype} on {config.device}"
    if model.quantization == "int8":
        how = "multiplied as bytes" if cpu_has_vnni() else "widened for fp32 arithmetic: this CPU has no VNNI"
        return Products(one_order=True), f"own, int8 weights and activations, {how}"
    how = _arithmetic(model)
    if model.moe is not None:
        return Products(one_order=True), f"{how}; in one order, since a last bit may choose another expert"
    if model.stored is not None and model.stored.products is not None and not config.rounds:
        return Products(), f"own, {model.stored.products} weights of the checkpoint in fp32 arithmetic"
    if config.rounds or model.weight_format != "float32":
        order = f"; in one order, for K and V rounded to {config.kv_dtype}" if config.rounds else ""
        return Products(one_order=config.rounds or _bf16_way(model) is not None), f"{how}{order}"
    if model.implementation == "transformers":
        return Products(), "own, in the place of Transformers' Linears"
    if setting == "own":
        return Products(), "own, as set"
    if setting == "blas":
        return blas_products(model, tp), f"BLAS for {BLAS_ROWS} rows and more, as set"
    products = faster(_recorded("own and BLAS", _measure, product_shapes(model, tp)))
    return products, f"{products.describe()}, as measured on this CPU"


def gains(format_: WeightFormat, dtype: DType = "float32") -> dict[int, float]:
    """Tell how many times as fast as by fp32 weights a product by weights in ``format_`` is on this CPU, by rows, in a
    model of ``dtype``."""
    measure = functools.partial(_beside_floats, format_, dtype)
    rates = _recorded(f"float32 and {format_} in {dtype}", measure, [GAIN_SHAPE])
    return {rows: round(other / own, 2) for rows, (own, other) in rates[GAIN_SHAPE].items()}


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
    by = _bf16_way(model)
    if by is None:
        return f"own, {model.weight_format} weights in fp32 arithmetic"
    of = "bfloat16 weights and" if model.weight_format == "bfloat16" else f"{model.weight_format} weights and bfloat16"
    how = f"own, {of} activations by {WAYS[by]}, summed in fp32"
    widened = model.moe is not None and not bf16.serves(model.weight_format, torch.bfloat16, grouped=True)
    return f"{how}, experts' widened" if widened else how


def blas_products(model: ModelConfig, tp: int) -> Products:
    """Choose BLAS for every step of `BLAS_ROWS` rows and more, without measuring."""
    return Products(blas_rows=dict.fromkeys(product_shapes(model, tp), BLAS_ROWS))


def product_shapes(model: ModelConfig, tp: int) -> list[Shape]:
    """List the shapes of the weights that a rank multiplies by: around attention, gate and up, down, the head."""
    hidden, inner_sizes = model.hidden_size, [size // tp for size in model.inner_sizes]
    return [
        *dict.fromkeys(model.attention_products(tp)),
        *(shape for inner in inner_sizes for shape in ((2 * inner, hidden), (hidden, inner))),
        (-(-model.vocab_size // tp), hidden),
    ]


def faster(rates: Rates) -> Products:
    """Choose BLAS from the number of rows on at which it is clearly faster in every measurement."""
    taken = {}
    for shape, by_rows in rates.items():
        for rows in sorted(by_rows, reverse=True):
            own, blas = by_rows[rows]
            if blas <= CLEARLY_FASTER * own:
                break
            taken[shape] = rows
    return Products(blas_rows=taken)


def _measure(shapes: Sequence[Shape]) -> Measured:
    """Of our product and BLAS's, weights of a large shape cut to their first rows."""
    cases: list[_Case] = []
    for n, k in shapes:
        weight = torch.full((min(n, max(W, MOST_FLOATS // k // W * W)), k), 0.5)
        own, blas = LinearKernel(weight, team(1)), functools.partial(F.linear, weight=weight)
        cases += [_Case((n, k), torch.ones(rows, k), len(weight), (own, blas)) for rows in ROWS]
    return _rates(cases)


def _beside_floats(format_: WeightFormat, dtype: DType, shapes: Sequence[Shape]) -> Measured:
    """Of our product by fp32 weights and by weights in ``format_``, in a model of ``dtype``."""
    cases: list[_Case] = []
    for n, k in shapes:
        weight, own, other = torch.full((n, k), 0.5), Matmul(), Matmul(format_=format_)
        with _one_thread():  # the team's size
            own.prepare(lambda weight=weight: weight, None)  # type: ignore[misc]
            other.prepare(lambda weight=weight: weight, None, dtype=getattr(torch, dtype))  # type: ignore[misc]
        cases += [_Case((n, k), torch.ones(rows, k), n, (own, other)) for rows in GAIN_ROWS]
    return _rates(cases)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


@dataclass(frozen=True, slots=True, eq=False)
class _Case:
    """Two products of the same numbers, to be compared."""

    shape: Shape
    x: Tensor  # [rows, K]
    outputs: int
    works: tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]


def _rates(cases: Sequence[_Case], clock: Callable[[], float] = time.thread_time) -> Measured:
    """Measure the GFLOP/s of the quickest of several runs on one thread. Each round runs all cases, so one disturbed
    moment does not decide. Repeats agree if the quickest of every other round is about the quickest of all."""
    least_s = [([math.inf, math.inf], [math.inf, math.inf]) for _ in cases]  # of each work, by halves of the rounds
    with _one_thread():
        for number in range(ROUNDS):
            for case, by_work in zip(cases, least_s, strict=True):
                for work, halves in zip(case.works, by_work, strict=True):
                    for _ in range(TRIES):
                        started_s = clock()
                        work(case.x)
                        halves[number % 2] = min(halves[number % 2], clock() - started_s)
    rates: dict[Shape, dict[int, tuple[float, float]]] = {}
    for case, by_work in zip(cases, least_s, strict=True):
        gflop = 2e-9 * case.x.numel() * case.outputs
        first, second = (round(gflop / max(min(halves), 1e-9), 1) for halves in by_work)
        rates.setdefault(case.shape, {})[len(case.x)] = first, second
    agree = all(max(halves) < CLEARLY_FASTER * min(halves) for by_work in least_s for halves in by_work)
    return rates, agree


def _recorded(what: str, measure: Callable[[Sequence[Shape]], Measured], shapes: Sequence[Shape]) -> Rates:
    """Return this program's measurements of these shapes on this kind of CPU: from disk, else made, and kept if they
    can be relied on.

    ``what``: the two products that ``measure`` compares.
    """
    key = {"what": what, "shapes": sorted(set(shapes)), **_machine()}
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    file = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "manta" / f"products-{name}.json"
    try:
        rows = json.loads(file.read_text())["rates"]
        return {(n, k): {int(r): (own, other) for r, (own, other) in by_rows.items()} for n, k, by_rows in rows}
    except (OSError, ValueError, KeyError, TypeError):
        pass
    started_s, (rates, agree) = time.monotonic(), measure(sorted(set(shapes)))
    log.info("products measured in %.1f s, GFLOP/s of %s by rows: %s",
             time.monotonic() - started_s, what, _in_words(rates))  # fmt: skip
    if not agree:
        log.info("other work disturbed the measurement: the next start makes it again")
        return rates
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        written = file.with_suffix(f".{os.getpid()}")
        written.write_text(json.dumps({"key": key, "rates": [(n, k, by_rows) for (n, k), by_rows in rates.items()]}))
        written.replace(file)  # two engines that start together each write the whole
    except OSError as error:
        log.info("products are measured at every start: %s", error)
    return rates


def _in_words(rates: Rates) -> str:
    return "; ".join(
        f"{n} x {k}: " + ", ".join(f"{rows}: {own:.0f} / {other:.0f}" for rows, (own, other) in by_rows.items())
        for (n, k), by_rows in rates.items()
    )


def _machine() -> dict[str, object]:
    """Describe what a measurement is valid for: the CPU, the instructions that either side may use, both programs."""
    sources = sorted(Path(kernels.__path__[0]).glob("*.py"))
    return {
        "cpu": _cpu_model(),
        "numba": compiled_for(),
        "aten": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "environment": {name: os.environ.get(name) for name in ENVIRONMENT},
        "kernels": hashlib.sha256(b"".join(file.read_bytes() for file in sources)).hexdigest()[:16],
        "rows": (ROWS, GAIN_ROWS),
    }


def _cpu_model() -> list[str]:
    """Read the lines of /proc/cpuinfo that name the first CPU; none without that file."""
    names = ("vendor_id", "cpu family", "model", "model name", "stepping", "cache size")
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return []
    return [" ".join(line.split()) for line in first.splitlines() if line.split(":")[0].strip() in names]
