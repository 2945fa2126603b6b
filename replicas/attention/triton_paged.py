"""The Triton backend: paged attention on a GPU without other libraries. It decides what triton_kernels.py computes.

A step is up to three launches a layer after K and V are stored: one for requests that extend, two for those that decode
(keys split among programs, parts merged).

Owns:      the lists of tiles of a step, and sizes of tiles and splits.
Never:     reads tensors of the device on the host; keeps results (they are fresh, so a CUDA graph may hold them).
Invariant: the launches depend on numbers of requests and tiles alone, never on lengths on the device: a decode
           step of a given size can be captured once and replayed.
Thread:    the thread that runs the model.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton
from torch import Tensor

from replicas.attention import triton_kernels as kernels
from replicas.attention.base import BatchMeta, HeadTurn, KvPool
from replicas.attention.page_lists import to_device
from replicas.config import AttentionKind
from replicas.kernels.gpu import FUSED
from replicas.memory.scaled_pool import LARGEST

MAX_SPLITS = 32
PROGRAMS = 2048  # wanted in a decode step: enough for all multiprocessors, few enough that empty ones cost little
LISTED = 1024  # pages that a program of `list_pages` has in registers
LISTING = 4  # programs of a request: 128k tokens in pages of 16 are two turns of each
PLAIN = AttentionKind()
PageLists = tuple[Tensor, Tensor, Tensor]  # int32: indptr, 0 in front; indices; last_page_len (page_lists.py)


@dataclass(frozen=True, slots=True)
class _Shape:
    """Constants of all steps, as the kernels take them."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def group_rows(self) -> int:
        return int(triton.next_power_of_2(self.group))

    @property
    def block_d(self) -> int:
        return max(16, int(triton.next_power_of_2(self.head_dim)))

    def constants(self, dtype: torch.dtype, kind: AttentionKind) -> dict[str, object]:
        """Return the constants and options of every attention kernel. Without "ieee", fp32 products keep 10 bits."""
        precision = "ieee" if dtype == torch.float32 else "tf32"
        return {
            "GROUP": self.group, "PAGE": self.page_size, "D": self.head_dim, "BLOCK_D": self.block_d,
            "LIMITED": bool(kind.window or kind.chunk), "CAPPED": kind.soft_cap is not None, "PRECISION": precision,
            **FUSED,
        }  # fmt: skip


