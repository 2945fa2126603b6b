"""The sockets of a transfer service: a listener, and connections that carry messages once both ends are authenticated.

Owns:      the sockets, their buffers, and the time a connection has to finish its handshake (call_timeout_s).
Never:     believes or forwards anything before the handshake (wire.py) is through; listens on any other address.
Invariant: a link ends by one `link_down`, or by `close`, and its socket is closed then.
Thread:    the transfer thread; `wake` from any.
"""

import contextlib
import errno
import itertools
import logging
import math
import os
import selectors
import socket
import time
from collections import Counter
from collections.abc import Iterable
from typing import Protocol, TypeVar

import msgspec

from kvtransfer.errors import BadMessage, NotAuthenticated
from kvtransfer.layout import KvLayout
from kvtransfer.peers.wire import MAX_STRANGER_BYTES, Frames, Handshake, Message, PeerHello, Purpose, decode, encode
from kvtransfer.types import PeerAddress, TransferSettings

log = logging.getLogger(__name__)

MAX_STRANGERS = 64  # connections that came in and are not through
MAX_UNREAD_BYTES = 64 << 20  # a peer that lives but reads nothing is given up
READ_BYTES = 1 << 18
DEAF_S = 1.0  # when no descriptor is left


T = TypeVar("T")
Ready = list[tuple[selectors.SelectorKey, int]]


class LinkHandler(Protocol):
    """Receives what happens on the links of `SocketLinks`."""

    def link_up(self, link: int, hello: PeerHello) -> None: ...

    def link_down(self, link: int, reason: str, *, refused: bool = False) -> None: ...

    def heard(self, link: int, message: Message) -> None:
        """Raises: BadMessage."""
        ...


def crowded_out(strangers: Iterable[tuple[T, str]], *, limit: int = MAX_STRANGERS) -> T | None:
    """Choose the connection to close before one more stranger is accepted; None while there is room.

    Args:    strangers: connections that are not authenticated, with their hosts, the oldest first.
             limit: so many may be.
    Returns: the oldest of the host that has most, so that one host cannot push out another's.
    """
    held = list(strangers)
    if len(held) < limit:
        return None
    [(most, _)] = Counter(host for _, host in held).most_common(1)
    return next(stranger for stranger, host in held if host == most)


class _Connection:
    """One socket: its handshake, its unsent bytes, its frames."""

    def __init__(
        self, sock: socket.socket, handshake: Handshake, *, dialled: bool, deadline_s: float, host: str = ""
    ) -> None:
        self.sock = sock
        self.handshake: Handshake | None = handshake  # None once it is through
        self.dialled = dialled
        self.host = host  # of the stranger; empty for a dial
        self.connecting = dialled
        self.deadline_s = deadline_s  # of the handshake
        self.frames = Frames(MAX_STRANGER_BYTES)
        self.out = bytearray()


