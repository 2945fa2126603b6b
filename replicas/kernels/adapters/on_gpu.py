"""What adapters add to products on a GPU, by PyTorch: a run of rows of one adapter after the other.

Invariant: as of low_rank.py, but that a row's last bit is cuBLAS's, which may depend on the number of rows of its run.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from replicas.kernels.adapters.low_rank import StepRows

Pair = tuple[Tensor, Tensor]  # A [rank, in], and B [out, rank] times the adapter's scale


class TorchLowRank:
    """What adapters add to one product."""

    def __init__(self, step: StepRows, pieces: Sequence[int], device: torch.device) -> None:
        """``pieces``: the outputs of each of the product's weights, in their order."""
        self._step, self._device = step, device
        self._starts = list(itertools.accumulate(pieces, initial=0))
        self._held: dict[int, Sequence[Pair | None]] = {}

    def pack(self, pairs: Sequence[Pair | None]) -> Sequence[Pair | None]:
        return [pair and (pair[0].to(self._device), pair[1].to(self._device)) for pair in pairs]

    def put(self, adapter: int, packed: Sequence[Pair | None]) -> None:
        self._held[adapter] = packed

    def drop(self, adapter: int) -> None:
        self._held.pop(adapter, None)

    def __call__(self, x: Tensor, out: Tensor) -> None:
        for first, rows, adapter in self._step.runs:
            part, into = x[first : first + rows].float(), out[first : first + rows]
            for start, pair in zip(self._starts, self._held.get(adapter, ()), strict=False):
                if pair is not None:
                    into[:, start : start + len(pair[1])] += (part @ pair[0].T @ pair[1].T).to(out.dtype)
