"""The router's end of the token channel: replicas connect to it, and it sorts their deltas into streams.

Owns:      the listening sockets (Unix for this node, TCP for others) and the open streams.
Never:     chooses replicas or retries (dispatcher.py); trusts a connection before its hello has carried the
           token: until then it may send 4 KiB within 5 s, and there are at most 64 such, and one more for each member
           that is not connected: after a start all of them come at once.
Invariant: a stream holds at most one delta per choice, merged while its consumer is slow, so that memory is bounded by
           the output itself; a delta for a stream that is closed or unknown is dropped.
Thread:    the router's event loop.
"""

import asyncio
import contextlib
import hmac
import logging
import secrets
import socket
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from deployments.channel.frames import (
    MAX_FRAME_BYTES,
    Asked,
    BadFrame,
    CacheChanges,
    CacheKeys,
    ChannelHello,
    Deltas,
    FrameReader,
    KeptRequest,
    Message,
    ReplicaReport,
    decode,
    encode,
)
from kvtransfer.peers.link import MAX_STRANGERS, crowded_out
from replicas.errors import MantaError
from replicas.types import Pending, TokenDelta
from routing.types import IndexEvent, IndexSnapshot

log = logging.getLogger(__name__)

MAX_STRANGER_BYTES = 4 << 10  # of a frame before the hello
HELLO_S = 5.0
BACKLOG = 4096  # connections that may wait to be accepted: a Unix socket refuses others, TCP's come a second later
ACCEPTED = 64  # of them in a turn of the event loop; uvloop's servers accept one, and reports fill the turns
ACCEPT_AGAIN_S = 1.0  # after an error: too many files are open


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelAddress:
    """Where a router listens; an argument of the replicas' `attach`."""

    router_id: str
    node_id: str  # replicas of this node use the Unix socket while it is there, others TCP
    unix_path: str
    host: str
    port: int
    token: str
    renew: bool = False  # connect anew, even if the replica believes that it is connected


def _by_take(_: TokenDelta) -> bool:
    return False


class Stream:
    """The deltas of the requests ``rids`` from ``replica_id``.

    ``straight`` may take a delta past `take`: called in the turn of the event loop in which the delta has arrived, and
    only while the consumer waits, so that all before it is done with. It returns False for one that must be taken.
    """

    def __init__(self, rids: tuple[str, ...], replica_id: str, stays: Callable[[], bool]) -> None:
        self.rids = rids
        self.replica_id = replica_id
        self.stays = stays  # returns whether it waits for a replica that hangs
        self.straight: Callable[[TokenDelta], bool] = _by_take
        self.kept: Callable[[], object] = lambda: None  # called when the replica does not give a request back
        self._awaited = False  # the consumer is in `take`
        self._waiting = Pending()
        self._parts: dict[tuple[str, int], TokenDelta] = {}  # of deltas whose last part has not arrived
        self._error: Exception | None = None
        self._ready = asyncio.Event()

    @property
    def is_empty(self) -> bool:
        """Whether no delta waits to be taken."""
        return not len(self._waiting)

    def put(self, delta: TokenDelta) -> None:
        """Add ``delta`` to what waits; `pass_on` follows."""
        key = (delta.rid, delta.index)
        begun = self._parts.pop(key, None)
        whole = delta if begun is None else begun.merge(delta)
        if whole.is_part:
            self._parts[key] = whole
            return
        self._waiting.add(whole)

    def pass_on(self) -> None:
        """Give the consumer what waits: straight, as far as that goes, else by waking it."""
        if self._awaited and not self._ready.is_set():
            waiting = self._waiting.take()
            try:
                while waiting and self.straight(waiting[0]):
                    del waiting[0]
            except Exception as error:  # noqa: BLE001 - the consumer's, not the connection's
                self.fail(error)
                return
            for delta in waiting:
                self._waiting.add(delta)
        if not self.is_empty:
            self._ready.set()

    def fail(self, error: Exception) -> None:
        """End the stream with ``error``; the first error counts."""
        if self._error is None:
            self._error = error
            self._ready.set()

    async def take(self) -> list[TokenDelta]:
        """Return what arrived since the last call; waits for the first. Raises: the error of `fail`, after the last
        delta."""
        self._awaited = True
        try:
            await self._ready.wait()
        finally:
            self._awaited = False
        waiting = self._waiting.take()
        if self._error is None:
            self._ready.clear()
        elif not waiting:
            raise self._error
        return waiting


