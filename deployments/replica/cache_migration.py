"""The cached pages of one replica that move to others, by order of a router, and those that come.

Owns:      the replica's `Migrator`; the push that runs, of which there is one at a time.
Never:     decides when and to whom pages go (fleet/cache_migration.py); holds up a request.
Invariant: no push outlasts its order, nor `stop`.
Thread:    the replica's event loop.

    a router sees this replica leave ──PushCache, over the channel──> push ─┐
    requests end ─> Serve calls the destructor ─> `finish` waits for it ────┴─> the engine stops
    requests that do not end ─> their pages are pushed, and they are handed over as if the engine had died
    a router sees a new replica ──push_cache, a call──> push to that one ─> the router takes it in
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from deployments.channel.frames import PushCache
from kvtransfer.migration.migrator import MigrationStats, Migrator, PageHome
from kvtransfer.migration.wire import MigrationAddress
from replicas.cache.page_home import TieredPageHome
from replicas.engine.loop import EngineLoop
from replicas.errors import MantaError

log = logging.getLogger(__name__)
T = TypeVar("T")
LAST_PUSH = 0.1  # of the time until requests are handed over: how long their pages may take


class ReplicaMigrations:
    """The `Migrator` of one replica, started by its first use."""

    def __init__(self, loop: EngineLoop, home: TieredPageHome, *, host: str) -> None:
        """``home``: of the engine of ``loop``; ``host``: the address of this machine that other replicas reach."""
        self._loop = loop
        self._home = home
        self._migrator = Migrator(self._visit, home.layout, host=host)
        self._started: asyncio.Task[MigrationAddress] | None = None
        self._pushing: asyncio.Task[MigrationStats] | None = None
        self._handing_over: asyncio.Task[None] | None = None

    @property
    def stats(self) -> MigrationStats:
        return self._migrator.stats

    async def address(self) -> MigrationAddress:
        """Return where other replicas push to; listens from the first call on."""
        if self._started is None:
            self._started = asyncio.create_task(self._migrator.start())
        return await asyncio.shield(self._started)

    def order(self, order: PushCache) -> "asyncio.Task[MigrationStats]":
        """Push as ``order`` says, unless a push runs: then that one is returned, since it serves as well."""
        if self._pushing is None or self._pushing.done():
            self._pushing = asyncio.create_task(self._push(order))
        if self._handing_over is None and order.hand_over_s is not None:
            self._handing_over = asyncio.create_task(self._hand_over(order, order.hand_over_s))
        return self._pushing

    async def finish(self) -> None:
        """Wait for the push that runs, if one does: this replica has no requests, and ends."""
        if self._pushing is not None:
            await asyncio.wait([self._pushing])

    async def stop(self) -> None:
        tasks = [task for task in (self._pushing, self._handing_over) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._migrator.stop()

    def check(self) -> None:
        """Raises AssertionError if a connection is kept that has ended."""
        self._migrator.check()

    async def _push(self, order: PushCache) -> MigrationStats:
        await self.address()
        before = self.stats
        try:
            after = await self._migrator.push(
                order.targets, most_s=order.most_s, most_bytes=order.most_bytes, share=order.share
            )
        except MantaError as error:  # the engine is dead
            log.warning("no cached pages are pushed: %s", error)
            return self.stats
        log.info(
            "pushed %d cached tokens to %d replicas in %.1f s; they have %.0f %% of what is expected to be used again",
            after.pushed_tokens - before.pushed_tokens, len(order.targets), after.push_s - before.push_s,
            100 * after.value_kept,
        )  # fmt: skip
        return after

    async def _hand_over(self, order: PushCache, after_s: float) -> None:
        """Have the requests that still run after ``after_s`` go on elsewhere, their pages first."""
        await asyncio.sleep(after_s)
        await self.finish()
        if not self._loop.num_open:
            return
        try:
            last = PushCache(
                targets=order.targets, most_s=LAST_PUSH * after_s, most_bytes=order.most_bytes, share=order.share
            )
            num_open = await self._loop.hand_over(lambda: self.order(last))
        except MantaError as error:
            log.warning("no request is handed over: %s", error)
            return
        log.info("%d requests ran until the end of the drain time; they go on elsewhere", num_open)

    def _visit(self, fn: Callable[[PageHome], T]) -> Awaitable[T]:
        return self._loop.run_on_engine(lambda engine: fn(self._home))
