"""The bytes of a notification: which pages of which room have been written, their digests, and at the end the meta.

Owns:      the wire format of a note; little endian.
Invariant: `unpack(pack(note))` is ``note``; any other bytes raise BadMessage.

    offset  0  magic "MKV", version u8
            4  flags u16 (1: last), src_rank u16
            8  room u64
           16  generation u32
           20  page_offset u32
           24  num_pages u32
           28  num_digests u32       of the last so many pages
           32  len(meta) u32, 0 u32
           40  digests [num_digests] u64, then meta
          end  XXH3-64 of all that stands before
"""

import struct
from dataclasses import dataclass, field

import numpy as np
import xxhash

from kvtransfer.errors import BadMessage
from kvtransfer.ports.rank_port import Digests

MAGIC = b"MKV"
VERSION = 1
LAST = 1
_HEADER = struct.Struct("<3sBHHQIIIIII")
_CHECK = struct.Struct("<Q")


def _none() -> Digests:
    return np.empty(0, dtype=np.uint64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Note:
    """What one write of one rank says to the rank it wrote to."""

    room: int
    generation: int
    src_rank: int
    page_offset: int  # of the first page, counted from the room's first
    num_pages: int
    last: bool  # this rank sends no more
    digests: Digests = field(default_factory=_none)  # [k] of the last k pages, k <= num_pages
    meta: bytes = b""


def pack(note: Note) -> bytes:
    """16 pages take 176 bytes, and the meta."""
    assert len(note.digests) <= note.num_pages, "a digest belongs to a page"
    header = _HEADER.pack(
        MAGIC,
        VERSION,
        LAST if note.last else 0,
        note.src_rank,
        note.room,
        note.generation,
        note.page_offset,
        note.num_pages,
        len(note.digests),
        len(note.meta),
        0,
    )
    body = header + note.digests.astype("<u8").tobytes() + note.meta
    return body + _CHECK.pack(xxhash.xxh3_64_intdigest(body))


def unpack(data: bytes) -> Note:
    """Raises: BadMessage for bytes that are no note of this version."""
    if len(data) < _HEADER.size + _CHECK.size:
        raise BadMessage(f"a note has at least {_HEADER.size + _CHECK.size} bytes, this has {len(data)}")
    magic, version, flags, src_rank, room, generation, offset, pages, digests, meta_len, _ = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise BadMessage(f"a note begins with {MAGIC!r}, this with {magic!r}")
    if version != VERSION:
        raise BadMessage(
            f"notes of version {VERSION} are understood, this is {version}: run the same release everywhere"
        )
    meta_start = _HEADER.size + digests * 8
    end = meta_start + meta_len
    if digests > pages or end + _CHECK.size != len(data):
        raise BadMessage(
            f"a note of {pages} pages, {digests} digests and {meta_len} bytes of meta has {len(data)} bytes"
        )
    if _CHECK.unpack_from(data, end)[0] != xxhash.xxh3_64_intdigest(data[:end]):
        raise BadMessage(f"a note of {len(data)} bytes does not match its own digest")
    return Note(
        room=room,
        generation=generation,
        src_rank=src_rank,
        page_offset=offset,
        num_pages=pages,
        last=bool(flags & LAST),
        digests=np.frombuffer(data, dtype="<u8", count=digests, offset=_HEADER.size).astype(np.uint64),
        meta=data[meta_start:end],
    )
