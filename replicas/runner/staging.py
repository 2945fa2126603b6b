"""Copies between host and device that the host does not wait for: a step's arrays up, its tokens down.

Owns:      pinned host buffers, written in turn; one is written again only when its last copy has run.
Invariant: arrays lie behind one another in the order given, each at a multiple of ALIGNMENT. Equal shapes give equal
           places, so a CUDA graph finds its inputs where it read them when it was captured.
Thread:    the thread that runs the model.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from replicas.attention.fence import Fence
from replicas.scheduler.plan import StepResult

ALIGNMENT = 64  # bytes
BUFFERS = 8  # a step takes two or three, and two steps are under way at most

Array = npt.NDArray[Any]


class Staging:
    """Uploads to ``device``; on a CPU the arrays themselves are the tensors, unless ``into`` is given."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers = [torch.empty(0, dtype=torch.uint8) for _ in range(BUFFERS)]
        self._fences = [Fence(device) for _ in range(BUFFERS)]
        self._next = 0

    def upload(self, arrays: Sequence[Array], into: Tensor | None = None) -> list[Tensor]:
        """Return ``arrays`` as tensors of the device, in order; valid for work of the current stream.

        Args: into: uint8 memory for them; None takes fresh memory.
        """
        if self.device.type == "cpu" and into is None:
            return [torch.from_numpy(array) for array in arrays]
        starts, num_bytes = places(arrays)
        host = self._buffer(num_bytes)
        for array, start in zip(arrays, starts, strict=True):
            raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            host[start : start + array.nbytes] = torch.from_numpy(raw)
        on_device = torch.empty(num_bytes, dtype=torch.uint8, device=self.device) if into is None else into[:num_bytes]
        on_device.copy_(host, non_blocking=True)
        self._fences[self._next].mark()
        self._next = (self._next + 1) % BUFFERS
        return [
            on_device[start : start + array.nbytes].view(_DTYPES[array.dtype.str]).view(array.shape)
            for array, start in zip(arrays, starts, strict=True)
        ]

    def _buffer(self, num_bytes: int) -> Tensor:
        """Return [num_bytes] of the next buffer, once its last copy has run."""
        self._fences[self._next].wait()
        if len(self._buffers[self._next]) < num_bytes:
            pinned = self.device.type == "cuda"
            self._buffers[self._next] = torch.empty(2 * num_bytes, dtype=torch.uint8, pin_memory=pinned)
        return self._buffers[self._next][:num_bytes]


_DTYPES = {"<i4": torch.int32, "<i8": torch.int64}


def places(arrays: Sequence[Array]) -> tuple[list[int], int]:
    """Compute where each array starts and where the last ends, in bytes."""
    starts, end = [], 0
    for array in arrays:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        starts.append(start)
        end = start + array.nbytes
    return starts, end


class PendingTokens:
    """A PendingStep whose tokens are being copied to the host; its K and V are in the pool when `result` returns."""

    def __init__(self, tokens: Tensor) -> None:
        """Start the copy of ``tokens`` [S] int64, which work queued on the current stream makes."""
        self._host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=tokens.device.type == "cuda")
        self._host.copy_(tokens, non_blocking=True)
        self._fence = Fence(tokens.device)
        self._fence.mark()

    def result(self) -> StepResult:
        self._fence.wait()
        return StepResult(token_ids=self._host.numpy().astype(np.int32))
