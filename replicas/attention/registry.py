"""Which attention backend runs where, chosen by what is there; says which, and why."""

import importlib
import logging

import torch

from replicas.attention.base import AttentionBackend
from replicas.attention.torch_native import TorchNativeAttention
from replicas.errors import InvalidConfig
from replicas.memory.pool import MHATokenToKVPool

log = logging.getLogger(__name__)


def make_attention(
    name: str,
    pool: MHATokenToKVPool,
    *,
    dtype: torch.dtype,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    num_threads: int,
) -> AttentionBackend:
    """The backend called ``name``; ``auto`` takes the fastest that serves the pool: on a CPU ``cpu``, else
    ``torch_native``; on a GPU ``flashinfer``, else ``triton``, else ``torch_native``.

    Args:   dtype: of the queries; the pool may have another.
            num_heads, num_kv_heads: of this rank.
    Raises: InvalidConfig for a backend asked for by name that cannot serve here.
    """
    shape = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    if name == "auto":
        name, why = _choose(pool, dtype, head_dim)
        log.info("attention: %s, %s", name, why)
    else:
        log.info("attention: %s, as the settings say", name)
    if name == "cpu":
        from replicas.attention.cpu import CpuAttention  # numba: not where the GPU engine runs

        return CpuAttention(pool, dtype=dtype, num_threads=num_threads, **shape)
    if name == "flashinfer":
        _require(name, missing("triton") or missing(name))
        from replicas.attention.flashinfer import FlashInferAttention

        return FlashInferAttention(pool, dtype=dtype, **shape)
    if name == "triton":
        _require(name, missing(name))
        from replicas.attention.triton_paged import TritonAttention

        return TritonAttention(pool, **shape)
    return TorchNativeAttention(pool)


def _choose(pool: MHATokenToKVPool, dtype: torch.dtype, head_dim: int) -> tuple[str, str]:
    """The name of a backend, and the reason."""
    if pool.device.type == "cpu":
        from replicas.attention import cpu  # numba: not where the GPU engine runs

        reason = cpu.why_not(pool, dtype=dtype, head_dim=head_dim)
        return ("cpu", "the fast one of this device") if reason is None else ("torch_native", f"slow: cpu {reason}")
    without = missing("triton")  # which the FlashInfer backend stores K and V with
    if without is not None:
        return "torch_native", f"the slow reference, since triton {without}"
    reason = missing("flashinfer")
    if reason is None:
        from replicas.attention.flashinfer import why_not

        reason = why_not(pool.dtype, dtype=dtype, head_dim=head_dim)
    return ("flashinfer", "the fast one of this device") if reason is None else ("triton", f"since flashinfer {reason}")


def missing(package: str) -> str | None:
    """Why ``package`` cannot be imported, in words that follow its name."""
    try:
        importlib.import_module(package)
    except (ImportError, OSError, RuntimeError) as error:  # a missing dependency or library of its own counts too
        return f"cannot be imported ({error})"
    return None


def _require(name: str, reason: str | None) -> None:
    if reason is not None:
        raise InvalidConfig(f"attention: {name} {reason}; install it, or leave attention at auto")
