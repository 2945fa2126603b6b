"""The production router before simulated replicas, or live before replicas of another process.

    python -m benchmarks router simulate --trace FILE --policy estimated_ttft --policy oracle --plot OUT.svg
    python -m benchmarks router simulate --trace RECORDING --replicas 1 2 3 4 --queue lpm on_time
    python -m benchmarks router tenants
    python -m benchmarks router live --fleet 1000 --stats-period 0.5

`simulate` is deterministic but for the CPU time of decisions: load of sim_load, a run of sim_cluster.
`tenants` has one tenant flood a replica on which nine chat (sim_tenants.py).
`live` puts the router behind its fleet and channel, before replicas of another process (live_router.py). A request
shares three quarters of its prompt with one of 50 prefixes, as chats with long histories do.
"""

import argparse
import itertools
import pathlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.progress import Progress, TimeElapsedColumn

from benchmarks import harness, live_router, recorded, sim_tenants, workloads
from benchmarks.calibration import PACE_S, Calibrated, build_of, calibrate
from benchmarks.harness import Part, Row, Table, percentile
from benchmarks.sim_cluster import ORACLE, Cluster, Record, Setup
from benchmarks.sim_engine import Build, StepTime
from benchmarks.sim_load import SimRequest, bursts, of_workload, read_trace
from replicas.config import SchedulerConfig, load_extensions
from replicas.scheduler.orders import ORDERS
from routing.policies import POLICIES

WORKLOADS = ("shared-prefix", "multi-turn", "bursts")
REPLICAS = 8
OBJECTIVE_S = 5.0
THINK_S = 10.0  # between an answer and the next turn, on average
TOKEN_BYTES = 131_072  # K and V of a token
MakeCluster = Callable[[Callable[[], None]], Cluster]
NUM_PREFIXES = 50
VOCABULARY = 49_152
LIVE_TOKENS, EVENT_PAGES = 8_192, 16


def simulate(options: argparse.Namespace) -> list[Row]:
    """Return a line for each policy. Raises: SystemExit that says which option or line of the trace is wrong."""
    if options.plot:
        harness.need_plots()
    try:
        recording = None
        if options.trace is not None and recorded.is_recording(options.trace):
            recording = recorded.read(options.trace, limit=200 if options.quick else options.requests)
        load = _load(options) if recording is None else recorded.sim_requests(recording, rate=options.rate)
        return _run_all(options, load, recording)
    except (OSError, ValueError) as error:
        print(f"simulate: {error}", file=sys.stderr)
        raise SystemExit(2) from error


def _run_all(
    options: argparse.Namespace, requests: list[SimRequest], recording: recorded.Recording | None
) -> list[Row]:
    rows: list[Row] = []
    lines: dict[str, list[tuple[float, float]]] = {}
    found = None if recording is None else calibrate(recording)
    clusters = _clusters(options, requests, recording, found)
    sizes = ", ".join(dict.fromkeys(size for _, size, _ in clusters))
    title = f"{options.trace or options.workload}: {len(requests):,} requests at rate {options.rate:g}, {sizes}"
    objective_s = options.objective or (recording.facts["objective_s"] if recording else OBJECTIVE_S)
    if recording is not None and found is not None:
        rows += _recorded_rows(title, recording, found, objective_s)
    with Progress(*Progress.get_default_columns(), TimeElapsedColumn(), disable=not sys.stderr.isatty()) as progress:
        for name, _, make in clusters:
            task = progress.add_task(name, total=len(requests))
            cluster = make(partial(progress.advance, task))
            records = cluster.run()
            cluster.check()
            rows += summary(title, name, records, num_replicas=len(cluster.replicas), objective_s=objective_s)
            if options.link:
                computed = sum(record.input_len for record in records)
                note = f"{cluster.num_failed} fetches failed"
                fetched = Table(title)
                fetched.add(name, [100 * cluster.num_fetched / computed], "%", figure="fetched", note=note)
                rows += fetched.rows
            ttfts = sorted(record.ttft_s for record in records)
            mean_s = sum(ttfts) / len(ttfts)
            shares = range(101)
            lines[f"{name} ({mean_s:.2f} s)"] = [(max(percentile(ttfts, q), 0.01), q) for q in shares]
    if options.plot:
        x = "time to first token, s (mean in brackets)"
        harness.draw(options.plot, lines, title=title, x=x, y="% of the requests", log_x=True)
    return rows


