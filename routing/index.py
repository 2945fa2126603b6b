"""The pages that each replica's pool is expected to hold; one walk over a prompt's keys gives every replica's overlap.

Owns:      each replica's capacity and number of confirmed pages; what a decision or an event changes.
Never:     holds tokens; asks a replica.
Invariant: per replica, expected pages are at most its capacity (least recently used out first), and so are those that
           its events stored.
Thread:    the router's own.

Two sources. (a) Decisions: `expect` says that a replica will soon hold a prompt's pages. (b) The replica's events, in
order of their numbers (fleet_state.py): `stored` confirms pages, `removed` takes them out, predicted or not; from the
first on, what a request was expected to leave and did not is dropped once it has ended (`unexpect`).

    page_owners.py: which replicas hold each page, and the order in which a replica's expected pages were used

Two such indexes make a `TierIndex`: of the device pools, with what decisions expect there, and of all tiers of a
replica, for those that have a host tier. In a replica's tree the device pages of a sequence are a prefix of the cached
ones. So one walk of each index gives how far both reach, and the run of pages in the store that begins there is what a
replica could read besides. Of a replica whose pages have parts (`Borders`), what counts ends at the last page behind
which a request can go on. A store's pages are at most STORE_PAGES, those reported longest ago out first; they count for
every replica that names the store.

A replica that leaves, or reports an empty cache, gives up its bit, and no walk sees it from then on. Each write clears
the bit from a few pages; when no page has it, another replica may get it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtransfer.pages import PageKeys, Tier
from routing.page_owners import Expected, PageOwners, Pages, Run, bits_of
from routing.types import IndexSnapshot, Ints
from routing.why import Departure, Departures

# Python keeps an int of 60 bits in 32 bytes, one of 64 in 48. Two of a million pages share a key once in 2^21 indexes,
# and then the router errs by some pages; what the engine reuses is compared token by token.
KEY_BITS = np.uint64((1 << 60) - 1)
STORE_PAGES = 1 << 20  # known of one store: 100 MB; with 16 tokens a page, of 16 million tokens


@dataclass(slots=True)
class _Replica:
    capacity: int  # pages
    expected: Expected
    num_confirmed: int = 0


class PrefixIndex:
    """The index of pages by replica; a replica is a small number of the caller's that it keeps until it leaves."""

    def __init__(self, departures: Departures | None = None) -> None:
        self._owners = PageOwners(departures)
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

    def leave(self, replica: int, how: Departure | None = None) -> None:
        """Forget a replica: no walk sees its pages from now on. ``how``: they left."""
        self._owners.leave(self._replicas.pop(replica).expected, how)

    def departure(self, page: int) -> Departure | None:
        return self._owners.departure(page)

    def is_held(self, page: int, replica: int | None = None) -> bool:
        """Whether any replica holds ``page``, or ``replica`` does."""
        return self._owners.is_held(page, None if replica is None else self._replicas[replica].expected)

    def expected(self, replica: int) -> Expected:
        return self._replicas[replica].expected

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
            if entry == mine.bit:
                self._owners.forget(part)
                state.num_confirmed -= len(part)
            elif run is not None or bits_of(entry) & mine.bit:
                num_dropped = self._owners.drop(mine, run, part)
                if run is None:
                    state.num_confirmed -= num_dropped

    def clear(self, replica: int, how: Departure | None = None) -> None:
        """Remove all pages of the replica, expected and confirmed. ``how``: they left."""
        state = self._replicas[replica]
        if state.num_confirmed or state.expected.num_pages:
            self.leave(replica, how)
            self.join(replica, capacity=state.capacity)

    def replace(
        self, replica: int, pages: Pages, *, keeps: Callable[[int], bool] = lambda number: True,
        how: Departure | None = None,
    ) -> None:  # fmt: skip
        """Set the confirmed pages to ``pages`` and keep the expected ones of decisions whose number ``keeps`` accepts.
        What is beyond the capacity is cut off. ``how``: the others left."""
        before = self._replicas[replica].expected
        kept = [(run.number, before.live(run)) for run in before.runs() if keeps(run.number)]
        self.clear(replica, how)
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reach:
    """How many of a prompt's first pages each replica [n] has without a hole, each number at least the one before."""

    device: Ints
    own: Ints  # on its device or its host
    store: Ints  # with what it could read from its store
    kept: Ints  # on its device or its host, whether it could go on behind them or not


