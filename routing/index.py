"""The pages that each replica's pool is expected to hold; one walk over a prompt's keys gives every replica's overlap.

Owns:      each replica's capacity and number of confirmed pages; what a decision or an event changes.
Never:     holds tokens; asks a replica.
Invariant: per replica, expected pages are at most its capacity (least recently used out first), and so are those that
           its events stored.
Thread:    the router's own.

Two sources. (a) Decisions: `expect` says that a replica will soon hold a prompt's pages. (b) The replica's events, in
order of their numbers (fleet_state.py): `stored` confirms pages, `removed` takes them out, predicted or not; from the
first on, what a request was expected to leave and did not is dropped once it has ended (`unexpect`).

    page_owners.py: which replicas hold each page      runs.py: the order in which a replica's expected pages were used

A replica that leaves, or reports an empty cache, gives up its bit, and no walk sees it from then on. Each write clears
the bit from a few pages; when no page has it, another replica may get it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtransfer.pages import PageKeys
from routing.page_owners import PageOwners, bits_of
from routing.runs import Expected, Pages, Run

# Python keeps an int of 60 bits in 32 bytes, one of 64 in 48. Two of a million pages share a key once in 2^21 indexes,
# and then the router errs by some pages; what the engine reuses is compared token by token.
KEY_BITS = np.uint64((1 << 60) - 1)


@dataclass(slots=True)
class _Replica:
    capacity: int  # pages
    expected: Expected
    num_confirmed: int = 0


class PrefixIndex:
    """The index of pages by replica; a replica is a small number of the caller's that it keeps until it leaves."""

    def __init__(self) -> None:
        self._owners = PageOwners()
        self._replicas: dict[int, _Replica] = {}

    def __len__(self) -> int:
        """Count the pages held by any replica, those still to be cleaned too."""
        return len(self._owners)

    def num_pages(self, replica: int) -> tuple[int, int]:
        """Return the (confirmed by events, only expected) pages of a replica."""
        state = self._replicas[replica]
        return state.num_confirmed, state.expected.num_pages

    def pages(self, replica: int) -> set[int]:
        """Return every page that a replica is expected to hold. Slow: for tests and for showing."""
        return self._owners.pages(self._replicas[replica].expected)

    def join(self, replica: int, *, capacity: int) -> None:
        """Add a replica that holds nothing yet; with ``capacity`` 0 it never will."""
        assert replica not in self._replicas, f"replica {replica} is there already"
        self._replicas[replica] = _Replica(capacity=capacity, expected=self._owners.join(replica))

    def leave(self, replica: int) -> None:
        """Forget a replica: no walk sees its pages from now on."""
        self._owners.leave(self._replicas.pop(replica).expected)

    def capacity(self, replica: int) -> int:
        return self._replicas[replica].capacity

    def overlap(self, pages: Pages, replicas: npt.NDArray[np.intp]) -> npt.NDArray[np.int64]:
        """Return [n]: how many of the first of ``pages`` each of ``replicas`` [n] holds without a hole."""
        return self._owners.overlap(pages, replicas)

    def expect(self, replica: int, pages: Pages, *, number: int) -> None:
        """Expect ``pages`` on ``replica`` by decision ``number`` (greater than any before); they count as used now."""
        state = self._replicas[replica]
        if not state.capacity:
            return
        mine = state.expected
        used: list[Run] = []
        lost: dict[Run, Pages] = {}  # by runs of which only part is used
        fresh: Run | None = None  # the last of ``used``, if it is of new pages
        source: Run | None = None  # the one that the last of ``used`` was cut out of, if it was
        for entry, run, part in self._owners.stretches(mine, pages):
            if run is not None:
                if run.number != number:  # else a key stands twice in the prompt
                    into = used[-1] if run is source else None
                    taken = self._owners.use(run, part, number, into)
                    if taken is not into:
                        used.append(taken)
                    if taken is not run:
                        lost.setdefault(run, []).extend(part)
                    fresh, source = None, run if taken is not run else None
            elif not bits_of(entry) & mine.bit:  # confirmed pages are left to the replica's events
                if fresh is None:
                    used.append(fresh := Run(owner=mine, number=number))
                    source = None
                self._owners.hold(mine, part, entry, fresh)
        for run, part in lost.items():
            mine.trim(run, part)
        mine.use(reversed(used))
        self._evict(state)
        self._owners.clean(len(pages))

    def unexpect(self, replica: int, pages: Pages, *, number: int) -> None:
        """Drop the pages that only decision ``number`` made expected and no event has confirmed."""
        mine = self._replicas[replica].expected
        for _, run, part in self._owners.stretches(mine, pages):
            if run is not None and run.number == number:
                self._owners.drop(mine, run, part)

    def stored(self, replica: int, pages: Pages) -> bool:
        """Confirm ``pages``. Return False if the replica cannot hold so many: the index is wrong about it."""
        state = self._replicas[replica]
        if not state.capacity:
            return True
        mine = state.expected
        for entry, run, part in self._owners.stretches(mine, pages):
            if run is None and bits_of(entry) & mine.bit:
                continue
            new = list(dict.fromkeys(part))
            room = state.capacity - state.num_confirmed
            full = len(new) > room
            del new[room:]
            if run is not None:
                self._owners.confirm(run, new)
            else:
                self._owners.hold(mine, new, entry, None)
            state.num_confirmed += len(new)
            if full:
                return False
        self._owners.clean(len(pages))
        return True

    def removed(self, replica: int, pages: Pages) -> None:
        """Remove ``pages`` from the replica, expected or confirmed."""
        state = self._replicas[replica]
        mine = state.expected
        for entry, run, part in self._owners.stretches(mine, list(dict.fromkeys(pages))):  # a key goes but once
            if run is not None or bits_of(entry) & mine.bit:
                num_dropped = self._owners.drop(mine, run, part)
                if run is None:
                    state.num_confirmed -= num_dropped

    def clear(self, replica: int) -> None:
        """Remove all pages of the replica, expected and confirmed."""
        state = self._replicas[replica]
        if state.num_confirmed or state.expected.num_pages:
            self.leave(replica)
            self.join(replica, capacity=state.capacity)

    def replace(self, replica: int, pages: Pages, *, keeps: Callable[[int], bool] = lambda number: True) -> None:
        """Set the confirmed pages to ``pages`` and keep the expected ones of decisions whose number ``keeps`` accepts.
        What is beyond the capacity is cut off."""
        before = self._replicas[replica].expected
        kept = [(run.number, before.live(run)) for run in before.runs() if keeps(run.number)]
        self.clear(replica)
        self.stored(replica, pages)
        for number, run_pages in kept:
            self.expect(replica, run_pages, number=number)

    def check(self) -> None:
        """Raises AssertionError if bits, counts or bounds do not agree."""
        self._owners.check({replica: state.expected for replica, state in self._replicas.items()})
        for replica, state in self._replicas.items():
            assert len(self.pages(replica)) == state.num_confirmed + state.expected.num_pages
            assert max(state.num_confirmed, state.expected.num_pages) <= state.capacity

    def _evict(self, state: _Replica) -> None:
        """Drop expected pages beyond the capacity: of the run used least recently, the deepest first."""
        mine = state.expected
        while (over := mine.num_pages - state.capacity) > 0:
            run = mine.pop_oldest()
            live = mine.live(run)
            self._owners.drop(mine, run, live[-over:])
            if run.num_live:
                mine.put_back(run, live[:-over])


def pages_of(keys: PageKeys) -> Pages:
    """Return the numbers that stand for ``keys`` in the index."""
    pages: Pages = (keys & KEY_BITS).tolist()
    return pages
