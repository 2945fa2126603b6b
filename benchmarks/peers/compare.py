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
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from benchmarks.client import Client, ClosedLoop, Run
from benchmarks.harness import Row, in_turn, percentile
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
    """One run of one workload against one system; a time that is None was not sent. Times in seconds."""

    cell: str
    system: str
    round: int
    wall_s: float
    output_tokens: int
    ttft_p50_s: float | None = None
    ttft_p95_s: float | None = None
    tpot_p50_s: float | None = None
    hit_percent: float | None = None  # prompt tokens that the server says it had
    server_cpu_s: float
    elsewhere_cpu_s: float  # of everything but the server and the client: what disturbed
    problem: str | None = None  # why it does not count

    @property
    def tokens_per_s(self) -> float:
        return self.output_tokens / self.wall_s


@dataclass(frozen=True, slots=True)
class CpuUse:
    """CPU seconds so far."""

    server_s: float
    client_s: float
    machine_s: float  # all cores, everything that runs; time that a hypervisor took away too

    @staticmethod
    def now(server: ServerCpu) -> "CpuUse":
        times = psutil.cpu_times()
        machine_s = times.user + times.nice + times.system + times.irq + times.softirq + times.steal
        return CpuUse(server.seconds(), time.process_time(), machine_s)


def measure(client: Client, cell: Cell, workload: Workload, *, system: str, round_: int) -> Measured:
    """Run a workload once, cut off after the cell's limit."""
    cpu = ServerCpu()
    before = CpuUse.now(cpu)
    run = asyncio.run(client.run(workload, ClosedLoop(concurrency=cell.concurrency), max_s=cell.max_s))
    return figures(run, cell, system=system, round_=round_, before=before, after=CpuUse.now(cpu))


