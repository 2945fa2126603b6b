"""Turns a plan into tensors on this rank's device.

Owns:      the rank's copy of the ReqToTokenPool (`DeviceTable`), kept equal to the scheduler's by the plan's writes.
Never:     decides anything.
Invariant: before a step, row r of the table is valid on [0, seq_len) for every row of the plan (SPEC B05).
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from replicas.attention.base import BatchMeta
from replicas.scheduler.plan import DecodePlan, ExtendPlan, StepPlan, TableWrite


class DeviceTable:
    """ReqToTokenPool on the device: slot of (row, position). Followers rebuild it from the plans they receive."""

    def __init__(self, num_rows: int, row_len: int, device: torch.device) -> None:
        self.slots = torch.zeros((num_rows, row_len), dtype=torch.int32, device=device)  # [R, C]
        self._host = self.slots.numpy() if device.type == "cpu" else None  # the same memory, quicker to write

    def apply(self, writes: tuple[TableWrite, ...]) -> None:
        if self._host is not None:
            for write in writes:
                self._host[write.row, write.start : write.start + len(write.slots)] = write.slots
        elif writes:
            width = self.slots.shape[1]
            cells = [np.arange(len(write.slots)) + (write.row * width + write.start) for write in writes]
            values = torch.from_numpy(np.concatenate([write.slots for write in writes]))
            index = torch.from_numpy(np.concatenate(cells)).to(self.slots.device)
            self.slots.view(-1).index_copy_(0, index, values.to(self.slots.device))

    def append(self, rows: Tensor, positions: Tensor, slots: Tensor) -> None:
        """Position ``positions[b]`` of ``rows[b]`` now lives in ``slots[b]``; all [B], on the table's device."""
        self.slots.index_put_((rows, positions), slots.int())


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRows:
    """Logits rows [first, first + count) predict the targets of row ``plan_row`` of the plan."""

    plan_row: int
    first: int
    count: int


@dataclass(slots=True, kw_only=True, eq=False)
class DeviceBatch:
    """One step's input."""

    input_ids: Tensor  # [T] int64
    meta: BatchMeta
    logits_rows: Tensor | None  # [S] rows of T whose logits are wanted; None: all T
    sample_rows: list[int]  # which of the S logits rows are to be sampled, in the order of plan.sampling
    prompt_rows: list[PromptRows]


def build(plan: StepPlan, table: DeviceTable, device: torch.device) -> DeviceBatch:
    """The tensors of ``plan``; applies its table writes first, and enters the slots of the rows that decode."""
    table.apply(plan.table_writes)
    batch = _decode(plan, table, device) if isinstance(plan, DecodePlan) else _extend(plan, table, device)
    if size := batch.meta.num_decode:
        table.append(batch.meta.rows[-size:], batch.meta.positions[-size:], batch.meta.out_slots[-size:])
    return batch


def _decode(plan: DecodePlan, table: DeviceTable, device: torch.device) -> DeviceBatch:
    size = len(plan.rows)
    seq_lens = torch.from_numpy(plan.seq_lens).to(device)
    meta = BatchMeta(
        is_decode=True,
        qo_indptr=torch.arange(size + 1, dtype=torch.int32, device=device),
        rows=torch.from_numpy(plan.rows).to(device),
        prefix_lens=seq_lens - 1,
        seq_lens=seq_lens,
        positions=(seq_lens - 1).long(),
        out_slots=torch.from_numpy(plan.slots).to(device).long(),
        table=table.slots,
        max_seq_len=int(plan.seq_lens.max()),
        num_tokens=size,
        num_decode=size,
        prefix_groups=plan.prefix_groups,
    )
    input_ids = torch.from_numpy(plan.token_ids).to(device).long()
    return DeviceBatch(
        input_ids=input_ids, meta=meta, logits_rows=None, sample_rows=list(range(size)), prompt_rows=[]
    )


def _extend(plan: ExtendPlan, table: DeviceTable, device: torch.device) -> DeviceBatch:
    lens = np.array([len(row.token_ids) for row in plan.rows], dtype=np.int32)
    prefix = np.array([row.prefix_len for row in plan.rows], dtype=np.int32)
    indptr = np.zeros(len(lens) + 1, dtype=np.int32)
    np.cumsum(lens, out=indptr[1:])
    positions = np.concatenate([np.arange(p, p + n, dtype=np.int64) for p, n in zip(prefix, lens, strict=True)])
    wanted, sample_rows, prompt_rows = _logits_rows(plan, indptr)
    meta = BatchMeta(
        is_decode=False,
        qo_indptr=torch.from_numpy(indptr).to(device),
        rows=torch.tensor([row.row for row in plan.rows], dtype=torch.int32, device=device),
        prefix_lens=torch.from_numpy(prefix).to(device),
        seq_lens=torch.from_numpy(prefix + lens).to(device),
        positions=torch.from_numpy(positions).to(device),
        out_slots=torch.from_numpy(np.concatenate([row.slots for row in plan.rows]).astype(np.int64)).to(device),
        table=table.slots,
        max_seq_len=int((prefix + lens).max()),
        num_tokens=int(indptr[-1]),
        num_decode=plan.num_decode,
        prefix_groups=plan.prefix_groups,
    )
    return DeviceBatch(
        input_ids=torch.from_numpy(np.concatenate([row.token_ids for row in plan.rows]).astype(np.int64)).to(device),
        meta=meta,
        logits_rows=torch.tensor(wanted, dtype=torch.int64, device=device),
        sample_rows=sample_rows,
        prompt_rows=prompt_rows,
    )


def _logits_rows(plan: ExtendPlan, indptr: np.ndarray) -> tuple[list[int], list[int], list[PromptRows]]:
    """Which token rows need logits: the last of each sampled row, and those that predict a wanted prompt token."""
    wanted: list[int] = []
    sample_rows: list[int] = []
    prompt_rows: list[PromptRows] = []
    for index, row in enumerate(plan.rows):
        start = int(indptr[index])
        if row.target_ids is not None:
            first = start + row.target_start - 1 - row.prefix_len
            prompt_rows.append(PromptRows(plan_row=index, first=len(wanted), count=len(row.target_ids)))
            wanted.extend(range(first, first + len(row.target_ids)))
        if row.sample:
            sample_rows.append(len(wanted))
            wanted.append(int(indptr[index + 1]) - 1)
    return wanted, sample_rows, prompt_rows
