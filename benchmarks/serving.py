"""What clients see of a server: workloads, and how it behaves as load grows.

    python -m benchmarks serving --url http://127.0.0.1:8000 random shared-prefix     an OpenAI-compatible server
    python -m benchmarks serving                                                      a sweep of Manta
    python -m benchmarks serving overload                                             orders of a queue that grows
    python -m benchmarks serving --url http://127.0.0.1:8000 replay --trace FILE      a recorded day (docs/capacity.md)

Without --url, `sweep` serves serve_config.yaml; `overload` always does, once for each order of the queue. Repeats use
fresh seeds, so that no repeat finds the one before in a cache.

`sweep` draws two plots a workload: throughput against requests at once, and TTFT against conversations started a
second. The rates of the second are shares of the throughput that the first reached in the same run, so that the plot
shows the same part of the curve on a fast machine and on a slow one. A point where a request failed has a row that
says so and no figures, and its workload is not drawn.
"""

import argparse
import asyncio
import contextlib
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks import harness, live_app
from benchmarks.client import Client, ClosedLoop, OpenLoop, Run, Sample
from benchmarks.harness import Part, Row, Table, percentile, rounds_of, say
from benchmarks.recorded import Prompts, Recording, Seen, read
from benchmarks.workloads import Workload, multi_turn, random_lengths, shared_prefix
from deployments.watch.terminal.ask import first_model

VOCAB_SIZE = 32_000
CONCURRENCY: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
SHARES: tuple[float, ...] = (0.25, 0.5, 0.75, 0.9, 1.1)  # of the highest throughput, in conversations
LEAST = 4  # conversations of a run
QUEUES = ("lpm", "on_time")  # of which the second is the default
LOADS: tuple[float, ...] = (0.5, 1.0, 1.3, 1.6)  # of what the fleet carries
OBJECTIVE_S = 2.0  # as `observability.ttft_objective_s`
BEYOND = 100  # requests of a run of `overload`
TRACKED, UNTRACKED = Path("docs/pictures"), Path("bench_results/pictures")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A kind of workload."""

    name: str
    file: str  # of its plots, without their ending
    make: Callable[[int, int], Workload]  # (conversations at least, seed)
    num: int  # conversations where it is run by itself
    a_slot: int  # conversations of a run for each that may be open
    arriving: int  # conversations of a run at a rate


def _random(num: int, seed: int) -> Workload:
    return random_lengths(num_requests=num, input_len=256, output_len=64, vocab_size=VOCAB_SIZE, seed=seed)


def _shared(num: int, seed: int) -> Workload:
    return shared_prefix(
        num_groups=8, per_group=-(-num // 8), prefix_len=1024, question_len=64, output_len=32, vocab_size=VOCAB_SIZE,
        seed=seed,
    )  # fmt: skip


def _turns(num: int, seed: int) -> Workload:
    return multi_turn(num_users=num, num_turns=5, turn_len=64, output_len=64, vocab_size=VOCAB_SIZE, seed=seed)


SHAPES = (
    Shape(name="random, 256 in, 64 out", file="random", num=32, a_slot=2, arriving=24, make=_random),
    Shape(
        name="shared prefixes, 8 of 1,024, 64 in, 32 out", file="shared_prefix", num=64, a_slot=2, arriving=24,
        make=_shared,
    ),
    Shape(name="multi-turn, 5 turns of 64 in, 64 out", file="multi_turn", num=8, a_slot=1, arriving=12, make=_turns),
)


def rows_of(workload: Workload, runs: Sequence[Run]) -> list[Row]:
    """Return one table: each row's runs are the repeats."""
    table = Table(f"serving: {workload.name}")

    def add(name: str, unit: str, measure: Callable[[Run], float | None], *, note: str = "") -> None:
        if values := [value for value in map(measure, runs) if value is not None]:
            table.add(name, values, unit, note=note)

    add("wall", "s", lambda run: run.wall_s)
    add("requests answered", "", lambda run: float(len(run.answered)), note=f"of {workload.num_requests}")
    first_error = next((error for run in runs for error in run.errors), "")
    add("requests failed", "", lambda run: float(sum(run.errors.values())), note=first_error)
    add("requests/s", "1/s", lambda run: len(run.answered) / run.wall_s)
    add("output tokens/s", "tok/s", lambda run: run.output_tokens_per_s)
    add("prompt tokens/s", "tok/s", lambda run: sum(s.prompt_tokens for s in run.answered) / run.wall_s)
    for q in (50, 90, 99):
        add(f"TTFT p{q}", "s", partial(Run.quantile, of="ttft_s", q=q))
    for q in (50, 90, 99):
        add(f"ITL p{q}", "s", partial(Run.gap_s, q=q))
    for q in (50, 90):
        add(f"TPOT p{q}", "s", partial(Run.quantile, of="tpot_s", q=q))
    for q in (50, 99):
        add(f"end to end p{q}", "s", partial(Run.quantile, of="e2e_s", q=q))
    add("cached prompt tokens", "%", lambda run: run.hit_percent, note=_hit_note(workload, runs))
    add("client CPU", "s", lambda run: run.client_cpu_s)
    return table.rows


