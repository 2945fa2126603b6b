"""`make bench-peers`: Manta and other systems on the same machine, model, client and workloads, in one run.

    python -m benchmarks.peers                                    all systems, all workloads, two rounds
    python -m benchmarks.peers --quick                            small workloads, one round: a check
    python -m benchmarks.peers --system manta --system vllm --cell random-8
    python -m benchmarks.peers --only-install

One server runs at a time; each round starts every system anew, in turn, the second in the opposite order. A round's
workloads are the same tokens for all; another round has others. What cannot be installed, does not start, or does not
finish within its time is reported with the reason. Exit status 1: two systems that compute in fp32 differ in a greedy
answer. `elsewhere s` is CPU time that neither the server nor the client took: numbers with much of it are worth little.
"""

import argparse
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TypeVar

from benchmarks.harness import machine_facts, to_json
from benchmarks.peers.answers import compare
from benchmarks.peers.cells import FULL, QUICK
from benchmarks.peers.compare import Comparison, Plan
from benchmarks.peers.install import PEERS, InstallFailed, ensure
from benchmarks.peers.systems import MODEL, Place, systems
from benchmarks.peers.table import reasons, table
from benchmarks.peers.words import Words

T = TypeVar("T")
OURS = "manta"  # the start of our systems' names


def parser() -> argparse.ArgumentParser:
    parse = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ", ".join(cell.name for cell in FULL)
    parse.add_argument("--system", action="append", metavar="NAME", help="only this one; may be given again")
    parse.add_argument("--cell", action="append", metavar="NAME", help=f"only this workload, of {names}")
    parse.add_argument("--rounds", type=int, help="starts of each system; 2, or 1 with --quick")
    parse.add_argument("--repeats", type=int, default=1, help="runs of each workload in a round")
    parse.add_argument("--max-s", type=float, help="seconds for each workload, instead of its own limit")
    parse.add_argument("--install-s", type=float, default=3600.0, help="seconds that each installation may take")
    parse.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each server; all cores")
    parse.add_argument("--seed", type=int, default=0)
    parse.add_argument("--quick", action="store_true", help="small workloads, one round: a check, not a measurement")
    parse.add_argument("--only-install", action="store_true", help="install what is missing, and leave")
    parse.add_argument("--json", metavar="OUT", help="also write every run here")
    return parse


def main(argv: Sequence[str] | None = None) -> int:
    parse = parser()
    options = parse.parse_args(argv)
    words = Words(MODEL)
    chosen = _chosen(parse, systems(words), options.system, "system")
    cells = _chosen(parse, {cell.name: cell for cell in (QUICK if options.quick else FULL)}, options.cell, "workload")
    if options.max_s is not None:
        cells = [replace(cell, max_s=options.max_s) for cell in cells]
    plan = Plan(
        systems=chosen,
        cells=cells,
        rounds=options.rounds or (1 if options.quick else 2),
        repeats=options.repeats,
        seed=options.seed,
    )
    comparison = Comparison(plan, words, Place(threads=options.threads, logs=PEERS / "logs"), _say)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: what runs is stopped, what there is reported
    for system in chosen:
        if system.recipe is not None:
            try:
                ensure(system.recipe, limit_s=options.install_s)
            except InstallFailed as error:
                comparison.miss(system.name, f"not installed: {error}")
    if options.only_install:
        return 1 if comparison.book.absent else 0
    try:
        comparison.run()
    except KeyboardInterrupt:
        _say("interrupted; this was measured until now")
    finally:  # whatever went wrong, what was measured is not lost
        status = _report(comparison, plan, options)
    return status


def _report(comparison: Comparison, plan: Plan, options: argparse.Namespace) -> int:
    book = comparison.book
    names = [system.name for system in plan.systems]
    sentences, agreed = compare(comparison.answers, [system.name for system in plan.systems if system.exact])
    facts = machine_facts()
    print(f"{facts['cpu']}, {options.threads} threads, one server at a time; medians (least..most)")
    for system in plan.systems:
        print(f"  {system.name}: {system.settings}")
    for cell in plan.cells:
        print(f"  {cell.name}: {cell.title}")
    print("", table(book, plan.cells, names, [name for name in names if name.startswith(OURS)]), "", sep="\n")
    notes = [*reasons(book, plan.cells, names), *sentences]
    print("\n".join(notes))
    if options.json:
        path = Path(options.json)
        path.parent.mkdir(parents=True, exist_ok=True)
        runs = [{**asdict(run), "tokens_per_s": run.tokens_per_s} for run in book.runs]
        answers = {name: [asdict(answer) for answer in given] for name, given in comparison.answers.items()}
        found = {**to_json([], command=sys.orig_argv), "runs": runs, "absent": dict(book.absent), "notes": notes}
        found["answers"] = answers
        path.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if agreed else 1


def _chosen(parse: argparse.ArgumentParser, known: Mapping[str, T], wanted: Sequence[str] | None, what: str) -> list[T]:
    unknown = set(wanted or ()) - set(known)
    if unknown:
        parse.error(f"no {what} is called {', '.join(sorted(unknown))}; there are: {', '.join(known)}")
    return [each for name, each in known.items() if wanted is None or name in wanted]


def _say(line: str) -> None:
    print(f"  {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
