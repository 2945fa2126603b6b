"""A live router before many replicas: the production fleet, channel and router in this process, and in another one
replicas that compute nothing but speak the real channel: handshake, reports, cache events, snapshots, tokens.

Owns:    the process of the replicas and the pipe that carries the router's calls to them, in Ray's place.
Never:   measures HTTP, tokenising or Ray.
Thread:  one event loop in each process; uvloop's where it is installed, as Ray has it.

Every replica reports each period, evenly spread. Before a report it tells the events of its cache: runs of new pages
stored, the oldest removed for them, and the pages of the prompts that it was sent. A report carries the time at which
it was made, and both processes have one clock: that tells how late the router takes reports and events in.
"""

import asyncio
import contextlib
import gc
import itertools
import multiprocessing
import os
import resource
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from random import Random
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt
import psutil

from benchmarks.harness import Row, Table, percentile
from deployments.channel.channel_client import ChannelClient
from deployments.channel.channel_server import ChannelAddress, ChannelServer
from deployments.channel.frames import Asked, CacheChanges, CacheKeys, ReplicaReport, RunRequest, encode
from deployments.dispatch.attempt import TryLimits
from deployments.dispatch.dispatcher import Dispatcher
from deployments.dispatch.leases import LeaseHolder, ReplicaCalls, ReplicaGone, ReplicaInfo
from deployments.fleet.fleet import Fleet
from kvtransfer.pages import page_keys
from replicas.cache.events import CacheSnapshot, EventLog
from replicas.errors import MantaError
from replicas.ranks.worker import die_with_parent
from replicas.types import Finish, FinishReason, GenerateRequest, PoolStats, TokenDelta, Usage
from routing.router import Router
from routing.types import Decision, IndexEvent, RouteQuery
from tests.unit.deployments.sample_values import info, stats

