"""What this router has sent to each replica, and what of it the replica's last report cannot know yet.

Owns:      the open requests of this router, by decision number.
Never:     guesses at other routers' requests; those show in the next report.
Invariant: per replica, requests_since <= in_flight; a replica that has left has no open requests.
Thread:    the router's own (one event loop).
"""

from dataclasses import dataclass, field
from itertools import takewhile

from routing.types import Sent

_NOTHING = Sent()


@dataclass(frozen=True, slots=True)
class _Open:
    sent_s: float
    num_tokens: int


@dataclass(slots=True)
class _Replica:
    open: dict[int, _Open] = field(default_factory=dict)  # by decision number
    report_s: float = float("-inf")  # when the last report was measured
    ended_since: int = 0  # open at the report, ended by now


class SentLoad:
    """Open requests of one router per replica."""

    def __init__(self) -> None:
        self._replicas: dict[str, _Replica] = {}
        self._where: dict[int, str] = {}  # decision number -> replica

    def report(self, replica_id: str, time_s: float) -> None:
        """``replica_id`` measured itself at ``time_s``; an older report than the last changes nothing."""
        replica = self._replicas.setdefault(replica_id, _Replica())
        if time_s > replica.report_s:
            replica.report_s, replica.ended_since = time_s, 0

    def forget(self, replica_id: str) -> None:
        """The replica has left: its open requests end here."""
        replica = self._replicas.pop(replica_id, None)
        for number in replica.open if replica else ():
            del self._where[number]

    def send(self, replica_id: str, *, number: int, num_tokens: int, now_s: float) -> None:
        """Decision ``number`` sends a request of ``num_tokens`` prompt tokens to a known replica."""
        self._replicas[replica_id].open[number] = _Open(now_s, num_tokens)
        self._where[number] = replica_id

    def end(self, number: int) -> bool:
        """The request of decision ``number`` ended. False if it was not open: ended before, or its replica left."""
        replica_id = self._where.pop(number, None)
        if replica_id is None:
            return False
        replica = self._replicas[replica_id]
        request = replica.open.pop(number)
        if request.sent_s < replica.report_s:
            replica.ended_since += 1
        return True

    def of(self, replica_id: str) -> Sent:
        """What a known replica's last report does not tell."""
        replica = self._replicas[replica_id]
        if not replica.open and not replica.ended_since:
            return _NOTHING
        newest_first = reversed(replica.open.values())  # the clock never runs back
        since = [r.num_tokens for r in takewhile(lambda r: r.sent_s >= replica.report_s, newest_first)]
        return Sent(
            in_flight=len(replica.open),
            requests_since=len(since),
            tokens_since=sum(since),
            ended_since=replica.ended_since,
        )

    @property
    def num_open(self) -> int:
        return len(self._where)

    def check(self) -> None:
        """Raises AssertionError if an open request is counted at two replicas or at none."""
        held = {number: replica_id for replica_id, r in self._replicas.items() for number in r.open}
        assert held == self._where, f"open by replica {held} differs from open by decision {self._where}"
        assert sum(len(r.open) for r in self._replicas.values()) == len(held), "a request is open at two replicas"
        assert all(r.ended_since >= 0 for r in self._replicas.values())