def figures(run: Run, cell: Cell, *, system: str, round_: int, before: CpuUse, after: CpuUse) -> Measured:
    """Return what is kept of ``run``."""
    server_s, client_s = after.server_s - before.server_s, after.client_s - before.client_s
    answered = run.answered
    ttfts = [sample.ttft_s for sample in answered if sample.ttft_s is not None]
    tpots = [sample.tpot_s for sample in answered if sample.tpot_s is not None]
    prompt_tokens = sum(sample.prompt_tokens for sample in answered)
    tells_cached = any(sample.tells_cached for sample in answered)  # vllm leaves it out where it is 0
    problem = None
    if run.errors:
        error, count = max(run.errors.items(), key=lambda each: each[1])
        problem = f"{len(answered)} of {len(run.samples)} answered; {count} x {error}"
    return Measured(
        cell=cell.name,
        system=system,
        round=round_,
        wall_s=run.wall_s,
        output_tokens=sum(sample.completion_tokens for sample in answered),
        ttft_p50_s=percentile(ttfts, 50) if ttfts else None,
        ttft_p95_s=percentile(ttfts, 95) if ttfts else None,
        tpot_p50_s=percentile(tpots, 50) if tpots else None,
        hit_percent=100 * sum(sample.cached_tokens for sample in answered) / prompt_tokens if tells_cached else None,
        server_cpu_s=server_s,
        elsewhere_cpu_s=max(0.0, after.machine_s - before.machine_s - server_s - client_s),
        problem=problem,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one system said to one prompt."""

    text: str
    token_ids: tuple[int, ...]  # () where it does not tell them

    def same(self, other: "Answer") -> bool:
        """Compare token ids where both tell them, else texts."""
        if self.token_ids and other.token_ids:
            return self.token_ids == other.token_ids
        return self.text == other.text


def compare(answers: Mapping[str, Sequence[Answer]], exact: Sequence[str]) -> tuple[list[Row], bool]:
    """Return a row for each system, and whether all of ``exact`` agree with the first of them."""
    known = [name for name in exact if name in answers]
    if not known or len(answers) < 2:
        return [], True
    reference, agreed, rows = known[0], True, []
    for name, given in answers.items():
        if name == reference:
            continue
        pairs = zip(PROMPTS, given, answers[reference], strict=True)
        differing = [f"{asked!r}: {a.text!r}, {reference} {b.text!r}" for asked, a, b in pairs if not a.same(b)]
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
        median = {name: statistics.median(run.tokens_per_s for run in good) for name, good in whole.items() if good}
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
    ("throughput", "tok/s", lambda run: run.tokens_per_s),
    ("wall", "s", lambda run: run.wall_s),
    ("TTFT p50", "s", lambda run: run.ttft_p50_s),
    ("TTFT p95", "s", lambda run: run.ttft_p95_s),
    ("TPOT", "ms", lambda run: None if run.tpot_p50_s is None else 1000 * run.tpot_p50_s),
    ("hit", "%", lambda run: run.hit_percent),
    ("CPU", "s", lambda run: run.server_cpu_s),
    ("elsewhere", "s", lambda run: run.elsewhere_cpu_s),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is compared, and how often."""

    systems: Sequence[System]
    cells: Sequence[Cell]
    rounds: int
    repeats: int  # runs of a workload between a start and a stop
    seed: int


class Comparison:
    """One comparison; what it has measured so far is in its attributes. ``say`` gets a line for each event."""

    def __init__(self, plan: Plan, words: Words, place: Place, say: Callable[[str], None]) -> None:
        self._plan, self._words, self._place, self._say = plan, words, place, say
        self.runs: list[Measured] = []
        self.absent: dict[str, str] = {}
        self.answers: dict[str, Sequence[Answer]] = {}

    def miss(self, system: str, why: str) -> None:
        """Note that ``system`` cannot take part."""
        self.absent[system] = why
        self._say(f"{system}: {why}")

    def run(self) -> None:
        """Run all rounds."""
        for round_, system in in_turn(self._plan.systems, self._plan.rounds):
            left = [cell for cell in self._plan.cells if not self._gave_up(system, cell)]
            try:
                while left and system.name not in self.absent:
                    left = self._serve(system, left, round_)
            except ServerFailed as error:
                self.miss(system.name, f"round {round_ + 1}: {error}")

    def _serve(self, system: System, cells: Sequence[Cell], round_: int) -> list[Cell]:
        """Start ``system`` and run ``cells``. Returns: those still to run after one that did not finish."""
        first_seed = self._plan.seed + SEEDS_A_ROUND * round_
        with system.start(self._place) as serving:
            client = Client(serving.url, serving.model, dialect=system.dialect)
            for make in WARM_UP:
                self._ask(client, self._words.drawn(make, first_seed + 999), 4, WARM_UP_S)
            if system.name not in self.answers:
                self.answers[system.name] = self._answers(client)
            for index, cell in enumerate(cells):
                for repeat in range(self._plan.repeats):
                    workload = self._words.drawn(cell.make, first_seed + repeat)
                    run = measure(client, cell, workload, system=system.name, round_=round_)
                    self.runs.append(run)
                    self._say(f"{system.name}, {cell.name}: {run.problem or f'{run.tokens_per_s:.1f} tok/s'}")
                    if run.problem is not None:
                        return list(cells[index + 1 :])
        return []

    def _answers(self, client: Client) -> tuple[Answer, ...]:
        def turn(text: str) -> Turn:
            return Turn(token_ids=tuple(self._words.encode(text)), max_new_tokens=ANSWER_LEN)

        conversations = tuple(Conversation(name=str(i), turns=(turn(text),)) for i, text in enumerate(PROMPTS))
        run = self._ask(client, Workload(name="answers", conversations=conversations), 1, ANSWER_S)
        return tuple(Answer(text=sample.text, token_ids=tuple(sample.token_ids)) for sample in run.samples)

    def _ask(self, client: Client, workload: Workload, concurrency: int, max_s: float) -> Run:
        """Raises: ServerFailed if a request has no answer."""
        run = asyncio.run(client.run(workload, ClosedLoop(concurrency=concurrency), max_s=max_s))
        if run.errors:
            raise ServerFailed(f"it does not answer: {next(iter(run.errors))}")
        return run

    def _gave_up(self, system: System, cell: Cell) -> bool:
        return any((run.system, run.cell) == (system.name, cell.name) and run.problem for run in self.runs)
