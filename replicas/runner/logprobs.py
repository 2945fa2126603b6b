"""Log probabilities of tokens and of their most likely alternatives.

Owns:  the definition: natural logarithm of softmax(logits) as the model gave them, before penalties, bias, temperature
       and cuts (vLLM's ``raw_logprobs``).
Never: changes logits.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from replicas.types import TokenIds, TokenLogprob


def token_logprobs(
    logits: Tensor, token_ids: TokenIds, num_tops: Sequence[int], *, ranked: bool = False
) -> list[TokenLogprob]:
    """Logprob of ``token_ids`` [n] under ``logits`` [n, V], with the ``num_tops`` [n] most likely tokens beside each.

    The alternatives are in order of probability, equals by id, so the first of them is the greedy token. ``ranked``:
    with the rank of each of ``token_ids``.
    """
    normaliser = torch.logsumexp(logits, dim=-1, keepdim=True)  # [n, 1]
    chosen = logits.gather(1, torch.from_numpy(np.asarray(token_ids, dtype=np.int64)).to(logits.device)[:, None])
    values = (chosen - normaliser)[:, 0].tolist()
    ranks = ((logits > chosen).sum(dim=-1) + 1).tolist() if ranked else [None] * len(values)
    num_top = min(max(num_tops, default=0), logits.shape[1])
    if num_top == 0:
        plain = zip(token_ids, values, ranks, strict=True)
        return [TokenLogprob(token_id=int(t), logprob=v, rank=rank) for t, v, rank in plain]
    top_ids = _most_likely(logits, num_top)  # [n, num_top]
    top_values = (logits.gather(1, torch.from_numpy(top_ids).to(logits.device)) - normaliser).tolist()
    return [
        TokenLogprob(token_id=int(t), logprob=v, top=tuple(zip(ids[:num], tops[:num], strict=True)), rank=rank)
        for t, v, ids, tops, num, rank in zip(
            token_ids, values, top_ids.tolist(), top_values, num_tops, ranks, strict=True
        )
    ]


def _most_likely(logits: Tensor, num: int) -> npt.NDArray[np.int64]:
    """Ids [n, num] of the largest logits, equals by id."""
    more = min(num + 1, logits.shape[1])
    values, ids = logits.topk(more, dim=-1)
    if more > num and bool((values[:, num - 1] == values[:, num]).any()):
        return logits.sort(dim=-1, descending=True, stable=True).indices[:, :num].cpu().numpy()  # equals at the edge
    host_values, host_ids = values[:, :num].cpu().numpy(), ids[:, :num].cpu().numpy()
    return np.take_along_axis(host_ids, np.lexsort((host_ids, -host_values), axis=-1), axis=-1)
