"""The replicas that hold each page, and what decisions expect one of them to hold: runs of pages, in order of use.

Owns:      page -> entry: the bits of the replicas that hold it, or the run of the only one, where it is only expected;
           the bits; the sweep that clears retired bits. Of each replica: its runs and their order, and which run a page
           is in where other replicas hold the page too.
Never:     knows how much a replica may hold, or where a page comes from (index.py).
Invariant: a page has an entry iff a replica holds it, or one did and the sweep has not reached the page yet. A bit is
           a present replica's, or retired, or free; never two of them. An expected page is live in exactly one run,
           that of the last decision that used it: the page's entry is the run itself if no other replica holds it, and
           `shared` has the run otherwise.
Thread:    the router's own.

Neighbours in a prompt mostly have the same entry. So work is done by stretches of one entry, which are found in C, and
neighbours share the int that is their entry: with 1,000 replicas it takes 160 bytes.

A prompt that begins like an earlier one uses that one's run again: one step in the order of use for all its pages.
If only part of a run is used again, the part becomes a run of its own, and is used as a whole from then on. A page that
an event confirms or removes leaves its run: it is no longer live, even while the run's list still has it.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby, islice

import numpy as np
import numpy.typing as npt

from routing.why import Departure, Departures

Pages = list[int]  # page keys of 60 bits
# Dead runs in the order of use, and stale pages in lists, that are not worth collecting. With events, every decision's
# run is soon dead (confirmed); each takes about 150 bytes.
SLACK = 256


@dataclass(slots=True, eq=False)
class Run:
    """Pages in the order of their prompt, last used by one decision."""

    owner: "Expected"
    number: int  # of the last decision that used it
    pages: Pages = field(default_factory=list)
    num_live: int = 0  # of ``pages``
    times: int = 0  # that it stands in the order of use; the last place counts

    @property
    def whole(self) -> bool:
        return self.num_live == len(self.pages)


Entries = dict[int, "int | Run"]  # page -> bits of those that hold it, or the run of the only one that expects it


class Expected:
    """One replica's runs, by its bit in ``entries``, the table of page_owners.py (only read here)."""

    def __init__(self, bit: int, entries: Entries) -> None:
        self.bit = bit
        self.shared: dict[int, Run] = {}
        self.num_pages = 0  # live in all runs
        self._num_runs = 0  # that have live pages
        self._entries = entries
        self._order: deque[Run] = deque()  # oldest first
        self._listed = 0  # pages in the lists of all runs, live or not

    def run_of(self, page: int) -> Run | None:
        """Return the run in which ``page`` is live; None if it is not expected."""
        value = self._entries.get(page)
        if isinstance(value, Run):
            return value if value.owner is self else None
        return self.shared.get(page)

    def live(self, run: Run) -> Pages:
        """Return the pages that are live in ``run``, in order."""
        if run.whole:
            return run.pages
        return [page for page in run.pages if self.run_of(page) is run]

    def add(self, run: Run, pages: Iterable[int]) -> None:
        """Append ``pages``, all different and new here, to ``run`` as live."""
        before = len(run.pages)
        run.pages += pages
        num_added = len(run.pages) - before
        if num_added and not run.num_live:
            self._num_runs += 1
        run.num_live += num_added
        self.num_pages += num_added
        self._listed += num_added

    def lose(self, run: Run, num_pages: int) -> None:
        """Record that ``num_pages`` of ``run`` are no longer live."""
        run.num_live -= num_pages
        self.num_pages -= num_pages
        if num_pages and not run.num_live:
            self._num_runs -= 1
            self._relist(run, [])

    def trim(self, run: Run, lost: Pages) -> None:
        """Cut ``lost`` off the front of ``run``'s list, if it begins with them: the rest is whole again."""
        if run.pages[: len(lost)] == lost:
            self._relist(run, run.pages[len(lost) :])

    def use(self, runs: Iterable[Run]) -> None:
        """Mark ``runs`` as used now, the first of them least recently."""
        for run in runs:
            run.times += 1
            self._order.append(run)
        if len(self._order) > 2 * self._num_runs + SLACK or self._listed > 2 * self.num_pages + SLACK:
            self._compact()

    def pop_oldest(self) -> Run:
        """Remove and return the run used least recently; there must be one."""
        while True:
            run = self._order.popleft()
            run.times -= 1
            if not run.times and run.num_live:
                return run

    def put_back(self, run: Run, pages: Pages) -> None:
        """Make ``run``, just popped, the oldest again, with ``pages``: all its live ones."""
        self._relist(run, pages)
        run.times = 1
        self._order.appendleft(run)

    def runs(self) -> list[Run]:
        """Return the runs with live pages, oldest first."""
        newest_first = dict.fromkeys(run for run in reversed(self._order) if run.num_live)
        return list(newest_first)[::-1]

    def check(self) -> None:
        """Raises AssertionError if the runs and the index's table do not agree."""
        expected = {page for page, value in self._entries.items() if isinstance(value, Run) and value.owner is self}
        assert not expected & self.shared.keys()
        expected |= self.shared.keys()
        runs = self.runs()
        live = [page for run in runs for page in self.live(run)]
        assert set(live) == expected, "an expected page would never be evicted, or one that is not would be"
        assert len(live) == len(expected) == self.num_pages
        assert all(run.num_live == len(self.live(run)) and self._order.count(run) == run.times for run in runs)
        assert all(run.owner is self and run.pages == list(dict.fromkeys(run.pages)) for run in runs)
        assert self._num_runs == len(runs)
        assert self._listed == sum(len(run.pages) for run in runs)

    def _relist(self, run: Run, pages: Pages) -> None:
        self._listed += len(pages) - len(run.pages)
        run.pages = pages

    def _compact(self) -> None:
        """Leave each run once in the order, with its live pages alone."""
        self._order = deque(self.runs())
        for run in self._order:
            run.times = 1
            self._relist(run, self.live(run))


