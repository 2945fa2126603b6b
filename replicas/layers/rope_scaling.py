"""Frequencies of the rotary position embedding, in contexts longer than those that a model was first trained on too.

Owns:      the plain ones, and the scalings that Hugging Face calls linear, llama3, yarn, dynamic and longrope.
Invariant: an engine has one set of frequencies, made when it starts for the context that it serves. Where others make
           them by the longest text of a batch (dynamic, longrope), K of a prefix would depend on what came after it,
           and a cached page would be wrong for the next request. ``RopeConfig.fitted_len`` tells such sets apart.

           dynamic: plain up to the original context, as in Transformers; in an engine that serves more, those that
           Transformers uses for a text as long as the served context.
           longrope: short factors in an engine that serves the original context or less, else the long ones, which
           Transformers uses for texts longer than the original context.
Source:    Transformers' ``modeling_rope_utils``; YaRN, Peng et al. 2023 (arXiv:2309.00071); LongRoPE, Ding et al. 2024
           (arXiv:2402.13753).
"""

import math

import torch
from torch import Tensor

from replicas.config import RopeConfig


def frequencies(rope: RopeConfig, head_dim: int, context_len: int) -> tuple[Tensor, float]:
    """Compute the frequencies [D / 2] fp32 of ``rope``, and what cosines and sines are multiplied by.

    Raises: ValueError for an unknown kind, or factors of another number than half the head's dimensions.
    """
    scaling = rope.scaling
    plain = _plain(rope.theta, head_dim)
    if rope.kind == "default":
        return plain, 1.0
    if rope.kind == "linear":
        return plain / scaling["factor"], 1.0
    if rope.kind == "llama3":
        return _llama3(plain, rope), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, head_dim)
    if rope.kind == "dynamic":
        factor, longest = scaling["factor"], rope.fitted_len(context_len)
        stretch = factor * longest / scaling["original_max_position_embeddings"] - (factor - 1)
        return _plain(rope.theta * stretch ** (head_dim / (head_dim - 2)), head_dim), 1.0
    if rope.kind == "longrope":
        factors = rope.long_factor if rope.fitted_len(context_len) else rope.short_factor
        if len(factors) != head_dim // 2:
            raise ValueError(f"longrope has {len(factors)} factors for heads of {head_dim}; wanted {head_dim // 2}")
        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        return 1.0 / (torch.tensor(factors, dtype=torch.float32) * rope.theta**exponents), _longrope_attention(rope)
    raise ValueError(f"rope kind {rope.kind!r} is not known; wanted default, linear, llama3, yarn, dynamic or longrope")


def _plain(theta: float, head_dim: int) -> Tensor:
    """Return the angles [D / 2] fp32 by which a position turns each pair of a head's dimensions."""
    return 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)


def _yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """Return YaRN's temperature for a context ``factor`` times the original."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _llama3(plain: Tensor, rope: RopeConfig) -> Tensor:
    """Slow long wavelengths by ``factor``, keep short ones, blend those between."""
    scaling = rope.scaling
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * plain / (2 * math.pi)  # in the original context
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return keep * plain + (1.0 - keep) * plain / scaling["factor"]


def _yarn(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Keep dimensions that turn more than ``beta_fast`` times in the original context, slow those that turn less than
    ``beta_slow`` times by ``factor``, blend those between by their index."""
    scaling = rope.scaling
    factor = scaling["factor"]

    def index_of(turns: float) -> float:
        """Return the dimension, half its index, that turns so often in the original context."""
        wavelength = scaling["original_max_position_embeddings"] / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = index_of(scaling.get("beta_fast") or 32.0), index_of(scaling.get("beta_slow") or 1.0)
    if scaling.get("truncate", 1.0):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low or 0.001)
    keep = 1.0 - ramp.clamp(0.0, 1.0)
    wavelengths = rope.theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    mixed = (1.0 / (factor * wavelengths)) * (1.0 - keep) + (1.0 / wavelengths) * keep
    attention, mscale, all_dim = (scaling.get(key) for key in ("attention_factor", "mscale", "mscale_all_dim"))
    if attention is None and mscale and all_dim:
        attention = _yarn_mscale(factor, mscale) / _yarn_mscale(factor, all_dim)
    return mixed, _yarn_mscale(factor) if attention is None else attention


def _longrope_attention(rope: RopeConfig) -> float:
    given, factor = rope.scaling.get("attention_factor"), rope.scaling["factor"]
    if given is not None:
        return given
    original = rope.scaling["original_max_position_embeddings"]
    return 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
