"""The hardware of this machine: device, cores, memory, measured before a model is loaded; a GPU's figures at any time.

Never:     makes a context on a GPU that this process does not use.
Thread:    any.
"""

import logging
import os
import time
from dataclasses import dataclass

import torch

from replicas.config import Hardware
from replicas.memory.ram import available_ram

log = logging.getLogger(__name__)

FREED_S, STILL_S = 30.0, 5.0  # how long a dead process's memory may take to come back, and how long none of it may
LOOK_S = 0.2  # between two looks at it


def measure_hardware() -> Hardware:
    """Measure the first CUDA device if there is one, else the CPU.

    Available memory on CPU is what can be taken without swapping, within the container's limit.
    """
    if torch.cuda.is_available():
        free, _ = torch.cuda.mem_get_info()
        return Hardware(device="cuda", num_cpus=_num_cpus(), available_memory_bytes=free)
    return Hardware(device="cpu", num_cpus=_num_cpus(), available_memory_bytes=available_ram())


def free_device_bytes(device: torch.device) -> int:
    """Count the free bytes of a CUDA device; memory that PyTorch caches counts as free."""
    return device_bytes(device)[0]


def device_bytes(device: torch.device) -> tuple[int, int]:
    """Count the free bytes of a CUDA device, as `free_device_bytes`, and all of its bytes."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return int(free), int(total)


def bytes_once_free(device: torch.device, wanted: int) -> tuple[int, int]:
    """Count as `device_bytes`, as soon as ``wanted`` bytes are free; those that are when no more have come for STILL_S,
    or after FREED_S.

    A GPU gives the memory of a process back some seconds after the process was killed: a replica that takes the place
    of a dead one would find its share taken. One beside a process that lives waits for nothing, so not for long.
    """
    found, began_s = device_bytes(device), time.monotonic()
    most, grew_s = found[0], began_s
    if found[0] < wanted <= found[1]:
        log.info("%s: waiting for the memory of another process, %.0f s at most", device, FREED_S)
    while found[0] < wanted <= found[1] and (now_s := time.monotonic()) < min(began_s + FREED_S, grew_s + STILL_S):
        time.sleep(LOOK_S)
        found = device_bytes(device)
        if found[0] > most:
            most, grew_s = found[0], now_s
    return found


def num_gpus() -> int:
    """Count the GPUs that PyTorch can use here, without making a context on them."""
    return torch.cuda.device_count()


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFigures:
    """The memory of one GPU, and how busy it is."""

    device: str  # cuda:0
    total_bytes: int
    used_bytes: int  # by all processes
    own_bytes: int  # reserved by PyTorch in this process
    num_alloc_retries: int  # of PyTorch's allocator, since the start: it gave what it had cached back, and asked again
    utilization: float | None  # share of the last moment in which a kernel ran; None where NVML does not tell it


def gpu_figures() -> GpuFigures | None:
    """Read the GPU of this process's rank; None where the process computes on none."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    free, total = torch.cuda.mem_get_info(0)
    try:
        busy: float | None = torch.cuda.utilization(0) / 100
    except Exception:  # noqa: BLE001  # no nvidia-ml-py, no driver, or NVML does not tell it (a slice of a GPU: MIG)
        busy = None
    return GpuFigures(
        device="cuda:0",
        total_bytes=total,
        used_bytes=total - free,
        own_bytes=torch.cuda.memory_reserved(0),
        num_alloc_retries=torch.cuda.memory_stats(0).get("num_alloc_retries", 0),
        utilization=busy,
    )


def _num_cpus() -> int:
    return len(os.sched_getaffinity(0))
