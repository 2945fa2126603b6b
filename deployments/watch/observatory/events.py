"""What happened to the replicas and the processes beside them, and when requests were refused: the feed of events.

Owns:      the events of the last hour, the replicas that have ended in it, and which of them died.
Never:     asks; it is told the state once a second.
Invariant: a replica dies at most once, and takes the place of at most one other, which died
           within DEATHS_S. What was there before the first observatory of the application
           started is no event; the next one goes on with what `kept` told. A replica keeps its name, and no other one
           has it until this one is forgotten. A request that went on elsewhere is counted once, at the first event
           about the replica that it left.
Thread:    the observatory's event loop.

    start ──> ready, or replaced if another one of its role had died ──> silent for TOLD_S <──> back
       │        └── unhealthy, drains
       └──> lost (its process or connection ended, or it hung) or drained (Serve stopped it)
    shedding ──> shed: nothing was refused for SHED_OVER_S
    died: a router, HAProxy, its manager or Serve's controller ──> stands_in       deploy_failed
    stalled ──> went_on: batches whose folder fails, and works again
"""

import itertools
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from deployments.fleet.seen import GoneReplica
from deployments.watch.observatory.serve_details import CONTROLLER, ROUTER, Helper, ServeDetails

KEPT_S = 3600.0
MOST_EVENTS, MOST_ENDED = 200, 32
WENT_ON_S = 60.0  # after an event its requests are counted: rows come late, and tries fail late
SHED_OVER_S = 15.0
TOLD_S = 3.0  # a process that was killed is silent for two seconds, until it is known to be lost: that is one event
DEATHS, DEATHS_S = 2, 600.0  # of one role, that are an alert
Row = Mapping[str, Any]


