"""The tensor-parallel group: the ranks that hold one model together, and their collectives.

Owns:      the process group (gloo on CPU, NCCL on GPU). It is not torch.distributed's default group: one process can be
           in several, as tests are.
Never:     knows what the tensors mean; carries plans (rank 0 sends those over its pipes).
Invariant: every rank calls the same operations in the same order with the same shapes.
Dead ranks: gloo's `wait` raises EngineDead here. NCCL's only orders streams: on a GPU these calls return, and the host
           waits later, for tokens that never arrive. The engine's watchdog (`watchdog_s`) then answers all requests,
           and NCCL's own ends the process after ``timeout_s``.
Thread:    the thread that runs the model.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from replicas.errors import EngineDead


class TpGroup:
    """Rank ``rank`` of ``size``, and the device that holds the rank's data: weights, K and V, inputs. With size 1 every
    operation is the identity and torch.distributed is not touched.

    Args: device: ``cuda`` without a number is this rank's GPU, among those that the process sees.
    """

    def __init__(self, rank: int = 0, size: int = 1, *, device: torch.device | str) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} is not in a group of {size}; wanted 0 to {size - 1}")
        self.rank = rank
        self.size = size
        self.device = torch.device(device)
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", rank % torch.cuda.device_count())
        self._group: Any = None  # ProcessGroupGloo or ProcessGroupNCCL; not every build of torch has both
        self._number: Tensor | None = None  # of `min_int`: made once, as ranks vote where a GPU's memory has run out

    @staticmethod
    def create(
        rank: int, size: int, *, init_method: str, device: torch.device | str, timeout_s: float = 300.0
    ) -> "TpGroup":
        """Join the other ranks; returns when all have joined.

        Args:    init_method: ``tcp://host:port`` (rank 0 listens) or ``file:///path``, the same on all ranks.
                 device: as of the constructor.
                 timeout_s: for the meeting and for every operation after it.
        Raises:  EngineDead if not all ranks come, or, on a CPU, later, if one of them dies.
        """
        group = TpGroup(rank, size, device=device)
        if size > 1:
            with group._speaking_for("meeting the other ranks"):
                group._group = _meet(rank, size, init_method, group.device, timedelta(seconds=timeout_s))
            group._number = torch.zeros(1, dtype=torch.int64, device=group.device)
        return group

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, in place; returns ``tensor``."""
        if self._group is not None:
            with self._speaking_for("all_reduce"):
                self._group.allreduce([tensor]).wait()
        return tensor

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        """Join the ranks' tensors (all of one shape) along ``dim`` in rank order."""
        if self._group is None:
            return tensor
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        with self._speaking_for("all_gather"):
            self._group.allgather([parts], [tensor]).wait()
        return torch.cat(parts, dim)

    def gather(self, tensor: Tensor) -> Tensor | None:
        """Join the ranks' tensors (all of one shape) along the last dimension on rank 0; None on the others."""
        if self._group is None:
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(self.size)] if self.rank == 0 else []
        options = dist.GatherOptions()
        options.rootRank = 0
        with self._speaking_for("gather"):
            self._group.gather([parts] if parts else [], [tensor.contiguous()], options).wait()
        return torch.cat(parts, -1) if parts else None

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Copy rank 0's values into every rank's ``tensor``, in place; returns ``tensor``."""
        if self._group is not None:
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor = 0, 0
            with self._speaking_for("broadcast"):
                self._group.broadcast([tensor], options).wait()
        return tensor

    def min_int(self, value: int) -> int:
        """Return the smallest of the ranks' values (SPEC A04: all ranks size equal pools); takes no memory of a GPU."""
        if self._group is None:
            return value
        assert self._number is not None, "a group is made by `create`"
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MIN)
        with self._speaking_for("min_int"):
            self._group.allreduce([self._number.fill_(value)], options).wait()
        return int(self._number.item())

    @property
    def why_not_captured(self) -> str | None:
        """What keeps a CUDA graph from holding this group's collectives, in words that follow its name; None: NCCL's
        launch kernels on a stream, which a graph records."""
        if self._group is None or isinstance(self._group, getattr(dist, "ProcessGroupNCCL", ())):
            return None
        return "moves bytes through the host, which a graph does not record"

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        self.min_int(0)

    def close(self) -> None:
        """Leave the group. Only operations of size 1 remain possible on this object."""
        self._group = None

    @contextmanager
    def _speaking_for(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise EngineDead(
                f"tensor-parallel rank {self.rank} of {self.size}: {what} failed: {error}. Another rank died, "
                f"hangs, or was never started: look at the other ranks' logs; the whole group must be restarted"
            ) from error


def _meet(rank: int, size: int, init_method: str, device: torch.device, timeout: timedelta) -> Any:
    store, _, _ = next(rendezvous(init_method, rank, size, timeout=timeout))
    store.set_timeout(timeout)
    if device.type == "cpu":
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    torch.cuda.set_device(device)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)
