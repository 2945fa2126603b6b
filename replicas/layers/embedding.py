"""Token embedding and output head, split over the tensor-parallel ranks by vocabulary.

Owns:      the vocabulary's slices: rank r holds ids [r * S, (r + 1) * S) with S = ceil(V / tp); rows above V are zero.
Never:     copies a tied embedding: the head multiplies by the embedding's own tensor.
Invariant: embeddings and logits are the same on all ranks.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from replicas.config import Products
from replicas.layers.int8 import Int8Matmul
from replicas.layers.layer import Layer, Put
from replicas.layers.linear import Matmul
from replicas.layers.tp_group import TpGroup


class VocabParallelEmbedding(Layer):
    """The embedding: token ids to hidden states, rows split over the ranks."""

    def __init__(self, vocab_size: int, *, tp: TpGroup) -> None:
        self._vocab_size = vocab_size
        self._tp = tp
        self._rows = -(-vocab_size // tp.size)
        self._first = tp.rank * self._rows
        self.weight: Tensor | None = None  # [S, hidden]
        self.table: Int8Matmul | None = None  # instead, where quantized

    def slots(self) -> Mapping[str, Put]:
        return {"weight": self._put}

    def quantize(self) -> None:
        self.table = Int8Matmul()

    def _put(self, tensor: Tensor) -> None:
        self.weight = slice_vocab(tensor, first=self._first, rows=self._rows)

    def finalize(self, device: torch.device, dtype: torch.dtype) -> None:
        assert self.weight is not None, "no embedding was put"
        if self.table is None:
            self.weight = self.weight.to(device=device, dtype=dtype)
        else:
            self.table.prepare(self.weight, None)
            self.weight = None

    @property
    def num_bytes(self) -> int:
        if self.table is not None:
            return self.table.num_bytes
        return 0 if self.weight is None else self.weight.nbytes

    def __call__(self, ids: Tensor) -> Tensor:
        """Look up [T] ids: a fresh tensor [T, hidden]."""
        if self._tp.size == 1:
            return self._rows_of(ids)
        local = ids - self._first
        elsewhere = (local < 0) | (local >= self._rows)  # [T]
        out = self._rows_of(local.masked_fill(elsewhere, 0))
        return self._tp.all_reduce(out.masked_fill_(elsewhere.unsqueeze(-1), 0))

    def _rows_of(self, local: Tensor) -> Tensor:
        if self.table is not None:
            return self.table.rows(local)
        assert self.weight is not None, "finalize() comes before the first call"
        return F.embedding(local, self.weight)


class ParallelLMHead(Layer):
    """The head: hidden states to logits over the whole vocabulary. ``tied``: the embedding that shares its weight."""

    def __init__(self, vocab_size: int, *, tp: TpGroup, tied: VocabParallelEmbedding | None) -> None:
        self._vocab_size = vocab_size
        self._tp = tp
        self._tied = tied
        self._rows = -(-vocab_size // tp.size)
        self._piece: Tensor | None = None  # [S, hidden], until finalize
        self.matmul: Matmul | Int8Matmul = Matmul()

    def slots(self) -> Mapping[str, Put]:
        return {} if self._tied else {"weight": self._put}

    def _put(self, tensor: Tensor) -> None:
        self._piece = slice_vocab(tensor, first=self._tp.rank * self._rows, rows=self._rows)

    def multiply_by(self, products: Products) -> None:
        self.matmul = Matmul(products)

    def quantize(self) -> None:
        """Comes after the embedding's, if tied."""
        self.matmul = Int8Matmul() if self._tied is None or self._tied.table is None else self._tied.table

    def finalize(self, device: torch.device, dtype: torch.dtype) -> None:
        """Comes after the embedding's, if tied."""
        if self._tied is not None and self._tied.table is not None:
            return  # prepared by the embedding
        weight = self._piece if self._tied is None else self._tied.weight
        assert weight is not None, "no output head was put"
        self.matmul.prepare(weight.to(device=device, dtype=dtype), None)
        self._piece = None

    @property
    def num_bytes(self) -> int:
        return 0 if self._tied else self.matmul.num_bytes

    def __call__(self, x: Tensor) -> Tensor:
        """Compute logits [S, V] fp32 of hidden states [S, hidden]."""
        if x.shape[0] == 0:
            return x.new_empty(0, self._vocab_size, dtype=torch.float32)
        logits = self.matmul(x).float()
        if self._tp.size == 1:
            return logits
        return self._tp.all_gather(logits)[:, : self._vocab_size]


def slice_vocab(tensor: Tensor, *, first: int, rows: int) -> Tensor:
    """Cut rows [first, first + rows) of [V, hidden]; rows from V on are zero. A view if all rows exist."""
    there = tensor[first : first + rows]
    if len(there) == rows:
        return there
    padded = tensor.new_zeros(rows, tensor.shape[1])
    padded[: len(there)] = there
    return padded
