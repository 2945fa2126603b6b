"""Quarantine: pages that have left their request while a peer of a failed KV transfer may still read or write them.

Owns:      the receipts, and through them the pages and the locked paths.
Never:     decides when the pages are safe: replicas/disagg does, which knows the peer; no clock does.
Invariant: a quarantined page is in no request, in no tree and not free.
Thread:    scheduler thread only.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from replicas.cache.base import Lock
from replicas.memory.allocator import Pages


@dataclass(frozen=True, slots=True, eq=False)
class Detained:
    """The receipt for pages that one request left behind; give it back exactly once."""

    rid: str
    pages: Pages  # that were the request's own
    lock: Lock | None  # on the tree's pages that are still read


class Quarantine:
    """The receipts for quarantined pages of one pool."""

    def __init__(self) -> None:
        self._receipts: dict[int, Detained] = {}  # by identity
        self.num_pages = 0

    def __iter__(self) -> Iterator[Detained]:
        return iter(self._receipts.values())

    def __len__(self) -> int:
        return len(self._receipts)

    def add(self, receipt: Detained) -> None:
        self._receipts[id(receipt)] = receipt
        self.num_pages += len(receipt.pages)

    def remove(self, receipt: Detained) -> None:
        """Remove a receipt; the caller frees its pages and gives back its lock."""
        assert id(receipt) in self._receipts, f"the pages of {receipt.rid} have left quarantine before"
        del self._receipts[id(receipt)]
        self.num_pages -= len(receipt.pages)
