"""What the tests of GPU attention share: where they run, and steps of tests/attention_steps.py on that device."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from replicas.attention.base import AttentionBackend, BatchMeta
from replicas.attention.torch_native import PLAIN, TorchNativeAttention
from replicas.config import AttentionKind
from tests.attention_steps import SmallPool, Step, make_step

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def device_step(
    lengths: list[tuple[int, int]], *, dtype: torch.dtype = torch.float32, device: str = DEVICE, **shape: Any
) -> Step:
    """`make_step` on ``device``, K, V and queries in ``dtype``; rounded on the way, so the oracle sees the same."""
    step = make_step(lengths, **shape)
    pool, meta = step.pool, step.batch
    pool.data = pool.data.to(device, dtype)
    for name in BatchMeta.__dataclass_fields__:
        value = getattr(meta, name)
        if isinstance(value, Tensor):
            setattr(meta, name, value.to(device))
    qkv = torch.cat((step.q, step.k, step.v), dim=1).to(device, dtype)  # heads of a token in one row, as the model's
    q, k, v = qkv.split([step.q.shape[1], step.k.shape[1], step.v.shape[1]], dim=1)
    return replace(step, pool=pool, batch=meta, q=q, k=k, v=v)


def run(backend: AttentionBackend, step: Step, *, kind: AttentionKind = PLAIN, layer: int = 0) -> Tensor:
    """[T, H * D] of one layer."""
    backend.begin(step.batch)
    sinks = torch.linspace(-2.0, 3.0, step.q.shape[1], device=step.q.device) if kind.sinks else None
    return backend.forward(layer, step.q, step.k, step.v, sinks).clone()


def oracle(step: Step, *, kind: AttentionKind = PLAIN) -> Tensor:
    """In fp32, from the pool as the backend under test has left it."""
    data = step.pool.data
    exact = SmallPool.__new__(SmallPool)
    exact.page_size, exact.data = step.pool.page_size, data.float()
    in_full = replace(step, pool=exact, q=step.q.float(), k=step.k.float(), v=step.v.float())
    return run(TorchNativeAttention(exact, (kind,)), in_full, kind=kind)


def error(backend: AttentionBackend, step: Step, *, kind: AttentionKind = PLAIN) -> float:
    """Largest difference from the oracle."""
    got = run(backend, step, kind=kind)
    return float((got.float() - oracle(step, kind=kind)).abs().max())
