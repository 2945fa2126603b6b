"""Which attention backend runs where, chosen by what is there; says which, and why."""

import importlib
import logging

import numpy as np
import torch

from replicas.attention.base import AttentionBackend, BatchMeta
from replicas.attention.torch_native import TorchNativeAttention
from replicas.errors import InvalidConfig
from replicas.memory.pool import MHATokenToKVPool
from replicas.prefix_group import PrefixGroup

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
    graph_rows: int = 0,
) -> AttentionBackend:
    """The backend called ``name``; ``auto`` takes the fastest that serves the pool: on a CPU ``cpu``, else
    ``torch_native``; on a GPU ``flashinfer``, else ``triton``, else ``torch_native``.

    Args:   dtype: of the queries; the pool may have another.
            num_heads, num_kv_heads: of this rank.
            graph_rows: of the largest decode step in a CUDA graph.
    Raises: InvalidConfig for a backend asked for by name that cannot serve here.
    """
    shape = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    if name in ("flashinfer", "triton") and pool.device.type == "cpu":
        raise InvalidConfig(f"attention: {name} runs on a GPU, and the KV pool is on a CPU; set attention: auto")
    if name == "auto":
        name, why = _choose(pool, dtype, head_dim)
        log.info("attention: %s, %s", name, why)
        if name == "flashinfer":
            return _flashinfer_if_it_runs(pool, dtype, shape, graph_rows)
    else:
        log.info("attention: %s, as the settings say", name)
    if name == "cpu":
        from replicas.attention.cpu import CpuAttention

        return CpuAttention(pool, dtype=dtype, num_threads=num_threads, **shape)
    if name == "flashinfer":
        _require(name, missing("triton") or missing(name))
        from replicas.attention.flashinfer import FlashInferAttention

        return FlashInferAttention(pool, dtype=dtype, graph_rows=graph_rows, **shape)
    if name == "triton":
        _require(name, missing(name))
        from replicas.attention.triton_paged import TritonAttention

        return TritonAttention(pool, **shape)
    return TorchNativeAttention(pool)


def _choose(pool: MHATokenToKVPool, dtype: torch.dtype, head_dim: int) -> tuple[str, str]:
    """The name of a backend, and the reason."""
    if pool.device.type == "cpu":
        from replicas.attention import cpu

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


def _flashinfer_if_it_runs(
    pool: MHATokenToKVPool, dtype: torch.dtype, shape: dict[str, int], graph_rows: int
) -> AttentionBackend:
    """FlashInfer compiles when it is first used, and may lack a compiler or know the GPU too little: then Triton."""
    from replicas.attention.flashinfer import FlashInferAttention
    from replicas.attention.triton_paged import TritonAttention

    try:
        backend = FlashInferAttention(pool, dtype=dtype, graph_rows=graph_rows, **shape)
        try_out(backend, pool, dtype=dtype, **shape)
    except Exception as error:  # noqa: BLE001 - of a library that may fail in any way; nothing has run before it
        log.warning("attention: triton, since flashinfer failed in a trial step: %s: %s", type(error).__name__, error)
        return TritonAttention(pool, **shape)
    return backend


def try_out(
    backend: AttentionBackend,
    pool: MHATokenToKVPool,
    *,
    dtype: torch.dtype,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> None:
    """One layer of a mixed step with a prefix group, all of it on the dummy page; returns when it has run.

    Raises: whatever the backend's libraries do.
    """
    page_size, device = pool.page_size, pool.device
    bounds, prefix = np.array([0, 2, 3, 4], np.int32), np.array([0, page_size, page_size], np.int32)
    seq_lens = prefix + np.diff(bounds)
    batch = BatchMeta(
        is_decode=False,
        qo_indptr=torch.from_numpy(bounds).to(device),
        rows=torch.zeros(3, dtype=torch.int32, device=device),
        prefix_lens=torch.from_numpy(prefix).to(device),
        seq_lens=torch.from_numpy(seq_lens).to(device),
        positions=torch.tensor([0, 1, page_size, page_size], device=device),
        out_slots=torch.zeros(4, dtype=torch.int64, device=device),
        table=torch.zeros(1, page_size + 2, dtype=torch.int32, device=device),
        max_seq_len=page_size + 1,
        num_tokens=4,
        num_decode=2,
        prefix_groups=(PrefixGroup(members=np.array([1, 2], np.int32), length=page_size),),
        host_qo_indptr=bounds,
        host_seq_lens=seq_lens,
    )
    heads = torch.zeros(4, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype, device=device)
    first_v = num_heads + num_kv_heads
    backend.begin(batch)
    backend.forward(0, heads[:, :num_heads], heads[:, num_heads:first_v], heads[:, first_v:]).cpu()


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
