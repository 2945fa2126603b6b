"""Inbox: deltas on their way from the engine thread to one asyncio consumer; merged per choice while they wait."""

import asyncio
import logging
import threading

from replicas.types import TokenDelta

log = logging.getLogger(__name__)


class Inbox:
    """Never grows beyond one delta for each choice, however slow the consumer is."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._waiting: dict[int, TokenDelta] = {}
        self._ready = asyncio.Event()

    def put(self, deltas: list[TokenDelta]) -> None:
        """Engine thread."""
        with self._lock:
            wake = not self._waiting
            for delta in deltas:
                before = self._waiting.get(delta.index)
                self._waiting[delta.index] = delta if before is None else before.merge(delta)
        if wake:
            try:
                self._loop.call_soon_threadsafe(self._ready.set)
            except RuntimeError:
                log.debug("the consumer's event loop is closed")

    async def take(self) -> list[TokenDelta]:
        """What has arrived since the last call; waits for the first."""
        await self._ready.wait()
        self._ready.clear()
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        return list(waiting.values())
