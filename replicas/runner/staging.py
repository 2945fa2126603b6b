"""Host arrays to the device in one copy, which the host does not wait for.

Owns:      pinned host buffers, written in turn; one is written again only when its last copy has run.
Invariant: arrays lie behind one another, each at a multiple of ALIGNMENT, in the order in which they are given: equal
           shapes give equal places, so what a CUDA graph has read once is where it will read again.
Thread:    the thread that runs the model.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from replicas.attention.fence import Fence

ALIGNMENT = 64  # bytes
BUFFERS = 8  # a step takes two or three, and two steps are under way at most

Array = npt.NDArray[Any]


class Staging:
    """Uploads to ``device``; on a CPU the arrays themselves are the tensors, unless a place is given."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers = [torch.empty(0, dtype=torch.uint8) for _ in range(BUFFERS)]
        self._fences = [Fence(device) for _ in range(BUFFERS)]
        self._next = 0

    def upload(self, arrays: Sequence[Array], into: Tensor | None = None) -> list[Tensor]:
        """``arrays`` as tensors of the device, in order; valid for work of the current stream.

        Args: into: uint8, where they shall lie; None takes fresh memory.
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
        """[num_bytes] of the next buffer, free to be written."""
        self._fences[self._next].wait()
        if len(self._buffers[self._next]) < num_bytes:
            pinned = self.device.type == "cuda"
            self._buffers[self._next] = torch.empty(2 * num_bytes, dtype=torch.uint8, pin_memory=pinned)
        return self._buffers[self._next][:num_bytes]


_DTYPES = {"<i4": torch.int32, "<i8": torch.int64}


def places(arrays: Sequence[Array]) -> tuple[list[int], int]:
    """Where each array starts, and where the last ends, in bytes."""
    starts, end = [], 0
    for array in arrays:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        starts.append(start)
        end = start + array.nbytes
    return starts, end