def _hit_note(workload: Workload, runs: Sequence[Run]) -> str:
    multi = any(len(conversation.turns) > 1 for conversation in workload.conversations)
    stand_ins = multi and not all(run.answers_known for run in runs)
    return "the server tells no token ids: answers in histories are stand-ins" if stand_ins else ""


def workload_rows(shape: Shape, options: argparse.Namespace) -> list[Row]:
    """Run one workload against the server at ``--url``."""
    url = options.url or "http://127.0.0.1:8000"
    client = Client(url, options.name or first_model(url, None))
    load = ClosedLoop(concurrency=options.concurrency) if options.rate is None else OpenLoop(rate=options.rate)
    num = LEAST if options.quick else shape.num
    workloads = [shape.make(num, options.seed + repeat) for repeat in range(rounds_of(options, 3))]
    return rows_of(workloads[0], [asyncio.run(client.run(each, load, max_s=options.max_s)) for each in workloads])


# what is taken from a run of the sweep: its unit, and the figure of a run
FIGURES: dict[str, tuple[str, Callable[[Run], float | None]]] = {
    "output": ("tok/s", lambda run: run.output_tokens_per_s),
    **{f"TTFT p{q}": ("s", partial(Run.quantile, of="ttft_s", q=q)) for q in (50, 95)},
}


class Points:
    """The rows and lines of one plot."""

    def __init__(self, section: str, *figures: str) -> None:
        self._table = Table(section)
        self.rows = self._table.rows
        self.lines: dict[str, list[tuple[float, float]]] = {figure: [] for figure in figures}
        self.whole = True

    def add(self, name: str, x: float, runs: Sequence[Run]) -> bool:
        """Add one point. Returns: whether every request of it was answered."""
        if errors := [error for run in runs for error in run.errors]:
            self.whole = False
            note = f"FAILED, of {len(runs[0].samples)}: {errors[0]}"
            failed = [float(sum(run.errors.values())) for run in runs]
            self._table.add(f"{name}, requests without an answer", failed, note=note)
            return False
        for figure, line in self.lines.items():
            unit, of = FIGURES[figure]
            values = [value for value in map(of, runs) if value is not None]
            self._table.add(f"{name}, {figure}", values, unit)
            line.append((x, statistics.median(values)))
        return True


def sweep(client: Client, shape: Shape, *, quick: bool, repeats: int, max_s: float) -> tuple[Points, Points]:
    """Measure one shape by requests at once and by rate; every run has a seed of its own."""
    seed = 0

    def run(num: int, load: ClosedLoop | OpenLoop) -> Run:
        nonlocal seed
        seed += 1
        return asyncio.run(client.run(shape.make(num, seed), load, max_s=max_s))

    def closed(concurrency: int) -> Run:
        return run(max(LEAST, shape.a_slot * concurrency), ClosedLoop(concurrency=concurrency))

    section = f"load: {shape.name}"
    concurrency, shares, arriving = CONCURRENCY, SHARES, shape.arriving
    if quick:
        concurrency, shares, arriving = CONCURRENCY[:2], SHARES[:2], LEAST
    at_once, by_rate = Points(section, "output", "TTFT p50"), Points(section, "TTFT p50", "TTFT p95")
    closed(1)  # what the first requests compile or touch is not the load's
    best = 0.0
    for many in concurrency:
        runs = [closed(many) for _ in range(repeats)]
        if at_once.add(f"{many} at once", many, runs):
            nums = (len({sample.name.split("/")[0] for sample in each.samples}) for each in runs)
            best = max(best, statistics.median(num / each.wall_s for num, each in zip(nums, runs, strict=True)))
    for rate in [share * best for share in shares if best]:
        runs = [run(arriving, OpenLoop(rate=rate, seed=seed)) for _ in range(repeats)]
        by_rate.add(f"{rate:.2f} conversations/s", rate, runs)
    return at_once, by_rate


