"""Manta and other systems on the same machine, model, client and workloads, in one run (`make bench-peers`).

    python -m benchmarks peers                                    all systems, all workloads, two rounds
    python -m benchmarks peers --quick                            small workloads, one round: a check
    python -m benchmarks peers --system manta --system vllm --cell random-8

MANTA_CPU holds all to an instruction set: those that use PyTorch through its environment, llama.cpp by another build.
One server runs at a time; each round starts every system anew, in turn, the second in the opposite order. A round's
workloads are the same tokens for all; another round has others. What cannot be installed, does not start, or does not
finish within its time is reported with the reason. Exit status 1: two systems that compute in fp32 differ in a greedy
answer. `elsewhere s` is CPU time that neither the server nor the client took: numbers with much of it are worth little.
"""

import argparse
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from benchmarks import harness
from benchmarks.harness import Part, Row, rounds_of, say
from benchmarks.peers.compare import FULL, QUICK, Comparison, compare, rows_of
from benchmarks.peers.servers import PEERS, InstallFailed, ensure
from benchmarks.peers.systems import MODEL, Place, Words, systems

T = TypeVar("T")
INSTALL_S = 3600.0  # that each installation may take
OURS = "manta"  # the start of our systems' names


def _chosen(known: Mapping[str, T], wanted: Sequence[str] | None, what: str) -> list[T]:
    """Raises: SystemExit for a name that is not known."""
    if unknown := set(wanted or ()) - set(known):
        raise SystemExit(f"no {what} is called {', '.join(sorted(unknown))}; there are: {', '.join(known)}")
    return [each for name, each in known.items() if wanted is None or name in wanted]


def _add_options(parse: argparse.ArgumentParser) -> None:
    add = parse.add_argument
    add("--system", action="append", metavar="NAME", help="only this one; may be given again")
    names = ", ".join(cell.name for cell in FULL)
    add("--cell", action="append", metavar="NAME", help=f"only this workload, of {names}")
    add("--max-s", type=float, help="seconds for each workload, instead of its own limit")


def main(argv: Sequence[str] | None = None) -> int:
    status = 0

    def rows(options: argparse.Namespace) -> list[Row]:
        nonlocal status
        words = Words(MODEL)
        chosen = _chosen(systems(words), options.system, "system")
        cells = _chosen({cell.name: cell for cell in (QUICK if options.quick else FULL)}, options.cell, "workload")
        if options.max_s is not None:
            cells = [replace(cell, max_s=options.max_s) for cell in cells]
        comparison = Comparison(
            systems=chosen, cells=cells, rounds=rounds_of(options, 2), seed=options.seed, words=words, say=say,
            place=Place(threads=options.threads, logs=PEERS / "logs"),
        )  # fmt: skip
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: stop what runs, report what there is
        for system in chosen:
            if system.lacks:
                comparison.miss(system.name, system.lacks)
            elif system.recipe is not None:
                try:
                    ensure(system.recipe, limit_s=INSTALL_S)
                except InstallFailed as error:
                    comparison.miss(system.name, f"not installed: {error}")
        try:
            comparison.run()
        except KeyboardInterrupt:
            say("interrupted; this was measured until now")
        except Exception:  # whatever went wrong, what was measured is not lost
            found, _ = _report(comparison)
            harness.show(found)
            harness.write(found, options.json)
            raise
        found, agreed = _report(comparison)
        status = 0 if agreed else 1
        for system in comparison.systems:
            print(f"{system.name}: {system.settings}")
        return found

    about = "every system that is chosen, in turn"
    harness.run("peers", __doc__, {"compare": Part(about=about, measure=rows)}, argv, options=_add_options)
    return status


def _report(comparison: Comparison) -> tuple[list[Row], bool]:
    names = [system.name for system in comparison.systems]
    ours = [name for name in names if name.startswith(OURS)]
    answers, agreed = compare(comparison.answers, [system.name for system in comparison.systems if system.exact])
    return rows_of(comparison.runs, comparison.absent, comparison.cells, names, ours) + answers, agreed


if __name__ == "__main__":
    sys.exit(main())
