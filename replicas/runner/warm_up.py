"""Steps on the dummy page before the first request: to compile, to capture, and to try the largest step on a GPU.

Never:     writes outside the dummy page.
Thread:    the one that loads the model.

After the largest step, everything that libraries choose, specialise and allocate for a chunk of full size is there, and
the chunk is known to fit beside the pool: an allocation that fails in service costs the step.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from replicas.config import EngineConfig
from replicas.errors import InvalidConfig
from replicas.scheduler.plan import LOGITS_CHUNK, DecodePlan, ExtendPlan, idle_decode, idle_extend

log = logging.getLogger(__name__)

TIMED_ROWS = (1, 2, 4, 8, 16, 32)


def time_decode(
    run: Callable[[DecodePlan], object], *, row: int, clock: Callable[[], float]
) -> dict[int, float]:
    """Return the seconds of a decode step by its rows, each the quicker of two. ``run``: a step, on all ranks;
    ``row`` of the table is zeros."""
    taken: dict[int, float] = {}
    for rows in TIMED_ROWS:
        plan = idle_decode(rows, row=row, seq_len=2)
        for _ in range(2):
            started_s = clock()
            run(plan)
            taken[rows] = min(clock() - started_s, taken.get(rows, math.inf))
    return taken


def run_largest_step(
    config: EngineConfig, forward: Callable[[ExtendPlan], object], *, row: int, device: torch.device, reserve_bytes: int
) -> None:
    """Run ``forward`` with a chunk of full size, and with as many logits of its tokens as a step may have.
    ``reserve_bytes``: the memory that mem_fraction_static leaves for it, with what is set aside for the logits.

    Raises: InvalidConfig if the device has too little memory left.
    """
    num_tokens = min(config.chunked_prefill_size, config.model.context_len)
    remedy = (
        f"lower cache.mem_fraction_static ({config.cache.mem_fraction_static:g}) or scheduler.chunked_prefill_size "
        f"({config.chunked_prefill_size})"
    )
    torch.cuda.reset_peak_memory_stats(device)
    held = torch.cuda.memory_allocated(device)
    plan = idle_extend(row, num_tokens)
    if targets := min(LOGITS_CHUNK, num_tokens - 1):
        whole = replace(plan.rows[0], target_ids=np.zeros(targets, np.int32), target_start=num_tokens - targets)
        plan = replace(plan, rows=(whole,))
    try:
        forward(plan)
        torch.cuda.synchronize(device)
    except torch.OutOfMemoryError as error:
        raise InvalidConfig(f"a step of {num_tokens} tokens does not fit beside the KV pool: {remedy}") from error
    peak = torch.cuda.max_memory_allocated(device) - held
    sizes = (num_tokens, peak / 2**20, reserve_bytes / 2**20)
    if peak > reserve_bytes:
        log.warning("a step of %d tokens takes %.0f MiB, more than the reserve of %.0f MiB: %s", *sizes, remedy)
    else:
        log.info("a step of %d tokens takes %.0f MiB of the reserve of %.0f MiB", *sizes)
