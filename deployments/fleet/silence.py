"""Keeps the last report of each replica, and kills a replica that hangs for good.

Owns:      the last word of every replica that has attached, until it has left and its connection has ended.
Never:     chooses, or fails streams (fleet.py does).
Thread:    the router's event loop; `kill_if_hung` runs in a task of the replica's node.

A replica that this router has not heard for a minute may hang, or only the way between the two may be
cut. So the router does not judge: a task on the replica's own node asks it for its health, and kills it only if no
answer comes within HEALTH_S. Where that node cannot be reached nothing is killed; a node that has died Ray itself
finds. Several routers may do so at once: a killed replica's name is never used again.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, replace

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.serve._private.constants import SERVE_NAMESPACE

from deployments.channel.frames import ReplicaReport
from deployments.dispatch.leases import ReplicaInfo
from deployments.fleet.node_tasks import ANSWER_S, in_task
from deployments.fleet.seen import GoneReplica
from replicas.types import EngineStats

log = logging.getLogger(__name__)

HEALTH_S = 10.0  # a replica that does not answer its own node for so long, after all of its silence, hangs
FORGET_S = 600.0  # of silence, after which one that is no member is forgotten: its connection may never end
FIRST_WORD_S = 30.0  # after Serve lists a replica, on a busy machine; one that has not reported by then may never do so
DEAD_S = 5.0  # a replica that leaves after such a silence has died
MOST_GONE = 32
AGAIN_S = 30.0  # between two questions about one replica
KILLED, ANSWERS, GONE = "killed", "answers", "gone"
End = Callable[[ReplicaInfo], Awaitable[str]]  # KILLED, ANSWERS or GONE. Raises: TimeoutError, RayError


@dataclass(frozen=True, slots=True, kw_only=True)
class LastWord:
    """What a replica said last; times are of the router's clock."""

    info: ReplicaInfo
    heard_s: float  # when its last report came; before the first, when it attached
    attached_s: float  # the last time
    report: ReplicaReport | None = None
    connected: bool = True


