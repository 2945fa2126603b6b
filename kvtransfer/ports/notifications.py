"""The notifications of one rank's pool ("notes"): their bytes, and the inbox that matches them with the expected rooms.

Owns:      the wire format of a note; what this rank expects, notes that came before their room was expected, and the
           counts of what was dropped.
Invariant: `unpack(pack(note))` is ``note``; any other bytes raise BadMessage. Pages are reported once, only when their
           room, generation and sender are those expected, and after their digests were compared. A note and the order
           that expects it may come in either order.
Thread:    the transfer thread.

On a rank after the first, `expect` and the notes come over different connections: the service sends the order and then
a message to the peer, but this rank may have read its orders just before and read its notes just after. A note of a
room that was never expected here is therefore kept until it is; one of a room that is over is late, and dropped.

With Verify.LAST the last page of each write is compared, hence also the KV transfer's; the digest of a page that should
be compared and has none counts as wrong: the two sides are configured differently.

    offset  0  magic "MKV", version u8                      little endian
            4  flags u16 (1: last), src_rank u16
            8  room u64
           16  generation u32
           20  page_offset u32
           24  num_pages u32
           28  num_digests u32       of the last num_digests pages
           32  len(meta) u32, 0 u32
           40  digests [num_digests] u64, then meta
          end  XXH3-64 of all bytes before
"""

import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import xxhash

from kvtransfer.errors import BadMessage
from kvtransfer.ports.memory import KvMemory, Spans, page_digests
from kvtransfer.ports.rank_port import Arrived, Digests, ExpectOrder, NoteCounts
from kvtransfer.types import PageIds, Verify

MAGIC = b"MKV"
VERSION = 1
LAST = 1
_HEADER = struct.Struct("<3sBHHQIIIIII")
_CHECK = struct.Struct("<Q")


