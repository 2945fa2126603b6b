"""Chooses the attention backend from those that are installed and run here, and says why.

Invariant: on a GPU, the backend that `auto` takes has run a step: none is chosen only because another failed.
"""

import functools
import importlib
import logging
import os
import sysconfig
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from replicas.attention.base import AttentionBackend, BatchMeta
from replicas.attention.torch_native import TorchNativeAttention
from replicas.config import AttentionChoice, AttentionKind, unserved_kinds
from replicas.errors import EngineDead, InvalidConfig
from replicas.memory.pool import MHATokenToKVPool
from replicas.scheduler.plan import PrefixGroup

log = logging.getLogger(__name__)

ON_A_GPU = ("flashinfer", "triton", "torch_native")  # the fastest first
NO_LATENT = "reads K and V of heads, and this model keeps latent vectors"


def make_attention(
    name: str,
    pool: MHATokenToKVPool,
    *,
    dtype: torch.dtype,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    num_threads: int,
    kinds: Sequence[AttentionKind] = (),
    graph_rows: int = 0,
    sparse_tokens: int = 0,
) -> tuple[AttentionBackend, AttentionChoice]:
    """Make the backend called ``name``; ``auto`` takes the fastest that serves the pool: on a CPU ``cpu``, else
    ``torch_native``; on a GPU the first of ON_A_GPU that runs a trial step.

    Args:   dtype: of the queries; the pool may have another.
            num_heads, num_kv_heads: of this rank.
            kinds: of each layer; none: all are plain.
            graph_rows: of the largest decode step in a CUDA graph.
            sparse_tokens: that a token attends to at most, of double_sparse.
    Raises: InvalidConfig for a backend asked for by name that cannot serve here; EngineDead when the GPU has failed.
    """
    on_cpu = pool.device.type == "cpu"
    make = functools.partial(
        _make, pool=pool, dtype=dtype, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim,
        num_threads=num_threads, kinds=kinds, graph_rows=graph_rows,
    )  # fmt: skip
    if name == "double_sparse":
        from replicas.attention.double_sparse import DoubleSparseAttention

        sparse = DoubleSparseAttention(pool, num_tokens=sparse_tokens)
        return sparse, AttentionChoice(name=name, why="as the settings say; a reference, slow")
    if name != "auto":
        lacks = unserved_kinds(name, kinds)
        if lacks is not None:
            raise InvalidConfig(f"attention: {name} {lacks}; set attention: auto")
        if name in ("flashinfer", "triton"):
            if on_cpu:
                raise InvalidConfig(
                    f"attention: {name} runs on a GPU, and the KV pool is on a CPU; set attention: auto"
                )
            reason = missing("triton") or missing(name)  # flashinfer stores K and V with a kernel of Triton's
            if reason is not None:
                raise InvalidConfig(f"attention: {name} {reason}; install it, or leave attention at auto")
            if name == "triton" and pool.vectors == 1:
                raise InvalidConfig(f"attention: {name} {NO_LATENT}; set attention: auto")
        backend, why = make(name), "as the settings say"
    elif on_cpu:
        from replicas.attention import cpu

        reason = cpu.why_not(pool, dtype=dtype, head_dim=head_dim) or unserved_kinds("cpu", kinds)
        name = "cpu" if reason is None else "torch_native"
        backend, why = make(name), "the fast one of this device" if reason is None else f"slow: cpu {reason}"
    else:
        heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        backend, name, why = _first_that_runs(make, pool, dtype, heads, kinds)
    log.info("attention: %s, %s", name, why)
    return backend, AttentionChoice(name=name, why=why)


def _first_that_runs(
    make: Callable[[str], AttentionBackend],
    pool: MHATokenToKVPool,
    dtype: torch.dtype,
    heads: Mapping[str, int],
    kinds: Sequence[AttentionKind],
) -> tuple[AttentionBackend, str, str]:
    """Return the first of ON_A_GPU whose trial step runs, its name, and the reason. Raises: EngineDead."""
    failed: list[str] = []
    for name in ON_A_GPU:
        reason = unserved_kinds(name, kinds) or _why_not(name, pool, dtype, heads["head_dim"])
        if reason is None:
            try:
                backend = make(name)
                try_out(backend, pool, dtype=dtype, sinks=bool(kinds) and kinds[0].sinks, **heads)
            except Exception as error:  # noqa: BLE001 - of a library that may fail in any way; nothing has run before it
                _require_device(pool.device, name, error)
                reason = f"failed in a trial step: {type(error).__name__}: {error}"
                log.warning("attention: %s %s", name, reason)
            else:
                return backend, name, f"since {'; '.join(failed)}" if failed else "the fast one of this device"
        failed.append(f"{name} {reason}")
    raise EngineDead(f"no attention backend runs on {pool.device}: {'; '.join(failed)}")