class Listener(Protocol):
    """The receiver of what replicas send beside tokens (fleet.py); each call names the replica."""

    @property
    def num_members(self) -> int:
        """The number of replicas that are, or will be, connected."""
        ...

    def on_report(self, replica_id: str, report: ReplicaReport) -> None: ...
    def on_events(self, replica_id: str, events: Sequence[IndexEvent]) -> None: ...
    def on_snapshot(self, replica_id: str, snapshot: IndexSnapshot) -> None: ...
    def on_lost(self, replica_id: str) -> None:
        """Note that the replica's connection has ended."""
        ...


class ChannelServer:
    """The listening end of the channel; what replicas send beside tokens goes to ``listener``."""

    def __init__(
        self, listener: Listener, *, lost_error: Callable[[str], MantaError], hello_s: float = HELLO_S
    ) -> None:
        self._listener = listener
        self._hello_s = hello_s  # within which a stranger must send its hello
        self._strangers: dict[_Connection, str] = {}  # connections without a hello -> their hosts, the oldest first
        self._lost_error = lost_error  # makes the error of the streams of a lost replica
        self._streams: dict[tuple[str, str], Stream] = {}  # by replica and rid: a request may be open at two replicas
        self._connections: dict[str, _Connection] = {}  # by replica id
        self._doors: list[socket.socket] = []  # that listen
        self._accepting: set[asyncio.Task[Any]] = set()
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._token = secrets.token_hex(16)

    async def start(self, *, router_id: str, node_id: str, host: str) -> ChannelAddress:
        """Listen on a Unix socket in a private folder and on a free TCP port of ``host``."""
        self._folder = tempfile.TemporaryDirectory(prefix="manta-")  # mode 0700
        unix_path = str(Path(self._folder.name) / "tokens.sock")
        self._open(socket.AF_UNIX, unix_path)
        port = int(self._open(socket.AF_INET6 if ":" in host else socket.AF_INET, (host, 0)).getsockname()[1])
        return ChannelAddress(
            router_id=router_id, node_id=node_id, unix_path=unix_path, host=host, port=port, token=self._token
        )

    def open(self, rids: Iterable[str], *, replica_id: str, stays: Callable[[], bool] = lambda: False) -> Stream:
        """Open a stream of the deltas of ``rids``, before the replica is called. ``stays``: see `leave`."""
        stream = Stream(tuple(rids), replica_id, stays)
        for rid in stream.rids:
            assert (replica_id, rid) not in self._streams, f"rid {rid} is already open at {replica_id}"
            self._streams[replica_id, rid] = stream
        return stream

    def close(self, stream: Stream) -> None:
        for rid in stream.rids:
            self._streams.pop((stream.replica_id, rid), None)

    def send(self, replica_id: str, asked: Asked) -> None:
        """Ask a replica; what is asked arrives in order. Raises: the error of a lost replica, if it is one."""
        connection = self._connections.get(replica_id)
        if connection is None:
            raise self._lost_error(replica_id)
        connection.send(encode(asked))

    def leave(self, replica_id: str, error: MantaError) -> None:
        """Fail the streams of a replica that hangs, except those that stay."""
        for stream in set(self._streams.values()):
            if stream.replica_id == replica_id and not stream.stays():
                stream.fail(error)

    def is_connected(self, replica_id: str) -> bool:
        return replica_id in self._connections

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    async def stop(self) -> None:
        for door in self._doors:
            asyncio.get_running_loop().remove_reader(door)
            door.close()
        for connection in [*self._connections.values(), *self._strangers]:
            connection.close()
        if self._folder is not None:
            with contextlib.suppress(OSError):
                self._folder.cleanup()

    def check(self) -> None:
        """Raises AssertionError if a stream is listed under a request that is not its own."""
        for (replica_id, rid), stream in self._streams.items():
            assert rid in stream.rids, f"stream of {stream.rids} is listed under {rid}"
            assert replica_id == stream.replica_id, f"stream of {stream.replica_id} is listed under {replica_id}"

    @property
    def num_strangers(self) -> int:
        return len(self._strangers)

    def _open(self, family: socket.AddressFamily, address: str | tuple[str, int]) -> socket.socket:
        door = socket.socket(family)
        self._doors.append(door)
        door.setblocking(False)
        door.bind(address)
        door.listen(BACKLOG)
        asyncio.get_running_loop().add_reader(door, self._accept_waiting, door)
        return door

    def _accept_waiting(self, door: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            for _ in range(ACCEPTED):
                accepted, _ = door.accept()
                accepted.setblocking(False)
                accepting = loop.create_task(loop.connect_accepted_socket(lambda: _Connection(self), accepted))
                self._accepting.add(accepting)
                accepting.add_done_callback(self._accepting.discard)
        except BlockingIOError:
            return
        except OSError as error:
            log.warning("a connection to the token channel cannot be accepted: %s; trying again", error)
            loop.remove_reader(door)
            loop.call_later(ACCEPT_AGAIN_S, self._watch_again, door)

    def _watch_again(self, door: socket.socket) -> None:
        if door.fileno() >= 0:  # it has not been closed meanwhile
            asyncio.get_running_loop().add_reader(door, self._accept_waiting, door)

    def _meet(self, connection: "_Connection", host: str) -> asyncio.TimerHandle:
        """Take in a stranger; it is closed after ``hello_s`` unless it has sent its hello."""
        missing = max(self._listener.num_members - len(self._connections), 0)
        if (leaves := crowded_out(self._strangers.items(), limit=MAX_STRANGERS + missing)) is not None:
            leaves.close()
        self._strangers[connection] = host
        return asyncio.get_running_loop().call_later(self._hello_s, connection.close)

    def _accept(self, connection: "_Connection", hello: ChannelHello) -> str:
        """Take ``connection`` as the replica's. Returns: the replica's id. Raises: BadFrame when the token is wrong."""
        if not hmac.compare_digest(hello.token.encode(), self._token.encode()):
            raise BadFrame(f"{hello.replica_id or 'a peer'} sent a wrong token")
        self._strangers.pop(connection, None)
        before = self._connections.get(hello.replica_id)
        self._connections[hello.replica_id] = connection
        if before is not None:
            self._fail_streams(hello.replica_id)  # deltas on their way over the old connection may be lost
            before.close()
        return hello.replica_id

    def _receive(self, replica_id: str, message: Message, reached: dict[Stream, None]) -> None:
        """Take in ``message``. ``reached``: gets the streams that have deltas now."""
        if isinstance(message, Deltas):
            for delta in message.deltas:
                stream = self._streams.get((replica_id, delta.rid))
                if stream is not None:
                    stream.put(delta)
                    reached[stream] = None
        elif isinstance(message, ReplicaReport):
            self._listener.on_report(replica_id, message)
        elif isinstance(message, CacheChanges):
            self._listener.on_events(replica_id, message.events())
        elif isinstance(message, CacheKeys):
            self._listener.on_snapshot(replica_id, message.snapshot())
        elif isinstance(message, KeptRequest):
            if (kept := self._streams.get((replica_id, message.rid))) is not None:
                kept.kept()
        else:
            raise BadFrame("a second ChannelHello")

    def _lose(self, replica_id: str, connection: "_Connection") -> None:
        if self._connections.get(replica_id) is not connection:
            return  # it has connected anew
        del self._connections[replica_id]
        self._fail_streams(replica_id)
        self._listener.on_lost(replica_id)

    def _fail_streams(self, replica_id: str) -> None:
        for stream in set(self._streams.values()):
            if stream.replica_id == replica_id:
                stream.fail(self._lost_error(replica_id))


class _Connection(asyncio.Protocol):
    """The connection of one replica, or of a stranger."""

    def __init__(self, server: ChannelServer) -> None:
        self._server = server
        self._reader = FrameReader(MAX_STRANGER_BYTES)
        self._replica_id: str | None = None
        self._transport: asyncio.Transport | None = None
        self._until: asyncio.TimerHandle | None = None  # of a stranger

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass
        peer = transport.get_extra_info("peername")
        self._until = self._server._meet(self, str(peer[0]) if isinstance(peer, tuple) else "")  # "": by Unix socket

    def data_received(self, data: bytes) -> None:
        reached: dict[Stream, None] = {}  # what came in one read is merged, and passed on once
        try:
            for body in self._reader.feed(data):
                message = decode(body)
                if self._replica_id is None:
                    if not isinstance(message, ChannelHello):
                        raise BadFrame(f"the first message is {type(message).__name__}; ChannelHello was expected")
                    self._replica_id = self._server._accept(self, message)
                    self._reader.max_bytes = MAX_FRAME_BYTES
                    self._stay()
                else:
                    self._server._receive(self._replica_id, message, reached)
        except BadFrame as error:
            log.warning("closing a connection to the token channel: %s", error)
            self.close()
        for stream in reached:
            stream.pass_on()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stay()
        self._server._strangers.pop(self, None)
        if self._replica_id is not None:
            self._server._lose(self._replica_id, self)

    def send(self, frame: bytes) -> None:
        if self._transport is not None:
            self._transport.write(frame)

    def close(self) -> None:
        self._server._strangers.pop(self, None)
        if self._transport is not None:
            self._transport.close()

    def _stay(self) -> None:
        """Stop the timer that closes strangers."""
        if self._until is not None:
            self._until.cancel()
            self._until = None
