"""What a decode step costs the host beside the model: microseconds by batch size and by part.

    python -m benchmarks.step_overhead [--batches 1,16,64,256] [--stop]
    python -m benchmarks.step_overhead --device-ms 2,4,8     what overlap hides of it

The engine is whole (scheduler, pools, tokenizer, text), the device is not there: a launch builds the step's tensors on
the CPU and returns tokens made up beforehand. ``step`` is all of `Engine.step` and the delivery to a sink; its parts do
not add up to it. Medians over steps. With ``--device-ms`` a device runs one step after another, each for so long, and
the table says what a step takes beyond that, with overlap off and on.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.report import Row, publish
from replicas.cache.kv import KvCache
from replicas.config import CacheConfig, EngineConfig, Hardware, SchedulerConfig, resolve
from replicas.engine.engine import Engine
from replicas.engine.sinks import Sinks
from replicas.runner import batch as batches
from replicas.runner.staging import Staging
from replicas.runner.weights import load_model_config
from replicas.scheduler.plan import PendingStep, StepPlan, StepResult
from replicas.text.tokenizer import Tokenizer
from replicas.types import GenerateRequest, SamplingParams

MODEL = "models/SmolLM2-135M-Instruct"
PROMPT_LEN = 64
NUM_STEPS = 150  # counted, after as many that are not: lazily made things are made by then
FIRST_WORD = 17  # ids below it are the model's special tokens
SLEEP_LATE_S = 100e-6  # a sleep ends later than asked for; the rest is waited for awake
STOPS = ("\n\nUser:", "<|endoftext|>", "Observation:")  # never in random tokens, but their beginnings are


class Parts:
    """Seconds a step that were spent in calls, by name."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {}
        self._step: dict[str, float] = {}

    def around(self, name: str, call: Callable[..., object]) -> Callable[..., object]:
        def timed(*args: object, **kwargs: object) -> object:
            started_s = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self._step[name] = self._step.get(name, 0.0) + time.perf_counter() - started_s

        return timed

    def end_step(self, step_s: float) -> None:
        for name, seconds in [*self._step.items(), ("step", step_s)]:
            self.times.setdefault(name, []).append(seconds)
        self._step = {}


@dataclass(frozen=True, slots=True)
class TimedStep:
    """Its result is there at ``done_s``; waiting for it lets other threads run."""

    made: StepResult
    done_s: float

    def result(self) -> StepResult:
        while (left_s := self.done_s - time.perf_counter()) > 0:
            time.sleep(max(0.0, left_s - SLEEP_LATE_S))
        return self.made