SWEEP_PER_PAGE = 4  # pages cleaned for each page written: a sweep ends before the table has grown by a quarter


class Bits:
    """The bits that stand for replicas; a replica is a small number of the caller's, its bit is ``1 << position``."""

    def __init__(self) -> None:
        self.present = 0  # bits that stand for a replica
        self.retired = 0  # bits that were given up and may still be in pages
        self.num_positions = 0
        self._free: list[int] = []  # positions
        self._of = np.zeros(8, dtype=np.intp)  # position by replica

    def take(self, replica: int) -> int:
        """Give ``replica`` a bit that no page has."""
        if not self._free:
            self._free.append(self.num_positions)
            self.num_positions += 1
        if replica >= len(self._of):
            self._of = np.resize(self._of, 2 * replica)
        position = self._of[replica] = self._free.pop()
        bit = 1 << position
        self.present |= bit
        return bit

    def retire(self, bit: int) -> None:
        """Give up a bit whose replica has left or holds none of the pages that have it."""
        self.present ^= bit
        self.retired |= bit

    def recycle(self, bits: int) -> None:
        """Free these retired bits, which no page has now."""
        self.retired &= ~bits
        self._free += positions(bits)

    def of_replicas(self, values: npt.NDArray[np.int64], replicas: npt.NDArray[np.intp]) -> npt.NDArray[np.int64]:
        """Return [n] of ``values`` by position: those of ``replicas`` [n]."""
        return values[self._of[replicas]]

    def check(self, of_replicas: dict[int, int]) -> None:
        """Raises AssertionError if a bit is lost, has two owners, or is not the one in ``of_replicas``."""
        assert not self.present & self.retired
        free = sum(1 << position for position in self._free)
        assert free ^ self.present ^ self.retired == (1 << self.num_positions) - 1, "a bit is lost, or free and in use"
        assert sum(of_replicas.values()) == self.present
        assert all(bit == 1 << int(self._of[replica]) for replica, bit in of_replicas.items())


