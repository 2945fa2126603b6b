"""`python -m benchmarks.simulate`: the production router over simulated replicas, policy against policy.

    python -m benchmarks.simulate --trace FILE --replicas 8 --pool-tokens 1024000 --prefill-rate 5000 \\
        --policy estimated_ttft --policy round_robin --json out.json --plot out.svg

Owns:  the command line. The parts: sim_requests (load), sim_cluster (a run) of sim_replica, sim_split, sim_routers and
       sim_reports, sim_result (numbers), sim_table and sim_plot.
"""

import argparse
import json
import pathlib
import sys
from collections.abc import Sequence
from functools import partial

from rich.progress import Progress, TimeElapsedColumn

from benchmarks import workloads
from benchmarks.sim_cluster import ORACLE, Cluster, Setup
from benchmarks.sim_plot import plot_ttft
from benchmarks.sim_replica import Speed
from benchmarks.sim_reports import Limits
from benchmarks.sim_requests import SimRequest, copies, jittered, of_workload, read_trace
from benchmarks.sim_result import Result, summarise
from benchmarks.sim_soonest import SOONEST
from benchmarks.sim_split import Split
from benchmarks.sim_table import show
from routing.policies import POLICIES

WORKLOADS = ("shared-prefix", "multi-turn")


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        requests = copies(jittered(_load(args), args.jitter, seed=args.seed), args.copies)
        results, ttft_s = _run_all(args, requests)
    except (OSError, ValueError) as error:
        print(f"simulate: {error}", file=sys.stderr)
        return 2
    source = args.trace or args.workload
    replicas = f"{args.replicas} replicas"
    if args.split:
        replicas = f"{args.split[0]} prefill and {args.split[1]} decode replicas"
    title = f"{source}: {len(requests):,} requests at rate {args.rate:g}, {replicas}"
    show(results, title=title)
    if args.json:
        _write(args.json, json.dumps([result.to_json() for result in results], indent=1) + "\n")
    if args.plot:
        _write(args.plot, plot_ttft(ttft_s, title))
    return 0


def _run_all(
    args: argparse.Namespace, requests: list[SimRequest]
) -> tuple[list[Result], dict[str, list[float]]]:
    setup = _setup(args)
    num_replicas = setup.num_replicas
    results: list[Result] = []
    ttft_s: dict[str, list[float]] = {}
    with Progress(*Progress.get_default_columns(), TimeElapsedColumn(), disable=not sys.stderr.isatty()) as progress:
        for policy in args.policy or ["estimated_ttft"]:
            task = progress.add_task(policy, total=len(requests))
            cluster = Cluster(policy, requests, setup, progress=partial(progress.advance, task))
            records = cluster.run()
            cluster.check()
            apart = cluster.routers.apart() if cluster.routers else None
            results.append(
                summarise(policy, records, num_replicas=num_replicas, objective_s=args.objective, apart=apart)
            )
            ttft_s[policy] = [record.ttft_s for record in records]
    return results, ttft_s


def _setup(args: argparse.Namespace) -> Setup:
    base_s, per_request_s = args.decode_step
    split = None
    if args.split:
        split = Split(num_decoders=args.split[1], bytes_per_token=args.kv_bytes, bytes_per_s=args.transfer_rate)
    return Setup(
        num_replicas=args.split[0] if args.split else args.replicas,
        pool_tokens=args.pool_tokens,
        page_size=args.page_size,
        speed=Speed(
            prefill_tokens_per_s=args.prefill_rate,
            decode_base_s=base_s,
            decode_per_request_s=per_request_s,
            rate_error=args.rate_error,
            rate_noise=args.rate_noise,
        ),
        erring=args.erring,
        split=split,
        num_routers=args.routers,
        limits=Limits(period_s=args.stats_period, delay_s=args.event_delay, event_loss=args.event_loss),
        seed=args.seed,
    )


