"""What happened to the replicas, and when requests were refused: the feed of events.

Owns:      the events of the last hour, the replicas that have ended in it, and which of them died.
Never:     asks; it is told the state once a second.
Invariant: a replica dies at most once, and takes the place of at most one other, which died
           within DEATHS_S. What was there before the observatory
           started is no event. A replica keeps its name, and no other one has it until this one is forgotten.
Thread:    the observatory's event loop.

    start ──> ready, or replaced if another one of its role had died ──> silent <──> back
       │        └── unhealthy, drains
       └──> lost (its process or connection ended, or it hung) or drained (Serve stopped it)
    shedding ──> shed: nothing was refused for SHED_OVER_S
"""

import itertools
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from deployments.fleet.seen import GoneReplica

KEPT_S = 3600.0
MOST_EVENTS, MOST_ENDED = 200, 32
WENT_ON_S = 60.0  # after an event its requests are counted: rows come late, and tries fail late
SHED_OVER_S = 15.0
DEATHS, DEATHS_S = 2, 600.0  # of one role, that are an alert
Row = Mapping[str, Any]


class Names:
    """Names of replicas that people can say: replica 1, prefill 2."""

    def __init__(self) -> None:
        self._named: dict[str, tuple[str, int]] = {}  # replica -> its role, and its number among that role

    def take(self, rows: Iterable[Row], told: Mapping[str, str]) -> None:
        """Number what is new in ``rows`` by the lowest number that no other of its role has; forget what is neither
        there nor in ``told``: replicas that the feed still tells of, with their roles."""
        here = {**told, **{row["id"]: row["role"] for row in rows}}
        self._named = {replica_id: named for replica_id, named in self._named.items() if replica_id in here}
        taken = set(self._named.values())
        for replica_id, role in here.items():
            if replica_id not in self._named:
                self._named[replica_id] = next((role, n) for n in itertools.count(1) if (role, n) not in taken)
                taken.add(self._named[replica_id])

    def number(self, replica_id: str) -> int:
        return self._named[replica_id][1]

    def name(self, replica_id: str) -> str:
        """Return the name alone; of a replica that is not known "replica"."""
        role, number = self._named.get(replica_id, ("unified", 0))
        return f"{'replica' if role == 'unified' else role} {number or ''}".strip()

    def called(self, replica_id: str) -> str:
        """Return the name, with what logs and metrics have: the id."""
        return f"{self.name(replica_id)} ({short_name(replica_id)})"


def short_name(replica_id: str) -> str:
    return replica_id.rpartition("#")[2]


@dataclass(slots=True, kw_only=True)
class FleetEvent:
    """One event; ``requests``: how many went on at other replicas, None where it is not about that."""

    seq: int
    time: float  # seconds since 1970
    kind: str
    text: str
    at_s: float  # by the observatory's own clock
    replica: str | None = None
    role: str | None = None
    requests: int | None = None


@dataclass(slots=True, kw_only=True)
class Followed:
    """A replica as it was at the last look."""

    state: str
    role: str
    since_s: float  # in this state
    began_s: float
    was_ready: bool


