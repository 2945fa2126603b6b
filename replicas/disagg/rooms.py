"""The terms on which an engine takes part in hand-offs, and the rooms that a role keeps.

Owns:      which rooms of one role are open, and which request each belongs to.
Invariant: a room stays until its last event, which frees what its request left in quarantine.
Thread:    engine thread only.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvtransfer.rooms.transfer_service import TransferService
from replicas.cache.kv import KvCache
from replicas.cache.quarantine import Detained
from replicas.distributions import Distributions
from replicas.errors import InvalidRequest
from replicas.observer import Observer
from replicas.request import Leg, Req
from replicas.scheduler.scheduler import Scheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOffTerms:
    """How this engine takes part in hand-offs."""

    fingerprint: str  # of its KV layout; goes with what it sends
    open_timeout_s: float = 180.0  # as a sender: for the receiver to open the room; as a receiver: for row and pages
    room_timeout_s: float = 180.0  # as a receiver: without a page


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOffParts:
    """The parts of one engine that its roles in hand-offs work with."""

    service: TransferService
    scheduler: Scheduler
    kv: KvCache
    terms: HandOffTerms
    vocab_size: int
    clock: Callable[[], float]
    observer: Observer
    distributions: Distributions


class Rooms:
    """Open rooms of one role, by number."""

    def __init__(self, kv: KvCache) -> None:
        self._kv = kv
        self._reqs: dict[int, Req] = {}

    def __len__(self) -> int:
        return len(self._reqs)

    def __iter__(self) -> Iterator[Req]:
        return iter(self._reqs.values())

    def __contains__(self, room: int) -> bool:
        return room in self._reqs

    def require_new(self, room: int) -> None:
        """Raise InvalidRequest if ``room`` is open: writes of an earlier try may still be under way."""
        if room in self._reqs:
            raise InvalidRequest(
                f"room {room} belongs to request {self._reqs[room].rid} here: take a new room for every try",
                param="hand_off",
            )

    def open(self, req: Req) -> None:
        room = leg_of(req).ticket.room
        assert room not in self._reqs, f"room {room} is open"
        self._reqs[room] = req

    def find(self, room: int) -> Req | None:
        """Return the request of ``room``, ended or not; None if the room is not open here."""
        return self._reqs.get(room)

    def end(self, room: int) -> Req | None:
        """Close ``room`` after its last event: no peer touches its pages. Returns: its request."""
        req = self._reqs.pop(room, None)
        if req is None:
            return None
        leg = leg_of(req)
        leg.exposed = False
        if leg.detained is not None:
            assert isinstance(leg.detained, Detained)
            self._kv.store.release_quarantined(leg.detained)
            leg.detained = None
        return req


def leg_of(req: Req) -> Leg:
    assert req.leg is not None, f"request {req.rid} takes part in no hand-off"
    return req.leg
