"""Chooses the attention backend from those that are installed and run here, and says why.

Invariant: on a GPU, the backend that `auto` takes has run a step: none is chosen only because another failed.
"""

import contextlib
import importlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from replicas.attention.base import AttentionBackend, AttentionSpec, BatchMeta
from replicas.attention.registry import BACKENDS, NO_LATENT, Backend
from replicas.attention.workspace import filling_tokens
from replicas.config import AttentionChoice, Device
from replicas.errors import EngineDead, InvalidConfig
from replicas.kernels.team import one_at_a_time

log = logging.getLogger(__name__)

PLACES: dict[Device, str] = {"cpu": "a CPU", "cuda": "a GPU"}


class NoAttention:
    """The backend of a model without attention, which never calls it."""

    def begin(self, batch: BatchMeta) -> None:
        """Do nothing: no layer follows."""

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        raise AssertionError("the model has no attention")


def make_attention(name: str, spec: AttentionSpec) -> tuple[AttentionBackend, AttentionChoice]:
    """Make the backend called ``name``; ``auto`` takes the first of the device's `BACKENDS` that serves ``spec``, on a
    GPU the first that has run a trial step.

    Raises: InvalidConfig for a backend asked for by name that cannot serve here, and when no fast one serves;
            EngineDead when the GPU has failed.
    """
    if not spec.pool.num_layers:
        return NoAttention(), AttentionChoice(name="none", why="no layer of the model attends")
    if name == "auto":
        backend, choice = _first_that_serves(spec)
    else:
        entry = BACKENDS.get(name)
        if entry is None:
            raise InvalidConfig(f"attention: {name} is unknown; set attention: auto, or one of {', '.join(BACKENDS)}")
        reason = why_not(name, entry, spec)
        if reason is not None:
            raise InvalidConfig(f"attention: {name} {reason}; set attention: auto")
        backend = entry.make(spec)
        choice = AttentionChoice(name=name, why="as the settings say")
    log.info("attention: %s, %s", choice.name, choice.why)
    return backend, choice


class AttentionApart:
    """AttentionBackend of a model whose window layers have a pool of their own: a backend for each pool, which counts
    its own layers from 0. A step comes with both tables."""

    def __init__(self, full: AttentionBackend, windows: AttentionBackend, window_layers: Sequence[bool]) -> None:
        """``window_layers``: of each layer, whether it sees a window alone."""
        self._backends = full, windows
        counted = [0, 0]
        self._places: list[tuple[AttentionBackend, int]] = []  # by layer: its backend, and its number there
        for apart in window_layers:
            self._places.append((self._backends[apart], counted[apart]))
            counted[apart] += 1

    def begin(self, batch: BatchMeta) -> None:
        assert batch.windows is not None, "a step comes with the table of the window pool"
        self._backends[0].begin(batch)
        self._backends[1].begin(batch.windows)

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        backend, own = self._places[layer]
        return backend.forward(own, q, k, v, sinks)


def _first_that_serves(spec: AttentionSpec) -> tuple[AttentionBackend, AttentionChoice]:
    """Make the first backend of the device that serves ``spec``. Raises: InvalidConfig; EngineDead."""
    device, failed = _device(spec), list[str]()
    for name, entry in BACKENDS.items():
        if device not in entry.devices or device not in entry.automatic:
            continue
        reason = why_not(name, entry, spec)
        if reason is None and device == "cpu":
            why = f"slow: {'; '.join(failed)}" if failed else "the fast one of this device"
            return entry.make(spec), AttentionChoice(name=name, why=why)
        if reason is None:
            try:
                backend = entry.make(spec)
                with one_at_a_time(_compile_lock()):
                    try_out(backend, spec)
            except Exception as error:  # noqa: BLE001 - of a library that may fail in any way; nothing has run before it
                _require_device(spec.pool.device, name, error)
                reason = f"failed in a trial step: {type(error).__name__}: {error}"
                log.warning("attention: %s %s", name, reason)
            else:
                why = f"since {'; '.join(failed)}" if failed else "the fast one of this device"
                return backend, AttentionChoice(name=name, why=why)
        failed.append(f"{name} {reason}")
    through = ", or model.implementation: transformers, which keeps K and V of heads" if spec.latent else ""
    raise InvalidConfig(
        f"no fast attention backend serves this model on {spec.pool.device}: {'; '.join(failed)}. Install what is "
        f"missing (make install-gpu), or set attention: torch_native, which is slow{through}"
    )


