"""The thread of an engine, and the thread-safe and asyncio methods by which others use it.

Owns:      the engine thread, the watchdog thread, and the commands that wait for the former.
Never:     runs a step on any other thread. The sink of each request is in open_requests.py.
Invariant: after `submit` returns, the sink gets exactly one delta with ``finish`` per choice, crash or not.

    any thread ── submit, abort, run ──> commands ──> engine thread: take commands, step, deliver ──> sinks
    transfer thread ── wake ────────────────────────>
    watchdog: a step that takes too long, or a dead rank ──> every open request is answered, `error` is set
"""

import asyncio
import collections
import logging
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from replicas.engine.engine import CacheEvents, Engine
from replicas.engine.open_requests import Sink, Sinks
from replicas.errors import EngineDead, MantaError
from replicas.types import EngineStats, EngineTallies, GenerateRequest, Pending, TokenDelta

log = logging.getLogger(__name__)

Command = Callable[[Engine | None], None]  # gets None when the engine is gone
T = TypeVar("T")
IDLE_WAIT_S = 0.5  # after which an idle engine thread looks for work without being woken
STATS_PERIOD_S = 0.05
MAX_EVENT_STEPS = 65_536  # whose cache events wait to be taken; then the oldest are lost: a gap in their numbers
BEAT_S = 0.25  # of the watchdog: what it looks for is found so soon, and a process that stood still is known as such
STALL_WAIT_S = 0.002  # work is queued but nothing can run: look again soon


