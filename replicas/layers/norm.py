"""Normalisation: root-mean-square, statistics in fp32 whatever the tensors' dtype, and of layers.

Source: Zhang and Sennrich 2019 (arXiv:1910.07467); Ba et al. 2016 (arXiv:1607.06450).
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from replicas.kernels import elementwise, gpu
from replicas.kernels.panels import Packs, make
from replicas.layers.layer import Layer, Put, computes_in


class RMSNorm(Layer):
    """The normalisation of the last dimension, the same on all ranks."""

    def __init__(self, eps: float) -> None:
        self.eps = eps
        self.weight: Tensor | None = None  # [size]

    def slots(self) -> Mapping[str, Put]:
        return {"weight": self._put}

    def _put(self, tensor: Tensor) -> None:
        self.weight = tensor

    def finalize(self, device: torch.device, dtype: torch.dtype, packs: Packs = make) -> None:
        assert self.weight is not None, "no norm weight was put"
        self.weight = self.weight.to(device, dtype).to(computes_in(device, dtype)).contiguous()

    @property
    def num_bytes(self) -> int:
        return 0 if self.weight is None else self.weight.nbytes

    def after_adding(self, term: Tensor | None, x: Tensor) -> Tensor:
        """Add ``term`` [T, size], if there is one, to ``x`` [T, size] in place, and normalise that into a fresh one."""
        if self.weight is not None and gpu.serves(x, in_registers=True) and self.weight.dtype == x.dtype:
            return gpu.add_rms_norm(x, term, self.weight, self.eps)
        return self(x if term is None else x.add_(term))

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise [..., size] into a fresh tensor."""
        assert self.weight is not None, "finalize() comes before the first call"
        if elementwise.serves(x) and self.weight.dtype == x.dtype:
            return elementwise.rms_norm(x, self.weight, self.eps)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class LayerNorm(RMSNorm):
    """Subtracts the mean first, and adds a bias last."""

    bias: Tensor | None = None  # [size]

    def slots(self) -> Mapping[str, Put]:
        return {**super().slots(), "bias": self._put_bias}

    def _put_bias(self, tensor: Tensor) -> None:
        self.bias = tensor

    def finalize(self, device: torch.device, dtype: torch.dtype, packs: Packs = make) -> None:
        super().finalize(device, dtype, packs)
        assert self.bias is not None, "no norm bias was put"
        self.bias = self.bias.to(device, dtype).to(computes_in(device, dtype)).contiguous()

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + (0 if self.bias is None else self.bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        assert self.weight is not None, "finalize() comes before the first call"
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
