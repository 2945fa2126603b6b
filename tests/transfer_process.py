"""A process with a transfer service over NIXL and a small pool, driven by a test through a pipe.

Never a fork of a process that has used NIXL: NIXL does not survive it. The parent keeps what it knows
of the pages as seeds.
"""

import os
import signal
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.engine_process import prepared
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
from tests.kv_pools import layout, random_pools

NUM_PAGES = 65
EVENT_WAIT_S = 30.0
LAST = (Received, ReceiveDrained, SendDone, SendDrained)


def settings(**changes: Any) -> TransferSettings:
    """Short waits: a silent peer shows after 0.9 s."""
    values: dict[str, Any] = {
        "host": "127.0.0.1",
        "token": b"secret",
        "heartbeat_s": 0.3,
        "call_timeout_s": 1.0,
        "pages_per_write": 4,
    }
    return TransferSettings(**(values | changes))


class EngineProcess:
    """The parent's end."""

    def __init__(self, *, seed: int, tp: int = 1, **changes: Any) -> None:
        context = prepared()
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_main, args=(theirs, seed, tp, settings(**changes)), daemon=True)
        self.process.start()
        theirs.close()
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

    def wait(self, kind: type, room: int, *, within_s: float = EVENT_WAIT_S) -> Any:
        """The event of that kind; the time that it took is within the limit."""
        deadline_s = time.monotonic() + within_s
        while True:
            for event in self.events:
                if isinstance(event, kind) and event.room == room:
                    return event
            left_s = deadline_s - time.monotonic()
            assert left_s > 0, f"no {kind.__name__} of room {room} within {within_s} s; there is {self.events}"
            if self._pipe.poll(left_s):
                self._take(self._pipe.recv())

    def wait_end(self, room: int, *, within_s: float = EVENT_WAIT_S) -> None:
        """The last event of a room, whatever it is."""
        deadline_s = time.monotonic() + within_s
        while not any(isinstance(event, LAST) and event.room == room for event in self.events):
            left_s = deadline_s - time.monotonic()
            assert left_s > 0, f"room {room} has not ended within {within_s} s; there is {self.events}"
            if self._pipe.poll(left_s):
                self._take(self._pipe.recv())

    def has(self, kind: type, room: int) -> bool:
        while self._pipe.poll(0):
            self._take(self._pipe.recv())
        return any(isinstance(event, kind) and event.room == room for event in self.events)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def stop(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGCONT)

    def close(self) -> None:
        """Ends well when it can; never leaves it behind."""
        if self.process.is_alive():
            self.go_on()
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
