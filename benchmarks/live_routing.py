"""Cache-aware routing against round robin, live: `python -m benchmarks.live_routing`.

Two replicas on a local Ray whose pools each hold half of the groups of a shared-prefix workload: a router that follows
the caches keeps each group on one replica; one that does not makes both evict. The policies alternate: each round
serves the same workload with one and then with the other, each time in an application started anew (so that nothing
of the one is left for the other), from caches that one request a group has filled. Loads: `saturated` is a closed
loop above the knee, `relaxed` a Poisson process below it.
"""

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from benchmarks.client import Client, ClosedLoop, OpenLoop, Run
from benchmarks.report import Row, publish
from benchmarks.serving import percentile
from benchmarks.workloads import Workload, shared_prefix

ROOT = Path(__file__).resolve().parents[1]
START_S = 240.0
STOP_S = 60.0
PAGE_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The workload, and the pools that half of it fits into."""

    groups: int
    per_group: int
    prefix_len: int
    question_len: int
    output_len: int
    concurrency: int

    @property
    def pool_tokens(self) -> int:
        """Half of the groups, and what the requests that run at once on one of two replicas add to them."""
        own = self.question_len + self.output_len + PAGE_SIZE
        return self.groups // 2 * self.prefix_len + self.concurrency // 2 * own

    def workload(self, seed: int) -> Workload:
        return shared_prefix(
            num_groups=self.groups,
            per_group=self.per_group,
            prefix_len=self.prefix_len,
            question_len=self.question_len,
            output_len=self.output_len,
            vocab_size=32_000,
            seed=seed,
        )


@contextlib.contextmanager
def serving(policy: str, pool_tokens: int) -> Iterator[str]:
    """The application with two replicas and this policy; yields its URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    config = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    config["http_options"]["port"] = port
    args = config["applications"][0]["args"]
    args["replicas"] = {"count": 2, "cpus": 1}
    args["cache"] = {"page_size": PAGE_SIZE, "max_total_tokens": pool_tokens}
    args["router"] = {"policy": policy, "max_wait_s": 3600}
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    with tempfile.TemporaryDirectory(prefix="manta-bench-") as folder:
        file, log = Path(folder) / "serve_config.yaml", Path(folder) / "serve.log"
        file.write_text(yaml.safe_dump(config))
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "deployments", "serve", str(file)],
                stdout=out, stderr=subprocess.STDOUT, env=environment, cwd=ROOT, start_new_session=True,
            )  # fmt: skip
        try:
            _wait_ready(process, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(STOP_S)


def _wait_ready(process: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + START_S
    while "Try it:" not in log.read_text():
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise RuntimeError(f"the application did not start:\n{log.read_text()}")
        time.sleep(0.2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One run of one policy under one load."""

    hit_ratio: float
    requests_per_s: float
    ttft_p50_s: float
    num_failed: int

    @staticmethod
    def of(run: Run) -> "Measured":
        ttfts = [sample.ttft_s for sample in run.answered if sample.ttft_s is not None]
        prompt_tokens = sum(sample.prompt_tokens for sample in run.answered)
        return Measured(
            hit_ratio=sum(sample.cached_tokens for sample in run.answered) / prompt_tokens,
            requests_per_s=len(run.answered) / run.wall_s,
            ttft_p50_s=percentile(ttfts, 50),
            num_failed=sum(run.errors.values()),
        )


def measure(policy: str, sizes: Sizes, rate: float, seed: int, max_s: float) -> dict[str, Measured]:
    """Both loads with one policy, each from warmed caches."""
    found = {}
    with serving(policy, sizes.pool_tokens) as url:
        client = Client(url, "SmolLM2-135M-Instruct")
        for load in (ClosedLoop(concurrency=sizes.concurrency), OpenLoop(rate=rate, seed=seed)):
            name = "saturated" if isinstance(load, ClosedLoop) else "relaxed"
            workload = sizes.workload(seed + (name == "relaxed"))
            urllib.request.urlopen(f"{url}/flush_cache?timeout=30", timeout=60).close()
            asyncio.run(client.run(_one_a_group(workload), ClosedLoop(concurrency=2), max_s=max_s))
            found[name] = Measured.of(asyncio.run(client.run(workload, load, max_s=max_s)))
            print(f"  {policy}, {name}: {found[name]}", file=sys.stderr, flush=True)
    return found


def _one_a_group(workload: Workload) -> Workload:
    """The first request of each group: what fills the caches before the clock starts."""
    first = {each.name.split(".")[0]: each for each in reversed(workload.conversations)}
    return replace(workload, name=f"{workload.name}, warm-up", conversations=tuple(first.values()))


def rows_of(found: dict[str, list[dict[str, Measured]]], baseline: str, ours: str) -> list[Row]:
    """Per load: each policy's numbers by round, and their ratios."""
    rows = []
    for load in ("saturated", "relaxed"):
        section = f"live routing, {load}"
        runs = {policy: [each[load] for each in rounds] for policy, rounds in found.items()}
        for policy, of_policy in runs.items():
            rows += [
                Row.of(section, f"{policy}: cached prompt tokens", [100 * run.hit_ratio for run in of_policy], "%"),
                Row.of(section, f"{policy}: requests/s", [run.requests_per_s for run in of_policy], "1/s"),
                Row.of(section, f"{policy}: TTFT p50", [run.ttft_p50_s for run in of_policy], "s"),
                Row.of(section, f"{policy}: failed", [float(run.num_failed) for run in of_policy], ""),
            ]
        pairs = list(zip(runs[ours], runs[baseline], strict=True))
        saturated = load == "saturated"
        hits = [a.hit_ratio / max(b.hit_ratio, 1e-9) for a, b in pairs]
        throughput = [a.requests_per_s / b.requests_per_s for a, b in pairs]
        rows += [
            Row.of(section, "hit ratio, times", hits, "x", target=">= 2x"),
            Row.of(section, "requests/s, times", throughput, "x", target=">= 1.4x" if saturated else ""),
            Row.of(section, "TTFT p50, times", [a.ttft_p50_s / b.ttft_p50_s for a, b in pairs], "x", target="< 1x"),
        ]
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parse = argparse.ArgumentParser(prog="python -m benchmarks.live_routing", description=__doc__)
    parse.add_argument("--policy", default="estimated_ttft", help="what is held against --baseline")
    parse.add_argument("--baseline", default="round_robin")
    parse.add_argument("--rounds", type=int, default=2, help="each serves both policies, in alternating order")
    parse.add_argument("--groups", type=int, default=16)
    parse.add_argument("--per-group", type=int, default=6)
    parse.add_argument("--prefix-len", type=int, default=512)
    parse.add_argument("--question-len", type=int, default=32)
    parse.add_argument("--output-len", type=int, default=8)
    parse.add_argument("--concurrency", type=int, default=8, help="of the saturated load")
    parse.add_argument("--rate", type=float, default=1.0, help="requests a second of the relaxed load")
    parse.add_argument("--max-s", type=float, default=240.0, help="seconds a run may take")
    parse.add_argument("--seed", type=int, default=0)
    parse.add_argument("--json", metavar="OUT", help="also write JSON here")
    options = parse.parse_args(argv)
    sizes = Sizes(
        groups=options.groups,
        per_group=options.per_group,
        prefix_len=options.prefix_len,
        question_len=options.question_len,
        output_len=options.output_len,
        concurrency=options.concurrency,
    )
    found: dict[str, list[dict[str, Measured]]] = {options.baseline: [], options.policy: []}
    for round_ in range(options.rounds):
        order = [options.baseline, options.policy] if round_ % 2 == 0 else [options.policy, options.baseline]
        for policy in order:
            found[policy].append(measure(policy, sizes, options.rate, options.seed + 2 * round_, options.max_s))
    publish(rows_of(found, options.baseline, options.policy), json_path=options.json)


if __name__ == "__main__":
    main()
