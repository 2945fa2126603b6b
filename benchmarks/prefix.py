"""What the radix cache gains on shared prefixes, and costs where there are none: two engines, alternated.

The overhead is far below the noise of wall times on a shared machine; so the time inside the scheduler (the prefix
cache is used nowhere else) is compared, as a share of the run, and the wall times are shown beside it.
"""

from benchmarks import driver
from benchmarks.report import Row
from benchmarks.scale import Scale
from benchmarks.workloads import Workload, random_lengths, shared_prefix
from replicas.engine.engine import Engine


def shared_rows(radix: Engine, chunk: Engine, scale: Scale, seed: int) -> list[Row]:
    """Shared-prefix workload end to end with RadixCache and with ChunkCache."""
    with_radix, with_chunk = [], []
    for round_ in range(scale.prefix_rounds):
        workload = shared_prefix(
            num_groups=scale.num_groups,
            per_group=scale.per_group,
            prefix_len=scale.prefix_len,
            question_len=scale.question_len,
            output_len=scale.prefix_output_len,
            vocab_size=radix.config.model.vocab_size,
            seed=seed + round_,
        )
        of_radix, of_chunk = _both(radix, chunk, workload, scale.concurrency, radix_first=round_ % 2 == 0)
        with_radix.append(of_radix)
        with_chunk.append(of_chunk)
    section = f"{workload.name}, {scale.concurrency} at once"
    equal = sum(a.outputs == b.outputs for a, b in zip(with_radix, with_chunk, strict=True))
    hits = [100 * run.cached_tokens / run.prompt_tokens for run in with_radix]
    return [
        Row.of(section, "RadixCache, wall", [run.wall_s for run in with_radix], "s"),
        Row.of(section, "ChunkCache, wall", [run.wall_s for run in with_chunk], "s"),
        Row.of(
            section,
            "times faster with RadixCache",
            [b.wall_s / a.wall_s for a, b in zip(with_radix, with_chunk, strict=True)],
            "x",
            target=">= 3x",
            note=f"{equal} of {len(with_radix)} runs with equal token ids",
        ),
        Row.of(
            section,
            "cached prompt tokens",
            hits,
            "%",
            note=f"at best {100 * workload.reusable_tokens / workload.prompt_tokens:.1f}",
        ),
    ]


def unique_rows(radix: Engine, chunk: Engine, scale: Scale, seed: int) -> list[Row]:
    """Unique prompts, where a prefix cache can only cost."""
    overheads, ratios = [], []
    for round_ in range(scale.rounds):
        workload = random_lengths(
            num_requests=scale.unique_requests,
            input_len=scale.unique_len,
            output_len=scale.prefix_output_len,
            vocab_size=radix.config.model.vocab_size,
            seed=seed + round_,
        )
        of_radix, of_chunk = _both(radix, chunk, workload, scale.concurrency, radix_first=round_ % 2 == 0)
        overheads.append(100 * (of_radix.scheduling_s - of_chunk.scheduling_s) / of_chunk.wall_s)
        ratios.append(100 * (of_radix.wall_s / of_chunk.wall_s - 1))
    section = f"unique prompts: {workload.name}"
    return [
        Row.of(section, "RadixCache over ChunkCache, scheduler time", overheads, "% of the run", target="< 1%"),
        Row.of(section, "RadixCache over ChunkCache, wall time", ratios, "%", note="noise included"),
    ]


def _both(
    radix: Engine, chunk: Engine, workload: Workload, concurrency: int, *, radix_first: bool
) -> tuple[driver.Served, driver.Served]:
    """The same workload on both, from an empty cache. Returns: (radix, chunk)."""
    radix.flush_cache()
    if radix_first:
        return driver.serve(radix, workload, concurrency), driver.serve(chunk, workload, concurrency)
    of_chunk = driver.serve(chunk, workload, concurrency)
    return driver.serve(radix, workload, concurrency), of_chunk
