"""The attention protocol: queries of a packed batch attend over the paged KV pool.

A backend gets the step's shape once (`begin`) and is then called per layer. It stores the new K and V first, so a token
attends to itself and to the tokens before it in the same chunk.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypedDict, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from replicas.config import AttentionKind
from replicas.memory.pool import MHATokenToKVPool
from replicas.scheduler.plan import PrefixGroup
from replicas.types import StateCopy

Lengths = npt.NDArray[np.int32]
LEAST = 1.2e-38  # about the smallest normal fp32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SnapshotStep:
    """How a step keeps recurrent states (memory/state_pool.py), and those for others (cache/parts.py)."""

    places: int  # of each row's states
    page_size: int = 0  # states are kept behind whole pages; 0: they are not, and there is no snapshot
    pages: Tensor | None = None  # [n, page_bytes] uint8, in which snapshots lie
    copies: tuple[StateCopy, ...] = ()  # to make before the step


@dataclass(slots=True, kw_only=True, eq=False)
class BatchMeta:
    """The shape of one step. T tokens of B requests, packed; request b owns q[qo_indptr[b] : qo_indptr[b+1]].

    A decode step is the case of one token each (``is_decode``); in a mixed step the last ``num_decode`` requests have
    one token each. All int tensors live on the model's device.
    """

    is_decode: bool
    qo_indptr: Tensor  # [B + 1] int32
    rows: Tensor  # [B] int32: rows of ``table``
    prefix_lens: Tensor  # [B] int32: tokens in the pool before this step
    seq_lens: Tensor  # [B] int32: prefix_len + new tokens
    positions: Tensor  # [T] int64: absolute position of each token
    out_slots: Tensor  # [T] int64: where each token's K/V goes
    table: Tensor  # [R, C] int32: ReqToTokenPool, slot of (row, position)
    max_seq_len: int
    num_tokens: int
    num_decode: int = 0  # B in a decode step
    prefix_groups: tuple[PrefixGroup, ...] = ()  # of requests that decode; a backend may ignore them
    prompt_groups: tuple[PrefixGroup, ...] = ()  # of requests that extend, likewise
    host_qo_indptr: Lengths | None = None  # a copy of the device's, so no step waits to read it; None on a CPU
    host_seq_lens: Lengths | None = None
    snapshots: SnapshotStep | None = None  # what a model that keeps recurrent states does beside; None: nothing
    windows: "BatchMeta | None" = None  # the same step as window layers with a pool of their own see it

    def on_host(self) -> tuple[Lengths, Lengths]:
        """Return ``qo_indptr`` and ``seq_lens`` as arrays of the host."""
        bounds, seq_lens = self.host_qo_indptr, self.host_seq_lens
        if bounds is None or seq_lens is None:
            bounds, seq_lens = self.qo_indptr.cpu().numpy(), self.seq_lens.cpu().numpy()
        return bounds, seq_lens


class Heads(TypedDict):
    """The heads of one rank."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionSpec:
    """What a backend is made for: the pool of one rank, its heads, and the kinds of its layers."""

    pool: MHATokenToKVPool
    dtype: torch.dtype  # of the queries; the pool may have another
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_threads: int = 1  # on a CPU
    kinds: Sequence[AttentionKind] = ()  # of each layer; none: all are plain
    graph_rows: int = 0  # of the largest decode step in a CUDA graph
    sparse_tokens: int = 0  # that a token attends to at most, of double_sparse

    @property
    def heads(self) -> Heads:
        return {"num_heads": self.num_heads, "num_kv_heads": self.num_kv_heads, "head_dim": self.head_dim}

    @property
    def latent(self) -> bool:
        """Whether the pool keeps latent vectors (memory/latent_pool.py), and no K and V of heads."""
        return self.pool.vectors == 1


class AttentionBackend(Protocol):
    """The attention of one rank. Shapes: H query heads and K kv heads *of this rank*, D head_dim."""

    def begin(self, batch: BatchMeta) -> None:
        """Prepare for a step; called once before its first layer."""
        ...

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Store ``k``, ``v`` [T, K, D] of the new tokens at ``out_slots`` of ``layer``; attend causally.

        Args:    q: [T, H, D], rotary already applied to q and k. The scale, and what tokens are seen, is the layer's
                 `AttentionKind`.
                 sinks: [H] the scores of no token, where the layer's kind has them.
        Returns: [T, H * D of V]; may be a buffer that the next call overwrites.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class HeadTurn:
    """What query and key heads go through before attention: norms, where the model has them, and the rotation."""

    cos: Tensor  # [T, 1, D]
    sin: Tensor  # [T, 1, D], the first half negated
    norms: tuple[Tensor, Tensor, float] | None  # weights [D] of query and key heads, epsilon


@runtime_checkable
class RotatingAttention(Protocol):
    """A backend that turns queries and keys itself, in the launch that stores K and V."""

    @property
    def rotates(self) -> bool:
        """Whether it does so here."""
        ...

    def forward_rotating(self, layer: int, q: Tensor, k: Tensor, v: Tensor, turn: HeadTurn | None) -> Tensor:
        """Run `AttentionBackend.forward`; with ``turn``, q and k are as projected, and q is turned in place."""
        ...


@runtime_checkable
class ChoosingAttention(Protocol):
    """A backend that lets a token attend to those alone that an index chose, and keeps the index's keys in the pool."""

    def set_index_keys(self, index: int, tokens: Tensor, keys: Tensor) -> None:
        """Store ``keys`` [N, Di] of index number ``index`` for the packed ``tokens`` [N] of the step."""
        ...

    def read_index_keys(self, index: int, request: int, num_tokens: int, dim: int) -> Tensor:
        """Read the keys [num_tokens, dim] of the first tokens of a ``request``, by its place in the step."""
        ...

    def forward_chosen(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, chosen: Tensor
    ) -> Tensor:
        """Run `AttentionBackend.forward`, each token over those ``chosen`` [T, C]: positions in its request that it may
        see, -1 for none. Where a request has no more than C tokens, each of them sees all before it."""
        ...


def index_bias(positions: Tensor, num_tokens: int) -> Tensor:
    """Return what is added to an index's scores [..., num_tokens] for tokens at ``positions`` [...]: -inf for tokens to
    come, and else next to nothing, more for later ones, which decides between scores of zero."""
    position = torch.arange(num_tokens, device=positions.device)
    return (position * LEAST).masked_fill(position > positions.unsqueeze(-1), -torch.inf)


class KvPool(Protocol):
    """The part of memory/pool.py's MHATokenToKVPool that attention uses."""

    page_size: int
    num_kv_heads: int
    head_dim: int

    def scales(self, layer: int) -> tuple[float, float]:
        """Return what the numbers of K, and of V, of ``layer`` are multiplied by, beside scales that lie with them."""
        ...

    def get_key_buffer(self, layer: int) -> Tensor:
        """Return a strided view [num_pages, K, page_size, D]."""
        ...

    def get_value_buffer(self, layer: int) -> Tensor: ...

    def read_kv(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Read K and V [n, K, D] of ``slots`` [n] int64 as numbers, scaled if the pool stores scales."""
        ...

    def set_kv_buffer(self, layer: int, loc: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k, v [T, K, D] at slots ``loc`` [T]."""
        ...

    def set_index_keys(self, index: int, loc: Tensor, keys: Tensor, *, behind: int) -> None:
        """Store the keys [T, Di] of an index at slots ``loc`` [T]; ``behind``: the number of layers of K and V."""
        ...

    def read_index_keys(self, index: int, slots: Tensor, dim: int, *, behind: int) -> Tensor: ...