PAGE_SIZE = 16
NODE = "here"
DEADLINE_S = 120.0  # for anything that is waited for
OPEN_FILES = 512  # beside the connections
SETTLE_S = 10.0
NO_TOKENS = np.empty(0, dtype=np.int32)
Prompt = npt.NDArray[np.int32]
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The replicas, and what they tell."""

    num_replicas: int
    pages: int  # that each caches at first
    period_s: float  # between two reports
    events_per_s: float  # of all together: stored and removed
    event_pages: int  # of each

    @property
    def names(self) -> list[str]:
        return [f"replica-{at:04}" for at in range(self.num_replicas)]


class FakeReplica:
    """The `ReplicaCalls` of a replica without an engine, as far as a router needs them to know it."""

    def __init__(self, name: str, setup: Setup, seed: int) -> None:
        self.name, self._setup = name, setup
        self.told = 0  # events sent
        self.log = EventLog()
        self._rng = np.random.default_rng(seed)
        self._runs: deque[list[int]] = deque()  # pages cached, the oldest run first
        self._held: dict[int, None] = {}
        self._credit = 0.0
        self._steps = 0
        self._client: ChannelClient | None = None

    @property
    def num_pages(self) -> int:
        return len(self._held)

    async def attach(self, address: ChannelAddress) -> ReplicaInfo:
        client = self._client
        if client is None or client.lost or address.renew or client.address.router_id != address.router_id:
            try:
                self._client = await ChannelClient.connect(
                    address, replica_id=self.name, node_id=NODE, on_asked=self._asked, on_lost=lambda client: None
                )
            except OSError as error:
                raise ReplicaGone(f"{self.name} cannot reach the router: {error}") from error
        assert self._client is not None
        self._client.report(encode(self._report()))
        longest = 1 << 17
        return replace(
            info(self.name), pid=os.getpid(), context_len=longest, vocab_size=longest, max_prompt_tokens=longest
        )

    async def lease(self, router_id: str, rid: str) -> None:
        """Return at once: requests end when they come."""

    async def send_snapshot(self, router_id: str) -> None:
        assert self._client is not None
        log = EventLog()
        keys = np.fromiter(itertools.chain.from_iterable(self._runs), dtype=np.uint64, count=self.num_pages)
        log.stored(keys, None, PAGE_SIZE, NO_TOKENS)
        self._client.send(encode(CacheKeys.of(CacheSnapshot(seq=self.log.seq, stored=log.drain()))))  # type: ignore[arg-type]

    def fill(self) -> None:
        """Cache as many pages as it has at first; the router hears of it by a snapshot."""
        while self.num_pages + self._setup.event_pages <= self._setup.pages:
            self._store(self._new_run())
        self.log.drain()

    def turn_over(self, seconds: float) -> None:
        """Store what is due after so many seconds more; what it makes room for counts as events too."""
        self._credit += seconds * self._setup.events_per_s / (2 * self._setup.num_replicas)
        while self._credit >= 1.0:
            self._credit -= 1.0
            self._store(self._new_run())

    def tell(self) -> None:
        """Send the events since the last call, and a report."""
        if self._client is not None:
            events = self.log.drain()
            self.told += len(events)
            self._client.report(encode(CacheChanges.of(events)) + encode(self._report()))

    def _new_run(self) -> list[int]:
        run: list[int] = self._rng.integers(0, 1 << 63, self._setup.event_pages, dtype=np.uint64).tolist()
        return run

    def _store(self, keys: list[int]) -> int:
        """Cache ``keys``. Return how many of the first of them it had."""
        held = sum(1 for _ in itertools.takewhile(self._held.__contains__, keys))
        if new := [key for key in keys[held:] if key not in self._held]:
            self._held.update(dict.fromkeys(new))
            self._runs.append(new)
            self.log.stored(np.array(new, dtype=np.uint64), None, PAGE_SIZE, NO_TOKENS)
        while len(self._held) > max(self._setup.pages, self._setup.event_pages):
            oldest = self._runs.popleft()
            for key in oldest:
                del self._held[key]
            self.log.removed(np.array(oldest, dtype=np.uint64))
        return held

    def _asked(self, client: ChannelClient, asked: Asked) -> None:
        """Answer a request at once, with one token."""
        if not isinstance(asked, RunRequest):
            return
        request = asked.request
        held = self._store(page_keys(request.token_ids, PAGE_SIZE, "").tolist())
        usage = Usage(prompt_tokens=len(request.token_ids), completion_tokens=1, cached_tokens=held * PAGE_SIZE)
        finish = Finish(reason=FinishReason.LENGTH)
        client.sink([TokenDelta(rid=request.rid, token_ids=(5,), usage=usage, finish=finish)])

    def _report(self) -> ReplicaReport:
        self._steps += 1
        free = max(self._setup.pages - self.num_pages, 0)
        pool = PoolStats(
            page_size=PAGE_SIZE, num_pages=2 * max(self._setup.pages, 1024), free_pages=free,
            evictable_pages=self.num_pages, protected_pages=0, reserved_pages=0,
        )  # fmt: skip
        now = stats(
            time_s=time.monotonic(), num_running=self._steps % 7, max_running_requests=256,
            cache_nodes=len(self._runs), cache_event_seq=self.log.seq, num_extend_steps=self._steps,
            num_decode_steps=self._steps, prefill_tokens_per_s=5000.0 + self._steps % 100, decode_step_s=0.03,
            longest_step_s=0.1,
        )  # fmt: skip
        return ReplicaReport(stats=replace(now, pool=pool), error=None, num_open=0)


class FakeReplicas:
    """All replicas of the other process, and its end of the pipe that carries calls."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._replicas = {name: FakeReplica(name, setup, seed) for seed, name in enumerate(setup.names)}
        self._turning = False
        self._late_s = 0.0

    async def serve(self, pipe: Connection) -> None:
        """Answer the calls that come, until the other end hangs up."""
        loop, ended, calls = asyncio.get_running_loop(), asyncio.Event(), set[asyncio.Task[None]]()

        def begin(call: Any) -> None:
            calls.add(task := loop.create_task(self._call(pipe, *call)))
            task.add_done_callback(calls.discard)

        def read() -> None:  # in a thread of its own, so that neither end waits for the other to read
            with contextlib.suppress(EOFError, ConnectionResetError):
                while True:
                    loop.call_soon_threadsafe(begin, pipe.recv())
            loop.call_soon_threadsafe(ended.set)

        threading.Thread(target=read, daemon=True).start()
        telling = asyncio.create_task(self._tell_forever())
        await ended.wait()
        telling.cancel()

    async def _call(self, pipe: Connection, number: int, name: str, method: str, args: Any) -> None:
        try:
            found: Any = getattr(self._replicas[name] if name else self, method)(*args)
            pipe.send((number, await found if asyncio.iscoroutine(found) else found, None))
        except MantaError as error:
            pipe.send((number, None, error))

    def fill(self) -> None:
        for replica in self._replicas.values():
            replica.fill()

    def turn(self, on: bool) -> None:
        """Have the caches turn over from now on, or no longer."""
        self._turning, self._late_s = on, 0.0

    def told(self) -> dict[str, tuple[int, int]]:
        """Return by replica: the number of its last event, and how many pages it holds."""
        return {name: (replica.log.seq, replica.num_pages) for name, replica in self._replicas.items()}

    def late_s(self) -> float:
        """Return by how much this process fell behind at most: where that is long, it is the bound, not the router."""
        return self._late_s

    async def _tell_forever(self) -> None:
        step_s = self._setup.period_s / self._setup.num_replicas
        due_s = time.monotonic()
        for replica in itertools.cycle(self._replicas.values()):
            due_s += step_s
            if (ahead_s := due_s - time.monotonic()) > 0:
                await asyncio.sleep(ahead_s)
            else:
                self._late_s = max(self._late_s, -ahead_s)
                if ahead_s < -step_s:
                    await asyncio.sleep(0)
            if self._turning:
                replica.turn_over(self._setup.period_s)
            replica.tell()