class TritonAttention:
    """AttentionBackend over any pool on a GPU (on a CPU under TRITON_INTERPRET=1, for tests), of every kind."""

    rotates = True

    def __init__(
        self, pool: KvPool, *, num_heads: int, num_kv_heads: int, head_dim: int, kinds: Sequence[AttentionKind] = ()
    ) -> None:
        """``kinds``: of each layer; none: all are plain."""
        self._pool = pool
        self._kinds = tuple(kinds)
        self._shape = _Shape(num_heads, num_kv_heads, head_dim, pool.page_size)
        self._batch: BatchMeta | None = None
        self._num_decode = 0
        self._tiles: Tensor | None = None  # [N, 2] int32: request, first new token

    def begin(self, batch: BatchMeta) -> None:
        self._batch = batch
        size, device = batch.rows.shape[0], batch.rows.device
        self._num_decode = size if batch.is_decode else batch.num_decode
        num_extend = size - self._num_decode
        self._tiles = None
        if num_extend:
            bounds, _ = batch.on_host()
            tile = self._extend_tile(batch.table.device)
            tiles = extend_tiles(np.diff(bounds[: num_extend + 1]), tile)
            self._tiles = to_device(tiles, device)

    def begin_graph(self, batch: BatchMeta) -> None:
        """Begin a decode step that is captured or replayed: everything it reads is in ``batch``."""
        self._batch, self._num_decode = batch, batch.rows.shape[0]
        self._tiles = None

    def begin_captured(self, batch: BatchMeta) -> None: ...

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        return self._run(layer, q, k, v, None, sinks)

    def forward_rotating(self, layer: int, q: Tensor, k: Tensor, v: Tensor, turn: HeadTurn | None) -> Tensor:
        return self._run(layer, q, k, v, turn, None)

    def _run(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, turn: HeadTurn | None, sinks: Tensor | None
    ) -> Tensor:
        batch, shape = self._batch, self._shape
        assert batch is not None, "begin() comes before forward()"
        kind = self._kinds[layer] if self._kinds else PLAIN
        assert kind.sinks == (sinks is not None), f"layer {layer} is {kind}"
        for x in (q, k, v):
            assert x.stride()[1:] == (shape.head_dim, 1), f"heads must lie in a row, strides are {x.stride()}"
        keys, values = self._pool.get_key_buffer(layer), self._pool.get_value_buffer(layer)
        store_kv(q, k, v, self._pool, layer, batch.out_slots, turn)
        out, scales = torch.empty(q.shape, dtype=q.dtype, device=q.device), self._pool.scales(layer)  # [T, H, D]
        if self._tiles is not None:
            self._extend(batch, q, (keys, values), self._tiles, out, kind, sinks, scales)
        if self._num_decode:
            self._decode(batch, q, (keys, values), out, kind, sinks, scales)
        return out.flatten(1)

    def _extend(
        self, batch: BatchMeta, q: Tensor, kv: tuple[Tensor, Tensor], tiles: Tensor, out: Tensor, kind: AttentionKind,
        sinks: Tensor | None, scales: tuple[float, float],
    ) -> None:  # fmt: skip
        shape, tile = self._shape, self._extend_tile(q.device)
        kernels.extend[(len(tiles), shape.num_kv_heads)](
            q, *kv, batch.table, batch.rows, batch.qo_indptr, batch.prefix_lens, tiles, out,
            out if sinks is None else sinks, *self._numbers(q, kv[0], batch.table, kind, scales[0]), scales[1],
            **shape.constants(q.dtype, kind), GROUP_ROWS=shape.group_rows, TILE=tile, SINKS=sinks is not None,
            BLOCK=64 if q.dtype != torch.float32 else 32, num_warps=8,
        )  # fmt: skip

    def _decode(
        self, batch: BatchMeta, q: Tensor, kv: tuple[Tensor, Tensor], out: Tensor, kind: AttentionKind,
        sinks: Tensor | None, scales: tuple[float, float],
    ) -> None:  # fmt: skip
        shape, size = self._shape, self._num_decode
        first = (batch.num_tokens - size, batch.rows.shape[0] - size)  # token, request
        splits = num_splits(size, shape.num_kv_heads)
        part_out = torch.empty((size, shape.num_heads, splits, shape.head_dim), device=q.device)
        part_lse = torch.empty((size, shape.num_heads, splits), device=q.device)
        block = 64 if q.dtype != torch.float32 else 32
        common, constants = self._numbers(q, kv[0], batch.table, kind, scales[0]), shape.constants(q.dtype, kind)
        kernels.decode_parts[(size, shape.num_kv_heads, splits)](
            q, *kv, batch.table, batch.rows, batch.seq_lens, part_out, part_lse, *first, splits, *common, **constants,
            GROUP_ROWS=max(16, shape.group_rows), BLOCK=block,
        )  # fmt: skip
        kernels.merge_parts[(size, shape.num_heads)](
            part_out, part_lse, out, out if sinks is None else sinks, first[0], splits, shape.num_heads,
            scales[1], BLOCK_PARTS=MAX_SPLITS, D=shape.head_dim,
            BLOCK_D=shape.block_d, SINKS=sinks is not None, **FUSED,
        )  # fmt: skip

    def _numbers(
        self, q: Tensor, keys: Tensor, table: Tensor, kind: AttentionKind, k_scale: float
    ) -> tuple[float, ...]:
        """Return scale, cap, window, chunk, strides and heads, as all attention kernels take them."""
        scale = (self._shape.head_dim**-0.5 if kind.scale is None else kind.scale) * k_scale
        cap, log2_e = kind.soft_cap, math.log2(math.e)
        scale, cap = (scale * log2_e, 0.0) if cap is None else (scale / cap, cap * log2_e)
        strides = q.stride(0), keys.stride(0), keys.stride(1), table.stride(0)
        return scale, cap, kind.window or 0, kind.chunk or 0, *strides, self._shape.num_heads

    def _extend_tile(self, device: torch.device) -> int:
        """Choose the new tokens of a tile: 128 rows on a GPU; fewer are quicker to interpret."""
        return max(1, (128 if device.type == "cuda" else 32) // self._shape.group_rows)


def store_kv(
    q: Tensor, k: Tensor, v: Tensor, pool: KvPool, layer: int, out_slots: Tensor, turn: HeadTurn | None = None
) -> None:
    """Store k, v [T, K, D] in slots ``out_slots`` [T] of ``layer``.

    Args: turn: what k goes through before, and q [T, H, D] in place.
    """
    num_tokens, num_kv_heads, head_dim = k.shape
    keys, values = pool.get_key_buffer(layer), pool.get_value_buffer(layer)
    k_scale, v_scale = pool.scales(layer)
    inverse, largest = (1.0 / k_scale, 1.0 / v_scale), LARGEST.get(keys.dtype, 0.0)
    if turn is not None:
        q_norm, k_norm, eps = turn.norms or (q, q, 0.0)
        kernels.turn_and_store[(num_tokens, q.shape[1] + num_kv_heads)](
            q, k, v, turn.cos, turn.sin, q_norm, k_norm, keys, values, out_slots, q.stride(0), k.stride(0), v.stride(0),
            keys.stride(0), keys.stride(1), *inverse, eps, q.shape[1], LARGEST=largest, NORMS=turn.norms is not None,
            PAGE=keys.shape[2], D=head_dim, HALF=triton.next_power_of_2(head_dim // 2), num_warps=1, **FUSED,
        )  # fmt: skip
        return
    kernels.store[(num_tokens, num_kv_heads)](
        k, v, keys, values, out_slots, k.stride(0), v.stride(0), keys.stride(0), keys.stride(1), *inverse,
        LARGEST=largest, PAGE=keys.shape[2], D=head_dim, BLOCK_D=triton.next_power_of_2(head_dim), num_warps=1,
        **FUSED,
    )  # fmt: skip


def list_pages(
    batch: BatchMeta, requests: slice, page_size: int, into: PageLists | int, *, window: int | None = None
) -> Tensor:
    """List the pages that ``requests`` of a step read, without waiting: those with a token that a new one sees.

    Args:    into: where to; or how many there are in all, for fresh memory. window: tokens that a token sees.
    Returns: indices.
    """
    rows = batch.rows[requests]
    if isinstance(into, int):
        numbers = torch.empty(2 * len(rows) + 1, dtype=torch.int32, device=rows.device)
        into = numbers[: len(rows) + 1], numbers.new_empty(into), numbers[len(rows) + 1 :]
    kernels.list_pages[(len(rows), LISTING)](
        batch.table, batch.table.stride(0), rows, batch.prefix_lens[requests], batch.seq_lens[requests], *into,
        window or 0, PAGE=page_size, BLOCK=LISTED, **FUSED,
    )  # fmt: skip
    return into[1]


def num_splits(num_requests: int, num_kv_heads: int) -> int:
    """Choose how many shares to cut a decoding request's keys into: a power of two, for PROGRAMS in all."""
    splits = 1
    while splits < MAX_SPLITS and 2 * splits * num_requests * num_kv_heads <= PROGRAMS:
        splits *= 2
    return splits


def extend_tiles(counts: npt.NDArray[np.int32], tile: int) -> npt.NDArray[np.int32]:
    """List each tile's request and first new token [N, 2], for requests with ``counts`` new tokens; the last tiles of a
    request, which see the most keys, come first."""
    tiles_of = -(-counts // tile)
    request = np.repeat(np.arange(len(counts), dtype=np.int32), tiles_of)
    index = np.arange(len(request), dtype=np.int32) - np.repeat(np.cumsum(tiles_of) - tiles_of, tiles_of)
    made = np.stack((request, index * tile), axis=1).astype(np.int32)
    return np.ascontiguousarray(made[np.argsort(-made[:, 1], kind="stable")])
