"""One rank's port to the transfer library: its pool as the library sees it, and its agent.

Owns:      nothing; the pool is the runner's, the port its caller's.
Thread:    any; the port belongs to the thread that uses it first.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from kvtransfer.layout import KvLayout
from kvtransfer.ports.agent import NixlAgent
from kvtransfer.ports.memory import KvMemory, PageReader
from kvtransfer.ports.port import AgentPort
from kvtransfer.ports.transfer_agent import TransferAgent
from kvtransfer.types import PageIds, TransferSettings
from replicas.memory.pool import MHATokenToKVPool

log = logging.getLogger(__name__)

MakeAgent = Callable[[KvMemory], TransferAgent]
ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@dataclass(frozen=True, slots=True, kw_only=True)
class PortSpec:
    """What every rank's port must agree on; picklable."""

    layout: KvLayout
    settings: TransferSettings


def kv_memory(pool: MHATokenToKVPool, layout: KvLayout) -> KvMemory:
    """Describe the pages of ``pool``, the sink included. Raises: ValueError when ``layout`` is not the pool's."""
    if pool.device.type == "cpu":
        return KvMemory.of_array(layout, pool.buffer.view(torch.uint8).numpy())
    [address], [num_bytes], [page_bytes] = pool.get_contiguous_buf_infos()
    return KvMemory.of_device(
        layout,
        base_address=address,
        num_pages=num_bytes // page_bytes,
        device=pool.buffer.device.index,
        owner=pool.buffer,
        reader=_page_reader(pool),
    )


def _page_reader(pool: MHATokenToKVPool) -> PageReader:
    """Return a reader that copies GPU pages to pinned memory, on a stream of its own: neither it nor a step of the
    engine waits for the other. The pages are complete: one is sent after its step's result, and arrives before its
    note."""
    stream = torch.cuda.Stream(pool.buffer.device)  # type: ignore[no-untyped-call]

    def read(pages: PageIds) -> np.ndarray:
        with torch.cuda.stream(stream):  # and on its device, whichever this thread's is
            found = pool.read_pages(pages.tolist()).view(torch.uint8)
            on_host = torch.empty(found.shape, dtype=torch.uint8, pin_memory=True)
            on_host.copy_(found, non_blocking=True)
            stream.synchronize()
        return on_host.numpy().reshape(len(pages), -1)

    return read


def make_port(
    pool: MHATokenToKVPool, rank: int, spec: PortSpec, *, host: str, make_agent: MakeAgent | None = None
) -> AgentPort:
    """Make the port of one rank. From here on the pool's GPU is this thread's current device: UCX needs its context at
    the first call.

    Args:   host: address of this rank's machine; make_agent: makes an agent of another library than NIXL.
    Raises: TransferError when the library cannot start.
    """
    if pool.buffer.device.type == "cuda":
        torch.cuda.set_device(pool.buffer.device)
        _warn_of_expandable_segments()
    memory, settings = kv_memory(pool, spec.layout), spec.settings
    if make_agent is None:
        agent: TransferAgent = NixlAgent(memory, role=f"rank{rank}", host=host, transport=settings.transport)
    else:
        agent = make_agent(memory)
    return AgentPort(memory, rank, agent, verify=settings.verify)


def _warn_of_expandable_segments() -> None:
    for name in ALLOCATOR_SETTINGS:
        if "expandable_segments:true" in os.environ.get(name, "").replace(" ", "").lower():
            log.warning(
                "%s has expandable_segments:True: CUDA IPC and some RDMA devices cannot reach such memory, so that "
                "KV transfers of K/V may fail or go over tcp; unset it where a replica takes part in KV transfers",
                name,
            )
