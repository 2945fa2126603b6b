"""The fast CPU backend: decides what each kernel works on; the kernels are in cpu_decode.py and cpu_extend.py.

Owns:      the lists of tasks of a step, and the buffers that kernels write (results, partial results, scratch): grown
           when a step is larger than all before, never shrunk.
Never:     gathers K and V into tensors, or does arithmetic in Python.
Invariant: task lists depend on lengths alone; a request's decode result never depends on the rest of the batch.
Thread:    the thread that runs the model; kernels run on torch's OpenMP threads (replicas/kernels/team.py).
"""

import ctypes

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from replicas.attention import cpu_decode, cpu_extend
from replicas.attention.base import BatchMeta, KvPool
from replicas.errors import InvalidConfig
from replicas.kernels.team import Team

TILE_ROWS = 192  # rows of an extend task: enough to pay for copying K and V, few enough for L2
MIN_TILE_TOKENS = 8
TASKS_PER_THREAD = 4  # smaller tiles until there are so many tasks, so that threads end together


class CpuAttention:
    """AttentionBackend over an fp32 KvPool in memory.

    Raises: InvalidConfig for another dtype, or a head_dim that is not a multiple of 16 (torch_native serves those).
    """

    def __init__(
        self, pool: KvPool, *, num_heads: int, num_kv_heads: int, head_dim: int, num_threads: int
    ) -> None:
        reason = why_not(pool, head_dim=head_dim)
        if reason is not None:
            raise InvalidConfig(f"attention: cpu {reason}; set attention: torch_native")
        self._pool = pool
        self._team = Team(num_threads)
        self._num_heads, self._head_dim = num_heads, head_dim
        self._num_kv_heads, self._group = num_kv_heads, num_heads // num_kv_heads
        self._layers: list[tuple[int, int]] = []  # per layer: addresses of its first key and value
        self._batch: BatchMeta | None = None
        self._tasks: npt.NDArray[np.int32] = np.zeros((0, 2), np.int32)
        self._first_task: npt.NDArray[np.int32] = np.zeros(0, np.int32)
        self._out, self._out_rows = torch.empty(0), torch.empty(0)
        self._partial, self._scratch = torch.empty(0), torch.empty(0)
        self._counters = np.zeros(2 * 8, np.int64)  # next task, next request to merge; each in a cache line
        self._decode, self._extend = cpu_decode.DecodeArgs(), cpu_extend.ExtendArgs()
        for arguments in (self._decode, self._extend):
            self._set_pool(arguments)
        self._decode.merge_counter = self._counters.ctypes.data + 64
        for kernel in (cpu_decode.decode, cpu_extend.extend):
            assert kernel.address  # compile now, not in the first request

    def begin(self, batch: BatchMeta) -> None:
        self._batch = batch
        if self._out.shape[0] < batch.num_tokens:
            self._out = torch.empty(batch.num_tokens, self._num_heads * self._head_dim)
        self._out_rows = self._out[: batch.num_tokens]
        arguments = self._begin_decode(batch) if batch.is_decode else self._begin_extend(batch)
        arguments.table, arguments.table_stride = batch.table.data_ptr(), 4 * batch.table.stride(0)
        arguments.rows = batch.rows.data_ptr()
        arguments.out, arguments.out_stride = self._out.data_ptr(), 4 * self._num_heads * self._head_dim
        arguments.out_slots, arguments.num_tokens = batch.out_slots.data_ptr(), batch.num_tokens
        arguments.tasks, arguments.num_tasks = self._tasks.ctypes.data, len(self._tasks)
        arguments.scratch = self._scratch.data_ptr()

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert self._batch is not None, "begin() comes before forward()"
        for x in (q, k, v):
            assert x.stride()[1:] == (self._head_dim, 1), f"heads must lie in a row, strides are {x.stride()}"
        arguments = self._decode if self._batch.is_decode else self._extend
        arguments.keys, arguments.values = self._layer(layer)
        arguments.q, arguments.q_stride = q.data_ptr(), 4 * q.stride(0)
        arguments.k, arguments.k_stride = k.data_ptr(), 4 * k.stride(0)
        arguments.v, arguments.v_stride = v.data_ptr(), 4 * v.stride(0)
        self._counters[:] = 0
        if self._batch.is_decode:
            self._team.run(cpu_decode.decode, arguments)
        else:
            self._team.run(cpu_extend.extend, arguments)
        return self._out_rows

    def _set_pool(self, arguments: ctypes.Structure) -> None:
        keys = self._pool.get_key_buffer(0)
        arguments.page_stride, arguments.head_stride = 4 * keys.stride(0), 4 * keys.stride(1)
        arguments.page_size = self._pool.page_size
        arguments.num_kv_heads, arguments.head_dim, arguments.group = self._num_kv_heads, self._head_dim, self._group
        arguments.counter = self._counters.ctypes.data
        arguments.scale = self._head_dim**-0.5

    def _layer(self, layer: int) -> tuple[int, int]:
        while len(self._layers) <= layer:
            i = len(self._layers)
            self._layers.append((self._pool.get_key_buffer(i).data_ptr(), self._pool.get_value_buffer(i).data_ptr()))
        return self._layers[layer]

    def _begin_decode(self, batch: BatchMeta) -> ctypes.Structure:
        """One task a chunk, in order of request and chunk."""
        arguments = self._decode
        num_chunks = -(-batch.seq_lens.numpy() // cpu_decode.CHUNK)  # [B]
        self._first_task = np.zeros(len(num_chunks) + 1, np.int32)
        np.cumsum(num_chunks, out=self._first_task[1:])
        request = np.repeat(np.arange(len(num_chunks), dtype=np.int32), num_chunks)
        chunk = np.arange(len(request), dtype=np.int32) - self._first_task[request]
        self._tasks = np.stack((request, chunk), axis=1).astype(np.int32, copy=False)  # [N, 2]
        floats = len(request) * cpu_decode.partial_floats(self._num_heads, self._head_dim)
        self._partial = _grown(self._partial, floats)
        arguments.partial, arguments.first_task = self._partial.data_ptr(), self._first_task.ctypes.data
        arguments.seq_lens = batch.seq_lens.data_ptr()
        self._set_scratch(arguments, cpu_decode.scratch_floats(self._num_heads))
        return arguments

    def _begin_extend(self, batch: BatchMeta) -> ctypes.Structure:
        """One task a tile of queries and KV head; those with the most keys first."""
        arguments = self._extend
        bounds, prefix = batch.qo_indptr.numpy(), batch.prefix_lens.numpy()
        tile = self._tile_tokens(np.diff(bounds))
        tiles = [
            (int(prefix[b]) + start, b, start, min(tile, count - start))
            for b, count in enumerate(np.diff(bounds).tolist())
            for start in range(0, count, tile)
        ]
        tiles.sort(key=lambda item: -item[0])
        tasks = [(b, head, start, n) for _, b, start, n in tiles for head in range(self._num_kv_heads)]
        self._tasks = np.array(tasks, np.int32)  # [N, 4]
        arguments.qo_indptr, arguments.prefix_lens = batch.qo_indptr.data_ptr(), batch.prefix_lens.data_ptr()
        arguments.tile_rows = tile * self._group
        self._set_scratch(arguments, cpu_extend.scratch_floats(tile * self._group, self._head_dim))
        return arguments

    def _tile_tokens(self, counts: npt.NDArray[np.int32]) -> int:
        """Tokens of a tile: as large as pays, smaller when that would leave threads without work."""
        tile = max(MIN_TILE_TOKENS, TILE_ROWS // self._group)
        wanted = TASKS_PER_THREAD * self._team.num_threads
        while tile > MIN_TILE_TOKENS and int((-(-counts // tile)).sum()) * self._num_kv_heads < wanted:
            tile = max(MIN_TILE_TOKENS, tile // 2)
        return tile

    def _set_scratch(self, arguments: ctypes.Structure, floats: int) -> None:
        stride = -(-floats // 16 + 1) * 16 + 16  # a cache line between threads
        self._scratch = _grown(self._scratch, stride * self._team.num_threads)
        arguments.scratch_stride = 4 * stride


def why_not(pool: KvPool, *, head_dim: int) -> str | None:
    """Why these kernels cannot serve the pool; None when they can."""
    keys = pool.get_key_buffer(0)  # [P, K, page_size, D]
    if keys.dtype != torch.float32 or keys.device.type != "cpu":
        return f"works on float32 pools in memory, this one holds {keys.dtype} on {keys.device}"
    if head_dim % 16:
        return f"needs a head_dim that is a multiple of 16, got {head_dim}"
    return None


def _grown(buffer: Tensor, floats: int) -> Tensor:
    return buffer if buffer.numel() >= floats else torch.empty(floats + floats // 2)
