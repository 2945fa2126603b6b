"""Load a server and report what its clients see: `python -m benchmarks.serving --url URL --model NAME shared-prefix`.

Works against any OpenAI-compatible server. Repeats use fresh seeds, so that no repeat finds the one before in a cache.
"""

import argparse
import asyncio
import json
import urllib.request
from collections.abc import Callable, Sequence

from benchmarks.client import Client, ClosedLoop, OpenLoop, Run
from benchmarks.report import Row, publish
from benchmarks.workloads import Workload, multi_turn, random_lengths, shared_prefix


def percentile(values: Sequence[float], q: float) -> float:
    """The ``q``-th percentile (0 to 100), linear between the two nearest ranks (numpy's default)."""
    if not values:
        raise ValueError("the percentile of no values does not exist; check that requests were answered")
    if not 0 <= q <= 100:
        raise ValueError(f"q = {q}; it must be between 0 and 100")
    ordered = sorted(values)
    rank = (len(ordered) - 1) * q / 100
    low = int(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def rows_of(workload: Workload, runs: Sequence[Run]) -> list[Row]:
    """One table: each row's runs are the repeats."""
    section = f"serving: {workload.name}"
    rows: list[Row] = []

    def add(name: str, unit: str, measure: Callable[[Run], float | None], *, note: str = "") -> None:
        values = [value for value in map(measure, runs) if value is not None]
        if values:
            rows.append(Row.of(section, name, values, unit, note=note))

    add("wall", "s", lambda run: run.wall_s)
    add("requests answered", "", lambda run: float(len(run.answered)), note=f"of {workload.num_requests}")
    add("requests failed", "", lambda run: float(sum(run.errors.values())), note=_first_error(runs))
    add("requests/s", "1/s", lambda run: len(run.answered) / run.wall_s)
    add("output tokens/s", "tok/s", lambda run: sum(s.completion_tokens for s in run.answered) / run.wall_s)
    add("prompt tokens/s", "tok/s", lambda run: sum(s.prompt_tokens for s in run.answered) / run.wall_s)
    for q in (50, 90, 99):
        add(f"TTFT p{q}", "s", _at(q, lambda run: [s.ttft_s for s in run.answered]))
    for q in (50, 90, 99):
        add(f"ITL p{q}", "s", _at(q, lambda run: [gap for s in run.answered for gap in s.gaps_s]))
    for q in (50, 90):
        add(f"TPOT p{q}", "s", _at(q, lambda run: [s.tpot_s for s in run.answered]))
    for q in (50, 99):
        add(f"end to end p{q}", "s", _at(q, lambda run: [s.e2e_s for s in run.answered]))
    add("cached prompt tokens", "%", _hit_percent, note=_hit_note(workload, runs))
    add("client CPU", "s", lambda run: run.client_cpu_s)
    return rows


def _at(q: float, values: Callable[[Run], Sequence[float | None]]) -> Callable[[Run], float | None]:
    def measure(run: Run) -> float | None:
        known = [value for value in values(run) if value is not None]
        return percentile(known, q) if known else None

    return measure


def _hit_percent(run: Run) -> float | None:
    prompt = sum(sample.prompt_tokens for sample in run.answered)
    return 100 * sum(sample.cached_tokens for sample in run.answered) / prompt if prompt else None


def _hit_note(workload: Workload, runs: Sequence[Run]) -> str:
    best = f"at best {100 * workload.reusable_tokens / workload.prompt_tokens:.1f}"
    multi = any(len(conversation.turns) > 1 for conversation in workload.conversations)
    if multi and not all(run.answers_known for run in runs):
        best += "; the server tells no token ids: answers in histories are stand-ins"
    return best


def _first_error(runs: Sequence[Run]) -> str:
    return next((error for run in runs for error in run.errors), "")


def measure(
    client: Client,
    make: Callable[[int], Workload],
    load: ClosedLoop | OpenLoop,
    *,
    repeats: int,
    seed: int,
    max_s: float,
) -> list[Row]:
    """``repeats`` runs of ``make(seed)``, ``make(seed + 1)``, ..."""
    workloads = [make(seed + repeat) for repeat in range(repeats)]
    runs = [asyncio.run(client.run(workload, load, max_s=max_s)) for workload in workloads]
    return rows_of(workloads[0], runs)


def measure_all(url: str, *, quick: bool) -> list[Row]:
    """The three workloads against ``url``, at the sizes of notes/peers.md section 8 or at small ones."""
    small = {
        "random": ["-n", "4", "--input-len", "32", "--output-len", "8"],
        "shared-prefix": ["--groups", "2", "--per-group", "2", "--prefix-len", "64", "--output-len", "4"],
        "multi-turn": ["--users", "2", "--turns", "2", "--turn-len", "16", "--output-len", "4"],
    }
    client = Client(url, first_model(url))
    rows: list[Row] = []
    for shape, sizes in small.items():
        options = parser().parse_args([shape, *(sizes if quick else [])])
        load = ClosedLoop(concurrency=options.concurrency)
        maker = workload_maker(options)
        rows += measure(client, maker, load, repeats=1 if quick else 3, seed=options.seed, max_s=options.max_s)
    return rows


def parser() -> argparse.ArgumentParser:
    parse = argparse.ArgumentParser(prog="python -m benchmarks.serving", description=__doc__)
    parse.add_argument("--url", default="http://127.0.0.1:8000", help="the server's root, without /v1")
    parse.add_argument("--model", help="model name; default: the first of /v1/models")
    parse.add_argument("--concurrency", type=int, default=16, help="closed loop: conversations at once")
    parse.add_argument("--rate", type=float, help="open loop instead: conversations a second")
    parse.add_argument("--repeat", type=int, default=1, help="runs, each with a fresh seed")
    parse.add_argument("--seed", type=int, default=0)
    parse.add_argument("--max-s", type=float, default=300.0, help="seconds a run may take; the rest is cut off")
    parse.add_argument("--vocab-size", type=int, default=32_000, help="prompts use token ids below this")
    parse.add_argument("--json", metavar="OUT", help="also write JSON here")
    shapes = parse.add_subparsers(dest="shape", required=True)
    random = shapes.add_parser("random", help="unrelated prompts")
    random.add_argument("-n", type=int, default=32)
    random.add_argument("--input-len", type=int, default=256)
    random.add_argument("--output-len", type=int, default=64)
    random.add_argument("--spread", type=float, default=0.0, help="lengths vary by this share")
    shared = shapes.add_parser("shared-prefix", help="groups that share a prefix, shuffled")
    shared.add_argument("--groups", type=int, default=8)
    shared.add_argument("--per-group", type=int, default=8)
    shared.add_argument("--prefix-len", type=int, default=1024)
    shared.add_argument("--question-len", type=int, default=64)
    shared.add_argument("--output-len", type=int, default=32)
    turns = shapes.add_parser("multi-turn", help="users who resend their history")
    turns.add_argument("--users", type=int, default=8)
    turns.add_argument("--turns", type=int, default=5)
    turns.add_argument("--turn-len", type=int, default=64)
    turns.add_argument("--output-len", type=int, default=64)
    return parse


def workload_maker(options: argparse.Namespace) -> Callable[[int], Workload]:
    """The workload that the command line asks for, by seed."""
    vocab_size, output_len = options.vocab_size, options.output_len
    match options.shape:
        case "random":
            return lambda seed: random_lengths(
                num_requests=options.n,
                input_len=options.input_len,
                output_len=output_len,
                spread=options.spread,
                vocab_size=vocab_size,
                seed=seed,
            )
        case "shared-prefix":
            return lambda seed: shared_prefix(
                num_groups=options.groups,
                per_group=options.per_group,
                prefix_len=options.prefix_len,
                question_len=options.question_len,
                output_len=output_len,
                vocab_size=vocab_size,
                seed=seed,
            )
        case _:
            return lambda seed: multi_turn(
                num_users=options.users,
                num_turns=options.turns,
                turn_len=options.turn_len,
                output_len=output_len,
                vocab_size=vocab_size,
                seed=seed,
            )


def main(argv: Sequence[str] | None = None) -> None:
    options = parser().parse_args(argv)
    client = Client(options.url, options.model or first_model(options.url))
    load = ClosedLoop(concurrency=options.concurrency) if options.rate is None else OpenLoop(rate=options.rate)
    rows = measure(
        client, workload_maker(options), load, repeats=options.repeat, seed=options.seed, max_s=options.max_s
    )
    publish(rows, json_path=options.json)


def first_model(url: str) -> str:
    with urllib.request.urlopen(url.rstrip("/") + "/v1/models", timeout=10) as response:
        return str(json.load(response)["data"][0]["id"])


if __name__ == "__main__":
    main()
