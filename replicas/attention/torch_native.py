"""The plain backend: gathers each request's K and V and calls PyTorch's attention. Slow, short, and the oracle.

Owns:      the current step's lengths.
Invariant: token at position p attends to positions [0, p], its own K and V included; of them those that the layer's
           `AttentionKind` lets it see.
Thread:    the thread that runs the model.
Source:    attention backend extend/decode of SGLang (SPEC F15); paged attention, Kwon et al. 2023 (arXiv:2309.06180).
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from replicas.attention.base import BatchMeta, KvPool
from replicas.config import AttentionKind

PLAIN = AttentionKind()
QUERIES = 128  # with tokens chosen for each that attend at a time: what is masked is [128, n]
SCORES = 1 << 25  # of latent attention that are made at a time


class TorchNativeAttention:
    """AttentionBackend over a KvPool, any device, dtype and kind."""

    def __init__(self, pool: KvPool, kinds: Sequence[AttentionKind] = ()) -> None:
        """``kinds``: of each layer; none: all are plain."""
        self._pool = pool
        self._kinds = kinds
        self._batch: BatchMeta | None = None
        self._slots: list[Tensor] = []  # per request, [seq_len] its slots in order of position
        self._bounds: list[int] = []  # [B + 1] request b owns q[bounds[b] : bounds[b + 1]]

    def begin(self, batch: BatchMeta) -> None:
        self._batch = batch
        self._bounds = batch.qo_indptr.tolist()
        rows, seq_lens = batch.rows.tolist(), batch.seq_lens.tolist()
        self._slots = [batch.table[row, :n].long() for row, n in zip(rows, seq_lens, strict=True)]

    def set_index_keys(self, index: int, tokens: Tensor, keys: Tensor) -> None:
        assert self._batch is not None, "begin() comes before the layers"
        self._pool.set_index_keys(index, self._batch.out_slots[tokens], keys, behind=len(self._kinds))

    def read_index_keys(self, index: int, request: int, num_tokens: int, dim: int) -> Tensor:
        return self._pool.read_index_keys(index, self._slots[request][:num_tokens], dim, behind=len(self._kinds))

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        return self._forward(layer, q, k, v, sinks, None)

    def forward_chosen(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, chosen: Tensor
    ) -> Tensor:
        return self._forward(layer, q, k, v, sinks, chosen)

    def _forward(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, chosen: Tensor | None
    ) -> Tensor:
        assert self._batch is not None, "begin() comes before forward()"
        kind = self._kinds[layer] if self._kinds else PLAIN
        assert kind.sinks == (sinks is not None), f"layer {layer} is {kind}"
        self._pool.set_kv_buffer(layer, self._batch.out_slots, k, v)
        out = q.new_empty(*q.shape[:2], v.shape[-1])  # [T, H, D of V]
        for b, slots in enumerate(self._slots):
            span = slice(self._bounds[b], self._bounds[b + 1])
            if chosen is None or len(slots) <= chosen.shape[1]:
                out[span] = self.attended(layer, q[span], slots, kind, sinks)
            else:
                out[span] = self._attended_chosen(layer, q[span], slots, sinks, chosen[span])
        return out.flatten(1)

    def _attended_chosen(self, layer: int, q: Tensor, slots: Tensor, sinks: Tensor | None, chosen: Tensor) -> Tensor:
        """Compute `attended` over the tokens ``chosen`` [E, C]; of those of one token, K and V alone are read."""
        kind, first = self._kinds[layer], len(slots) - len(q)
        if len(q) == 1:
            own = chosen[0][chosen[0] >= 0].sort().values
            return self.attended(layer, q, slots[own], kind, sinks)
        k, v = (x.to(q.dtype) for x in self._pool.read_kv(layer, slots))
        parts = []
        for start in range(0, len(q), QUERIES):
            part = q[start : start + QUERIES]
            num_seen = first + start + len(part)
            # -1 falls on one more column
            mask = torch.zeros(len(part), num_seen + 1, dtype=torch.bool, device=q.device)
            mask.scatter_(1, chosen[start : start + len(part)] % (num_seen + 1), value=True)
            parts.append(attend(part, k[:num_seen], v[:num_seen], kind, sinks, chosen=mask[:, :-1]))
        return torch.cat(parts)

    def attended(self, layer: int, q: Tensor, slots: Tensor, kind: AttentionKind, sinks: Tensor | None) -> Tensor:
        """Compute the attention of q [E, H, D], the last tokens of one request, whose ``slots`` [n] end with theirs.
        Returns: [E, H, D of V]."""
        k, v = (x.to(q.dtype) for x in self._pool.read_kv(layer, slots))
        return attend(q, k, v, kind, sinks)


def gather(buffer: Tensor, slots: Tensor, page_size: int) -> Tensor:
    """Read ``slots`` [n] of buffer [P, K, page_size, D] as [n, K, D]."""
    return buffer[slots // page_size, :, slots % page_size]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kind: AttentionKind = PLAIN,
    sinks: Tensor | None = None,
    *,
    chosen: Tensor | None = None,
) -> Tensor:
    """Compute causal attention of the last E tokens of a sequence of n.

    Args:    q: [E, H, D]; k, v: [n, K, D], H a multiple of K, n >= E. sinks: [H], for a kind that has them.
             chosen: [E, n] bool, tokens that each sees at most; None: all.
    Returns: [E, H, D].
    """
    num_new, seq_len = q.shape[0], k.shape[0]
    first = seq_len - num_new
    if kind.window is not None or kind.chunk is not None:  # what no token sees is left out
        seen = _first_seen(torch.tensor([first]), kind).item()
        k, v = k[seen:], v[seen:]
    else:
        seen = 0
    mask = None
    if num_new > 1:
        position = torch.arange(seen, seq_len, device=q.device)
        query = position[first - seen :].unsqueeze(1)
        mask = (position <= query) & (position >= _first_seen(query, kind))  # [E, n - seen]
    if chosen is not None:
        mask = chosen if mask is None else chosen & mask
    if v.shape[-1] != k.shape[-1]:
        return _attend_latent(q, k, v, mask, kind.scale)
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # [1, heads, tokens, D]
    if kind.soft_cap is None and sinks is None:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=kind.scale, enable_gqa=True)
        return out[0].transpose(0, 1)
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = q.float() @ k.float().transpose(2, 3) * (q.shape[-1] ** -0.5 if kind.scale is None else kind.scale)
    if kind.soft_cap is not None:
        scores = torch.tanh(scores / kind.soft_cap) * kind.soft_cap
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().view(1, -1, 1, 1).expand(1, -1, num_new, 1)], dim=-1)
    weights = scores.softmax(dim=-1)[..., : k.shape[2]].to(v.dtype)
    return (weights @ v)[0].transpose(0, 1)


def _attend_latent(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Compute `attend` over latent vectors k [n, 1, D], a bounded number of tokens at a time: heads are rows of one
    head, since PyTorch would copy K and V for each, and makes all scores at once."""
    (num_new, heads, dim), parts = q.shape, []
    most = max(1, SCORES // (heads * len(k)))
    for span in (slice(start, start + most) for start in range(0, num_new, most)):
        seen = None if mask is None else mask[span].repeat_interleave(heads, dim=0)
        rows, keys, values = q[span].reshape(1, -1, dim), k.transpose(0, 1), v.transpose(0, 1)
        out = F.scaled_dot_product_attention(rows, keys, values, attn_mask=seen, scale=scale)
        parts.append(out.view(-1, heads, out.shape[-1]))
    return torch.cat(parts)


def _first_seen(position: Tensor, kind: AttentionKind) -> Tensor:
    """Return the first position that each token sees."""
    first = torch.zeros_like(position)
    if kind.window is not None:
        first = (position - kind.window + 1).clamp_min(0)
    if kind.chunk is not None:
        first = torch.maximum(first, position - position % kind.chunk)
    return first


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
