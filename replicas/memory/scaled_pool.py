"""Pools whose numbers are bytes: int8, or 8-bit floats (e4m3, e5m2), each token and head with a scale of its own; on
a GPU 8-bit floats with one scale for all of K, and one for V, in each layer.

Owns:      the bytes of such a pool, scales included. A head's block of a page is its numbers [page_size, D], then its
           scales [page_size] float32: a page stays one run of bytes, and a run of heads another.
Never:     computes attention; the CPU's kernels write the same bytes (attention/cpu_pages.py).
Invariant: a number times its scale is the value; the largest magnitude of a token's head is the largest byte (SPEC K10,
           K11: one scale for a layer would have to be known before its first token).
Thread:    the runner's.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvtransfer.layout import scale_bytes
from replicas.config import FP8_TENSOR
from replicas.memory.pool import MHATokenToKVPool

KV_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    FP8_TENSOR: torch.float8_e4m3fn,
}
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57_344.0}
SMALLEST_PEAK = 1e-30  # what a vector of zeros is divided by


class ScaledKVPool(MHATokenToKVPool):
    """``buffer`` uint8 [num_pages + 1, L, 2, K, page_size * (D + 4)]; D is a multiple of 4."""

    @property
    def _numbers(self) -> Tensor:
        """[num_pages + 1, L, 2, K, page_size, D] strided view."""
        numbers = self.page_size * self.head_dim
        return self.buffer[..., :numbers].view(*self.buffer.shape[:4], self.page_size, self.head_dim)

    @property
    def _scales(self) -> Tensor:
        """[num_pages + 1, L, 2, K, page_size] strided view."""
        return self.buffer.view(torch.float32)[..., self.page_size * self.head_dim // 4 :]

    def storage(self) -> tuple[tuple[int, ...], torch.dtype]:
        block = self.page_size * (self.head_dim + 4)
        return (self.num_pages + 1, self.num_layers, 2, self.num_kv_heads, block), torch.uint8

    def get_key_buffer(self, layer: int) -> Tensor:
        return self._numbers[:, layer, 0].view(self.dtype)

    def get_value_buffer(self, layer: int) -> Tensor:
        return self._numbers[:, layer, 1].view(self.dtype)

    def set_kv_buffer(self, layer: int, loc: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k, v [T, K, D] at slots ``loc`` [T], each vector scaled so that its largest magnitude fits."""
        loc = loc.long()
        page, offset = loc // self.page_size, loc % self.page_size
        largest = LARGEST[self.dtype]
        for part, x in enumerate((k, v)):
            peak = x.float().abs().amax(dim=-1).clamp_min(SMALLEST_PEAK)  # [T, K]
            # divided once, as kernels do: a number over a tensor is its reciprocal in torch, and rounded twice
            scaled = x.float() * (torch.full_like(peak, largest) / peak).unsqueeze(-1)
            numbers = scaled.round() if self.dtype == torch.int8 else scaled
            self._numbers[:, layer, part][page, :, offset] = numbers.to(self.dtype).view(torch.uint8)
            self._scales[:, layer, part][page, :, offset] = peak / largest

    def read_kv(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        page, offset = slots // self.page_size, slots % self.page_size
        numbers = self._numbers[:, layer].permute(1, 0, 3, 2, 4)[:, page, offset].view(self.dtype)  # [2, n, K, D]
        scales = self._scales[:, layer].permute(1, 0, 3, 2)[:, page, offset]  # [2, n, K]
        k, v = numbers.float() * scales.unsqueeze(-1)
        return k, v

    def read_slots(self, slots: npt.NDArray[np.int32]) -> Tensor:
        """uint8 [L, 2, n, K, D + 4]: the numbers of each token and head, then its scale."""
        page, offset = self._places(slots)
        scales = self._scales_by_token()[:, :, page, offset].unsqueeze(-1).contiguous()
        return torch.cat((self._by_token()[:, :, page, offset], scales.view(torch.uint8)), dim=-1)

    def write_slots(self, slots: npt.NDArray[np.int32], data: Tensor) -> None:
        shape = (self.num_layers, 2, len(slots), self.num_kv_heads, self.head_dim + 4)
        if data.shape != shape or data.dtype != torch.uint8:
            raise ValueError(f"{shape} uint8 is wanted for {len(slots)} slots, got {tuple(data.shape)} {data.dtype}")
        page, offset = self._places(slots)
        data = data.to(self.device)
        self._by_token()[:, :, page, offset] = data[..., : self.head_dim]
        scales = data[..., self.head_dim :].contiguous().view(torch.float32).squeeze(-1)
        self._scales_by_token()[:, :, page, offset] = scales

    def _by_token(self) -> Tensor:
        return self._numbers.permute(1, 2, 0, 4, 3, 5)

    def _scales_by_token(self) -> Tensor:
        """[L, 2, num_pages + 1, page_size, K] strided view."""
        return self._scales.permute(1, 2, 0, 4, 3)


class Fp8KVPool(MHATokenToKVPool):
    """``buffer`` uint8 [num_pages + 1, L, 2, K, page_size, D]: e4m3, times a scale of K and one of V, of each layer
    (SPEC C06). They are 1 unless a checkpoint has others (kv_scales.py): K and V of most models lie far within the
    +-448 of e4m3; what does not is cut."""

    layer_scales: Sequence[tuple[float, float]] = ()  # of K, of V; (): all 1

    def storage(self) -> tuple[tuple[int, ...], torch.dtype]:
        return super().storage()[0], torch.uint8

    def scales(self, layer: int) -> tuple[float, float]:
        return self.layer_scales[layer] if self.layer_scales else (1.0, 1.0)

    def get_key_buffer(self, layer: int) -> Tensor:
        return super().get_key_buffer(layer).view(self.dtype)

    def get_value_buffer(self, layer: int) -> Tensor:
        return super().get_value_buffer(layer).view(self.dtype)

    def set_kv_buffer(self, layer: int, loc: Tensor, k: Tensor, v: Tensor) -> None:
        loc, largest = loc.long(), LARGEST[self.dtype]
        page, offset = loc // self.page_size, loc % self.page_size
        for part, (x, scale) in enumerate(zip((k, v), self.scales(layer), strict=True)):
            numbers = (x.float() / scale).clamp(-largest, largest).to(self.dtype)
            self.buffer[:, layer, part][page, :, offset] = numbers.view(torch.uint8)

    def read_kv(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        page, offset = slots // self.page_size, slots % self.page_size
        k, v = (self.buffer[:, layer, part][page, :, offset].view(self.dtype).float() for part in range(2))
        k_scale, v_scale = self.scales(layer)
        return k * k_scale, v * v_scale


def kv_pool(
    kv_dtype: str,
    *,
    num_pages: int,
    page_size: int,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    device: torch.device | str,
    latent: tuple[int, int] | None = None,
) -> MHATokenToKVPool:
    """Make the pool for the setting ``cache.kv_dtype``; ``latent``: of a model with latent attention, numbers of the
    latent and of the rotated key: what ``head_dim`` has more is the key of an index."""
    if latent is not None:
        from replicas.memory.latent_pool import MLATokenToKVPool

        return MLATokenToKVPool(
            num_pages, page_size, num_layers, *latent, KV_DTYPES[kv_dtype], device, head_dim - sum(latent)
        )
    kind = ScaledKVPool if scale_bytes(kv_dtype) else Fp8KVPool if kv_dtype == FP8_TENSOR else MHATokenToKVPool
    return kind(num_pages, page_size, num_layers, num_kv_heads, head_dim, KV_DTYPES[kv_dtype], device)
