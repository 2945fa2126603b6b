"""The production router: policy against policy over simulated replicas, and what a decision costs.

    python -m benchmarks router simulate --trace FILE --policy estimated_ttft --policy oracle --plot OUT.svg
    python -m benchmarks router simulate --trace RECORDING --replicas 1 2 3 4 --queue lpm on_time
    python -m benchmarks router cost --tokens 1024 8192
    python -m benchmarks router moves
    python -m benchmarks router tenants
    python -m benchmarks router adapters
    python -m benchmarks router keys
    python -m benchmarks router live --fleet 1000 --stats-period 0.5

`simulate` is deterministic but for the CPU time of decisions: load of sim_load, a run of sim_cluster.
`cost` times `Router.choose` alone, on one thread. A request shares three quarters of its prompt with one of 50
prefixes, as chats with long histories do; `choose` hashes it, looks it up, scores every replica, and takes its pages
into the index. With events, as in the app, each replica tells what it stored and removed (not timed: that is off the
request path); without, the index keeps the order of use itself. Pools are full at 8 replicas. Every replica reports
each 0.1 s of simulated time (not timed, but the choice after it takes the new numbers in).
`moves` has requests that wait move to another replica, or stay (sim_moves.py).
`tenants` has one tenant flood a replica on which nine chat (sim_tenants.py).
`adapters` has 200 adapters, of which 20 are hot, over four replicas (sim_adapters.py).
`keys` times what a key's check, scope and quota add to a request (key_cost.py).
`live` puts the router behind its fleet and channel, before replicas of another process (live_router.py).
"""

import argparse
import itertools
import pathlib
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.progress import Progress, TimeElapsedColumn

from benchmarks import harness, key_cost, live_router, recorded, sim_adapters, sim_moves, sim_tenants, workloads
from benchmarks.calibration import PACE_S, Calibrated, build_of, calibrate
from benchmarks.harness import Part, Row, Table, percentile
from benchmarks.sim_cluster import ORACLE, Cluster, Record, Setup, Split
from benchmarks.sim_engine import EngineCluster
from benchmarks.sim_load import SimRequest, copies, jittered, of_workload, read_trace
from benchmarks.sim_replica import SimPool, Speed
from benchmarks.sim_routers import SOONEST, Apart, Limits
from kvtransfer.pages import PageKey
from replicas.config import load_extensions
from replicas.scheduler.orders import ORDERS
from routing.policies import POLICIES
from routing.router import Router
from routing.types import Ending, IndexEvent, ReplicaView, RouteOutcome, RouteQuery

WORKLOADS = ("shared-prefix", "multi-turn", "agents")
PAGE_SIZE, POOL_PAGES = 16, 8_192
REPORT_S = 0.1
REPLICAS = 8
OBJECTIVE_S = 5.0
MakeCluster = Callable[[Callable[[], None]], Cluster]
INF = float("inf")
NUM_PREFIXES = 50
VOCABULARY = 49_152
WARM_UP = 400  # decisions
TARGETS_MS = {(8, 8_192): 0.3, (1_000, 8_192): 2.0}  # p50
LIVE_TOKENS, EVENT_PAGES = 8_192, 16
FINISHED = RouteOutcome(ending=Ending.OK, ttft_s=0.1)
COST_SECTION = "what `choose` costs"


def simulate(options: argparse.Namespace) -> list[Row]:
    """Return a line for each policy. Raises: SystemExit that says which option or line of the trace is wrong."""
    if options.plot:
        harness.need_plots()
    try:
        recording = None
        if options.trace is not None and recorded.is_recording(options.trace):
            recording = recorded.read(options.trace, limit=200 if options.quick else options.requests)
        load = _load(options) if recording is None else recorded.sim_requests(recording, rate=options.rate)
        requests = copies(jittered(load, options.jitter, seed=options.seed), options.copies)
        return _run_all(options, requests, recording)
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
            apart = cluster.routers.apart() if cluster.routers else None
            is_agents = options.trace is None and options.workload == "agents"
            rows += summary(
                title, name, records, num_replicas=len(cluster.replicas), objective_s=objective_s, apart=apart,
                num_sessions=sum(each.after is None for each in requests) if is_agents else 0,
            )  # fmt: skip
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
        if options.split:
            size = "{} prefill and {} decode replicas".format(*options.split)
        setup = _setup(options, count, queue or "fcfs")
        if recording is None or found is None:
            make: MakeCluster = partial(Cluster, policy, requests, setup)
        else:
            build = build_of(recording, found, queue=queue, rate=options.rate)
            make = partial(EngineCluster, policy, requests, setup, build)
        made.append((", ".join(words), size, make))
    return made


