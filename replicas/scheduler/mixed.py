"""Extend steps, alone or mixed: chunks of prompts, and beside them one token of each running request.

A mixed step computes the decode rows together with the prompts. Running requests go on while prompts come, and the
weights are read once for both. SPEC F01 and F08 let prompts go first, so that running requests make no token while
prompts come; the scheduler departs from that here (``scheduler.mixed_steps``).

Owns:      nothing; the layout of such a step.
Never:     chooses requests or takes slots: prefill.py and decode.py have done both.
Invariant: prompts come first, in the order of their batch, then every running request, in the running batch's order.
Thread:    scheduler thread only.
Source:    Sarathi-Serve, Agrawal et al. 2024 (arXiv:2403.02310), "piggy-backed" decodes.
"""

from collections.abc import Sequence

from replicas.request import Req
from replicas.scheduler.decode import DecodeRows, sample_row
from replicas.scheduler.plan import ExtendPlan, ExtendRow, PrefixGroup, TableWrite
from replicas.scheduler.prefill import ExtendBatch


def extend_plan(
    batch: ExtendBatch,
    running: Sequence[Req],
    decode: DecodeRows | None,
    table_writes: tuple[TableWrite, ...],
    groups: tuple[PrefixGroup, ...],
) -> ExtendPlan:
    """Plan a step of ``batch`` and, with ``decode``, of all ``running`` requests, whose rows and groups these are."""
    rows, sampled = list(batch.rows), [req for req, row in zip(batch.reqs, batch.rows, strict=True) if row.sample]
    if decode is not None:
        rows += _decode_rows(decode)
        sampled += running
    return ExtendPlan(
        table_writes=table_writes,
        rows=tuple(rows),
        sampling=tuple(sample_row(req) for req in sampled),
        num_decode=len(rows) - len(batch.rows),
        prefix_groups=groups,
    )


def _decode_rows(decode: DecodeRows) -> list[ExtendRow]:
    return [
        ExtendRow(
            row=int(decode.rows[i]),
            token_ids=decode.token_ids[i : i + 1],
            prefix_len=int(decode.seq_lens[i]) - 1,
            slots=decode.slots[i : i + 1],
            sample=True,
        )
        for i in range(len(decode.rows))
    ]
