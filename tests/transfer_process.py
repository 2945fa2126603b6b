"""A process with a transfer service over NIXL and a small pool, driven by a test through a pipe.

The parent knows the pages of each process by the seed that they are made from.
"""

import os
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtransfer.types import (
    PeerAddress,
    Received,
    ReceiveDrained,
    SendDone,
    SendDrained,
    TransferEvent,
    TransferSettings,
    TransferStats,
)
from tests.engine_process import prepared
from tests.kv_pools import layout, random_pools
from tests.transfer_worker import Spawned

NUM_PAGES = 65
EVENT_WAIT_S = 30.0
LAST = (Received, ReceiveDrained, SendDone, SendDrained)


def settings(**changes: Any) -> TransferSettings:
    """A silent peer shows after 3 s: short, but longer than a busy machine keeps a process of this from running."""
    values: dict[str, Any] = {
        "host": "127.0.0.1",
        "token": b"secret",
        "heartbeat_s": 1.0,
        "call_timeout_s": 5.0,
        "pages_per_write": 4,
    }
    return TransferSettings(**(values | changes))


class EngineProcess(Spawned):
    """The parent's end."""

    def __init__(self, *, seed: int, tp: int = 1, **changes: Any) -> None:
        super().__init__(prepared(), _main, seed, tp, settings(**changes))
        self.events: list[TransferEvent] = []
        self.address: PeerAddress = self._answer()

    def call(self, method: str, *args: Any) -> None:
        """A method of the transfer service."""
        self._pipe.send((method, *args))

    def ask(self, what: str, *args: Any) -> Any:
        self._pipe.send((what, *args))
        return self._answer()

    def pages(self, pages: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        """[n, ...] what these pages of all ranks hold, heads joined."""
        return np.concatenate(self.ask("pages", pages), axis=3)

    def stats(self) -> TransferStats:
        stats: TransferStats = self.ask("stats")
        return stats

    def num_descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def wait(self, kind: type | tuple[type, ...], room: int, *, within_s: float = EVENT_WAIT_S) -> Any:
        """The event of that kind, or of one of these; the time that it took is within the limit."""
        deadline_s = time.monotonic() + within_s
        while True:
            for event in self.events:
                if isinstance(event, kind) and event.room == room:
                    return event
            left_s = deadline_s - time.monotonic()
            assert left_s > 0, f"no {kind} of room {room} within {within_s} s; there is {self.events}"
            if self._pipe.poll(left_s):
                self._take(self._pipe.recv())

    def has(self, kind: type, room: int) -> bool:
        while self._pipe.poll(0):
            self._take(self._pipe.recv())
        return any(isinstance(event, kind) and event.room == room for event in self.events)

    def close(self) -> None:
        """Ends well when it can; never leaves it behind."""
        if self.process.is_alive():
            self.resume()
            self._pipe.send(("close",))
            self.process.join(10)
        self.kill()

    def _take(self, item: tuple[str, Any]) -> Any:
        kind, value = item
        if kind == "events":
            self.events += value
        return value

    def _answer(self) -> Any:
        while True:
            kind, value = self._pipe.recv()
            if kind == "answer":
                return value
            self._take((kind, value))


def _main(pipe: Connection, seed: int, tp: int, of: TransferSettings) -> None:
    from kvtransfer.ports.agent import NixlAgent
    from kvtransfer.ports.memory import KvMemory
    from kvtransfer.ports.port import AgentPort
    from kvtransfer.rooms.kv_transfer import KvTransfer

    pools = random_pools(layout(tp), NUM_PAGES, seed)

    def make_ports() -> list[AgentPort]:
        ports = []
        for rank, pool in enumerate(pools):
            memory = KvMemory.of_array(layout(tp), pool)
            agent = NixlAgent(memory, role=f"test{rank}", host=of.host, transport=of.transport)
            ports.append(AgentPort(memory, rank, agent, verify=of.verify))
        return ports

    service = KvTransfer(of, layout(tp), make_ports, on_event=lambda: None)
    service.start()
    pipe.send(("answer", service.address))
    while True:
        if pipe.poll(0.002):
            method, *args = pipe.recv()
            if method == "close":
                service.close()
                return
            if method == "pages":
                pipe.send(("answer", [pool[args[0]] for pool in pools]))
            elif method == "stats":
                pipe.send(("answer", service.stats()))
            else:
                getattr(service, method)(*args)
        if events := service.drain_events():
            pipe.send(("events", events))