def why_not(name: str, backend: Backend, spec: AttentionSpec) -> str | None:
    """Say what keeps ``backend`` from serving ``spec`` here, in words that follow its name; None: nothing."""
    device = _device(spec)
    if device not in backend.devices:
        places = " or ".join(PLACES[each] for each in backend.devices)
        return f"runs on {places}, and the KV pool is on {PLACES[device]}"
    if (lacks := backend.lacks(spec.kinds)) is not None:
        return lacks
    for package in backend.packages:
        if (reason := missing(package)) is not None:
            return reason if package == name else f"needs {package}, which {reason}"
    if spec.latent and not backend.latent:
        return NO_LATENT
    return backend.why_not(spec)


def _compile_lock() -> str:
    """Return the file at which the replicas of a machine wait for each other's kernels: beside those of Triton."""
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
    with contextlib.suppress(OSError):  # a folder that cannot be made has no lock in it either
        folder.mkdir(parents=True, exist_ok=True)
    return str(folder / ".manta-attention.lock")


def _device(spec: AttentionSpec) -> Device:
    return "cpu" if spec.pool.device.type == "cpu" else "cuda"


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


def try_out(backend: AttentionBackend, spec: AttentionSpec) -> None:
    """Run one layer of two mixed steps on the dummy page, a short prompt's and one's that fills the device; wait for
    each.

    Raises: whatever the backend's libraries do.
    """
    for num_new in (2, filling_tokens(spec.num_heads, spec.pool.device)):
        _try_step(backend, spec, num_new)


def _try_step(backend: AttentionBackend, spec: AttentionSpec, num_new: int) -> None:
    page_size, device, total = spec.pool.page_size, spec.pool.device, num_new + 2
    bounds = np.array([0, num_new, num_new + 1, total], np.int32)
    prefix = np.array([0, page_size, page_size], np.int32)
    seq_lens = prefix + np.diff(bounds)
    batch = BatchMeta(
        is_decode=False,
        qo_indptr=torch.from_numpy(bounds).to(device),
        rows=torch.zeros(3, dtype=torch.int32, device=device),
        prefix_lens=torch.from_numpy(prefix).to(device),
        seq_lens=torch.from_numpy(seq_lens).to(device),
        positions=torch.tensor([*range(num_new), page_size, page_size], device=device),
        out_slots=torch.zeros(total, dtype=torch.int64, device=device),
        table=torch.zeros(1, max(page_size + 2, num_new), dtype=torch.int32, device=device),
        max_seq_len=max(page_size + 1, num_new),
        num_tokens=total,
        num_decode=2,
        host_qo_indptr=bounds,
        host_seq_lens=seq_lens,
    )
    sizes = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
    heads = torch.zeros(total, sum(sizes), spec.head_dim, dtype=spec.dtype, device=device)
    backend.begin(batch)
    sunk = heads.new_zeros(spec.num_heads) if spec.kinds and spec.kinds[0].sinks else None
    q, k, v = torch.split(heads, sizes, dim=1)
    backend.forward(0, q, k, v, sunk).cpu()


def missing(package: str) -> str | None:
    """Say why ``package`` cannot be imported, in words that follow its name."""
    try:
        importlib.import_module(package)
    except (ImportError, OSError, RuntimeError) as error:  # a missing dependency or library of its own counts too
        return f"cannot be imported ({error})"
    return None
