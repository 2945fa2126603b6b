"""The largest step there can be, run once before the first request: on a GPU only.

Owns:      the plan of it, and what is said of the memory that it takes.
Never:     writes outside the dummy page.
Thread:    the one that loads the model.

What libraries choose, specialise and allocate for a chunk of full size is there then, and that the chunk fits beside
the pool is known: an allocation that fails in service ends the engine for everyone.
"""

import logging
from collections.abc import Callable

import numpy as np
import torch

from replicas.config import EngineConfig
from replicas.errors import InvalidConfig
from replicas.scheduler.plan import ExtendPlan, ExtendRow

log = logging.getLogger(__name__)


def idle_extend(row: int, num_tokens: int) -> ExtendPlan:
    """A prompt of ``num_tokens`` whose every token is in the sink; ``row`` of the table is zeros."""
    zeros = np.zeros(num_tokens, dtype=np.int32)
    whole = ExtendRow(row=row, token_ids=zeros, prefix_len=0, slots=zeros, sample=True)
    return ExtendPlan(table_writes=(), rows=(whole,), sampling=())


def run_largest_step(
    config: EngineConfig, forward: Callable[[ExtendPlan], object], *, row: int, device: torch.device, reserve_bytes: int
) -> None:
    """Run ``forward`` with a chunk of full size. ``reserve_bytes``: what mem_fraction_static leaves for it.

    Raises: InvalidConfig when the device has too little memory left.
    """
    num_tokens = min(config.chunked_prefill_size, config.model.context_len)
    remedy = (
        f"lower cache.mem_fraction_static ({config.cache.mem_fraction_static:g}) or scheduler.chunked_prefill_size "
        f"({config.chunked_prefill_size})"
    )
    torch.cuda.reset_peak_memory_stats(device)
    held = torch.cuda.memory_allocated(device)
    try:
        forward(idle_extend(row, num_tokens))
        torch.cuda.synchronize(device)
    except torch.OutOfMemoryError as error:
        raise InvalidConfig(f"a step of {num_tokens} tokens does not fit beside the KV pool: {remedy}") from error
    peak = torch.cuda.max_memory_allocated(device) - held
    told = (num_tokens, peak / 2**20, reserve_bytes / 2**20)
    if peak > reserve_bytes:
        log.warning("a step of %d tokens takes %.0f MiB, more than the reserve of %.0f MiB: %s", *told, remedy)
    else:
        log.info("a step of %d tokens takes %.0f MiB of the reserve of %.0f MiB", *told)
