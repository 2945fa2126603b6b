"""Ports of ranks in other processes: orders go there, what happened comes back.

Owns:      one connection for each follower, beside that of its plans; in the follower, a thread, its port, and a
           listener that answers as long as its agent lives: peers of this engine ask there whether it is dead.
Never:     waits on rank 0: orders are queued, events are taken as they come. A follower that leaves the queue unread is
           lost, as one that has died is, and one that gives no sign of life: its port sends one, at the latest, every
           BEATS-th part of rank_timeout_s.
Invariant: a follower's port is made and used on its transfer thread alone; its listener closes after its agent, and
           before the transfer service's.
Thread:    `RemotePort`: rank 0's transfer thread. `serve_port`: the follower's "manta-transfer".

    rank 0: transfer service ─> RemotePort ──(method, argument)──> follower: serve_port ─> AgentPort
                               <───── PortReport ─────
"""

import logging
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Client, Connection
from typing import cast

from kvtransfer.errors import PeerLost, TransferError
from kvtransfer.peers.link import Alive
from kvtransfer.peers.liveness import Heartbeat, Silence
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
from replicas.runner.port import PortSpec, make_port
from replicas.runner.port_channel import PortChannel

log = logging.getLogger(__name__)

BUSY_WAIT_S = 0.0003  # something is on its way
IDLE_WAIT_S = 0.003  # a peer's connection to our agent still wants to be served
HelloS = 300.0  # for a follower's port to say what it is
CLOSE_S = 5.0  # for a follower to close its agent
BEATS = 10  # that are missed before a follower counts as hung


@dataclass(frozen=True, slots=True, kw_only=True)
class PortReport:
    """What a follower's port says: a sign of life in any case."""

    events: Sequence[PortEvent]
    notes: NoteCounts


class RemotePort:
    """Implements `RankPort` for a rank that is elsewhere. Its `connect` cannot tell that a peer does not fit: rank 0's
    own port, which has the same layout, does."""

    def __init__(
        self, connection: Connection, *, timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``timeout_s``: silent for so long, it is lost.

        Raises: TransferError when the follower does not say what it is.
        """
        if not connection.poll(HelloS):
            raise TransferError(f"the port of a rank was not ready within {HelloS:g} s")
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

    def write(self, order: WriteOrder) -> None:
        self._open_orders.add(order.order_id)
        self._send("write", order)

    def expect(self, order: ExpectOrder) -> None:
        self._send("expect", order)

    def forget(self, room: int, generation: int) -> None:
        self._send("forget", room, generation)

    def poll(self) -> Sequence[PortEvent]:
        """Raises: PeerLost when the rank has gone, or has been silent for too long."""
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
        """Returns when its agent is closed too, and with it its listener, at most CLOSE_S later. At once where the rank
        is lost: if it hangs, it closes them when it goes on."""
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


def serve_port(
    pool: MHATokenToKVPool, rank: int, spec: PortSpec, address: tuple[str, int], authkey: bytes
) -> None:
    """Be the port of rank ``rank``; returns when rank 0 says so or hangs up."""
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
    except TransferError as error:  # writes to that peer will fail, and say so
        log.warning("%s: %s", method, error)


def _own_address(peer: tuple[str, int]) -> str:
    """The address of this machine from which it reaches ``peer``; no packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(peer)
        return str(probe.getsockname()[0])