def _load(args: argparse.Namespace) -> list[SimRequest]:
    if args.trace is not None:
        return read_trace(args.trace, rate=args.rate, limit=args.requests)
    num = args.requests or 2000
    if args.workload == "shared-prefix":
        workload = workloads.shared_prefix(
            num_groups=max(1, num // 20),
            per_group=min(num, 20),
            prefix_len=8192,
            question_len=512,
            output_len=256,
            vocab_size=32_000,
            seed=args.seed,
        )
    else:
        workload = workloads.multi_turn(
            num_users=max(1, num // 8),
            num_turns=min(num, 8),
            turn_len=1024,
            output_len=256,
            vocab_size=32_000,
            seed=args.seed,
        )
    return of_workload(workload, requests_per_s=args.rate * args.replicas, think_s=args.think, seed=args.seed)


def _write(path: pathlib.Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.simulate",
        description="The production router over simulated replicas, policy against policy.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    load = parser.add_argument_group("load").add_mutually_exclusive_group(required=True)
    load.add_argument("--trace", type=pathlib.Path, help="a trace in Mooncake's format")
    load.add_argument("--workload", choices=WORKLOADS, help="generate the load instead")
    add = parser.add_argument
    add("--rate", type=_positive, default=1.0, help="of a trace: times as fast; of a workload: requests/s a replica")
    add("--requests", type=int, help="only the first so many of a trace; about so many of a workload (2000)")
    add("--copies", type=int, default=1, help="so many groups of users do the same, a little later each")
    add("--think", type=float, default=10.0, help="s between an answer and the next turn (multi-turn)")
    add("--jitter", type=_seconds, default=0.0, help="requests come up to so many s later, at random")
    add("--policy", action="append", choices=(*POLICIES, SOONEST, ORACLE),
        help="repeat to compare (default: estimated_ttft); soonest is that without behind_s")  # fmt: skip
    add("--replicas", type=int, default=8)
    add("--routers", type=int, default=1, help="so many side by side take the requests in turn")
    add("--split", type=_split, metavar="P:D", help="P replicas prefill, D others decode; instead of --replicas")
    add("--transfer-rate", type=_positive, default=25e9, help="bytes/s from a prefill to a decode replica (--split)")
    add("--kv-bytes", type=int, default=131_072, help="K/V bytes of a token that travel (--split)")
    add("--pool-tokens", type=int, default=1_024_000, help="KV pool of a replica")
    add("--page-size", type=int, default=512, help="tokens a page")
    add("--prefill-rate", type=_positive, default=5000.0, help="prompt tokens/s of a replica")
    add("--decode-step", type=float, nargs=2, default=(0.02, 0.0002), metavar=("BASE", "EACH"),
        help="s of a decode step, and s that each request of the batch adds")  # fmt: skip
    add("--stats-period", type=_positive, default=0.1, help="s between two reports of a replica")
    add("--event-delay", type=float, default=0.02, help="s that reports and page events travel")
    add("--event-loss", type=float, default=0.0, help="share of the batches of page events that get lost")
    add("--rate-error", type=_positive, default=1.0, help="replicas measure their prefill rate so many times too high")
    add("--erring", type=_share, default=1.0, help="the share of the replicas that do (--rate-error)")
    add("--rate-noise", type=float, default=0.1, help="and each measurement varies by this share")
    add("--objective", type=float, default=5.0, help="TTFT in s within which a request counts as goodput")
    add("--seed", type=int, default=0)
    add("--json", type=pathlib.Path, help="write the results there")
    add("--plot", type=pathlib.Path, help="write the distribution of TTFT there, as SVG")
    return parser


def _positive(text: str) -> float:
    value = float(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text} must be above 0")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} must not be below 0")
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} must be from 0 to 1")
    return value


def _split(text: str) -> tuple[int, int]:
    prefill, _, decode = text.partition(":")
    if not (prefill.isdecimal() and decode.isdecimal() and int(prefill) and int(decode)):
        raise argparse.ArgumentTypeError(f"{text} must be two counts above 0, as 6:2")
    return int(prefill), int(decode)


if __name__ == "__main__":
    sys.exit(main())