class Names:
    """Names of replicas that people can say: replica 1, prefill 2."""

    def __init__(self) -> None:
        self.named: dict[str, tuple[str, int]] = {}  # replica -> its role, and its number among that role

    def take(self, rows: Iterable[Row], told: Mapping[str, str]) -> None:
        """Number what is new in ``rows`` by the lowest number that no other of its role has; forget what is neither
        there nor in ``told``: replicas that the feed still tells of, with their roles."""
        here = {**told, **{row["id"]: row["role"] for row in rows}}
        self.named = {replica_id: named for replica_id, named in self.named.items() if replica_id in here}
        taken = set(self.named.values())
        for replica_id, role in here.items():
            if replica_id not in self.named:
                self.named[replica_id] = next((role, n) for n in itertools.count(1) if (role, n) not in taken)
                taken.add(self.named[replica_id])

    def number(self, replica_id: str) -> int:
        return self.named[replica_id][1]

    def name(self, replica_id: str) -> str:
        """Return the name alone; of a replica that is not known "replica"."""
        role, number = self.named.get(replica_id, ("unified", 0))
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
    told: bool = True  # that it is silent, or unhealthy


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
        self._helpers: Mapping[str, Helper] = {}
        self._away: dict[str, tuple[str, float]] = {}  # place of a helper that died -> its name, ended when
        self._failure = ""  # of the last deploy
        self._has_looked = True  # at Serve, since `restore`
        self._stalled = False  # whether batches are
        self._shed: tuple[float, float] | None = None  # since when requests are refused, and when one was last

    def take(
        self,
        rows: Iterable[Row],
        gone: Collection[GoneReplica],
        *,
        unmet: Collection[str] = (),
        stalled: str = "",
        shed: Callable[[float], float],
        went_on: Callable[[str], int],
        now_s: float,
        time_s: float,
    ) -> None:
        """Look once.

        Args: rows: of replicas that routers see, or that Serve starts or stops; gone: as routers told; unmet: those
              that run by Serve's list alone: no router has met them yet, or none has them now; stalled: why batches
              wait; shed: requests refused in the last so many seconds; went_on: a replica's requests that went on
              elsewhere.
        """
        now, here = (now_s, time_s), {row["id"]: row for row in rows}
        for each in gone:
            if each.replica_id not in self._known_gone:
                self._known_gone.add(each.replica_id)
                self._left(each, now)
        for replica_id, row in here.items():
            if replica_id not in self._ended:
                self._follow(replica_id, row, now)
        for replica_id in self._followed.keys() - here.keys() - set(unmet) if self._has_looked else ():
            self._vanished(replica_id, now)
        self._look_at_shedding(shed, now)
        if bool(stalled) != self._stalled:
            self._stalled = bool(stalled)
            kind, text = ("stalled", f"batches wait: {stalled}") if stalled else ("went_on", "batches wait no more")
            self._say(kind, text, now)
        counted = Counter[str]()
        for event in self._events:
            if event.requests is not None and event.replica is not None:
                if now_s - event.at_s <= WENT_ON_S:
                    event.requests = max(went_on(event.replica) - counted[event.replica], event.requests)
                counted[event.replica] += event.requests
        self._known_gone &= {each.replica_id for each in gone}
        while self._events and now_s - self._events[0].at_s > KEPT_S:
            self._events.popleft()
        old = [each for each, row in self._ended.items() if time_s - row["time"] > KEPT_S]
        for replica_id in [*old, *list(self._ended)[:-MOST_ENDED]]:
            self._ended.pop(replica_id, None)

    def look(self, details: ServeDetails, now_s: float, time_s: float) -> None:
        """Take a new look at Serve: the processes beside the replicas, and whether the last deploy failed."""
        now = (now_s, time_s)
        if details.failure and details.failure != self._failure:
            on = "; what ran before goes on" if any(each.was_ready for each in self._followed.values()) else ""
            self._say("deploy_failed", f"a deploy failed{on}: {details.failure}", now)
        self._failure = details.failure
        if not details.helpers:
            return
        self._has_looked = True
        new = {name: each for name, each in details.helpers.items() if name not in self._helpers}
        for name, each in self._helpers.items():
            end = details.ends.get(name, "")
            died = end in DIED if each.place == ROUTER else end or each.place == CONTROLLER
            if name not in details.helpers and not each.leaves and died:
                self._away[each.place] = (each.name, now_s)
                self._say("died", _death(each, end), now)
        for each in new.values():
            if each.place in self._away:
                before, ended_s = self._away.pop(each.place)
                took = f", {now_s - ended_s:.0f} s after that one had died" if now_s > ended_s else ""
                named = f"{each.name} stands in for {before}" if each.name != before else f"{each.name} is there again"
                self._say("stands_in", f"{named}{took}", now)
        self._helpers = details.helpers

    def kept(self) -> dict[str, Any]:
        """Return what the next observatory of this application goes on with (`restore`), as JSON can hold it."""
        return {
            "events": [asdict(each) for each in self._events],
            "followed": {name: asdict(each) for name, each in self._followed.items()},
            "ended": self._ended,
            "vacant": {role: list(each) for role, each in self._vacant.items()},
            "names": self._names.named,
            "failure": self._failure,
        }

    def restore(self, kept: Mapping[str, Any], later_s: float) -> None:
        """Go on with what another one kept, before the first look. ``later_s``: our clock's zero is so much later than
        its was. Raises: KeyError, TypeError, ValueError for what is none of ours; nothing has changed then."""
        events = [FleetEvent(**{**each, "at_s": each["at_s"] - later_s}) for each in kept["events"]]
        followed = {
            name: Followed(**{**each, "since_s": each["since_s"] - later_s, "began_s": each["began_s"] - later_s})
            for name, each in kept["followed"].items()
        }
        vacant = {
            role: deque(((name, at_s - later_s) for name, at_s in each), maxlen=MOST_ENDED)
            for role, each in kept["vacant"].items()
        }
        names = {name: (role, number) for name, (role, number) in kept["names"].items()}
        self._ended, self._failure = dict(kept["ended"]), str(kept["failure"])
        self._followed, self._vacant, self._names.named, self._has_looked = followed, vacant, names, False
        self._events.extend(events)
        self._num = max([self._num, *(each.seq for each in events)])

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
        if before is not None and not before.told and state == before.state and now[0] - before.since_s >= TOLD_S:
            self._trouble(replica_id, row, before, now)
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
        elif state == "accepting" and before.state == "silent" and before.told:
            self._say("back", f"speaks again, after {now[0] - before.since_s:.0f} s", now, **about)
        elif state == "silent" or (state == "unhealthy" and before.state == "silent"):
            before.told = False  # a stopped process that goes on is in an endless step by its first word
        elif state == "unhealthy":
            self._trouble(replica_id, row, before, now)
        elif state == "draining":
            self._say("drains", "drains", now, **about)
        if state not in ("silent", "unhealthy"):
            before.told = True
        before.state, before.since_s = state, now[0]
        before.was_ready |= state == "accepting"

    def _trouble(self, replica_id: str, row: Row, followed: Followed, now: tuple[float, float]) -> None:
        followed.told = True
        state = row["state"]
        text = "is silent" if state == "silent" else f"is unhealthy: {row['error']}"
        self._say(state, text, now, replica=replica_id, role=row["role"], requests=0)

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


DIED = ("WORKER_DIED", "NODE_DIED")  # Ray's reasons


def _death(helper: Helper, end: str) -> str:
    """Say that a process beside the replicas has died. ``end``: Ray's reason for the end of its actor."""
    if end == "NODE_DIED":
        return f"{helper.name} has died with its node"
    if helper.place in (ROUTER, CONTROLLER):
        return f"{helper.name} has died; {'Serve' if helper.place == ROUTER else 'Ray'} starts it anew"
    what = f"the manager of {helper.name}" if end in DIED else helper.name  # else Serve ended the manager for its sake
    return f"{what} has died; Serve starts both anew"


def _text(event: FleetEvent) -> str:
    if not event.requests:
        return event.text
    return f"{event.text}; {event.requests} request{'s' * (event.requests != 1)} went on elsewhere"
