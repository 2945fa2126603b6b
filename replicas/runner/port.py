"""One rank's port to the transfer library: its pool as the library sees it, and its agent.

Owns:      nothing; the pool is the runner's, the port its caller's.
Thread:    any; the port belongs to the thread that uses it first.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from kvtransfer.agent import NixlAgent
from kvtransfer.layout import KvLayout
from kvtransfer.memory import KvMemory
from kvtransfer.port import AgentPort
from kvtransfer.transfer_agent import TransferAgent
from kvtransfer.types import PageIds, TransferSettings
from replicas.memory.pool import MHATokenToKVPool

MakeAgent = Callable[[KvMemory], TransferAgent]


@dataclass(frozen=True, slots=True, kw_only=True)
class PortSpec:
    """What every rank's port must agree on; picklable."""

    layout: KvLayout
    settings: TransferSettings


def kv_memory(pool: MHATokenToKVPool, layout: KvLayout) -> KvMemory:
    """The pages of ``pool``, the sink included. Raises: ValueError when ``layout`` is not the pool's."""
    if pool.device.type == "cpu":
        return KvMemory.of_array(layout, pool.buffer.view(torch.uint8).numpy())
    num_pages = pool.num_pages + 1

    def read(pages: PageIds) -> np.ndarray:
        return pool.read_pages(pages.tolist()).contiguous().view(torch.uint8).cpu().numpy().reshape(len(pages), -1)

    return KvMemory.of_device(
        layout,
        base_address=pool.buffer.data_ptr(),
        num_pages=num_pages,
        device=pool.device.index or 0,
        owner=pool.buffer,
        reader=read,
    )


def make_port(
    pool: MHATokenToKVPool, rank: int, spec: PortSpec, *, host: str, make_agent: MakeAgent | None = None
) -> AgentPort:
    """``host``: address of this rank's machine; ``make_agent``: another library than NIXL.

    Raises: TransferError when the library cannot start.
    """
    memory, settings = kv_memory(pool, spec.layout), spec.settings
    if make_agent is None:
        agent: TransferAgent = NixlAgent(memory, role=f"rank{rank}", host=host, transport=settings.transport)
    else:
        agent = make_agent(memory)
    return AgentPort(memory, rank, agent, verify=settings.verify, pages_per_write=settings.pages_per_write)