class Inbox:
    """Deltas on their way from the engine thread to one asyncio consumer: at most one per choice, merged."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._waiting = Pending()
        self._ready = asyncio.Event()

    def put(self, deltas: list[TokenDelta]) -> None:
        """Add ``deltas``; engine thread."""
        with self._lock:
            wake = not len(self._waiting)
            for delta in deltas:
                self._waiting.add(delta)
        if wake:
            try:
                self._loop.call_soon_threadsafe(self._ready.set)
            except RuntimeError:
                log.debug("the consumer's event loop is closed")

    async def take(self) -> list[TokenDelta]:
        """Return what has arrived since the last call; waits for the first delta."""
        await self._ready.wait()
        self._ready.clear()
        with self._lock:
            return self._waiting.take()


class EngineLoop:
    """An engine on a thread of its own, with its watchdog."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.error: EngineDead | None = None
        self._sinks = Sinks()
        self._commands: collections.deque[Command] = collections.deque()
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._step_started_s: float | None = None
        self._stats = engine.stats()
        self._cache_events: collections.deque[CacheEvents] = collections.deque(maxlen=MAX_EVENT_STEPS)
        engine.on_event(self._wake.set)
        self._thread = threading.Thread(target=self._main, name="manta-engine", daemon=True)
        self._watchdog = threading.Thread(target=self._watch, name="manta-watchdog", daemon=True)

    @property
    def num_open(self) -> int:
        return len(self._sinks)

    def open_rids(self, sink: Sink | None = None) -> list[str]:
        """Return the open requests that were submitted with ``sink``, or all; any thread."""
        return self._sinks.rids(sink)

    @property
    def fault(self) -> EngineDead | None:
        """Why this engine should be replaced: it is dead, or every KV transfer will fail."""
        return self.error or self.engine.thread_error

    @property
    def step_age_s(self) -> float:
        """How long the step in progress has been running; 0 without one; any thread."""
        started_s = self._step_started_s
        return 0.0 if started_s is None else time.monotonic() - started_s

    def start(self) -> None:
        self._thread.start()
        self._watchdog.start()

    def submit(self, request: GenerateRequest, sink: Sink, on_end: Callable[[], object] = lambda: None) -> None:
        """Queue a request; thread-safe.

        Args:   sink: called on the engine thread, at most once a step, with the deltas of all requests that were
                submitted with this very sink.
                on_end: called once, after the sink has got the last delta of the request. It must not block or raise.
        Raises: InvalidRequest, PromptTooLong, Overloaded or EngineDead, at once; then neither is ever called.
        """
        self.engine.check(request)
        if self.error is not None:
            raise self.error
        if self._stopping.is_set():
            raise EngineDead("this replica is shutting down: try another one")
        limit = self.engine.config.scheduler.max_queued_requests
        self._sinks.open(request, sink, on_end, max_waiting=limit, max_running=self._stats.max_running_requests)
        arrived_s = time.monotonic()  # it waits from now on: the step under way can be long
        self._command(lambda engine: self._accept(engine, request, arrived_s))

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenDelta]:
        """Yield the deltas of a request; those that pile up while the consumer is busy are merged, one per choice.

        Cancelling or closing the iterator aborts the request.
        """
        loop = asyncio.get_running_loop()
        inbox = Inbox(loop)
        self.submit(request, inbox.put)
        remaining = request.num_choices
        try:
            while remaining:
                for delta in await inbox.take():
                    remaining -= delta.finish is not None
                    yield delta
        finally:
            if remaining:
                self.abort(request.rid)

    def abort(self, rid: str) -> None:
        """End a request with FinishReason.ABORT; thread-safe, idempotent, unknown rids are ignored."""
        self._command(lambda engine: self._sinks.deliver(engine.abort(rid)) if engine is not None else None)

    def take_back(self, rid: str, kept: Callable[[], object]) -> None:
        """End a request that has not been admitted, or call ``kept`` on the engine thread; thread-safe."""

        def take(engine: Engine | None) -> None:
            deltas = [] if engine is None else engine.take_back(rid)
            self._sinks.deliver(deltas)
            if not deltas:
                kept()

        self._command(take)

    async def hand_over(self, before: Callable[[], Awaitable[object]]) -> int:
        """Give the cache what running requests have computed, await ``before``, and end them so that their routers go
        on with them elsewhere. Returns: how many there were. Raises: EngineDead."""
        await self.run_on_engine(lambda engine: self._sinks.deliver(engine.commit_running()))
        await before()
        num_open = self.num_open
        await self.run_on_engine(lambda engine: self._sinks.deliver(engine.hand_over()))
        return num_open

    async def run_on_engine(self, fn: Callable[[Engine], T]) -> T:
        """Run ``fn`` between two steps and return its result. Raises: EngineDead, also while it waits."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def call(engine: Engine | None) -> None:
            try:
                if engine is None:
                    raise self.error or EngineDead("this replica was stopped")
                result = fn(engine)
            except BaseException as error:  # noqa: BLE001 - belongs to the caller, whatever it is
                _tell(loop, future, None, error)
            else:
                _tell(loop, future, result, None)

        self._command(call)
        return await future

    async def run_settled(self, fn: Callable[[Engine], T]) -> T:
        """Run ``fn`` as `run_on_engine`, while no step is under way: what has been computed is in the pool."""

        def settle(engine: Engine) -> T:
            self._sinks.deliver(engine.land())
            return fn(engine)

        return await self.run_on_engine(settle)

    def stats(self) -> EngineStats:
        """Return the statistics of the last step, or of the last half second when idle; any thread."""
        return self._stats

    def tallies(self) -> EngineTallies:
        """Return the distributions since the start; any thread."""
        return self.engine.tallies()

    def take_cache_events(self) -> CacheEvents:
        """Return the cache events since the last call, in order; any thread, one reader."""
        steps = [self._cache_events.popleft() for _ in range(len(self._cache_events))]
        return tuple(event for events in steps for event in events)

    def stop(self) -> None:
        """Stop both threads; open requests are answered with an error."""
        self._stopping.set()
        self._wake.set()
        for thread in (self._thread, self._watchdog):  # one that outlives its engine's last owner frees the weights
            if thread.is_alive():
                thread.join(timeout=10)
        self._fail_commands()
        self._sinks.answer_all(EngineDead("this replica was stopped"))
        self.engine.close()

    def _main(self) -> None:
        try:
            while not self._stopping.is_set() and self.error is None:
                self._take_commands()
                if events := self.engine.drain_cache_events():
                    self._cache_events.append(events)
                if self.engine.has_work:
                    self._refresh_stats()  # with what has just been taken in: until the step's end nothing else tells
                    self._step()
                else:
                    self._sinks.deliver(self.engine.poll())
                    self._refresh_stats()
                    if not self.engine.tidy():
                        self.engine.kv.check_idle()
                        self._stats = self.engine.stats()
                        self._wait(IDLE_WAIT_S)
        except BaseException as error:  # a panic of llguidance is no Exception
            log.exception("the engine thread died")
            if not isinstance(error, EngineDead):
                error = EngineDead(f"a step failed with {type(error).__name__}: {error}")
            self._die(error)

    def _step(self) -> None:
        self._step_started_s = time.monotonic()
        deltas = self.engine.step()
        self._step_started_s = None
        self._sinks.deliver(deltas)
        if not deltas and not self.engine.scheduler.last.made_progress:
            idle_s = self.engine.idle_s
            self._wait(STALL_WAIT_S if idle_s is None else min(idle_s, IDLE_WAIT_S))

    def _wait(self, timeout_s: float) -> None:
        if not self._commands:
            self._wake.wait(timeout_s)
        self._wake.clear()

    def _command(self, command: Command) -> None:
        self._commands.append(command)
        self._wake.set()
        if self.error is not None or self._stopping.is_set():
            self._fail_commands()  # the engine thread may have looked for the last time

    def _take_commands(self) -> None:
        while self._commands and self.error is None:
            self._commands.popleft()(self.engine)

    def _fail_commands(self) -> None:
        """Answer the commands that the engine thread will never take; any thread."""
        while True:
            try:
                command = self._commands.popleft()
            except IndexError:
                return
            command(None)

    def _accept(self, engine: Engine | None, request: GenerateRequest, arrived_s: float) -> None:
        """Give the engine a request that `submit` has checked, and whose rid was free in the sinks."""
        if engine is None:
            self._sinks.answer(request.rid, self.error or EngineDead("this replica was stopped"))
            return
        try:
            self._sinks.deliver(engine.accept(request, arrived_s=arrived_s))
        except MantaError as error:
            self._sinks.answer(request.rid, error)

    def _refresh_stats(self) -> None:
        """Refresh the statistics, but not after every step: looking at every waiting prompt takes up to 1 ms."""
        if time.monotonic() - self._stats.time_s >= STATS_PERIOD_S:
            self._stats = self.engine.stats()

    def _die(self, error: EngineDead) -> None:
        self.error = self._sinks.close(error)
        self._fail_commands()
        self._sinks.answer_all(self.error)

    def _watch(self) -> None:
        """Answer every request and become unhealthy on a stuck step or a dead rank: the engine thread cannot."""
        limit_s, pulse = self.engine.config.scheduler.watchdog_s, self.engine.steps.pulse
        while not self._stopping.is_set() and self.error is None:
            if self.step_age_s > limit_s:
                steps = list(self.engine.scheduler.queues.under_way.steps)
                rids = frozenset(req.rid for reqs in steps for req in reqs)
                why = f"a step has been running for more than {limit_s:.0f} s"
                self._die(EngineDead(why, rids=rids))
            dead = self.engine.executor.dead_rank()
            if dead is not None:
                self._die(EngineDead(dead))
            pulse.beat()
            self._stopping.wait(min(BEAT_S, limit_s / 4))


def _tell(
    loop: asyncio.AbstractEventLoop, future: "asyncio.Future[T]", result: T | None, error: BaseException | None
) -> None:
    """Settle ``future`` from another thread; if its event loop is closed, nothing waits for it."""
    try:
        loop.call_soon_threadsafe(_settle, future, result, error)
    except RuntimeError:
        log.debug("the caller's event loop is closed")


def _settle(future: "asyncio.Future[T]", result: T | None, error: BaseException | None) -> None:
    if future.cancelled():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)  # type: ignore[arg-type]
