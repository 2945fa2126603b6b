"""What two transfer services say over their connection: length-prefixed, versioned JSON; never pickle.

Owns:      the messages, and what turns them into bytes and back (values: codec.py).
Never:     believes them: who sent one, and whether its room is known, is for others to check.
Invariant: decode(encode(m)) == m; bytes that are no message of this version raise BadMessage and nothing else.

    decode engine ── Open, Abort, Ack ──> prefill engine       both: Hello once, Ping, Bye
                  <── Posted, Fail, Drained ──
A frame is 4 bytes of length, big-endian, and that many of JSON: {"v": 1, "t": "open", ...}.
"""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from kvtransfer.errors import BadMessage
from kvtransfer.layout import KvLayout
from kvtransfer.peers.codec import plain, read, read_object
from kvtransfer.ports.rank_port import RankInfo
from kvtransfer.types import META_VERSION, KVTransferMeta, PeerAddress

VERSION = 1
MAX_STRANGER_BYTES = 1024  # of a frame, before the peer has proven that it knows the token
MAX_FRAME_BYTES = 8 << 20  # an open of 1 M pages
_LENGTH = struct.Struct(">I")
Purpose = Literal["rooms", "probe"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Challenge:
    """Who listens speaks first."""

    nonce: str
    address: PeerAddress


@dataclass(frozen=True, slots=True, kw_only=True)
class ChallengeReply:
    """Who dials proves that it knows the token, and asks the same."""

    nonce: str
    address: PeerAddress
    mac: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """Who listens has proven it too."""

    mac: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerHello:
    """Who speaks, and all that is needed to write into its pools. ``probe``: only asks who answers at this address."""

    address: PeerAddress
    purpose: Purpose
    layout: KvLayout
    ranks: tuple[RankInfo, ...]  # [tp]


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """The receiver has granted its pages."""

    room: int
    generation: int
    num_tokens: int
    first_page: int
    pages: tuple[int, ...]  # [n]
    deadline_s: float  # what is left of the receiver's; every page that comes starts it anew


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """The receiver does not want the room any more; answered by Drained, also when the room is unknown."""

    room: int
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ack:
    """The receiver has verified everything."""

    room: int
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fail:
    """The sender gives up; ``drained``: nothing of it is on its way any more."""

    room: int
    generation: int
    reason: str
    drained: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained:
    """No write of this room is on its way, and none will be."""

    room: int
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Posted:
    """A write is on its way: a receiver that looks now and then should look now. Nothing depends on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ping:
    """I live."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bye:
    """I close on purpose."""


ToSender = Open | Abort | Ack
ToReceiver = Posted | Fail | Drained
Message = Challenge | ChallengeReply | Welcome | PeerHello | ToSender | ToReceiver | Ping | Bye
_TYPES: dict[str, type[Message]] = {
    cls.__name__.lower(): cls
    for cls in (Challenge, ChallengeReply, Welcome, PeerHello, Open, Abort, Ack, Posted, Fail, Drained, Ping, Bye)
}


def encode(message: Message) -> bytes:
    """One frame."""
    body = {"v": VERSION, "t": type(message).__name__.lower(), **plain(message)}
    data = json.dumps(body, separators=(",", ":")).encode()
    if len(data) > MAX_FRAME_BYTES:
        raise BadMessage(f"a {body['t']} of {len(data)} bytes, at most {MAX_FRAME_BYTES} may be sent")
    return _LENGTH.pack(len(data)) + data


def decode(data: bytes) -> Message:
    """The message in a frame's body. Raises: BadMessage."""
    body = read_object(data)
    if body.pop("v", None) != VERSION:
        raise BadMessage(f"a message of version {VERSION} is wanted: run the same release on all replicas")
    cls = _TYPES.get(str(body.pop("t", None)))
    if cls is None:
        raise BadMessage("a message of no known type")
    message: Message = read(cls, body, cls.__name__)
    return message


def encode_meta(meta: KVTransferMeta) -> bytes:
    return json.dumps(plain(meta), separators=(",", ":")).encode()


def decode_meta(data: bytes) -> KVTransferMeta:
    """Raises: BadMessage, also for another version."""
    body = read_object(data)
    if body.get("version") != META_VERSION:
        raise BadMessage(f"meta of version {body.get('version')!r}, {META_VERSION} is wanted: run the same release")
    meta: KVTransferMeta = read(KVTransferMeta, body, "meta")
    return meta


class Frames:
    """Cuts a stream of bytes into frames' bodies."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._data = bytearray()

    def feed(self, data: bytes) -> None:
        self._data += data

    def __iter__(self) -> Iterator[bytes]:
        """Whole frames, once each. Raises: BadMessage for one longer than ``max_bytes``, before it has come."""
        while len(self._data) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._data)
            if length > self.max_bytes:
                raise BadMessage(f"a frame of {length} bytes, at most {self.max_bytes} are taken")
            end = _LENGTH.size + length
            if len(self._data) < end:
                return
            body = bytes(self._data[_LENGTH.size : end])
            del self._data[:end]
            yield body