def _recorded_rows(title: str, recording: recorded.Recording, found: Calibrated, objective_s: float) -> list[Row]:
    """Return the line of what was recorded, and the speed that the simulated replicas have from it."""
    table, ttfts = Table(title), recording.ttfts_s
    seen = recording.requests

    def add(figure: str, value: float, unit: str = "", note: str = "") -> None:
        table.add("as recorded", [value], unit, figure=figure, note=note)

    cached = sum(each.told.get("cached_l1", 0) for each in seen)
    not_ok = f"{len(seen) - len(ttfts)} not answered, {recording.num_lost} not recorded"
    add("hit", 100 * cached / sum(each.input_len for each in seen), "%", not_ok)
    add("TTFT mean", sum(ttfts) / len(ttfts), "s")
    for q in (50, 90, 95, 99):
        add(f"TTFT p{q}", percentile(ttfts, q), "s")
    took_s = max(each.arrival_s + each.told["total_s"] for each in seen)
    num_in_time = sum(each <= objective_s for each in ttfts)
    add(f"within {objective_s:g} s", num_in_time / took_s, "1/s")
    add("in time", 100 * num_in_time / len(seen), "%")
    speed = Table(f"speed of the replicas, fitted to {found.num_requests} requests (median error {found.error:.0%})")
    speed.add("a step", [1e3 * found.step.base_s], "ms")
    speed.add("and for each running request", [1e3 * found.step.row_s], "ms")
    speed.add("and for each token of a prompt", [1e3 * found.step.prompt_token_s], "ms")
    speed.add("spread of a step", [100 * found.step.spread], "%")
    speed.add(f"pace, by {PACE_S:g} s", found.pace, note="times as long")
    speed.add("way to the engine", [1e3 * found.way_s], "ms")
    return speed.rows + table.rows


def summary(
    section: str, policy: str, records: Sequence[Record], *, num_replicas: int, objective_s: float,
    apart: Apart | None = None, num_sessions: int = 0,
) -> list[Row]:  # fmt: skip
    """Return the line of a run of at least one request; all but the choice's time depends on the arguments alone.

    hit: prompt tokens that were cached where the request went, of all; within x s: requests whose first token
    came by then, a second from the first arrival to the last end; in time: their share; skew: prompt tokens computed by
    the busiest replica over the mean of all (1 is even); choice: CPU time on this machine. num_sessions: of agents, all
    of whose turns are in ``records``; 0: they are none.
    """
    table = Table(section)
    computed: Counter[str] = Counter()
    for record in records:
        computed[record.replica_id] += record.input_len - record.cached_tokens
    took_s = max(record.ended_s for record in records) - min(record.arrival_s for record in records)
    ttfts, choices = [each.ttft_s for each in records], [1e6 * each.decision_s for each in records]
    prompt_tokens = sum(record.input_len for record in records)

    def add(figure: str, value: float, unit: str = "", note: str = "") -> None:
        table.add(policy, [value], unit, figure=figure, note=note)

    reasons = Counter(record.reason for record in records).most_common()
    decided = ", ".join(f"{reason} {count:,}" for reason, count in reasons)
    add("hit", 100 * sum(record.cached_tokens for record in records) / prompt_tokens, "%", decided)
    if num_sessions:
        add("sessions a minute", 60 * num_sessions / took_s, "1/min")
    add("TTFT mean", sum(ttfts) / len(ttfts), "s")
    for q in (50, 90, 95, 99):
        add(f"TTFT p{q}", percentile(ttfts, q), "s")
    num_in_time = sum(each <= objective_s for each in ttfts)
    add(f"within {objective_s:g} s", num_in_time / took_s, "1/s")
    add("in time", 100 * num_in_time / len(ttfts), "%")
    add("skew", max(computed.values()) * num_replicas / computed.total())
    for q in (50, 99):
        add(f"choice p{q}", percentile(choices, q), "us")
    if apart is not None:
        routers = f"{apart.routers} routers"
        add("pages apart, mean", 100 * apart.pages_mean, "%", f"{routers}, {apart.samples} samples")
        add("most", 100 * apart.pages_max, "%")
        add("at the end", 100 * apart.pages_at_end, "%")
        add("decisions apart", 100 * apart.decisions, "%")
    return table.rows


