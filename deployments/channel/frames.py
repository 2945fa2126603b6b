"""The messages between a replica and a router, and their bytes.

Owns:      what a message is, its encoding (msgpack, decoded by type, so bytes from a socket never become code), and the
           framing.
Never:     opens a socket (channel_server.py, channel_client.py); carries token ids of cached pages: a key names its
           page, its salt and all pages before it (kvtransfer/pages.py).
Invariant: ``decode`` of what `encode` framed equals the message; a frame longer than the limit is an error, not an
           allocation; a message that does not fit its type is a BadFrame that names the field.

    frame = length of the message (4 bytes, little endian) | message
    ChannelHello   replica -> router, first
    Deltas         replica -> router, one per engine step: the deltas of every request that this router has there
    ReplicaReport  replica -> router, every report period
    CacheChanges   replica -> router, before a report: what entered and left its prefix cache since the last
    CacheKeys      replica -> router, when asked: everything in its prefix cache
    RunRequest     router -> replica: a request to run; its lease comes by Ray, beside it
    EndRequest     router -> replica: the lease of a request has failed, or its client has left
    TakeBack       router -> replica: a request that waits could start sooner elsewhere
    KeptRequest    replica -> router: the answer, if it was admitted; else its deltas end with ``retry_as`` "taken_back"
    PushCache      router -> replica: it leaves, and is to give others what it has cached
"""

import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from msgspec import DecodeError, Meta, Struct
from msgspec.msgpack import Decoder, Encoder

from kvtransfer.migration.wire import MigrationAddress
from kvtransfer.pages import NO_KEYS, PageKeys, Tier
from replicas.cache.events import AllCleared, CacheEvent, CacheSnapshot, PagesStored, PartsChanged
from replicas.types import EngineStats, GenerateRequest, TokenDelta
from routing.types import IndexEvent, IndexSnapshot, KeysCleared, KeysParted, KeysRemoved, KeysStored

LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 64 << 20
Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Seconds = Annotated[float, Meta(ge=0)]


class BadFrame(ValueError):
    """The peer does not speak this protocol; the connection must be closed."""


class ChannelHello(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="hello"):
    """The replica that connects, and the channel's secret."""

    token: str
    replica_id: str


class Deltas(Struct, frozen=True, forbid_unknown_fields=True, tag="deltas"):
    """Token deltas, in the order in which the engine made them."""

    deltas: Sequence[TokenDelta]


class ReplicaReport(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="report"):
    """A replica's statistics and health."""

    stats: EngineStats
    error: str | None  # why it is unhealthy, else None
    num_open: Count  # requests it has accepted and not ended
    age_s: Seconds = 0.0  # how old ``stats`` was when this was sent: a step in progress can be long
    released: bool = False  # it has given memory back and takes no requests
    draining: bool = False  # it ends once its requests have ended, and takes no others
    step_age_s: Seconds = 0.0  # how long the step in progress had been running then; 0: none was


# stored, host, store: these pages are now at best on the replica's device, its host; or in the store that it shares;
# removed, dropped: in none of its own tiers, of which the device or the host was the last; missed: not in the store;
# cleared: its own tiers are empty; parts, holes: these pages have a part now, or none (replicas/cache/parts.py);
# host_parts, host_holes: likewise of their copies on the host
Kind = Literal[
    "stored", "host", "store", "removed", "dropped", "missed", "cleared", "parts", "holes", "host_parts", "host_holes"
]
STORED: Mapping[Tier, Kind] = {Tier.DEVICE: "stored", Tier.HOST: "host", Tier.STORE: "store"}
STORED_IN = {kind: tier for tier, kind in STORED.items()}
REMOVED: Mapping[Tier, Kind] = {Tier.DEVICE: "removed", Tier.HOST: "dropped", Tier.STORE: "missed"}
REMOVED_FROM = {kind: tier for tier, kind in REMOVED.items()}
PARTED: Mapping[tuple[Tier, bool], Kind] = {
    (Tier.DEVICE, True): "parts", (Tier.DEVICE, False): "holes",
    (Tier.HOST, True): "host_parts", (Tier.HOST, False): "host_holes",
}  # fmt: skip
PARTED_IN = {kind: found for found, kind in PARTED.items()}


NONE = memoryview(b"")  # of a tier that a message does not mention


class CacheChange(Struct, frozen=True, array_like=True):
    """One event of a prefix cache."""

    kind: Kind
    seq: Count
    keys: memoryview  # [n] u64, little endian
    idle_s: Seconds = 0.0  # of pages that are removed or dropped: since their last use
    tenant: str = ""  # and whose request needed the room


class CacheChanges(Struct, frozen=True, forbid_unknown_fields=True, tag="changes"):
    """Consecutive events of a prefix cache."""

    changes: Sequence[CacheChange]

    @staticmethod
    def of(events: Sequence[CacheEvent]) -> "CacheChanges":
        return CacheChanges([_change(event) for event in events])

    def events(self) -> list[IndexEvent]:
        """Raises: BadFrame."""
        return [_event(change) for change in self.changes]


