"""The fast CPU backend: sets the arguments of the kernels in cpu_decode.py and cpu_extend.py.

A mixed step runs as two parts, one after the other: the requests that extend, then those that decode. Decode attention
of every layer is also available as stages of a program, so a whole decode step can be one.

Threads take a step's tasks one by one: chunks of a decode batch, tiles of an extend batch. Layers that see the same
tokens (all, a window, a chunk of positions) share their tasks.

Owns:      how a step is cut into tasks; the buffers that kernels write (results, partial results, scratch): grown when
           a step is larger than all before, never shrunk. One `DecodeArgs` per layer for the stages.
Never:     gathers K and V into tensors, or does arithmetic in Python.
Invariant: a request's decode result never depends on the rest of the batch, nor on whether others extend beside it. The
           stages run the same kernel with the same arguments, so they give the same bits; layers with sinks, which
           come with each call, are not in stages. A request's chunks are cut
           at multiples of 128 of itself, whatever else is in the batch. A step's memory (its tasks, partial results)
           stays until the next `begin`.
Thread:    the thread that runs the model; kernels run on torch's OpenMP threads (replicas/kernels/team.py).
"""

import ctypes
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from replicas.attention import cpu_decode, cpu_extend, cpu_pages, cpu_pairs
from replicas.attention.base import BatchMeta, KvPool
from replicas.attention.cpu_decode import CHUNK
from replicas.config import AttentionKind
from replicas.errors import InvalidConfig
from replicas.kernels.simd import W
from replicas.kernels.team import Kernel, Stage, Team
from replicas.scheduler.plan import PrefixGroup

Ints = npt.NDArray[np.int32]
TILE_ROWS = 192  # rows of an extend task: enough to pay for copying K and V, few enough for L2
MIN_TILE_TOKENS = 8
SHARED_ROWS = 48  # queries of a decode task at most, when it has more than one request: what L1 holds
TASKS_PER_THREAD = 4  # tiles shrink until there are this many, so threads end together


@dataclass(frozen=True, slots=True, eq=False)
class DecodeTasks:
    """The tasks of a decode step as `cpu_decode.decode` reads them; each is for all KV heads."""

    tasks: Ints  # [N, 4] (first member, members, chunk, tokens left out of it), those of several requests first
    members: Ints  # [M] requests
    first_partial: Ints  # [B + 1] results of a request's chunks: [first_partial[b], first_partial[b + 1])
    chunk_zero: Ints  # [B] the place of the result of chunk 0, or where it would be: it may be before all


