"""Drafts on and off: tokens a second of answers that repeat what is at hand, and of those that do not.

One engine, the two sides in turn, each from an empty cache, or behind the same answer. ``rewrite``, ``quotes``,
``JSON`` and ``again`` are given: whatever the model draws, the next token is that of the text that an able one would
write, for the embedded model can do none. The others are the model's own; greedy, it soon repeats itself, which
flatters drafts: the tokens of such loops are told apart. A step counts from the first token on. With ``--cpu``, on a
machine that others use too, seconds are those of the CPU, of one thread.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks import driver, harness
from benchmarks.harness import Row, Table
from replicas.config import CacheConfig, SchedulerConfig
from replicas.engine.engine import Engine
from replicas.launch import EngineSettings, load_engine
from replicas.scheduler.plan import SampleRow
from replicas.types import Constraint, GenerateRequest, SamplingParams, TokenIds

FILE, BOOK = Path(__file__).with_name("limits.py"), Path(__file__).with_name("texts") / "alice.txt"
POOL_TOKENS = 16_384
MOST_PERIOD, LOOP = 64, 16  # a loop: so many tokens, or a period of them, as those one period before
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
SEEDED = replace(GREEDY, temperature=0.8, top_p=0.95, seed=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What is asked, and what drafts are to gain."""

    prompts: Sequence[TokenIds]
    sampling: SamplingParams
    target: str
    given: TokenIds | None = None  # the answer, where it is not the model's own
    again: bool = False  # it is asked a second time, and that counts


def draft_rows(options: argparse.Namespace) -> list[Row]:
    """Measure each workload with drafts and without, in turn."""
    clock = time.process_time if options.cpu else time.monotonic
    settings = EngineSettings(
        model=options.model, cache=CacheConfig(max_total_tokens=POOL_TOKENS),
        num_threads=1 if options.cpu else options.threads,
        scheduler=SchedulerConfig(drafts="on"), clock=clock,
    )
    rows: list[Row] = []
    with closing(load_engine(settings)) as engine:
        for name, work in workloads(engine, quick=options.quick).items():
            if options.works in name:
                rows += _measured(engine, name, work, harness.rounds_of(options, 3), clock)
                harness.say(f"{rows[-1].value:.2f} x: {name}; {rows[-1].note}")
    return rows


