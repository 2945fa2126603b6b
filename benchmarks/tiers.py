"""The tiers of the prefix cache: eviction and write policies over traces of real prompts.

    python -m benchmarks tiers --trace conversation_trace.jsonl --trace synthetic_trace.jsonl

Drives the production tree over two tiers (replicas/cache/tiers.py) with its queues and write policies; only the bytes
are left out. A page is a block of the trace (512 tokens), the clock is the trace's, a request ends when it arrives.
Prompts only: an answer appears when it is sent again. Nothing is copied in idle time.

Each cell is a size of the device's pool, and of the host's as a multiple of it. For each way to choose (what leaves the
host, when is written) a line says: pages found on the device or the host, as a share of all; pages written to the host
for each request; and seconds of prefill saved for each request, which is what was found, computed at --prefill-rate,
less what came from the host, loaded at --load-rate. A note says in which cells a way finds most, and which ways are
within 2 % of the first in every cell.
"""

import argparse
import pathlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from rich.progress import Progress, TimeElapsedColumn

from benchmarks import harness
from benchmarks.harness import Part, Row
from benchmarks.sim_load import BLOCK_TOKENS, SimRequest, read_trace
from replicas.cache.host_pages import HostTier
from replicas.cache.tiers import HiRadixCache
from replicas.config import CacheConfig
from replicas.memory.allocator import PagedTokenToKVPoolAllocator, Pages

