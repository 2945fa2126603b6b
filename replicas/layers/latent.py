"""The products of latent attention that each head has for itself: into the latent space, and out of it.

Owns:      the two halves of ``kv_b_proj``, of this rank's heads. The product by the first brings a query into the space
           of the cached vectors, where it attends to them as they are; that by the second makes of the weighted vectors
           the head's values. So no key or value of a head is ever made.
Never:     attends, or knows where vectors are cached.
Invariant: an output row depends on its own x row and head alone. The same products run for a prompt and for one token:
           what a position gets does not depend on how it was computed.
Source:    DeepSeek-AI 2024 (arXiv:2405.04434), section 2.1.2, "absorbed".
"""

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from replicas.config import MLAConfig
from replicas.kernels.experts.grouped import GroupedKernel, SortedRows
from replicas.kernels.panels import Packs, make
from replicas.kernels.weight_formats import WeightFormat
from replicas.layers.layer import Layer, Put
from replicas.layers.linear import grouped_kernel
from replicas.layers.tp_group import TpGroup


class HeadwiseLinear(Layer):
    """A product of each of ``num_heads`` heads by a weight [out, in] of its own."""

    def __init__(self, num_heads: int) -> None:
        self._num_heads = num_heads
        self._read: Callable[[], Tensor] | None = None  # gives [H, out, in], until finalize
        self._format: WeightFormat = "float32"
        self._kernel: GroupedKernel | None = None  # on a CPU: heads as experts, each with all tokens
        self._weight: Tensor | None = None  # [H, out, in] on a GPU

    def take(self, read: Callable[[], Tensor]) -> None:
        """Take what reads the weights [H, out, in]."""
        self._read = read

    def multiply_by(self, format_: WeightFormat, *, one_order: bool) -> None:
        self._format = format_

    def finalize(self, device: torch.device, dtype: torch.dtype, packs: Packs = make) -> None:
        read, self._read = self._read, None
        assert read is not None, "no weight was put"
        if device.type != "cpu":
            self._weight = read().to(device, dtype).contiguous()
            return
        self._kernel = grouped_kernel(read(), self._format, self._num_heads, packs, dtype)

    @property
    def num_bytes(self) -> int:
        held = 0 if self._weight is None else self._weight.nbytes
        return held + (0 if self._kernel is None else self._kernel.num_bytes)

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply x [T, H, in] into [T, H, out]."""
        by_head = x.transpose(0, 1)  # [H, T, in]
        if self._kernel is None:
            assert self._weight is not None, "finalize() comes before the first call"
            return torch.bmm(by_head, self._weight.transpose(1, 2)).transpose(0, 1)
        num_heads, num_tokens, size = by_head.shape
        if not num_tokens:
            return x.new_empty(0, num_heads, self._kernel.n)
        heads = np.arange(num_heads + 1)
        nothing = torch.empty(0, dtype=torch.int64)  # rows are sorted already
        rows = SortedRows(nothing, heads[:-1], heads * num_tokens, nothing)
        out = self._kernel(by_head.reshape(-1, size), rows)
        return torch.stack(torch.split(out, num_tokens), dim=1)


class LatentProjection(Layer):
    """``kv_b_proj`` [heads * (nope + v), rank]: ``keys`` brings queries [T, H, nope] to [T, H, rank], ``values`` brings
    weighted vectors [T, H, rank] to [T, H, v]."""

    def __init__(self, num_heads: int, mla: MLAConfig, tp: TpGroup) -> None:
        """``num_heads``: of this rank."""
        self._first, self._num_heads, self._mla = tp.rank * num_heads, num_heads, mla
        self.keys, self.values = HeadwiseLinear(num_heads), HeadwiseLinear(num_heads)

    def slots(self) -> Mapping[str, Put]:
        return {"weight": self._put}

    def parts(self) -> Mapping[str, Layer]:
        return {"keys": self.keys, "values": self.values}

    def _put(self, tensor: Tensor) -> None:
        nope, rank = self._mla.qk_nope_head_dim, tensor.shape[1]
        heads = tensor.view(-1, nope + self._mla.v_head_dim, rank).narrow(0, self._first, self._num_heads)
        self.keys.take(lambda: heads[:, :nope].transpose(1, 2))
        self.values.take(lambda: heads[:, nope:])
