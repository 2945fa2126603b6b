"""Waiting for what another thread, process or task does."""

import asyncio
import threading
import time
from collections.abc import Callable


def until(condition: Callable[[], bool], within_s: float = 60.0) -> None:
    """Look until ``condition`` holds. Raises: AssertionError after ``within_s``."""
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {within_s:.0f} s"
        threading.Event().wait(0.005)


async def until_async(condition: Callable[[], bool], within_s: float = 60.0) -> None:
    """The same for what another task of this event loop does. Raises: TimeoutError."""
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.002)
