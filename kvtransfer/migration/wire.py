"""What two replicas say while cached pages move from one to the other, and the stream that carries it.

Owns:      the messages, their bytes, and the order in which a connection begins (the handshake of peers/wire.py).
Never:     believes a message: the side that takes the pages checks their digests (migrator.py).
Invariant: a message that does not fit its type, or is longer than the limit, is a BadMessage; no wait for the peer is
           longer than PEER_S.
Thread:    one event loop.

    one that pushes                    its target
    Offer(paths) ──────────────────>
                 <────────────────── Have(pages of each)
    PageRun(path, digests), bytes ─────>
                 <────────────────── Kept(pages)
    ... one PageRun after the other; then it hangs up

A *path* is a sequence of tokens from the start of a prompt, in whole pages; its *own* pages are those from first_page
on, the ones before belong to other paths of the same offer, or are not offered.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.msgpack import Decoder, Encoder

from kvtransfer.errors import BadMessage, IncompatibleLayout, PeerLost
from kvtransfer.layout import MAY_DIFFER, MLA
from kvtransfer.peers.wire import MAX_STRANGER_BYTES, Handshake, PeerHello, decode, encode, framed
from kvtransfer.types import Count, PeerAddress

PEER_S = 5.0  # within which a peer must say or take what is next
MAX_MESSAGE_BYTES = 64 << 20  # an offer of 16 M tokens
BUFFER_BYTES = 1 << 20
PRIOR_S = 60.0  # what was used once just now is expected again after so long

Bytes = npt.NDArray[np.uint8]  # [pages, page_bytes] of all ranks, as in the host tier
Digests = npt.NDArray[np.uint64]  # [pages, parts] XXH3-64 of each rank's part (`KvLayout.num_parts`)


def hit_rate(hits: int, idle_s: float) -> float:
    """Return the hits a second that can be expected: those so far, over the time since the last, and a prior."""
    return (1 + hits) / (PRIOR_S + idle_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationAddress:
    """Where a replica listens for pages, and the secret of that listener."""

    peer: PeerAddress
    token: str = field(repr=False)


class Path(Struct, frozen=True, array_like=True):
    """A cached sequence, and what is known of its own pages."""

    salt: str
    token_ids: bytes  # [n * page_size] i32, little endian
    first_page: Count  # its own pages begin here
    parent: int = -1  # index in the offer of the path that these pages continue; -1: none
    hits: Count = 0
    idle_s: float = 0.0  # since the last use

    @property
    def rate(self) -> float:
        return hit_rate(self.hits, self.idle_s)

    @property
    def ids(self) -> npt.NDArray[np.int32]:
        return np.frombuffer(self.token_ids, dtype="<i4").astype(np.int32)

    def num_pages(self, page_size: int) -> int:
        """The pages of the whole path."""
        return len(self.token_ids) // (4 * page_size)


class _Message(Struct, frozen=True, tag_field="t", tag=str.lower, forbid_unknown_fields=True):
    """What every message has: a tag, and only the fields of its type."""


class Offer(_Message, frozen=True):
    """The paths that the sender has, the most valuable first."""

    paths: Sequence[Path]


class Have(_Message, frozen=True):
    """How many of the first pages of each offered path the receiver has."""

    pages: Sequence[Count]


class PageRun(_Message, frozen=True):
    """Pages [first, first + n) of a path; n * page_bytes bytes follow."""

    path: Count
    first: Count
    digests: bytes  # [n * parts] u64, little endian


class Kept(_Message, frozen=True):
    """The receiver has taken so many of the run's pages; the others it had, had no room for, or they were wrong."""

    pages: Count


Message = Offer | Have | PageRun | Kept
M = TypeVar("M", bound=_Message)
_ENCODER = Encoder()
_DECODER: Decoder[Message] = Decoder(Message)


