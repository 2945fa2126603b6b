"""Recent routing decisions and what became of each, so that anyone can ask why a request went where it went.

Owns:      a bounded ring of records: the oldest goes when a new request comes; in which order they changed last.
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
NOBODY: Mapping[str, str] = MappingProxyType({})


@dataclass(slots=True, kw_only=True)
class Try:
    """One decision for a request."""

    decision: Decision
    cached_tokens: int | None = None  # as the replica counted; None before the first token
    ttft_s: float | None = None
    outcome: RouteOutcome | None = None  # None while it runs
    failure: str | None = None  # why the request went elsewhere, or was refused
    hand_off: HandOffReport | None = None  # how the K/V came, as the decode replica saw it
    held_out: Mapping[str, str] = field(default_factory=dict)  # prefill replicas not asked then -> why (prefill_leg.py)
    prefill_end: str | None = None  # how the prefill leg ended; None while it runs, or without one
    times: LegTimes = field(default_factory=LegTimes)  # as the engines told them


@dataclass(slots=True, kw_only=True)
class RouteRecord:
    """All that was decided for one request."""

    rid: str
    timeline: Timeline
    tries: list[Try] = field(default_factory=list)
    ending: str = "running"  # then finished, aborted, failed or refused
    seq: int = 0  # of its last change

    @property
    def time_s(self) -> float:
        """When the request came, in seconds since 1970."""
        return self.timeline.arrival.time_s

    @property
    def name(self) -> str:
        """What the client calls the request."""
        return client_rid(self.rid)


class RouteLog:
    """Records by request, the most recent ``capacity`` of them."""

    def __init__(self, capacity: int = 1000) -> None:
        self.capacity = capacity
        self._records: OrderedDict[str, RouteRecord] = OrderedDict()  # by rid, oldest first
        self._by_name: dict[str, str] = {}  # client's name -> rid of the most recent one called so
        self._by_change: OrderedDict[str, RouteRecord] = OrderedDict()  # by rid; what changed last is last
        self._seq = 0

    def add(self, rid: str, decision: Decision, timeline: Timeline, held_out: Mapping[str, str] = NOBODY) -> Try:
        """The next try of request ``rid``."""
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
        """Something of ``record`` has changed, if it is still kept."""
        if record.rid in self._records:
            self._seq += 1
            record.seq = self._seq
            self._by_change[record.rid] = record
            self._by_change.move_to_end(record.rid)

    def changed_since(self, seq: int, *, most: int | None = None) -> tuple[list[RouteRecord], int]:
        """Records that changed after change number ``seq``, the longest unchanged first, and the number to ask with
        next. 0 asks for all; so does a number of another life of this router. ``most``: only those that changed last,
        so many; the others are not told later either."""
        known = seq if seq <= self._seq else 0
        newer = itertools.takewhile(lambda record: record.seq > known, reversed(self._by_change.values()))
        return list(itertools.islice(newer, most))[::-1], self._seq

    def get(self, rid: str) -> RouteRecord | None:
        return self._records.get(rid)

    def recent(self) -> list[RouteRecord]:
        """All that are kept, oldest first."""
        return list(self._records.values())

    def find(self, name: str) -> RouteRecord | None:
        """By the client's name of a request (the most recent one so called), its answer's id, or our own rid."""
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