class RemoteReplicas:
    """`Leases` whose replicas live in a process of ours."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()
        asyncio.get_running_loop().add_reader(pipe.fileno(), self._take)

    async def call(
        self,
        replica_id: str,
        method: Callable[Concatenate[ReplicaCalls, P], Awaitable[T]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        found: T = await self.ask(method.__name__, *args, replica_id=replica_id)
        return found

    async def ask(self, method: str, *args: object, replica_id: str = "") -> Any:
        """Call a replica, or what holds them all."""
        number = next(self._numbers)
        answer = self._calls[number] = asyncio.get_running_loop().create_future()
        self._pipe.send((number, replica_id, method, args))
        return await answer

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pipe.fileno())
        self._pipe.close()

    def _take(self) -> None:
        """Give one answer to its call. Raises: EOFError where the other process has ended."""
        number, value, error = self._pipe.recv()
        answer = self._calls.pop(number)
        if answer.done():
            return
        if error is None:
            answer.set_result(value)
        else:
            answer.set_exception(error)


@contextlib.asynccontextmanager
async def replicas_of(setup: Setup) -> AsyncIterator[RemoteReplicas]:
    """Start the process of the replicas, and end it."""
    _allow_files(setup.num_replicas + OPEN_FILES)
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_run_replicas, args=(setup, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        remote = RemoteReplicas(ours)
        async with asyncio.timeout(DEADLINE_S):
            await remote.ask("late_s")  # it runs
        yield remote
        remote.close()
        await asyncio.to_thread(process.join, DEADLINE_S)
    finally:
        process.kill()


def _run_replicas(setup: Setup, pipe: Connection) -> None:
    die_with_parent()
    _allow_files(setup.num_replicas + OPEN_FILES)
    run(FakeReplicas(setup).serve(pipe))


def _allow_files(number: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < number:
        raise SystemExit(f"{number:,} open files are needed, {hard:,} are allowed: raise `ulimit -Hn`, or take fewer")
    if soft != resource.RLIM_INFINITY and soft < number:
        resource.setrlimit(resource.RLIMIT_NOFILE, (number, hard))


def run(main: Any) -> Any:
    """Run the coroutine ``main`` on a loop as Ray's."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)


DUE_S: ContextVar[float] = ContextVar("DUE_S")  # of the request whose context it is, by the loop's clock


