"""The transfer protocol by memcpy between pools of one process, with faults on request.

Owns:      the registry of the agents of one process (`LocalFabric`) and what is on its way between them.
Never:     leaves the process.
Invariant: a note is delivered after the bytes it speaks of; a write that was posted lands when its destination wakes
           up, also when its sender has given up on it, just as over a network.
Thread:    an agent belongs to one thread; agents of several threads may share a fabric.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvtransfer.errors import PeerLost
from kvtransfer.layout import PageSlice
from kvtransfer.ports.memory import KvMemory
from kvtransfer.ports.transfer_agent import RemotePool, Transfer
from kvtransfer.types import PageIds, WriteTimes


@dataclass(slots=True, kw_only=True)
class Faults:
    """What goes wrong from now on."""

    hold_checks: int = 0  # number of checks after its post at which a write lands
    lose_notes: int = 0  # number of the next notes that never arrive
    flip_bytes: int = 0  # number of the next writes in which one byte arrives changed


class LocalFabric:
    """What the agents of one process know of each other."""

    def __init__(self) -> None:
        self.faults = Faults()
        self._lock = threading.RLock()
        self._agents: dict[str, LocalAgent] = {}
        self._hung: set[str] = set()
        self._fences: Counter[tuple[str, str]] = Counter()  # by source and destination
        self._waiting: list[_LocalWrite] = []  # posted to an agent that hangs

    def attach(self, agent: "LocalAgent") -> None:
        with self._lock:
            if agent.name in self._agents:
                raise ValueError(f"an agent {agent.name} is here already: names are new with every start")
            self._agents[agent.name] = agent

    def kill(self, name: str) -> None:
        """The process of ``name`` dies: what it has posted and not landed is gone, and so is what was on its way."""
        with self._lock:
            self._agents.pop(name, None)
            self._hung.discard(name)
            self._waiting = [write for write in self._waiting if name not in (write.source.name, write.agent)]

    def hang(self, name: str) -> None:
        """The process of ``name`` stops: writes to it stay posted."""
        with self._lock:
            self._hung.add(name)

    def resume(self, name: str) -> None:
        """It goes on: all that was posted lands, whatever its senders think."""
        with self._lock:
            self._hung.discard(name)
            landing = [write for write in self._waiting if write.agent == name]
            self._waiting = [write for write in self._waiting if write.agent != name]
            for write in landing:
                if not write.is_fenced:
                    self._land(write)

    def fence(self, source: str, agent: str) -> None:
        """Nothing that ``source`` writes to ``agent`` lands any more, until it has added it anew."""
        with self._lock:
            self._fences[source, agent] += 1

    def num_fences(self, source: str, agent: str) -> int:
        return self._fences[source, agent]

    def require(self, name: str) -> "LocalAgent":
        """Raises: PeerLost."""
        with self._lock:
            agent = self._agents.get(name)
            if agent is None:
                raise PeerLost(f"no agent {name} is alive in this process")
            return agent

    def advance(self, write: "_LocalWrite") -> bool:
        """Land the write if nothing holds it. True when it has landed."""
        with self._lock:
            if write.landed:
                return True
            self.require(write.agent)
            self.require(write.source.name)
            if write.is_fenced:
                raise PeerLost(f"{write.agent} has cut its connections to {write.source.name}")
            if write.agent in self._hung:
                if write not in self._waiting:
                    self._waiting.append(write)
                return False
            if write.checks_left > 0:
                write.checks_left -= 1
                return False
            self._land(write)
            return True

    def deliver(self, source: str, agent: str, note: bytes) -> None:
        with self._lock:
            if self.faults.lose_notes > 0:
                self.faults.lose_notes -= 1
                return
            self.require(agent).inbox.append((source, note))

    def _land(self, write: "_LocalWrite") -> None:
        target = self.require(write.agent).memory
        _copy(write.source.memory, target, write)
        if self.faults.flip_bytes > 0:
            self.faults.flip_bytes -= 1
            assert target.view is not None
            first = write.slices[0]
            target.view[write.dst_pages[0], first.dst_offset + first.num_bytes // 2] ^= 0x40
        write.landed = True
        self.deliver(write.source.name, write.agent, write.note)


class LocalAgent:
    """A `TransferAgent` over host memory of this process."""

    def __init__(self, memory: KvMemory, fabric: LocalFabric, name: str) -> None:
        if memory.view is None:
            raise ValueError("LocalAgent copies host memory; pages on a device need NixlAgent")
        self.name = name
        self.metadata = b"local:" + name.encode()
        self.memory = memory
        self.inbox: deque[tuple[str, bytes]] = deque()
        self._fabric = fabric
        self._peers: dict[str, RemotePool] = {}
        self._fences: dict[str, int] = {}  # around this agent, when the peer was added
        fabric.attach(self)

    def add_peer(self, pool: RemotePool) -> None:
        self._fabric.require(pool.agent)
        self._peers[pool.agent] = pool
        self._fences[pool.agent] = self._fabric.num_fences(self.name, pool.agent)

    def remove_peer(self, agent: str) -> None:
        self._peers.pop(agent, None)

    def fence(self, agent: str, host: str) -> None:
        self._fabric.fence(agent, self.name)

    def write(self, agent: str, src_pages: PageIds, dst_pages: PageIds, note: bytes) -> Transfer:
        transfer = Transfer(agent, _LocalWrite(self, self._fabric, agent, src_pages, dst_pages, note))
        transfer.post()
        return transfer

    def send_note(self, agent: str, note: bytes) -> None:
        self.require_peer(agent)
        self._fabric.deliver(self.name, agent, note)

    def take_notes(self) -> Sequence[tuple[str, bytes]]:
        notes = []
        while self.inbox:
            notes.append(self.inbox.popleft())
        return notes

    def close(self) -> None:
        self._peers.clear()
        self._fabric.kill(self.name)

    def is_cut_off(self, agent: str) -> bool:
        return self._fabric.num_fences(self.name, agent) > self._fences[agent]

    def require_peer(self, agent: str) -> RemotePool:
        """Raises: PeerLost."""
        pool = self._peers.get(agent)
        if pool is None:
            raise PeerLost(f"{agent} was not added to {self.name}, or was removed")
        return pool


class _LocalWrite:
    """One write between two pools."""

    def __init__(
        self, source: LocalAgent, fabric: LocalFabric, agent: str, src_pages: PageIds, dst_pages: PageIds, note: bytes
    ) -> None:
        self.source = source
        self.agent = agent
        self.slices: tuple[PageSlice, ...] = ()
        self.src_pages = src_pages
        self.dst_pages = dst_pages
        self.note = note
        self.landed = False
        self.checks_left = fabric.faults.hold_checks
        self._fabric = fabric
        self._began_s = self._post_s = 0.0

    def post(self) -> bool:
        self.slices = self.source.require_peer(self.agent).slices
        self._began_s = time.monotonic()
        landed = self._fabric.advance(self)
        self._post_s = time.monotonic() - self._began_s
        return landed

    def check(self) -> bool:
        if not self.landed:
            self.source.require_peer(self.agent)
        return self._fabric.advance(self)

    @property
    def is_fenced(self) -> bool:
        return self.source.is_cut_off(self.agent)

    def times(self) -> WriteTimes:
        """As measured here, real time; asked for at once when it has landed."""
        return WriteTimes(post_s=self._post_s, wire_s=max(time.monotonic() - self._began_s, self._post_s))

    def release(self) -> None:
        """Nothing to give back; what waits for a hung agent still lands."""


def _copy(source: KvMemory, target: KvMemory, write: _LocalWrite) -> None:
    """Only the bytes of the slices."""
    assert source.view is not None
    assert target.view is not None
    for src, dst, length in group_runs(write.src_pages, write.dst_pages):
        for part in write.slices:
            src_bytes = source.view[src : src + length, part.src_offset : part.src_offset + part.num_bytes]
            np.copyto(target.view[dst : dst + length, part.dst_offset : part.dst_offset + part.num_bytes], src_bytes)


def group_runs(src: PageIds, dst: PageIds) -> list[tuple[int, int, int]]:
    """(source page, destination page, length) of maximal runs in which both sides go up by one (SPEC H09).

    ``src``, ``dst``: [n]. Order is kept; the runs cover every pair once.
    """
    if len(src) != len(dst):
        raise ValueError(f"{len(src)} source pages and {len(dst)} destination pages: one for each is wanted")
    if not len(src):
        return []
    breaks = np.flatnonzero((np.diff(src) != 1) | (np.diff(dst) != 1)) + 1
    starts = np.concatenate(([0], breaks))
    ends = np.concatenate((breaks, [len(src)]))
    return [(int(src[s]), int(dst[s]), int(e - s)) for s, e in zip(starts, ends, strict=True)]