class MigrationStream:
    """One connection over which pages move, after `meet`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        writer.transport.set_write_buffer_limits(high=BUFFER_BYTES)

    @staticmethod
    async def dial(address: MigrationAddress, hello: PeerHello) -> "MigrationStream":
        """Connect and authenticate. Raises: PeerLost, NotAuthenticated, BadMessage, IncompatibleLayout."""
        peer = address.peer
        try:
            async with asyncio.timeout(PEER_S):
                stream = MigrationStream(*await asyncio.open_connection(peer.host, peer.port, limit=BUFFER_BYTES))
        except (OSError, TimeoutError) as error:
            raise PeerLost(f"{peer.host}:{peer.port} cannot be reached: {error!r}") from error
        try:
            await stream.meet(Handshake(token=address.token.encode(), hello=hello, dialled=peer), hello)
        except BaseException:
            stream.close()
            raise
        return stream

    async def meet(self, handshake: Handshake, ours: PeerHello) -> None:
        """Authenticate both ends, and require the same layout. Raises: as `dial`."""
        for message in handshake.start():
            self._writer.write(encode(message))
        async with _limit("a hello", PEER_S):
            while handshake.peer is None:
                body = await self._body(MAX_STRANGER_BYTES if handshake.max_bytes == MAX_STRANGER_BYTES else 1 << 16)
                for message in handshake.heard(decode(body)):
                    self._writer.write(encode(message))
            await self._writer.drain()
        may_differ = MAY_DIFFER if ours.layout.architecture == MLA else frozenset[str]()  # ranks' parts are equal then
        if differing := ours.layout.differences(handshake.peer.layout, may_differ=may_differ):
            raise IncompatibleLayout(f"cached pages cannot move between these replicas: {differing}")

    async def send(self, message: Message, payload: Bytes | None = None) -> None:
        """Send ``message``, and the bytes of its pages. Raises: PeerLost."""
        async with _limit(f"room for a {type(message).__name__}", PEER_S):
            self._writer.write(framed(_ENCODER.encode(message)))
            if payload is not None:
                flat = payload.reshape(-1)
                for start in range(0, len(flat), BUFFER_BYTES):
                    self._writer.write(flat[start : start + BUFFER_BYTES].data)
                    await self._writer.drain()
            await self._writer.drain()

    async def receive(self, kind: type[M]) -> M:
        """Return the next message, which must be of ``kind``. Raises: BadMessage, PeerLost."""
        message = await self.next(within_s=PEER_S)
        if not isinstance(message, kind):
            raise BadMessage(f"a {kind.__name__} is wanted, {type(message).__name__} came")
        return message

    async def next(self, *, within_s: float) -> Message | None:
        """Return the next message, or None: the peer has hung up. Raises: BadMessage, PeerLost."""
        async with _limit("a message", within_s):
            try:
                body = await self._body(MAX_MESSAGE_BYTES)
            except asyncio.IncompleteReadError as error:
                if error.partial:
                    raise
                return None
        try:
            return _DECODER.decode(body)
        except (ValueError, RecursionError) as error:
            raise BadMessage(f"not a message of this release: {error}") from None

    async def receive_into(self, payload: Bytes) -> None:
        """Fill ``payload`` with the bytes that follow a PageRun. Raises: PeerLost."""
        flat, at = payload.reshape(-1), 0
        async with _limit("the bytes of a run", PEER_S):
            while at < len(flat):
                data = await self._reader.read(min(len(flat) - at, BUFFER_BYTES))
                if not data:
                    raise PeerLost("the peer hung up in a run")
                flat[at : at + len(data)] = np.frombuffer(data, dtype=np.uint8)
                at += len(data)

    def close(self) -> None:
        """Hang up at once; what a peer has not taken is lost."""
        if self._writer.transport.get_write_buffer_size():
            self._writer.transport.abort()
        else:
            self._writer.close()

    async def _body(self, most: int) -> bytes:
        length = int.from_bytes(await self._reader.readexactly(4), "big")
        if length > most:
            raise BadMessage(f"a message of {length} bytes, at most {most} are taken")
        return await self._reader.readexactly(length)


@contextlib.asynccontextmanager
async def _limit(what: str, within_s: float) -> AsyncIterator[None]:
    """Raise PeerLost for a peer that hangs up or takes longer than ``within_s``."""
    try:
        async with asyncio.timeout(within_s):
            yield
    except TimeoutError:
        raise PeerLost(f"the peer is silent: {what} was wanted within {within_s:g} s") from None
    except (OSError, EOFError) as error:
        raise PeerLost(f"the connection ended: {error!r}") from error

