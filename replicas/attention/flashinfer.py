"""The FlashInfer backend: its paged prefill and decode kernels over the page-major pool.

A layer's keys and values are strided views of the one allocation (heads before tokens: "HND"), given as they are: the
kernels take the stride between pages. Requests that extend are one plan, requests that decode another. A plan is for
all layers, so they are of one kind (a scale, a cap, a window); with a window, pages that no token of a request sees are
left out.

Owns:      the wrappers and their workspaces; the lists of pages that graphs read, which their first launch fills.
Never:     plans within a layer: `begin` plans the step once. In `begin_graph` every buffer that kernels read keeps its
           address, a wrapper for each batch size.
Invariant: a plan is not written before the copies of the one before have run: FlashInfer stages them in one pinned
           buffer a wrapper, and the host may be a step ahead of the device.
Thread:    the thread that runs the model.
Source:    Ye et al. 2025 (arXiv:2501.01005).
"""

from typing import Any, Literal

import flashinfer
import numpy as np
import torch
from torch import Tensor

from replicas.attention.base import BatchMeta, HeadTurn, KvPool
from replicas.attention.fence import Fence
from replicas.attention.page_lists import Ints, page_bounds
from replicas.attention.triton_paged import PageLists, list_pages, store_kv
from replicas.attention.workspace import filling_tokens, is_hopper, num_sms, workspace_bytes
from replicas.config import AttentionKind
from replicas.errors import InvalidConfig

HEAD_DIMS = (64, 128, 256)
HALVES = (torch.bfloat16, torch.float16)
FP8 = torch.float8_e4m3fn  # FA2 and decode read it with queries in 16 bits; FA3 does not
# Of prompts. FA3, for Hopper GPUs, is faster where its tiles fill the device (a prompt of 8k: 1.09 against
# 1.79 ms a layer of Llama-8B on an H200), and slower where they do not, since it neither splits keys among programs nor
# packs the heads of a group into a tile (128 new tokens over 32k: 0.54 against 0.32 ms)
Prefill = Literal["fa2", "fa3"]
PLAIN = AttentionKind()
TENSOR_CORE_GROUP = 4  # query heads per KV head from which tensor cores decode; the other kernel knows 1, 2, 3, 4 and 8


