"""Recent routing decisions and what became of each, so that anyone can ask why a request went where it went.

Owns:      a bounded ring of records: the oldest goes when a new request comes.
Never:     decides anything; holds prompts or texts (a decision holds hashes of pages).
Invariant: at most ``capacity`` records; a record's tries are in order, each with its outcome once that is known.
Thread:    the router's event loop.
"""

import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from deployments.rids import client_rid
from replicas.types import HandOffReport
from routing.types import Decision, Outcome

NOBODY: Mapping[str, str] = MappingProxyType({})


@dataclass(slots=True, kw_only=True)
class Try:
    """One decision for a request."""

    decision: Decision
    cached_tokens: int | None = None  # as the replica counted; None before the first token
    ttft_s: float | None = None
    outcome: Outcome | None = None  # None while it runs
    failure: str | None = None  # why the request went elsewhere, or was refused
    hand_off: HandOffReport | None = None  # how the K/V came, as the decode replica saw it
    held_out: Mapping[str, str] = field(default_factory=dict)  # prefill replicas not asked then -> why (hold_out.py)
    prefill_end: str | None = None  # how the prefill leg ended; None while it runs, or without one


@dataclass(slots=True, kw_only=True)
class RouteRecord:
    """All that was decided for one request."""

    rid: str
    time_s: float  # seconds since 1970
    tries: list[Try] = field(default_factory=list)

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

    def add(self, rid: str, decision: Decision, held_out: Mapping[str, str] = NOBODY) -> Try:
        """The next try of request ``rid``."""
        record = self._records.get(rid)
        if record is None:
            record = self._records[rid] = RouteRecord(rid=rid, time_s=time.time())
            self._by_name[record.name] = rid
            if len(self._records) > self.capacity:
                self._drop_oldest()
        attempt = Try(decision=decision, held_out=held_out)
        record.tries.append(attempt)
        return attempt

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

    def _drop_oldest(self) -> None:
        rid, record = self._records.popitem(last=False)
        if self._by_name.get(record.name) == rid:
            del self._by_name[record.name]
