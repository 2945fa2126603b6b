"""What arrives in one rank's pool: notes, matched with the rooms that are expected and verified.

Owns:      the expectations of this rank, and the counts of what was dropped.
Invariant: pages are reported once, only when their room, generation and sender are those expected, and after their
           digests were compared.
Thread:    the transfer thread.

With Verify.LAST the last page of each write is compared, hence also the hand-off's; the digest of a page that should
be compared and has none counts as wrong: the two sides are configured differently.
"""

from dataclasses import dataclass, field

from kvtransfer.checksum import Spans, page_digests
from kvtransfer.errors import BadMessage
from kvtransfer.memory import KvMemory
from kvtransfer.notes import Note, unpack
from kvtransfer.ports import Arrived, ExpectOrder
from kvtransfer.types import PageIds, Verify


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


class Inbox:
    """Expectations and verification; see the module's head."""

    def __init__(self, memory: KvMemory, verify: Verify) -> None:
        self.num_late = 0  # notes of a room, generation or sender that is not expected, or seen before
        self.num_malformed = 0
        self._memory = memory
        self._verify = verify
        self._sources: dict[str, Source] = {}  # by agent
        self._expected: dict[tuple[int, int], _Expected] = {}  # by room, generation

    def add_source(self, agent: str, source: Source) -> None:
        self._sources[agent] = source

    def drop(self, incarnation: str) -> None:
        """Forget a peer and all that was expected of it."""
        self._sources = {a: source for a, source in self._sources.items() if source.incarnation != incarnation}
        self._expected = {k: e for k, e in self._expected.items() if e.order.incarnation != incarnation}

    def expect(self, order: ExpectOrder) -> None:
        """Raises: ValueError for pages that this pool does not have."""
        self._memory.require_pages(order.pages)
        self._expected[order.room, order.generation] = _Expected(order=order)

    def forget(self, room: int, generation: int) -> None:
        self._expected.pop((room, generation), None)

    def take(self, agent: str, data: bytes) -> Arrived | None:
        """What a note says, verified; None when it is dropped."""
        try:
            note = unpack(data)
        except BadMessage:
            self.num_malformed += 1
            return None
        source, expected = self._sources.get(agent), self._expected.get((note.room, note.generation))
        if source is None or expected is None or expected.order.incarnation != source.incarnation:
            self.num_late += 1
            return None
        pages = expected.order.pages[note.page_offset : note.page_offset + note.num_pages]
        if note.src_rank != source.rank or len(pages) != note.num_pages:
            self.num_malformed += 1
            return None
        key = (note.src_rank, note.page_offset, note.num_pages, note.last)
        if key in expected.seen:
            self.num_late += 1
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
        """Those of ``pages`` [n] whose bytes are not what was sent."""
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