def draw(pictures: Path, shape: Shape, at_once: Points, by_rate: Points) -> None:
    """Draw both plots of a shape into ``pictures``."""
    lines = {"Manta": at_once.lines["output"]}
    x, y = "requests at once", "output tokens/s"
    harness.draw(pictures / f"throughput_{shape.file}.svg", lines, title=shape.name, x=x, y=y, marker="o")
    lines = {name.removeprefix("TTFT "): line for name, line in by_rate.lines.items()}
    x, y = "conversations started a second", "TTFT, s"
    harness.draw(pictures / f"ttft_{shape.file}.svg", lines, title=shape.name, x=x, y=y, marker="o")


def sweep_rows(options: argparse.Namespace) -> list[Row]:
    """Sweep the server at ``--url``, or one of our own."""
    pictures = UNTRACKED if options.quick else TRACKED
    harness.need_plots()  # before minutes of measuring
    with contextlib.ExitStack() as stack:
        own = live_app.serving()
        url = options.url or stack.enter_context(own)
        client = Client(url, options.name or first_model(url, None))
        return sweep_all(client, pictures, quick=options.quick, repeats=options.rounds or 1, max_s=options.max_s)


def sweep_all(client: Client, pictures: Path, *, quick: bool, repeats: int, max_s: float) -> list[Row]:
    """Sweep all shapes, and draw those of which every request was answered."""
    rows = []
    for shape in SHAPES:
        at_once, by_rate = sweep(client, shape, quick=quick, repeats=repeats, max_s=max_s)
        rows += at_once.rows + by_rate.rows
        whole = at_once.whole and by_rate.whole
        if whole:
            draw(pictures, shape, at_once, by_rate)
        say(f"{shape.name}: {'measured, drawn' if whole else 'measured, not drawn: requests failed'}")
    return rows


def overload_rows(options: argparse.Namespace) -> list[Row]:
    """Serve under each order of the queue, and send the same prompts, at the same times, at shares of what is carried.

    What is carried is measured once, before the rates: answered requests a second with 32 at once.
    """
    section = f"overload: in time is a first token within {OBJECTIVE_S:g} s, as clients see it"
    table, carried, many = Table(section), 0.0, LEAST if options.quick else BEYOND
    runs: dict[tuple[str, float], list[Run]] = {}
    for number, queue in harness.in_turn(QUEUES, rounds_of(options, 2)):
        with live_app.serving(scheduler={"policy": queue}) as url:
            client = Client(url, first_model(url, None))

            def run(load: ClosedLoop | OpenLoop, num: int, seed: int, client: Client = client) -> Run:
                mixed = random_lengths(
                    num_requests=num, input_len=512, output_len=32, spread=0.9, vocab_size=VOCAB_SIZE, seed=seed
                )
                return asyncio.run(client.run(mixed, load, max_s=options.max_s))

            closed = ClosedLoop(concurrency=32), LEAST if options.quick else 96
            run(*closed, 1000)  # what the first requests compile or touch is not the load's
            if not carried:
                best = run(*closed, 2000)
                if not best.answered:
                    raise SystemExit(f"serving overload: no request was answered: {next(iter(best.errors))}")
                carried = len(best.answered) / best.wall_s
            for seed, share in enumerate(LOADS, options.seed + number * len(LOADS)):
                measured = run(OpenLoop(rate=share * carried, seed=seed), many, seed)
                runs.setdefault((queue, share), []).append(measured)
                say(f"{queue}, {share:g} x {carried:.2f}/s: {in_time(measured):.0f} % in time")
    for share in LOADS:
        for queue in QUEUES:
            measured_in = runs[queue, share]
            name, failed = f"{share:g} x, {queue}", sum(sum(each.errors.values()) for each in measured_in)
            note = f"{failed} without an answer" if failed else ""
            table.add(name, [in_time(each) for each in measured_in], "%", figure="in time", note=note)
            for figure, (unit, of) in list(FIGURES.items())[1:]:
                table.add(name, [of(each) or math.nan for each in measured_in], unit, figure=figure)
    return table.rows


