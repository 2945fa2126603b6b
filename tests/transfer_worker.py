"""Engines' transfer sides in this process or in a spawned one, driven by the tests of the transfer.

Owns:      `Host`, which has engines of any number of ranks over one kind of agent; `Worker`, a process with a Host.
Invariant: every call of a Worker is answered, or fails, within CALL_LIMIT_S: a process that hangs or crashes fails the
           test and is ended.
"""

import multiprocessing
import os
import signal
import sys
import threading
import time
import types
import uuid
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import psutil

from kvtransfer.layout import KvLayout
from kvtransfer.ports.memory import KvMemory
from kvtransfer.ports.port import AgentPort
from kvtransfer.ports.rank_port import ExpectOrder, PeerRanks, PortEvent, WriteOrder
from kvtransfer.ports.transfer_agent import TransferAgent
from kvtransfer.types import PageIds
from tests.kv_pools import join_heads, layout, random_pools
from tests.local_agents import LocalAgent, LocalFabric
from tests.waiting import until

Kind = Literal["local", "cma", "tcp"]
CALL_LIMIT_S = 30.0
NUM_PAGES = 130


def wire_layout(tp: int = 1) -> KvLayout:
    """Pages large enough that UCX does not copy them: 49,152 bytes at tp 1, 8 KiB a slice at unequal ranks of 2:1."""
    return layout(tp, num_layers=4, page_size=16, head_dim=16)


class Host:
    """Engines over one kind of agent; moves them all in every `step`."""

    def __init__(self, make_agent: Callable[[KvMemory, str], TransferAgent]) -> None:
        self._make_agent = make_agent
        self._agents: dict[str, list[TransferAgent]] = {}  # by incarnation
        self._pools: dict[str, list[npt.NDArray[np.float32]]] = {}
        self._ports: dict[str, list[AgentPort]] = {}
        self._events: list[PortEvent] = []

    def start(self, tp: int, seed: int) -> PeerRanks:
        """A new engine with random pages."""
        incarnation, of = uuid.uuid4().hex, wire_layout(tp)
        pools = random_pools(of, NUM_PAGES, seed)
        memories = [KvMemory.of_array(of, pool) for pool in pools]
        agents = [self._make_agent(memory, f"{rank}-{incarnation}") for rank, memory in enumerate(memories)]
        self._agents[incarnation], self._pools[incarnation] = agents, pools
        self._ports[incarnation] = [
            AgentPort(memory, rank, agent)
            for rank, (memory, agent) in enumerate(zip(memories, agents, strict=True))
        ]
        ranks = tuple(port.info for port in self._ports[incarnation])
        return PeerRanks(incarnation=incarnation, fingerprint=of.fingerprint, tp=tp, ranks=ranks)

    def connect(self, here: str, peer: PeerRanks) -> None:
        for port in self._ports[here]:
            port.connect(peer)

    def disconnect(self, here: str, there: str) -> None:
        for port in self._ports[here]:
            port.disconnect(there)

    def fence(self, here: str, there: str, host: str) -> None:
        for port in self._ports[here]:
            port.fence(there, host)

    def expect(self, here: str, order: ExpectOrder) -> None:
        for port in self._ports[here]:
            port.expect(order)

    def forget(self, here: str, room: int) -> None:
        for port in self._ports[here]:
            port.forget(room, 0)

    def write(self, here: str, order: WriteOrder) -> None:
        """On all ranks."""
        for port in self._ports[here]:
            port.write(order)

    def refill(self, here: str, page: int, seed: int) -> None:
        """Other bytes in one page."""
        for pool in self._pools[here]:
            pool[page] = np.random.default_rng(seed).standard_normal(pool[page].shape, dtype=np.float32)

    def pages(self, here: str) -> npt.NDArray[np.float32]:
        """[num_pages, L, 2, K, page_size, D] of all ranks, a copy."""
        return join_heads(self._pools[here]).copy()

    def take_events(self) -> list[PortEvent]:
        events, self._events = self._events, []
        return events

    def num_open_files(self) -> int:
        return psutil.Process().num_fds()

    def close(self, here: str) -> None:
        for port in self._ports.pop(here):
            port.close()
        del self._agents[here], self._pools[here]

    def call_from_another_thread(self, here: str) -> str:
        """What it raises."""
        self.step()  # now it belongs to this one
        raised: list[str] = []

        def call() -> None:
            try:
                self._agents[here][0].take_notes()
            except AssertionError as error:
                raised.append(str(error))

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        return "".join(raised)

    def step(self) -> None:
        for ports in self._ports.values():
            for port in ports:
                self._events += port.poll()
                port.check()


