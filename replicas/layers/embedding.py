"""Token embedding and output head, split over the tensor-parallel ranks by vocabulary; rotary position embedding.

Owns:      the vocabulary's slices: rank r holds ids [r * S, (r + 1) * S) with S = ceil(V / tp); rows above V are zero.
Never:     copies a tied embedding on a GPU, or one whose numbers share scales: the head multiplies by the embedding's
           own. Else, on a CPU, the head has panels, and the embedding stays in the mapped checkpoint.
Invariant: embeddings are the same on all ranks; logits are rank 0's alone.

Positions are in Hugging Face's layout: dimension i of a head turns together with i + D / 2. The angles of a step are
made once and used by every layer; a table of all positions would be as large as a layer for a context of 128 K.
Source:    Su et al. 2021 (arXiv:2104.09864).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from replicas.config import RopeConfig
from replicas.kernels import elementwise
from replicas.kernels.panels import PLAIN, Packs, Rows, make
from replicas.kernels.weight_formats import WeightFormat, table_format
from replicas.layers.layer import Layer, Piece, Put, computes_in, loaded
from replicas.layers.linear import Matmul
from replicas.layers.rope_scaling import frequencies
from replicas.layers.tp_group import TpGroup


class VocabParallelEmbedding(Layer):
    """The embedding: token ids to hidden states, rows split over the ranks."""

    takes_stored = True

    def __init__(self, vocab_size: int, *, tp: TpGroup) -> None:
        self._vocab_size = vocab_size
        self._tp = tp
        self._rows = -(-vocab_size // tp.size)
        self._first = tp.rank * self._rows
        self.weight: Piece | None = None  # [S, hidden]; a tensor after finalize
        self.table: Matmul | None = None  # instead, where its numbers share scales, or are no tensor of the checkpoint
        self._dtype = torch.float32  # of what is looked up
        self._in_file = False

    def slots(self) -> Mapping[str, Put]:
        return {"weight": self._put}

    def multiply_by(self, format_: WeightFormat, *, one_order: bool) -> None:
        stored = not (self.weight is None or isinstance(self.weight, Tensor))
        plain = format_ in PLAIN and not stored
        self.table = None if plain else Matmul(_format_of(self.weight, format_))

    def _put(self, tensor: Piece) -> None:
        self.weight = slice_vocab(tensor, first=self._first, rows=self._rows)

    def finalize(self, device: torch.device, dtype: torch.dtype, packs: Packs = make) -> None:
        assert self.weight is not None, "no embedding was put"
        self._dtype = computes_in(device, dtype)
        if device.type != "cpu":
            self.weight, self.table = loaded([self.weight], device, dtype), None
            return
        if self.table is not None:
            weight, self.weight = self.weight, None
            self.table.prepare(lambda: Rows([weight]), None, packs, dtype)
            return
        assert isinstance(self.weight, Tensor), "multiply_by() comes after a stored weight is put"
        if self.weight.dtype.itemsize > dtype.itemsize:
            self.weight = self.weight.to(dtype)
        else:
            self._in_file = True  # a view of the mapped checkpoint, of which few rows are read

    @property
    def num_bytes(self) -> int:
        if self.table is not None:
            return self.table.num_bytes
        return self.weight.nbytes if isinstance(self.weight, Tensor) and not self._in_file else 0

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
        assert isinstance(self.weight, Tensor), "finalize() comes before the first call"
        return F.embedding(local, self.weight).to(self._dtype)


class ParallelLMHead(Layer):
    """The head: hidden states to logits over the whole vocabulary. ``tied``: the embedding that shares its weight."""

    takes_stored = True

    def __init__(self, vocab_size: int, *, tp: TpGroup, tied: VocabParallelEmbedding | None) -> None:
        self._vocab_size = vocab_size
        self._tp = tp
        self._tied = tied
        self._rows = -(-vocab_size // tp.size)
        self._piece: Piece | None = None  # [S, hidden], until finalize
        self.matmul = Matmul()

    def slots(self) -> Mapping[str, Put]:
        return {} if self._tied else {"weight": self._put}

    def _put(self, tensor: Piece) -> None:
        self._piece = slice_vocab(tensor, first=self._tp.rank * self._rows, rows=self._rows)

    def multiply_by(self, format_: WeightFormat, *, one_order: bool) -> None:
        """Comes after the embedding's, if tied."""
        shared = self._tied.table if self._tied is not None else None
        self.matmul = shared or Matmul(_format_of(self._piece, format_))

    def finalize(self, device: torch.device, dtype: torch.dtype, packs: Packs = make) -> None:
        """Comes after the embedding's, if tied."""
        if self._tied is not None and self._tied.table is not None:
            return  # prepared by the embedding
        weight = self._piece if self._tied is None else self._tied.weight
        assert weight is not None, "no output head was put"
        if device.type == "cpu":
            self.matmul.prepare(lambda: Rows([weight]), None, packs, dtype)
        else:
            # a tied weight is there already, and is not copied
            whole = weight.to(device, dtype) if isinstance(weight, Tensor) else loaded([weight], device, dtype)
            self.matmul.keep(whole, None)
        self._piece = None

    @property
    def num_bytes(self) -> int:
        shared = self._tied is not None and (self._tied.table is not None or self.matmul.weight is not None)
        return 0 if shared else self.matmul.num_bytes

    def __call__(self, x: Tensor) -> Tensor:
        """Compute logits [S, V] fp32 of hidden states [S, hidden] on rank 0, which alone samples; the others get
        [S, 0]. They are gathered in the dtype of the product."""
        if x.shape[0] == 0:
            return x.new_empty(0, self._vocab_size, dtype=torch.float32)
        logits = self.matmul(x)
        if self._tp.size == 1:
            return logits.float()
        joined = self._tp.gather(logits)
        if joined is None:
            return x.new_empty(x.shape[0], 0, dtype=torch.float32)
        return joined[:, : self._vocab_size].float()


