"""The KV pool of models with multi-head latent attention (MLA): one vector for each token and layer, K and V of all
heads.

Owns:      the bytes: a token's latent vector, normalised, and behind it the part of its key that was rotated, shared by
           all heads. V is the latent vector: the first ``value_dim`` columns. Where an index chooses what a token
           attends to, its key of the token is the last columns.
Never:     expands a vector to the keys and values of heads: queries are brought into its space (models/deepseek.py).
Invariant: every rank of a tensor-parallel replica holds the same bytes.
Thread:    the runner's.
Source:    DeepSeek-AI 2024 (arXiv:2405.04434), section 2.1; SPEC C03.
"""

import torch
from torch import Tensor

from replicas.memory.pool import MHATokenToKVPool


class MLATokenToKVPool(MHATokenToKVPool):
    """``buffer`` [num_pages + 1, L, page_size, kv_lora_rank + rope_dim + index_dim]; attention sees one KV head."""

    vectors = 1

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        num_layers: int,
        kv_lora_rank: int,
        rope_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        index_dim: int = 0,
    ) -> None:
        self.value_dim, self.key_dim = kv_lora_rank, kv_lora_rank + rope_dim
        super().__init__(num_pages, page_size, num_layers, 1, self.key_dim + index_dim, dtype, device)

    def storage(self) -> tuple[tuple[int, ...], torch.dtype]:
        return (self.num_pages + 1, self.num_layers, self.page_size, self.head_dim), self.dtype

    def get_key_buffer(self, layer: int) -> Tensor:
        """[num_pages + 1, 1, page_size, kv_lora_rank + rope_dim] strided view."""
        return self.buffer[:, layer, :, : self.key_dim].unsqueeze(1)

    def get_value_buffer(self, layer: int) -> Tensor:
        """[num_pages + 1, 1, page_size, kv_lora_rank] strided view of the keys."""
        return self.get_key_buffer(layer)[..., : self.value_dim]

    def set_kv_buffer(self, layer: int, loc: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k [T, 1, kv_lora_rank + rope_dim] at slots ``loc`` [T]; ``v`` is its first columns already."""
        loc = loc.long()
        kept = self.buffer[:, layer, :, : self.key_dim]
        kept[loc // self.page_size, loc % self.page_size] = k.squeeze(1).to(self.dtype)

    def set_index_keys(self, index: int, loc: Tensor, keys: Tensor, *, behind: int) -> None:
        """Store the ``keys`` [T, index_dim] of layer ``index`` at slots ``loc`` [T]."""
        kept = self.buffer[:, index, :, self.key_dim :]
        kept[loc // self.page_size, loc % self.page_size] = keys.to(self.dtype)

    def read_index_keys(self, index: int, slots: Tensor, dim: int, *, behind: int) -> Tensor:
        return self.buffer[:, index, :, self.key_dim :][slots // self.page_size, slots % self.page_size]

    def _by_token(self) -> Tensor:
        """[L, 1, num_pages + 1, page_size, 1, D] strided view."""
        return self.buffer.transpose(0, 1).unsqueeze(1).unsqueeze(-2)
