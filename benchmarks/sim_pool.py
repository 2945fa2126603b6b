"""The KV pool of a simulated replica: pages by key, the least recently used given up first.

Owns:      which pages are cached, who holds them, and the log of what was stored and removed.
Never:     knows time or tokens; it counts pages.
Invariant: cached + private == used <= capacity; a page in use by a request is never evicted; a page is evicted before
           the page in front of it in its sequence (``release`` makes deep pages older): what is cached is prefixes.
"""

from collections import OrderedDict
from collections.abc import Sequence

from kvtransfer.pages import PageKey

Change = tuple[bool, tuple[PageKey, ...]]  # stored (else removed), keys in order


class SimPool:
    """A prefix cache of ``capacity`` pages. Keys are chained hashes: a key stands for its page and all before it."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.num_private = 0  # pages being computed, or not whole
        self._idle: OrderedDict[PageKey, None] = OrderedDict()  # evictable, least recently used first
        self._users: dict[PageKey, int] = {}  # cached and in use: by how many requests
        self._changes: list[Change] = []

    @property
    def num_cached(self) -> int:
        return len(self._idle) + len(self._users)

    @property
    def num_used(self) -> int:
        return self.num_cached + self.num_private

    @property
    def utilization(self) -> float:
        """Share of the pool that a new request cannot have."""
        return (len(self._users) + self.num_private) / self.capacity

    def match_len(self, keys: Sequence[PageKey]) -> int:
        """How many of the first ``keys`` are cached. Changes nothing."""
        for index, key in enumerate(keys):
            if key not in self._users and key not in self._idle:
                return index
        return len(keys)

    def take(self, keys: Sequence[PageKey], extra: int) -> bool:
        """Use the cached ``keys`` and take ``extra`` private pages, evicting what must go: all of it or nothing."""
        revived = sum(key not in self._users for key in keys)
        if len(self._users) + revived + self.num_private + extra > self.capacity:
            return False
        for key in keys:
            self._use(key)
        self._evict(self.num_used + extra - self.capacity)
        self.num_private += extra
        return True

    def store(self, keys: Sequence[PageKey]) -> None:
        """Private pages, one for each of ``keys``, become cached and stay in use; those there already are freed."""
        new: list[PageKey] = []
        for key in keys:
            if key not in self._users and key not in self._idle:
                new.append(key)
            self._use(key)
        self.num_private -= len(keys)
        if new:
            self._changes.append((True, tuple(new)))

    def release(self, keys: Sequence[PageKey], extra: int) -> None:
        """A request ends: its cached ``keys`` (from the first page on) may be evicted, ``extra`` pages are free."""
        for key in reversed(keys):
            users = self._users[key] - 1
            if users:
                self._users[key] = users
            else:
                del self._users[key]
                self._idle[key] = None
        self.num_private -= extra

    def drain(self) -> list[Change]:
        """What changed since the last drain, in order."""
        changes, self._changes = self._changes, []
        return changes

    def cached_keys(self) -> tuple[PageKey, ...]:
        """All cached pages; those in use count as the most recently used."""
        return (*self._idle, *self._users)

    def check(self) -> None:
        """Raises AssertionError if pages do not add up."""
        assert self.num_used <= self.capacity, f"{self.num_used} pages in a pool of {self.capacity}"
        assert self.num_private >= 0, "more private pages were given back than taken"
        assert not self._idle.keys() & self._users.keys(), "a page is both in use and evictable"
        assert all(users > 0 for users in self._users.values())

    def _use(self, key: PageKey) -> None:
        self._idle.pop(key, None)
        self._users[key] = self._users.get(key, 0) + 1

    def _evict(self, num: int) -> None:
        if num > 0:
            self._changes.append((False, tuple(self._idle.popitem(last=False)[0] for _ in range(num))))
