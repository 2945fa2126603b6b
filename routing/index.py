"""Which replica holds which pages: one walk over a prompt's keys gives the overlap with every replica.

Owns:      page -> who holds it; how many pages events have confirmed.
Never:     holds tokens; asks a replica.
Invariant: a page is held by a replica iff the replica's present bit is among the page's. Per replica, predicted pages
           are at most its capacity (least recently used out first), and so are those that its events stored.
Thread:    the router's own.

Two sources. (a) Decisions: `expect` says that a replica will soon hold a prompt's pages. (b) The replica's events, in
order of their numbers (feed.py): `stored` confirms pages, `removed` takes them out, predicted or not; from the first
on, what a request was expected to leave and did not is dropped once it has ended (`unexpect`).

A page's entry is the bits of those that hold it, or, where only one does and nothing has confirmed it, that one's run
(runs.py). Neighbours in a prompt mostly have the same entry: all work is by stretches of one entry, found in C.

A replica that leaves, or says that its cache is empty, gives up its bit: at once no walk sees it. The bit is cleaned
from the pages a few at a time, with each write, and only then given to another.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, islice

import numpy as np
import numpy.typing as npt

from kvtransfer.pages import PageKeys
from routing.bits import Bits, positions
from routing.runs import Expected, Held, Pages, Run

# Python keeps an int of 60 bits in 32 bytes, one of 64 in 48. Two of a million pages share a key once in 2^21 indexes,
# and then the router errs by some pages; what the engine reuses is compared token by token.
KEY_BITS = np.uint64((1 << 60) - 1)
SWEEP_PER_PAGE = 4  # pages cleaned for each page written: a sweep ends before the index has grown by a quarter


@dataclass(slots=True)
class _Replica:
    capacity: int  # pages
    expected: Expected  # whose bit is the replica's
    num_confirmed: int = 0


class PrefixIndex:
    """Pages by replica; a replica is a small number of the caller's that it keeps until it leaves."""

    def __init__(self) -> None:
        self._held: Held = {}
        self._replicas: dict[int, _Replica] = {}
        self._by_bit: dict[int, Expected] = {}
        self._bits = Bits()
        self._sweeping = 0  # retired bits that the sweep under way takes out of the pages
        self._sweep: Iterator[int] = iter(())  # the pages there were when it began

    def __len__(self) -> int:
        """Pages held by any replica; those still to be cleaned count."""
        return len(self._held)

    def num_pages(self, replica: int) -> tuple[int, int]:
        """(confirmed by events, only expected) pages of a replica."""
        state = self._replicas[replica]
        return state.num_confirmed, state.expected.num_pages

    def pages(self, replica: int) -> set[int]:
        """Everything a replica is believed to hold. Slow: for tests and for showing."""
        bit = self._replicas[replica].expected.bit
        return {page for page, value in self._held.items() if _bits_of(value) & bit}

    def join(self, replica: int, *, capacity: int) -> None:
        """A new replica that holds nothing yet; with ``capacity`` 0 it never will."""
        assert replica not in self._replicas, f"replica {replica} is there already"
        expected = Expected(self._bits.take(replica), self._held)
        self._by_bit[expected.bit] = expected
        self._replicas[replica] = _Replica(capacity=capacity, expected=expected)

    def leave(self, replica: int) -> None:
        """Forget a replica: no walk sees its pages from now on."""
        expected = self._replicas.pop(replica).expected
        expected.shared.clear()
        del self._by_bit[expected.bit]
        self._bits.retire(expected.bit)

    def capacity(self, replica: int) -> int:
        return self._replicas[replica].capacity

    def overlap(self, pages: Pages, replicas: npt.NDArray[np.intp]) -> npt.NDArray[np.int64]:
        """How many of the first of ``pages`` each of ``replicas`` [n] holds without a hole. Returns [n]."""
        depths = np.zeros(self._bits.num_positions, dtype=np.int64)  # by position
        alive, depth = self._bits.present, 0
        for value, stretch in groupby(map(self._held.get, pages)):
            left = alive & _bits_of(value)
            if left != alive:
                if depth:
                    depths[positions(alive ^ left)] = depth
                alive = left
                if not alive:
                    break
            depth += len(list(stretch))
        depths[positions(alive)] = depth
        return self._bits.of_replicas(depths, replicas)

    def expect(self, replica: int, pages: Pages, *, number: int) -> None:
        """Decision ``number`` (greater than any before) makes ``replica`` hold ``pages`` soon; they are used now."""
        state = self._replicas[replica]
        if not state.capacity:
            return
        mine = state.expected
        used: list[Run] = []
        fresh: Run | None = None
        depth = 0
        for value, run, part in self._stretches(mine, pages):
            if run is not None:
                if run.number != number:  # else all of it was used, by the stretch before
                    used.append(self._use(run, part, pages[depth:], number))
                    fresh = None
            elif not _bits_of(value) & mine.bit:  # of those that are confirmed, the replica's events tell
                if fresh is None:
                    fresh = Run(owner=mine, number=number)
                    used.append(fresh)
                entries = dict.fromkeys(part, fresh)
                mine.add(fresh, entries)
                if others := self._others(part, value):
                    self._held.update(dict.fromkeys(part, others | mine.bit))
                    mine.shared.update(entries)
                else:
                    self._held.update(entries)
            depth += len(part)
        mine.use(reversed(used))
        self._evict(state)
        self._clean(len(pages))

    def unexpect(self, replica: int, pages: Pages, *, number: int) -> None:
        """What only decision ``number`` made expected, and no event has confirmed, will not come."""
        mine = self._replicas[replica].expected
        for _, run, part in self._stretches(mine, pages):
            if run is not None and run.number == number:
                self._drop(mine, run, part)

    def stored(self, replica: int, pages: Pages) -> bool:
        """The replica holds ``pages``. False if that makes more than it can hold: what is known of it is wrong."""
        state = self._replicas[replica]
        if not state.capacity:
            return True
        mine = state.expected
        for value, run, part in self._stretches(mine, pages):
            if run is None and _bits_of(value) & mine.bit:
                continue
            new = list(dict.fromkeys(part))
            room = state.capacity - state.num_confirmed
            full = len(new) > room
            del new[room:]
            if run is not None:
                self._confirm(run, new)
            else:
                self._held.update(dict.fromkeys(new, self._others(new, value) | mine.bit))
            state.num_confirmed += len(new)
            if full:
                return False
        self._clean(len(pages))
        return True

    def removed(self, replica: int, pages: Pages) -> None:
        """The replica no longer holds ``pages``, expected or not."""
        state = self._replicas[replica]
        mine = state.expected
        for value, run, part in self._stretches(mine, pages):
            if run is not None or _bits_of(value) & mine.bit:
                num_dropped = self._drop(mine, run, part)
                if run is None:
                    state.num_confirmed -= num_dropped

    def clear(self, replica: int) -> None:
        """The replica holds nothing, and nothing is expected of it."""
        state = self._replicas[replica]
        if state.num_confirmed or state.expected.num_pages:
            self.leave(replica)
            self.join(replica, capacity=state.capacity)

    def replace(self, replica: int, pages: Pages) -> None:
        """The replica holds exactly ``pages``; what decisions expect beyond them still is. Too many are cut off."""
        before = self._replicas[replica].expected
        kept = [(run.number, before.live(run)) for run in before.runs()]
        self.clear(replica)
        self.stored(replica, pages)
        for number, run_pages in kept:
            self.expect(replica, run_pages, number=number)

    def check(self) -> None:
        """Raises AssertionError if bits, counts or bounds do not agree."""
        self._bits.check({replica: state.expected.bit for replica, state in self._replicas.items()})
        assert self._sweeping & ~self._bits.retired == 0
        used = self._bits.present | self._bits.retired
        bits = [_bits_of(value) for value in self._held.values()]
        assert all(each and not each & ~used for each in bits), "a page has a bit that is nobody's"
        for replica, state in self._replicas.items():
            expected = state.expected
            assert self._by_bit[expected.bit] is expected
            expected.check()
            pages = self.pages(replica)
            assert expected.shared.keys() <= pages
            assert all(_bits_of(self._held[page]) != expected.bit for page in expected.shared), "shared with nobody"
            assert len(pages) == state.num_confirmed + expected.num_pages
            assert max(state.num_confirmed, expected.num_pages) <= state.capacity
        assert len(self._by_bit) == len(self._replicas)

    def _stretches(self, mine: Expected, pages: Pages) -> Iterator[tuple[int | Run | None, Run | None, Pages]]:
        """``pages`` cut where their entry or the run of ``mine`` changes: (entry, that run or None, pages).

        Each is looked up after what was done with the one before, so that a key may well stand twice.
        """
        end = 0
        for value, stretch in groupby(map(self._held.get, pages)):
            start, end = end, end + len(list(stretch))
            if isinstance(value, Run):
                yield value, value if value.owner is mine else None, pages[start:end]
            elif value and value & mine.bit and mine.shared:
                for run, part in groupby(map(mine.shared.get, pages[start:end])):
                    then = start + len(list(part))
                    yield value, run, pages[start:then]
                    start = then
            else:
                yield value, None, pages[start:end]

    def _use(self, run: Run, part: Pages, pages: Pages, number: int) -> Run:
        """What decision ``number`` uses of ``run``, where its ``pages`` go on with ``part``: all of it, or a new run."""
        mine, held = run.owner, self._held
        if run.num_live == len(run.pages) and run.pages == pages[: len(run.pages)]:
            run.number = number
            return run
        part = list(dict.fromkeys(part))
        taken = Run(owner=mine, number=number)
        mine.cut(run, part)
        mine.add(taken, part)
        for page in part:
            if held[page] is run:
                held[page] = taken
            else:
                mine.shared[page] = taken
        return taken

    def _others(self, part: Pages, value: int | Run | None) -> int:
        """The bits of those that hold ``part``, whose entry is ``value`` and now becomes one of several replicas."""
        others = _bits_of(value) & self._bits.present
        if others and isinstance(value, Run):
            value.owner.shared.update(dict.fromkeys(part, value))
        return others

    def _confirm(self, run: Run, part: Pages) -> None:
        held, mine = self._held, run.owner
        for page in part:
            if held[page] is run:
                held[page] = mine.bit
            else:
                del mine.shared[page]
        mine.lose(run, len(part))

    def _drop(self, mine: Expected, run: Run | None, part: Pages) -> int:
        """The replica of ``mine`` holds ``part`` no more, of which all or nothing is in ``run``; how many these are."""
        held, gone = self._held, dict.fromkeys(part)
        last, rest = 0, 0
        for page in gone:
            value = held[page]
            if isinstance(value, Run):
                del held[page]
                continue
            if value is not last:  # neighbours share an int: it is 160 bytes where there are 1,000 replicas
                last, rest = value, (value ^ mine.bit) & self._bits.present
            if run is not None:
                del mine.shared[page]
            self._put(page, rest)
        if run is not None:
            mine.lose(run, len(gone))
        return len(gone)

    def _put(self, page: int, bits: int) -> None:
        """``page`` is held by those of the present ``bits`` and by no others."""
        sole = self._by_bit.get(bits)
        run = None if sole is None else sole.shared.pop(page, None)
        if run is not None:
            self._held[page] = run
        elif bits:
            self._held[page] = bits
        else:
            del self._held[page]

    def _evict(self, state: _Replica) -> None:
        """Drop expected pages beyond the capacity: of the run used least recently, the deepest first."""
        mine = state.expected
        while (over := mine.num_pages - state.capacity) > 0:
            run = mine.pop_oldest()
            live = mine.live(run)
            self._drop(mine, run, live[-over:])
            if run.num_live:
                mine.put_back(run, live[:-over])

    def _clean(self, num_written: int) -> None:
        """Go on with the sweep that takes retired bits out of the pages; begin one if there is need."""
        if not self._bits.retired:
            return
        if not self._sweeping:
            self._sweeping, self._sweep = self._bits.retired, iter(list(self._held))
        looked_at = last = rest = 0
        for looked_at, page in enumerate(islice(self._sweep, SWEEP_PER_PAGE * num_written), start=1):  # noqa: B007
            bits = _bits_of(self._held.get(page))
            if bits & self._sweeping:
                if bits is not last:
                    last, rest = bits, bits & self._bits.present
                self._put(page, rest)
        if looked_at < SWEEP_PER_PAGE * num_written:
            self._bits.recycle(self._sweeping)
            self._sweeping = 0


def pages_of(keys: PageKeys) -> Pages:
    """What stands for ``keys`` in the index."""
    pages: Pages = (keys & KEY_BITS).tolist()
    return pages


def _bits_of(value: int | Run | None) -> int:
    if isinstance(value, int):
        return value
    return 0 if value is None else value.owner.bit
