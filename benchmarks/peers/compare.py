"""Starts one system after another, runs every workload against each, and says what came of it.

Owns:      the order of rounds; what is tried again after a failure, and what is not; what counts as not having
           finished.
Never:     has two servers up at once, or lets one system's failure end the comparison.
Invariant: a run that did not answer every request has a problem, and none of its times is compared with anything. Every
           workload has a line for every system that was asked for; one that could not be measured says why.

    round: for each system, in turn (odd rounds: from the last)
        start ──> warm up ──> [round 0: answers] ──> workloads ──> stop
          │                                             │
          └─ fails: absent, with the reason             └─ one does not finish: stop, start anew for the rest;
                                                           no later round tries that one again
"""

import asyncio
import inspect
import statistics
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil

from benchmarks.client import Client, ClosedLoop, Run, Sample
from benchmarks.harness import Row, in_turn
from benchmarks.live_app import ServerCpu, ServerFailed
from benchmarks.peers.systems import Make, Place, System, Words
from benchmarks.workloads import Conversation, Turn, Workload, multi_turn, passages, random_lengths, shared_prefix

WARM_UP_S = 240.0
SEEDS_A_ROUND = 1000
ANSWER_LEN, ANSWER_S = 24, 60.0
PROMPTS = (
    "The quick brown fox",
    "Water boils at a lower temperature on a mountain because",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "One two three four five, one two three four five, one two three",  # drafts are made, and come true
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One workload at one concurrency."""

    name: str  # on the command line
    make: Make
    concurrency: int  # conversations at once
    max_s: float  # a system that takes longer is reported as not having finished

    @property
    def title(self) -> str:
        """What it consists of."""
        return f"{self.make(vocab_size=32_000, seed=0).name}; {self.concurrency} at once"


_random = partial(random_lengths, num_requests=8)
_shared, _turns = partial(shared_prefix, num_groups=8, per_group=8), partial(multi_turn, num_users=8, num_turns=5)
_few = partial(shared_prefix, num_groups=2, per_group=3)
_book = (Path(__file__).parents[1] / "texts" / "alice.txt").read_text()
_code = partial(passages, text=inspect.getsource(textwrap))  # code that no change of ours changes
_prose = partial(passages, text="\n".join(textwrap.wrap(_book, 80)))
_code_again, _prose_again = (partial(each, ask="Write the text above again.") for each in (_code, _prose))
_chat = partial(_prose, ask="What could happen next?")
FULL, QUICK = (
    tuple(Cell(name=name, make=make, concurrency=concurrency, max_s=max_s) for name, make, concurrency, max_s in cells)
    for cells in (
        (
            ("batch-1", partial(_random, num_requests=2, input_len=32, output_len=128), 1, 60),
            ("random-8", partial(_random, input_len=256, output_len=64), 8, 60),
            ("random-32", partial(_random, num_requests=32, input_len=256, output_len=64), 32, 90),
            ("shared-prefix", partial(_shared, prefix_len=1024, question_len=64, output_len=32), 16, 120),
            ("multi-turn", partial(_turns, turn_len=64, output_len=64), 8, 120),
            ("code-again", partial(_code_again, num_requests=6, num_lines=20, output_len=128), 1, 120),
            ("prose-again", partial(_prose_again, num_requests=6, num_lines=8, output_len=128), 1, 120),
            ("chat", partial(_chat, num_requests=6, num_lines=2, output_len=128), 1, 120),
        ),
        (
            ("batch-1", partial(_random, num_requests=1, input_len=16, output_len=8), 1, 30),
            ("random-8", partial(_random, input_len=32, output_len=8), 8, 30),
            ("random-32", partial(_random, num_requests=32, input_len=32, output_len=4), 32, 30),
            ("shared-prefix", partial(_few, prefix_len=256, question_len=16, output_len=8), 4, 30),
            ("multi-turn", partial(_turns, num_users=2, num_turns=3, turn_len=64, output_len=8), 2, 30),
            ("code-again", partial(_code_again, num_requests=1, num_lines=8, output_len=16), 1, 30),
            ("prose-again", partial(_prose_again, num_requests=1, num_lines=4, output_len=16), 1, 30),
            ("chat", partial(_chat, num_requests=1, num_lines=1, output_len=4), 1, 30),
        ),
    )
)
WARM_UP = (  # what a server compiles or touches first is no workload's
    partial(_random, num_requests=4, input_len=64, output_len=8),
    partial(_random, num_requests=1, input_len=600, output_len=4),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One run of one workload against one system."""

    cell: str
    system: str
    round: int
    run: Run
    server_cpu_s: float
    elsewhere_cpu_s: float  # of everything but the server and the client: what disturbed

    @property
    def problem(self) -> str | None:
        """Return why it does not count."""
        for error, count in self.run.errors.most_common(1):
            return f"{len(self.run.answered)} of {len(self.run.samples)} answered; {count} x {error}"
        return None


def measure(client: Client, cell: Cell, workload: Workload, *, system: str, round_: int) -> Measured:
    """Run a workload once, cut off after the cell's limit."""
    server = ServerCpu()
    before = _cpu_s(server)
    run = asyncio.run(client.run(workload, ClosedLoop(concurrency=cell.concurrency), max_s=cell.max_s))
    server_s, elsewhere_s = (max(0.0, now - was) for now, was in zip(_cpu_s(server), before, strict=True))
    return Measured(
        cell=cell.name, system=system, round=round_, run=run, server_cpu_s=server_s, elsewhere_cpu_s=elsewhere_s
    )


def _cpu_s(server: ServerCpu) -> tuple[float, float]:
    """Return CPU seconds so far: of the server; of what else runs on all cores but for this client, time that a
    hypervisor took away too."""
    server_s, times = server.seconds(), psutil.cpu_times()
    machine_s: float = times.user + times.nice + times.system + times.irq + times.softirq + times.steal
    return server_s, machine_s - server_s - time.process_time()


def same(one: Sample, other: Sample) -> bool:
    """Compare token ids where both answers tell them, else texts."""
    if one.token_ids and other.token_ids:
        return one.token_ids == other.token_ids
    return one.text == other.text


def compare(answers: Mapping[str, Sequence[Sample]], exact: Sequence[str]) -> tuple[list[Row], bool]:
    """Return a row for each system, and whether all of ``exact`` agree with the first of them."""
    known = [name for name in exact if name in answers]
    if not known or len(answers) < 2:
        return [], True
    reference, agreed, rows = known[0], True, []
    for name, given in answers.items():
        if name == reference:
            continue
        pairs = zip(PROMPTS, given, answers[reference], strict=True)
        differing = [f"{asked!r}: {a.text!r}, {reference} {b.text!r}" for asked, a, b in pairs if not same(a, b)]
        agreed = agreed and not (differing and name in exact)
        equal = len(given) - len(differing)
        section, note = f"prompts of {len(given)} that are answered as by {reference}", "; ".join(differing)
        rows.append(Row.of(section, name, [float(equal)], note=note))
    return rows, agreed


def rows_of(
    runs: Sequence[Measured], absent: Mapping[str, str], cells: Sequence[Cell], systems: Sequence[str], ours:
    Sequence[str]
) -> list[Row]:
    """Return a line for each workload and system. ``ours``: the systems whose throughput is held over each one's."""
    rows = []
    for cell in cells:
        section = f"{cell.name}: {cell.title}"
        whole = {
            name: [run for run in runs if (run.cell, run.system, run.problem) == (cell.name, name, None)]
            for name in systems
        }
        rates = {name: [each.run.output_tokens_per_s for each in good] for name, good in whole.items() if good}
        median = {name: statistics.median(each) for name, each in rates.items()}
        for name, good in whole.items():
            mine = [run for run in runs if (run.cell, run.system) == (cell.name, name)]
            problems = [f"round {run.round + 1}: {run.problem}" for run in mine if run.problem is not None]
            note = "; ".join([*([absent[name]] if name in absent else []), *problems]) or ("" if good else "not run")
            rows.append(Row(section=section, name=name, figure="runs", value=float(len(good)), note=note))
            for figure, unit, of in FIGURES:
                if values := [value for value in map(of, good) if value is not None]:
                    rows.append(Row.of(section, name, values, unit, figure=figure))
            told = [own for own in ours if own in median and name in median]
            rows += [Row.of(section, name, [median[own] / median[name]], "x", figure=f"{own} /") for own in told]
    return rows


FIGURES: tuple[tuple[str, str, Callable[[Measured], float | None]], ...] = (
    ("throughput", "tok/s", lambda each: each.run.output_tokens_per_s),
    ("wall", "s", lambda each: each.run.wall_s),
    ("TTFT p50", "s", lambda each: each.run.quantile("ttft_s", 50)),
    ("TTFT p95", "s", lambda each: each.run.quantile("ttft_s", 95)),
    ("TPOT", "ms", lambda each: None if (tpot_s := each.run.quantile("tpot_s", 50)) is None else 1000 * tpot_s),
    ("hit", "%", lambda each: each.run.hit_percent),
    ("CPU", "s", lambda each: each.server_cpu_s),
    ("elsewhere", "s", lambda each: each.elsewhere_cpu_s),
)


@dataclass(kw_only=True)
class Comparison:
    """One comparison; ``runs``, ``absent`` and ``answers`` hold what it has measured so far."""

    systems: Sequence[System]
    cells: Sequence[Cell]
    rounds: int
    seed: int
    words: Words
    place: Place
    say: Callable[[str], None]  # gets a line for each event
    runs: list[Measured] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)
    answers: dict[str, Sequence[Sample]] = field(default_factory=dict)

    def miss(self, system: str, why: str) -> None:
        """Note that ``system`` cannot take part."""
        self.absent[system] = why
        self.say(f"{system}: {why}")

    def run(self) -> None:
        """Run all rounds."""
        for round_, system in in_turn(self.systems, self.rounds):
            gave_up = {run.cell for run in self.runs if run.system == system.name and run.problem}
            left = [cell for cell in self.cells if cell.name not in gave_up]
            try:
                while left and system.name not in self.absent:
                    left = self._serve(system, left, round_)
            except ServerFailed as error:
                self.miss(system.name, f"round {round_ + 1}: {error}")

    def _serve(self, system: System, cells: Sequence[Cell], round_: int) -> list[Cell]:
        """Start ``system`` and run ``cells``. Returns: those still to run after one that did not finish."""
        first_seed = self.seed + SEEDS_A_ROUND * round_
        with system.start(self.place) as serving:
            client = Client(*serving, dialect=system.dialect)
            for make in WARM_UP:
                self._ask(client, self.words.drawn(make, first_seed + 999), 4, WARM_UP_S)
            if system.name not in self.answers:
                self.answers[system.name] = self._answers(client)
            for index, cell in enumerate(cells):
                workload = self.words.drawn(cell.make, first_seed)
                each = measure(client, cell, workload, system=system.name, round_=round_)
                self.runs.append(each)
                came = each.problem or f"{each.run.output_tokens_per_s:.1f} tok/s"
                self.say(f"{system.name}, {cell.name}: {came}")
                if each.problem is not None:
                    return list(cells[index + 1 :])
        return []

    def _answers(self, client: Client) -> Sequence[Sample]:
        turns = [Turn(token_ids=(), max_new_tokens=ANSWER_LEN, text=text) for text in PROMPTS]
        conversations = tuple(Conversation(name=str(at), turns=(turn,)) for at, turn in enumerate(turns))
        workload = self.words.of(Workload(name="answers", conversations=conversations))
        return self._ask(client, workload, 1, ANSWER_S).samples

    def _ask(self, client: Client, workload: Workload, concurrency: int, max_s: float) -> Run:
        """Raises: ServerFailed if a request has no answer."""
        run = asyncio.run(client.run(workload, ClosedLoop(concurrency=concurrency), max_s=max_s))
        if run.errors:
            raise ServerFailed(f"it does not answer: {next(iter(run.errors))}")
        return run
