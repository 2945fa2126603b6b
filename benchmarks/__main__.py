"""`python -m benchmarks`: everything that needs no server, as tables and JSON; with `--url`, a server too.

    python -m benchmarks                               all parts
    python -m benchmarks --quick --json out.json       a check of every part in under two minutes
    python -m benchmarks micro                         one part
    python -m benchmarks --url http://127.0.0.1:8000   all parts, and the three workloads against that server
"""

import argparse
import os
from collections.abc import Sequence

from benchmarks import hand_off, int8_products, kernels, micro, offline, serving, transfer
from benchmarks.report import Row, publish
from benchmarks.scale import FULL, QUICK

PARTS = ("kernels", "offline", "micro", "transfer", "hand_off", "serving")


def run(part: str, options: argparse.Namespace) -> list[Row]:
    """One part's rows."""
    match part:
        case "offline":
            scale = QUICK if options.quick else FULL
            return offline.measure(options.model, num_threads=options.threads, scale=scale)
        case "kernels":
            return [*kernels.measure(options.threads), *int8_products.measure(options.threads)]
        case "transfer":
            return transfer.measure(quick=options.quick)
        case "hand_off":
            return hand_off.measure(options.model, quick=options.quick)
        case "micro":
            return micro_rows((10_000,) if options.quick else (10_000, 100_000, 1_000_000))
        case _:
            return serving.measure_all(options.url or "http://127.0.0.1:8000", quick=options.quick)


def micro_rows(cached_tokens: Sequence[int]) -> list[Row]:
    """Host data structures by how much they hold."""
    return [
        Row(
            section="radix cache, allocator, page keys",
            name=f"{row.operation}, {row.cached_tokens:,} cached tokens",
            value=row.median_us,
            unit="us",
            low=None,
            high=None,
            runs=micro.REPEATS,
            note=row.note,
        )
        for tokens in cached_tokens
        for row in micro.measure(tokens)
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parse = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parse.add_argument("parts", nargs="*", metavar="part", help=f"any of {', '.join(PARTS)}")
    parse.add_argument("--quick", action="store_true", help="small sizes, one round: a check, not a measurement")
    parse.add_argument("--json", metavar="OUT", help="also write JSON here")
    parse.add_argument("--model", default=offline.MODEL, help="folder that Transformers can load")
    parse.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parse.add_argument("--url", help="root of a server to load as well, without /v1")
    options = parse.parse_args(argv)
    unknown = set(options.parts) - set(PARTS)
    if unknown:
        parse.error(f"no part is called {', '.join(sorted(unknown))}; there are: {', '.join(PARTS)}")
    parts = options.parts or [part for part in PARTS if part != "serving" or options.url]
    rows = [row for part in parts for row in run(part, options)]
    publish(rows, json_path=options.json)


if __name__ == "__main__":
    main()
