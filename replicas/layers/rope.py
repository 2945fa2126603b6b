"""Rotary position embedding in Hugging Face's layout: dimension i of a head turns together with i + D / 2.

Owns:      the frequencies, and the angles of one step: made once a step, used by every layer. There is no table of all
           positions; for a context of 128 K it would be as large as a layer.
Source:    Su et al. 2021 (arXiv:2104.09864); ``llama3`` scaling as in Transformers' ``modeling_rope_utils``.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from replicas.kernels import elementwise


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
        self,
        head_dim: int,
        *,
        theta: float,
        kind: str,
        scaling: Mapping[str, float],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        inv_freq = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)  # [D / 2]
        if kind == "linear":
            inv_freq = inv_freq / scaling["factor"]
        elif kind == "llama3":
            inv_freq = _llama3(inv_freq, scaling)
        elif kind != "default":
            raise ValueError(f"rope kind {kind!r} is not known; wanted default, linear or llama3")
        self._inv_freq = inv_freq.to(device)
        self._dtype = dtype

    def at(self, positions: Tensor) -> Rotation:
        """Make the rotation of positions [T] int64; angles in fp32, their cosines in the model's dtype."""
        angles = positions.float().unsqueeze(1) * self._inv_freq  # [T, D / 2]
        cos, sin = angles.cos(), angles.sin()
        return Rotation(
            torch.cat((cos, cos), dim=-1).to(self._dtype).unsqueeze(1),
            torch.cat((-sin, sin), dim=-1).to(self._dtype).unsqueeze(1),
        )


def _llama3(inv_freq: Tensor, scaling: Mapping[str, float]) -> Tensor:
    """Slow long wavelengths by ``factor``, keep short ones, blend those between."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * inv_freq / (2 * math.pi)  # in the original context
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return keep * inv_freq + (1.0 - keep) * inv_freq / scaling["factor"]
