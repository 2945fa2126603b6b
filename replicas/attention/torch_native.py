"""The plain backend: gathers each request's K and V and calls PyTorch's attention. Slow, short, and the oracle.

Owns:      nothing but the current step's lengths.
Invariant: token at position p attends to positions [0, p], its own K and V included.
Thread:    the thread that runs the model.
Source:    attention backend extend/decode of SGLang (SPEC F15); paged attention, Kwon et al. 2023 (arXiv:2309.06180).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from replicas.attention.base import BatchMeta, KvPool


class TorchNativeAttention:
    """AttentionBackend over a KvPool, any device and dtype."""

    def __init__(self, pool: KvPool) -> None:
        self._pool = pool
        self._batch: BatchMeta | None = None
        self._slots: list[Tensor] = []  # per request, [seq_len] its slots in order of position
        self._bounds: list[int] = []  # [B + 1] request b owns q[bounds[b] : bounds[b + 1]]

    def begin(self, batch: BatchMeta) -> None:
        self._batch = batch
        self._bounds = batch.qo_indptr.tolist()
        rows, seq_lens = batch.rows.tolist(), batch.seq_lens.tolist()
        self._slots = [batch.table[row, :n].long() for row, n in zip(rows, seq_lens, strict=True)]

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert self._batch is not None, "begin() comes before forward()"
        self._pool.set_kv_buffer(layer, self._batch.out_slots, k, v)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)  # [T, H, D]
        for b, slots in enumerate(self._slots):
            span = slice(self._bounds[b], self._bounds[b + 1])
            k_seen, v_seen = self._pool.read_kv(layer, slots)
            out[span] = attend(q[span], k_seen.to(q.dtype), v_seen.to(q.dtype))
        return out.flatten(1)


def gather(buffer: Tensor, slots: Tensor, page_size: int) -> Tensor:
    """Read ``slots`` [n] of buffer [P, K, page_size, D] as [n, K, D]."""
    return buffer[slots // page_size, :, slots % page_size]


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute causal attention of the last E tokens of a sequence of n.

    Args:    q: [E, H, D]; k, v: [n, K, D], H a multiple of K, n >= E.
    Returns: [E, H, D].
    """
    num_new, seq_len = q.shape[0], k.shape[0]
    mask = None
    if num_new > 1:
        position = torch.arange(seq_len, device=q.device)
        mask = position <= position[seq_len - num_new :].unsqueeze(1)  # [E, n]
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # [1, heads, tokens, D]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)


def paged_attention_forward(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, block_tables: Tensor, context_lens: Tensor, page_size: int
) -> Tensor:
    """Compute attention over page tables: the reference (SPEC C12).

    Args:    query: [B, E, H, D], the last E tokens of each sequence.
             key_cache, value_cache: [P, K, page_size, D].
             block_tables: [B, max_pages], page of tokens [i * page_size, (i + 1) * page_size).
             context_lens: [B] tokens of each sequence, the E new ones included.
    Returns: [B, E, H, D].
    """
    out = torch.empty_like(query)
    for b, seq_len in enumerate(context_lens.tolist()):
        position = torch.arange(seq_len, device=query.device)
        slots = block_tables[b].long()[position // page_size] * page_size + position % page_size
        out[b] = attend(query[b], gather(key_cache, slots, page_size), gather(value_cache, slots, page_size))
    return out