def _format_of(weight: Piece | None, format_: WeightFormat) -> WeightFormat:
    """Choose the format of a table beside products in ``format_``: of stored numbers, what holds them as they are."""
    if format_ == "float32" and weight is not None and not isinstance(weight, Tensor) and weight.fits is not None:
        return weight.fits
    return table_format(format_)


def slice_vocab(tensor: Piece, *, first: int, rows: int) -> Piece:
    """Cut rows [first, first + rows) of [V, hidden]; rows from V on are zero. A view if all rows exist."""
    if not isinstance(tensor, Tensor):
        if first + rows <= tensor.shape[0]:
            return tensor.narrow(0, first, rows)
        tensor, first = tensor.floats(min(first, tensor.shape[0]), tensor.shape[0]), 0
    there = tensor[first : first + rows]
    if len(there) == rows:
        return there
    padded = tensor.new_zeros(rows, tensor.shape[1])
    padded[: len(there)] = there
    return padded


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """The angles of one step's tokens."""

    cos: Tensor  # [T, 1, D]
    sin: Tensor  # [T, 1, D], the first half negated

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate [T, heads, D] into a fresh tensor."""
        if elementwise.serves(x, halves=True):
            return elementwise.rotate(x, self.cos, self.sin)
        return (x * self.cos).addcmul_(x.roll(x.shape[-1] // 2, dims=-1), self.sin)


class RotaryEmbedding:
    """The table of angles, from which a step's rotation is made by its positions."""

    def __init__(
        self, head_dim: int, rope: RopeConfig, *, context_len: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """``context_len``: longest prompt and output that the engine serves; some scalings follow it."""
        # of cosines and sines: attention's temperature in a scaled context
        inv_freq, self._factor = frequencies(rope, head_dim, context_len)
        self._inv_freq = inv_freq.to(device)  # [D / 2]
        self._dtype = dtype

    def at(self, positions: Tensor) -> Rotation:
        """Make the rotation of positions [T] int64; angles in fp32, their cosines in the model's dtype."""
        angles = positions.float().unsqueeze(1) * self._inv_freq  # [T, D / 2]
        cos, sin = angles.cos(), angles.sin()
        if self._factor != 1.0:
            cos, sin = cos * self._factor, sin * self._factor
        return Rotation(
            torch.cat((cos, cos), dim=-1).to(self._dtype).unsqueeze(1),
            torch.cat((-sin, sin), dim=-1).to(self._dtype).unsqueeze(1),
        )
