"""Token ids of a seeded trace through the engine, to hold a change against: a refactor shows the same ids.

    python -m benchmarks.token_ids --write before.json     at the commit before
    python -m benchmarks.token_ids --check before.json     after the change; exits 1 where an id differs

The trace: unrelated prompts, groups that share a prefix, and conversations that resend their history; prompts longer
than a chunk; every second request greedy, the others drawn with a seed. Prompts are random ids: their answers are less
certain than those of a text, so that even another order of summing may show. It says then where, not which is right.
"""

import argparse
import json
import pathlib
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from itertools import zip_longest
from typing import Any

import numpy as np

from benchmarks.harness import MODEL
from benchmarks.workloads import Workload, multi_turn, random_lengths, shared_prefix
from replicas.config import CacheConfig, SchedulerConfig
from replicas.engine.engine import Engine
from replicas.launch import EngineSettings, load_engine
from replicas.types import GenerateRequest, SamplingParams

CHUNK = 128  # tokens of a prefill step; half of the prompts are longer
Ids = Mapping[str, Sequence[int]]  # by request: "<workload>, <conversation>.<turn>"


def workloads(vocab_size: int, seed: int) -> list[Workload]:
    """Return the trace."""
    return [
        random_lengths(num_requests=10, input_len=150, output_len=24, spread=0.8, vocab_size=vocab_size, seed=seed),
        shared_prefix(
            num_groups=2, per_group=5, prefix_len=200, question_len=20, output_len=16, vocab_size=vocab_size, seed=seed
        ),
        multi_turn(num_users=4, num_turns=3, turn_len=40, output_len=16, vocab_size=vocab_size, seed=seed),
    ]


def make_trace(model: str, *, num_threads: int, seed: int = 0) -> dict[str, list[int]]:
    """Return all answers of the trace."""
    settings = EngineSettings(
        model=model, cache=CacheConfig(max_total_tokens=8192), num_threads=num_threads,
        scheduler=SchedulerConfig(chunked_prefill_size=CHUNK, max_running_requests=8),
    )  # fmt: skip
    made: dict[str, list[int]] = {}
    with closing(load_engine(settings)) as engine:
        for workload in workloads(engine.config.model.vocab_size, seed):
            made |= answers(engine, workload)
    return made


def answers(engine: Engine, workload: Workload) -> dict[str, list[int]]:
    """Return one workload's ids. Turn by turn, a turn of all conversations at once."""
    made: dict[str, list[int]] = {}
    history: dict[str, list[int]] = {conversation.name: [] for conversation in workload.conversations}
    for turn in range(max(len(conversation.turns) for conversation in workload.conversations)):
        names = {}
        for index, conversation in enumerate(workload.conversations):
            asked = conversation.turns[turn]
            history[conversation.name] += asked.token_ids
            name = f"{workload.name}, {conversation.name}.{turn}"
            names[name], made[name] = conversation.name, []
            prompt = np.array(history[conversation.name], dtype=np.int32)
            drawn: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "top_k": 50, "seed": index}
            how = drawn if index % 2 else {"temperature": 0.0}
            sampling = SamplingParams(max_new_tokens=asked.max_new_tokens, ignore_eos=True, **how)
            engine.submit(GenerateRequest(rid=name, token_ids=prompt, sampling=sampling))
        while engine.has_work:
            for delta in engine.step():
                made[delta.rid] += delta.token_ids
        for name, conversation_name in names.items():
            history[conversation_name] += made[name]
    return made


def differences(before: Ids, now: Ids) -> dict[str, tuple[int, int | None, int | None]]:
    """Return by request whose ids are not the same the position of the first that differs, its id before and now."""
    found = {}
    for name in sorted(before.keys() | now.keys()):
        pairs = zip_longest(before.get(name, ()), now.get(name, ()))
        if differing := [(position, *pair) for position, pair in enumerate(pairs) if pair[0] != pair[1]]:
            found[name] = differing[0]
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parse = argparse.ArgumentParser(
        prog="python -m benchmarks.token_ids", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parse.add_argument("--model", default=MODEL)
    parse.add_argument("--threads", type=int, default=2)
    what = parse.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", metavar="FILE", type=pathlib.Path, help="keep the ids")
    what.add_argument("--check", metavar="FILE", type=pathlib.Path, help="compare with ids that were kept")
    options = parse.parse_args(argv)
    made = make_trace(options.model, num_threads=options.threads)
    if options.write is not None:
        options.write.write_text(json.dumps(made))
        print(f"{len(made)} requests, {sum(map(len, made.values()))} ids written to {options.write}")
        return
    found = differences(json.loads(options.check.read_text()), made)
    for name, (position, before, now) in found.items():
        print(f"{name}: token {position} was {before}, is {now}")
    print(f"{len(made) - len(found)} of {len(made)} requests have the same ids")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
