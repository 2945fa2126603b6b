"""Turns a plan into tensors on this rank's device; the host waits for no copy, neither up nor down.

Owns:      the rank's copy of the ReqToTokenPool (`DeviceTable`), kept equal to the scheduler's by the plan's writes;
           pinned host buffers, written in turn: one is written again only when its last copy has run; of a model whose
           window layers have a pool of their own, their table (`WindowTable`), which follows from both.
Never:     decides anything.
Invariant: before a step, row r of the table is valid on [0, seq_len) for every row of the plan (SPEC B05). Arrays lie
           behind one another in the order given, each at a multiple of ALIGNMENT. Equal shapes give equal places, so a
           CUDA graph finds its inputs where it read them when it was captured.
Thread:    the thread that runs the model.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from replicas.attention.base import BatchMeta, SnapshotStep
from replicas.attention.fence import Fence
from replicas.errors import Overloaded
from replicas.kernels import gpu
from replicas.runner.pooling import StepPooling
from replicas.runner.sampler import DeviceLogprobs, DevicePromptLogprobs
from replicas.scheduler.plan import DecodePlan, ExtendPlan, StepPlan, StepResult, TableWrite, TableWrites
from replicas.types import PartWrite, StateCopy

ALIGNMENT = 64  # bytes
BUFFERS = 8  # a step takes two or three, and two steps are under way at most
Array = npt.NDArray[Any]
T = TypeVar("T")


class Staging:
    """Uploads to ``device``; on a CPU the arrays themselves are the tensors, unless ``into`` is given."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers = [torch.empty(0, dtype=torch.uint8) for _ in range(BUFFERS)]
        self._fences = [Fence(device) for _ in range(BUFFERS)]
        self._next = 0

    def upload(self, arrays: Sequence[Array], into: Tensor | None = None) -> list[Tensor]:
        """Return ``arrays`` as tensors of the device, in order; valid for work of the current stream.

        Args: into: uint8 memory for them; None takes fresh memory.
        """
        if self.device.type == "cpu" and into is None:
            return [torch.from_numpy(array) for array in arrays]
        starts, num_bytes = places(arrays)
        host = self._buffer(num_bytes)
        for array, start in zip(arrays, starts, strict=True):
            raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            host[start : start + array.nbytes] = torch.from_numpy(raw)
        on_device = torch.empty(num_bytes, dtype=torch.uint8, device=self.device) if into is None else into[:num_bytes]
        on_device.copy_(host, non_blocking=True)
        self._fences[self._next].mark()
        self._next = (self._next + 1) % BUFFERS
        return [
            on_device[start : start + array.nbytes].view(_DTYPES[array.dtype.str]).view(array.shape)
            for array, start in zip(arrays, starts, strict=True)
        ]

    def _buffer(self, num_bytes: int) -> Tensor:
        """Return [num_bytes] of the next buffer, once its last copy has run."""
        self._fences[self._next].wait()
        if len(self._buffers[self._next]) < num_bytes:
            pinned = self.device.type == "cuda"
            self._buffers[self._next] = torch.empty(2 * num_bytes, dtype=torch.uint8, pin_memory=pinned)
        return self._buffers[self._next][:num_bytes]


_DTYPES = {"<i4": torch.int32, "<i8": torch.int64}


def places(arrays: Sequence[Array]) -> tuple[list[int], int]:
    """Compute where each array starts and where the last ends, in bytes."""
    starts, end = [], 0
    for array in arrays:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        starts.append(start)
        end = start + array.nbytes
    return starts, end


def within_memory(work: Callable[[], T], does_not_fit: str) -> T:
    """Run ``work``. Raises: Overloaded, with ``does_not_fit`` and the reason, where a GPU's memory does not suffice.
    What PyTorch holds of it in free blocks of other sizes is given back by then, for the next try."""
    try:
        return work()
    except torch.OutOfMemoryError as error:
        why = str(error)
    torch.cuda.empty_cache()  # behind the handler, in which the error's frames keep the tensors of the work
    raise Overloaded(f"{does_not_fit}: {why}")


