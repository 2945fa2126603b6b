"""What a step costs the host beside the model, and what arriving prompts do to answers that are being written.

`host`: the engine is whole (scheduler, pools, tokenizer, text), the device is not there: a launch builds the step's
tensors on the CPU and returns tokens made up beforehand. ``step`` is all of `Engine.step` and the delivery to a sink;
its parts do not add up to it. Medians over steps. With ``--device-ms`` a device runs one step after another, each for
so long, and the table says what a step takes beyond that, with overlap off and on.

`mixed`: some chats write; once all do, prompts arrive at a fixed rate, each with a short answer. Measured, from the
first arrival until the last prompt is answered: the time between two tokens of a chat (ITL), each prompt's first token
(TTFT), and the tokens that the chats got a second. ``--ways`` are tokens of a step: ``first512`` lets prompts go
first, in steps of 512 tokens; ``mixed256`` runs a token of each chat in every step of at most 256 tokens
(``chunked_prefill_size`` is 512 then: it is halved while others run). The ways alternate, round by round, over other
prompts each, from empty caches. Expected: with prompts first, a chat waits for all prompts that overlap, and its
longest gap grows with their number; mixed, a gap is one step, which takes as long as its chunk. Half a chunk halves
the gap and costs prefill rate.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field

import numpy as np
import torch

from benchmarks.driver import prompts, request, watched
from benchmarks.harness import Row, Table, in_turn, percentile, rounds_of
from benchmarks.limits import FORMATS
from replicas.cache.kv import KvCache
from replicas.config import CacheConfig, Hardware, SchedulerConfig
from replicas.engine.engine import Engine, Executor
from replicas.engine.sinks import Sinks
from replicas.launch import EngineSettings, load_engine
from replicas.resolve import resolve
from replicas.runner import batch as batches
from replicas.runner.batch import Staging
from replicas.runner.model_files import load_model_config
from replicas.scheduler.plan import PendingStep, StepPlan, StepResult
from replicas.text.tokenizer import Tokenizer
from replicas.types import GenerateRequest, SamplingParams

PROMPT_LEN = 64
NUM_STEPS = 150  # counted, after as many that are not: lazily made things are made by then
FIRST_WORD = 17  # ids below it are the model's special tokens
SLEEP_LATE_S = 100e-6  # a sleep ends later than asked for; the rest is waited for awake
STOPS = ("\n\nUser:", "<|endoftext|>", "Observation:")  # never in random tokens, but their beginnings are
CHAT_PROMPT = 64  # tokens
ANSWER = 4  # tokens of the prompts that arrive


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A step whose result is there at ``done_s``; waiting for it lets other threads run."""

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
        device = torch.device("cpu")
        self._table, self._staging = batches.DeviceTable(num_rows, row_len, device), Staging(device)
        self._tokens = np.random.default_rng(0).integers(FIRST_WORD, vocab_size, 1 << 20).astype(np.int32)
        self._next = 0

    def launch(self, plan: StepPlan) -> PendingStep:
        self.build(plan)
        num = len(plan.sampling)
        self._next = (self._next + num) % (len(self._tokens) // 2)
        self._free_s = max(self._free_s, time.perf_counter()) + self._step_s
        return TimedStep(StepResult(token_ids=self._tokens[self._next : self._next + num]), self._free_s)

    def build(self, plan: StepPlan) -> object:
        return batches.build(plan, self._table, self._staging)


def make_engine(batch: int, model: str, *, overlap: bool, step_s: float = 0.0) -> tuple[Engine, NoDevice]:
    """Return an engine of ``batch`` requests at most, and the device that is not there."""
    scheduler = SchedulerConfig(
        max_running_requests=batch, chunked_prefill_size=8192, overlap="on" if overlap else "off"
    )
    config = resolve(
        load_model_config(model, context_len=1024),
        Hardware(device="cpu", num_cpus=1, available_memory_bytes=1 << 33),
        cache=CacheConfig(device_memory_bytes=1 << 30),
        scheduler=scheduler,
    )
    page_size, context_len = config.cache.page_size, config.model.context_len
    num_pages = batch * (-(-(PROMPT_LEN + 2 * NUM_STEPS + 64) // page_size) + 1)
    kv = KvCache(num_pages=num_pages, page_size=page_size, max_requests=batch, context_len=context_len)
    device = NoDevice(batch + 1, context_len + 4, config.model.vocab_size, step_s=step_s)
    tokenizer = Tokenizer(config.model.path)
    executor = Executor(launch=device.launch)
    return Engine(config, kv=kv, max_running=batch, executor=executor, tokenizer=tokenizer), device


def step_us(
    batch: int, model: str, *, stop: Sequence[str] = (), overlap: bool = False, step_s: float = 0.0
) -> dict[str, float]:
    """Return the median microseconds of a decode step, by part."""
    engine, device = make_engine(batch, model, overlap=overlap, step_s=step_s)
    sinks = Sinks()
    params = SamplingParams(max_new_tokens=2 * NUM_STEPS + 32, temperature=0.0, ignore_eos=True, stop=tuple(stop))
    for number in range(batch):
        prompt = np.random.default_rng(number).integers(FIRST_WORD, 40_000, PROMPT_LEN).astype(np.int32)
        asked = GenerateRequest(rid=f"request-{number}", token_ids=prompt, sampling=params)
        sinks.open(asked, lambda deltas: None, lambda: None, max_waiting=batch, max_running=batch)
        engine.submit(asked)
    while len(engine.scheduler.queues.running) < batch:
        engine.step()
    scheduler = engine.scheduler
    calls = {
        "schedule": [(scheduler, "schedule"), (scheduler, "schedule_ahead")],
        "build": [(device, "build")],
        "apply": [(scheduler, "apply")],
        "text": [(engine, "_push")],
        "deliver": [(sinks, "deliver")],
    }
    times: dict[str, list[float]] = {name: [] for name in (*calls, "step")}
    with ExitStack() as stack:
        watches = {name: stack.enter_context(watched(*each)) for name, each in calls.items()}
        for _ in range(2 * NUM_STEPS):
            before = {name: watch.total_s for name, watch in watches.items()}
            started_s = time.perf_counter()
            sinks.deliver(engine.step())
            times["step"].append(time.perf_counter() - started_s)
            for name, watch in watches.items():
                times[name].append(watch.total_s - before[name])
    return {name: 1e6 * statistics.median(each[NUM_STEPS:]) for name, each in times.items()}


def host_rows(options: argparse.Namespace) -> list[Row]:
    """Measure each part of a step and all of it, or what is left beyond a device's time."""
    torch.set_num_threads(1)
    stop = STOPS if options.stop else ()
    if not options.device_ms:
        overlap = "on" if options.overlap else "off"
        table = Table(f"host, a decode step without a device, overlap {overlap}, {len(stop)} stop strings")
        for batch in (1, 16) if options.quick else options.batches:
            for part, us in step_us(batch, options.model, stop=stop, overlap=options.overlap).items():
                table.add(f"batch {batch}: {part}", [us], "us")
        return table.rows
    table = Table(f"host, what a step takes beyond the device's time, {len(stop)} stop strings")
    for batch in options.batches:
        for ms in options.device_ms:
            for name, overlap in (("off", False), ("on", True)):
                took = step_us(batch, options.model, stop=stop, overlap=overlap, step_s=ms / 1e3)["step"] - ms * 1e3
                table.add(f"batch {batch}, {ms:g} ms: overlap {name}", [took], "us", share=took / (ms * 1e3))
    return table.rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What arrives beside the chats."""

    chats: int
    prompts: int
    prompt_len: int  # tokens
    rate: float  # prompts a second


@dataclass(slots=True)
class Gaps:
    """What one way gave in one round, in seconds."""

    gaps_s: list[float] = field(default_factory=list)  # of all chats
    ttfts_s: list[float] = field(default_factory=list)
    chat_tokens_per_s: float = 0.0
    took_s: float = 0.0


def parse_way(way: str) -> tuple[bool, int]:
    """Return whether steps mix, and ``chunked_prefill_size``. Raises: ValueError."""
    for word, mixed in (("first", False), ("mixed", True)):
        if way.startswith(word) and way[len(word) :].isdigit():
            return mixed, int(way[len(word) :]) * (2 if mixed else 1)
    raise ValueError(f"{way!r} is no way: write first or mixed and a number of tokens, as in mixed256")


def gaps_of(engine: Engine, load: Load, seed: int) -> Gaps:
    """Run the load to its end; the chats are aborted then."""
    engine.flush_cache()
    found = Gaps()
    for i, ids in enumerate(prompts(engine, load.chats, CHAT_PROMPT, seed)):
        engine.submit(request(ids, 2000, rid=f"chat{i}"))
    while len(engine.scheduler.queues.running) < load.chats or len(engine.scheduler.queues.waiting):
        engine.step()
    arriving = prompts(engine, load.prompts, load.prompt_len, seed + 1000)
    started_s = time.perf_counter()
    due_s = {f"prompt{i}": started_s + i / load.rate for i in range(load.prompts)}
    waiting, first_s, num_open = list(zip(due_s, arriving, strict=True)), dict[str, float](), load.prompts
    last_s, num_tokens = {f"chat{i}": started_s for i in range(load.chats)}, 0
    while num_open:
        while waiting and due_s[waiting[0][0]] <= time.perf_counter():
            rid, ids = waiting.pop(0)
            engine.submit(request(ids, ANSWER, rid=rid))
        for delta in engine.step():
            now_s = time.perf_counter()
            if delta.rid in last_s:
                found.gaps_s.append(now_s - last_s[delta.rid])
                last_s[delta.rid] = now_s
                num_tokens += len(delta.token_ids)
            else:
                first_s.setdefault(delta.rid, now_s)
                num_open -= delta.finish is not None
    found.took_s = time.perf_counter() - started_s
    found.chat_tokens_per_s = num_tokens / found.took_s
    found.ttfts_s = [first_s[rid] - due for rid, due in due_s.items()]
    for rid in last_s:
        engine.abort(rid)
    return found


def gap_rows(load: Load, found: dict[str, list[Gaps]]) -> list[Row]:
    """Return each way's figures over its rounds."""
    prompts = f"{load.prompts} prompts of {load.prompt_len} tokens, {load.rate:g} a second"
    table = Table(f"prompts beside answers being written: {load.chats} chats, {prompts}")
    for way, rounds in found.items():
        for share, name in ((50, "p50"), (99, "p99"), (100, "longest")):
            table.add(f"{way}: ITL {name}", [1000 * percentile(each.gaps_s, share) for each in rounds], "ms")
        table.add(f"{way}: TTFT p50", [percentile(each.ttfts_s, 50) for each in rounds], "s")
        table.add(f"{way}: TTFT longest", [max(each.ttfts_s) for each in rounds], "s")
        table.add(f"{way}: tokens of chats", [each.chat_tokens_per_s for each in rounds], "tokens/s")
        table.add(f"{way}: until all prompts are answered", [each.took_s for each in rounds], "s")
    return table.rows


def mixed_rows(options: argparse.Namespace) -> list[Row]:
    """Measure every way, in turn."""
    load = Load(chats=options.chats, prompts=options.prompts, prompt_len=options.prompt_len, rate=options.rate)
    if options.quick:
        load = Load(chats=2, prompts=2, prompt_len=200, rate=2.0)
    engines, cache = dict[str, Engine](), CacheConfig(max_total_tokens=32_768)
    with ExitStack() as stack:
        for way in options.ways.split(","):
            mixed, chunk = parse_way(way)
            scheduler = SchedulerConfig(chunked_prefill_size=chunk, mixed_steps=mixed, max_running_requests=64)
            engine = load_engine(
                EngineSettings(model=options.model, cache=cache, scheduler=scheduler, num_threads=options.threads)
            )
            engines[way] = stack.enter_context(closing(engine))
        found: dict[str, list[Gaps]] = {way: [] for way in engines}
        for round_, way in in_turn(engines, rounds_of(options, 2)):
            found[way].append(gaps_of(engines[way], load, options.seed + round_))
    return gap_rows(load, found)


def add_options(parse: argparse.ArgumentParser) -> None:
    """Add the options of both parts."""
    add = parse.add_argument
    add("--batches", type=int, nargs="+", default=[1, 16, 64, 256], help="host: requests of a step")
    add("--stop", action="store_true", help="host: every request has three stop strings")
    add("--overlap", action="store_true", help="host: each step is made before the one before it is applied")
    add("--device-ms", type=float, nargs="+", help="host: a device's time for a step, as in 2 4 8")
    add("--ways", default="first512,mixed512,mixed256,mixed128", help="mixed: which, separated by commas")
    add("--chats", type=int, default=8, help="mixed: answers being written")
    add("--prompts", type=int, default=5, help="mixed: prompts that arrive")
    add("--prompt-len", type=int, default=1000)
    add("--cpu", action="store_true", help="drafts: count seconds of the CPU, of one thread")
    add("--works", default="", help="drafts: the workloads with these letters in their name")
    add("--formats", default=";".join(FORMATS), help="adapters: of the model's weights, separated by semicolons")
    kept = ("float32", "bfloat16")
    add("--kept", nargs="+", choices=kept, default=kept, help="adapters: what their numbers are kept in")
    add("--rate", type=float, default=0.5, help="mixed: prompts a second")