class SocketLinks:
    """`peer_table.Links` over non-blocking sockets of this process."""

    def __init__(self, host: str, *, token: bytes, call_timeout_s: float, now: float) -> None:
        self.now = now
        self._token = token
        self._call_timeout_s = call_timeout_s
        self._ids = itertools.count(1)
        self._connections: dict[int, _Connection] = {}
        self._lost: list[tuple[int, str, bool]] = []  # reported by `serve`: a call never calls back
        self._hello: PeerHello | None = None
        self._deaf_until_s = math.inf  # when to listen again
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=128)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._wake_out, self._wake_in = socket.socketpair()
        self._wake_out.setblocking(False)
        self._wake_in.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, 0)
        self._selector.register(self._wake_in, selectors.EVENT_READ, -1)

    def introduce(self, hello: PeerHello) -> None:
        """Set the hello that authenticated peers get; call it before the first `wait`."""
        self._hello = hello

    def wake(self) -> None:
        """Make `wait` return at once; any thread."""
        with contextlib.suppress(OSError):  # full: it will wake; closed: nothing waits
            self._wake_out.send(b"w")

    # Links

    def dial(self, address: PeerAddress, purpose: Purpose) -> int:
        assert self._hello is not None
        link = next(self._ids)
        hello = msgspec.structs.replace(self._hello, purpose=purpose)
        handshake = Handshake(token=self._token, hello=hello, dialled=address)
        sock = None
        try:
            sock = socket.socket(socket.AF_INET6 if ":" in address.host else socket.AF_INET, socket.SOCK_STREAM)
            sock.setblocking(False)
            error = sock.connect_ex((address.host, address.port))
            if error not in (0, errno.EINPROGRESS):
                raise OSError(error, os.strerror(error))
            self._add(link, _Connection(sock, handshake, dialled=True, deadline_s=self.now + self._call_timeout_s))
        except (OSError, ValueError, OverflowError, TypeError) as failed:  # no descriptor, name or port; refused
            if sock is not None:
                sock.close()
            refused = isinstance(failed, ConnectionRefusedError)
            self._lost.append((link, f"{address.host}:{address.port}: {failed}", refused))
        return link

    def send(self, link: int, message: Message) -> None:
        connection = self._connections.get(link)
        if connection is None:
            return
        connection.out += encode(message)
        if len(connection.out) > MAX_UNREAD_BYTES:
            self._drop(link, f"the peer left {MAX_UNREAD_BYTES} bytes unread")
            return
        self._flush(link, connection)

    def close(self, link: int) -> None:
        connection = self._connections.pop(link, None)
        if connection is not None:
            self._selector.unregister(connection.sock)
            connection.sock.close()

    # the loop

    def wait(self, timeout_s: float) -> Ready:
        """Sleep until a socket is ready, at most ``timeout_s``. Returns: what `serve` handles."""
        return self._selector.select(0.0 if self._lost else timeout_s)

    def serve(self, ready: Ready, handler: LinkHandler, now: float) -> bool:
        """Handle ``ready`` and report to ``handler``. Returns: whether anything happened."""
        self.now = now
        lost, self._lost = self._lost, []
        for link, reason, refused in lost:
            handler.link_down(link, reason, refused=refused)
        for key, mask in ready:
            if key.data == 0:
                self._accept()
            elif key.data == -1:
                with contextlib.suppress(BlockingIOError):
                    while len(self._wake_in.recv(4096)) == 4096:
                        pass
            elif key.data in self._connections:
                self._serve(key.data, mask, handler)
        return bool(ready or lost)

    def expire(self, now: float) -> None:
        """Drop connections whose handshake takes too long: silent strangers, hung peers."""
        if now >= self._deaf_until_s:
            self._deaf_until_s = math.inf
            self._selector.register(self._listener, selectors.EVENT_READ, 0)
        for link, connection in list(self._connections.items()):
            if now >= connection.deadline_s:
                self._drop(link, f"no hello within {self._call_timeout_s:g} s")

    @property
    def next_s(self) -> float:
        """When `expire` has something to do next."""
        return min((self._deaf_until_s, *(connection.deadline_s for connection in self._connections.values())))

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    @property
    def num_unsent_bytes(self) -> int:
        return sum(len(connection.out) for connection in self._connections.values())

    def close_connections(self) -> None:
        for link in list(self._connections):
            self.close(link)

    def close_listener(self) -> None:
        """Close the listener, last of all: to peers a refused dial proves that nothing here writes."""
        self._selector.close()
        for sock in (self._listener, self._wake_in, self._wake_out):
            sock.close()

    # one connection

    def _add(self, link: int, connection: _Connection) -> None:
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        events = selectors.EVENT_WRITE if connection.connecting else selectors.EVENT_READ
        self._selector.register(connection.sock, events, link)
        self._connections[link] = connection

    def _accept(self) -> None:
        assert self._hello is not None
        try:
            sock, (host, *_) = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:  # no descriptor is left; the stranger stays in the listener's queue and would wake us
            log.warning("no connection is taken for %g s: %s", DEAF_S, error)
            self._selector.unregister(self._listener)
            self._deaf_until_s = self.now + DEAF_S
            return
        self._make_room()
        link = next(self._ids)
        handshake = Handshake(token=self._token, hello=self._hello)
        try:
            sock.setblocking(False)
            deadline_s = self.now + self._call_timeout_s
            self._add(link, _Connection(sock, handshake, dialled=False, deadline_s=deadline_s, host=host))
        except OSError:  # it has hung up already
            sock.close()
            return
        for message in handshake.start():
            self.send(link, message)

    def _make_room(self) -> None:
        strangers = [(link, c.host) for link, c in self._connections.items() if c.handshake is not None and c.host]
        if (leaves := crowded_out(strangers)) is not None:
            self.close(leaves)

    def _serve(self, link: int, mask: int, handler: LinkHandler) -> None:
        connection = self._connections[link]
        if connection.connecting:
            if not self._connected(link, connection):
                return
        elif mask & selectors.EVENT_WRITE:
            self._flush(link, connection)
        if mask & selectors.EVENT_READ and link in self._connections:
            self._read(link, connection, handler)

    def _connected(self, link: int, connection: _Connection) -> bool:
        try:
            error = connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if not error and connection.sock.getsockname() == connection.sock.getpeername():
                error = errno.ECONNREFUSED  # a dead port of our own range that the kernel lent us: it is ourselves
        except OSError as failed:  # it was there and has hung up
            error = failed.errno or errno.ENOTCONN
        if error:
            self._drop(link, os.strerror(error), refused=error == errno.ECONNREFUSED)
            return False
        connection.connecting = False
        self._watch(connection, link)
        return True

    def _read(self, link: int, connection: _Connection, handler: LinkHandler) -> None:
        try:
            data = connection.sock.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._drop(link, os.strerror(error.errno or 0))
            return
        if not data:
            self._drop(link, "the peer closed the connection")
            return
        connection.frames.feed(data)
        try:
            for body in connection.frames:
                self._heard(link, connection, decode(body), handler)
                if link not in self._connections:
                    return
        except (BadMessage, NotAuthenticated) as error:
            log.warning("connection %d is closed: %s", link, error)
            self._drop(link, str(error))
        except Exception as error:  # an error of ours: this peer loses its connection, the others keep the thread
            log.exception("connection %d is closed: a message of the peer could not be served", link)
            self._drop(link, f"a message could not be served: {error!r}")

    def _heard(self, link: int, connection: _Connection, message: Message, handler: LinkHandler) -> None:
        if connection.handshake is None:
            handler.heard(link, message)
            return
        for answer in connection.handshake.heard(message):
            self.send(link, answer)
        connection.frames.max_bytes = connection.handshake.max_bytes
        if (hello := connection.handshake.peer) is None or link not in self._connections:
            return
        if hello.purpose == "probe" and not connection.dialled:
            return  # it has our hello; it is no link, and is dropped at its deadline
        connection.handshake = None
        connection.deadline_s = math.inf
        handler.link_up(link, hello)

    def _flush(self, link: int, connection: _Connection) -> None:
        if connection.connecting:
            return
        try:
            while connection.out:
                sent = connection.sock.send(connection.out)
                del connection.out[:sent]
        except BlockingIOError:
            pass
        except OSError as error:
            self._drop(link, os.strerror(error.errno or 0))
            return
        self._watch(connection, link)

    def _watch(self, connection: _Connection, link: int) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.out else 0)
        if self._selector.get_key(connection.sock).events != events:
            self._selector.modify(connection.sock, events, link)

    def _drop(self, link: int, reason: str, *, refused: bool = False) -> None:
        self.close(link)
        self._lost.append((link, reason, refused))


