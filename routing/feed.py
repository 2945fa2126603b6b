"""One replica's events on their way into the index: each once, in the order of their numbers.

Owns:      the number of the last event applied, events that came too early, requests that ended lately.
Never:     fetches a snapshot; it says when one is needed.
Invariant: in sync, the index's confirmed pages are those of the replica's cache after event ``seq``, and what else is
           expected comes from decisions that are open or ended lately.
Thread:    the router's own.

    unknown ──event 1, or a snapshot──> in sync ──a number is missing──> gap ──it turns up, or a snapshot──> in sync
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvtransfer.pages import PageKeys
from routing.index import PrefixIndex, pages_of
from routing.runs import Pages
from routing.types import IndexEvent, IndexSnapshot, KeysRemoved, KeysStored

# Events kept while one is missing: some seconds' worth. With more, only a snapshot helps, which has their pages too.
MAX_EARLY = 10_000
# A request's last pages are in the next batch of its replica, or in the one after if a batch was already on its way.
BATCHES_UNTIL_SETTLED = 2


@dataclass(frozen=True, slots=True)
class _Ended:
    batch: int  # how many had come when it ended
    number: int  # its decision
    keys: PageKeys


class Feed:
    """The state of one replica's event stream; ``replica`` is its number in the index."""

    def __init__(self, index: PrefixIndex, replica: int, is_open: Callable[[int], bool]) -> None:
        """``is_open`` tells whether the request of a decision, by its number, has not ended yet."""
        self._index = index
        self._replica = replica
        self._is_open = is_open
        self.seq: int | None = None  # of the last event applied; None: the replica's pages are unknown
        self._early: dict[int, IndexEvent] = {}
        self._num_batches = 0
        self._ended: deque[_Ended] = deque()

    @property
    def in_sync(self) -> bool:
        return self.seq is not None and not self._early

    def apply(self, events: Iterable[IndexEvent]) -> bool:
        """Apply a batch. Return False if an earlier event is missing, or nothing is known yet: fetch a snapshot."""
        self._num_batches += 1
        for event in events:
            if self.seq is None and event.seq == 1:
                self._begin(0, [])  # nothing came before it: the cache was empty
            if self.seq is None or event.seq > self.seq:
                self._early[event.seq] = event
        self._drain()
        if len(self._early) > MAX_EARLY:
            self._early.clear()
            self.seq = None
        self._settle()
        return self.in_sync

    def apply_snapshot(self, snapshot: IndexSnapshot) -> bool:
        """Start over from ``snapshot`` and the events that came since. Return False if one of those is missing."""
        if self.seq is None or snapshot.seq >= self.seq:
            self._begin(snapshot.seq, pages_of(snapshot.keys))
            self._early = {seq: event for seq, event in self._early.items() if seq > snapshot.seq}
            self._drain()
        return self.in_sync

    def end(self, number: int, keys: PageKeys) -> None:
        """Record that the request of decision ``number`` ended: its expected pages are confirmed soon, or dropped."""
        if self.seq is not None:  # else `_begin` drops them
            self._ended.append(_Ended(self._num_batches, number, keys))

    def _begin(self, seq: int, pages: Pages) -> None:
        """Set the pages after event ``seq``. Requests that ended while the feed was out of sync add no pages."""
        unsettled = {ended.number for ended in self._ended}
        self._index.replace(self._replica, pages, keeps=lambda number: number in unsettled or self._is_open(number))
        self.seq = seq

    def _drain(self) -> None:
        while self.seq is not None and (event := self._early.pop(self.seq + 1, None)) is not None:
            self.seq = seq = event.seq
            match event:
                case KeysStored(keys=keys):
                    if not self._index.stored(self._replica, pages_of(keys)):
                        self.seq = None  # more than its pool: the index has pages that the replica no longer holds
                case KeysRemoved(keys=keys):
                    self._index.removed(self._replica, pages_of(keys))
                case _:  # nothing was running there: the pages that open decisions expect are still to come
                    self._begin(seq, [])

    def _settle(self) -> None:
        while self._ended and self._num_batches >= self._ended[0].batch + BATCHES_UNTIL_SETTLED:
            ended = self._ended.popleft()
            self._index.unexpect(self._replica, pages_of(ended.keys), number=ended.number)
