"""The receiving process of `benchmarks/transfer.py`, and what both processes must agree on."""

import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np

from kvtransfer.layout import KvLayout
from kvtransfer.ports.agent import NixlAgent
from kvtransfer.ports.memory import KvMemory
from kvtransfer.ports.port import AgentPort
from kvtransfer.ports.rank_port import Arrived, ExpectOrder, PeerRanks
from kvtransfer.types import PageIds, Verify

NUM_PAGES = 385  # 142 MB in fp16: four times the last cache of a small server's core complex
PAGES_PER_WRITE = 16
PAUSE_S = 1e-4  # between the receiver's turns, as a transfer service with open rooms does
PLAIN, VERIFIED = "written without digests", "written and verified"
MODES = {PLAIN: Verify.OFF, VERIFIED: Verify.ALL}


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What to expect of the sender in one round."""

    mode: str
    room: int
    pages: PageIds


def smollm2(dtype: str, item_bytes: int) -> KvLayout:
    return KvLayout(
        model="SmolLM2-135M",
        architecture="MHA",
        num_layers=30,
        num_kv_heads=3,
        head_dim=64,
        dtype=dtype,
        item_bytes=item_bytes,
        page_size=16,
        tp=1,
    )


def make_agents(memory: KvMemory, role: str) -> dict[str, NixlAgent]:
    """One for each mode, over one pool."""
    return {mode: NixlAgent(memory, role=role) for mode in MODES}


def make_ports(memory: KvMemory, agents: dict[str, NixlAgent]) -> dict[str, AgentPort]:
    return {
        mode: AgentPort(memory, 0, agent, verify=MODES[mode], pages_per_write=PAGES_PER_WRITE)
        for mode, agent in agents.items()
    }


def ranks_of(layout: KvLayout, side: str, ports: dict[str, AgentPort]) -> dict[str, PeerRanks]:
    return {
        mode: PeerRanks(incarnation=f"{side}, {mode}", fingerprint=layout.fingerprint, tp=1, ranks=(port.info,))
        for mode, port in ports.items()
    }


def receive(pipe: Connection, layout: KvLayout) -> None:
    """The other process: says when the last page of each round was verified, by the clock that both share."""
    pool = np.ones((NUM_PAGES, layout.page_bytes), dtype=np.uint8)
    memory = KvMemory.of_array(layout, pool)
    ports = make_ports(memory, make_agents(memory, "decode"))
    pipe.send(ranks_of(layout, "decode", ports))
    peers: dict[str, PeerRanks] = pipe.recv()
    for mode, port in ports.items():
        port.connect(peers[mode])
    while True:
        while not pipe.poll(PAUSE_S):  # a write ends at the sender only with this side's turns
            for port in ports.values():
                port.poll()
        this: Round = pipe.recv()
        port = ports[this.mode]
        incarnation = peers[this.mode].incarnation
        port.expect(ExpectOrder(room=this.room, generation=0, incarnation=incarnation, pages=this.pages))
        pipe.send("ready")
        num_left = len(this.pages)
        while num_left:
            arrived = [event for event in port.poll() if isinstance(event, Arrived)]
            assert not any(event.bad_pages for event in arrived), "a page arrived changed"
            num_left -= sum(event.num_pages for event in arrived)
            if not arrived:
                time.sleep(PAUSE_S)
        pipe.send(time.monotonic())
        port.forget(this.room, 0)