@dataclass(slots=True)
class Taken:
    """What a router has taken in and given out since it was asked last."""

    reports: int = 0
    events: int = 0
    late_s: list[float] = field(default_factory=list)  # of each report, since it was made
    choice_s: list[float] = field(default_factory=list)  # of `Router.choose`, by the clock
    choice_cpu_s: list[float] = field(default_factory=list)
    sent_s: list[float] = field(default_factory=list)  # since a request was due, until it was on its way
    first_s: list[float] = field(default_factory=list)  # and until its token was there


class TimedRouter(Router):
    """The router, which times its choices."""

    taken = Taken()

    def choose(self, query: RouteQuery) -> Decision:
        started_s, started_cpu_s = time.perf_counter(), time.thread_time()
        decision = super().choose(query)
        self.taken.choice_cpu_s.append(time.thread_time() - started_cpu_s)
        self.taken.choice_s.append(time.perf_counter() - started_s)
        return decision


class CountingFleet(Fleet):
    """The fleet, which counts what it hears."""

    taken = Taken()

    def on_report(self, replica_id: str, report: ReplicaReport) -> None:
        super().on_report(replica_id, report)
        self.taken.reports += 1
        self.taken.late_s.append(time.monotonic() - report.stats.time_s)

    def on_events(self, replica_id: str, events: Sequence[IndexEvent]) -> None:
        super().on_events(replica_id, events)
        self.taken.events += len(events)


class TimedChannel(ChannelServer):
    """The channel, which times when requests leave."""

    taken = Taken()

    def send(self, replica_id: str, asked: Asked) -> None:
        super().send(replica_id, asked)
        if isinstance(asked, RunRequest):
            self.taken.sent_s.append(asyncio.get_running_loop().time() - DUE_S.get())


class LiveRouter:
    """One router as it runs in its ingress, without HTTP."""

    def __init__(self, remote: RemoteReplicas, setup: Setup, number: int) -> None:
        self._setup, self._router_id = setup, f"router-{number}"
        self.router = TimedRouter("estimated_ttft", Random(0), time.monotonic, page_size=PAGE_SIZE)
        self.fleet = CountingFleet(router=self.router, leases=remote, report_period_s=setup.period_s)
        self._channel = TimedChannel(self.fleet, lost_error=ReplicaGone)
        self._dispatcher = Dispatcher(
            self.router,
            LeaseHolder(remote, self._channel, router_id=self._router_id),
            limits=TryLimits(max_tries=3, retry_wait_s=5.0, max_wait_s=30.0),
        )

    async def start(self) -> float:
        """Start, and return the seconds until every replica is attached and its snapshot in the index."""
        started_s = time.monotonic()
        address = await self._channel.start(router_id=self._router_id, node_id=NODE, host="127.0.0.1")
        self.fleet.start(address, leave=self._channel.leave, send=self._channel.send)
        self.fleet.set_members(self._setup.names)
        async with asyncio.timeout(DEADLINE_S):
            await self.fleet.wait_ready(DEADLINE_S)
            gc.collect()
            gc.freeze()  # as RouterIngress does then
            while self.fleet.num_ready < self._setup.num_replicas or self.fleet.sync.asking:
                await asyncio.sleep(0.02)
        return time.monotonic() - started_s

    async def stop(self) -> None:
        await self.fleet.stop()
        await self._channel.stop()
        gc.unfreeze()

    def count(self) -> Taken:
        """Return what is counted from now on."""
        taken = Taken()
        self.router.taken = self.fleet.taken = self._channel.taken = taken
        return taken

    def num_apart(self, told: Mapping[str, tuple[int, int]]) -> int:
        """Count the replicas whose last event, or number of pages, the index does not have."""
        known = {each: (self.router.applied(each), self.router.num_pages(each)[0]) for each in told}
        return sum(known[each] != said for each, said in told.items())

    async def serve(self, prompts: Sequence[Prompt], *, rate: float, seconds: float) -> None:
        """Serve ``rate`` requests a second, at random times, with ``prompts`` in turn."""
        loop, rng = asyncio.get_running_loop(), Random(0)

        async def one(number: int, due_s: float) -> None:
            await asyncio.sleep(max(due_s - loop.time(), 0.0))
            DUE_S.set(due_s)
            request = GenerateRequest(rid=f"{number:x}.0-live", token_ids=prompts[number % len(prompts)])
            async for _ in self._dispatcher.stream(request):
                self._channel.taken.first_s.append(loop.time() - due_s)

        due_s, asked = loop.time(), []
        for number in range(int(rate * seconds)):
            due_s += rng.expovariate(rate)
            asked.append(asyncio.create_task(one(number, due_s)))
        async with asyncio.timeout(seconds + DEADLINE_S):
            await asyncio.gather(*asked)