class PendingTokens:
    """A PendingStep whose tokens are being copied to the host; its K and V are in the pool when `result` returns, also
    where it sampled none."""

    def __init__(
        self,
        tokens: Tensor,
        logprobs: DeviceLogprobs | None,
        prompts: Mapping[int, DevicePromptLogprobs] = MappingProxyType({}),
        pooled: StepPooling | None = None,
    ) -> None:
        """Start the copy of ``tokens`` [S] int64 and of what goes with them, which work queued on the current stream
        makes. Args: prompts: logprobs of prompts, by index into the rows of the plan."""
        self._logprobs, self._prompts, self._pooled = logprobs, prompts, pooled
        self._tokens = _to_host(tokens)
        parts = (logprobs, *prompts.values(), pooled)
        self._fetched = [[] if part is None else [_to_host(each) for each in part.tensors] for part in parts]
        self._fence = Fence(tokens.device)
        self._fence.mark()

    def result(self) -> StepResult:
        self._fence.wait()
        token_ids = self._tokens.numpy().astype(np.int32)
        of_tokens, *of_prompts, of_pooled = self._fetched
        told = () if self._logprobs is None else self._logprobs.told(token_ids, of_tokens)
        if self._pooled is not None:
            told = self._pooled.told(told, of_pooled)
        prompts = zip(self._prompts.items(), of_prompts, strict=True)
        made = {index: prompt.told(fetched) for (index, prompt), fetched in prompts}
        return StepResult(token_ids=token_ids, logprobs=told, prompt_logprobs=made)


def _to_host(tensor: Tensor) -> Tensor:
    """Start the copy of ``tensor``, which a fence behind it has to be waited for."""
    on_host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
    return on_host.copy_(tensor, non_blocking=True)


class DeviceTable:
    """The ReqToTokenPool on the device: slot of (row, position). Followers rebuild it from the plans they receive."""

    def __init__(
        self,
        num_rows: int,
        row_len: int,
        device: torch.device,
        windows: "WindowTable | None" = None,
        snapshots: SnapshotStep | None = None,
    ) -> None:
        """``snapshots``: of a model that keeps recurrent states, with the copies that the next step makes first."""
        self.slots = torch.zeros((num_rows, row_len), dtype=torch.int32, device=device)  # [R, C]
        self.windows, self.snapshots = windows, snapshots
        self._host = self.slots.numpy() if device.type == "cpu" else None  # the same memory, quicker to write

    def apply(self, made: TableWrites, staging: Staging) -> None:
        """Make the writes of a plan; no two name the same position, since a GPU makes them in any order."""
        if self.windows is not None:
            writes: Sequence[TableWrite] = self.windows.apply(made)
        elif self.snapshots is not None:
            copies = tuple(write for write in made if isinstance(write, StateCopy))
            self.snapshots = replace(self.snapshots, copies=copies)
            writes = [write for write in made if isinstance(write, TableWrite)]
        else:
            writes = made  # type: ignore[assignment]
        if self._host is not None:
            for write in writes:
                self._host[write.row, write.start : write.start + len(write.slots)] = write.slots
        elif writes:
            index, values = staging.upload(cells(writes, row_len=self.slots.shape[1]))
            self.slots.view(-1).index_copy_(0, index, values)

    def append(self, rows: Tensor, positions: Tensor, slots: Tensor) -> None:
        """Enter ``slots[b]`` at position ``positions[b]`` of ``rows[b]``; all [B], on the table's device."""
        self.slots.index_put_((rows, positions), slots.int())