class CacheKeys(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, tag="keys"):
    """The keys of all cached pages after event ``seq``, each under its best tier; a page's parent stands before it."""

    seq: Count
    keys: memoryview  # [n] u64, little endian: on the device
    host: memoryview = NONE  # on the host alone
    store: memoryview = NONE  # known to be in the store
    parts: memoryview = NONE  # of those on the device, the ones that have a part
    host_parts: memoryview = NONE  # those whose copy on the host has one

    @staticmethod
    def of(snapshot: CacheSnapshot) -> "CacheKeys":
        of_tier = {tier: [NO_KEYS] for tier in Tier}
        for stored in snapshot.stored:
            of_tier[stored.tier].append(stored.keys)
        keys, host, store = (_bytes(np.concatenate(of_tier[tier])) or NONE for tier in Tier)
        return CacheKeys(
            seq=snapshot.seq, keys=keys, host=host, store=store, parts=_bytes(snapshot.parts) or NONE,
            host_parts=_bytes(snapshot.host_parts) or NONE,
        )  # fmt: skip

    def snapshot(self) -> IndexSnapshot:
        """Raises: BadFrame."""
        return IndexSnapshot(
            seq=self.seq, keys=_keys(self.keys), host_keys=_keys(self.host), store_keys=_keys(self.store),
            part_keys=_keys(self.parts), host_part_keys=_keys(self.host_parts),
        )  # fmt: skip


class RunRequest(Struct, frozen=True, forbid_unknown_fields=True, tag="run"):
    """A request for the replica to run."""

    request: GenerateRequest


class EndRequest(Struct, frozen=True, forbid_unknown_fields=True, tag="end"):
    """The request that the replica must end; the replica may not know it, or no longer."""

    rid: str


class TakeBack(Struct, frozen=True, forbid_unknown_fields=True, tag="back"):
    """The request that the replica must end unless it has been admitted."""

    rid: str


class KeptRequest(Struct, frozen=True, forbid_unknown_fields=True, tag="kept"):
    """The request that the replica goes on with: it was admitted before it was asked for, or has ended."""

    rid: str


class PushCache(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="push"):
    """The order to push cached pages to ``targets``, the most valuable first."""

    targets: tuple[MigrationAddress, ...]
    most_s: Seconds
    most_bytes: Count = (1 << 62)
    share: Annotated[float, Meta(gt=0, le=1)] = 0.5  # of the time in which the link may be busy
    hand_over_s: Seconds | None = None  # after which requests that still run go on elsewhere, with their pages pushed


def _to_bytes(ids: Any) -> memoryview:
    """The only type of a message that msgspec does not know: token ids, [n] i32, little endian."""
    return np.ascontiguousarray(ids, dtype="<i4").data


def _from_bytes(_: type, data: Any) -> np.ndarray[Any, Any]:
    if not isinstance(data, bytes) or len(data) % 4:
        raise ValueError("token ids are whole numbers of 4 bytes")
    return np.frombuffer(data, dtype="<i4").astype(np.int32)


Message = ChannelHello | Deltas | ReplicaReport | CacheChanges | CacheKeys | KeptRequest
Asked = RunRequest | EndRequest | TakeBack | PushCache
T = TypeVar("T")
_ENCODER = Encoder(enc_hook=_to_bytes)
_DECODER: Decoder[Message] = Decoder(Message)
_ASKED: Decoder[Asked] = Decoder(Asked, dec_hook=_from_bytes)


def encode(message: Message | Asked) -> bytes:
    """One frame."""
    body = _ENCODER.encode(message)
    return LENGTH.pack(len(body)) + body


def decode(body: bytes) -> Message:
    """Decode what a replica sent. Raises: BadFrame, with the path of the wrong field and the type that was expected."""
    return _decoded(body, _DECODER)


def decode_asked(body: bytes) -> Asked:
    """Decode what a router sent. Raises: BadFrame, as `decode`."""
    return _decoded(body, _ASKED)


def _decoded(body: bytes, decoder: Decoder[T]) -> T:
    try:
        return decoder.decode(body)
    except DecodeError as error:
        raise BadFrame(f"a message of {len(body)} bytes is not of this protocol or version: {error}") from error


class FrameReader:
    """Cuts a byte stream into frames of at most ``max_bytes``, which may be changed between two frames."""

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self.max_bytes = max_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the messages that ``data`` completes. Raises: BadFrame for a length above the limit."""
        self._buffer += data
        while len(self._buffer) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._buffer)
            if length > self.max_bytes:
                raise BadFrame(f"a frame of {length} bytes is announced; at most {self.max_bytes} are allowed")
            end = LENGTH.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[LENGTH.size : end])
            del self._buffer[:end]
            yield body


def _change(event: CacheEvent) -> CacheChange:
    if isinstance(event, AllCleared):
        return CacheChange("cleared", event.seq, _bytes(NO_KEYS))
    if isinstance(event, PagesStored):
        return CacheChange(STORED[event.tier], event.seq, _bytes(event.keys))
    if isinstance(event, PartsChanged):
        return CacheChange(PARTED[event.tier, event.there], event.seq, _bytes(event.keys))
    return CacheChange(REMOVED[event.tier], event.seq, _bytes(event.keys), event.idle_s, event.tenant)


def _event(change: CacheChange) -> IndexEvent:
    if change.kind == "cleared":
        return KeysCleared(change.seq)
    if change.kind in STORED_IN:
        return KeysStored(change.seq, _keys(change.keys), STORED_IN[change.kind])
    if change.kind in PARTED_IN:
        tier, there = PARTED_IN[change.kind]
        return KeysParted(change.seq, _keys(change.keys), there, tier)
    tier = REMOVED_FROM[change.kind]
    return KeysRemoved(change.seq, _keys(change.keys), tier, change.idle_s, change.tenant)


def _bytes(keys: PageKeys) -> memoryview:
    return np.ascontiguousarray(keys, dtype="<u8").data


def _keys(data: memoryview) -> PageKeys:
    if len(data) % 8:
        raise BadFrame(f"{len(data)} bytes of page keys; each has 8")
    return np.frombuffer(data, dtype="<u8").astype(np.uint64, copy=False)  # read once, soon