STEP_S = 0.02  # how often the listener is looked at


class Alive:
    """A listener in the process of a rank after the first: peers dial it to learn whether the process is alive.

    It is closed after the agent: from then on a refused dial proves that nothing here writes. The follower's
    transfer thread calls `serve` in every turn.
    """

    def __init__(self, settings: TransferSettings, layout: KvLayout, *, host: str, name: str) -> None:
        """``name``: new with every start of the process. Raises: OSError."""
        self._links = SocketLinks(
            host, token=settings.token, call_timeout_s=settings.call_timeout_s, now=time.monotonic()
        )
        self.address = PeerAddress(host=host, port=self._links.port, incarnation=name)
        self._links.introduce(PeerHello(address=self.address, purpose="probe", layout=layout, ranks=()))
        self._next_s = 0.0

    def serve(self) -> None:
        """Never blocks."""
        now = time.monotonic()
        if now >= self._next_s:
            self._next_s = now + STEP_S
            self._links.serve(self._links.wait(0.0), self, now)
            self._links.expire(now)

    def link_up(self, link: int, hello: PeerHello) -> None:
        """Close it: this process has no rooms."""
        self._links.close(link)

    def link_down(self, link: int, reason: str, *, refused: bool = False) -> None: ...

    def heard(self, link: int, message: Message) -> None: ...

    def close(self) -> None:
        self._links.close_connections()
        self._links.close_listener()
