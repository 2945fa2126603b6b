"""Signs of life, and the proof that a peer is dead.

Owns:      when a heartbeat is due and when silence has lasted too long; for each process of a peer whose death is in
           question (its service, and ranks that live elsewhere), since when it is gone and when to ask next.
Never:     reads a clock or dials: the caller gives the time, and `PeerTable` reports what its dials found.
Invariant: a process is proven gone by two proofs GRACE_S apart with no answer of its own in between; no answer at all
           is neither.

A process is gone when nothing listens at its address (it closes its listener last, after its agent), or when another
incarnation does. One refusal may be a restarting proxy or a firewall; and bytes that wait in our sockets need the grace
to land (tcp; notes/nixl.md section 8).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvtransfer.types import PeerAddress


class Silence:
    """How long the other end of a connection has been silent while this one listened; a false alarm is expensive: it
    costs rooms or, from the port of a rank, a replica.

    Time in which the listener did not look counts as one period at most: then the listener itself was held up, or the
    whole machine, and messages of the other side may still be unread, or were never sent.
    """

    def __init__(self, *, period_s: float, limit_s: float, now: float) -> None:
        """``period_s``: how often the other side should send something."""
        self.limit_s = limit_s
        self._period_s = period_s
        self._looked_s = now
        self._silent_s = 0.0

    def looked(self, now: float, *, heard: bool) -> bool:
        """Book one look, and whether something had come. Returns: whether the silence is too long."""
        self._silent_s = 0.0 if heard else self._silent_s + min(now - self._looked_s, self._period_s)
        self._looked_s = now
        return self._silent_s >= self.limit_s

    @property
    def next_s(self) -> float:
        """When it is too long at the earliest."""
        return self._looked_s + self.limit_s - self._silent_s


class Heartbeat:
    """When one connection between engines needs a ping, and the silence of its other end."""

    def __init__(self, *, period_s: float, misses: int, now: float) -> None:
        self.period_s = period_s
        self.silence = Silence(period_s=period_s, limit_s=period_s * misses, now=now)
        self.sent_s = now

    def take_due(self, now: float) -> bool:
        """Return whether a ping is due; the caller sends it."""
        due = now >= self.sent_s + self.period_s
        if due:
            self.sent_s = now
        return due

    @property
    def next_s(self) -> float:
        return min(self.sent_s + self.period_s, self.silence.next_s)


GRACE_S = 1.0
RETRY_S = 0.25  # within the grace: a process that listens again shall be noticed
MAX_RETRY_S = 5.0  # of a process that lives, or cannot be reached


@dataclass(slots=True, kw_only=True)
class _Process:
    address: PeerAddress
    dial_s: float  # when to dial next
    backoff_s: float = 0.0
    gone_s: float = math.inf  # since when
    proven: bool = False
    link: int | None = None  # the dial that asks

    def gone(self, now: float) -> None:
        self.gone_s, self.backoff_s = min(self.gone_s, now), 0.0
        self.proven = now >= self.gone_s + GRACE_S
        self.dial_s = math.inf if self.proven else min(now + RETRY_S, self.gone_s + GRACE_S)

    def unproven(self, now: float) -> None:
        """It lives, or that cannot be known."""
        self.backoff_s = min(max(2 * self.backoff_s, RETRY_S), MAX_RETRY_S)
        self.dial_s = now + self.backoff_s


class DeathProof:
    """What is known of the processes of one peer that seems dead, until all are proven gone or its service answers."""

    def __init__(self, service: PeerAddress, followers: Sequence[PeerAddress], reason: str, now: float) -> None:
        self.reason = reason
        self._processes = [_Process(address=address, dial_s=now) for address in (service, *followers)]
        self._declared_s = math.inf

    def service_gone(self, now: float) -> None:
        """A dial of `PeerTable` was refused, or another incarnation answered."""
        self._processes[0].gone(now)

    def declared(self, now: float) -> None:
        """The supervisor of its machine reports that it is dead."""
        self._declared_s = min(self._declared_s, now)

    def due(self, now: float) -> list[PeerAddress]:
        """The addresses to dial now; report each dial by `asked`."""
        return [each.address for each in self._processes if now >= each.dial_s]

    def asked(self, address: PeerAddress, link: int) -> None:
        [process] = [each for each in self._processes if each.address == address]
        process.link, process.dial_s = link, math.inf

    @property
    def links(self) -> list[int]:
        return [each.link for each in self._processes if each.link is not None]

    def answered(self, link: int, incarnation: str, now: float) -> bool:
        """A dial was answered. Returns: whether it was the peer's own transfer service, which is alive then."""
        process = self._take(link)
        if incarnation != process.address.incarnation:
            process.gone(now)
            return False
        process.gone_s = math.inf
        process.unproven(now)
        return process is self._processes[0]

    def not_answered(self, link: int, now: float, *, refused: bool) -> None:
        process = self._take(link)
        if refused:
            process.gone(now)
        else:
            process.unproven(now)

    def proven(self, now: float) -> bool:
        return now >= self._declared_s + GRACE_S or all(each.proven for each in self._processes)

    @property
    def next_s(self) -> float:
        if all(each.proven for each in self._processes):
            return 0.0
        return min(self._declared_s + GRACE_S, *(each.dial_s for each in self._processes))

    def _take(self, link: int) -> _Process:
        [process] = [each for each in self._processes if each.link == link]
        process.link = None
        return process

    def check(self) -> None:
        for each in self._processes:
            assert each.proven or each.link is not None or each.dial_s < math.inf, f"{each.address} is not asked again"
            assert not each.proven or each.gone_s < math.inf
