"""The messages of two transfer services, their bytes, and the handshake with which a connection begins.

Owns:      the messages and their bytes: length-prefixed, versioned JSON, decoded by type, so never code; the order of
           the first messages.
Never:     believes a message: whether its sender may send it, and whether its room is known, is for others to check.
           Sends a hello (it carries agents' metadata) to a side that has not proven that it knows the token.
Invariant: decode(encode(m)) == m; bytes that are no message of this version raise BadMessage, which names the field,
           and nothing else. `Handshake.peer` is set only after the other side's proof and its hello.

    decode engine ── Open, Abort, Ack ──> prefill engine       both: PeerHello once, Ping, Bye
                  <── Posted, Fail, Drained ──
A frame is 4 bytes of length, big-endian, and that many bytes: one of the version, then JSON, {"t": "open", ...}.

    listening side                    dialling side
    Challenge(nonce, address)  ────>
                      <─────────────  ChallengeReply(nonce, address, HMAC(token, dial, both nonces, both addresses))
    Welcome(HMAC(token, listen, the same)), PeerHello ──>
                      <─────────────  PeerHello
The proofs name both ends with their incarnations: a proof passed on to a third process proves nothing there. The
dialling side accepts a challenge only from the address that it dialled. Nothing is encrypted: the token authenticates,
and the network is the cluster's own.
"""

import hashlib
import hmac
import json
import secrets
import struct
from collections.abc import Iterator
from typing import Annotated, Literal, TypeVar

from msgspec import Meta, Struct
from msgspec.json import Decoder, Encoder

from kvtransfer.errors import BadMessage, NotAuthenticated
from kvtransfer.layout import KvLayout
from kvtransfer.ports.rank_port import RankInfo
from kvtransfer.types import Count, KVTransferMeta, PeerAddress, Prefix

VERSION = 4  # of the messages and of the meta
MAX_STRANGER_BYTES = 1024  # of a frame, before the peer has proven that it knows the token
MAX_FRAME_BYTES = 8 << 20  # an open of 1 M pages
_LENGTH = struct.Struct(">I")
Purpose = Literal["rooms", "probe", "migration"]
RoomId = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Generation = Annotated[int, Meta(ge=0, lt=2**32)]
Seconds = Annotated[float, Meta(ge=0)]


class _Message(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="t", tag=str.lower):
    """What every message has: a tag, and only the fields of its type."""


class Challenge(_Message, frozen=True, kw_only=True):
    """The first message, from the listening side: prove that you know the token."""

    nonce: str
    address: PeerAddress


class ChallengeReply(_Message, frozen=True, kw_only=True):
    """The dialling side's proof that it knows the token, and its own challenge."""

    nonce: str
    address: PeerAddress
    mac: str


class Welcome(_Message, frozen=True, kw_only=True):
    """The listening side's proof that it knows the token."""

    mac: str


class PeerHello(_Message, frozen=True, kw_only=True):
    """An engine, and all that is needed to write into its pools. ``probe``: only asks which engine listens there;
    ``migration``: for pages of host tiers (kvtransfer/migration), which needs no ranks."""

    address: PeerAddress
    purpose: Purpose
    layout: KvLayout
    ranks: tuple[RankInfo, ...]  # [tp]


class _RoomMessage(_Message, frozen=True, kw_only=True):
    """What every message about a room has."""

    room: RoomId
    generation: Generation


class Open(_RoomMessage, frozen=True, kw_only=True):
    """The receiver has granted its pages."""

    num_tokens: Count
    first_page: Count
    pages: tuple[Count, ...]  # [n]
    deadline_s: Seconds  # what is left of the receiver's; every page that arrives restarts it, but not of a fetch
    prefix: Prefix | None = None  # a fetch


class Abort(_RoomMessage, frozen=True, kw_only=True):
    """The receiver gives the room up; answered by Drained, also when the room is unknown."""


class Ack(_RoomMessage, frozen=True, kw_only=True):
    """The receiver has verified everything."""


class Fail(_RoomMessage, frozen=True, kw_only=True):
    """The sender gives up; ``drained``: none of its writes is in flight."""

    reason: str
    drained: bool


class Drained(_RoomMessage, frozen=True, kw_only=True):
    """No write of this room is in flight, and none will be."""


class Posted(_Message, frozen=True, kw_only=True):
    """A write is in flight: a receiver that polls slowly should poll now. Nothing depends on it."""


class Ping(_Message, frozen=True, kw_only=True):
    """The heartbeat of a transfer service."""


class Bye(_Message, frozen=True, kw_only=True):
    """The peer closes this connection on purpose."""


