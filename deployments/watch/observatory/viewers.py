"""The open live views: each delta is made into bytes once and handed to every stream.

Owns:      the open streams and what waits for each.
Never:     waits for a slow viewer: what it has not read is dropped, and it starts over with the whole state.
Invariant: a viewer sees a state, then every delta after it, then perhaps a newer state: never a gap between.
Thread:    the observatory's event loop.
"""

import asyncio
import json
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any
from weakref import WeakSet

from replicas.errors import MantaError

MOST_VIEWERS = 64
MOST_WAITING = 10  # deltas that a viewer may be behind
HEARTBEAT_S = 15.0
LIFE_S = 3600.0  # Serve buffers what a stalled browser does not read; the stream's end frees it, and browsers reconnect
HEARTBEAT = b": still here\n\n"
RETRY = b"retry: 1000\n\n"


class TooManyViewers(MantaError):
    """The most streams that are served are already open."""

    http_status = 503
    retryable = True


class Viewers:
    """All open streams of server-sent events."""

    def __init__(
        self,
        snapshot: Callable[[], dict[str, Any]],
        *,
        most: int = MOST_VIEWERS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``snapshot``: the state as of the last delta; ``clock``: for the end of streams."""
        self._snapshot = snapshot
        self._clock = clock
        self._most = most
        self._open: WeakSet[_Viewer] = WeakSet()  # each is held by its stream: one never read leaves nothing behind
        self._whole: bytes | None = None  # the state as an event, if one was wanted since the last delta

    @property
    def num_open(self) -> int:
        return len(self._open)

    def publish(self, delta: dict[str, Any]) -> None:
        """Send a new delta to all streams."""
        self._whole = None
        if self._open:
            data = event("delta", delta)
            for viewer in self._open:
                viewer.put(data)

    def watch(self, *, heartbeat_s: float = HEARTBEAT_S, life_s: float = LIFE_S) -> AsyncIterator[bytes]:
        """Open a stream of events that begins with the state. Raises: TooManyViewers."""
        if len(self._open) >= self._most:
            raise TooManyViewers(
                f"{self._most} live views are open, and no more are served: close one, or read /api/state"
            )
        viewer = _Viewer()
        self._open.add(viewer)
        return self._stream(viewer, heartbeat_s, life_s)

    async def _stream(self, viewer: "_Viewer", heartbeat_s: float, life_s: float) -> AsyncIterator[bytes]:
        end_s = self._clock() + life_s
        try:
            yield RETRY
            while self._clock() < end_s:
                try:
                    async with asyncio.timeout(heartbeat_s):
                        await viewer.something.wait()
                except TimeoutError:
                    yield HEARTBEAT
                    continue
                for data in viewer.take(self._state):
                    yield data
        finally:
            self._open.discard(viewer)

    def _state(self) -> bytes:
        if self._whole is None:
            self._whole = event("state", self._snapshot())
        return self._whole

    def check(self) -> None:
        """Raises AssertionError if too much waits for a viewer."""
        assert len(self._open) <= self._most
        assert all(viewer.num_waiting <= MOST_WAITING for viewer in self._open)


class _Viewer:
    """The events that wait for one stream."""

    def __init__(self) -> None:
        self._waiting: deque[bytes] = deque()
        self._anew = True  # the state comes first
        self.something = asyncio.Event()
        self.something.set()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def put(self, data: bytes) -> None:
        if self._anew:
            return  # the state will hold it
        if len(self._waiting) >= MOST_WAITING:
            self._waiting.clear()
            self._anew = True
        else:
            self._waiting.append(data)
        self.something.set()

    def take(self, state: Callable[[], bytes]) -> list[bytes]:
        self.something.clear()
        found = [state()] if self._anew else list(self._waiting)
        self._anew = False
        self._waiting.clear()
        return found


def event(name: str, data: dict[str, Any]) -> bytes:
    """Return one server-sent event."""
    return f"event: {name}\ndata: {json.dumps(data, separators=(',', ':'), allow_nan=False)}\n\n".encode()
