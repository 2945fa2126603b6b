"""Cache events: what entered and left the prefix cache, in order, for indexes elsewhere (the router's).

A page that lies in several tiers of a replica is reported under the best: an event of DEVICE or HOST replaces what was
said of the page before. A store is shared: an event of STORE says that the replica wrote the page there, or missed it,
and changes nothing in what its own tiers hold.

Owns:      the sequence numbers and a bounded buffer of events.
Never:     sends anything.
Invariant: seq grows by one an event; a reader that finds a gap has lost events and asks the cache for a snapshot.
Thread:    scheduler thread only.
"""

from collections import deque
from dataclasses import dataclass

from kvtransfer.pages import PageKey, PageKeys, Tier
from replicas.types import TokenIds


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PagesStored:
    """``tier`` is now the best that holds this run of consecutive pages (SGLang's and vLLM's BlockStored)."""

    seq: int
    keys: PageKeys  # [n]
    parent_key: PageKey | None  # key of the page before them; None at the start of a sequence
    page_size: int
    token_ids: TokenIds  # [n * page_size]
    tier: Tier = Tier.DEVICE


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PagesRemoved:
    """These pages left the replica's own tiers, or, with STORE, were not found in the store."""

    seq: int
    keys: PageKeys  # [n]
    tier: Tier = Tier.DEVICE  # STORE or not


@dataclass(frozen=True, slots=True, kw_only=True)
class AllCleared:
    """The replica's own tiers were emptied at once."""

    seq: int


CacheEvent = PagesStored | PagesRemoved | AllCleared


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSnapshot:
    """The cache's whole content after event ``seq``, as the events that would build it, parents first."""

    seq: int
    stored: tuple[PagesStored, ...]


class EventLog:
    """Events since the last drain; when ``capacity`` is exceeded the oldest are lost, which shows as a gap in seq."""

    def __init__(self, capacity: int = 65_536) -> None:
        self.seq = 0  # of the last event; 0 before the first
        self._events: deque[CacheEvent] = deque(maxlen=capacity)

    def stored(
        self,
        keys: PageKeys,
        parent_key: PageKey | None,
        page_size: int,
        token_ids: TokenIds,
        tier: Tier = Tier.DEVICE,
    ) -> None:
        self.seq += 1
        self._events.append(
            PagesStored(
                seq=self.seq, keys=keys, parent_key=parent_key, page_size=page_size, token_ids=token_ids, tier=tier
            )
        )

    def removed(self, keys: PageKeys, tier: Tier = Tier.DEVICE) -> None:
        self.seq += 1
        self._events.append(PagesRemoved(seq=self.seq, keys=keys, tier=tier))

    def cleared(self) -> None:
        self.seq += 1
        self._events.append(AllCleared(seq=self.seq))

    def drain(self) -> tuple[CacheEvent, ...]:
        events = tuple(self._events)
        self._events.clear()
        return events
