"""What arriving prompts do to answers being written, one engine, no HTTP: `python -m benchmarks.mixed_steps`.

Some chats write; once all do, prompts arrive at a fixed rate, each with a short answer. Measured, from the first
arrival until the last prompt is answered: the time between two tokens of a chat (ITL), each prompt's first token
(TTFT), and the tokens that the chats got a second. ``--ways`` are tokens of a step: ``first512`` lets prompts go first,
in steps of 512 tokens; ``mixed256`` runs a token of each chat in every step of at most 256 tokens
(``chunked_prefill_size`` is 512 then: it is halved while others run). They alternate, round by round, over other
prompts each; what an engine has cached is forgotten in between.

What to expect. Prompts first: a chat waits for all prompts that overlap, its longest gap grows with their number.
Mixed: a gap is one step, which takes as long as its chunk; a chunk half as long halves the gap and costs prefill rate,
since each step also reads all weights and all chats' K and V once.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.report import Row, publish
from benchmarks.serving import percentile
from benchmarks.workloads import random_lengths
from replicas.config import CacheConfig, SchedulerConfig
from replicas.engine.engine import Engine
from replicas.launch import load_engine
from replicas.types import GenerateRequest, SamplingParams

MODEL = "models/SmolLM2-135M-Instruct"
SECTION = "prompts beside answers being written"
CHAT_PROMPT = 64  # tokens
ANSWER = 4  # tokens of the prompts that arrive


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What arrives."""

    chats: int
    prompts: int
    prompt_len: int  # tokens
    rate: float  # prompts a second


@dataclass(slots=True)
class Measured:
    """One way in one round. Times in seconds."""

    gaps_s: list[float] = field(default_factory=list)  # of all chats
    ttfts_s: list[float] = field(default_factory=list)
    chat_tokens_per_s: float = 0.0
    took_s: float = 0.0


def parse_way(way: str) -> tuple[bool, int]:
    """Whether steps mix, and ``chunked_prefill_size``. Raises: ValueError."""
    for word, mixed in (("first", False), ("mixed", True)):
        if way.startswith(word) and way[len(word) :].isdigit():
            return mixed, int(way[len(word) :]) * (2 if mixed else 1)
    raise ValueError(f"{way!r} is no way: write first or mixed and a number of tokens, as in mixed256")


def make_engine(way: str, *, num_threads: int) -> Engine:
    mixed, chunk = parse_way(way)
    return load_engine(
        MODEL,
        cache=CacheConfig(max_total_tokens=32_768),
        scheduler=SchedulerConfig(chunked_prefill_size=chunk, mixed_steps=mixed, max_running_requests=64),
        num_threads=num_threads,
    )


def measure(engine: Engine, load: Load, seed: int) -> Measured:
    """Run the load to its end; the chats are aborted then."""
    engine.flush_cache()
    vocab_size, found = engine.config.model.vocab_size, Measured()
    for i, ids in enumerate(_prompts(load.chats, CHAT_PROMPT, vocab_size, seed)):
        engine.submit(_ask(f"chat{i}", ids, 2000))
    while len(engine.scheduler.queues.running) < load.chats or len(engine.scheduler.queues.waiting):
        engine.step()
    prompts = _prompts(load.prompts, load.prompt_len, vocab_size, seed + 1000)
    started_s = time.perf_counter()
    due_s = {f"prompt{i}": started_s + i / load.rate for i in range(load.prompts)}
    waiting, first_s, num_open = list(zip(due_s, prompts, strict=True)), dict[str, float](), load.prompts
    last_s, num_tokens = {f"chat{i}": started_s for i in range(load.chats)}, 0
    while num_open:
        while waiting and due_s[waiting[0][0]] <= time.perf_counter():
            rid, ids = waiting.pop(0)
            engine.submit(_ask(rid, ids, ANSWER))
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


def rows_of(load: Load, found: dict[str, list[Measured]]) -> list[Row]:
    section = (
        f"{SECTION}: {load.chats} chats, {load.prompts} prompts of {load.prompt_len} tokens, {load.rate:g} a second"
    )
    rows = []
    for way, rounds in found.items():
        for share, name in ((50, "p50"), (99, "p99"), (100, "longest")):
            values = [1000 * percentile(each.gaps_s, share) for each in rounds]
            rows.append(Row.of(section, f"{way}: ITL {name}", values, "ms"))
        rows.append(Row.of(section, f"{way}: TTFT p50", [percentile(each.ttfts_s, 50) for each in rounds], "s"))
        rows.append(Row.of(section, f"{way}: TTFT longest", [max(each.ttfts_s) for each in rounds], "s"))
        rows.append(Row.of(section, f"{way}: tokens of chats", [each.chat_tokens_per_s for each in rounds], "tokens/s"))
        rows.append(Row.of(section, f"{way}: until all prompts are answered", [each.took_s for each in rounds], "s"))
    return rows


def _prompts(count: int, length: int, vocab_size: int, seed: int) -> list[np.ndarray]:
    load = random_lengths(num_requests=count, input_len=length, output_len=1, vocab_size=vocab_size, seed=seed)
    return [np.array(conversation.turns[0].token_ids, dtype=np.int32) for conversation in load.conversations]


def _ask(rid: str, ids: np.ndarray, length: int) -> GenerateRequest:
    sampling = SamplingParams(max_new_tokens=length, temperature=0.0, ignore_eos=True)
    return GenerateRequest(rid=rid, token_ids=ids, sampling=sampling)


def main(argv: Sequence[str] | None = None) -> None:
    parse = argparse.ArgumentParser(
        prog="python -m benchmarks.mixed_steps",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parse.add_argument("--ways", default="first512,mixed512,mixed256,mixed128", help="which, separated by commas")
    parse.add_argument("--rounds", type=int, default=2)
    parse.add_argument("--chats", type=int, default=8)
    parse.add_argument("--prompts", type=int, default=5)
    parse.add_argument("--prompt-len", type=int, default=1000)
    parse.add_argument("--rate", type=float, default=0.5, help="prompts a second")
    parse.add_argument("--threads", type=int, default=2)
    parse.add_argument("--seed", type=int, default=0)
    parse.add_argument("--json", metavar="OUT", help="also write JSON here")
    options = parse.parse_args(argv)
    load = Load(chats=options.chats, prompts=options.prompts, prompt_len=options.prompt_len, rate=options.rate)
    engines = {way: make_engine(way, num_threads=options.threads) for way in options.ways.split(",")}
    found: dict[str, list[Measured]] = {way: [] for way in engines}
    for round_ in range(options.rounds):
        for way in list(engines) if round_ % 2 == 0 else list(reversed(engines)):
            found[way].append(measure(engines[way], load, options.seed + round_))
    for engine in engines.values():
        engine.close()
    publish(rows_of(load, found), json_path=options.json)


if __name__ == "__main__":
    main()