def _none() -> Digests:
    return np.empty(0, dtype=np.uint64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Note:
    """The notification of one write, from one rank to the rank that it wrote to."""

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


MAX_EARLY = 1024  # notes, of less than 4 KB; the oldest goes
MAX_OVER = 10_000  # rooms that are remembered as over
_Key = tuple[int, int]  # room, generation


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A rank of a peer that writes here."""

    incarnation: str
    rank: int
    spans: Spans  # of this rank's page, what it writes

    @property
    def bytes_per_page(self) -> int:
        return sum(end - start for start, end in self.spans)


@dataclass(slots=True, kw_only=True, eq=False)
class _Expected:
    order: ExpectOrder
    seen: set[tuple[int, int, int, bool]] = field(default_factory=set)  # source rank, offset, pages, last


class NotificationInbox:
    """The notes of one rank's pool, matched with the rooms that are expected there."""

    def __init__(self, memory: KvMemory, verify: Verify) -> None:
        self._num_late = 0
        self._num_malformed = 0
        self._memory = memory
        self._verify = verify
        self._sources: dict[str, Source] = {}  # by agent
        self._expected: dict[_Key, _Expected] = {}
        self._over: dict[_Key, None] = {}  # forgotten, the oldest first
        self._early: deque[tuple[str, Note]] = deque()  # of rooms that are neither expected nor over, with their agent
        self._arrived: list[Arrived] = []  # early notes whose room is expected now

    def add_source(self, agent: str, source: Source) -> None:
        self._sources[agent] = source

    def drop(self, incarnation: str) -> None:
        """Forget a peer and all that was expected of it."""
        gone = {agent for agent, source in self._sources.items() if source.incarnation == incarnation}
        self._sources = {a: source for a, source in self._sources.items() if a not in gone}
        for key in [k for k, e in self._expected.items() if e.order.incarnation == incarnation]:
            self.forget(*key)
        self._num_late += len(self._take_early(lambda agent, _: agent in gone))

    def expect(self, order: ExpectOrder) -> None:
        """Raises: ValueError for pages that this pool does not have."""
        self._memory.require_pages(order.pages)
        key = (order.room, order.generation)
        self._over.pop(key, None)
        self._expected[key] = _Expected(order=order)
        for agent, note in self._take_early(lambda _, of: of == key):
            if (arrived := self._match(agent, note)) is not None:
                self._arrived.append(arrived)

    def forget(self, room: int, generation: int) -> None:
        key = (room, generation)
        self._expected.pop(key, None)
        self._over[key] = None
        if len(self._over) > MAX_OVER:
            del self._over[next(iter(self._over))]
        self._num_late += len(self._take_early(lambda _, of: of == key))

    def take(self, agent: str, data: bytes) -> None:
        """Take a note in: once verified it is among the `arrived`, now or when its room is expected; else drop it."""
        try:
            note = unpack(data)
        except BadMessage:
            self._num_malformed += 1
            return
        if (key := (note.room, note.generation)) not in self._expected and key not in self._over:
            self._early.append((agent, note))
            if len(self._early) > MAX_EARLY:
                self._early.popleft()
                self._num_late += 1
        elif (arrived := self._match(agent, note)) is not None:
            self._arrived.append(arrived)

    @property
    def counts(self) -> NoteCounts:
        return NoteCounts(late=self._num_late, malformed=self._num_malformed, early=len(self._early))

    def arrived(self) -> list[Arrived]:
        """Return what has arrived since the last call."""
        arrived, self._arrived = self._arrived, []
        return arrived

    def check(self) -> None:
        """The invariants of this object."""
        assert len(self._early) <= MAX_EARLY
        assert len(self._over) <= MAX_OVER
        assert not self._expected.keys() & self._over.keys(), "a room is expected and over"
        for _, note in self._early:
            key = (note.room, note.generation)
            assert key not in self._expected, f"a note of room {note.room} waits, and the room is expected"
            assert key not in self._over, f"a note of room {note.room} waits, and the room is over"

    def _take_early(self, wanted: Callable[[str, _Key], bool]) -> list[tuple[str, Note]]:
        """Remove and return the early notes that match ``wanted`` (agent, room)."""
        if not self._early:
            return []
        taken: list[tuple[str, Note]] = []
        kept: deque[tuple[str, Note]] = deque()
        for agent, note in self._early:
            (taken if wanted(agent, (note.room, note.generation)) else kept).append((agent, note))
        self._early = kept
        return taken

    def _match(self, agent: str, note: Note) -> Arrived | None:
        source, expected = self._sources.get(agent), self._expected.get((note.room, note.generation))
        if source is None or expected is None or expected.order.incarnation != source.incarnation:
            self._num_late += 1
            return None
        pages = expected.order.pages[note.page_offset : note.page_offset + note.num_pages]
        if note.src_rank != source.rank or len(pages) != note.num_pages:
            self._num_malformed += 1
            return None
        key = (note.src_rank, note.page_offset, note.num_pages, note.last)
        if key in expected.seen:
            self._num_late += 1
            return None
        expected.seen.add(key)
        return Arrived(
            room=note.room,
            generation=note.generation,
            incarnation=source.incarnation,
            src_rank=note.src_rank,
            page_offset=note.page_offset,
            num_pages=note.num_pages,
            num_bytes=note.num_pages * source.bytes_per_page,
            last=note.last,
            bad_pages=self._bad_pages(note, pages, source.spans),
            meta=note.meta,
        )

    def _bad_pages(self, note: Note, pages: PageIds, spans: Spans) -> tuple[int, ...]:
        """The subset of ``pages`` [n] whose bytes differ from what was sent."""
        num_wanted = num_digests(self._verify, len(pages))
        if not num_wanted:
            return ()
        wanted = pages[len(pages) - num_wanted :]
        if len(note.digests) < num_wanted:
            return tuple(int(page) for page in wanted)
        wrong = page_digests(self._memory, wanted, spans) != note.digests[len(note.digests) - num_wanted :]
        return tuple(int(page) for page in wanted[wrong])


def num_digests(verify: Verify, num_pages: int) -> int:
    """How many pages of a write, counted from its end, have a digest."""
    match verify:
        case Verify.OFF:
            return 0
        case Verify.LAST:
            return min(1, num_pages)
        case Verify.ALL:
            return num_pages