class WindowTable:
    """The table of the window layers' pool on a CPU: slot of (row, position), where the page of that position has a
    part; elsewhere any slot."""

    def __init__(self, num_rows: int, row_len: int, *, num_pages: int, page_size: int) -> None:
        self.slots = torch.zeros((num_rows, row_len), dtype=torch.int32)  # [R, C]
        self._host = self.slots.numpy()
        self._parts = np.zeros(num_pages + 1, dtype=np.int32)  # by page
        self._size = np.int32(page_size)

    def apply(self, made: TableWrites) -> list[TableWrite]:
        """Make the writes of a plan. Returns: those that name slots of the other pool."""
        writes = []
        for write in made:
            if isinstance(write, PartWrite):
                self._parts[write.pages] = write.parts
            elif isinstance(write, TableWrite):
                self._host[write.row, write.start : write.start + len(write.slots)] = self._apart(write.slots)
                writes.append(write)
        return writes

    def seen(self, meta: BatchMeta) -> BatchMeta:
        """Describe a step to the window layers, and enter the slots of the rows that decode."""
        slots = self._apart(meta.out_slots.numpy())
        if size := meta.num_decode:
            self._host[meta.rows[-size:].numpy(), meta.positions[-size:].numpy()] = slots[-size:]
        return replace(meta, table=self.slots, out_slots=torch.from_numpy(slots.astype(np.int64)))

    def _apart(self, slots: Array) -> Array:
        return self._parts[slots // self._size] * self._size + slots % self._size


def cells(writes: Sequence[TableWrite], *, row_len: int) -> list[Array]:
    """Join ``writes``: places [n] int64 in the flat table of rows of ``row_len``, and their values [n] int32."""
    places = [np.arange(len(write.slots)) + (write.row * row_len + write.start) for write in writes]
    slots = np.concatenate([write.slots for write in writes])
    return [np.concatenate(places).astype(np.int64), slots.astype(np.int32)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRows:
    """The logits rows [first, first + count) that predict the targets of row ``plan_row`` of the plan."""

    plan_row: int
    first: int
    count: int


@dataclass(slots=True, kw_only=True, eq=False)
class DeviceBatch:
    """The tensors that one step takes as input."""

    input_ids: Tensor  # [T] int64
    meta: BatchMeta
    logits_rows: Tensor | None  # [S] rows of T that need logits; None: all T
    sample_rows: list[int]  # the logits rows to sample, in the order of plan.sampling
    prompt_rows: list[PromptRows]
    hidden: Tensor | None = None  # [T, hidden] of a step that has run, where a pooling pools them
    followed: tuple[Tensor, Tensor] | None = None  # of a decode step, for `enter`: an address, and places there


def build(plan: StepPlan, table: DeviceTable, staging: Staging, sampled: Tensor | None = None) -> DeviceBatch:
    """Make the tensors of ``plan``; applies its table writes first, and enters the slots of the rows that decode, and
    what they follow in ``sampled`` [S] int64, the tokens of the step before."""
    if isinstance(plan, DecodePlan):
        return build_decode(plan, table, staging, size=len(plan.rows), sampled=sampled)
    table.apply(plan.table_writes, staging)
    batch = _extend(plan, table, staging)
    _append(table, batch.meta)
    return batch


def build_decode(
    plan: DecodePlan, table: DeviceTable, staging: Staging, *, size: int, into: Tensor | None = None,
    sampled: Tensor | None = None,
) -> DeviceBatch:  # fmt: skip
    """Make the tensors of a decode step, padded to ``size`` rows, in ``into`` if it is given (runner/graphs.py). On a
    GPU this is one copy and one launch, which with ``into`` is left to the graph, but where the plan writes into the
    table.

    Args: sampled: the tokens [S] int64 of the step before that the plan follows; None: it follows none, or others know.
    """
    table.apply(plan.table_writes, staging)
    arrays = decode_arrays(plan, size, sampled)
    source, follows, ids, *rest = staging.upload(arrays, into)
    meta = _meta(plan, table, staging, rest, arrays[-2], arrays[-1], num_decode=size)
    batch = DeviceBatch(
        input_ids=ids, meta=meta, logits_rows=None, sample_rows=list(range(len(plan.rows))), prompt_rows=[]
    )
    if staging.device.type == "cuda" and gpu.kernels() is not None:
        if sampled is not None:  # the kernel takes its address, and looks at no bounds
            assert sampled.dtype == torch.int64
            assert sampled.is_contiguous()
            assert plan.follows is None or plan.follows.max() < len(sampled), "a row follows a token that is not there"
        batch.followed = source, follows
        meta.snapshots = table.snapshots
        if into is None:
            enter(batch, table)
    else:
        if sampled is not None:
            ids[: len(plan.rows)] = sampled[follows[: len(plan.rows)]].clamp_min(0)
        _append(table, meta)
    return batch


def enter(batch: DeviceBatch, table: DeviceTable) -> None:
    """Launch what enters a decode step's slots into the table, and the tokens that it follows into its input ids, if
    `build_decode` has left that."""
    if batch.followed is not None:
        meta, (source, follows) = batch.meta, batch.followed
        gpu.kernels().enter_rows[(len(follows),)](
            batch.input_ids, source, table.slots, table.slots.shape[1], follows, meta.rows, meta.positions,
            meta.out_slots, num_warps=1, **gpu.EXACT,
        )  # fmt: skip


def decode_arrays(plan: DecodePlan, size: int, sampled: Tensor | None = None) -> list[Array]:
    """Return the address of ``sampled`` (int64, -1: none), what of it they follow (int32, -1: nothing), input ids,
    positions, slots (int64), rows, prefix_lens, seq_lens, qo_indptr (int32) of ``plan``, padded to ``size`` with rows
    that see only the sink's token."""

    def filled(values: Array, dtype: type[np.integer[Any]], rest: int = 0) -> Array:
        out = np.full(size, rest, dtype)
        out[: len(values)] = values
        return out

    seq_lens = filled(plan.seq_lens, np.int32, 1)
    return [
        np.array([-1 if sampled is None else sampled.data_ptr()], np.int64),
        filled(np.empty(0, np.int32) if plan.follows is None else plan.follows, np.int32, -1),
        filled(plan.token_ids, np.int64),
        (seq_lens - 1).astype(np.int64),
        filled(plan.slots, np.int64),
        filled(plan.rows, np.int32),
        seq_lens - np.int32(1),
        seq_lens,
        np.arange(size + 1, dtype=np.int32),
    ]


def _meta(
    plan: StepPlan, table: DeviceTable, staging: Staging, tensors: Sequence[Tensor], seq_lens: Array, indptr: Array, *,
    num_decode: int,
) -> BatchMeta:  # fmt: skip
    """Describe a step to attention. ``tensors``: positions, slots, rows, prefix_lens, and the last two arguments on the
    device."""
    positions, out_slots, rows, prefix_lens, lens, bounds = tensors
    on_device = staging.device.type != "cpu"
    return BatchMeta(
        is_decode=isinstance(plan, DecodePlan),
        qo_indptr=bounds,
        rows=rows,
        prefix_lens=prefix_lens,
        seq_lens=lens,
        positions=positions,
        out_slots=out_slots,
        table=table.slots,
        max_seq_len=int(seq_lens.max()),
        num_tokens=int(indptr[-1]),
        num_decode=num_decode,
        prefix_groups=plan.prefix_groups,
        prompt_groups=plan.prompt_groups if isinstance(plan, ExtendPlan) else (),
        host_qo_indptr=indptr if on_device else None,
        host_seq_lens=seq_lens if on_device else None,
    )


def _append(table: DeviceTable, meta: BatchMeta) -> None:
    if size := meta.num_decode:
        table.append(meta.rows[-size:], meta.positions[-size:], meta.out_slots[-size:])
    if table.windows is not None:
        meta.windows = table.windows.seen(meta)
    meta.snapshots = table.snapshots


def _extend(plan: ExtendPlan, table: DeviceTable, staging: Staging) -> DeviceBatch:
    lens = np.array([len(row.token_ids) for row in plan.rows], dtype=np.int32)
    prefix = np.array([row.prefix_len for row in plan.rows], dtype=np.int32)
    indptr = np.zeros(len(lens) + 1, dtype=np.int32)
    np.cumsum(lens, out=indptr[1:])
    wanted, sample_rows, prompt_rows = _logits_rows(plan, indptr)
    ids, positions, out_slots, logits_rows, *rest = staging.upload(
        [
            np.concatenate([row.token_ids for row in plan.rows]).astype(np.int64),
            np.concatenate([np.arange(p, p + n, dtype=np.int64) for p, n in zip(prefix, lens, strict=True)]),
            np.concatenate([row.slots for row in plan.rows]).astype(np.int64),
            np.array(wanted, np.int64),
            np.array([row.row for row in plan.rows], np.int32),
            prefix,
            prefix + lens,
            indptr,
        ]
    )
    tensors = (positions, out_slots, *rest)
    meta = _meta(plan, table, staging, tensors, prefix + lens, indptr, num_decode=plan.num_decode)
    return DeviceBatch(
        input_ids=ids, meta=meta, logits_rows=logits_rows, sample_rows=sample_rows, prompt_rows=prompt_rows
    )


def _logits_rows(plan: ExtendPlan, indptr: np.ndarray) -> tuple[list[int], list[int], list[PromptRows]]:
    """Find the token rows that need logits: the last of each sampled row, and those before a wanted prompt token."""
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
