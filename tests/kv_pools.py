"""Small KV pools with ports over them, for tests of the transfer: bytes that differ from page to page and rank to rank.

`local_engine` builds the ranks of one engine over a `LocalFabric`; `peer_of` is what a hello would say of them.
"""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtransfer.layout import KvLayout
from kvtransfer.ports.memory import KvMemory
from kvtransfer.ports.port import AgentPort
from kvtransfer.ports.rank_port import Arrived, PeerRanks, PortEvent, WriteOrder
from kvtransfer.types import KVTransferMeta, PageIds, Verify
from tests.local_agents import LocalAgent, LocalFabric

HEADS = 6  # splits by 1, 2, 3


def layout(tp: int = 1, *, num_layers: int = 2, page_size: int = 4, head_dim: int = 8) -> KvLayout:
    """A page of one rank: [num_layers, 2, 6 / tp, 4, 8] float32, 3,072 bytes at tp 1."""
    return KvLayout(
        model="tiny",
        architecture="MHA",
        num_layers=num_layers,
        num_kv_heads=HEADS,
        head_dim=head_dim,
        dtype="float32",
        item_bytes=4,
        page_size=page_size,
        tp=tp,
    )


def random_pools(of: KvLayout, num_pages: int, seed: int) -> list[npt.NDArray[np.float32]]:
    """[tp] the ranks' pools, cut from one pool of all heads: [num_pages, L, 2, K / tp, page_size, D]."""
    shape = (num_pages, of.num_layers, 2, of.num_kv_heads, of.page_size, of.head_dim)
    whole = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    return [np.ascontiguousarray(part) for part in np.split(whole, of.tp, axis=3)]


def join_heads(pools: Sequence[npt.NDArray[np.float32]]) -> npt.NDArray[np.float32]:
    """The inverse of the split: [num_pages, L, 2, K, page_size, D]."""
    return np.concatenate(pools, axis=3)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalEngine:
    """The ranks of one engine in this process."""

    incarnation: str
    layout: KvLayout
    pools: list[npt.NDArray[np.float32]]  # [tp] of [num_pages, L, 2, K / tp, page_size, D]
    ports: list[AgentPort]  # [tp]

    @property
    def agents(self) -> list[str]:
        return [port.info.agent for port in self.ports]


def local_engine(
    fabric: LocalFabric,
    *,
    tp: int = 1,
    num_pages: int = 9,
    seed: int = 0,
    verify: Verify = Verify.ALL,
) -> LocalEngine:
    """An engine with random pages."""
    incarnation = uuid.uuid4().hex
    of = layout(tp)
    pools = random_pools(of, num_pages, seed)
    ports = []
    for rank, pool in enumerate(pools):
        memory = KvMemory.of_array(of, pool)
        agent = LocalAgent(memory, fabric, f"{rank}-{incarnation}")
        ports.append(AgentPort(memory, rank, agent, verify=verify))
    return LocalEngine(incarnation=incarnation, layout=of, pools=pools, ports=ports)


def peer_of(engine: LocalEngine) -> PeerRanks:
    return PeerRanks(
        incarnation=engine.incarnation,
        fingerprint=engine.layout.fingerprint,
        tp=engine.layout.tp,
        ranks=tuple(port.info for port in engine.ports),
    )


def connect(one: LocalEngine, other: LocalEngine) -> None:
    """Both ways, as after a hello."""
    for port in one.ports:
        port.connect(peer_of(other))
    for port in other.ports:
        port.connect(peer_of(one))


def meta_of(of: KvLayout, num_tokens: int, *, first_token: int, cached_len: int = 0, **more: Any) -> KVTransferMeta:
    """The meta of a room of rid "r" whose prompt has ``num_tokens``, of which the receiver has ``cached_len``."""
    return KVTransferMeta(
        rid="r",
        fingerprint=of.fingerprint,
        prompt_len=num_tokens,
        token_range=(cached_len, num_tokens),
        cached_prefix_len=cached_len,
        first_token=first_token,
        **more,
    )


def write_order(
    to: str,
    src: PageIds,
    dst: PageIds,
    *,
    order_id: int = 1,
    room: int = 1,
    generation: int = 0,
    page_offset: int = 0,
    last: bool = True,
    meta: bytes = b"",
) -> WriteOrder:
    """A whole room, unless it says otherwise; ``to``: an incarnation."""
    return WriteOrder(
        order_id=order_id,
        incarnation=to,
        room=room,
        generation=generation,
        page_offset=page_offset,
        src_pages=src,
        dst_pages=dst,
        last=last,
        meta=meta,
    )


def page_ids(*pages: int) -> PageIds:
    return np.array(pages, dtype=np.int32)


def poll_all(ports: Sequence[AgentPort], *, rounds: int = 20) -> list[PortEvent]:
    """Return the events of ``rounds`` turns; invariants hold after each."""
    events: list[PortEvent] = []
    for _ in range(rounds):
        for port in ports:
            events += port.poll()
            port.check()
    return events


def arrivals(events: Sequence[PortEvent]) -> list[Arrived]:
    return [event for event in events if isinstance(event, Arrived)]