def workloads(engine: Engine, *, quick: bool) -> dict[str, Work]:
    """Make the workloads by name."""
    encode, length = engine.tokenizer.encode, 32 if quick else 200
    file = FILE.read_text()
    old, new = encode(file)[: 3 * length], encode(file.replace("seconds", "duration_s"))[: 3 * length]
    book = encode(BOOK.read_text())
    text, other = book[: 4 * length], book[-2 * length :]
    quotes = [part for at in range(0, length, 40) for part in (other[at : at + 12], text[2 * at + 60 : 2 * at + 90])]
    chat = encode("<|im_start|>user\nWhat should I see in Lisbon in two days?<|im_end|>\n<|im_start|>assistant\n")
    extract = json_out_of(engine, BOOK.read_text()[:5_000], 2 if quick else 6)
    many = [book[60 * at : 60 * at + 64] for at in range(4 if quick else 32)]
    prompt = encode("Rewrite this file and rename one name.\n")
    most = replace(GREEDY, max_new_tokens=length)
    return {
        "rewrite of a given file with one change": Work(
            prompts=[np.concatenate([prompt, old])], given=new, sampling=replace(GREEDY, max_new_tokens=len(new)),
            target=">= 3 x",
        ),
        "quotes out of a document": Work(
            prompts=[text], given=np.concatenate(quotes), target=">= 1.8 x",
            sampling=replace(GREEDY, max_new_tokens=sum(map(len, quotes))),
        ),
        "JSON out of a text, by a schema": extract,
        "the same prompt again, temperature 0": Work(
            prompts=[chat], given=other, sampling=replace(GREEDY, max_new_tokens=length), target=">= 4 x", again=True
        ),
        "a chat, greedy": Work(prompts=[chat], sampling=most, target=">= 0.99 x"),
        "a chat, temperature 0.8": Work(
            prompts=[chat], sampling=replace(SEEDED, max_new_tokens=length), target=">= 0.99 x"
        ),
        f"{len(many)} at once, temperature 0.8": Work(
            prompts=many, sampling=replace(SEEDED, max_new_tokens=length // 4), target=">= 0.99 x"
        ),
    }  # fmt: skip


def _measured(engine: Engine, name: str, work: Work, rounds: int, clock: Callable[[], float]) -> list[Row]:
    drafts, counters = engine.scheduler.drafts, engine.scheduler.counters
    assert drafts is not None, "scheduler.drafts is off here"
    sides, table = {"off": None, "on": drafts}, Table(name)
    rates: dict[str, list[float]] = {side: [] for side in sides}
    answers, steps = dict[str, list[list[int]]](), 0
    tried, right = sum(counters.drafted_tokens.values()), sum(counters.accepted_tokens.values())
    for round_, side in harness.in_turn(sides, rounds + 1):
        engine.scheduler.drafts = None
        engine.flush_cache()
        engine.scheduler.drafts = sides[side]
        if work.again:
            _answered(engine, work, clock)
        before = engine.stats().num_decode_steps
        rate, answers[side] = _answered(engine, work, clock)
        if round_:  # the first warms up
            rates[side].append(rate)
            steps += (engine.stats().num_decode_steps - before) * (side == "on")
    engine.scheduler.drafts = drafts
    tried, right = sum(counters.drafted_tokens.values()) - tried, sum(counters.accepted_tokens.values()) - right
    made = answers["on"]
    num_tokens = rounds * sum(len(ids) - 1 for ids in made)
    looped = sum(sum(in_loop(ids)) for ids in made) / sum(map(len, made))
    note = (
        f"{num_tokens / max(steps, 1):.1f} tokens a step, {right} of {tried} drafted came true, "
        f"{looped:.0%} of the tokens in loops, answers {'equal' if answers['on'] == answers['off'] else 'DIFFER'}"
    )
    for side, values in rates.items():
        table.add(f"drafts {side}", values, "tok/s")
    gains = [on / off for on, off in zip(rates["on"], rates["off"], strict=True)]
    table.add("on / off", gains, "x", target=work.target, note=note)
    return table.rows


def _answered(engine: Engine, work: Work, clock: Callable[[], float]) -> tuple[float, list[list[int]]]:
    """Return the tokens a second from each answer's first token on, and the answers."""
    with _given(engine, work):
        for number, prompt in enumerate(work.prompts):
            engine.submit(GenerateRequest(rid=f"{number}", token_ids=prompt, sampling=work.sampling))
        made: dict[str, list[int]] = {f"{number}": [] for number in range(len(work.prompts))}
        num_before, started_s = 0, 0.0
        while engine.has_work:
            for delta in engine.step():
                made[delta.rid] += delta.token_ids
            if not started_s and all(made.values()):
                num_before, started_s = sum(map(len, made.values())), clock()
        taken_s = clock() - started_s
    return (sum(map(len, made.values())) - num_before) / taken_s, list(made.values())


def json_out_of(engine: Engine, text: str, num_quotes: int) -> Work:
    """Make the work of quoting some sentences of ``text`` in an object of a schema. What the grammar forces is taken in
    the tokens in which it forces it."""
    words = text.replace('"', "'").split()
    quotes = [" ".join(words[at : at + 24]) for at in range(60, 60 * num_quotes + 1, 60)]
    names = [f"passage_{number}" for number in range(num_quotes)]
    schema = {"type": "object", "properties": {name: {"type": "string"} for name in names}, "required": names}
    constraint = Constraint(kind="json_schema", text=json.dumps(schema | {"additionalProperties": False}))
    place, encode = engine.grammars.compiler.compile(constraint).copy(), engine.tokenizer.encode
    rest, given = json.dumps(dict(zip(names, quotes, strict=True)), ensure_ascii=False), list[int]()
    while rest:
        forced = place.forced()
        given.append(int(encode(rest)[0]) if forced is None else forced)
        assert place.consume(given[-1]), place.error
        rest = rest[len(engine.tokenizer.decode(given[-1:])) :]
    sampling = replace(GREEDY, max_new_tokens=len(given), constraint=constraint)
    prompt = encode(" ".join(words) + "\nQuote passages of this text as JSON.\n")
    return Work(prompts=[prompt], sampling=sampling, target=">= 1.8 x", given=np.array(given, dtype=np.int32))


@contextmanager
def _given(engine: Engine, work: Work) -> Iterator[None]:
    """Let each row be the given answer's token of its position, where there is one; it is sampled all the same."""
    sampler, given = driver.runner_of(engine)._sampler, work.given
    if given is None:
        yield
        return
    first = len(work.prompts[0])

    def sample(logits: object, rows: Sequence[SampleRow]) -> object:
        type(sampler).sample(sampler, logits, rows)  # type: ignore[arg-type]
        return given[[row.position - first for row in rows]], ()

    sampler.sample = sample  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del sampler.sample


def in_loop(token_ids: Sequence[int]) -> list[bool]:
    """Tell of each token whether it and those before it only repeat what came a period before."""
    ids = np.array(token_ids)
    found = np.zeros(len(ids), dtype=bool)
    for period in range(1, min(MOST_PERIOD, len(ids))):
        same = np.concatenate([np.zeros(period, dtype=int), ids[period:] == ids[:-period]])
        run = 0
        for at, one in enumerate(same.tolist()):
            run = run + 1 if one else 0
            found[at] |= run >= max(LOOP, period)
    return found.tolist()
