"""Which target of a push gets which path: values in, choices out.

Owns:      what each target has of each path of one push, and how much it was sent.
Never:     waits, or knows connections: a target is any hashable value.
Invariant: a path goes to the target that lacks least of it, so that no token travels that is there already, and a path
           stays with the path that it continues; of equal targets, to the one that was sent least.
Thread:    the replica's event loop.
"""

from collections.abc import Sequence
from typing import Generic, TypeVar

from kvtransfer.migration.wire import Path

OFFER_BYTES = 16 << 20  # of tokens in one offer
Target = TypeVar("Target")


class Shares(Generic[Target]):
    """The paths of one push, and the targets that share them."""

    def __init__(self, paths: Sequence[Path], page_size: int) -> None:
        self.paths = paths
        self._ends = [path.num_pages(page_size) for path in paths]
        self._have: dict[Target, list[int]] = {}
        self._bytes: dict[Target, int] = {}
        self._safe: set[int] = set()  # paths of which a target has all

    def join(self, target: Target, pages: Sequence[int]) -> None:
        """Add a target that has the first ``pages`` of each path."""
        self._have[target] = [min(here, end) for here, end in zip(pages, self._ends, strict=True)]
        self._bytes[target] = 0

    def lose(self, target: Target) -> None:
        del self._have[target], self._bytes[target]

    def choose(self, index: int) -> tuple[Target, int] | None:
        """Return the target for path ``index`` and the first page that it lacks; None if one lacks none, or there is no
        target."""
        path = self.paths[index]
        if path.parent >= 0:  # what has been sent since is there too
            for pages in self._have.values():
                pages[index] = max(pages[index], min(pages[path.parent], path.first_page))
        best = max(self._have, key=lambda each: (self._have[each][index], -self._bytes[each]), default=None)
        if best is None:
            return None
        first = self._have[best][index]
        if first == self._ends[index]:
            self._safe.add(index)
            return None
        return best, first

    def sent(self, target: Target, index: int, num_pages: int, num_bytes: int) -> None:
        """Note that ``target`` has taken ``num_pages`` more of path ``index``, of ``num_bytes`` that it was sent."""
        self._bytes[target] += num_bytes
        self._have[target][index] += num_pages
        if self._have[target][index] == self._ends[index]:
            self._safe.add(index)

    @property
    def value_kept(self) -> float:
        """The share of the expected hits a second, times pages, that some target has."""
        values = [path.rate * (end - path.first_page) for path, end in zip(self.paths, self._ends, strict=True)]
        return sum(values[index] for index in self._safe) / sum(values) if values else 1.0

    def check(self) -> None:
        """Raises AssertionError if a target has more of a path than there is."""
        assert self._have.keys() == self._bytes.keys()
        for pages in self._have.values():
            assert all(0 <= here <= end for here, end in zip(pages, self._ends, strict=True))


def bounded(paths: Sequence[Path]) -> list[Path]:
    """Return as many of the first ``paths`` as make an offer of OFFER_BYTES of tokens."""
    total, found = 0, []
    for path in paths:
        total += len(path.token_ids)
        if total > OFFER_BYTES:
            break
        found.append(path)
    return found