def _clusters(
    options: argparse.Namespace,
    requests: list[SimRequest],
    recording: recorded.Recording | None,
    found: Calibrated | None,
) -> list[tuple[str, str, MakeCluster]]:
    """Return each run's name, its replicas in words, and what makes its cluster."""
    counts = options.replicas or [REPLICAS if recording is None else len(recording.replicas)]
    queues = options.queue or ["fcfs" if recording is None else None]
    made: list[tuple[str, str, MakeCluster]] = []
    for count, queue, policy in itertools.product(counts, queues, options.policy or ["estimated_ttft"]):
        size = f"{count} replica{'s' * (count != 1)}"
        words = [policy, *([queue] if len(queues) > 1 else []), *([size] if len(counts) > 1 else [])]
        if recording is None or found is None:
            build = _build(options, requests, queue or "fcfs")
        else:
            build = build_of(recording, found, queue=queue, rate=options.rate)
        setup = Setup(
            num_replicas=count, build=build, objective_s=options.objective or OBJECTIVE_S,
            period_s=options.stats_period, delay_s=options.event_delay, seed=options.seed,
        )  # fmt: skip
        made.append((", ".join(words), size, partial(Cluster, policy, requests, setup)))
    return made


def _recorded_rows(title: str, recording: recorded.Recording, found: Calibrated, objective_s: float) -> list[Row]:
    """Return the line of what was recorded, and the speed that the simulated replicas have from it."""
    table, ttfts, seen = Table(title), recording.ttfts_s, recording.requests
    cached = sum(each.told.get("cached_l1", 0) for each in seen)
    not_ok = f"{len(seen) - len(ttfts)} not answered, {recording.num_lost} not recorded"
    hit = cached / sum(each.input_len for each in seen)
    took_s = max(each.ended_s for each in seen)
    _add_times(table, "as recorded", hit, not_ok, ttfts, objective_s=objective_s, took_s=took_s, num=len(seen))
    speed = Table(f"speed of the replicas, fitted to {found.num_requests} requests (median error {found.error:.0%})")
    speed.add("a step", [1e3 * found.step.base_s], "ms")
    speed.add("and for each running request", [1e3 * found.step.row_s], "ms")
    speed.add("and for each token of a prompt", [1e3 * found.step.prompt_token_s], "ms")
    speed.add("spread of a step", [100 * found.step.spread], "%")
    speed.add(f"pace, by {PACE_S:g} s", found.pace, note="times as long")
    speed.add("way to the engine", [1e3 * found.way_s], "ms")
    return speed.rows + table.rows


def summary(
    section: str, policy: str, records: Sequence[Record], *, num_replicas: int, objective_s: float
) -> list[Row]:
    """Return the line of a run of at least one request; all but the choice's time depends on the arguments alone.

    hit: prompt tokens that were cached where the request went, of all; within x s: requests whose first token
    came by then, a second from the first arrival to the last end; in time: their share; skew: prompt tokens computed by
    the busiest replica over the mean of all (1 is even); choice: CPU time on this machine.
    """
    table = Table(section)
    computed: Counter[str] = Counter()
    for record in records:
        computed[record.replica_id] += record.input_len - record.cached_tokens
    took_s = max(record.ended_s for record in records) - min(record.arrival_s for record in records)
    ttfts, choices = [each.ttft_s for each in records], [1e6 * each.decision_s for each in records]
    prompt_tokens = sum(record.input_len for record in records)

    reasons = Counter(record.reason for record in records).most_common()
    decided = ", ".join(f"{reason} {count:,}" for reason, count in reasons)
    hit = sum(record.cached_tokens for record in records) / prompt_tokens
    _add_times(table, policy, hit, decided, ttfts, objective_s=objective_s, took_s=took_s, num=len(ttfts))
    table.add(policy, [max(computed.values()) * num_replicas / computed.total()], figure="skew")
    for q in (50, 99):
        table.add(policy, [percentile(choices, q)], "us", figure=f"choice p{q}")
    return table.rows


