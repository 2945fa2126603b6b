"""CUDA graphs of decode steps: the launches of a whole forward pass are recorded once and replayed as one.

Owns:      the graphs, one for each of some batch sizes, and one more where any row has an adapter; the memory that they
           read and write: inputs (one packed copy a step), and logits. A graph enters the slots and the tokens that a
           step follows itself, and shares these among ranks.
Never:     samples; extends. A step of more rows than the largest size runs without a graph.
Ranks:     capture the same sizes in the same order, each after all have met: NCCL's communicator was made before, by
           steps without graphs, and what one rank records the others record too. At replay NCCL's kernels meet as
           they do without graphs. Graphs are dropped before the group: NCCL must not free what they hold.
Invariant: what a graph reads and writes keeps its address. A smaller batch is padded with rows that read and write the
           sink alone: row 0 of the table, slot 0 of page 0, one token.
Thread:    the thread that runs the model.
"""

import itertools
import logging
import time
from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from replicas.attention.base import AttentionBackend, BatchMeta
from replicas.layers.tp_group import TpGroup
from replicas.runner.batch import DeviceBatch, DeviceTable, Staging, build_decode, decode_arrays, enter, places
from replicas.scheduler.plan import DecodePlan, StepPlan, idle_decode

log = logging.getLogger(__name__)

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
BYTES_PER_GRAPH = 16 << 20  # the driver's own, and an attention wrapper's 8 MiB; a guess, never measured
CUBLAS_BYTES = 32 << 20  # cuBLAS's workspace of a stream, on Hopper; a stream more than a step without graphs has
WARM_UP_RUNS = 2  # before a capture: libraries allocate in their first runs

Forward = Callable[[DeviceBatch], Tensor]  # a step that attention has begun -> logits [B, V]


@runtime_checkable
class GraphAttention(AttentionBackend, Protocol):
    """An attention backend that CUDA graphs can capture."""

    def begin_graph(self, batch: BatchMeta) -> None:
        """Prepare for a decode step that is captured or replayed: everything kernels read keeps its address."""
        ...

    def begin_captured(self, batch: BatchMeta) -> None:
        """Launch what the step's layers need beside; a graph holds it."""
        ...


class DecodeGraphs:
    """The CUDA graphs of decode steps: captured once after the pools are made, then replayed."""

    def __init__(
        self, attention: GraphAttention, table: DeviceTable, staging: Staging, *, max_rows: int, vocab_size: int
    ) -> None:
        self._attention, self._table, self._staging = attention, table, staging
        self.sizes = graph_sizes(max_rows)
        largest, device = self.sizes[-1], staging.device
        _, num_bytes = places(decode_arrays(idle_decode(1), largest))
        self._inputs = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._logits = torch.zeros(largest, vocab_size, device=device)
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}

    def capture(self, forward: Forward, tp: TpGroup, begin: Mapping[bool, Callable[[int], None]]) -> None:
        """Record ``forward`` at every size, the largest first: the others use its memory again. All ranks of ``tp``
        call this with graphs of the same sizes. ``begin``: of steps without adapters (False), and with (True) where any
        are served: prepares one of a size."""
        started_s = time.monotonic()
        pool = torch.cuda.graph_pool_handle()
        # One stream for all: cuBLAS keeps a workspace for each stream that it has seen.
        stream = torch.cuda.Stream(self._staging.device)  # type: ignore[no-untyped-call]
        for size, adapted in itertools.product(reversed(self.sizes), begin):
            begin[adapted](size)
            batch = self.fill(idle_decode(size))
            stream.wait_stream(torch.cuda.current_stream())

            def run(batch: DeviceBatch = batch) -> Tensor:
                enter(batch, self._table)
                tp.broadcast(batch.input_ids)
                return forward(batch)

            with torch.cuda.stream(stream):
                for _ in range(WARM_UP_RUNS):
                    run()
            torch.cuda.current_stream().wait_stream(stream)
            tp.barrier()  # no rank records while another's collective waits for it
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                self._logits[:size].copy_(run()[:, : self._logits.shape[1]])
            self._graphs[size, adapted] = graph
        capture_s = time.monotonic() - started_s
        log.info("CUDA graphs: %d for sizes up to %d in %.1f s", len(self._graphs), self.sizes[-1], capture_s)

    def size_of(self, plan: StepPlan) -> int | None:
        """Return the size of the graph that runs a step; None if none does."""
        return graph_size(len(plan.rows), self.sizes) if isinstance(plan, DecodePlan) else None

    def fill(self, plan: DecodePlan, sampled: Tensor | None = None) -> DeviceBatch:
        """Write ``plan`` into the graphs' inputs, padded to one of their sizes, and begin it. ``sampled``: as of
        `build_decode`; read in the replay."""
        size = self.size_of(plan)
        assert size is not None, "a plan of more rows than any graph has"
        batch = build_decode(plan, self._table, self._staging, size=size, into=self._inputs, sampled=sampled)
        self._attention.begin_graph(batch.meta)
        return batch

    def replay(self, batch: DeviceBatch, num_rows: int, *, adapted: bool) -> Tensor:
        """Return the logits [num_rows, V] of a batch that `fill` made; the next replay overwrites them."""
        self._graphs[batch.meta.num_tokens, adapted].replay()
        return self._logits[:num_rows]


def graph_sizes(max_rows: int) -> tuple[int, ...]:
    """Choose the batch sizes to capture if at most ``max_rows`` requests run."""
    return tuple(size for size in SIZES if size < max_rows) + ((min(max_rows, SIZES[-1]),) if max_rows else ())


def graph_size(num_rows: int, sizes: tuple[int, ...]) -> int | None:
    """Return the smallest of ``sizes`` (ascending) that holds ``num_rows``; None if none does."""
    return next((size for size in sizes if size >= num_rows), None)


def graph_bytes(
    max_rows: int,
    *,
    kinds: int,
    vocab_size: int,
    hidden_size: int,
    intermediate_size: int,
    num_heads: int,
    head_dim: int,
) -> int:
    """Compute the device memory to leave for a rank's graphs: logits (held, made, in the model's dtype), the largest
    batch within a layer, each graph's own memory, and the workspace of the stream they share. ``kinds``: of graphs."""
    sizes = graph_sizes(max_rows)
    per_row = 12 * vocab_size + 4 * (6 * hidden_size + 3 * intermediate_size + 48 * num_heads * head_dim)
    return sizes[-1] * per_row + kinds * len(sizes) * BYTES_PER_GRAPH + CUBLAS_BYTES