def _setup(options: argparse.Namespace, count: int, queue: str) -> Setup:
    base_s, per_request_s = options.decode_step
    split = None
    if options.split:
        _, num_decoders = options.split
        split = Split(num_decoders=num_decoders, bytes_per_token=options.kv_bytes, bytes_per_s=options.transfer_rate)
    return Setup(
        num_replicas=options.split[0] if options.split else count,
        pool_tokens=options.pool_tokens,
        page_size=options.page_size,
        speed=Speed(
            prefill_tokens_per_s=options.prefill_rate,
            queue=queue,
            ageing_s=options.ageing,
            objective_s=options.objective or OBJECTIVE_S,
            late_factor=options.late_factor,
            decode_base_s=base_s,
            decode_per_request_s=per_request_s,
            rate_error=options.rate_error,
            rate_noise=options.rate_noise,
        ),
        erring=options.erring,
        split=split,
        num_routers=options.routers,
        limits=Limits(period_s=options.stats_period, delay_s=options.event_delay, event_loss=options.event_loss),
        seed=options.seed,
    )


def _load(options: argparse.Namespace) -> list[SimRequest]:
    num, seed = options.requests or (200 if options.quick else 2000), options.seed
    if options.trace is not None:
        return read_trace(options.trace, rate=options.rate, limit=num if options.quick else options.requests)
    if options.workload == "shared-prefix":
        workload = workloads.shared_prefix(
            num_groups=max(1, num // 20), per_group=min(num, 20), prefix_len=8192, question_len=512, output_len=256,
            vocab_size=32_000, seed=seed,
        )  # fmt: skip
    elif options.workload == "agents":
        workload = workloads.agents(
            num_sessions=max(1, num // 20), num_turns=min(num, 20), head_len=workloads.AGENT_HEAD_LEN, tool_len=1000,
            output_len=100, vocab_size=32_000, seed=seed,
        )  # fmt: skip
    else:
        workload = workloads.multi_turn(
            num_users=max(1, num // 8), num_turns=min(num, 8), turn_len=1024, output_len=256, vocab_size=32_000,
            seed=seed,
        )  # fmt: skip
    rate = options.rate * (options.replicas or [REPLICAS])[0]
    return of_workload(workload, requests_per_s=rate, think_s=options.think, seed=seed)


def prompts(prompt_len: int, rng: np.random.Generator) -> Iterator[npt.NDArray[np.int32]]:
    """Yield endless prompts [prompt_len], three quarters of each one of `NUM_PREFIXES` prefixes."""
    shared_len = prompt_len * 3 // 4
    prefixes = rng.integers(0, VOCABULARY, (NUM_PREFIXES, shared_len), dtype=np.int32)
    while True:
        own = rng.integers(0, VOCABULARY, prompt_len - shared_len, dtype=np.int32)
        yield np.concatenate([prefixes[rng.integers(NUM_PREFIXES)], own])


def serve(pool: SimPool, keys: Sequence[PageKey]) -> list[IndexEvent]:
    """Take in the pages of a prompt, which ends at once; return what that stored and removed."""
    num_told, num_held = len(pool.events), pool.match_len(keys)
    pool.take(keys[:num_held], len(keys) - num_held)
    pool.store(keys[num_held:])
    pool.release(keys, 0)
    return pool.events[num_told:]


def decision_ms(policy: str, num_replicas: int, prompt_len: int, *, events: bool, runs: int) -> list[float]:
    """Warm the index up with a few hundred decisions, then time each of ``runs``."""
    now_s = reported_s = 0.0
    router = Router(policy, Random(0), lambda: now_s, page_size=PAGE_SIZE)
    router.update(_views(num_replicas, now_s))
    pools = {view.replica_id: SimPool(POOL_PAGES) for view in router.views}
    source = prompts(prompt_len, np.random.default_rng(0))
    times_ms = []
    for at in range(WARM_UP + runs):
        query = RouteQuery(rid=str(at), token_ids=next(source))
        now_s += 1.6 * prompt_len / 5_000.0 / num_replicas
        if now_s - reported_s >= REPORT_S:
            router.update(_views(num_replicas, now_s))
            reported_s = now_s
        begun_s = time.perf_counter()
        decision = router.choose(query)
        times_ms.append(1e3 * (time.perf_counter() - begun_s))
        if events:
            router.apply(decision.replica_id, serve(pools[decision.replica_id], decision.keys.tolist()))
        router.done(decision, FINISHED)
    return times_ms[WARM_UP:]


def _views(num_replicas: int, now_s: float) -> list[ReplicaView]:
    return [
        ReplicaView(
            replica_id=f"replica-{at:04}", time_s=now_s, pool_pages=POOL_PAGES, page_size=PAGE_SIZE,
            prefill_tokens_per_s=5_000.0, decode_step_s=0.03, max_running_requests=256,
        )
        for at in range(num_replicas)
    ]  # fmt: skip


def cost(options: argparse.Namespace) -> Iterator[Row]:
    """Yield p50 and p99 of a decision at each size, with events and without."""
    [policy, *_] = options.policy or ["estimated_ttft"]
    replicas, tokens = ([8], [1_024]) if options.quick else ([8, 64, 1_000], options.tokens)
    for events, num_replicas, prompt_len in itertools.product((True, False), replicas, tokens):
        times_ms = decision_ms(policy, num_replicas, prompt_len, events=events, runs=50 if options.quick else 600)
        name = f"{policy}, {num_replicas:,} replicas, {prompt_len:,} tokens, events {'on' if events else 'off'}"
        target = TARGETS_MS.get((num_replicas, prompt_len))
        for q in (50, 99):
            asked = f"< {target} ms" if q == 50 and target else None
            value = percentile(times_ms, q)
            yield Row(
                section=COST_SECTION, name=f"{name}: p{q}", value=value, unit="ms", runs=len(times_ms), target=asked
            )


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
    measured = live_router.measure(
        setup, asked, rounds=harness.rounds_of(options, 3), rate=options.requests_per_s, seconds=seconds
    )
    return live_router.rows_of(live_router.run(measured))


def _number(least: float, *, most: float = INF, above: bool = False) -> Callable[[str], float]:
    """Return what parses a number of at least (or above) ``least``."""

    def parse(text: str) -> float:
        value = float(text)
        if not (value > least if above else value >= least) or value > most:
            bound = f"above {least:g}" if above else f"at least {least:g}"
            raise argparse.ArgumentTypeError(f"{text} must be {bound}" + (f", at most {most:g}" if most < INF else ""))
        return value

    return parse


def _split(text: str) -> tuple[int, int]:
    prefill, _, decode = text.partition(":")
    if not (prefill.isdecimal() and decode.isdecimal() and int(prefill) and int(decode)):
        raise argparse.ArgumentTypeError(f"{text} must be two counts above 0, as 6:2")
    return int(prefill), int(decode)


def _options(parse: argparse.ArgumentParser) -> None:
    positive = _number(0, above=True)

    def add(name: str, default: Any, help: str, **more: Any) -> None:
        more.setdefault("type", type(default))
        parse.add_argument(name, default=default, help=f"{help} ({default})", **more)

    parse.add_argument(
        "--policy", action="append", choices=(*POLICIES, SOONEST, ORACLE),
        help="repeat to compare (estimated_ttft); soonest is that without behind_s; oracle sees every replica",
    )  # fmt: skip
    parse.add_argument("--tokens", type=int, nargs="+", default=[1_024, 8_192, 32_768], help="cost: prompt lengths")
    load = parse.add_mutually_exclusive_group()
    load.add_argument("--trace", type=pathlib.Path, help="a recording of router.record, or a trace of Mooncake's")
    load.add_argument("--workload", choices=WORKLOADS, default="multi-turn", help="generate the load instead")
    parse.add_argument("--requests", type=int, help="of a trace, from its first; about as many of a workload (2000)")
    parse.add_argument("--plot", type=pathlib.Path, help="write the distribution of TTFT there, as SVG")
    parse.add_argument("--split", type=_split, metavar="P:D", help="P replicas prefill, D others decode")
    parse.add_argument(
        "--decode-step", type=float, nargs=2, default=(0.02, 0.0002), metavar=("BASE", "EACH"),
        help="s of a decode step, and s that each request of the batch adds (0.02 0.0002)",
    )  # fmt: skip
    add("--rate", 1.0, "of a trace: times as fast; of a workload: requests/s a replica", type=positive)
    add("--copies", 1, "groups of users that do the same, a little later each")
    parse.add_argument(
        "--queue", nargs="+", choices=ORDERS,
        help="orders of a replica's queue, a scheduler.policy each (fcfs; of a recording its own)",
    )  # fmt: skip
    add("--ageing", 5.0, "s after which a waiting request goes first, whatever the order", type=_number(0))
    add("--late-factor", 2.0, "on_time: times that a late one may wait of what order of arrival takes", type=_number(1))
    add("--think", 10.0, "s between an answer and the next turn")
    add("--jitter", 0.0, "requests come later at random, by this many s at most", type=_number(0))
    parse.add_argument("--replicas", type=int, nargs="+", help="simulated replicas (8; of a recording as many)")
    add("--routers", 1, "routers side by side, which take the requests in turn")
    add("--transfer-rate", 25e9, "bytes/s from a prefill to a decode replica", type=positive)
    add("--kv-bytes", 131_072, "K/V bytes of a token that travel")
    add("--pool-tokens", 1_024_000, "KV pool of a replica")
    add("--page-size", 512, "tokens a page")
    add("--prefill-rate", 5000.0, "prompt tokens/s of a replica", type=positive)
    add("--stats-period", 0.1, "s between two reports of a replica", type=positive)
    add("--event-delay", 0.02, "s that reports and page events travel")
    add("--event-loss", 0.0, "share of the batches of page events that get lost")
    add("--rate-error", 1.0, "replicas measure their prefill rate this many times too high", type=positive)
    add("--erring", 1.0, "the share of the replicas that do", type=_number(0, most=1))
    add("--rate-noise", 0.1, "each measurement varies by this share")
    add("--fleet", 1_000, "live: replicas")
    add("--pages", 1_024, "live: that each caches")
    add("--seconds", 20.0, "live: of load", type=positive)
    add("--requests-per-s", 50.0, "live: of 8,192 tokens", type=positive)
    parse.add_argument("--objective", type=positive, help="TTFT in s that is in time (5; of a recording its own)")


PARTS = {
    "simulate": Part(about="policies over simulated replicas", measure=simulate),
    "live": Part(about="a live router before 1,000 replicas in another process", measure=live, asked=True),
    "moves": Part(about="requests that wait move, or stay: simulated replicas", measure=sim_moves.measure, asked=True),
    "tenants": Part(about="one tenant floods a replica, nine chat: simulated", measure=sim_tenants.measure, asked=True),
    "adapters": Part(about="200 adapters over four replicas: simulated", measure=sim_adapters.measure, asked=True),
    "keys": Part(about="what keys with limits add to a request", measure=key_cost.measure, asked=True),
    "cost": Part(about="`Router.choose` at 8, 64 and 1,000 replicas", measure=cost),
}


def main(argv: Sequence[str] | None = None) -> None:
    load_extensions()
    harness.run("router", __doc__, PARTS, argv, options=_options)