def _add_times(
    table: Table, name: str, hit: float, note: str, ttfts: Sequence[float], *, objective_s: float, took_s: float,
    num: int,
) -> None:  # fmt: skip
    """Add the figures of ``num`` requests that took ``took_s`` together; those with a first token had it after
    ``ttfts``."""
    num_in_time = sum(each <= objective_s for each in ttfts)
    table.add(name, [100 * hit], "%", figure="hit", note=note)
    table.add(name, [sum(ttfts) / len(ttfts)], "s", figure="TTFT mean")
    for q in (50, 90, 95, 99):
        table.add(name, [percentile(ttfts, q)], "s", figure=f"TTFT p{q}")
    table.add(name, [num_in_time / took_s], "1/s", figure=f"within {objective_s:g} s")
    table.add(name, [100 * num_in_time / num], "%", figure="in time")


def _build(options: argparse.Namespace, requests: Sequence[SimRequest], queue: str) -> Build:
    """Return a replica of a small model on one GPU."""
    base_s, row_s = options.decode_step
    return Build(
        step=StepTime(base_s=base_s, prompt_token_s=1 / options.prefill_rate, row_s=row_s),
        page_size=options.page_size,
        pool_pages=options.pool_tokens // options.page_size,
        max_running=256,
        context_len=max(request.input_len + request.output_len for request in requests),
        scheduler=SchedulerConfig(policy=queue, chunked_prefill_size=8192, cascade=False),
        token_bytes=TOKEN_BYTES,
        link_bytes_per_s=options.link * 1e9 / 8,
    )  # fmt: skip