def in_time(run: Run) -> float:
    """Return the percentage of a run's requests that were answered with a first token within the objective."""
    return 100 * sum((each.ttft_s or math.inf) <= OBJECTIVE_S for each in run.answered) / len(run.samples)


async def replayed(recording: Recording, client: Client, options: argparse.Namespace) -> list[Sample]:
    """Send each request when it was recorded, conversations ``options.speed`` times as fast."""
    prompts = Prompts(page_size=recording.page_size, vocab_size=VOCAB_SIZE)
    samples = [Sample(name=str(seen.number)) for seen in recording.requests]
    ends = [asyncio.Event() for _ in samples]
    async with client.exchange() as exchange:

        async def one(seen: Seen, sample: Sample) -> None:
            if seen.after is None:
                await asyncio.sleep(seen.arrival_s / options.speed)
            else:
                await ends[seen.after].wait()
                await asyncio.sleep(seen.gap_s)
            prompt = prompts.of(seen)
            await exchange.request(prompt, seen.output_len, sample)
            prompts.answered(seen, prompt, sample.token_ids)
            ends[seen.number].set()

        await asyncio.gather(*map(one, recording.requests, samples))
    return samples


def replay_rows(options: argparse.Namespace) -> list[Row]:
    """Replay a recording, and hold its times to the first token against those that it tells."""
    if options.trace is None:
        raise SystemExit("serving replay: name a recording with --trace")
    url = options.url or "http://127.0.0.1:8000"
    recording = read(options.trace, limit=20 if options.quick else None)
    samples = asyncio.run(replayed(recording, Client(url, options.name or first_model(url, None)), options))
    answered = [sample for sample in samples if sample.ttft_s is not None and sample.error is None]
    table = Table(f"replay of {options.trace.name}: {len(samples)} requests, {options.speed:g} times as fast")
    failed = [sample.error for sample in samples if sample.error is not None]
    table.add("requests without an answer", [float(len(failed))], note=failed[0] if failed else "")
    was = sum(seen.told["outcome"] != "ok" for seen in recording.requests)
    table.add("  recorded", [float(was)], note=f"{recording.num_lost} more are not in the recording")
    for q in (50, 95):
        now_s = percentile([sample.ttft_s for sample in answered if sample.ttft_s is not None], q)
        was_s = percentile(recording.ttfts_s, q)
        table.add(f"TTFT p{q}", [now_s], "s", share=now_s / was_s, target="85 to 115 %", note=f"recorded {was_s:.3f}")
    prompt = sum(sample.prompt_tokens for sample in answered)
    table.add("cached prompt tokens", [100 * sum(sample.cached_tokens for sample in answered) / prompt], "%")
    return table.rows


def add_options(parse: argparse.ArgumentParser) -> None:
    add = parse.add_argument
    add("--url", help="root of a server that runs already, without /v1")
    add("--name", help="the model's name there; default: the first of /v1/models")
    add("--concurrency", type=int, default=16, help="workloads, closed loop: conversations at once")
    add("--rate", type=float, help="workloads, open loop instead: conversations a second")
    add("--trace", type=Path, help="replay: a recording of router.record")
    add("--speed", type=float, default=1.0, help="replay: times as fast as recorded")
    add("--max-s", type=float, default=240.0, help="seconds a run may take; the rest is cut off")


PARTS = {
    **{
        shape.file.replace("_", "-"): Part(about=shape.name, measure=partial(workload_rows, shape), asked=True)
        for shape in SHAPES
    },
    "replay": Part(about="a recording, request by request", measure=replay_rows, asked=True),
    "overload": Part(about="orders of the queue at 0.5 to 1.6 x of what is carried", measure=overload_rows, asked=True),
    "sweep": Part(about="throughput and TTFT as load grows, with plots", measure=sweep_rows),
}


def main(argv: Sequence[str] | None = None) -> None:
    harness.run("serving", __doc__, PARTS, argv, options=add_options)
