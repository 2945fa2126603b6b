"""The attention backends: one entry for each, in the order in which `auto` prefers those of a device.

To add one, write a class that serves `AttentionBackend` (base.py), and give `BACKENDS` an entry before an engine is
made: its name is then a value of ``attention``. An entry that another package adds comes after these, so `auto` takes
it where none of them serves: never on a CPU, where ``torch_native`` serves everything.

Never:     imports torch: settings are checked by this table. What makes a backend imports its module, whose libraries
           may be missing here.
"""

import logging
import os
import sysconfig
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from replicas.config import AttentionKind, Device

if TYPE_CHECKING:
    from replicas.attention.base import AttentionBackend, AttentionSpec

log = logging.getLogger(__name__)

ALL_KINDS = frozenset({"scale", "window", "chunk", "soft_cap", "sinks"})
NO_LATENT = "reads K and V of heads, and this model keeps latent vectors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """One attention backend: where it runs, what it serves, and what makes it."""

    devices: tuple[Device, ...]
    make: "Callable[[AttentionSpec], AttentionBackend]"
    # says what keeps it from serving, in words that follow its name; None: nothing
    why_not: "Callable[[AttentionSpec], str | None]" = lambda spec: None
    kinds: frozenset[str] = frozenset()  # the fields of AttentionKind that it serves
    one_kind: bool = False  # only where all layers are of one kind
    latent: bool = False  # it serves pools of latent vectors too
    packages: tuple[str, ...] = ()  # that it needs, and that may be missing
    labels: bool = False  # its pool has labels of keys beside them (memory/sparse_pool.py)
    automatic: tuple[Device, ...] = ("cpu", "cuda")  # where `auto` may take it

    def lacks(self, kinds: Iterable[AttentionKind]) -> str | None:
        """Say what it lacks for layers of these kinds, in words that follow its name; None: nothing."""
        kinds = set(kinds)
        lacking = sorted(frozenset().union(*(kind.special for kind in kinds)) - self.kinds)
        if not lacking and self.one_kind and len(kinds) > 1:
            return f"plans a step for layers of one kind, and this model's are of {len(kinds)}"
        return f"serves no attention with {', '.join(lacking)}, which this model has" if lacking else None


def _add_scripts_to_path() -> None:
    """Put this environment's programs on PATH, if it was not activated: FlashInfer starts ``ninja`` by name."""
    scripts, path = sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)
    if scripts not in path.split(os.pathsep):
        os.environ["PATH"] = scripts + os.pathsep + path


def _flashinfer(spec: "AttentionSpec") -> "AttentionBackend":
    _add_scripts_to_path()
    log.info("attention: compiling FlashInfer's kernels, minutes, once on this machine")
    if spec.latent:
        from replicas.attention.flashinfer_mla import FlashInferLatentAttention

        scale = (spec.kinds[0].scale if spec.kinds else None) or spec.head_dim**-0.5
        return FlashInferLatentAttention(spec.pool, dtype=spec.dtype, num_heads=spec.num_heads, scale=scale)
    from replicas.attention.flashinfer import FlashInferAttention

    kind = spec.kinds[0] if spec.kinds else AttentionKind()
    return FlashInferAttention(spec.pool, dtype=spec.dtype, graph_rows=spec.graph_rows, kind=kind, **spec.heads)


def _why_not_flashinfer(spec: "AttentionSpec") -> str | None:
    if spec.latent:
        from replicas.attention import flashinfer_mla

        return flashinfer_mla.why_not(spec.pool, dtype=spec.dtype)
    from replicas.attention import flashinfer

    return flashinfer.why_not(spec.pool.dtype, dtype=spec.dtype, head_dim=spec.head_dim)


def _triton(spec: "AttentionSpec") -> "AttentionBackend":
    from replicas.attention.triton_paged import TritonAttention

    return TritonAttention(spec.pool, kinds=spec.kinds, **spec.heads)


def _cpu(spec: "AttentionSpec") -> "AttentionBackend":
    from replicas.attention.cpu import CpuAttention

    return CpuAttention(spec.pool, dtype=spec.dtype, num_threads=spec.num_threads, kinds=spec.kinds, **spec.heads)


def _why_not_cpu(spec: "AttentionSpec") -> str | None:
    from replicas.attention import cpu

    return cpu.why_not(spec.pool, dtype=spec.dtype, head_dim=spec.head_dim)


def _torch_native(spec: "AttentionSpec") -> "AttentionBackend":
    from replicas.attention.torch_native import TorchNativeAttention

    return TorchNativeAttention(spec.pool, spec.kinds)


def _double_sparse(spec: "AttentionSpec") -> "AttentionBackend":
    from replicas.attention.double_sparse import DoubleSparseAttention

    return DoubleSparseAttention(spec.pool, num_tokens=spec.sparse_tokens)


BACKENDS: dict[str, Backend] = {
    "flashinfer": Backend(
        devices=("cuda",), make=_flashinfer, why_not=_why_not_flashinfer, latent=True,
        kinds=frozenset({"scale", "window", "soft_cap"}), one_kind=True,
        packages=("triton", "flashinfer"),  # K and V are stored with a kernel of Triton's
    ),
    "triton": Backend(devices=("cuda",), make=_triton, kinds=ALL_KINDS, packages=("triton",)),
    "cpu": Backend(devices=("cpu",), make=_cpu, why_not=_why_not_cpu, kinds=ALL_KINDS, latent=True),
    "torch_native": Backend(
        devices=("cpu", "cuda"), make=_torch_native, kinds=ALL_KINDS | {"indexed"}, latent=True, automatic=("cpu",),
    ),  # on a GPU it is a loop over requests, which `auto` never takes
    "double_sparse": Backend(devices=("cpu",), make=_double_sparse, labels=True, automatic=()),
}  # fmt: skip