class LastWords:
    """The last word of each replica that has attached, however often it was forgotten since."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.of: dict[str, LastWord] = {}
        self.gone: deque[GoneReplica] = deque(maxlen=MOST_GONE)  # that have left, the newest last
        self.as_of_s: dict[str, float] = {}  # of each member: when its last report was true; at first, when it joined
        self.renew: set[str] = set()  # lost, or attached again without a report since: they need a new connection

    def keep(self, members: Collection[str]) -> None:
        """Forget each replica that has left and is not connected."""
        now_s = self._clock()
        for replica_id in sorted(self.as_of_s.keys() & self.of.keys() - set(members)):
            word = self.of[replica_id]
            failed = word.report is not None and word.report.error is not None
            drains = word.report is not None and word.report.draining
            died = failed or (not drains and (not word.connected or now_s - word.heard_s >= DEAD_S))
            self.gone.append(GoneReplica(replica_id=replica_id, role=word.info.role.value, died=died))
        self.as_of_s = {each: self.as_of_s.get(each, now_s) for each in members}
        self.of = {
            each: word
            for each, word in self.of.items()
            if each in members or (word.connected and now_s - word.heard_s < FORGET_S)
        }
        self.renew &= self.as_of_s.keys()

    def attached(self, info: ReplicaInfo) -> None:
        now_s = self._clock()
        word = self.of.get(info.replica_id) or LastWord(info=info, heard_s=now_s, attached_s=now_s)
        self.of[info.replica_id] = replace(word, info=info, attached_s=now_s, connected=True)

    def heard(self, replica_id: str, report: ReplicaReport) -> None:
        now_s = self._clock()
        self.renew.discard(replica_id)
        word = self.of.get(replica_id)
        if replica_id in self.as_of_s:
            as_of_s, before = now_s - report.age_s, None if word is None else word.report
            if before is not None and report.age_s > 0 and _are_same(before.stats, report.stats):
                # not measured anew, though the channel was quicker: what the router knows better since must stay
                as_of_s = min(as_of_s, self.as_of_s[replica_id])
            self.as_of_s[replica_id] = as_of_s
        if word is not None:
            self.of[replica_id] = replace(word, heard_s=now_s, report=report)

    def ended(self, replica_id: str) -> None:
        """Note that its connection has ended."""
        if (word := self.of.get(replica_id)) is not None:
            self.of[replica_id] = replace(word, connected=False)
        self.renew.add(replica_id)
        self.keep(self.as_of_s.keys())

    @property
    def expects_one(self) -> bool:
        """Tell whether a member that joined less than FIRST_WORD_S ago has not reported yet."""
        now_s, reported = self._clock(), {each for each, word in self.of.items() if word.report is not None}
        return any(now_s - joined_s < FIRST_WORD_S for each, joined_s in self.as_of_s.items() if each not in reported)

    @property
    def draining(self) -> list[LastWord]:
        """What replicas said that have left, and go on with what they have: they still report."""
        now_s = self._clock()
        left = (word for each, word in sorted(self.of.items()) if each not in self.as_of_s)
        return [word for word in left if word.connected and now_s - word.heard_s < DEAD_S]

    def silence_s(self, replica_id: str) -> float | None:
        """Return for how long a replica that has attached has said nothing; None if it has not."""
        word = self.of.get(replica_id)
        return None if word is None else self._clock() - word.heard_s


def _are_same(stats: EngineStats, others: EngineStats) -> bool:
    return stats.time_s == others.time_s and stats == others  # nearly always the first differs, and it is one number


def said_nothing(seconds: float) -> str:
    return f"it has said nothing for {seconds:.1f} s"


def kill_if_hung(actor: str) -> str:
    """Kill a replica that does not answer this node, on which it runs."""
    try:
        replica = ray.get_actor(actor, namespace=SERVE_NAMESPACE)
        ray.get(replica.check_health.remote(), timeout=HEALTH_S)
    except GetTimeoutError:
        ray.kill(replica, no_restart=True)  # its raylet ends it, a stopped process too
        return KILLED
    except (ValueError, RayActorError):
        return GONE
    except RayTaskError:
        return ANSWERS  # its health check failed: Serve replaces it
    return ANSWERS


async def end_hung(info: ReplicaInfo) -> str:
    """Have its own node ask a replica, and kill it if it hangs. Raises: TimeoutError, RayError."""
    return await in_task(info.node_id, kill_if_hung, info.actor, within_s=HEALTH_S + ANSWER_S)


class HangKiller:
    """Ends replicas that have been silent for ``after_s``, if they hang; never with 0."""

    def __init__(self, *, after_s: float, end: End = end_hung) -> None:
        self._after_s = after_s
        self._end = end
        self._asked_s: dict[str, float] = {}  # when each was asked about last
        self._asking: set[asyncio.Task[None]] = set()

    def look(self, words: Mapping[str, LastWord], now_s: float) -> None:
        """Ask about each that has been silent for too long."""
        self._asked_s = {each: asked_s for each, asked_s in self._asked_s.items() if each in words}
        for replica_id, word in words.items():
            silent_s = now_s - word.heard_s
            if not self._after_s or silent_s < self._after_s:
                continue
            if now_s - self._asked_s.get(replica_id, -AGAIN_S) >= AGAIN_S:
                self._asked_s[replica_id] = now_s
                asking = asyncio.create_task(self._ask(word.info, silent_s))
                self._asking.add(asking)
                asking.add_done_callback(self._asking.discard)

    def stop(self) -> None:
        for asking in self._asking:
            asking.cancel()

    async def _ask(self, info: ReplicaInfo, silent_s: float) -> None:
        told = f"replica {info.replica_id}: {said_nothing(silent_s)}"
        try:
            found = await self._end(info)
        except (TimeoutError, RayError) as error:
            log.warning("%s; its node cannot be asked (%s), so nothing is done", told, type(error).__name__)
            return
        if found == KILLED:
            log.warning("%s, nor does it answer its own node: it was killed", told)
        else:
            log.warning("%s here; on its own node it %s", told, "answers" if found == ANSWERS else "has ended")
