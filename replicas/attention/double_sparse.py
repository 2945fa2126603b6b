"""Attention by Double Sparsity, a reference for a CPU: each token attends to the few tokens whose labels match it best.

Owns:      the choice of those tokens: the ``num_tokens`` of highest score, which is labels times the query's channels.
Never:     is exact where a token has more than ``num_tokens`` before it and itself; up to there it is.
Invariant: what a token attends to depends on the tokens before it alone, never on how its prompt was cut or cached.
           Query heads that share a KV head choose each for itself.
Thread:    the thread that runs the model.
Source:    Yang et al. 2024, "Post-Training Sparse Attention with Double Sparsity" (arXiv:2408.07092), section 3. Unlike
           there, prompts are computed so too, not decode steps alone: hit and miss would differ otherwise.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from replicas.attention.torch_native import PLAIN, TorchNativeAttention
from replicas.config import AttentionKind
from replicas.errors import InvalidConfig
from replicas.memory.pool import MHATokenToKVPool
from replicas.memory.sparse_pool import DoubleSparseTokenToKVPool

QUERIES = 128  # that choose at a time: their scores are [H, 128, n]


class DoubleSparseAttention(TorchNativeAttention):
    """AttentionBackend over a DoubleSparseTokenToKVPool: approximate beyond ``num_tokens``."""

    def __init__(self, pool: MHATokenToKVPool, *, num_tokens: int) -> None:
        """``num_tokens``: that a token attends to at most. Raises: InvalidConfig for a pool without labels."""
        if not isinstance(pool, DoubleSparseTokenToKVPool):
            raise InvalidConfig("attention: double_sparse needs a pool with labels: set cache.label_channels")
        super().__init__(pool)
        self._labelled = pool
        self._num_tokens = num_tokens

    def attended(self, layer: int, q: Tensor, slots: Tensor, kind: AttentionKind, sinks: Tensor | None) -> Tensor:
        assert kind == PLAIN, "resolve.py refuses such models"
        if len(slots) <= self._num_tokens:
            return super().attended(layer, q, slots, kind, sinks)
        if len(q) == 1:
            return self._decoded(layer, q, slots)
        pool, out, first = self._labelled, torch.empty_like(q), len(slots) - len(q)
        keys, values = (x.to(q.dtype) for x in pool.read_kv(layer, slots))
        labels = pool.label_buffer[layer, slots]
        for start in range(0, len(q), QUERIES):
            part = q[start : start + QUERIES]
            seen = slice(0, first + start + len(part))
            chosen = choose(part, labels[seen], pool.channels[layer], self._num_tokens)
            out[start : start + len(part)] = attend_to(part, keys[seen], values[seen], chosen)
        return out

    def _decoded(self, layer: int, q: Tensor, slots: Tensor) -> Tensor:
        """One token's attention [1, H, D]: of K and V only what each head has chosen is read."""
        pool = self._labelled
        scores = label_scores(q, pool.label_buffer[layer].index_select(0, slots), pool.channels[layer])[:, 0]
        chosen = slots[scores.topk(self._num_tokens, dim=-1, sorted=False).indices]  # [H, num_tokens]
        head = torch.arange(len(chosen)) // (len(chosen) // pool.num_kv_heads)
        at = (chosen // pool.page_size, head[:, None], chosen % pool.page_size)
        k, v = (x[at].to(q.dtype).unsqueeze(0) for x in (pool.get_key_buffer(layer), pool.get_value_buffer(layer)))
        return F.scaled_dot_product_attention(q.transpose(0, 1).unsqueeze(0), k, v)[0].transpose(0, 1)


def label_scores(q: Tensor, labels: Tensor, channels: Tensor) -> Tensor:
    """Score the tokens of ``labels`` [n, K, C] for q [E, H, D] by their ``channels`` [K, C]. Returns: [H, E, n]."""
    num_new, num_heads, num_kv_heads = len(q), q.shape[1], labels.shape[1]
    of_heads = channels.repeat_interleave(num_heads // num_kv_heads, dim=0)  # [H, C]
    q_labels = q.gather(2, of_heads.expand(num_new, -1, -1)).transpose(0, 1).float()  # [H, E, C]
    by_kv_head = q_labels.reshape(num_kv_heads, -1, q_labels.shape[2])
    return (by_kv_head @ labels.permute(1, 2, 0)).view(num_heads, num_new, len(labels))


def choose(q: Tensor, labels: Tensor, channels: Tensor, num_tokens: int) -> Tensor:
    """Choose for each of the last E tokens of a sequence of n the tokens of highest label score that it may see.

    Args:    q: [E, H, D]; labels: [n, K, C]; channels: [K, C]; H is a multiple of K.
    Returns: [H, E, n] bool; ``num_tokens`` of each row, or all that there are up to the token itself.
    """
    num_new, num_seen = len(q), len(labels)
    scores = label_scores(q, labels, channels)
    position = torch.arange(num_seen, device=q.device)
    future = position > position[num_seen - num_new :, None]
    scores.masked_fill_(future, -torch.inf)
    best = scores.topk(min(num_tokens, num_seen), dim=-1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(2, best, True) & ~future


def attend_to(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor) -> Tensor:
    """Compute attention of q [E, H, D] over k, v [n, K, D] at the tokens ``chosen`` [H, E, n]. Returns: [E, H, D]."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=chosen, enable_gqa=True)[0].transpose(0, 1)
