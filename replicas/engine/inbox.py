"""Inbox: deltas on their way from the engine thread to one asyncio consumer; merged per choice while they wait."""

import asyncio
import logging
import threading

from replicas.types import Pending, TokenDelta

log = logging.getLogger(__name__)


class Inbox:
    """Never grows beyond one delta for each choice, however slow the consumer is."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._waiting = Pending()
        self._ready = asyncio.Event()

    def put(self, deltas: list[TokenDelta]) -> None:
        """Engine thread."""
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
        """What has arrived since the last call; waits for the first."""
        await self._ready.wait()
        self._ready.clear()
        with self._lock:
            return self._waiting.take()
