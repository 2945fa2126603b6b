"""Ports of ranks in other processes: orders are sent there, and what happened comes back.

Owns:      one connection for each follower, beside that of its plans; in the follower, a thread, its port, and a
           listener that answers as long as its agent lives: peers of this engine dial it to learn whether it is dead.
Never:     waits on rank 0, nor does a follower wait for rank 0 except in `PortChannel.wait`.
Invariant: messages come whole and in order. A follower is lost when it has died, leaves MAX_UNREAD_BYTES unread, or
           sends no heartbeat for rank_timeout_s (one is due every BEATS-th part of that). A follower's port
           is made and used on its transfer thread alone; its listener closes after its agent, and before rank 0's.
Thread:    `RemotePort`: rank 0's transfer thread. `serve_port`: the follower's "manta-transfer".

    rank 0: transfer service ─> RemotePort ──(method, arguments)──> follower: serve_port ─> AgentPort
                                           <────── PortReport ─────
A frame is 4 bytes of length, big-endian, and a pickle: the two are one program, and the connection is authenticated.
"""

import logging
import math
import os
import pickle
import select
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Client, Connection
from typing import cast

from kvtransfer.errors import PeerLost, TransferError
from kvtransfer.peers.link import Alive
from kvtransfer.peers.liveness import Heartbeat, Silence
from kvtransfer.peers.wire import Frames, framed
from kvtransfer.ports.rank_port import (
    ExpectOrder,
    NoteCounts,
    PeerRanks,
    PortEvent,
    RankInfo,
    RankPort,
    WriteFailed,
    WriteOrder,
    Written,
)
from replicas.memory.pool import MHATokenToKVPool
from replicas.ranks.port import PortSpec, make_port

MAX_UNREAD_BYTES = 16 << 20  # some 10,000 orders
READ_BYTES = 1 << 18


class PortChannel:
    """A connection that neither of its two ends ever waits for, except in `wait`."""

    def __init__(self, connection: Connection) -> None:
        """Take ``connection`` over."""
        self._socket = socket.socket(fileno=os.dup(connection.fileno()))
        self._socket.setblocking(False)
        connection.close()
        self._out = bytearray()
        self._in = Frames(1 << 32)
        self._ended = False

    def send(self, message: object) -> None:
        """Raises: OSError when the other side is gone or reads nothing."""
        self._out += framed(pickle.dumps(message))
        self.flush()
        if len(self._out) > MAX_UNREAD_BYTES:
            raise TimeoutError(f"{len(self._out)} bytes are unread, at most {MAX_UNREAD_BYTES} may be")

    def flush(self) -> None:
        """Send as much as the socket takes now. Raises: OSError."""
        try:
            while self._out:
                sent = self._socket.send(self._out)
                del self._out[:sent]
        except BlockingIOError:
            return

    def take(self) -> list[object]:
        """Return what has come. Raises: EOFError when there is nothing and the other side is gone; OSError."""
        self.flush()
        self._read()
        messages = [pickle.loads(body) for body in self._in]
        if self._ended and not messages:
            raise EOFError("the other side has closed the connection")
        return messages

    def _read(self) -> None:
        try:
            while not self._ended:
                data = self._socket.recv(READ_BYTES)
                self._in.feed(data)
                self._ended = not data
        except BlockingIOError:
            return

    def wait(self, timeout_s: float) -> None:
        """Sleep until something comes, at most ``timeout_s``."""
        poll = select.poll()  # takes descriptors of any number
        poll.register(self._socket, select.POLLIN | (select.POLLOUT if self._out else 0))
        poll.poll(math.ceil(timeout_s * 1000))

    def close(self) -> None:
        self._socket.close()


log = logging.getLogger(__name__)

BUSY_WAIT_S = 0.0003  # a write is in flight, or one is expected
IDLE_WAIT_S = 0.003  # a peer may still connect to our agent, which this thread serves
HELLO_S = 300.0  # for a follower's port to introduce itself
CLOSE_S = 5.0  # for a follower to close its agent
BEATS = 10  # heartbeats that a follower misses before it counts as hung


@dataclass(frozen=True, slots=True, kw_only=True)
class PortReport:
    """What happened at a follower's port; a heartbeat if nothing did."""

    events: Sequence[PortEvent]
    notes: NoteCounts


