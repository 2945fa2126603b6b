"""The pages that replicas hold, by tier: on the device, on the device or the host, and in the stores that they share.

Owns:      two indexes (index.py): of the device pools, with what decisions expect there, and of all tiers of a replica,
           for those that have a host tier; and the pages that replicas reported to be in each store.
Never:     prices a load (policies.py).
Invariant: what a replica's events put on its device is in both of its indexes. A store's pages are at most
           STORE_PAGES, those reported longest ago out first; they count for every replica that names the store.
Thread:    the router's own.

In a replica's tree the device pages of a sequence are a prefix of the cached ones. So one walk of each index gives how
far both reach, and the run of pages in the store that begins there is what a replica could read besides.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtransfer.pages import Tier
from routing.index import PrefixIndex
from routing.runs import Pages
from routing.types import Ints

STORE_PAGES = 1 << 20  # known of one store: 100 MB; with 16 tokens a page, of 16 million tokens


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reach:
    """How many of a prompt's first pages each replica [n] has without a hole, each number at least the one before."""

    device: Ints
    own: Ints  # on its device or its host
    store: Ints  # with what it could read from its store


class TierIndex:
    """The index of pages by replica and tier; a replica is a small number of the caller's, as in `PrefixIndex`."""

    def __init__(self) -> None:
        self._device = PrefixIndex()
        self._own = PrefixIndex()
        self._host_pages = np.zeros(8, dtype=np.int64)  # capacity by replica
        self._store_of = np.zeros(8, dtype=np.int64)  # by replica: position in the next two
        self._store_names = [""]  # the first: no store
        self._stores: list[dict[int, None]] = [{}]  # the pages of each, the one reported longest ago first

    def join(self, replica: int, *, capacity: int, host_pages: int = 0) -> None:
        """Add a replica that holds nothing yet. ``capacity``: pages of its pool; with 0 it never will."""
        if replica >= len(self._host_pages):
            more = np.zeros(2 * replica - len(self._host_pages), dtype=np.int64)
            self._host_pages, self._store_of = np.append(self._host_pages, more), np.append(self._store_of, more)
        self._device.join(replica, capacity=capacity)
        self._host_pages[replica], self._store_of[replica] = host_pages, 0
        if host_pages:
            self._own.join(replica, capacity=capacity + host_pages)

    def leave(self, replica: int) -> None:
        """Forget a replica; what it told of its store stays."""
        self._device.leave(replica)
        if self._host_pages[replica]:
            self._own.leave(replica)
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
        device = own = self._device.overlap(pages, replicas)
        with_host = self._host_pages[replicas] > 0
        if with_host.any():
            own = device.copy()
            own[with_host] = np.maximum(device[with_host], self._own.overlap(pages, replicas[with_host]))
        store, stores = own, self._store_of[replicas]
        for number, held in enumerate(self._stores):
            of_it = stores == number
            if held and of_it.any():
                store = own.copy() if store is own else store
                store[of_it] = _run_ends(pages, held)[own[of_it]]
        return Reach(device=device, own=own, store=store)

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

    def removed(self, replica: int, pages: Pages, tier: Tier = Tier.DEVICE) -> None:
        """Note that ``pages`` left the replica's own tiers, or with STORE that its store has not got them."""
        if tier is Tier.STORE:
            held = self._stores[self._store_of[replica]]
            for page in pages:
                held.pop(page, None)
            return
        self._device.removed(replica, pages)
        if self._host_pages[replica]:
            self._own.removed(replica, pages)

    def replace(self, replica: int, device: Pages, host: Pages, *, keeps: Callable[[int], bool]) -> None:
        """Set what the replica's own tiers hold; ``keeps``: as in `PrefixIndex.replace`."""
        self._device.replace(replica, device, keeps=keeps)
        if self._host_pages[replica]:
            self._own.replace(replica, device + host)

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
