"""Which replica holds which pages: one walk over a prompt's keys gives the overlap with every replica.

Owns:      page -> set of replicas, the set as the bits of an int; what of it is only predicted.
Never:     holds tokens; asks a replica.
Invariant: a page is held by a replica iff the replica's present bit is set. Per replica, predicted pages are at most
           its capacity (least recently used out first), and so are those that its events stored.
Thread:    the router's own.

Two sources. (a) Decisions: `expect` says that a replica will soon hold a prompt's pages. (b) The replica's events, in
order of their numbers (feed.py): `stored` confirms pages, `removed` takes them out, predicted or not; from the first
on, what a request was expected to leave and did not is dropped once it has ended (`unexpect`).

A replica that leaves, or says that its cache is empty, gives up its bit: at once no walk sees it. The bit is cleaned
from the pages a few at a time, with each write, and only then given to another.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import numpy.typing as npt

from kvtransfer.pages import PageKeys

# Python keeps an int of 60 bits in 32 bytes, one of 64 in 48. Two of a million pages share a key once in 2^21 indexes,
# and then the router errs by some pages; what the engine reuses is compared token by token.
KEY_BITS = np.uint64((1 << 60) - 1)
SWEEP_PER_PAGE = 4  # pages cleaned for each page written: a sweep ends before the index has grown by a quarter
SLACK_PAGES = 4096  # stale entries that are not worth collecting

Pages = list[int]  # page keys of 60 bits


@dataclass(slots=True)
class _Run:
    """Pages that one decision expected, in the order of the prompt; some may have been expected again since."""

    number: int
    keys: PageKeys  # [n]


@dataclass(slots=True)
class _Replica:
    bit: int  # 1 << position
    capacity: int  # pages
    num_confirmed: int = 0
    expected: dict[int, int] = field(default_factory=dict)  # page -> number of the last decision that expected it
    runs: deque[_Run] = field(default_factory=deque)  # oldest first
    runs_len: int = 0  # pages in all runs


class PrefixIndex:
    """Pages by replica; a replica is a small number of the caller's that it keeps until it leaves."""

    def __init__(self) -> None:
        self._held: dict[int, int] = {}  # page -> bits, never 0
        self._replicas: dict[int, _Replica] = {}
        self._present = 0  # bits that stand for a replica
        self._retired = 0  # bits that were given up and may still be in pages
        self._sweeping = 0  # those of them that the sweep under way takes out of
        self._sweep: Iterator[int] = iter(())  # the pages there were when it began
        self._free: list[int] = []  # positions of bits that no page has
        self._num_positions = 0
        self._positions = np.zeros(8, dtype=np.intp)  # by replica

    def __len__(self) -> int:
        """Pages held by any replica; those still to be cleaned count."""
        return len(self._held)

    def num_pages(self, replica: int) -> tuple[int, int]:
        """(confirmed by events, only expected) pages of a replica."""
        state = self._replicas[replica]
        return state.num_confirmed, len(state.expected)

    def pages(self, replica: int) -> set[int]:
        """Everything a replica is believed to hold. Slow: for tests and for showing."""
        bit = self._replicas[replica].bit
        return {page for page, bits in self._held.items() if bits & bit}

    def join(self, replica: int, *, capacity: int) -> None:
        """A new replica that holds nothing yet; with ``capacity`` 0 it never will."""
        assert replica not in self._replicas, f"replica {replica} is there already"
        if replica >= len(self._positions):
            self._positions = np.resize(self._positions, 2 * replica)
        self._replicas[replica] = state = _Replica(bit=0, capacity=capacity)
        self._take_bit(replica, state)

    def leave(self, replica: int) -> None:
        """Forget a replica: no walk sees its pages from now on."""
        state = self._replicas.pop(replica)
        self._present ^= state.bit
        self._retired |= state.bit

    def capacity(self, replica: int) -> int:
        return self._replicas[replica].capacity

    def overlap(self, pages: Pages, replicas: npt.NDArray[np.intp]) -> npt.NDArray[np.int64]:
        """How many of the first of ``pages`` each of ``replicas`` [n] holds without a hole. Returns [n]."""
        depths = np.zeros(self._num_positions, dtype=np.int64)  # by position
        alive = self._present
        for depth, bits in enumerate(map(self._held.get, pages)):
            if bits != alive:
                bits = bits & alive if bits else 0
                if bits != alive:
                    if depth:
                        _set(depths, alive ^ bits, depth)
                    alive = bits
                    if not alive:
                        break
        else:
            _set(depths, alive, len(pages))
        return depths[self._positions[replicas]]

    def expect(self, replica: int, pages: Pages, *, number: int, overlap: int = 0) -> None:
        """Decision ``number`` (greater than any before) makes ``replica`` hold ``pages`` soon; they are used now.

        Args: overlap: how many of the first of ``pages`` it holds already, if known: they cost less.
        """
        state = self._replicas[replica]
        if not state.capacity:
            return
        get, expected, bit = self._held.get, state.expected, state.bit
        head, tail = pages[:overlap], pages[overlap:]
        if state.num_confirmed:  # the replica's events decide over those
            head = [page for page in head if page in expected]
            tail = [page for page in tail if page in expected or not get(page, 0) & bit]
        held = self._held
        for page in tail:
            bits = get(page)
            held[page] = bits | bit if bits else bit  # the shared int where it is alone
        used = head + tail
        for page in used:
            expected[page] = number
        state.runs.append(_Run(number, np.array(used, dtype=np.uint64)))
        state.runs_len += len(used)
        self._evict(state)
        self._clean(len(used))

    def unexpect(self, replica: int, pages: Pages, *, number: int) -> None:
        """What only decision ``number`` made expected, and no event has confirmed, will not come."""
        state = self._replicas[replica]
        gone = [page for page in pages if state.expected.get(page) == number]
        for page in gone:
            del state.expected[page]
        self._drop(gone, state.bit)

    def stored(self, replica: int, pages: Pages) -> bool:
        """The replica holds ``pages``. False if that makes more than it can hold: what is known of it is wrong."""
        state = self._replicas[replica]
        if not state.capacity:
            return True
        get, expected, bit = self._held.get, state.expected, state.bit
        for page in pages:
            bits = get(page, 0)
            if bits & bit and page not in expected:
                continue
            if state.num_confirmed == state.capacity:
                return False
            if bits & bit:
                del expected[page]
            else:
                self._held[page] = bits | bit if bits else bit
            state.num_confirmed += 1
        self._clean(len(pages))
        return True

    def removed(self, replica: int, pages: Pages) -> None:
        """The replica no longer holds ``pages``, expected or not."""
        state = self._replicas[replica]
        get, bit = self._held.get, state.bit
        for page in pages:
            if get(page, 0) & bit:
                self._drop([page], bit)
                if state.expected.pop(page, None) is None:
                    state.num_confirmed -= 1

    def clear(self, replica: int) -> None:
        """The replica holds nothing, and nothing is expected of it."""
        state = self._replicas[replica]
        if not state.num_confirmed and not state.expected:
            return
        self._present ^= state.bit
        self._retired |= state.bit
        state.num_confirmed, state.expected, state.runs_len = 0, {}, 0
        state.runs.clear()
        self._take_bit(replica, state)

    def replace(self, replica: int, pages: Pages) -> None:
        """The replica holds exactly ``pages``; what decisions expect beyond them still is. Too many are cut off."""
        state = self._replicas[replica]
        expected, runs, runs_len = state.expected, state.runs.copy(), state.runs_len
        self.clear(replica)
        self.stored(replica, pages)
        get, bit = self._held.get, state.bit
        state.expected = {page: number for page, number in expected.items() if not get(page, 0) & bit}
        state.runs, state.runs_len = runs, runs_len
        for page in state.expected:
            self._held[page] = get(page, 0) | bit

    def check(self) -> None:
        """Raises AssertionError if bits, counts or bounds do not agree."""
        assert not self._present & self._retired
        assert self._sweeping & ~self._retired == 0
        used = self._present | self._retired
        assert all(bits and not bits & ~used for bits in self._held.values()), "a page has a bit that is nobody's"
        free = sum(1 << position for position in self._free)
        assert free ^ used == (1 << self._num_positions) - 1, "a bit is lost, or both free and in use"
        for replica, state in self._replicas.items():
            pages = self.pages(replica)
            assert state.bit == 1 << int(self._positions[replica])
            assert state.expected.keys() <= pages
            assert len(pages) == state.num_confirmed + len(state.expected)
            assert max(state.num_confirmed, len(state.expected)) <= state.capacity
            assert state.runs_len == sum(len(run.keys) for run in state.runs)
            in_runs = {(page, run.number) for run in state.runs for page in run.keys.tolist()}
            assert in_runs >= state.expected.items(), "an expected page would never be evicted"

    def _take_bit(self, replica: int, state: _Replica) -> None:
        if not self._free:
            self._free.append(self._num_positions)
            self._num_positions += 1
        position = self._free.pop()
        self._positions[replica] = position
        state.bit = 1 << position
        self._present |= state.bit

    def _drop(self, pages: Pages, bit: int) -> None:
        held = self._held
        for page in pages:
            bits = held[page] ^ bit
            if bits:
                held[page] = bits
            else:
                del held[page]

    def _evict(self, state: _Replica) -> None:
        """Drop expected pages beyond the capacity: of the oldest decision first, and of it the deepest first."""
        expected, runs, get = state.expected, state.runs, state.expected.get
        over = len(expected) - state.capacity
        while over > 0:
            run = runs.popleft()
            number = run.number
            live = [page for page in run.keys.tolist() if get(page) == number]
            kept, gone = live[:-over], live[-over:]
            for page in gone:
                del expected[page]
            self._drop(gone, state.bit)
            over -= len(gone)
            state.runs_len += len(kept) - len(run.keys)
            if kept:
                runs.appendleft(_Run(number, np.array(kept, dtype=np.uint64)))
        if state.runs_len > 2 * len(expected) + SLACK_PAGES:
            self._compact(state)

    def _compact(self, state: _Replica) -> None:
        """Take out of the runs what has been expected again since, confirmed or dropped."""
        get = state.expected.get
        runs = [_Run(r.number, r.keys[[get(page) == r.number for page in r.keys.tolist()]]) for r in state.runs]
        state.runs = deque(run for run in runs if len(run.keys))
        state.runs_len = sum(len(run.keys) for run in state.runs)

    def _clean(self, num_written: int) -> None:
        """Go on with the sweep that takes retired bits out of the pages; begin one if there is need."""
        if not self._retired:
            return
        if not self._sweeping:
            self._sweeping, self._sweep = self._retired, iter(list(self._held))
        left, held = ~self._sweeping, self._held
        looked_at = 0
        for looked_at, page in enumerate(islice(self._sweep, SWEEP_PER_PAGE * num_written), start=1):  # noqa: B007
            bits = held.get(page, 0)
            if bits & self._sweeping:
                held[page] = bits & left
                if not bits & left:
                    del held[page]
        if looked_at < SWEEP_PER_PAGE * num_written:
            self._retired &= left
            self._free += _positions(self._sweeping)
            self._sweeping = 0


def pages_of(keys: PageKeys) -> Pages:
    """What stands for ``keys`` in the index."""
    pages: Pages = (keys & KEY_BITS).tolist()
    return pages


def _set(depths: npt.NDArray[np.int64], bits: int, depth: int) -> None:
    depths[_positions(bits)] = depth


def _positions(bits: int) -> list[int]:
    """Positions of the bits that are 1."""
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
