"""The replicas as one router knows them: attached, reporting, hanging, or gone.

Owns:      which replicas are members, what each said on attaching, and its last report; of every connected replica,
           also one that drains and is no longer a member, whether it hangs.
Never:     chooses (routing/router.py), sends requests (dispatcher.py), fails streams (channel_server.py) or follows
           caches (cache_sync.py).
Invariant: the routing router's views are the attached replicas, after every change. None hangs while no other one
           speaks: then the machine is busy, or there is nowhere to go.
Thread:    the router's event loop; `set_members` is called from any thread through `call_soon_threadsafe`.

    member ──attach (retried)──> attached ──reports──> view        an error, or silent for SILENT_S: not healthy
       └── left, silent for STALE_S, or the connection ended ──────> gone; attached anew while it is a member, and
                                                                     shown as silent, by its last word (silence.py)
    hanging: silent, or in a step that does not end, while another one could go on. It keeps its connection; its open
             requests go on elsewhere

A step counts as hung after ``hang_s``, but not before SLOWER times the longest recent step of any replica: where such
a step has ended, such steps are slow. Nor does one of an engine's first steps, which may compile. A request that is
only slow is left at most ``max_tries`` - 1 times, since the last try stays (attempt.py).
"""

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import time
from collections.abc import Callable, Container, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from deployments.channel.channel_server import ChannelAddress
from deployments.channel.frames import Asked, ReplicaReport
from deployments.dispatch.leases import Leases, ReplicaCalls, ReplicaHangs, ReplicaInfo
from deployments.fleet.cache_migration import CacheMigration
from deployments.fleet.cache_sync import CacheSync
from deployments.fleet.seen import GoneReplica, SeenReplica
from deployments.fleet.silence import HangKiller, LastWord, LastWords, said_nothing
from kvtransfer.types import PeerAddress
from replicas.errors import MantaError
from replicas.types import TierStats
from routing.router import Router
from routing.types import IndexEvent, IndexSnapshot, ReplicaView, Role


def view_of(
    info: ReplicaInfo, report: ReplicaReport, *, as_of_s: float, hangs: bool = False, silent: bool = False
) -> ReplicaView:
    """Make the view. ``as_of_s``: when the report was true: requests sent while a long step ran are not in its
    statistics. ``silent``: none has followed for too long; ``hangs``: the replica's step does not end.
    """
    stats = report.stats
    return ReplicaView(
        replica_id=info.replica_id,
        time_s=as_of_s,
        num_running=stats.num_running - stats.num_offline_running,  # which give way to any request
        num_waiting=stats.num_waiting,
        num_receiving=stats.num_preallocating + stats.num_receiving,
        queued_uncached_tokens=stats.waiting_uncached_tokens,
        late_uncached_tokens=stats.late_uncached_tokens,
        late_factor=stats.late_factor,
        pool_utilization=stats.pool.utilization - stats.offline_pages / max(stats.pool.num_pages, 1),
        pool_pages=stats.pool.num_pages,
        free_pages=stats.pool.free_pages,
        page_size=stats.pool.page_size,
        prefill_tokens_per_s=stats.prefill_tokens_per_s,
        rate_step_tokens=stats.rate_step_tokens,
        decode_step_s=stats.decode_step_s,
        tokens_per_step=stats.tokens_per_step,
        max_running_requests=stats.max_running_requests,
        healthy=report.error is None and not hangs and not silent,
        silent=silent,
        accepting=not (report.released or report.draining),
        released=report.released,
        role=info.role,
        page_bytes=info.page_bytes,
        token_bytes=info.part_bytes.get("token", 0),
        border_bytes=info.part_bytes.get("window", 0) + info.part_bytes.get("state", 0),
        fetches=info.fetches,
        part=info.part,
        border_pages=info.border_pages,
        **_tiers(stats.tiers),
        adapters=frozenset() if stats.adapters is None else frozenset(stats.adapters.held),
        adapter_load_s=0.0 if stats.adapters is None else stats.adapters.load_s,
    )