class FlashInferAttention:
    """AttentionBackend over a pool in fp16, bf16 or, with queries in one of them, e4m3.

    Args:   graph_rows: of the largest decode step in a CUDA graph.
            kind: of all layers.
            prefill: of all prompts, to measure it; None: the faster one for each step.
    Raises: InvalidConfig for what its kernels do not know (the Triton backend does).
    """

    rotates = True

    def __init__(
        self,
        pool: KvPool,
        *,
        dtype: torch.dtype,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        graph_rows: int = 0,
        kind: AttentionKind = PLAIN,
        prefill: Prefill | None = None,
    ) -> None:
        keys = pool.get_key_buffer(0)
        reason = why_not(keys.dtype, dtype=dtype, head_dim=head_dim)
        if reason is not None:
            raise InvalidConfig(f"attention: flashinfer {reason}; set attention: triton")
        self._pool, self._device = pool, keys.device
        self._planned: dict[str, Any] = {"q_data_type": dtype, "kv_data_type": keys.dtype}  # of every plan
        if kind != PLAIN:
            self._planned |= {"sm_scale": kind.scale, "logits_soft_cap": kind.soft_cap}
            self._planned["window_left"] = -1 if kind.window is None else kind.window - 1
        self._num_heads, self._num_kv_heads, self._head_dim = num_heads, num_kv_heads, head_dim
        self._tensor_cores = num_heads // num_kv_heads >= TENSOR_CORE_GROUP
        num_bytes = workspace_bytes(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            graph_rows=graph_rows,
            num_sms=num_sms(self._device),
        )
        self._workspace = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)  # of all, one after the other
        chosen: dict[str, Prefill] = {"short": prefill or "fa2"}
        if prefill is None and kind == PLAIN and dtype == keys.dtype and is_hopper(self._device):
            chosen["long"] = "fa3"
        self._prefills = {
            name: flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "HND", backend=each)
            for name, each in chosen.items()
        }
        self._extend = self._prefills["short"]  # of the current step
        self._eager = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, "HND", use_tensor_cores=self._tensor_cores
        )
        self._graphs: dict[int, tuple[Any, PageLists]] = {}  # batch size -> decode wrapper, and its fixed buffers
        self._indices = torch.empty(0, dtype=torch.int32, device=self._device)  # of those, shared
        self._decode = self._eager  # of the current step
        self._copied = Fence(self._device)  # behind the last plan's copies
        self._batch: BatchMeta | None = None
        self._num_decode = 0

    def begin(self, batch: BatchMeta) -> None:
        self._copied.wait()
        self._batch, self._decode = batch, self._eager
        size = batch.rows.shape[0]
        self._num_decode = size if batch.is_decode else batch.num_decode
        num_extend = size - self._num_decode
        bounds, seq_lens = batch.on_host()
        if num_extend:
            self._plan_extend(batch, bounds[: num_extend + 1], seq_lens[:num_extend])
        if self._num_decode:
            page_size, window = self._pool.page_size, self._window
            indptr, last_page_len = self._decode_bounds(seq_lens[num_extend:])
            indices = list_pages(batch, slice(num_extend, None), page_size, int(indptr[-1]), window=window)
            self._eager.plan(*self._decode_numbers(indptr, indices, last_page_len), **self._planned)
        self._copied.mark()

    def begin_graph(self, batch: BatchMeta) -> None:
        """Begin a decode step that is captured in, or replayed from, a CUDA graph of its batch size."""
        self._copied.wait()
        size = batch.rows.shape[0]
        plan = flashinfer.fast_decode_plan  # leaves the buffers alone, which `begin_captured` fills
        if size not in self._graphs:
            self._graphs[size] = self._graph_wrapper(size, -(-batch.table.shape[1] // self._pool.page_size))
            plan = type(self._graphs[size][0]).plan  # chooses the kernels too
        self._decode, lists = self._graphs[size]
        self._batch, self._num_decode = batch, size
        indptr, last_page_len = self._decode_bounds(batch.on_host()[1])
        indices = lists[1][: int(indptr[-1])]
        plan(self._decode, *self._decode_numbers(indptr, indices, last_page_len), **self._planned)
        self._copied.mark()

    def begin_captured(self, batch: BatchMeta) -> None:
        _, lists = self._graphs[batch.rows.shape[0]]
        list_pages(batch, slice(None), self._pool.page_size, lists, window=self._window)

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        return self.forward_rotating(layer, q, k, v, None)

    def forward_rotating(self, layer: int, q: Tensor, k: Tensor, v: Tensor, turn: HeadTurn | None) -> Tensor:
        batch = self._batch
        assert batch is not None, "begin() comes before forward()"
        keys, values = self._pool.get_key_buffer(layer), self._pool.get_value_buffer(layer)
        store_kv(q, k, v, self._pool, layer, batch.out_slots, turn)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)  # [T, H, D]
        first = batch.num_tokens - self._num_decode
        scales = self._scales(layer)
        if first:
            self._extend.run(q[:first], (keys, values), out=out[:first], **scales)
        if self._num_decode:
            self._decode.run(q[first:], (keys, values), out=out[first:], **scales)
        return out.flatten(1)

    @property
    def _window(self) -> int:
        """The tokens that a token sees; 0: all."""
        return int(self._planned.get("window_left", -1)) + 1

    def _scales(self, layer: int) -> dict[str, float]:
        """Return what `run` is told of a layer of a pool in 8 bits."""
        if self._planned["kv_data_type"] != FP8:
            return {}
        return dict(zip(("k_scale", "v_scale"), self._pool.scales(layer), strict=True))

    def _plan_extend(self, batch: BatchMeta, bounds: Ints, seq_lens: Ints) -> None:
        fills = "long" in self._prefills and bounds[-1] >= filling_tokens(self._num_heads, self._device)
        self._extend = self._prefills["long" if fills else "short"]
        page_size = self._pool.page_size
        unseen = self._unseen_pages(seq_lens - np.diff(bounds))
        indptr, last_page_len = page_bounds(seq_lens, page_size, unseen)
        self._extend.plan(
            torch.from_numpy(bounds),
            torch.from_numpy(indptr),
            list_pages(batch, slice(len(seq_lens)), page_size, int(indptr[-1]), window=self._window),
            torch.from_numpy(last_page_len),
            self._num_heads,
            self._num_kv_heads,
            self._head_dim,
            page_size,
            causal=True,
            **self._planned,
        )

    def _decode_bounds(self, seq_lens: Ints) -> tuple[Ints, Ints]:
        return page_bounds(seq_lens, self._pool.page_size, self._unseen_pages(seq_lens - 1))

    def _decode_numbers(self, indptr: Ints, indices: Tensor, last_page_len: Ints) -> tuple[Any, ...]:
        """Return what a decode wrapper's plan takes before its options."""
        pages = torch.from_numpy(indptr), indices, torch.from_numpy(last_page_len)
        return *pages, self._num_heads, self._num_kv_heads, self._head_dim, self._pool.page_size

    def _unseen_pages(self, positions: Ints) -> Ints | None:
        """Return the pages [B] before all that the tokens from ``positions`` [B] on see; None: there are none."""
        if not self._window:
            return None
        return (np.maximum(positions - self._window + 1, 0) // self._pool.page_size).astype(np.int32)

    def _graph_wrapper(self, size: int, max_pages: int) -> tuple[Any, PageLists]:
        """Make the wrapper of a graph, and the lists that it reads; a request has at most ``max_pages``."""
        if len(self._indices) < size * max_pages:
            assert not self._graphs, "the largest batch size is captured first"
            self._indices = torch.zeros(size * max_pages, dtype=torch.int32, device=self._device)
        bounds, last = (torch.zeros(num, dtype=torch.int32, device=self._device) for num in (size + 1, size))
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            "HND",
            use_cuda_graph=True,
            use_tensor_cores=self._tensor_cores,
            paged_kv_indptr_buffer=bounds,
            paged_kv_indices_buffer=self._indices,
            paged_kv_last_page_len_buffer=last,
        )
        return wrapper, (bounds, self._indices, last)


def why_not(kv_dtype: torch.dtype, *, dtype: torch.dtype, head_dim: int) -> str | None:
    """What keeps FlashInfer's kernels from a pool in ``kv_dtype`` and queries in ``dtype``, in words that follow its
    name."""
    if kv_dtype not in (*HALVES, FP8):
        return f"knows K and V in bfloat16, float16 and float8_e4m3fn, not {_named(kv_dtype)}"
    if kv_dtype == FP8 and dtype not in HALVES:
        return f"wants queries in bfloat16 or float16 for K and V in {_named(kv_dtype)}, not in {_named(dtype)}"
    if dtype != kv_dtype and kv_dtype != FP8:
        return f"wants queries in the dtype of K and V, which is {_named(kv_dtype)}, not in {_named(dtype)}"
    if head_dim not in HEAD_DIMS:
        return f"knows heads of {', '.join(map(str, HEAD_DIMS))} dimensions, not {head_dim}"
    return None


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
