"""Starts one system after another, and runs every workload against each.

Owns:      the order of rounds; what is tried again after a failure, and what is not.
Never:     has two servers up at once, or lets one system's failure end the comparison.

    round: for each system, in turn (odd rounds: from the last)
        start ──> warm up ──> [round 0: answers] ──> workloads ──> stop
          │                                             │
          └─ fails: absent, with the reason             └─ one does not finish: stop, start anew for the rest;
                                                           no later round tries that one again
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.client import Client, ClosedLoop
from benchmarks.peers.answers import Answer, ask
from benchmarks.peers.cells import WARM_UP, Cell
from benchmarks.peers.measure import Measured, measure
from benchmarks.peers.server import ServerFailed
from benchmarks.peers.systems import Place, System
from benchmarks.peers.table import Book
from benchmarks.peers.words import Words

WARM_UP_S = 240.0
SEEDS_A_ROUND = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is compared, and how often."""

    systems: Sequence[System]
    cells: Sequence[Cell]
    rounds: int
    repeats: int  # runs of a workload between a start and a stop
    seed: int


class Comparison:
    """One comparison. ``say`` is told what goes on, line by line."""

    def __init__(self, plan: Plan, words: Words, place: Place, say: Callable[[str], None]) -> None:
        self._plan, self._words, self._place, self._say = plan, words, place, say
        self._runs: list[Measured] = []
        self._absent: dict[str, str] = {}
        self.answers: dict[str, Sequence[Answer]] = {}

    def miss(self, system: str, why: str) -> None:
        """``system`` cannot take part."""
        self._absent[system] = why
        self._say(f"{system}: {why}")

    def run(self) -> Book:
        """All rounds. What an interrupted run has measured is in `book`."""
        for round_ in range(self._plan.rounds):
            for system in self._plan.systems if round_ % 2 == 0 else reversed(self._plan.systems):
                if system.name not in self._absent:
                    self._try(system, round_)
        return self.book

    @property
    def book(self) -> Book:
        return Book(runs=tuple(self._runs), absent=dict(self._absent))

    def _try(self, system: System, round_: int) -> None:
        """All workloads against one system."""
        left = [cell for cell in self._plan.cells if not self._gave_up(system, cell)]
        try:
            while left:
                left = self._serve(system, left, round_)
        except ServerFailed as error:
            self.miss(system.name, f"round {round_ + 1}: {error}")

    def _serve(self, system: System, cells: Sequence[Cell], round_: int) -> list[Cell]:
        """Start ``system`` and run ``cells``. Returns: those still to run after one that did not finish."""
        with system.start(self._place) as serving:
            client = Client(serving.url, serving.model, dialect=system.dialect)
            self._warm_up(client, round_)
            if system.name not in self.answers:
                self.answers[system.name] = ask(client, self._words)
            for index, cell in enumerate(cells):
                for repeat in range(self._plan.repeats):
                    seed = self._plan.seed + SEEDS_A_ROUND * round_ + repeat
                    workload = self._words.of(cell.make(self._words.vocab_size, seed))
                    run = measure(client, cell, workload, system=system.name, round_=round_)
                    self._runs.append(run)
                    self._say(f"{system.name}, {cell.name}: {run.problem or f'{run.tokens_per_s:.1f} tok/s'}")
                    if run.problem is not None:
                        return list(cells[index + 1 :])
        return []

    def _warm_up(self, client: Client, round_: int) -> None:
        for make in WARM_UP:
            workload = self._words.of(make(self._words.vocab_size, self._plan.seed + SEEDS_A_ROUND * round_ + 999))
            run = asyncio.run(client.run(workload, ClosedLoop(concurrency=4), max_s=WARM_UP_S))
            if run.errors:
                raise ServerFailed(f"it does not answer: {next(iter(run.errors))}")

    def _gave_up(self, system: System, cell: Cell) -> bool:
        return any(
            run.problem is not None for run in self._runs if (run.system, run.cell) == (system.name, cell.name)
        )