def _tiers(tiers: TierStats | None) -> dict[str, Any]:
    """Make the fields of a view that tell of the tiers under the device pool."""
    if tiers is None:
        return {}
    return {
        "host_pages": tiers.host_pages,
        "store": (tiers.store or "") if tiers.store_error is None else "",
        "host_s_per_token": tiers.host_s_per_token,
        "store_s_per_token": tiers.store_s_per_token,
        "store_latency_s": tiers.store_latency_s,
    }


log = logging.getLogger(__name__)

SILENT_S = 1.0  # without a report, until a replica is passed over while another one speaks
STALE_S = 15.0  # until it is so in any case, and attached again: if all are silent, the machine is busy
REPORTS_MISSED = 5  # at the least, before a replica counts as silent
LOOK_S = 0.25  # how often silence is looked for when nothing else happens
LOOK_AGAIN_S = 0.05  # and with reports: a report costs the same however many replicas there are
ATTACH_AGAIN_S = 0.5
ANSWER_S = 5.0  # within which each replica answers a call to all, or is left out
T = TypeVar("T")
SPARE_LINES = 4  # of batches, that wait at a replica so that it never idles
SETTLED_STEPS = 16  # before these a long step may be one that compiles
SLOWER = 4.0


class Hangs:
    """The last report of every connected replica, and which of them hang."""

    def __init__(self, *, hang_s: float, silent_s: float, clock: Callable[[], float]) -> None:
        """``hang_s``: silence, or one step, of this length is a hang; ``silent_s``: a shorter silence, after which a
        replica no longer counts as one that could go on with another's requests.
        """
        self._hang_s = max(hang_s, silent_s)
        self.silent_s = silent_s
        self._clock = clock
        self.named: frozenset[str] = frozenset()  # those that hung at the last look
        self._said: dict[str, tuple[float, ReplicaReport]] = {}  # the one heard longest ago first
        self._in_long_step: set[str] = set()  # those whose last report told of a step of ``hang_s`` or more

    def heard(self, replica_id: str, report: ReplicaReport) -> None:
        self._said.pop(replica_id, None)
        self._said[replica_id] = (self._clock(), report)
        if self.in_long_step(report):
            self._in_long_step.add(replica_id)
        else:
            self._in_long_step.discard(replica_id)

    def in_long_step(self, report: ReplicaReport) -> bool:
        return report.step_age_s >= self._hang_s

    def lost(self, replica_id: str) -> None:
        """Forget a replica whose connection has ended, and its streams with it."""
        self._said.pop(replica_id, None)
        self._in_long_step.discard(replica_id)

    def stood_still(self, seconds: float) -> None:
        """Do not count as silence the last ``seconds``, in which this process did not run."""
        now_s = self._clock()
        self._said = {each: (min(s + seconds, now_s), report) for each, (s, report) in self._said.items()}

    def find(self, able: Iterable[str], *, prefill: Container[str] = ()) -> dict[str, str]:
        """Return the replicas that hang, and how; none if none of ``able``, which could go on with a request, speaks.

        Args: prefill: prefill replicas. A silent one hangs after twice ``hang_s``: the heartbeats of the decode side
              find its silence first, and the decode side then computes the prompt without another try.
        """
        now_s, found = self._clock(), {}
        for each, silence_s in self._silent_for(self._hang_s, now_s):
            if each not in prefill or silence_s >= 2 * self._hang_s:
                found[each] = said_nothing(silence_s)
        if not self._in_long_step <= found.keys():
            longest_s = max(report.stats.longest_step_s for _, report in self._said.values())
            step_s = max(self._hang_s, SLOWER * longest_s)
            for each in sorted(self._in_long_step - found.keys()):
                _, report = self._said[each]
                settled = report.stats.num_extend_steps + report.stats.num_decode_steps >= SETTLED_STEPS
                if settled and report.step_age_s >= step_s:
                    found[each] = f"its step has been running for {report.step_age_s:.1f} s"
        return found if found and any(self._speaks(each, now_s) for each in able if each not in found) else {}

    @property
    def may_exist(self) -> bool:
        """Whether `find` could find any; it costs nothing, whatever the number of replicas."""
        return bool(self._in_long_step) or any(True for _ in self._silent_for(self._hang_s, self._clock()))

    def _silent_for(self, seconds: float, now_s: float) -> Iterator[tuple[str, float]]:
        """Yield the replicas that have said nothing for ``seconds`` or more, and for how long."""
        for each, (heard_s, _) in self._said.items():
            if now_s - heard_s < seconds:
                return
            yield each, now_s - heard_s

    def _speaks(self, replica_id: str, now_s: float) -> bool:
        said = self._said.get(replica_id)
        return said is not None and now_s - said[0] < self.silent_s and said[1].error is None