async def measure(setup: Setup, prompts: Sequence[Prompt], *, rounds: int, rate: float, seconds: float) -> list[Row]:
    """Start a router before empty replicas, restart it ``rounds`` times before full ones, and put it under load.
    Returns: what that took, with the targets."""
    table = Table(f"a live router before {setup.num_replicas:,} replicas of {setup.pages:,} pages")
    kib = 1024 * setup.num_replicas
    async with replicas_of(setup) as remote:
        before = _resident_bytes()
        live = LiveRouter(remote, setup, 0)
        table.add("whole, caches empty", [await live.start()], "s")
        table.add("memory a replica, cache empty", [(_resident_bytes() - before) / kib], "KiB")
        await remote.ask("fill")
        whole_s = []
        for number in range(1, rounds + 1):
            await live.stop()
            del live
            gc.collect()
            live = LiveRouter(remote, setup, number)
            whole_s.append(await live.start())
        full_bytes = _resident_bytes() - before
        table.add("restarted: whole again", whole_s, "s", target="< 5")
        a_page = f"{full_bytes / max(setup.num_replicas * setup.pages, 1):.0f} bytes a page, all included"
        table.add("memory a replica, cache full", [full_bytes / kib], "KiB", note=a_page)
        await remote.ask("turn", True)
        taken, started_s, started_cpu_s = live.count(), time.monotonic(), time.thread_time()
        await live.serve(prompts, rate=rate, seconds=seconds)
        took_s, cpu_s = time.monotonic() - started_s, time.thread_time() - started_cpu_s
        live.count()
        late_s = await remote.ask("late_s")
        await remote.ask("turn", False)
        num_apart = await _settled(live, remote)
        num_gaps = live.fleet.sync.num_gaps
        await live.stop()
    for name, times_s, target in (
        ("choice", taken.choice_s, "< 2"),
        ("choice, CPU", taken.choice_cpu_s, "< 2"),
        ("request due until sent, the loop's queue included", taken.sent_s, "< 2"),
        ("request due until its token is here", taken.first_s, None),
        ("report made until taken in", taken.late_s, None),
    ):
        for q in (50, 99):
            value = 1e3 * percentile(times_s, q)
            row = Row(
                section=table.section, name=f"{name}: p{q}", value=value, unit="ms", runs=len(times_s),
                target=target if q == 99 else None,
            )  # fmt: skip
            table.rows.append(row)
    due = f">= {setup.events_per_s:,.0f}"
    lost = f"those of prompts too; {num_gaps} gaps, {num_apart} caches apart in the end"
    behind = f"the replicas fell {late_s:.2f} s behind at most"
    table.add("events taken in", [taken.events / took_s], "1/s", target=due, note=lost)
    table.add("reports taken in", [taken.reports / took_s], "1/s", note=behind)
    table.add("CPU of the router's loop", [cpu_s / took_s], "of a core")
    return table.rows


async def _settled(live: LiveRouter, remote: RemoteReplicas) -> int:
    """Wait until the index agrees with every cache; return of how many replicas it does not after SETTLE_S."""
    give_up_s = time.monotonic() + SETTLE_S
    while (num_apart := live.num_apart(await remote.ask("told"))) and time.monotonic() < give_up_s:
        await asyncio.sleep(0.1)
    return num_apart


def _resident_bytes() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)
