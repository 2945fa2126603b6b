"""Cache events: what entered and left the prefix cache, in order, for indexes elsewhere (the router's).

A page that lies in several tiers of a replica is reported under the best: an event of DEVICE or HOST replaces what was
said of the page before. A store is shared: an event of STORE says that the replica wrote the page there, or missed it,
and changes nothing in what its own tiers hold.

Where pages have parts (parts.py), a reader hears which cached ones do, when events are drained: `PartsChanged`.

Owns:      the sequence numbers and a bounded buffer of events; which cached pages are known to have a part.
Never:     sends anything.
Invariant: seq grows by one an event; a reader that finds a gap has lost events and asks the cache for a snapshot.
Thread:    scheduler thread only.
"""

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvtransfer.pages import NO_KEYS, PageKey, PageKeys, Tier
from replicas.memory.allocator import Pages
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
    salt: str = ""  # `GenerateRequest.namespace`


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PagesRemoved:
    """These pages left the replica's own tiers, or, with STORE, were not found in the store."""

    seq: int
    keys: PageKeys  # [n]
    tier: Tier = Tier.DEVICE  # the last of its own that had them; or STORE
    idle_s: float = 0.0  # since they were last used
    tenant: str = ""  # whose request needed the room; "": of several tenants, or none


@dataclass(frozen=True, slots=True, kw_only=True)
class AllCleared:
    """The replica's own tiers were emptied at once."""

    seq: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PartsChanged:
    """These pages have a part now, or, where ``there`` is False, none any more; their K and V stay as they were.

    Pages are stored without a part; one that is removed loses its own by an event too.
    """

    seq: int
    keys: PageKeys  # [n]
    there: bool
    tier: Tier = Tier.DEVICE  # which has the part, or HOST


CacheEvent = PagesStored | PagesRemoved | AllCleared | PartsChanged


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSnapshot:
    """The cache's whole content after event ``seq``, as the events that would build it, parents first."""

    seq: int
    stored: tuple[PagesStored, ...]
    parts: PageKeys = field(default_factory=lambda: NO_KEYS)  # those of the stored pages that have one
    host_parts: PageKeys = field(default_factory=lambda: NO_KEYS)  # those whose copy on the host has one


class PartLog:
    """Which cached pages have a part, as events have told it, and the pages for which that may be wrong by now."""

    def __init__(self, part: npt.NDArray[np.int32]) -> None:
        """``part``: by page; 0: it has none. Its owner writes to it, and says so by `touch`."""
        self._part = part
        self._keys = np.zeros(len(part), dtype=np.uint64)  # by page; 0: it is not cached
        self._told = np.zeros(len(part), dtype=np.uint64)  # by page: the key of which a part was told; 0: of none
        self._touched: list[Pages] = []
        self._on_host: dict[PageKey, None] = {}  # as events have told it
        self._host_changes: dict[PageKey, bool] = {}  # since

    def on_host(self, key: PageKey, there: bool) -> None:
        """Take note that the copy of a page on the host has a part now, or none."""
        self._host_changes[key] = there

    def name(self, pages: Pages, keys: PageKeys) -> None:
        """Take note that ``pages`` are cached now, under ``keys``."""
        self._keys[pages] = keys
        self._touched.append(pages)

    def forget(self, pages: Pages) -> None:
        """Take note that ``pages`` are freed."""
        self._keys[pages] = 0
        self.touch(pages)

    def touch(self, pages: Pages) -> None:
        """Take note that parts of ``pages`` have come or gone."""
        known = pages[(self._keys[pages] > 0) | (self._told[pages] > 0)]
        if len(known):
            self._touched.append(known)

    def changes(self) -> tuple[PageKeys, PageKeys]:
        """Return the keys whose part has gone since the last call, and those that got one: to be told in this order,
        since a key can be another page's by now."""
        if not self._touched:
            return NO_KEYS, NO_KEYS
        pages = np.unique(np.concatenate(self._touched))
        self._touched = []
        was, now = self._told[pages], np.where(self._part[pages] > 0, self._keys[pages], np.uint64(0))
        self._told[pages] = now
        changed = was != now
        return was[changed & (was > 0)], now[changed & (now > 0)]

    def host_changes(self) -> tuple[PageKeys, PageKeys]:
        """Return likewise the keys of what the host has."""
        changes, self._host_changes = self._host_changes, {}
        gone = [key for key, there in changes.items() if not there and key in self._on_host]
        new = [key for key, there in changes.items() if there and key not in self._on_host]
        for key in gone:
            del self._on_host[key]
        self._on_host.update(dict.fromkeys(new))
        return np.array(gone, dtype=np.uint64), np.array(new, dtype=np.uint64)

    def all_cleared(self) -> None:
        """Take note that nothing is cached any more: a reader of `AllCleared` knows it."""
        self._told[:] = 0
        self._on_host.clear()
        self._host_changes.clear()

    def told_on_host(self) -> PageKeys:
        """Return all keys of which a part on the host was told."""
        return np.array(list(self._on_host), dtype=np.uint64)

    def told(self) -> PageKeys:
        """Return all keys of which a part was told. O(pool)."""
        return self._told[self._told > 0]


class EventLog:
    """Events since the last drain; when ``capacity`` is exceeded the oldest are lost, which shows as a gap in seq."""

    def __init__(self, capacity: int = 65_536) -> None:
        self.seq = 0  # of the last event; 0 before the first
        self.parts: PartLog | None = None  # set once, where pages have parts
        self.needed_by = ""  # the tenant for whose request pages are removed now
        self._events: deque[CacheEvent] = deque(maxlen=capacity)

    def stored(
        self,
        keys: PageKeys,
        parent_key: PageKey | None,
        page_size: int,
        token_ids: TokenIds,
        tier: Tier = Tier.DEVICE,
        pages: Pages | None = None,
        salt: str = "",
    ) -> None:
        """``pages``: [n] of the device, where they may have parts."""
        if self.parts is not None and pages is not None and len(pages):
            self.parts.name(pages, keys)
        self.seq += 1
        self._events.append(
            PagesStored(
                seq=self.seq, keys=keys, parent_key=parent_key, page_size=page_size, token_ids=token_ids, tier=tier,
                salt=salt,
            )
        )

    def removed(self, keys: PageKeys, tier: Tier = Tier.DEVICE, *, idle_s: float = 0.0) -> None:
        self.seq += 1
        removed = PagesRemoved(seq=self.seq, keys=keys, tier=tier, idle_s=idle_s, tenant=self.needed_by)
        self._events.append(removed)

    def cleared(self) -> None:
        if self.parts is not None:
            self.parts.all_cleared()
        self.seq += 1
        self._events.append(AllCleared(seq=self.seq))

    def tell_parts(self) -> None:
        """Record which parts have come and gone since the last call."""
        if self.parts is None:
            return
        for tier, changes in ((Tier.DEVICE, self.parts.changes()), (Tier.HOST, self.parts.host_changes())):
            for keys, there in zip(changes, (False, True), strict=True):
                if len(keys):
                    self.seq += 1
                    self._events.append(PartsChanged(seq=self.seq, keys=keys, there=there, tier=tier))

    def drain(self) -> tuple[CacheEvent, ...]:
        self.tell_parts()
        events = tuple(self._events)
        self._events.clear()
        return events