def _load(options: argparse.Namespace) -> list[SimRequest]:
    num, seed = options.requests or (200 if options.quick else 2000), options.seed
    if options.trace is not None:
        return read_trace(options.trace, rate=options.rate, limit=num if options.quick else options.requests)
    rate = options.rate * (options.replicas or [REPLICAS])[0]
    if options.workload == "bursts":
        return bursts(
            max(1, num // 17), size=16, question_len=256, output_len=64, requests_per_s=rate, lead_s=THINK_S,
            seed=seed,
        )  # fmt: skip
    if options.workload == "shared-prefix":
        workload = workloads.shared_prefix(
            num_groups=max(1, num // 20), per_group=min(num, 20), prefix_len=8192, question_len=512, output_len=256,
            vocab_size=32_000, seed=seed,
        )  # fmt: skip
    else:
        workload = workloads.multi_turn(
            num_users=max(1, num // 8), num_turns=min(num, 8), turn_len=1024, output_len=256, vocab_size=32_000,
            seed=seed,
        )  # fmt: skip
    return of_workload(workload, requests_per_s=rate, think_s=THINK_S, spread=0.5, seed=seed)


def prompts(prompt_len: int, rng: np.random.Generator) -> Iterator[npt.NDArray[np.int32]]:
    """Yield endless prompts [prompt_len], three quarters of each one of `NUM_PREFIXES` prefixes."""
    shared_len = prompt_len * 3 // 4
    prefixes = rng.integers(0, VOCABULARY, (NUM_PREFIXES, shared_len), dtype=np.int32)
    while True:
        own = rng.integers(0, VOCABULARY, prompt_len - shared_len, dtype=np.int32)
        yield np.concatenate([prefixes[rng.integers(NUM_PREFIXES)], own])


def live(options: argparse.Namespace) -> list[Row]:
    """Measure a live router before ``options.fleet`` replicas, and requests of 8,192 tokens."""
    num_replicas, seconds = (20, 2.0) if options.quick else (options.fleet, options.seconds)
    setup = live_router.Setup(
        num_replicas=num_replicas,
        pages=options.pages,
        period_s=options.stats_period,
        events_per_s=20.0 * num_replicas,
        event_pages=EVENT_PAGES,
    )
    asked = list(itertools.islice(prompts(LIVE_TOKENS, np.random.default_rng(options.seed)), 4 * NUM_PREFIXES))
    rounds = harness.rounds_of(options, 3)
    measured = live_router.measure(setup, asked, rounds=rounds, rate=options.requests_per_s, seconds=seconds)
    return list(live_router.run(measured))


def _positive(text: str) -> float:
    if (value := float(text)) > 0:
        return value
    raise argparse.ArgumentTypeError(f"{text} must be above 0")


def _options(parse: argparse.ArgumentParser) -> None:
    def add(name: str, default: Any, help: str, **more: Any) -> None:
        more.setdefault("type", type(default))
        parse.add_argument(name, default=default, help=f"{help} ({default})", **more)

    parse.add_argument(
        "--policy", action="append", choices=(*POLICIES, ORACLE),
        help="repeat to compare (estimated_ttft); oracle sees every replica",
    )  # fmt: skip
    load = parse.add_mutually_exclusive_group()
    load.add_argument("--trace", type=pathlib.Path, help="a recording of router.record, or a trace of Mooncake's")
    load.add_argument("--workload", choices=WORKLOADS, default="multi-turn", help="generate the load instead")
    parse.add_argument("--requests", type=int, help="of a trace, from its first; about as many of a workload (2000)")
    parse.add_argument("--plot", type=pathlib.Path, help="write the distribution of TTFT there, as SVG")
    parse.add_argument(
        "--decode-step", type=float, nargs=2, default=(0.02, 0.0002), metavar=("BASE", "EACH"),
        help="s of a step without prompts, and s that each running request adds (0.02 0.0002)",
    )  # fmt: skip
    add("--rate", 1.0, "of a trace: times as fast; of a workload: requests/s a replica", type=_positive)
    parse.add_argument(
        "--queue", nargs="+", choices=ORDERS,
        help="orders of a replica's queue, a scheduler.policy each (fcfs; of a recording its own)",
    )  # fmt: skip
    parse.add_argument("--replicas", type=int, nargs="+", help="simulated replicas (8; of a recording as many)")
    add("--pool-tokens", 1_024_000, "KV pool of a replica")
    add("--page-size", 512, "tokens a page")
    add("--link", 0.0, "Gbit/s of a replica to all others, each way, over which they fetch; 0: they do not")
    add("--prefill-rate", 5000.0, "prompt tokens/s of a replica", type=_positive)
    add("--stats-period", 0.1, "s between two reports of a replica", type=_positive)
    add("--event-delay", 0.02, "s that reports and page events travel")
    add("--fleet", 1_000, "live: replicas")
    add("--pages", 1_024, "live: that each caches")
    add("--seconds", 20.0, "live: of load", type=_positive)
    add("--requests-per-s", 50.0, "live: of 8,192 tokens", type=_positive)
    parse.add_argument("--objective", type=_positive, help="TTFT in s that is in time (5; of a recording its own)")


PARTS = {
    "simulate": Part(about="policies over simulated replicas", measure=simulate),
    "live": Part(about="a live router before 1,000 replicas in another process", measure=live, asked=True),
    "tenants": Part(about="one tenant floods a replica, nine chat: simulated", measure=sim_tenants.measure, asked=True),
}


def main(argv: Sequence[str] | None = None) -> None:
    load_extensions()
    harness.run("router", __doc__, PARTS, argv, options=_options)
