"""The operations between the matrix products on a GPU, each one launch; PyTorch's operations are two to six.

Owns:      whether Triton can be used here at all: it is tried once, since its first launch needs a C compiler.
Never:     runs on a CPU (elementwise.py does), except interpreted, for tests.
Invariant: launches depend on shapes alone, so a step can be captured in a CUDA graph.
Thread:    any.
"""

import functools
import logging
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)

SILU_BLOCK = 1024
# of every launch, since Triton's default differs between versions: may a product and a sum be rounded once, not twice
FUSED = {"enable_fp_fusion": True}
EXACT = {"enable_fp_fusion": False}  # of those whose bits are the host's and the interpreter's
LARGEST_ROW = 16_384  # floats of a row that a program of `add_rms_norm` holds in registers


@functools.cache
def kernels() -> Any:
    """Return triton_rows.py, or None if a trial launch says that Triton cannot be used on this machine: on a GPU, or
    interpreted on a CPU."""
    try:
        from replicas.kernels import triton_rows

        on_gpu = torch.cuda.is_available()
        x = torch.zeros(1, 32, device="cuda" if on_gpu else "cpu")
        triton_rows.silu_mul[(1, 1)](x, torch.empty_like(x[:, :16]), 16, BLOCK=16, **FUSED)
        if on_gpu:
            torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001 - of a compiler that may fail in any way; PyTorch's operations remain
        log.warning("Triton cannot be used, so PyTorch's slower operations run: %s: %s", type(error).__name__, error)
        return None
    return triton_rows


def serves(x: Tensor, *, in_registers: bool = False) -> bool:
    """Tell whether the functions here take rows like those of ``x``: whole ones, on a GPU. ``in_registers``: also
    `add_rms_norm`, whose programs hold a row each."""
    fits = not in_registers or x.shape[-1] <= LARGEST_ROW
    return x.is_cuda and x.is_contiguous() and fits and kernels() is not None


def add_rms_norm(x: Tensor, term: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Add ``term`` [T, size], if there is one, to ``x`` [T, size] in place; return x normalised, a fresh tensor."""
    out, size = torch.empty_like(x), x.shape[-1]
    if x.numel():
        block = 1 << (size - 1).bit_length()
        kernels().add_rms_norm[(x.numel() // size,)](
            x, x if term is None else term, weight, out, size, eps, ADDS=term is not None, BLOCK=block,
            num_warps=max(1, min(16, block // 512)), **FUSED,
        )  # fmt: skip
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """Compute silu(first half) * second half of [T, 2 size]: a fresh tensor [T, size]."""
    size = gate_up.shape[-1] // 2
    out = torch.empty((len(gate_up), size), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        kernels().silu_mul[(len(gate_up), -(-size // SILU_BLOCK))](
            gate_up, out, size, BLOCK=SILU_BLOCK, num_warps=4, **FUSED
        )
    return out