def decode_tasks(
    seq_lens: Ints, groups: Sequence[PrefixGroup], *, first: int, max_members: int, first_seen: Ints | None = None
) -> DecodeTasks:
    """Make one task per chunk; a whole chunk that a group shares is one task, or a few of at most ``max_members``.

    Args: seq_lens: [B]. first: the request from which the groups count. first_seen: [B] the first position that each
          request's token sees; what is before is in no task.
    """
    begin = np.zeros_like(seq_lens) if first_seen is None else first_seen // CHUNK  # [B] first chunk
    num_chunks = -(-seq_lens // CHUNK) - begin  # [B]
    shared_from, shared = np.zeros_like(num_chunks), np.zeros_like(num_chunks)  # [B] chunks that are read with others
    parts: list[tuple[Ints, range]] = []  # members, chunks
    for group in groups:
        if group.length >= CHUNK and max_members > 1:
            members = group.members - np.int32(first)
            low = 0 if first_seen is None else -(-int(first_seen[members].max()) // CHUNK)
            chunks = range(low, max(low, group.length // CHUNK))
            shared_from[members], shared[members] = low, len(chunks)
            num_parts = -(-len(members) // max_members)
            parts += [(part, chunks) for part in np.array_split(members, num_parts)]
    together, num_together = [], 0
    for part, chunks in parts:
        together += [(num_together, len(part), chunk, 0) for chunk in chunks]
        num_together += len(part)
    alone = num_chunks - shared
    request = np.repeat(np.arange(len(seq_lens), dtype=np.int32), alone)
    ends = np.cumsum(alone, dtype=np.int32)
    tasks = np.zeros((len(together) + len(request), 4), np.int32)
    tasks[: len(together)] = np.array(together, np.int32).reshape(-1, 4)
    tasks[len(together) :, 0] = num_together + request
    tasks[len(together) :, 1] = 1
    chunk = np.arange(len(request), dtype=np.int32) - (ends - alone - begin)[request]
    chunk += np.where(chunk >= shared_from[request], shared[request], 0)
    tasks[len(together) :, 2] = chunk
    if first_seen is not None:
        tasks[len(together) :, 3] = np.where(chunk == begin[request], first_seen[request] % CHUNK, 0)
    everyone = np.arange(len(seq_lens), dtype=np.int32)
    first_partial = np.zeros(len(num_chunks) + 1, np.int32)
    np.cumsum(num_chunks, out=first_partial[1:])
    members = np.concatenate([*(part for part, _ in parts), everyone])
    return DecodeTasks(tasks, members, first_partial, first_partial[:-1] - begin)


@dataclass(slots=True, eq=False)
class Tile:
    """Queries that attend together: pieces of one request, or of several whose first ``shared`` blocks are the same."""

    shared: int  # blocks
    pieces: list[tuple[int, int, int, int]] = field(default_factory=list)  # (request, first new token, tokens, 0)
    tokens: int = 0
    work: int = 0  # pairs of query and key

    def add(self, request: int, start: int, tokens: int, *, num_keys: int) -> None:
        self.pieces.append((request, start, tokens, 0))
        self.tokens += tokens
        self.work += tokens * num_keys


def extend_tiles(
    counts: Ints, prefix_lens: Ints, groups: Sequence[PrefixGroup], *, most: int, left_out: Ints | None = None
) -> list[Tile]:
    """Cut new tokens into tiles of at most ``most``; what is short of a tile is joined by others of its group.

    Args:    counts, prefix_lens: [B] new tokens and those before. left_out: [B] the first of them, in no tile.
    Returns: those with the most work first.
    """
    groups = [group for group in groups if group.length >= cpu_extend.BLOCK]
    group_of = {b: group for group in groups for b in group.members.tolist()}
    tiles, unfilled = list[Tile](), dict[PrefixGroup, Tile]()
    firsts = [0] * len(counts) if left_out is None else left_out.tolist()
    for b, (first, count, before) in enumerate(zip(firsts, counts.tolist(), prefix_lens.tolist(), strict=True)):
        for start in range(first, count, most):
            tokens, group = min(most, count - start), group_of.get(b)
            tile = None if group is None else unfilled.get(group)
            if tile is None or tile.tokens + tokens > most:
                tile = Tile(0 if group is None else group.length // cpu_extend.BLOCK)
                tiles.append(tile)
                if group is not None:
                    unfilled[group] = tile
            tile.add(b, start, tokens, num_keys=before + start + tokens)
    return sorted(tiles, key=lambda tile: -tile.work)


def extend_tasks(tiles: Sequence[Tile], num_kv_heads: int) -> tuple[Ints, Ints]:
    """Return the tasks [N, 4] and the pieces [M, 4] of ``tiles`` as `cpu_extend.extend` reads them."""
    tasks, pieces = [], list[tuple[int, int, int, int]]()
    for tile in tiles:
        tasks += [(len(pieces), len(tile.pieces), head, tile.shared) for head in range(num_kv_heads)]
        pieces += tile.pieces
    return np.array(tasks, np.int32).reshape(-1, 4), np.array(pieces, np.int32).reshape(-1, 4)


_SIZE = ctypes.sizeof(cpu_decode.DecodeArgs)


class DecodeStage:
    """One layer's decode attention as a `replicas.kernels.team.Stage`."""

    def __init__(self, arguments: ctypes.Structure) -> None:
        self._arguments = arguments

    def prepare(self, num_rows: int, counter: int) -> tuple[Kernel, ctypes.Structure]:
        self._arguments.counter, self._arguments.merge_counter = counter, counter + 8
        return cpu_decode.decode, self._arguments


class DecodeStages:
    """The decode attention of all layers as stages, over one set of activations."""

    def __init__(
        self,
        layers: Sequence[tuple[int, int]],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        kinds: Mapping[str, Sequence[float]],
    ) -> None:
        """``layers``: addresses of their first keys and values. q [T, H, D], k, v [T, K, D] and out [T, H * D] are the
        same memory for all of them. ``kinds``: arguments that each layer has of its own."""
        self._array = np.zeros(len(layers), np.dtype(cpu_decode.DecodeArgs))
        memory = self._array.view(np.uint8).data
        self.stages = tuple(
            DecodeStage(cpu_decode.DecodeArgs.from_buffer(memory, i * _SIZE)) for i in range(len(layers))
        )
        addresses = np.array(layers, np.int64).reshape(-1, 2)
        self._fixed: dict[str, Any] = {"out": out.data_ptr(), "out_stride": 4 * out.stride(0), **kinds}
        self._fixed |= {"keys": addresses[:, 0], "values": addresses[:, 1]}
        for name, x in (("q", q), ("k", k), ("v", v)):
            self._fixed |= {name: x.data_ptr(), f"{name}_stride": 4 * x.stride(0)}

    def set(self, steps: Sequence[ctypes.Structure]) -> None:
        """Enter a step's arguments, of each layer or one for all; the counters stay those of the program."""
        array = self._array
        counters = array["counter"].copy()
        array[:] = np.frombuffer(b"".join(map(bytes, steps)), array.dtype)
        for name, value in self._fixed.items():
            array[name] = value
        array["counter"], array["merge_counter"] = counters, counters + 8


@dataclass(frozen=True, slots=True, kw_only=True)
class _Heads:
    """Heads of this rank: ``num`` query heads and ``num_kv`` kv heads of ``dim`` numbers."""

    num: int
    num_kv: int
    dim: int
    value_dim: int  # of V, which has fewer numbers than K where a latent vector is both

    @property
    def group(self) -> int:
        """Query heads per kv head."""
        return self.num // self.num_kv


@dataclass(slots=True, eq=False)
class _Plan:
    """A step as layers that see the same tokens run it: the kernels' arguments, and the memory that those name."""

    window: int  # 0: none
    chunk: int  # 0: none
    decode: ctypes.Structure
    extend: ctypes.Structure
    decode_tasks: DecodeTasks | None = None
    extend_tasks: tuple[Ints, Ints] | None = None

    def first_seen(self, positions: Ints) -> Ints | None:
        """Return the first position that each of the tokens at ``positions`` sees; None: all see all before them."""
        if not self.window and not self.chunk:
            return None
        first = np.maximum(positions - self.window + 1, 0) if self.window else np.zeros_like(positions)
        return np.maximum(first, positions - positions % self.chunk) if self.chunk else first


class CpuAttention:
    """AttentionBackend over a KvPool in memory whose numbers are one of `cpu_pages.KINDS`; queries are fp32.

    Raises: InvalidConfig for another dtype of either, or a head_dim that is not a multiple of 16: torch_native serves
            those.
    """

    def __init__(
        self,
        pool: KvPool,
        *,
        dtype: torch.dtype,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        num_threads: int,
        kinds: Sequence[AttentionKind] = (),
    ) -> None:
        """``kinds``: of each layer; none: all are plain."""
        reason = why_not(pool, dtype=dtype, head_dim=head_dim)
        if reason is not None:
            raise InvalidConfig(f"attention: cpu {reason}; set attention: torch_native")
        self._pool = pool
        self._team = Team(num_threads)
        value_dim = pool.get_value_buffer(0).shape[-1]
        self._heads = _Heads(num=num_heads, num_kv=num_kv_heads, dim=head_dim, value_dim=value_dim)
        self._layers: list[tuple[int, int]] = []  # per layer: addresses of its first key and value
        self._batch: BatchMeta | None = None  # its memory is what the kernels read
        self._num_extend_tokens = self._num_decode = 0
        self._read: tuple[Tensor, ...] = ()  # q, k and v that the arguments name: layers of a program share them
        self._out, self._out_rows = torch.empty(0), torch.empty(0)
        self._stages: DecodeStages | None = None
        self._partial, self._scratch = torch.empty(0), torch.empty(0)
        self._counters = np.zeros(2 * 8, np.int64)  # next task, next request to merge; each in a cache line
        self._kinds = tuple(kinds)
        sights = [(kind.window or 0, kind.chunk or 0) for kind in self._kinds] or [(0, 0)]
        plans = {sight: self._new_plan(*sight) for sight in sorted(set(sights))}
        self._plans = [plans[sight] for sight in sights]  # of each layer; one where all are plain
        self._distinct_plans = tuple(plans.values())
        for kernel in (cpu_decode.decode, cpu_extend.extend):
            assert kernel.address  # compile now, not in the first request

    @property
    def num_threads(self) -> int:
        return self._team.num_threads

    def begin(self, batch: BatchMeta) -> None:
        self._batch = batch
        if self._out.shape[0] < batch.num_tokens:
            self._out = torch.empty(batch.num_tokens, self._heads.num * self._heads.value_dim)
        self._out_rows = self._out[: batch.num_tokens]
        size = batch.rows.shape[0]
        self._num_decode = size if batch.is_decode else batch.num_decode
        self._num_extend_tokens = batch.num_tokens - self._num_decode
        self._read, plans = (), self._distinct_plans
        for plan in plans:
            if self._num_extend_tokens:
                self._begin_extend(plan, batch, size - self._num_decode)
            if self._num_decode:
                self._begin_decode(plan, batch, size - self._num_decode)
        for plan in plans:  # the buffers that all of them write are as large as any needs only now
            plan.decode.partial = self._partial.data_ptr()
            plan.decode.scratch = plan.extend.scratch = self._scratch.data_ptr()

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        if not self._read or any(x is not read for x, read in zip((q, k, v), self._read, strict=True)):
            self._read_from(q, k, v)
        plan = self._plans[layer if self._kinds else 0]
        if self._kinds:
            kind = self._kinds[layer]
            assert kind.sinks == (sinks is not None), f"layer {layer} is {kind}"
            sinks = None if sinks is None else sinks.float().contiguous()
            for part in (plan.extend, plan.decode):
                part.scale, part.soft_cap = self._scale(kind), kind.soft_cap or 0.0
                part.sinks = 0 if sinks is None else sinks.data_ptr()
        if self._num_extend_tokens:
            self._run(cpu_extend.extend, plan.extend, layer)
        if self._num_decode:
            self._run(cpu_decode.decode, plan.decode, layer)
        return self._out_rows

    def decode_stages(self, num_layers: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Sequence[Stage]:
        """Make one stage per layer that does what `forward` does in a decode step: read q, k, v, write ``out``."""
        kinds: dict[str, Sequence[float]] = {}
        if self._kinds:
            kinds["scale"] = [self._scale(kind) for kind in self._kinds]
            kinds["soft_cap"] = [kind.soft_cap or 0.0 for kind in self._kinds]
        self._stages = DecodeStages([self._layer(i) for i in range(num_layers)], q, k, v, out, kinds)
        return self._stages.stages

    def set_stages(self) -> bool:
        """Prepare the last `decode_stages` for the step that has begun; False if the step holds more than decode, or
        layers have sinks."""
        if self._stages is None or self._num_extend_tokens or any(kind.sinks for kind in self._kinds):
            return False
        self._stages.set([plan.decode for plan in self._plans])
        return True

    def narrow(self, tokens: Tensor) -> None:
        """Leave the results of a request's tokens before its first of ``tokens`` [S] out of the last layer's call."""
        assert self._batch is not None
        if self._num_extend_tokens:
            plan, size = self._plans[-1], len(self._batch.rows) - self._num_decode
            bounds, wanted = self._batch.qo_indptr.numpy()[: size + 1], tokens.numpy()
            place = np.searchsorted(wanted, bounds[:-1])
            first = np.append(wanted, bounds[-1])[place]
            left_out = np.minimum(first, bounds[1:]) - bounds[:-1]
            self._cut_extend(plan, self._batch, size, plan.extend.tile_rows // self._heads.group, left_out)

    def _read_from(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Name ``q``, ``k`` and ``v`` in the arguments of both parts of the step."""
        self._read = q, k, v
        for name, x in zip("qkv", self._read, strict=True):
            assert x.dtype == torch.float32, f"kernels read float32, got {x.dtype}"
            assert x.stride()[1:] == (self._heads.dim, 1), f"heads must lie in a row, strides are {x.stride()}"
            start, stride = x.data_ptr(), 4 * x.stride(0)
            for plan in self._distinct_plans:
                for arguments, first in ((plan.extend, 0), (plan.decode, self._num_extend_tokens)):
                    setattr(arguments, name, start + first * stride)
                    setattr(arguments, f"{name}_stride", stride)

    def _run(self, kernel: Kernel, arguments: ctypes.Structure, layer: int) -> None:
        """Run a part of the step."""
        arguments.keys, arguments.values = self._layer(layer)
        self._counters[:] = 0
        self._team.run(kernel, arguments)

    def _new_plan(self, window: int, chunk: int) -> _Plan:
        plan = _Plan(window, chunk, cpu_decode.DecodeArgs(), cpu_extend.ExtendArgs(window=window, chunk=chunk))
        for arguments in (plan.decode, plan.extend):
            self._set_pool(arguments)
        in_place = plan.decode.kind == cpu_pages.FLOAT32 and self._pool.page_size >= cpu_decode.BLOCK
        plan.decode.block_bytes = cpu_decode.block_bytes(self._heads.dim, pairs=bool(plan.decode.pairs))
        plan.decode.in_place, plan.decode.merge_counter = int(in_place), self._counters.ctypes.data + 64
        return plan

    def _set_pool(self, arguments: ctypes.Structure) -> None:
        keys = self._pool.get_key_buffer(0)
        item_bytes = keys.element_size()
        arguments.kind, arguments.pairs = cpu_pages.KINDS[keys.dtype], int(cpu_pairs.serves(keys.dtype))
        arguments.page_stride, arguments.head_stride = item_bytes * keys.stride(0), item_bytes * keys.stride(1)
        arguments.token_bytes = item_bytes * self._heads.dim
        arguments.page_size = page_size = self._pool.page_size
        arguments.page_shift = page_size.bit_length() - 1 if page_size.bit_count() == 1 else -1
        arguments.scales_at = page_size * self._heads.dim
        heads = self._heads
        arguments.num_kv_heads, arguments.head_dim, arguments.group = heads.num_kv, heads.dim, heads.group
        arguments.value_dim = heads.value_dim
        arguments.counter = self._counters.ctypes.data
        arguments.scale = self._heads.dim**-0.5

    def _scale(self, kind: AttentionKind) -> float:
        return self._heads.dim**-0.5 if kind.scale is None else kind.scale

    def _layer(self, layer: int) -> tuple[int, int]:
        while len(self._layers) <= layer:
            i = len(self._layers)
            self._layers.append((self._pool.get_key_buffer(i).data_ptr(), self._pool.get_value_buffer(i).data_ptr()))
        return self._layers[layer]

    def _begin_extend(self, plan: _Plan, batch: BatchMeta, size: int) -> None:
        """Set the arguments of the first ``size`` requests, which extend."""
        arguments, group = plan.extend, self._heads.group
        most = self._cut_extend(plan, batch, size, max(MIN_TILE_TOKENS, TILE_ROWS // group))
        arguments.qo_indptr, arguments.prefix_lens = batch.qo_indptr.data_ptr(), batch.prefix_lens.data_ptr()
        arguments.tile_rows = most * group
        self._set_part(arguments, batch, first_request=0, first_token=0, num_tokens=self._num_extend_tokens)
        heads = self._heads
        self._set_scratch(arguments, extend_scratch_floats(most * group, heads.dim, heads.value_dim))

    def _cut_extend(self, plan: _Plan, batch: BatchMeta, size: int, most: int, left_out: Ints | None = None) -> int:
        """Set the tasks of the first ``size`` requests. Returns: the tokens of the largest tile, ``most`` or fewer."""
        counts, prefix_lens = np.diff(batch.qo_indptr.numpy()[: size + 1]), batch.prefix_lens.numpy()[:size]
        groups = () if plan.window or plan.chunk else batch.prompt_groups
        num_kv, wanted = self._heads.num_kv, TASKS_PER_THREAD * self._team.num_threads
        tiles = extend_tiles(counts, prefix_lens, groups, most=most, left_out=left_out)
        while most > MIN_TILE_TOKENS and len(tiles) * num_kv < wanted:
            most = max(MIN_TILE_TOKENS, most // 2)
            tiles = extend_tiles(counts, prefix_lens, groups, most=most, left_out=left_out)
        plan.extend_tasks = tasks, pieces = extend_tasks(tiles, num_kv)
        arguments = plan.extend
        arguments.tasks, arguments.num_tasks, arguments.pieces = tasks.ctypes.data, len(tasks), pieces.ctypes.data
        return most

    def _begin_decode(self, plan: _Plan, batch: BatchMeta, first: int) -> None:
        """Set the arguments of the requests from ``first`` on, which decode."""
        arguments = plan.decode
        group, seq_lens = max_members(self._heads.group), batch.seq_lens.numpy()[first:]
        plan.decode_tasks = cut = decode_tasks(
            seq_lens, batch.prefix_groups, first=first, max_members=group, first_seen=plan.first_seen(seq_lens - 1)
        )
        arguments.tasks, arguments.num_tasks = cut.tasks.ctypes.data, len(cut.tasks)
        few = 1 < len(cut.tasks) < self._team.num_threads  # a single task would only make the others wait for its parts
        arguments.part_heads = 1 if few else self._heads.num_kv
        arguments.members, arguments.first_partial = cut.members.ctypes.data, cut.first_partial.ctypes.data
        arguments.chunk_zero = cut.chunk_zero.ctypes.data
        floats = int(cut.first_partial[-1]) * partial_floats(self._heads.num, self._heads.value_dim)
        self._partial = _grown(self._partial, floats)
        arguments.seq_lens = batch.seq_lens.data_ptr() + 4 * first
        first_token = self._num_extend_tokens
        self._set_part(arguments, batch, first_request=first, first_token=first_token, num_tokens=self._num_decode)
        heads = self._heads
        floats = decode_scratch_floats(arguments.block_bytes, heads.num, heads.group, heads.dim, heads.value_dim)
        self._set_scratch(arguments, floats)

    def _set_part(
        self, arguments: ctypes.Structure, batch: BatchMeta, *, first_request: int, first_token: int, num_tokens: int
    ) -> None:
        arguments.table, arguments.table_stride = batch.table.data_ptr(), 4 * batch.table.stride(0)
        arguments.rows = batch.rows.data_ptr() + 4 * first_request
        arguments.out_stride = 4 * self._heads.num * self._heads.value_dim
        arguments.out = self._out.data_ptr() + first_token * arguments.out_stride
        arguments.out_slots, arguments.num_tokens = batch.out_slots.data_ptr() + 8 * first_token, num_tokens

    def _set_scratch(self, arguments: ctypes.Structure, floats: int) -> None:
        stride = -(-floats // 16 + 1) * 16 + 16  # a cache line between threads
        self._scratch = _grown(self._scratch, stride * self._team.num_threads)  # parts run one after the other
        arguments.scratch_stride = 4 * stride


def why_not(pool: KvPool, *, dtype: torch.dtype, head_dim: int) -> str | None:
    """Explain why these kernels cannot serve the pool and a model in ``dtype``; None if they can."""
    if dtype != torch.float32:
        return f"wants a model in float32, this one is in {str(dtype).removeprefix('torch.')}"
    keys = pool.get_key_buffer(0)  # [P, K, page_size, D]
    if keys.dtype not in cpu_pages.KINDS or keys.device.type != "cpu":
        kinds = ", ".join(str(dtype).removeprefix("torch.") for dtype in cpu_pages.KINDS)
        return f"works on pools of {kinds} in memory, this one holds {keys.dtype} on {keys.device}"
    value_dim = pool.get_value_buffer(0).shape[-1]
    if head_dim % 16 or value_dim % 16:
        return f"needs a head_dim that is a multiple of 16, got {head_dim if head_dim % 16 else value_dim}"
    return None


def partial_floats(num_heads: int, value_dim: int) -> int:
    """Count the floats of one chunk's result: each head's weighted values, then each head's maximum and sum, padded."""
    return num_heads * value_dim + math.ceil(2 * num_heads / W) * W


def decode_scratch_floats(block: int, num_heads: int, group: int, head_dim: int, value_dim: int) -> int:
    """Count the floats of a thread that decodes: a ``block`` in bytes, scores and queries; for several requests also
    results and sums."""
    several = max(group, SHARED_ROWS) * (CHUNK + head_dim + value_dim + 2)
    return block // 4 + max(num_heads * (CHUNK + head_dim), several)


def extend_scratch_floats(tile_rows: int, head_dim: int, value_dim: int) -> int:
    """Count the floats of a thread that extends: queries, results, scores, maxima, sums of a tile; K, K transposed, V
    of a block."""
    return tile_rows * (head_dim + value_dim + cpu_extend.BLOCK + 2) + 3 * cpu_extend.BLOCK * head_dim + W


def max_members(group: int) -> int:
    """Return the most requests that one decode task may have."""
    return max(1, SHARED_ROWS // group)


def _grown(buffer: Tensor, floats: int) -> Tensor:
    return buffer if buffer.numel() >= floats else torch.empty(floats + floats // 2)