def positions(bits: int) -> list[int]:
    """Return the positions of the bits that are 1."""
    if bits.bit_count() > 16:
        raw = np.frombuffer(bits.to_bytes((bits.bit_length() + 7) // 8, "little"), dtype=np.uint8)
        many: list[int] = np.flatnonzero(np.unpackbits(raw, bitorder="little")).tolist()
        return many
    found = []
    while bits:
        low = bits & -bits
        found.append(low.bit_length() - 1)
        bits ^= low
    return found


class PageOwners:
    """The owners of every page. A replica is a small number of the caller's, and after `join` its `Expected`."""

    def __init__(self, departures: Departures | None = None) -> None:
        """``departures``: told of the pages of replicas that leave, as the sweep comes to them."""
        self._entries: Entries = {}
        self._bits = Bits()
        self._by_bit: dict[int, Expected] = {}
        self._sweeping = 0  # retired bits that the sweep under way takes out of the pages
        self._sweep: Iterator[int] = iter(())  # the pages there were when it began
        self._left: dict[int, Departure] = {}  # by retired bit: how its pages left
        self._departures = departures

    def __len__(self) -> int:
        """Count the pages held by any replica, those still to be cleaned too."""
        return len(self._entries)

    def pages(self, mine: Expected) -> set[int]:
        """Return every page that a replica is expected to hold. Slow: for tests and for showing."""
        return {page for page, entry in self._entries.items() if bits_of(entry) & mine.bit}

    def join(self, replica: int) -> Expected:
        """Add a replica that holds nothing yet."""
        mine = Expected(self._bits.take(replica), self._entries)
        self._by_bit[mine.bit] = mine
        return mine

    def leave(self, mine: Expected, how: Departure | None = None) -> None:
        """Remove a replica; `clean` takes its bit out of the pages later. ``how``: its pages left."""
        if how is not None:
            self._left[mine.bit] = how
        mine.shared.clear()
        del self._by_bit[mine.bit]
        self._bits.retire(mine.bit)

    def overlap(self, pages: Pages, replicas: npt.NDArray[np.intp]) -> npt.NDArray[np.int64]:
        """Return [n]: how many of the first of ``pages`` each of ``replicas`` [n] holds without a hole."""
        depths = np.zeros(self._bits.num_positions, dtype=np.int64)  # by position
        alive, depth = self._bits.present, 0
        for entry, stretch in groupby(map(self._entries.get, pages)):
            left = alive & bits_of(entry)
            if left != alive:
                if depth:
                    depths[positions(alive ^ left)] = depth
                alive = left
                if not alive:
                    break
            depth += len(list(stretch))
        depths[positions(alive)] = depth
        return self._bits.of_replicas(depths, replicas)

    def stretches(self, mine: Expected, pages: Pages) -> Iterator[tuple[int | Run | None, Run | None, Pages]]:
        """Cut ``pages`` where their entry or the run of ``mine`` changes: (entry, that run or None, pages).

        A whole run that begins with a page that only it has is one stretch, whatever the entries of its other pages.
        Entries are looked up while earlier stretches are worked on, so a key that stands twice may come with its old
        entry: with the run it had, or with none.
        """
        rest, end = iter(pages), 0
        entries = groupby(map(self._entries.get, rest))
        while (found := next(entries, None)) is not None:
            (entry, stretch), start = found, end
            if isinstance(entry, Run):
                run, end = entry if entry.owner is mine else None, start + len(entry.pages)
                if run is not None and run.whole and run.pages == pages[start:end]:
                    next(islice(rest, end - start - 1, end - start - 1), None)  # past the run
                    entries = groupby(map(self._entries.get, rest))
                else:
                    end = start + len(list(stretch))
                yield entry, run, pages[start:end]
                continue
            end = start + len(list(stretch))
            if entry and entry & mine.bit and mine.shared:
                for run, part in groupby(map(mine.shared.get, pages[start:end])):
                    then = start + len(list(part))
                    yield entry, run, pages[start:then]
                    start = then
            else:
                yield entry, None, pages[start:end]

    def hold(self, mine: Expected, part: Pages, entry: int | Run | None, run: Run | None) -> None:
        """Make the replica of ``mine`` hold ``part``, which has ``entry``: expected in ``run``, or confirmed."""
        others = (before := bits_of(entry)) & self._bits.present
        if self._departures is not None and before != others and (how := self._how(before)) is not None:
            self._departures.add(part, how)
        if others and isinstance(entry, Run):  # the other replica shares its pages from now on
            entry.owner.shared.update(dict.fromkeys(part, entry))
        if run is None:
            self._entries.update(dict.fromkeys(part, others | mine.bit if others else mine.bit))
            return
        runs = dict.fromkeys(part, run)
        mine.add(run, runs)
        if others:
            self._entries.update(dict.fromkeys(part, others | mine.bit))
            mine.shared.update(runs)
        else:
            self._entries.update(runs)

    def confirm(self, run: Run, part: Pages) -> None:
        """Confirm ``part``, different pages live in ``run``: they stay whatever the decision's request does."""
        entries, mine = self._entries, run.owner
        for page in part:
            if entries[page] is run:
                entries[page] = mine.bit
            else:
                del mine.shared[page]
        mine.lose(run, len(part))

    def use(self, run: Run, part: Pages, number: int, into: Run | None) -> Run:
        """Use ``part``, live in ``run``, for decision ``number``. Return the run that has it then: ``run`` if all of it
        is used, else ``into`` with the part appended, or a new run.

        ``run`` still lists what it lost then: `Expected.trim` it when all parts are used.
        """
        if part == run.pages:
            run.number = number
            return run
        part = list(dict.fromkeys(part))
        mine, taken = run.owner, into or Run(owner=run.owner, number=number)
        mine.lose(run, len(part))
        mine.add(taken, part)
        for page in part:
            if self._entries[page] is run:
                self._entries[page] = taken
            else:
                mine.shared[page] = taken
        return taken

    def drop(self, mine: Expected, run: Run | None, part: Pages) -> int:
        """Remove ``part`` from the replica of ``mine``, all live in ``run`` or confirmed. Return how many."""
        gone = dict.fromkeys(part)
        last, rest = 0, 0
        for page, entry in zip(gone, list(map(self._entries.__getitem__, gone)), strict=True):
            if isinstance(entry, Run):
                del self._entries[page]
                continue
            if run is not None:
                del mine.shared[page]
            if entry is not last:
                last, rest = entry, (entry ^ mine.bit) & self._bits.present
            self._put(page, rest)
        if run is not None:
            mine.lose(run, len(gone))
        return len(gone)

    def forget(self, part: Pages) -> None:
        """Remove ``part``, different pages that no replica but one has confirmed, and none expects: most that leave."""
        deque(map(self._entries.__delitem__, part), maxlen=0)

    def clean(self, num_written: int) -> None:
        """Continue the sweep that takes retired bits out of the pages; begin one if bits are retired."""
        if not self._bits.retired:
            return
        if not self._sweeping:
            self._sweeping, self._sweep = self._bits.retired, iter(list(self._entries))
        looked_at = last = rest = 0
        for looked_at, page in enumerate(islice(self._sweep, SWEEP_PER_PAGE * num_written), start=1):  # noqa: B007
            bits = bits_of(self._entries.get(page))
            if bits & self._sweeping:
                if bits is not last:
                    last, rest = bits, bits & self._bits.present
                if self._departures is not None and (how := self._how(bits)) is not None:
                    self._departures.put(page, how)
                self._put(page, rest)
        if looked_at < SWEEP_PER_PAGE * num_written:
            self._bits.recycle(self._sweeping)
            self._left = {bit: how for bit, how in self._left.items() if not bit & self._sweeping}
            self._sweeping = 0

    def departure(self, page: int) -> Departure | None:
        """Return how ``page`` left a replica, if the sweep has not come to it."""
        return self._how(bits_of(self._entries.get(page)))

    def is_held(self, page: int, mine: Expected | None = None) -> bool:
        """Whether a replica holds ``page``, or that of ``mine`` does."""
        return bool(bits_of(self._entries.get(page)) & (self._bits.present if mine is None else mine.bit))

    def _how(self, bits: int) -> Departure | None:
        """Return how the pages left of one of the replicas that had ``bits``."""
        gone = bits & self._bits.retired
        return next((how for bit, how in self._left.items() if bit & gone), None) if gone else None

    def check(self, replicas: dict[int, Expected]) -> None:
        """Raises AssertionError if bits, entries and runs do not agree."""
        self._bits.check({replica: mine.bit for replica, mine in replicas.items()})
        assert self._by_bit == {mine.bit: mine for mine in replicas.values()}
        assert self._sweeping & ~self._bits.retired == 0
        used = self._bits.present | self._bits.retired
        bits = [bits_of(entry) for entry in self._entries.values()]
        assert all(each and not each & ~used for each in bits), "a page has a bit that no replica has"
        for mine in replicas.values():
            mine.check()
            assert mine.shared.keys() <= self.pages(mine)
            assert all(bits_of(self._entries[page]) != mine.bit for page in mine.shared), "shared with no other replica"

    def _put(self, page: int, bits: int) -> None:
        """Set the owners of ``page`` to the present ``bits``."""
        sole = self._by_bit.get(bits)
        run = None if sole is None else sole.shared.pop(page, None)
        if run is not None:
            self._entries[page] = run
        elif bits:
            self._entries[page] = bits
        else:
            del self._entries[page]


def bits_of(entry: int | Run | None) -> int:
    """Return the bits of the replicas that hold a page; some may be retired."""
    if isinstance(entry, int):
        return entry
    return 0 if entry is None else entry.owner.bit
