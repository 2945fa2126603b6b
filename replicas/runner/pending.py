"""A step whose tokens are still on the device: what `ModelRunner.launch` returns there."""

import numpy as np
import torch
from torch import Tensor

from replicas.attention.fence import Fence
from replicas.scheduler.plan import StepResult


class PendingTokens:
    """PendingStep. Its tokens are on their way to the host; its K and V are in the pool when `result` returns."""

    def __init__(self, tokens: Tensor) -> None:
        """``tokens``: [S] int64, made by work that the current stream has been given."""
        self._host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=tokens.device.type == "cuda")
        self._host.copy_(tokens, non_blocking=True)
        self._fence = Fence(tokens.device)
        self._fence.mark()

    def result(self) -> StepResult:
        self._fence.wait()
        return StepResult(token_ids=self._host.numpy().astype(np.int32))