class NoDevice:
    """Builds each step's tensors, as a rank does, and knows its tokens; a step takes it ``step_s``."""

    def __init__(self, num_rows: int, row_len: int, vocab_size: int, *, step_s: float = 0.0) -> None:
        self._step_s, self._free_s = step_s, 0.0
        self.table = batches.DeviceTable(num_rows, row_len, torch.device("cpu"))
        self._staging = Staging(torch.device("cpu"))
        self._tokens = np.random.default_rng(0).integers(FIRST_WORD, vocab_size, 1 << 20).astype(np.int32)
        self._next = 0

    def launch(self, plan: StepPlan) -> PendingStep:
        self.build(plan)
        self._next = (self._next + len(plan.sampling)) % (len(self._tokens) // 2)
        self._free_s = max(self._free_s, time.perf_counter()) + self._step_s
        return TimedStep(
            StepResult(token_ids=self._tokens[self._next : self._next + len(plan.sampling)]), self._free_s
        )

    def build(self, plan: StepPlan) -> object:
        return batches.build(plan, self.table, self._staging)


def make_engine(batch: int, model: str, *, overlap: bool, step_s: float = 0.0) -> tuple[Engine, NoDevice]:
    config = _config(batch, model, overlap=overlap)
    pages = batch * (-(-(PROMPT_LEN + 2 * NUM_STEPS + 64) // config.cache.page_size) + 1)
    kv = KvCache(
        num_pages=pages, page_size=config.cache.page_size, max_requests=batch, context_len=config.model.context_len
    )
    device = NoDevice(batch + 1, config.model.context_len + 4, config.model.vocab_size, step_s=step_s)
    tokenizer = Tokenizer(config.model.path)
    return Engine(config, kv=kv, max_running=batch, launch=device.launch, tokenizer=tokenizer), device


def _config(batch: int, model: str, *, overlap: bool) -> EngineConfig:
    return resolve(
        load_model_config(model, context_len=1024),
        Hardware(device="cpu", num_cpus=1, available_memory_bytes=1 << 33),
        cache=CacheConfig(device_memory_bytes=1 << 30),
        scheduler=SchedulerConfig(
            max_running_requests=batch, chunked_prefill_size=8192, overlap="on" if overlap else "off"
        ),
    )


def measure(
    batch: int, model: str, *, stop: Sequence[str] = (), overlap: bool = False, step_s: float = 0.0
) -> dict[str, float]:
    """Median microseconds a decode step, by part."""
    engine, device = make_engine(batch, model, overlap=overlap, step_s=step_s)
    sinks, parts = Sinks(), Parts()
    params = SamplingParams(max_new_tokens=2 * NUM_STEPS + 32, temperature=0.0, ignore_eos=True, stop=tuple(stop))
    for number in range(batch):
        prompt = np.random.default_rng(number).integers(FIRST_WORD, 40_000, PROMPT_LEN).astype(np.int32)
        request = GenerateRequest(rid=f"request-{number}", token_ids=prompt, sampling=params)
        sinks.open(request, lambda deltas: None, max_waiting=batch, max_running=batch)
        engine.submit(request)
    while len(engine.scheduler.queues.running) < batch:
        engine.step()
    for owner, name, called in (
        (engine.scheduler, "schedule", "schedule"),
        (engine.scheduler, "schedule", "schedule_ahead"),
        (device, "build", "build"),
        (engine.scheduler, "apply", "apply"),
        (engine, "text", "_tell_tokens"),
        (sinks, "deliver", "deliver"),
    ):
        setattr(owner, called, parts.around(name, getattr(owner, called)))
    for _ in range(2 * NUM_STEPS):
        started_s = time.perf_counter()
        sinks.deliver(engine.step())
        parts.end_step(time.perf_counter() - started_s)
    return {name: statistics.median(times[NUM_STEPS:]) * 1e6 for name, times in parts.times.items()}


def parts_of(batch_sizes: Sequence[int], model: str, stop: Sequence[str], *, overlap: bool) -> list[Row]:
    """Each part of a step, and all of it."""
    section = f"host, a decode step without a device, overlap {'on' if overlap else 'off'}, {len(stop)} stop strings"
    return [
        Row.of(section, f"batch {batch}: {part}", [us], "us")
        for batch in batch_sizes
        for part, us in measure(batch, model, stop=stop, overlap=overlap).items()
    ]


def hidden(batch_sizes: Sequence[int], device_ms: Sequence[float], model: str, stop: Sequence[str]) -> list[Row]:
    """What a step takes beyond the device's own time, without overlap and with it; shares are of the device's time."""
    section = f"host, what a step takes beyond the device's time, {len(stop)} stop strings"
    rows = []
    for batch in batch_sizes:
        for ms in device_ms:
            for name, overlap in (("off", False), ("on", True)):
                us = measure(batch, model, stop=stop, overlap=overlap, step_s=ms / 1e3)["step"] - ms * 1e3
                rows.append(
                    Row.of(section, f"batch {batch}, {ms:g} ms: overlap {name}", [us], "us", share=us / (ms * 1e3))
                )
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parse = argparse.ArgumentParser(
        prog="python -m benchmarks.step_overhead",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parse.add_argument("--batches", default="1,16,64,256")
    parse.add_argument("--model", default=MODEL)
    parse.add_argument("--stop", action="store_true", help="every request has three stop strings")
    parse.add_argument("--overlap", action="store_true", help="each step is made before the one before it is applied")
    parse.add_argument("--device-ms", default="", help="with a device that takes so long for a step: 2,4,8")
    parse.add_argument("--json", metavar="OUT", help="also write JSON here")
    options = parse.parse_args(argv)
    torch.set_num_threads(1)
    batch_sizes = [int(batch) for batch in options.batches.split(",")]
    stop = STOPS if options.stop else ()
    if options.device_ms:
        rows = hidden(batch_sizes, [float(ms) for ms in options.device_ms.split(",")], options.model, stop)
    else:
        rows = parts_of(batch_sizes, options.model, stop, overlap=options.overlap)
    publish(rows, json_path=options.json)


if __name__ == "__main__":
    main()