def _make(
    name: str,
    *,
    pool: MHATokenToKVPool,
    dtype: torch.dtype,
    num_threads: int,
    kinds: Sequence[AttentionKind],
    graph_rows: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> AttentionBackend:
    shape = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    if name == "cpu":
        from replicas.attention.cpu import CpuAttention

        return CpuAttention(pool, dtype=dtype, num_threads=num_threads, kinds=kinds, **shape)
    if name == "flashinfer":
        add_scripts_to_path()
        log.info("attention: compiling FlashInfer's kernels, minutes, once on this machine")
        if pool.vectors == 1:
            from replicas.attention.flashinfer_mla import FlashInferLatentAttention

            scale = (kinds[0].scale if kinds else None) or head_dim**-0.5
            return FlashInferLatentAttention(pool, dtype=dtype, num_heads=num_heads, scale=scale)
        from replicas.attention.flashinfer import FlashInferAttention

        kind = kinds[0] if kinds else AttentionKind()
        return FlashInferAttention(pool, dtype=dtype, graph_rows=graph_rows, kind=kind, **shape)
    if name == "triton":
        from replicas.attention.triton_paged import TritonAttention

        return TritonAttention(pool, kinds=kinds, **shape)
    return TorchNativeAttention(pool, kinds)


def _why_not(name: str, pool: MHATokenToKVPool, dtype: torch.dtype, head_dim: int) -> str | None:
    """Say what keeps a GPU backend from being tried, in words that follow its name."""
    if name == "torch_native":
        return None
    latent = pool.vectors == 1
    if latent and name == "triton":
        return NO_LATENT
    if latent:
        reason = missing("flashinfer")
        if reason is None:
            from replicas.attention import flashinfer_mla

            reason = flashinfer_mla.why_not(pool, dtype=dtype)
        return reason
    reason = missing("triton")  # which the FlashInfer backend stores K and V with
    if reason is not None:
        return f"needs triton, which {reason}" if name == "flashinfer" else reason
    if name == "flashinfer":
        reason = missing("flashinfer")
        if reason is None:
            from replicas.attention.flashinfer import why_not

            return why_not(pool.dtype, dtype=dtype, head_dim=head_dim)
    return reason


def _require_device(device: torch.device, name: str, error: Exception) -> None:
    """Check the device. Raises: EngineDead if it has failed: nothing on it recovers in this process."""
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as sticky:
        log.error("attention: %s has broken %s: %s", name, device, sticky)
        raise EngineDead(
            f"a trial step of attention: {name} has broken {device} for this process: {type(error).__name__}: {error}. "
            "If it happens again, set attention to another backend"
        ) from error


def add_scripts_to_path() -> None:
    """Put this environment's programs on PATH, if it was not activated: FlashInfer starts ``ninja`` by name."""
    scripts, path = sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)
    if scripts not in path.split(os.pathsep):
        os.environ["PATH"] = scripts + os.pathsep + path


def try_out(
    backend: AttentionBackend,
    pool: MHATokenToKVPool,
    *,
    dtype: torch.dtype,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    sinks: bool = False,
) -> None:
    """Run one layer of a mixed step with a prefix group on the dummy page, and wait for it.

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
    sunk = heads.new_zeros(num_heads) if sinks else None
    backend.forward(0, heads[:, :num_heads], heads[:, num_heads:first_v], heads[:, first_v:], sunk).cpu()


def missing(package: str) -> str | None:
    """Say why ``package`` cannot be imported, in words that follow its name."""
    try:
        importlib.import_module(package)
    except (ImportError, OSError, RuntimeError) as error:  # a missing dependency or library of its own counts too
        return f"cannot be imported ({error})"
    return None
