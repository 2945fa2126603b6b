"""The oracle backend against attention written out by hand."""

import pytest
import torch
from torch import Tensor

from replicas.attention.torch_native import attend, paged_attention_forward
from replicas.config import AttentionKind


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [E, H, D] are the last of k, v [n, K, D]: softmax(q k / sqrt(D)) v, one head and one token at a time."""
    num_new, heads, dim = q.shape
    out = torch.empty_like(q)
    for e in range(num_new):
        seen = len(k) - num_new + e + 1
        for h in range(heads):
            kv = h * k.shape[1] // heads
            weights = torch.softmax(k[:seen, kv] @ q[e, h] / dim**0.5, dim=0)  # [seen]
            out[e, h] = weights @ v[:seen, kv]
    return out


def test_a_token_attends_to_itself_and_to_what_came_before() -> None:
    """Equal keys give equal weights: token e of the last two sees the mean of the first e + 2 values 0, 1, 2."""
    q, k = torch.zeros(2, 1, 4), torch.zeros(3, 1, 4)
    v = torch.arange(3.0).view(3, 1, 1).expand(3, 1, 4)
    assert attend(q, k, v)[:, 0, 0].tolist() == [0.5, 1.0]


def test_query_heads_share_the_kv_head_of_their_group() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(5, 6, 8), torch.randn(11, 2, 8), torch.randn(11, 2, 8)
    torch.testing.assert_close(attend(q, k, v), dense(q, k, v))


def test_paged_attention_equals_dense_attention() -> None:
    """SPEC C12: pages scattered, contexts of 5 and 9 tokens in pages of 4, two new tokens each."""
    torch.manual_seed(1)
    keys, values = torch.randn(7, 2, 4, 8), torch.randn(7, 2, 4, 8)  # [P, K, page_size, D]
    query, tables, lens = torch.randn(2, 2, 4, 8), [[3, 1, 0], [6, 2, 5]], [5, 9]
    out = paged_attention_forward(query, keys, values, torch.tensor(tables), torch.tensor(lens), 4)
    for b in range(2):
        k, v = (torch.cat([x[page].transpose(0, 1) for page in tables[b]])[: lens[b]] for x in (keys, values))
        torch.testing.assert_close(out[b], dense(query[b], k, v))


@pytest.mark.parametrize("num_new", [1, 9])
@pytest.mark.parametrize(
    "kind",
    [
        AttentionKind(window=4),
        AttentionKind(chunk=5),
        AttentionKind(scale=0.3),
        AttentionKind(soft_cap=1.5, window=6),
        AttentionKind(sinks=True, window=3),
        AttentionKind(scale=1.0, soft_cap=2.0, chunk=4, sinks=True),
    ],
)
def test_each_kind_is_what_its_formula_says(kind: AttentionKind, num_new: int) -> None:
    """Token by token and head by head, over the keys that the token sees."""
    gen = torch.Generator().manual_seed(1)
    q = torch.randn(num_new, 4, 8, generator=gen)
    k, v = torch.randn(17, 2, 8, generator=gen), torch.randn(17, 2, 8, generator=gen)
    sinks = torch.randn(4, generator=gen) if kind.sinks else None
    out = attend(q, k, v, kind, sinks)
    for i in range(num_new):
        at = 17 - num_new + i
        in_window = {p for p in range(at + 1) if kind.window is None or p > at - kind.window}
        seen = sorted(p for p in in_window if kind.chunk is None or p // kind.chunk == at // kind.chunk)
        for head in range(4):
            scores = k[seen, head // 2] @ q[i, head] * (8**-0.5 if kind.scale is None else kind.scale)
            if kind.soft_cap is not None:
                scores = kind.soft_cap * torch.tanh(scores / kind.soft_cap)
            weights = scores.exp()
            total = weights.sum() + (sinks[head].exp() if sinks is not None else 0)
            torch.testing.assert_close(out[i, head], (weights / total) @ v[seen, head // 2])