class Borders:
    """Behind which pages of one replica a request can go on: those whose last pages all have a part.

    Events tell of parts (replicas/cache/parts.py). A page that is only expected will have one, or, with ``at_ends``, if
    it ends what a decision expects: a state is kept there alone.
    """

    def __init__(self, num_pages: int, *, at_ends: bool) -> None:
        """``num_pages``: the last ones before a border, whose parts are needed."""
        self.parts: set[int] = set()  # on its device
        self.host_parts: set[int] = set()
        self._num_pages, self._at_ends = num_pages, at_ends

    def last(self, pages: Pages, depth: int, expected: Expected, *, with_host: bool = False) -> int:
        """Return how many of the first ``depth`` of ``pages``, which the device has or is ``expected`` to have, or
        ``with_host`` the host, are before its last border."""
        end = at = depth
        parts, some_expected = self.parts, expected.num_pages > 0
        host_parts = self.host_parts if with_host else set[int]()
        while at and end - at < self._num_pages:
            at -= 1
            if pages[at] in parts or pages[at] in host_parts:
                continue
            if not (some_expected and self._will_have(pages[at], expected)):
                end = at
        return end

    def _will_have(self, page: int, expected: Expected) -> bool:
        run = expected.run_of(page)
        return run is not None and (not self._at_ends or run.pages[-1] == page)


