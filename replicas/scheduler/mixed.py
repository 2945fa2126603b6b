"""Extend steps, alone or mixed: chunks of prompts, and beside them one token of each running request.

A mixed step runs the decode rows in the products of the prompts: who writes an answer goes on while prompts come, and
the weights are read once for both. SPEC F01 and F08 let prompts go first, so that running requests make no token as
long as prompts come; the scheduler departs from that here (``scheduler.mixed_steps``).

Owns:      nothing; the layout of such a step.
Never:     chooses requests or takes slots: prefill.py and decode.py have done both.
Invariant: prompts come first, in the order of their batch, then every running request, in the running batch's order.
Thread:    scheduler thread only.
Source:    Sarathi-Serve, Agrawal et al. 2024 (arXiv:2403.02310), "piggy-backed" decodes.
"""

import numpy as np

from replicas.scheduler.decode import RunningBatch, sample_row
from replicas.scheduler.plan import ExtendPlan, ExtendRow, PrefixGroup, TableWrite
from replicas.scheduler.prefill import ExtendBatch


def extend_plan(
    batch: ExtendBatch,
    running: RunningBatch,
    decode: tuple[np.ndarray, ...] | None,
    table_writes: tuple[TableWrite, ...],
) -> ExtendPlan:
    """The step of ``batch`` and, unless ``decode`` (see `RunningBatch.prepare`) is None, of all of ``running``."""
    groups: tuple[PrefixGroup, ...] = ()
    rows, sampled = list(batch.rows), [req for req, row in zip(batch.reqs, batch.rows, strict=True) if row.sample]
    if decode is not None:
        rows += _decode_rows(decode)
        sampled += running
        groups = running.prefix_groups(running.reqs, first=len(batch.rows))
    return ExtendPlan(
        table_writes=table_writes,
        rows=tuple(rows),
        sampling=tuple(sample_row(req) for req in sampled),
        num_decode=len(rows) - len(batch.rows),
        prefix_groups=groups,
    )


def _decode_rows(decode: tuple[np.ndarray, ...]) -> list[ExtendRow]:
    rows, token_ids, seq_lens, slots = decode
    return [
        ExtendRow(
            row=int(rows[i]),
            token_ids=token_ids[i : i + 1],
            prefix_len=int(seq_lens[i]) - 1,
            slots=slots[i : i + 1],
            sample=True,
        )
        for i in range(len(rows))
    ]
