"""Cache events and snapshots as bytes: columns of little-endian integers, so that a million keys are one copy.

Owns:      the encoding of EVENTS and SNAPSHOT payloads (framing is frames.py's).
Never:     carries token ids: a key names its page, its salt and all before it (kvtransfer/pages.py).
Invariant: what is decoded has the numbers, kinds and keys of what was encoded, in order; a payload whose lengths do not
           add up is a BadFrame, before anything is built from it.

    EVENTS    n (4) | seq [n] u64 | num_keys [n] u32 | kind [n] u8 | keys [sum of num_keys] u64
    SNAPSHOT  seq (8) | keys [m] u64, a page's parent before it
"""

import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from deployments.channel.frames import BadFrame, FrameKind, encode_frame
from kvtransfer.pages import PageKeys
from replicas.cache import events as cache
from routing.types import IndexEvent, IndexSnapshot, KeysCleared, KeysRemoved, KeysStored

_COUNT = struct.Struct("<I")
_SEQ = struct.Struct("<Q")
_EVENT_BYTES = 8 + 4 + 1  # of one event's columns, beside its keys
_STORED, _REMOVED, _CLEARED = 1, 2, 3
_NO_KEYS = np.empty(0, dtype=np.uint64)


def encode_events(events: Sequence[cache.CacheEvent]) -> bytes:
    """One EVENTS frame."""
    keys = [_keys(event) for event in events]
    columns = [
        np.array([event.seq for event in events], dtype="<u8"),
        np.array([len(each) for each in keys], dtype="<u4"),
        np.array([_kind(event) for event in events], dtype="u1"),
        np.concatenate([_NO_KEYS, *keys]).astype("<u8", copy=False),
    ]
    return encode_frame(
        FrameKind.EVENTS, _COUNT.pack(len(events)) + b"".join(column.tobytes() for column in columns)
    )


def decode_events(payload: bytes) -> list[IndexEvent]:
    """Raises: BadFrame."""
    if len(payload) < _COUNT.size:
        raise BadFrame("an EVENTS frame without a count")
    (num,) = _COUNT.unpack_from(payload)
    at = _COUNT.size + num * _EVENT_BYTES
    if len(payload) < at:
        raise BadFrame(f"an EVENTS frame of {num} events has {len(payload)} bytes; {at} and the keys were expected")
    seqs = np.frombuffer(payload, "<u8", num, _COUNT.size)
    counts = np.frombuffer(payload, "<u4", num, _COUNT.size + 8 * num)
    kinds = np.frombuffer(payload, "u1", num, _COUNT.size + 12 * num)
    ends = np.cumsum(counts, dtype=np.int64)
    if len(payload) - at != 8 * (int(ends[-1]) if num else 0):
        raise BadFrame(f"an EVENTS frame of {int(counts.sum())} keys has {len(payload) - at} bytes of them")
    keys = np.frombuffer(payload, "<u8", -1, at).astype(np.uint64)
    return [
        _event(int(kinds[i]), int(seqs[i]), keys[int(ends[i]) - int(counts[i]) : int(ends[i])]) for i in range(num)
    ]


def encode_snapshot(snapshot: cache.CacheSnapshot) -> bytes:
    """One SNAPSHOT frame."""
    keys = np.concatenate([_NO_KEYS, *(stored.keys for stored in snapshot.stored)])
    return encode_frame(FrameKind.SNAPSHOT, _SEQ.pack(snapshot.seq) + keys.astype("<u8", copy=False).tobytes())


def decode_snapshot(payload: bytes) -> IndexSnapshot:
    """Raises: BadFrame."""
    if len(payload) % 8 or not payload:
        raise BadFrame(f"a SNAPSHOT frame of {len(payload)} bytes; a number and whole keys were expected")
    (seq,) = _SEQ.unpack_from(payload)
    return IndexSnapshot(seq=seq, keys=np.frombuffer(payload, "<u8", -1, _SEQ.size).astype(np.uint64))


def _kind(event: cache.CacheEvent) -> int:
    if isinstance(event, cache.PagesStored):
        return _STORED
    return _REMOVED if isinstance(event, cache.PagesRemoved) else _CLEARED


def _keys(event: cache.CacheEvent) -> PageKeys:
    return _NO_KEYS if isinstance(event, cache.AllCleared) else event.keys


def _event(kind: int, seq: int, keys: npt.NDArray[np.uint64]) -> IndexEvent:
    if kind == _STORED:
        return KeysStored(seq, keys)
    if kind == _REMOVED:
        return KeysRemoved(seq, keys)
    if kind == _CLEARED:
        return KeysCleared(seq)
    raise BadFrame(f"event kind {kind} is unknown")
