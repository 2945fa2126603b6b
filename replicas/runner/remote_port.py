"""Ports of ranks in other processes: orders go there, what happened comes back.

Owns:      one connection for each follower, beside that of its plans; in the follower, a thread and its port.
Never:     waits on rank 0: orders are written, events are taken as they come.
Invariant: a follower's port is made and used on its transfer thread alone.
Thread:    `RemotePort`: rank 0's transfer thread. `serve_port`: the follower's "manta-transfer".

    rank 0: desk ─> RemotePort ──(method, argument)──> follower: serve_port ─> AgentPort
                               <──── port events ─────
"""

import logging
import socket
from collections.abc import Sequence
from multiprocessing.connection import Client, Connection

from kvtransfer.errors import PeerLost, TransferError
from kvtransfer.ports import ExpectOrder, PeerRanks, PortEvent, RankInfo, RankPort, WriteFailed, WriteOrder, Written
from replicas.memory.pool import MHATokenToKVPool
from replicas.runner.port import PortSpec, make_port

log = logging.getLogger(__name__)

BUSY_WAIT_S = 0.0003  # something is on its way
IDLE_WAIT_S = 0.003  # a peer's connection to our agent still wants to be served


class RemotePort:
    """Implements `RankPort` for a rank that is elsewhere. Its `connect` cannot tell that a peer does not fit: rank 0's
    own port, which has the same layout, does."""

    def __init__(self, connection: Connection) -> None:
        self.info: RankInfo = connection.recv()
        self._connection = connection
        self._open_orders: set[int] = set()

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

    def cancel(self, room: int, generation: int) -> None:
        self._send("cancel", room, generation)

    def expect(self, order: ExpectOrder) -> None:
        self._send("expect", order)

    def forget(self, room: int, generation: int) -> None:
        self._send("forget", room, generation)

    def poll(self) -> Sequence[PortEvent]:
        """Raises: PeerLost when the rank has gone."""
        events: list[PortEvent] = []
        try:
            while self._connection.poll(0):
                events += self._connection.recv()
        except (EOFError, OSError) as error:
            raise PeerLost(f"rank {self.info.rank} of this replica is gone: {error!r}") from error
        for event in events:
            if isinstance(event, Written) or (isinstance(event, WriteFailed) and event.drained):
                self._open_orders.discard(event.order_id)
        return events

    def close(self) -> None:
        self._connection.close()

    def _send(self, method: str, *arguments: object) -> None:
        try:
            self._connection.send((method, arguments))
        except OSError as error:
            raise PeerLost(f"rank {self.info.rank} of this replica is gone: {error!r}") from error


def serve_port(
    pool: MHATokenToKVPool, rank: int, spec: PortSpec, address: tuple[str, int], authkey: bytes
) -> None:
    """Be the port of rank ``rank``; returns when rank 0 hangs up."""
    connection = Client(address, authkey=authkey)
    port = make_port(pool, rank, spec, host=_own_address(address))
    try:
        connection.send(port.info)
        _serve(port, connection)
    except (EOFError, OSError):
        log.debug("rank 0 hung up")
    finally:
        port.close()


def _serve(port: RankPort, connection: Connection) -> None:
    expected: set[tuple[int, int]] = set()
    while True:
        wait_s = BUSY_WAIT_S if port.num_in_flight or expected else IDLE_WAIT_S
        while connection.poll(wait_s):
            method, arguments = connection.recv()
            if method == "expect":
                expected.add((arguments[0].room, arguments[0].generation))
            elif method == "forget":
                expected.discard(arguments)
            _call(port, method, arguments)
            wait_s = 0.0
        events = port.poll()
        if events:
            connection.send(list(events))


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