class TierIndex:
    """The index of pages by replica and tier; a replica is a small number of the caller's, as in `PrefixIndex`."""

    def __init__(self, departures: Departures | None = None) -> None:
        """``departures``: told of the pages that leave replicas' own tiers."""
        self._departures = departures
        self._device = PrefixIndex(departures)
        self._own = PrefixIndex(departures)
        self._host_pages = np.zeros(8, dtype=np.int64)  # capacity by replica
        self._store_of = np.zeros(8, dtype=np.int64)  # by replica: position in the next two
        self._store_names = [""]  # the first: no store
        self._stores: list[dict[int, None]] = [{}]  # the pages of each, the one reported longest ago first
        self._borders: dict[int, Borders] = {}  # by replica

    def join(self, replica: int, *, capacity: int, host_pages: int = 0, borders: Borders | None = None) -> None:
        """Add a replica that holds nothing yet. ``capacity``: pages of its pool; with 0 it never will. ``borders``:
        None where a request can go on behind any page."""
        if replica >= len(self._host_pages):
            more = np.zeros(2 * replica - len(self._host_pages), dtype=np.int64)
            self._host_pages, self._store_of = np.append(self._host_pages, more), np.append(self._store_of, more)
        self._device.join(replica, capacity=capacity)
        self._host_pages[replica], self._store_of[replica] = host_pages, 0
        if borders is not None:
            self._borders[replica] = borders
        if host_pages:
            self._own.join(replica, capacity=capacity + host_pages)

    def departure(self, page: int) -> Departure | None:
        """Return how ``page`` left a replica, where its departures have not been told."""
        return self._device.departure(page) or self._own.departure(page)

    def is_held(self, page: int, replica: int | None = None) -> bool:
        """Whether any replica's own tiers hold ``page``, or those of ``replica``."""
        on_host = self._own if replica is None or self._host_pages[replica] else None
        return self._device.is_held(page, replica) or (on_host is not None and on_host.is_held(page, replica))

    def leave(self, replica: int, how: Departure | None = None) -> None:
        """Forget a replica, whose pages left ``how``; what it told of its store stays."""
        self._device.leave(replica, how)
        self._borders.pop(replica, None)
        if self._host_pages[replica]:
            self._own.leave(replica, how)
        self._host_pages[replica] = 0

    def sizes(self, replica: int) -> tuple[int, int]:
        """Return how many pages its device and its host hold at most."""
        return self._device.capacity(replica), int(self._host_pages[replica])

    def use_store(self, replica: int, store: str) -> None:
        """Count the pages of ``store`` for ``replica`` from now on; "": those of none. Not if it may hold no page."""
        if not self._device.capacity(replica):
            return
        if store not in self._store_names:
            self._store_names.append(store)
            self._stores.append({})
        self._store_of[replica] = self._store_names.index(store)

    def store(self, replica: int) -> str:
        return self._store_names[int(self._store_of[replica])]

    def reach(self, pages: Pages, replicas: npt.NDArray[np.intp]) -> Reach:
        """Return how far ``pages`` are held by each of ``replicas`` [n]."""
        device = own = kept = self._device.overlap(pages, replicas)
        if self._borders:
            device = own = self._at_borders(pages, replicas, kept)
        with_host = self._host_pages[replicas] > 0
        if with_host.any():
            own, kept = device.copy(), kept.copy()
            has = kept[with_host] = np.maximum(kept[with_host], self._own.overlap(pages, replicas[with_host]))
            if self._borders:
                has = self._at_borders(pages, replicas[with_host], has, with_host=True)
            own[with_host] = np.maximum(device[with_host], has)
        store, stores = own, self._store_of[replicas]
        for number, held in enumerate(self._stores):
            of_it = stores == number
            if held and of_it.any():
                store = own.copy() if store is own else store
                store[of_it] = _run_ends(pages, held)[own[of_it]]
        return Reach(device=device, own=own, store=store, kept=kept)

    def confirmed(self, pages: Pages, replica: int, first: int) -> int:
        """Return how many of ``pages`` come before the first one, from ``first`` on, that the device is only expected
        to have."""
        expected = self._device.expected(replica)
        if not expected.num_pages:
            return len(pages)
        return next((at for at in range(first, len(pages)) if expected.run_of(pages[at]) is not None), len(pages))

    def num_pages(self, replica: int) -> tuple[int, int]:
        """Return the (confirmed by events, only expected) pages of a replica's device."""
        return self._device.num_pages(replica)

    def pages(self, replica: int) -> set[int]:
        """Return every page that a replica's device is expected to hold. Slow: for tests and for showing."""
        return self._device.pages(replica)

    def expect(self, replica: int, pages: Pages, *, number: int) -> None:
        """Expect ``pages`` on the replica's device, as `PrefixIndex.expect` does."""
        self._device.expect(replica, pages, number=number)

    def unexpect(self, replica: int, pages: Pages, *, number: int) -> None:
        self._device.unexpect(replica, pages, number=number)

    def stored(self, replica: int, pages: Pages, tier: Tier = Tier.DEVICE) -> bool:
        """Note that ``tier`` is now the best of the replica's that holds ``pages``; with STORE, that its store does.

        Return False if the replica cannot hold so many: the index is wrong about it.
        """
        if tier is Tier.STORE:
            self._add_to_store(replica, pages)
            return True
        fits = True
        if tier is Tier.DEVICE:
            fits = self._device.stored(replica, pages)
        else:
            self._device.removed(replica, pages)
        if self._host_pages[replica]:
            fits = self._own.stored(replica, pages) and fits
        return fits

    def removed(
        self, replica: int, pages: Pages, tier: Tier = Tier.DEVICE, how: Departure | None = None
    ) -> None:
        """Note that ``pages`` left the replica's own tiers ``how``, or with STORE that its store has not got them."""
        if tier is Tier.STORE:
            held = self._stores[self._store_of[replica]]
            for page in pages:
                held.pop(page, None)
            return
        if self._departures is not None and how is not None:
            self._departures.add(pages, how)
        self._device.removed(replica, pages)
        if self._host_pages[replica]:
            self._own.removed(replica, pages)

    def parted(self, replica: int, pages: Pages, *, there: bool, tier: Tier = Tier.DEVICE) -> None:
        """Note that ``pages`` of the replica's device, or their copies on its host, have a part now, or none."""
        if (borders := self._borders.get(replica)) is not None:
            parts = borders.parts if tier is Tier.DEVICE else borders.host_parts
            (parts.update if there else parts.difference_update)(pages)

    def replace(
        self, replica: int, snapshot: IndexSnapshot, *, keeps: Callable[[int], bool], how: Departure | None = None
    ) -> None:
        """Set what the replica's own tiers hold; ``keeps`` and ``how``: as in `PrefixIndex.replace`."""
        device = pages_of(snapshot.keys)
        self._device.replace(replica, device, keeps=keeps, how=how)
        if self._host_pages[replica]:
            self._own.replace(replica, device + pages_of(snapshot.host_keys), how=how)
        if (borders := self._borders.get(replica)) is not None:
            borders.parts = set(pages_of(snapshot.part_keys))
            borders.host_parts = set(pages_of(snapshot.host_part_keys))

    def check(self) -> None:
        """Raises AssertionError if the indexes do not add up, or a device page is in one of them alone."""
        self._device.check()
        self._own.check()
        assert len(self._store_names) == len(self._stores)
        assert not self._stores[0], "pages of no store"
        assert all(len(held) <= STORE_PAGES for held in self._stores)
        for replica in np.flatnonzero(self._host_pages).tolist():
            num_device, num_own = self._device.num_pages(replica)[0], self._own.num_pages(replica)
            assert num_device <= num_own[0], f"replica {replica}: more pages on its device than in all of its tiers"
            assert num_own[1] == 0

    def _at_borders(
        self, pages: Pages, replicas: npt.NDArray[np.intp], held: Ints, *, with_host: bool = False
    ) -> Ints:
        """Return [n] how far ``replicas`` can go on, which hold [n] of the first of ``pages`` on their devices, or
        ``with_host`` on their hosts too."""
        device = held.copy()
        for at in np.flatnonzero(held).tolist():
            replica = int(replicas[at])
            if (borders := self._borders.get(replica)) is not None:
                expected = self._device.expected(replica)
                device[at] = borders.last(pages, int(held[at]), expected, with_host=with_host)
        return device

    def _add_to_store(self, replica: int, pages: Pages) -> None:
        if not self._store_of[replica]:
            return
        held = self._stores[self._store_of[replica]]
        for page in pages:
            held.pop(page, None)
            held[page] = None
        while len(held) > STORE_PAGES:
            del held[next(iter(held))]


def _run_ends(pages: Pages, held: dict[int, None]) -> Ints:
    """Return [len(pages) + 1]: for each page the first one from it on that is not in ``held``."""
    missing = np.flatnonzero(np.fromiter((page not in held for page in pages), dtype=bool, count=len(pages)))
    at = np.arange(len(pages) + 1)
    return np.append(missing, len(pages))[np.searchsorted(missing, at)]
