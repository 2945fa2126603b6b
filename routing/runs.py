"""What decisions expect one replica to hold: runs of pages, in order of use.

Owns:      the runs, their order, and which run a page is in where other replicas hold the page too.
Never:     writes the owners of a page; the table of entries (page_owners.py) does, and changes the runs with it.
Invariant: an expected page is live in exactly one run, that of the last decision that used it: the page's entry is the
           run itself if no other replica holds it, and `shared` has the run otherwise.
Thread:    the router's own.

A prompt that begins like an earlier one uses that one's run again: one step in the order of use for all its pages.
If only part of a run is used again, the part becomes a run of its own, and is used as a whole from then on. A page that
an event confirms or removes leaves its run: it is no longer live, even while the run's list still has it.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

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
