"""Micro-benchmarks of the host side of KV memory: radix cache, allocator, page keys, at growing cache sizes.

    python -m benchmarks.micro [--tokens 10000 100000 1000000] [--json OUT]

Each row is the median of ``REPEATS`` timings of one operation, on one thread; the sizes say what one operation handles.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import numpy as np

from kvtransfer.pages import page_keys
from replicas.cache.radix import RadixCache
from replicas.memory.allocator import PagedTokenToKVPoolAllocator

PAGE_SIZE = 16
PROMPT_LEN = 32_768
PREFIX_LEN = 1_024  # shared by the cached prompts of one group
GROUP = 8  # cached prompts that share a prefix
CHUNK = 512  # tokens of an insert: a prompt that was committed chunk by chunk has one node for each
BATCH = 32
REPEATS = 31


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One operation at one cache size."""

    operation: str
    cached_tokens: int
    median_us: float
    note: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[10_000, 100_000, 1_000_000], help="cached tokens")
    parser.add_argument("--json", metavar="OUT", help="also write the rows here")
    arguments = parser.parse_args()
    rows = [row for tokens in arguments.tokens for row in measure(tokens)]
    print(f"{'operation':<28} {'cached tokens':>14} {'median us':>12}   what one operation does")
    for row in rows:
        print(f"{row.operation:<28} {row.cached_tokens:>14,} {row.median_us:>12,.1f}   {row.note}")
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump([asdict(row) for row in rows], file, indent=1)


def measure(cached_tokens: int) -> list[Row]:
    """All operations with ``cached_tokens`` tokens in the cache."""
    return [*radix_rows(cached_tokens), *allocator_rows(cached_tokens), page_key_row(cached_tokens)]


def radix_rows(cached_tokens: int) -> Iterator[Row]:
    """Match of a long cached prompt (one node, and in chunks), insert and evict."""
    rng = np.random.default_rng(0)
    length = min(PROMPT_LEN, cached_tokens // (2 * PAGE_SIZE) * PAGE_SIZE)
    for name, step in (("radix match, one node", length), (f"radix match, {CHUNK}-token nodes", CHUNK)):
        cache, free = _filled(cached_tokens - length, rng)
        prompt = _tokens(rng, length)
        pages = free[: length // PAGE_SIZE]
        for end in range(step, length + step, step):
            end = min(end, length)
            cache.insert(prompt[:end], pages[: end // PAGE_SIZE], "")
        us = _median_us(lambda cache=cache, prompt=prompt: cache.match_prefix(prompt, ""))  # type: ignore[misc]
        assert cache.match_prefix(prompt, "").prefix_len == length
        yield Row(operation=name, cached_tokens=cached_tokens, median_us=us, note=f"{length:,} cached tokens")
    cache, free = _filled(cached_tokens, rng)
    yield from _insert_rows(cache, free, cached_tokens, rng)
    for num_pages in (CHUNK // PAGE_SIZE, 1):
        us = _median_us(lambda num_pages=num_pages: cache.evict(num_pages))  # type: ignore[misc]
        yield Row(
            operation=f"radix evict, pages: {num_pages}", cached_tokens=cached_tokens, median_us=us, note="lru"
        )
    cache.check()


def _insert_rows(cache: RadixCache, free: np.ndarray, cached_tokens: int, rng: np.random.Generator) -> Iterator[Row]:
    num_pages = CHUNK // PAGE_SIZE
    fresh = [_tokens(rng, CHUNK) for _ in range(REPEATS)]
    timings = []
    for i, prompt in enumerate(fresh):
        pages = free[i * num_pages : (i + 1) * num_pages]
        timings.append(_time_us(lambda p=prompt, g=pages: cache.insert(p, g, "")))  # type: ignore[misc]
    note = f"{CHUNK} new tokens"
    yield Row(operation="radix insert", cached_tokens=cached_tokens, median_us=statistics.median(timings), note=note)


def allocator_rows(cached_tokens: int) -> Iterator[Row]:
    """Allocate and free a chunk's pages, extend one request, and one decode step of a batch."""
    allocator = PagedTokenToKVPoolAllocator(cached_tokens // PAGE_SIZE + 1, PAGE_SIZE)
    num_pages = CHUNK // PAGE_SIZE

    def row(operation: str, work: Callable[[], object], note: str) -> Row:
        return Row(operation=operation, cached_tokens=cached_tokens, median_us=_median_us(work), note=note)

    note = f"{num_pages} pages"
    yield row("allocator alloc + free", lambda: allocator.free(allocator.alloc(num_pages, rid="r")), note)
    yield row(
        "allocator alloc_extend + free",
        lambda: allocator.free(allocator.alloc_extend(0, CHUNK, -1, rid="r")[::PAGE_SIZE] // PAGE_SIZE),
        f"{CHUNK} tokens",
    )
    starts = allocator.alloc(BATCH, rid="r") * PAGE_SIZE
    offsets = np.arange(BATCH, dtype=np.int32) % PAGE_SIZE  # every 16th of the batch begins a new page
    seq_lens = offsets + 2

    def decode() -> None:
        slots = allocator.alloc_decode(seq_lens, starts + offsets)
        allocator.free(slots[slots % PAGE_SIZE == 0] // PAGE_SIZE)

    yield row("allocator alloc_decode", decode, f"batch of {BATCH}, {BATCH // PAGE_SIZE} new pages, freed again")
    allocator.check()


def page_key_row(cached_tokens: int) -> Row:
    """The chained hash keys of a prompt; does not depend on what is cached."""
    tokens = _tokens(np.random.default_rng(1), 8192)
    us = _median_us(lambda: page_keys(tokens, PAGE_SIZE, "salt"))
    return Row(operation="page_keys", cached_tokens=cached_tokens, median_us=us, note="8,192 tokens, page size 16")


def _filled(num_tokens: int, rng: np.random.Generator) -> tuple[RadixCache, np.ndarray]:
    """A cache of ``num_tokens`` in groups of prompts that share a prefix, and page ids that it does not hold."""
    cache = RadixCache(PAGE_SIZE)
    next_page, prefix = 1, _tokens(rng, PREFIX_LEN)
    for i in range(num_tokens):
        if (cached := cache.evictable_pages * PAGE_SIZE) + PAGE_SIZE > num_tokens:
            break
        if i % GROUP == 0:
            prefix = _tokens(rng, PREFIX_LEN)
        prompt = np.concatenate([prefix, _tokens(rng, CHUNK)])
        prompt = prompt[: (num_tokens - cached) // PAGE_SIZE * PAGE_SIZE]
        pages = np.arange(next_page, next_page + len(prompt) // PAGE_SIZE, dtype=np.int32)
        cache.insert(prompt, pages, "")
        next_page += len(pages)
    return cache, np.arange(next_page, next_page + (PROMPT_LEN + REPEATS * CHUNK) // PAGE_SIZE, dtype=np.int32)


def _tokens(rng: np.random.Generator, length: int) -> np.ndarray:
    return rng.integers(0, 50_000, length, dtype=np.int32)


def _median_us(work: Callable[[], object]) -> float:
    return statistics.median(_time_us(work) for _ in range(REPEATS))


def _time_us(work: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    work()
    return (time.perf_counter() - started_s) * 1e6


if __name__ == "__main__":
    main()
