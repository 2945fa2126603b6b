"""Sparse attention by an index: modules of Transformers that choose the tokens which each token attends to (A.X K2,
HY V4, Dots 3) run over the keys that our pages keep.

Owns:      how such a module is told all keys of each request of a packed step, and what is made of its choice.
Never:     scores a key: the module's own code does. Holds no key: they lie in the KV pool, behind K and V of the same
           token, and live as long.
Invariant: a module sees the tokens of one request alone, behind all keys of that request; requests with one token each
           are seen together, as a batch, each up to the longest. Where scores are zero, as many are that no head of
           the index likes, later tokens are chosen: not which ones a sort happens to meet first, as that differs
           between a prompt at once and in chunks.
Source:    DeepSeek-AI 2025, DeepSeek-V3.2, "DeepSeek Sparse Attention".
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from replicas.attention.base import BatchMeta, ChoosingAttention, index_bias
from replicas.models.states import cache_argument, cut, num_tokens_of

PAIRS = 1 << 20  # of query and key that are scored at once; a module keeps a number of each and of each of its heads


class AnyMask(dict[str, Tensor]):
    """The mask of each type of layers, as a model's forward pass takes them: none, for our own attention masks."""

    def __init__(self, num_tokens: int, device: torch.device) -> None:
        super().__init__()
        self._none = torch.empty(1, 1, num_tokens, 0, device=device)

    def __missing__(self, layer_type: str) -> Tensor:
        return self._none


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Tokens of a step that a module sees together: a run of one request's, or one of each of several."""

    tokens: Tensor  # [B * E] packed
    positions: Tensor  # [B, E] in their requests
    requests: Sequence[tuple[int, int]]  # [B] the place in the step, and the tokens up to the last of these


def _parts(bounds: Sequence[int], seq_lens: Sequence[int], positions: Tensor) -> list[_Part]:
    """Cut a step into parts of at most PAIRS pairs of query and key."""
    parts, singles = [], list[int]()

    def add(tokens: Tensor, requests: Sequence[tuple[int, int]]) -> None:
        parts.append(_Part(tokens, positions[tokens].view(len(requests), -1), requests))

    def add_singles() -> None:
        if singles:
            first = torch.tensor([bounds[each] for each in singles], device=positions.device)
            add(first, [(each, seq_lens[each]) for each in singles])
            singles.clear()

    longest = 0
    for request, seq_len in enumerate(seq_lens):
        start, end = bounds[request], bounds[request + 1]
        if end - start == 1:
            longest = max(longest, seq_len)
            if (len(singles) + 1) * longest > PAIRS:
                add_singles()
                longest = seq_len
            singles.append(request)
            continue
        most = max(1, PAIRS // seq_len)
        for at in range(start, end, most):
            last = min(at + most, end)
            add(torch.arange(at, last, device=positions.device), [(request, seq_len - (end - last))])
    add_singles()
    return parts


class ServedIndexes:
    """The modules of a served model that choose what its tokens attend to."""

    def __init__(self, module: nn.Module, names: Sequence[str], attention: ChoosingAttention) -> None:
        """Put ourselves before the modules' forward."""
        self.attention = attention
        self.parts: list[_Part] = []  # of the step that runs
        self.order: Tensor | None = None  # [T] where each packed token's choice stands; None: in order
        for number, name in enumerate(names):
            part = module.get_submodule(name)
            part.forward = _Index(self, number, part.forward)

    def begin(self, meta: BatchMeta) -> None:
        """Cut a step into parts."""
        bounds, seq_lens = (lengths.tolist() for lengths in meta.on_host())
        self.parts = _parts(bounds, seq_lens, meta.positions)
        tokens = torch.cat([part.tokens for part in self.parts])
        self.order = None if len(self.parts) == 1 else tokens.argsort()


class _Keys:
    """Transformers' cache as such a module sees it: keeps its keys, and returns all of its requests."""

    def __init__(self, attention: ChoosingAttention, index: int, part: _Part) -> None:
        self._attention, self._index, self._part = attention, index, part

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """Keep keys [B, E, Di]. Returns: [B, n, Di], filled up to the longest request."""
        keys, dim = indexer_key_states, indexer_key_states.shape[2]
        self._attention.set_index_keys(self._index, self._part.tokens, keys.flatten(0, 1))
        kept = [self._attention.read_index_keys(self._index, *each, dim) for each in self._part.requests]
        return pad_sequence(kept, batch_first=True).to(keys.dtype)


class _Index:
    """The forward pass of one module: its own, on each part of the step."""

    def __init__(self, served: ServedIndexes, number: int, forward: Callable[..., Tensor]) -> None:
        self._served, self._number, self._forward = served, number, forward
        self._names, self._cache = list(inspect.signature(forward).parameters), cache_argument(forward)

    def __call__(self, *given: Any, **named: Any) -> Tensor:
        """Return [1, T, C] the positions that each token of the step attends to, -1 for none."""
        named |= dict(zip(self._names, given, strict=False))
        num_tokens, served = num_tokens_of(named), self._served
        chosen = [self._choose(part, named, num_tokens) for part in served.parts]
        widest = max(each.shape[1] for each in chosen)
        joined = torch.cat([F.pad(each, (0, widest - each.shape[1]), value=-1) for each in chosen])
        return (joined if served.order is None else joined[served.order]).unsqueeze(0)

    def _choose(self, part: _Part, named: dict[str, Any], num_tokens: int) -> Tensor:
        """Return [B * E, C] for the tokens of a part."""
        shape = part.positions.shape
        batch = cut(named, num_tokens, lambda x: x[0, part.tokens].view(*shape, *x.shape[2:]))
        keys, longest = _Keys(self._served.attention, self._number, part), max(n for _, n in part.requests)
        batch |= {self._cache: keys, "attention_mask": index_bias(part.positions, longest)}
        found: Tensor = self._forward(**batch).long()
        return found.masked_fill(found > part.positions.unsqueeze(2), -1).flatten(0, 1)
