"""FlashInfer's attention over latent vectors (MLA): one wrapper for prompts, chunks of them and single tokens.

A layer's vectors are a strided view of the one allocation: their first 512 numbers, and the 64 behind them, are given
to the kernel as two views with one page stride. Written from FlashInfer's documentation and interface, tried out on a
stand-in for it; it has not run on a GPU yet.

Owns:      the wrapper and its workspace.
Never:     plans within a layer. It records no CUDA graph, and reads no prefix once for a group of requests.
Invariant: a plan is not written before the copies of the one before have run (attention/flashinfer.py says why).
Thread:    the thread that runs the model.
Source:    Ye et al. 2025 (arXiv:2501.01005); flashinfer.mla.BatchMLAPagedAttentionWrapper.
"""

import torch
from flashinfer.mla import BatchMLAPagedAttentionWrapper
from torch import Tensor

from replicas.attention.base import BatchMeta, KvPool
from replicas.attention.fence import Fence
from replicas.attention.page_lists import page_bounds
from replicas.attention.triton_paged import list_pages
from replicas.attention.workspace import MIN_BYTES
from replicas.errors import InvalidConfig

LATENT_DIMS = (512, 64)  # that the kernels are compiled for: every DeepSeek-V2 and V3
HALVES = (torch.bfloat16, torch.float16)


class FlashInferLatentAttention:
    """AttentionBackend over an MLATokenToKVPool in bf16 or fp16, queries in the same.

    Raises: InvalidConfig for what the kernels do not know.
    """

    def __init__(self, pool: KvPool, *, dtype: torch.dtype, num_heads: int, scale: float) -> None:
        """``num_heads``: of this rank; ``scale``: of all layers."""
        reason = why_not(pool, dtype=dtype)
        if reason is not None:
            raise InvalidConfig(f"attention: flashinfer {reason}; set attention: auto")
        self._pool, self._dtype, self._num_heads, self._scale = pool, dtype, num_heads, scale
        device = pool.get_key_buffer(0).device
        self._wrapper = BatchMLAPagedAttentionWrapper(torch.empty(MIN_BYTES, dtype=torch.uint8, device=device))
        self._copied = Fence(device)
        self._batch: BatchMeta | None = None

    def begin(self, batch: BatchMeta) -> None:
        self._copied.wait()
        self._batch, page_size = batch, self._pool.page_size
        bounds, seq_lens = batch.on_host()
        indptr, _ = page_bounds(seq_lens, page_size)
        self._wrapper.plan(
            torch.from_numpy(bounds),
            torch.from_numpy(indptr),
            list_pages(batch, slice(None), page_size, int(indptr[-1])),
            torch.from_numpy(seq_lens),
            self._num_heads,
            *LATENT_DIMS,
            page_size,
            True,  # causal
            self._scale,
            self._dtype,
            self._dtype,
        )
        self._copied.mark()

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        assert self._batch is not None, "begin() comes before forward()"
        assert sinks is None, "no model with latent attention has sinks"
        self._pool.set_kv_buffer(layer, self._batch.out_slots, k, v)
        vectors, rank = self._pool.get_key_buffer(layer)[:, 0], LATENT_DIMS[0]  # [P, page_size, 576]
        out: Tensor = self._wrapper.run(q[..., :rank], q[..., rank:], vectors[..., :rank], vectors[..., rank:])
        return out.flatten(1)


def why_not(pool: KvPool, *, dtype: torch.dtype) -> str | None:
    """Explain why the kernels cannot serve the pool and a model in ``dtype``; None if they can."""
    keys, rank = pool.get_key_buffer(0), pool.get_value_buffer(0).shape[-1]
    if (rank, keys.shape[-1] - rank) != LATENT_DIMS:
        return f"knows latent vectors of {LATENT_DIMS} numbers, this model's are of {(rank, keys.shape[-1] - rank)}"
    if dtype not in HALVES or keys.dtype != dtype:
        return f"wants model and latent vectors in bfloat16, or both in float16, got {dtype} and {keys.dtype}"
    return None