class Side(Protocol):
    """Where a test finds engines: this process or another."""

    def call(self, method: str, *arguments: Any) -> Any:
        """A method of its Host."""
        ...

    def kill(self) -> None: ...

    def stop(self) -> None: ...

    def resume(self) -> None: ...


class LocalSide:
    """A Host in this process, over a fabric that several share."""

    def __init__(self, fabric: LocalFabric) -> None:
        self._fabric = fabric
        self._names: list[str] = []
        self._stopped = False
        self._host = Host(self._make)

    def call(self, method: str, *arguments: Any) -> Any:
        if not self._stopped:
            self._host.step()
        return getattr(self._host, method)(*arguments)

    def kill(self) -> None:
        self._stopped = True
        for name in self._names:
            self._fabric.kill(name)

    def stop(self) -> None:
        self._stopped = True
        for name in self._names:
            self._fabric.hang(name)

    def resume(self) -> None:
        self._stopped = False
        for name in self._names:
            self._fabric.resume(name)

    def _make(self, memory: KvMemory, name: str) -> TransferAgent:
        self._names.append(name)
        return LocalAgent(memory, self._fabric, name)


class Worker:
    """A process with a Host over NixlAgents. Never a fork of a process that has used NIXL: NIXL does not survive it."""

    def __init__(self, transport: Literal["auto", "tcp"]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, transport), daemon=True)
        self.process.start()
        theirs.close()

    def call(self, method: str, *arguments: Any) -> Any:
        """Raises: AssertionError with what became of a process that does not answer."""
        try:
            self._pipe.send((method, arguments))
            answered = self._pipe.poll(CALL_LIMIT_S)
            ok, value = self._pipe.recv() if answered else (False, f"no answer to {method} in {CALL_LIMIT_S} s")
        except (EOFError, OSError):
            self.process.join(1)
            ok, value = False, f"the process ended in {method}, exit code {self.process.exitcode}"
        if not ok:
            self.kill()
            raise AssertionError(value)
        return value

    @property
    def is_alive(self) -> bool:
        return self.process.is_alive()

    def kill(self) -> None:
        self._signal(signal.SIGKILL)
        self.process.join(CALL_LIMIT_S)

    def stop(self) -> None:
        """Returns when none of its threads runs any more: one on another core may take milliseconds to notice."""
        self._signal(signal.SIGSTOP)
        threads = Path(f"/proc/{self.process.pid}/task")
        until(lambda: all(_state(each) in "TZ" for each in threads.glob("*/stat")))

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        if self.process.pid is not None and self.process.is_alive():
            os.kill(self.process.pid, number)


def _state(stat: Path) -> str:
    """The state of a thread: R, S, T (stopped), Z (gone), ...; see proc(5)."""
    try:
        return stat.read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"


def serve(pipe: Connection, transport: Literal["auto", "tcp"]) -> None:
    """The main loop of a Worker."""
    if "torch" not in sys.modules:  # nixl would import it only to ask for the version of CUDA, for two seconds
        sys.modules["cuda.bindings"] = types.ModuleType("cuda.bindings")
        sys.modules["cuda.bindings"].__version__ = "13.0"  # type: ignore[attr-defined]
    from kvtransfer.ports.agent import NixlAgent

    host = Host(lambda memory, name: NixlAgent(memory, role=name[:2], transport=transport))
    try:
        while True:
            host.step()
            if pipe.poll(0.0005):
                method, arguments = pipe.recv()
                pipe.send(answer(host, method, arguments))
    except (EOFError, OSError):
        return  # the test has ended


def answer(host: Host, method: str, arguments: tuple[Any, ...]) -> tuple[bool, Any]:
    """The call's value, or its error as text: an error of NIXL may not travel."""
    try:
        return True, getattr(host, method)(*arguments)
    except Exception as error:  # noqa: BLE001  the test shows it
        return False, f"{method}: {type(error).__name__}: {error}"


def events_until(sides: list[Side], enough: Callable[[list[PortEvent]], bool], limit_s: float) -> list[PortEvent]:
    """All events of ``sides`` until there are enough, or the time is up."""
    events: list[PortEvent] = []
    end = time.monotonic() + limit_s
    while not enough(events) and time.monotonic() < end:
        for side in sides:
            events += side.call("take_events")
    return events


def spread(num_pages: int, seed: int) -> PageIds:
    """[n] pages in any order, of which no other test page is part; 0 is the sink."""
    order = np.random.default_rng(seed).permutation(NUM_PAGES - 1)[:num_pages] + 1
    return order.astype(np.int32)