class RemotePort:
    """A `RankPort` for a rank in another process. Its `connect` does not raise for a peer that does not fit: rank 0's
    own port, which has the same layout, does."""

    def __init__(
        self, connection: Connection, *, timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``timeout_s``: without a heartbeat for this time, the rank is lost.

        Raises: TransferError when the follower does not introduce itself within HELLO_S.
        """
        if not connection.poll(HELLO_S):
            raise TransferError(f"the port of a rank was not ready within {HELLO_S:g} s")
        self.info: RankInfo = connection.recv()
        self._channel = PortChannel(connection)
        self._open_orders: set[int] = set()
        self._clock = clock
        self._silence = Silence(period_s=timeout_s / BEATS, limit_s=timeout_s, now=clock())
        self._lost = False
        self.note_counts = NoteCounts()

    @property
    def num_in_flight(self) -> int:
        return len(self._open_orders)

    def connect(self, peer: PeerRanks) -> None:
        self._send("connect", peer)

    def disconnect(self, incarnation: str) -> None:
        self._send("disconnect", incarnation)

    def fence(self, incarnation: str, host: str) -> None:
        self._send("fence", incarnation, host)

    def write(self, order: WriteOrder) -> None:
        self._open_orders.add(order.order_id)
        self._send("write", order)

    def expect(self, order: ExpectOrder) -> None:
        self._send("expect", order)

    def forget(self, room: int, generation: int) -> None:
        self._send("forget", room, generation)

    def poll(self) -> Sequence[PortEvent]:
        """Raises: PeerLost when the rank is gone, or has been silent for too long."""
        events: list[PortEvent] = []
        try:
            reports = cast(list[PortReport], self._channel.take())
        except (EOFError, OSError) as error:
            raise self._loss(f"is gone: {error!r}") from error
        for report in reports:
            events += report.events
            self.note_counts = report.notes
        if self._silence.looked(self._clock(), heard=bool(reports)):
            raise self._loss(
                f"has given no sign of life for {self._silence.limit_s:g} s: its process or its transfer thread hangs"
            )
        for event in events:
            if isinstance(event, Written) or (isinstance(event, WriteFailed) and event.drained):
                self._open_orders.discard(event.order_id)
        return events

    def close(self) -> None:
        """Wait until the rank has closed its agent and its listener, at most CLOSE_S. Does not wait for a rank that is
        lost: if it hangs, it closes them when it goes on."""
        end_s = time.monotonic() + (0.0 if self._lost else CLOSE_S)
        try:
            self._channel.send(("close", ()))
            while (left_s := end_s - time.monotonic()) > 0:
                self._channel.wait(left_s)
                self._channel.take()
            log.warning("rank %d of this replica has not closed its transfer agent", self.info.rank)
        except (EOFError, OSError):
            log.debug("rank %d has closed its port", self.info.rank)
        finally:
            self._channel.close()

    def _send(self, method: str, *arguments: object) -> None:
        try:
            self._channel.send((method, arguments))
        except OSError as error:
            raise self._loss(f"is gone: {error!r}") from error

    def _loss(self, what: str) -> PeerLost:
        self._lost = True
        return PeerLost(f"rank {self.info.rank} of this replica {what}")


def serve_port(pool: MHATokenToKVPool, rank: int, spec: PortSpec, address: tuple[str, int], authkey: bytes) -> None:
    """Run the port of rank ``rank`` until rank 0 closes it or hangs up."""
    connection = Client(address, authkey=authkey)
    host = _own_address(address)
    port = make_port(pool, rank, spec, host=host)
    alive = Alive(spec.settings, spec.layout, host=host, name=port.info.agent)
    channel = None
    try:
        connection.send(replace(port.info, alive_at=alive.address))
        channel = PortChannel(connection)
        beat = Heartbeat(period_s=spec.settings.rank_timeout_s / BEATS, misses=BEATS, now=time.monotonic())
        _serve(port, channel, alive, beat)
    except (EOFError, OSError):
        log.debug("rank 0 hung up")
    finally:
        port.close()
        alive.close()  # from now on peers may take this rank for dead
        if channel is not None:
            channel.close()  # last: rank 0 waits for it


def _serve(port: RankPort, channel: PortChannel, alive: Alive, beat: Heartbeat) -> None:
    expected: set[tuple[int, int]] = set()
    while True:
        channel.wait(BUSY_WAIT_S if port.num_in_flight or expected else IDLE_WAIT_S)
        for method, arguments in cast(list[tuple[str, tuple[object, ...]]], channel.take()):
            if method == "close":
                return
            if method == "expect":
                order = cast(ExpectOrder, arguments[0])
                expected.add((order.room, order.generation))
            elif method == "forget":
                expected.discard(cast(tuple[int, int], arguments))
            _call(port, method, arguments)
        alive.serve()
        events = port.poll()
        if events or beat.take_due(time.monotonic()):
            channel.send(PortReport(events=events, notes=port.note_counts))


def _call(port: RankPort, method: str, arguments: tuple[object, ...]) -> None:
    try:
        getattr(port, method)(*arguments)
    except TransferError as error:  # writes to that peer will fail, with this reason
        log.warning("%s: %s", method, error)


def _own_address(peer: tuple[str, int]) -> str:
    """The address of this machine from which it reaches ``peer``; no packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(peer)
        return str(probe.getsockname()[0])