@dataclass(slots=True, kw_only=True)
class Wrong:
    """The replicas that the routing router is not to choose, for what they do not say, as of the last look."""

    hanging: set[str] = field(default_factory=set)
    silent: set[str] = field(default_factory=set)
    as_of_s: float = float("-inf")


class Fleet:
    """The members, what they reported, and the views that a `Router` has of them."""

    def __init__(
        self,
        *,
        router: Router,
        leases: Leases,
        report_period_s: float = 0.1,
        hang_timeout_s: float = 4.0,
        clock: Callable[[], float] = time.monotonic,
        role_of: Callable[[str], Role] = lambda replica_id: Role.UNIFIED,
        migration: CacheMigration | None = None,
        killer: HangKiller | None = None,
    ) -> None:
        """``role_of``: returns the role of a member that has not attached yet. ``migration``: of cached pages, when
        replicas come and go. ``killer``: of those that hang for good; None: they are left to Serve."""
        self._router = router
        self._role_of = role_of
        silent_s = max(SILENT_S, REPORTS_MISSED * report_period_s)
        self._hangs = Hangs(hang_s=hang_timeout_s, silent_s=silent_s, clock=clock)
        self._leases = leases
        self._clock = clock
        self._address: ChannelAddress | None = None
        self._members: frozenset[str] = frozenset()
        self._infos: dict[str, ReplicaInfo] = {}
        self._reports: dict[str, tuple[float, ReplicaReport]] = {}  # of members; the one heard longest ago first
        self._wrong = Wrong()
        self._leave: Callable[[str, MantaError], None] = lambda replica_id, error: None
        self._attaching: dict[str, asyncio.Task[None]] = {}
        self._words = LastWords(clock)
        self._killer = killer
        self._watch: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self.sync = CacheSync(router, leases)
        self._migration = migration or CacheMigration(leases, fill_s=0.0, push_s=0.0, drain_s=0.0)

    def start(
        self,
        address: ChannelAddress,
        *,
        leave: Callable[[str, MantaError], None],
        send: Callable[[str, Asked], None] = lambda replica_id, asked: None,
    ) -> None:
        """Attach members to the channel at ``address`` from now on; ``leave`` fails the streams of one that hangs, and
        ``send`` asks one over the channel."""
        self._address, self._leave = address, leave
        self._migration.start(send)
        self._watch = asyncio.create_task(self._look_forever())
        self.set_members(self._members)

    def set_members(self, members: Iterable[str]) -> None:
        """Set the running replicas."""
        self._members = frozenset(members)
        self._words.keep(self._members)
        if self._migration.leaving:
            self._migration.back(self._members)
        gone = [info for each, info in self._infos.items() if each not in self._members]
        if gone:
            self._migration.left(gone, [each for each in self.infos if each not in gone], self._loads())
        for replica_id in set(self._infos) | set(self._attaching):
            if replica_id not in self._members:
                self._forget(replica_id)
        if self._address is not None:
            for replica_id in sorted(self._members - self._infos.keys() - self._attaching.keys()):
                address = dataclasses.replace(self._address, renew=replica_id in self._words.renew)
                self._attaching[replica_id] = asyncio.create_task(self._attach(replica_id, address))
        self._update()

    def on_report(self, replica_id: str, report: ReplicaReport) -> None:
        self._hangs.heard(replica_id, report)
        self._words.heard(replica_id, report)
        if replica_id in self._members:
            self._reports.pop(replica_id, None)
            self._reports[replica_id] = (self._clock(), report)
            self._hear(replica_id, report)
            if replica_id in self._infos and self._address is not None:
                self.sync.on_report(replica_id, report.stats.cache_event_seq, self._address.router_id)

    def on_events(self, replica_id: str, events: Sequence[IndexEvent]) -> None:
        if replica_id in self._infos and self._address is not None:
            self.sync.on_events(replica_id, events, self._address.router_id)

    def on_snapshot(self, replica_id: str, snapshot: IndexSnapshot) -> None:
        if replica_id in self._infos:
            self.sync.on_snapshot(replica_id, snapshot)

    def on_lost(self, replica_id: str) -> None:
        """Forget a replica whose connection ended, and attach it again while it is a member: it may be dead."""
        log.warning("the connection to replica %s ended", replica_id)
        self._hangs.lost(replica_id)
        self._words.ended(replica_id)
        self._forget(replica_id)
        self.set_members(self._members)

    def attach_silent_again(self) -> None:
        """Forget and attach every replica that has not reported for STALE_S: first over the connection that it may
        still have, so that a replica that was only held up keeps its requests; the second time over a new one."""
        now_s, words = self._clock(), self._words.of
        since_s = {each: max(words[each].heard_s, words[each].attached_s) for each in self._infos}
        silent = [each for each, last_s in since_s.items() if now_s - last_s >= self._stale_s]
        for replica_id in silent:
            log.warning("replica %s has not reported for %.0f s; attaching it again", replica_id, self._stale_s)
            self._forget(replica_id)
        self.set_members(self._members)
        self._words.renew.update(silent)

    def leave_hanging(self) -> None:
        """Fail the open streams of replicas that hang while another one can go on with them."""
        self._update()
        hanging = self._hanging_now()
        for replica_id, how in hanging.items():
            if replica_id not in self._hangs.named:
                log.warning("replica %s hangs: %s; its requests go on elsewhere", replica_id, how)
            self._leave(replica_id, ReplicaHangs(f"replica {replica_id} hangs: {how}"))
        self._hangs.named = frozenset(hanging)

    @property
    def _stale_s(self) -> float:
        return max(STALE_S, self._hangs.silent_s)

    @property
    def gone(self) -> tuple[GoneReplica, ...]:
        """The last replicas that have left."""
        return tuple(self._words.gone)

    @property
    def infos(self) -> list[ReplicaInfo]:
        """The attached replicas, by id."""
        return [self._infos[replica_id] for replica_id in sorted(self._infos)]

    @property
    def num_members(self) -> int:
        return len(self._members)

    @property
    def num_ready(self) -> int:
        """The number of replicas that can take a request; a prefill replica cannot take one to its end."""
        self._update()
        return sum(view.may_take and view.role is not Role.PREFILL for view in self._router.views)

    def info_of(self, replica_id: str) -> ReplicaInfo | None:
        """Return what an attached replica said of itself. Any thread may ask."""
        return self._infos.get(replica_id)

    def transfer_address(self, replica_id: str) -> PeerAddress | None:
        """Return where the transfer service of an attached replica listens."""
        info = self.info_of(replica_id)
        return None if info is None else info.transfer

    def holders_of(self, adapter: str) -> list[str]:
        """List the replicas that hold an adapter, by its identity."""
        return [view.replica_id for view in self._router.views if adapter in view.adapters]

    def cache_pages(self) -> dict[str, tuple[int, int]]:
        """Return how many pages each replica is believed to hold: confirmed by its events, and only expected."""
        return {view.replica_id: self._router.num_pages(view.replica_id) for view in self._router.views}

    def report_ages_s(self) -> dict[str, float]:
        """Return the age of each member's last report, however often it was attached since; of a member that has not
        reported yet, the time since it joined."""
        now_s = self._clock()
        return {each: now_s - as_of_s for each, as_of_s in sorted(self._words.as_of_s.items())}

    @property
    def expects_one(self) -> bool:
        """Tell whether a member is about to report for the first time."""
        return self._words.expects_one

    def line_places(self) -> dict[str, int]:
        """Count the batch requests that each replica may have: its rows that no other request has or waits for, and a
        few that wait."""
        return {
            view.replica_id: max(view.max_running_requests - view.num_running - view.num_waiting, 0) + SPARE_LINES
            for view in self._router.views
            if view.may_take and view.role is not Role.PREFILL
        }

    @property
    def num_draining(self) -> int:
        """Count the replicas that take no request and finish those that they have."""
        self._update()
        return len(self._words.draining) + sum(view.state == "draining" for view in self._router.views)

    def seen(self) -> tuple[SeenReplica, ...]:
        """Return every member, by id: one that has not attached or reported yet is starting. Behind them are those that
        Serve has stopped and that finish what they have."""
        self._update()
        ages_s, states = self.report_ages_s(), {view.replica_id: view.state for view in self._router.views}
        hanging, found = self._hanging_now(), []
        for each in sorted(self._members):
            word, silence_s = self._words.of.get(each), self._words.silence_s(each) or 0.0
            info, report = (None, None) if word is None else (word.info, word.report)
            mute = word is not None and (report is not None or silence_s >= self._hangs.silent_s)
            state = states.get(each, "silent" if mute else "starting")
            error = None if report is None else report.error
            why = said_nothing(silence_s) if state == "silent" else error or hanging.get(each, "")
            found.append(
                SeenReplica(
                    replica_id=each,
                    role=(self._role_of(each) if info is None else info.role).value,
                    state=state,
                    why=why if state in ("silent", "unhealthy") else "",
                    info=info,
                    report=report,
                    report_age_s=None if report is None else ages_s[each],
                )
            )
        return (*found, *map(self._draining, self._words.draining))

    def _draining(self, word: LastWord) -> SeenReplica:
        return SeenReplica(
            replica_id=word.info.replica_id,
            role=word.info.role.value,
            state="draining",
            info=word.info,
            report=word.report,
            report_age_s=None if word.report is None else self._clock() - word.heard_s,
        )

    def describe(self) -> str:
        """Say the state of all replicas in one clause, for errors and /health."""
        states = (f"{each.replica_id}: {each.state}" for each in self.seen())
        return ", ".join(states) or "no replica is running yet"

    async def wait_ready(self, timeout_s: float) -> bool:
        """Wait for a replica that can take a request. Returns: whether there is one."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not self.num_ready:
                    self._changed.clear()
                    await self._changed.wait()
        return bool(self.num_ready)

    async def ask_all(
        self, ask: Callable[[str], Coroutine[Any, Any, T]], *, timeout_s: float = ANSWER_S
    ) -> dict[str, T]:
        """Call ``ask`` for every attached replica at once. Returns: the answers by replica; a replica that fails, or
        takes longer than ``timeout_s``, is left out, with a line in the log."""
        ids = sorted(self._infos)
        asked = (asyncio.wait_for(ask(replica_id), timeout_s) for replica_id in ids)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        good: dict[str, T] = {}
        for replica_id, answer in zip(ids, answers, strict=True):
            if isinstance(answer, BaseException):
                log.warning("replica %s did not answer: %r", replica_id, answer)
            else:
                good[replica_id] = answer
        return good

    async def stop(self) -> None:
        self._migration.stop()
        if self._killer is not None:
            self._killer.stop()
        self._address = None  # connections that end from now on are not made anew
        for task in [*self._attaching.values(), *([self._watch] if self._watch else [])]:
            task.cancel()
        for replica_id in self.sync.asking:
            self.sync.forget(replica_id)

    def check(self) -> None:
        """Raises AssertionError if a replica is known that is not a member."""
        assert self._infos.keys() <= self._members
        assert self._reports.keys() <= self._members
        assert self._words.as_of_s.keys() == self._members
        assert self._infos.keys() <= self._words.of.keys()
        assert not self._infos.keys() & self._attaching.keys()
        assert self.sync.asking <= self._infos.keys()
        self.sync.check()
        self._migration.check()

    def _loads(self) -> dict[str, ReplicaView]:
        return {view.replica_id: view for view in self._router.views}

    async def _attach(self, replica_id: str, address: ChannelAddress) -> None:
        while True:
            try:
                info = await self._leases.call(replica_id, ReplicaCalls.attach, address)
                break
            except MantaError as error:
                log.info("replica %s is not attached yet: %s", replica_id, error)
            except Exception:
                log.exception("attaching replica %s failed; trying again", replica_id)
            await asyncio.sleep(ATTACH_AGAIN_S)
        if self._migration.may_fill(info):
            await self._migration.fill(info, self.infos, self._loads())
        del self._attaching[replica_id]
        self._attached(info)
        log.info("replica %s attached: pool of %s", replica_id, info.pool)
        self._update(replica_id)
        self.sync.ask(replica_id, address.router_id)

    def _attached(self, info: ReplicaInfo) -> None:
        self._infos[info.replica_id] = info
        self._words.attached(info)

    async def _look_forever(self) -> None:
        """Look for silent and hanging replicas, again and again: their silence wakes nothing."""
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + LOOK_S
            await asyncio.sleep(LOOK_S)
            if (late_s := loop.time() - due_s) > SILENT_S:
                self._hangs.stood_still(late_s)
            self.attach_silent_again()
            self.leave_hanging()
            if self._killer is not None:
                self._killer.look(self._words.of, self._clock())

    def _hanging_now(self) -> dict[str, str]:
        """Return the replicas that hang, and how."""
        if not self._hangs.may_exist:
            return {}
        prefill = {each for each, info in self._infos.items() if info.role is Role.PREFILL}
        able = (each for each in reversed(self._reports) if each in self._infos and each not in prefill)
        return self._hangs.find(able, prefill=prefill)

    def _forget(self, replica_id: str) -> None:
        self._infos.pop(replica_id, None)
        self._reports.pop(replica_id, None)
        self.sync.forget(replica_id)
        task = self._attaching.pop(replica_id, None)
        if task is not None:
            task.cancel()
        self._router.forget(replica_id)

    def _hear(self, replica_id: str, report: ReplicaReport) -> None:
        """Show a report to the router; the other replicas are looked at if that is due."""
        if self._clock() - self._wrong.as_of_s >= LOOK_AGAIN_S or self._hangs.in_long_step(report):
            self._update(replica_id)
            return
        self._wrong.hanging.discard(replica_id)
        self._wrong.silent.discard(replica_id)
        self._show(replica_id)
        self._changed.set()

    def _update(self, heard: str | None = None) -> None:
        """Show the router what is new: the report of ``heard``, and the replicas that hang or are silent from now on,
        or no longer."""
        before, self._wrong = (
            self._wrong,
            Wrong(hanging=set(self._hanging_now()), silent=self._silent_now(), as_of_s=self._clock()),
        )
        changed = (before.hanging ^ self._wrong.hanging) | (before.silent ^ self._wrong.silent)
        for replica_id in changed if heard is None else changed | {heard}:
            self._show(replica_id)
        self._changed.set()

    def _show(self, replica_id: str) -> None:
        """Show the router a replica, if it is attached and has reported."""
        info, heard = self._infos.get(replica_id), self._reports.get(replica_id)
        if info is not None and heard is not None:
            hangs, silent = replica_id in self._wrong.hanging, replica_id in self._wrong.silent
            as_of_s = self._words.as_of_s[replica_id]
            self._router.report(view_of(info, heard[1], as_of_s=as_of_s, hangs=hangs, silent=silent))

    def _silent_now(self) -> set[str]:
        """Return the attached replicas that are passed over for their silence."""
        now_s = self._clock()
        newest_s = next((self._reports[each][0] for each in reversed(self._reports) if each in self._infos), now_s)
        all_silent = now_s - newest_s >= self._hangs.silent_s
        limit_s = self._stale_s if all_silent else self._hangs.silent_s
        oldest_first = ((each, heard_s) for each, (heard_s, _) in self._reports.items())
        silent = itertools.takewhile(lambda told: now_s - told[1] >= limit_s, oldest_first)
        return {each for each, _ in silent if each in self._infos}