ToSender = Open | Abort | Ack
ToReceiver = Posted | Fail | Drained
Message = Challenge | ChallengeReply | Welcome | PeerHello | ToSender | ToReceiver | Ping | Bye
T = TypeVar("T")
_ENCODER = Encoder()
_MESSAGE: Decoder[Message] = Decoder(Message)
_META: Decoder[KVTransferMeta] = Decoder(KVTransferMeta)


def encode(message: Message) -> bytes:
    """One frame."""
    data = _versioned(message)
    if len(data) > MAX_FRAME_BYTES:
        raise BadMessage(f"a {type(message).__name__} of {len(data)} bytes, at most {MAX_FRAME_BYTES} may be sent")
    return framed(data)


def decode(data: bytes) -> Message:
    """The message in a frame's body. Raises: BadMessage."""
    return _read(_MESSAGE, data)


def encode_meta(meta: KVTransferMeta) -> bytes:
    return _versioned(meta)


def decode_meta(data: bytes) -> KVTransferMeta:
    """Raises: BadMessage, also for another version."""
    return _read(_META, data)


def _versioned(value: Message | KVTransferMeta) -> bytes:
    return bytes([VERSION]) + _ENCODER.encode(value)


def _read(decoder: Decoder[T], data: bytes) -> T:
    if data[:1] != bytes([VERSION]):
        raise BadMessage(f"version {data[0] if data else None}, {VERSION} is wanted: run the same release everywhere")
    try:
        return decoder.decode(memoryview(data)[1:])
    except (ValueError, RecursionError) as error:  # msgspec's errors and UnicodeDecodeError are ValueErrors
        raise BadMessage(f"not a message of version {VERSION}: {error}") from None


def framed(body: bytes) -> bytes:
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Cuts a stream of bytes into the bodies of its frames."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._data = bytearray()

    def feed(self, data: bytes) -> None:
        self._data += data

    def __iter__(self) -> Iterator[bytes]:
        """Yield each whole body once. Raises: BadMessage for one longer than ``max_bytes``, before it has come."""
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


class Handshake:
    """One side of the handshake: takes messages, returns messages."""

    def __init__(self, *, token: bytes, hello: PeerHello, dialled: PeerAddress | None = None) -> None:
        """``dialled``: the address that this side has dialled; None on the listening side."""
        self.peer: PeerHello | None = None
        self.max_bytes = MAX_STRANGER_BYTES  # of the next frame from the other side
        self._dialled = dialled
        self._token = token
        self._hello = hello
        self._nonce = secrets.token_hex(16)
        self._theirs: tuple[str, PeerAddress] | None = None  # nonce, and the address they state
        self._proven = False

    def start(self) -> list[Message]:
        return [] if self._dialled is not None else [Challenge(nonce=self._nonce, address=self._hello.address)]

    def heard(self, message: Message) -> list[Message]:
        """Return the reply. Raises: NotAuthenticated, BadMessage; the connection must be closed then."""
        if isinstance(message, PeerHello) and self._proven:
            if self._theirs is None or message.address != self._theirs[1]:
                raise BadMessage(f"a hello of {message.address} from a peer that has proven to be another")
            self.peer = message
            return []
        if self._proven:
            raise BadMessage(f"a hello is wanted, a {type(message).__name__} came")
        if isinstance(message, Challenge) and self._dialled is not None and self._theirs is None:
            if (message.address.host, message.address.port) != (self._dialled.host, self._dialled.port):
                raise BadMessage(f"{self._dialled} was dialled, and {message.address} answers")
            self._theirs = message.nonce, message.address
            return [ChallengeReply(nonce=self._nonce, address=self._hello.address, mac=self._mac("dial"))]
        if isinstance(message, ChallengeReply) and self._dialled is None:
            self._theirs = message.nonce, message.address
            self._require("dial", message.mac)
            return [Welcome(mac=self._mac("listen")), self._hello]
        if isinstance(message, Welcome) and self._dialled is not None and self._theirs is not None:
            self._require("listen", message.mac)
            return [self._hello]
        raise BadMessage(f"a {type(message).__name__} is out of order in the handshake")

    def _mac(self, side: str) -> str:
        assert self._theirs is not None
        ends = [(self._nonce, self._hello.address), self._theirs]
        if self._dialled is None:
            ends.reverse()  # the dialling side comes first
        text = json.dumps(["manta-transfer", side, *((n, a.host, a.port, a.incarnation) for n, a in ends)])
        return hmac.new(self._token, text.encode(), hashlib.sha256).hexdigest()

    def _require(self, side: str, mac: str) -> None:
        if not hmac.compare_digest(self._mac(side).encode(), mac.encode()):
            raise NotAuthenticated("the other side does not know the cluster's token: give all replicas the same one")
        self._proven = True
        self.max_bytes = MAX_FRAME_BYTES
