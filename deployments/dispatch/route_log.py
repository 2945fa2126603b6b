"""Recent routing decisions and their outcomes, to explain why a request went where it went.

Owns:      a bounded ring of records, the oldest dropped for a new request; the order in which they last changed.
Never:     decides anything; holds prompts or texts (a decision holds hashes of pages).
Invariant: at most ``capacity`` records; a record's tries are in order, each with its outcome once that is known.
           A record changes with a new try, its first token and its end; its number grows with each change.
Thread:    the router's event loop.
"""

import itertools
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from deployments.dispatch.rids import client_rid
from deployments.dispatch.timeline import LegTimes, Timeline
from replicas.types import HandOffReport
from routing.types import Decision, RouteOutcome

MOST_TOLD = 1000  # records in one answer to the observatory
NONE_HELD_OUT: Mapping[str, str] = MappingProxyType({})


@dataclass(slots=True, kw_only=True)
class Try:
    """One decision for a request, and how the try went."""

    decision: Decision
    cached_tokens: int | None = None  # as the replica counted; None before the first token
    ttft_s: float | None = None
    outcome: RouteOutcome | None = None  # None while it runs
    failure: str | None = None  # why the request went elsewhere, or was refused
    hand_off: HandOffReport | None = None  # how the K/V came, as the decode replica saw it
    held_out: Mapping[str, str] = field(default_factory=dict)  # prefill replica left out -> why (prefill_leg.py)
    prefill_end: str | None = None  # how the prefill leg ended; None while it runs, or without one
    times: LegTimes = field(default_factory=LegTimes)  # as the engines reported them


@dataclass(slots=True, kw_only=True)
class RouteRecord:
    """All decisions for one request, and its times."""

    rid: str
    timeline: Timeline
    tries: list[Try] = field(default_factory=list)
    ending: str = "running"  # then finished, aborted, failed or refused
    seq: int = 0  # of its last change

    @property
    def time_s(self) -> float:
        """When the request arrived, in seconds since 1970."""
        return self.timeline.arrival.time_s

    @property
    def name(self) -> str:
        """The client's name of the request."""
        return client_rid(self.rid)


class RouteLog:
    """The records of the most recent ``capacity`` requests."""

    def __init__(self, capacity: int = 1000) -> None:
        self.capacity = capacity
        self._records: OrderedDict[str, RouteRecord] = OrderedDict()  # by rid, oldest first
        self._by_name: dict[str, str] = {}  # client's name -> rid of the most recent request with it
        self._by_change: OrderedDict[str, RouteRecord] = OrderedDict()  # by rid; what changed last is last
        self._seq = 0

    def add(self, rid: str, decision: Decision, timeline: Timeline, held_out: Mapping[str, str] = NONE_HELD_OUT) -> Try:
        """Add the next try of request ``rid``."""
        record = self._records.get(rid)
        if record is None:
            record = self._records[rid] = RouteRecord(rid=rid, timeline=timeline)
            self._by_name[record.name] = rid
            if len(self._records) > self.capacity:
                self._drop_oldest()
        attempt = Try(decision=decision, held_out=held_out)
        record.tries.append(attempt)
        self.changed(record)
        return attempt

    def changed(self, record: RouteRecord) -> None:
        """Note that ``record`` has changed, if it is still kept."""
        if record.rid in self._records:
            self._seq += 1
            record.seq = self._seq
            self._by_change[record.rid] = record
            self._by_change.move_to_end(record.rid)

    def changed_since(self, seq: int, *, most: int | None = None) -> tuple[list[RouteRecord], int]:
        """Return the records that changed after change number ``seq``, the longest unchanged first, and the number to
        ask with next. 0, or a number of another life of this router, asks for all. ``most``: return only this many, the
        last changed; later calls do not return the others either."""
        known = seq if seq <= self._seq else 0
        newer = itertools.takewhile(lambda record: record.seq > known, reversed(self._by_change.values()))
        return list(itertools.islice(newer, most))[::-1], self._seq

    def get(self, rid: str) -> RouteRecord | None:
        return self._records.get(rid)

    def recent(self) -> list[RouteRecord]:
        """Return all kept records, oldest first."""
        return list(self._records.values())

    def find(self, name: str) -> RouteRecord | None:
        """Find a record by the client's name (the most recent one with it), the answer's id, or the internal rid."""
        for each in (name, name.removeprefix("chatcmpl-"), name.removeprefix("cmpl-")):
            found = self._records.get(self._by_name.get(each, each))
            if found is not None:
                return found
        return None

    def __len__(self) -> int:
        return len(self._records)

    def check(self) -> None:
        """Raises AssertionError if there are too many records, or a name leads to none or to another's."""
        assert len(self._records) <= self.capacity
        assert all(self._records[rid].name == name for name, rid in self._by_name.items())
        assert self._by_change.keys() == self._records.keys()
        numbers = [record.seq for record in self._by_change.values()]
        assert numbers == sorted(numbers)

    def _drop_oldest(self) -> None:
        rid, record = self._records.popitem(last=False)
        del self._by_change[rid]
        if self._by_name.get(record.name) == rid:
            del self._by_name[record.name]