TRACES = pathlib.Path("../shared/traces")
HELP = (
    "there is no trace: put conversation_trace.jsonl and synthetic_trace.jsonl of Mooncake (FAST'25 release, on GitHub "
    f"under kvcache-ai/Mooncake, FAST25-release/traces) into {TRACES}, or name them with --trace"
)
DEFAULT = (CacheConfig().host_eviction, CacheConfig().write_policy)
WAYS = (
    ("lru", "write_through"),
    ("lru", "write_through_selective"),
    ("lru", "write_back"),
    ("slru", "write_back"),
    ("arc", "write_back"),
    ("lru", "adaptive"),
    ("arc", "adaptive"),
)
CELLS = ((2000, 2), (2000, 4), (2000, 8), (5000, 2), (5000, 4), (5000, 8))
QUICK_CELLS = ((200, 2), (200, 8))
QUICK_REQUESTS = 1000
NEAR = 0.98


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one way did in one cell; in pages."""

    num_requests: int
    asked: int
    on_device: int
    on_host: int
    written: int

    @property
    def found(self) -> float:
        """Found pages as a share of all."""
        return (self.on_device + self.on_host) / self.asked

    @property
    def written_each(self) -> float:
        """Pages written for each request."""
        return self.written / self.num_requests

    def saved_s(self, prefill_rate: float, load_rate: float) -> float:
        """Seconds of prefill saved for each request, loads subtracted; rates in tokens/s."""
        computing_s = (self.on_device + self.on_host) * BLOCK_TOKENS / prefill_rate
        return (computing_s - self.on_host * BLOCK_TOKENS / load_rate) / self.num_requests


class NoBytes:
    """A Copier that copies nothing: pages of a simulation have no bytes, and so they are never wrong."""

    def backup(self, device_pages: Pages, host_pages: Pages) -> None: ...

    def load(self, host_pages: Pages, device_pages: Pages) -> npt.NDArray[np.bool_]:
        return np.ones(len(host_pages), dtype=np.bool_)


def replay(requests: Sequence[SimRequest], pages: int, times: int, *, eviction: str, write: str) -> Outcome:
    """Send ``requests`` one after the other to a device pool of ``pages`` pages and a host of ``times`` as many.

    Raises: ValueError if a prompt does not fit into the pool.
    """
    now_s = 0.0
    tier = HostTier(num_pages=pages * times, copier=NoBytes(), eviction=eviction, write=write)
    cache = HiRadixCache(1, host=tier, clock=lambda: now_s)
    free = PagedTokenToKVPoolAllocator(pages, 1)
    asked = on_device = on_host = 0
    for request in requests:
        now_s, ids = request.arrival_s, request.prompt
        if len(ids) > pages:
            raise ValueError(f"a prompt has {len(ids)} pages, the device {pages}: take more")
        asked += len(ids)
        match = cache.match_prefix(ids, "")
        lock = cache.inc_lock_ref(match.node if match.host_node is None else match.host_node)
        num_new = len(ids) - match.prefix_len
        if num_new > free.num_free:
            free.free(cache.evict(num_new - free.num_free))
        new = free.alloc(num_new, rid="simulated")
        cache.load(match, new[: match.host_len]) if match.host_len else 0
        cache.insert(ids, np.concatenate([match.pages, new]), "")
        cache.dec_lock_ref(lock)
        on_device, on_host = on_device + match.prefix_len, on_host + match.host_len
    cache.check()
    return Outcome(
        num_requests=len(requests), asked=asked, on_device=on_device, on_host=on_host,
        written=cache.counters.written_pages,
    )  # fmt: skip


def policies(options: argparse.Namespace) -> Iterator[Row]:
    """Yield the tables of every trace. Raises: SystemExit that says which trace is missing or wrong."""
    traces = options.trace or sorted(TRACES.glob("*.jsonl"))
    if not traces:
        raise SystemExit(HELP)
    cells, ways = QUICK_CELLS if options.quick else CELLS, list(dict.fromkeys([*WAYS, DEFAULT]))
    limit = QUICK_REQUESTS if options.quick else options.requests
    try:
        loads = {path.stem.removesuffix("_trace"): read_trace(path, limit=limit) for path in traces}
    except (OSError, ValueError) as error:
        raise SystemExit(f"tiers: {error}") from error
    with Progress(*Progress.get_default_columns(), TimeElapsedColumn(), disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("tiers", total=len(loads) * len(cells) * len(ways))
        for name, requests in loads.items():
            got: dict[tuple[str, str], list[Outcome]] = {}
            for eviction, write in ways:
                row = got[eviction, write] = []
                for pages, times in cells:
                    row.append(replay(requests, pages, times, eviction=eviction, write=write))
                    progress.advance(task)
            yield from rows_of(name, cells, got, options.prefill_rate, options.load_rate)


def rows_of(
    name: str,
    cells: Sequence[tuple[int, int]],
    got: dict[tuple[str, str], list[Outcome]],
    prefill_rate: float,
    load_rate: float,
) -> Iterator[Row]:
    """Yield the rows of one trace: a line for each way, three columns for each cell."""
    most = [max(outcomes[column].found for outcomes in got.values()) for column in range(len(cells))]
    for way, outcomes in got.items():
        line = f"{way[0]}, {way[1]}{' (default)' * (way == DEFAULT)}"
        near = all(outcome.found >= NEAR * best for outcome, best in zip(outcomes, most, strict=True))
        for (pages, times), outcome, best in zip(cells, outcomes, most, strict=True):
            first = f"first at {pages} x{times}" if outcome.found == best else ""
            shares = f"{name}: share of pages found on the device or the host"
            for section, value, note in (
                (shares, outcome.found, first or "within 2 % of the first everywhere" * near),
                (f"{name}: pages written to the host, a request", outcome.written_each, ""),
                (f"{name}: s of prefill saved, a request", outcome.saved_s(prefill_rate, load_rate), ""),
            ):
                yield Row(section=section, name=line, figure=f"{pages} x{times}", value=round(value, 3), note=note)


PARTS = {"policies": Part(about="eviction and write policies of the host tier, over traces", measure=policies)}


def _options(parse: argparse.ArgumentParser) -> None:
    parse.add_argument("--trace", type=pathlib.Path, action="append", help="a trace in Mooncake's format")
    parse.add_argument("--requests", type=int, help="of a trace, from its first (all)")
    parse.add_argument("--prefill-rate", type=float, default=10_000.0, help="tokens/s that a replica computes (10,000)")
    parse.add_argument("--load-rate", type=float, default=150_000.0, help="tokens/s from the host (150,000)")


def main(argv: Sequence[str] | None = None) -> None:
    harness.run("tiers", __doc__, PARTS, argv, options=_options)