class EventFeed:
    """The events, from what the state shows a second after the other."""

    def __init__(
        self,
        on_death: Callable[[str], None] = lambda role: None,
        *,
        names: Names | None = None,
        first: int = 0,
    ) -> None:
        """``on_death``: called with the role of each replica that died; ``first``: events have higher numbers."""
        self._names = names or Names()
        self._on_death = on_death
        self._events: deque[FleetEvent] = deque(maxlen=MOST_EVENTS)
        self._num = first
        self._followed: dict[str, Followed] = {}
        self._ended: dict[str, dict[str, Any]] = {}  # by replica, the oldest first
        self._known_gone: set[str] = set()
        self._vacant: dict[str, deque[tuple[str, float]]] = {}  # role -> who is to be replaced, ended when
        self._shed: tuple[float, float] | None = None  # since when requests are refused, and when one was last

    def take(
        self,
        rows: Iterable[Row],
        gone: Collection[GoneReplica],
        *,
        unmet: Collection[str] = (),
        shed: Callable[[float], float],
        went_on: Callable[[str], int],
        now_s: float,
        time_s: float,
    ) -> None:
        """Look once.

        Args: rows: of replicas that routers see, or that Serve starts or stops; gone: as routers told; unmet: those
              that run by Serve's list alone: no router has met them yet, or none has them now; shed: requests refused
              in the last so many seconds; went_on: requests of a replica that went on elsewhere.
        """
        now, here = (now_s, time_s), {row["id"]: row for row in rows}
        for each in gone:
            if each.replica_id not in self._known_gone:
                self._known_gone.add(each.replica_id)
                self._left(each, now)
        for replica_id, row in here.items():
            if replica_id not in self._ended:
                self._follow(replica_id, row, now)
        for replica_id in self._followed.keys() - here.keys() - set(unmet):
            self._vanished(replica_id, now)
        self._look_at_shedding(shed, now)
        for event in self._events:
            if event.requests is not None and now_s - event.at_s <= WENT_ON_S:
                event.requests = went_on(event.replica or "")
        self._known_gone &= {each.replica_id for each in gone}
        while self._events and now_s - self._events[0].at_s > KEPT_S:
            self._events.popleft()
        old = [each for each, row in self._ended.items() if time_s - row["time"] > KEPT_S]
        for replica_id in [*old, *list(self._ended)[:-MOST_ENDED]]:
            self._ended.pop(replica_id, None)

    def body(self, *, since: int = 0, most: int = MOST_EVENTS) -> list[dict[str, Any]]:
        """Return the events after number ``since``, at most the newest ``most``, the oldest first."""
        found = [each for each in self._events if each.seq > since]
        return [
            {
                "seq": each.seq, "time": each.time, "kind": each.kind, "replica": each.replica, "role": each.role,
                "text": _text(each), "requests": each.requests,
            }
            for each in found[-most:]
        ]  # fmt: skip

    @property
    def told(self) -> dict[str, str]:
        """The roles of the replicas that are followed, or ended in the last hour."""
        followed = {name: each.role for name, each in self._followed.items()}
        return followed | {name: row["role"] for name, row in self._ended.items()}

    @property
    def ended(self) -> list[dict[str, Any]]:
        """The replicas that ended in the last hour, the newest first."""
        return list(reversed(self._ended.values()))

    def died(self, replica_id: str) -> bool:
        return bool(self._ended.get(replica_id, {}).get("died"))

    def deaths(self, now_s: float) -> Counter[str]:
        """Count by role the replicas that died in the last DEATHS_S."""
        return Counter(
            each.role for each in self._events if each.kind == "lost" and each.role and now_s - each.at_s <= DEATHS_S
        )

    def _say(self, kind: str, text: str, now: tuple[float, float], **more: Any) -> None:
        self._num += 1
        said = text if (subject := more.get("replica")) is None else f"{self._names.called(subject)} {text}"
        self._events.append(FleetEvent(seq=self._num, time=now[1], at_s=now[0], kind=kind, text=said, **more))

    def _follow(self, replica_id: str, row: Row, now: tuple[float, float]) -> None:
        state, before = row["state"], self._followed.get(replica_id)
        about: dict[str, Any] = {"replica": replica_id, "role": row["role"]}
        if before is None:  # one that was there before us comes into sight in another state
            self._followed[replica_id] = Followed(
                state=state, role=row["role"], since_s=now[0], began_s=now[0], was_ready=state != "starting"
            )
            if state == "starting":
                self._say("start", "starts", now, **about)
            return
        if state == before.state:
            return
        if state == "accepting" and not before.was_ready:
            self._ready(replica_id, before, now)
        elif state == "accepting" and before.state == "silent":
            self._say("back", f"speaks again, after {now[0] - before.since_s:.0f} s", now, **about)
        elif state == "silent":
            self._say("silent", "is silent", now, **about, requests=0)
        elif state == "unhealthy":
            self._say("unhealthy", f"is unhealthy: {row['error']}", now, **about, requests=0)
        elif state == "draining":
            self._say("drains", "drains", now, **about)
        before.state, before.since_s = state, now[0]
        before.was_ready |= state == "accepting"

    def _ready(self, replica_id: str, followed: Followed, now: tuple[float, float]) -> None:
        about = {"replica": replica_id, "role": followed.role}
        vacant = self._vacant.get(followed.role, deque())
        while vacant and now[0] - vacant[0][1] > DEATHS_S:
            vacant.popleft()  # this one came for another reason
        if vacant:
            before, ended_s = vacant.popleft()
            text = f"is ready in the place of {before}, {now[0] - ended_s:.0f} s after that one ended"
            self._say("replaced", text, now, **about)
        else:
            self._say("ready", f"is ready, after {now[0] - followed.began_s:.0f} s", now, **about)

    def _left(self, gone: GoneReplica, now: tuple[float, float]) -> None:
        """Note that a replica has left a router's fleet."""
        followed = self._followed.get(gone.replica_id)
        if followed is None:
            return  # before this life
        if gone.died:
            self._lose(gone.replica_id, self._followed.pop(gone.replica_id), now)
        elif followed.state != "draining":
            followed.state, followed.since_s = "draining", now[0]
            self._say("drains", "drains", now, replica=gone.replica_id, role=gone.role)

    def _vanished(self, replica_id: str, now: tuple[float, float]) -> None:
        """Note the end of a replica that is no longer listed by routers or by Serve."""
        followed = self._followed.pop(replica_id)
        if followed.state == "draining":
            self._end(replica_id, followed, now, died=False)
            self._say("drained", "has drained, and is gone", now, replica=replica_id, role=followed.role)
        elif followed.state == "starting":
            self._end(replica_id, followed, now, died=False)
            self._say("ended", "ended before it was ready", now, replica=replica_id, role=followed.role)
        else:  # and the router that could have told has ended too
            self._lose(replica_id, followed, now)

    def _lose(self, replica_id: str, followed: Followed, now: tuple[float, float]) -> None:
        self._end(replica_id, followed, now, died=True)
        self._say("lost", "is lost", now, replica=replica_id, role=followed.role, requests=0)
        self._on_death(followed.role)

    def _end(self, replica_id: str, followed: Followed, now: tuple[float, float], *, died: bool) -> None:
        name = self._names.name(replica_id)
        self._ended[replica_id] = {
            "id": replica_id, "name": name, "role": followed.role, "time": now[1], "died": died
        }  # fmt: skip
        if died and followed.was_ready:
            self._vacant.setdefault(followed.role, deque(maxlen=MOST_ENDED)).append((name, now[0]))

    def _look_at_shedding(self, shed: Callable[[float], float], now: tuple[float, float]) -> None:
        is_shedding = shed(2.0) > 0
        if self._shed is None:
            if is_shedding:
                self._shed = (now[0], now[0])
                why = "the queues are too long, or a key has too many choices open"
                self._say("shedding", f"requests are refused: {why}", now)
            return
        began_s, last_s = self._shed
        if is_shedding:
            self._shed = (began_s, now[0])
        elif now[0] - last_s >= SHED_OVER_S:
            count = round(shed(now[0] - began_s + 2.0))
            self._say("shed", f"no more requests are refused; {count} were, in {last_s - began_s + 1:.0f} s", now)
            self._shed = None


def _text(event: FleetEvent) -> str:
    if not event.requests:
        return event.text
    return f"{event.text}; {event.requests} request{'s' * (event.requests != 1)} went on elsewhere"
