"""out += (x @ A.T) @ B.T for rows of a step on a GPU, by the adapter of each (LoRA): two launches after a product.

Method:    The host sorts the rows of a step by their adapter and cuts them into tiles of 16 rows of one adapter, which
           name their rows: so rows lie in the step in any order, and a tile is read together. The launches depend on
           the number of rows alone, and programs find in the GPU's memory how many tiles there are: a CUDA graph is
           replayed with any rows of any adapters. Few rows have too few tiles for a GPU, so their inputs are split.
Owns:      the weights of adapters on the GPU, each adapter's in one piece of memory, and their addresses.
Invariant: a row's sums run in one order, whatever rows, adapters and number of rows it has beside it: x @ A.T over 16
           chunks of the inputs, each alone, then over these, in fp32; rounded to the model's dtype; by B over the
           ranks. B carries the scale. What a graph reads keeps its address. The host waits for nothing.
Thread:    the one that runs the model; `pack`: any.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from replicas.kernels import gpu

Pair = tuple[Tensor, Tensor]  # A [rank, in], and B [out, rank] times the adapter's scale
Upload = Callable[[Sequence[npt.NDArray[Any]], Tensor | None], list[Tensor]]  # `Staging.upload` of runner/batch.py
ROWS = 16  # of a tile; a rank is a multiple of it
CHUNKS = 16  # of the inputs
FEW_ROWS = 256  # up to so many rows have a program for each chunk
BLOCK_K, BLOCK_N, WARPS, STAGES = 128, 128, 4, 4
MAX_PIECES, FIELDS = 3, 3  # weights of a product; numbers of each in a record
RECORD = 1 + MAX_PIECES * FIELDS
PER_RECORD_BYTES = 8 * RECORD


def programs() -> Any:
    """Return triton_low_rank.py; only where ``gpu.kernels()`` says that Triton can be used."""
    from replicas.kernels.adapters import triton_low_rank

    return triton_low_rank


class StepTiles:
    """The rows of a step that have an adapter, in tiles of one adapter."""

    def __init__(self, upload: Upload, device: torch.device) -> None:
        self.tiles: Tensor | None = None  # as the kernels read them; None: no row has an adapter
        self.most = 0  # tiles that ``tiles`` has place for
        self._upload = upload
        # what graphs read: a tile for each row
        self._of_graphs = torch.zeros(4 * (1 + FEW_ROWS) * (1 + ROWS), dtype=torch.uint8, device=device)

    def set(self, runs: Sequence[tuple[int, int, int]], rank: int, graph_rows: int | None = None) -> None:
        """Let the next step have ``runs``: (first row, rows, adapter) of each; ``rank``: the highest of their adapters.
        ``graph_rows``: of the graph that runs it."""
        if runs:
            self._put(tiles_of(runs), rank, graph_rows)
        else:
            self.tiles = None

    def set_idle(self, graph_rows: int | None = None) -> None:
        """Let the kernels of the next step run without rows: to be compiled, or captured."""
        self._put(np.empty((0, 1 + ROWS), np.int32), ROWS, graph_rows)

    def _put(self, tiles: npt.NDArray[np.int32], rank: int, graph_rows: int | None) -> None:
        assert graph_rows is None or len(tiles) <= graph_rows <= FEW_ROWS
        self.most = len(tiles) if graph_rows is None else graph_rows
        whole = np.zeros((1 + len(tiles), 1 + ROWS), np.int32)
        whole[0, :2], whole[1:] = (len(tiles), _whole(rank) // ROWS), tiles
        [self.tiles] = self._upload([whole], None if graph_rows is None else self._of_graphs)


def tiles_of(runs: Sequence[tuple[int, int, int]]) -> npt.NDArray[np.int32]:
    """Cut runs (first row, rows, adapter) into tiles [T, 1 + ROWS]: an adapter, and its rows, -1 behind the last."""
    first, number, adapter = np.array(runs, np.int32).T
    rows = np.arange(number.sum(), dtype=np.int32) + np.repeat(first - (np.cumsum(number) - number), number)
    adapters = np.repeat(adapter, number)
    order = np.argsort(adapters, kind="stable")
    kinds, own = np.unique(adapters, return_counts=True)  # adapters, and how many rows each has
    of_kind = -(-own // ROWS)
    place = np.arange(len(rows)) + np.repeat(ROWS * (np.cumsum(of_kind) - of_kind) - (np.cumsum(own) - own), own)
    tiles = np.full((of_kind.sum(), 1 + ROWS), -1, np.int32)
    tiles[:, 0] = np.repeat(kinds, of_kind)
    tiles[place // ROWS, 1 + place % ROWS] = rows[order]
    return tiles


@dataclass(frozen=True, slots=True, eq=False)
class GpuPacked:
    """What one adapter adds to the products of a rank, in host memory."""

    records: npt.NDArray[np.int64]  # [products, RECORD]; addresses are counted from the beginning of ``memory``
    memory: Tensor  # pinned
    room: Tensor  # pinned, for the records with the addresses that they get

    @property
    def num_bytes(self) -> int:
        return self.memory.nbytes


class GpuLowRank:
    """What adapters add to the products of a rank."""

    def __init__(
        self, products: Mapping[str, tuple[int, Sequence[int]]], dtype: torch.dtype, device: torch.device,
        upload: Upload, *, max_rank: int, max_held: int,
    ) -> None:  # fmt: skip
        """``products``: of each its inputs, and the outputs of its weights in their order."""
        self.step = StepTiles(upload, device)
        self._dtype, self._device = dtype, device
        self._records = torch.zeros(max_held, len(products), RECORD, dtype=torch.int64, device=device)
        self._held: dict[int, Tensor] = {}
        self.added = {
            name: GpuProduct(self.step, self._records[:, i], inputs, pieces, max_rank)
            for i, (name, (inputs, pieces)) in enumerate(products.items())
        }

    def pack(self, pairs: Mapping[str, Sequence[Pair | None]]) -> GpuPacked:
        """Lay out A [r, inputs] and B [outputs, r] (scaled) of the weights of each product that an adapter changes."""
        records, parts, at = np.zeros((len(self.added), RECORD), np.int64), list[Tensor](), 0

        def place(part: Tensor) -> int:
            nonlocal at
            parts.append(part.to(self._dtype).reshape(-1))
            at += parts[-1].nbytes
            return at - parts[-1].nbytes

        for record, name in zip(records, self.added, strict=True):
            padded = [pair and _padded(pair) for pair in pairs.get(name, ())]
            low = 0
            if any(padded):
                record[0] = place(torch.cat([pair[0] for pair in padded if pair is not None]))
            for i, pair in enumerate(padded):
                if pair is not None:
                    rank = len(pair[0])
                    record[1 + FIELDS * i :][:FIELDS] = low // ROWS, rank, place(pair[1])
                    low += rank
        memory = torch.empty(at // self._dtype.itemsize, dtype=self._dtype, pin_memory=True)
        room = torch.empty(records.shape, dtype=torch.int64, pin_memory=True)
        return GpuPacked(records, torch.cat(parts, out=memory), room)

    def put(self, adapter: int, packed: GpuPacked) -> None:
        """Let rows of number ``adapter`` add this, from the next step on. Raises: torch.OutOfMemoryError."""
        memory = torch.empty(packed.memory.shape, dtype=self._dtype, device=self._device)
        memory.copy_(packed.memory, non_blocking=True)
        packed.room.copy_(torch.from_numpy(packed.records + memory.data_ptr() * _is_address(packed.records)))
        self._records[adapter].copy_(packed.room, non_blocking=True)
        self._held[adapter] = memory

    def drop(self, adapter: int) -> None:
        """Forget an adapter that no step uses any more."""
        del self._held[adapter]


class GpuProduct:
    """What adapters add to one product."""

    def __init__(self, step: StepTiles, records: Tensor, inputs: int, pieces: Sequence[int], max_rank: int) -> None:
        """``records``: of this product, [adapters, RECORD] a stride apart."""
        self._step, self._records, self._inputs = step, records, inputs
        self._num_pieces, self._blocks = len(pieces), -(-max(pieces) // BLOCK_N)
        self._pieces = *pieces, *(0,) * (MAX_PIECES - len(pieces))
        self._columns = len(pieces) * _whole(max_rank)  # of a row between the two kernels
        self._chunk = -(-inputs // (CHUNKS * BLOCK_K)) * BLOCK_K

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """Add to ``out`` [T, sum of pieces] what the adapters of this step's rows make of x [T, inputs]."""
        step, records = self._step, self._records
        if step.tiles is None:
            return
        few, rows = len(x) <= FEW_ROWS, len(x)
        parts, most_tasks, most_tiles = (CHUNKS, 32, 8) if few else (1, 4096, 64)
        low = torch.empty(parts, rows, self._columns, device=x.device)
        precision = "ieee" if x.dtype == torch.float32 else "tf32"
        common = {"num_warps": WARPS, **gpu.FUSED}
        programs().shrink[(parts, max(1, min(step.most * self._num_pieces, most_tasks)))](
            x, low, records, step.tiles, self._inputs, self._chunk, x.stride(0), low.stride(1), low.stride(0),
            records.stride(0), PIECES=self._num_pieces, CHUNKS=CHUNKS // parts, BLOCK_K=BLOCK_K, PRECISION=precision,
            num_stages=STAGES, **common,
        )  # fmt: skip
        programs().expand[(self._blocks, self._num_pieces, max(1, min(step.most, most_tiles)))](
            low, out, records, step.tiles, *self._pieces, low.stride(1), low.stride(0), out.stride(0),
            records.stride(0), PARTS=parts, BLOCK_N=BLOCK_N, PRECISION=precision, num_stages=1, **common,
        )  # fmt: skip


def between_bytes(rows: int, max_rank: int) -> int:
    """Return the bytes of what lies between the kernels of a product, in a step of few rows."""
    return 4 * CHUNKS * min(rows, FEW_ROWS) * MAX_PIECES * _whole(max_rank)


def _whole(rank: int) -> int:
    """Round up to a multiple of ROWS."""
    return -(-rank // ROWS) * ROWS


def _padded(pair: Pair) -> Pair:
    """Bring an adapter's rank up to a multiple of ROWS: A [r, in], and B as [r / ROWS, out, ROWS]."""
    a, b = pair
    more = -len(a) % ROWS
    a, b = F.pad(a, (0, 0, 0, more)), F.pad(b, (0, more))
    return a, b.reshape(len(b), -1, ROWS).transpose(0, 1)


def _is_address(records: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Tell which fields of ``records`` are addresses: A's, and B's of the pieces that something is added to."""
    found = np.zeros(records.shape, np.bool_)
    found[:, 0] = True
    found[:, FIELDS::FIELDS] = records[:, 2::FIELDS] > 0  # ranks
    return found
