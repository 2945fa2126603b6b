"""The replica's end of the token channel: one persistent connection to one router.

Owns:      the connection and the deltas that wait for it; passes on what the router asks.
Never:     blocks the engine thread; reconnects: a router that is gone has lost its requests too.
Invariant: while the socket is full, at most one delta per open choice waits (merged); none is lost or reordered while
           the connection lives.
Thread:    `sink` on the engine thread, everything else on the replica's event loop.

    engine step -> sink(deltas) -> waiting, merged -> one frame -> socket         (one wake-up and one write per step)
"""

import asyncio
import dataclasses
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import cast

from deployments.channel.channel_server import ChannelAddress
from deployments.channel.frames import Asked, BadFrame, ChannelHello, Deltas, FrameReader, decode_asked, encode
from replicas.types import Pending, TokenDelta

log = logging.getLogger(__name__)

HIGH_WATER_BYTES = 256 << 10  # above this many unsent bytes, deltas wait here and are merged
FRAME_BYTES = 1 << 17  # of deltas in one frame, at most, roughly: a router decodes them in less than a millisecond
PART_LOGPROBS = FRAME_BYTES // 64  # of a prompt that go into one delta, alternatives counted


class ChannelClient(asyncio.Protocol):
    """A connection to one router, made by `connect`; ``sink`` is its sink for `EngineLoop.submit`."""

    def __init__(
        self,
        address: ChannelAddress,
        *,
        on_asked: Callable[["ChannelClient", Asked], None],
        on_lost: Callable[["ChannelClient"], None],
    ) -> None:
        """``on_asked``: called with each message of the router; it must not raise."""
        self.address = address
        self.sink: Callable[[list[TokenDelta]], None] = self._sink
        self._loop = asyncio.get_running_loop()
        self._on_asked = on_asked
        self._on_lost = on_lost
        self._reader = FrameReader()
        self._lock = threading.Lock()
        self._waiting = Pending()
        self._transport: asyncio.Transport | None = None
        self._full = False
        self.lost = False

    @staticmethod
    async def connect(
        address: ChannelAddress,
        *,
        replica_id: str,
        node_id: str,
        on_asked: Callable[["ChannelClient", Asked], None],
        on_lost: Callable[["ChannelClient"], None],
    ) -> "ChannelClient":
        """Connect by the Unix socket if the router is on this node, else by TCP. Raises: OSError."""
        loop = asyncio.get_running_loop()
        client = ChannelClient(address, on_asked=on_asked, on_lost=on_lost)
        over_tcp = node_id != address.node_id
        if not over_tcp:
            try:
                await loop.create_unix_connection(lambda: client, address.unix_path)
            except OSError as error:  # a cleaner of /tmp may have removed it
                log.warning("%s cannot be used (%s); router %s by TCP", address.unix_path, error, address.router_id)
                over_tcp = True
        if over_tcp:
            await loop.create_connection(lambda: client, address.host, address.port)
        assert client._transport is not None
        client._transport.write(encode(ChannelHello(token=address.token, replica_id=replica_id)))
        return client

    def report(self, frames: bytes) -> None:
        """Send a report and the events before it, unless the socket is full: the router sees the gap and asks."""
        if not self._full:
            self.send(frames)

    def send(self, frames: bytes) -> None:
        """Send ``frames``, however full the socket is."""
        if self._transport is not None and not self.lost:
            self._transport.write(frames)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def check(self) -> None:
        """Raises AssertionError if a delta waits under another choice's key."""
        with self._lock:
            self._waiting.check()

    @property
    def num_waiting(self) -> int:
        with self._lock:
            return len(self._waiting)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass
        self._transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._reader.feed(data):
                self._on_asked(self, decode_asked(body))
        except BadFrame as error:
            log.warning("closing the connection to router %s: %s", self.address.router_id, error)
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.lost:
            return
        self.lost = True
        with self._lock:
            self._waiting.take()
        self._on_lost(self)

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        self._flush()

    def _sink(self, deltas: list[TokenDelta]) -> None:
        if self.lost:
            return
        with self._lock:
            wake = not len(self._waiting)
            for delta in deltas:
                self._waiting.add(delta)
        if wake:
            try:
                self._loop.call_soon_threadsafe(self._flush)
            except RuntimeError:
                log.debug("the replica's event loop is closed; deltas are dropped")

    def _flush(self) -> None:
        if self._full or self.lost or self._transport is None:
            return
        with self._lock:
            waiting = self._waiting.take()
        for batch in batches(part for delta in waiting for part in parts(delta)):
            self._transport.write(encode(Deltas(batch)))


def batches(deltas: Iterable[TokenDelta]) -> Iterator[list[TokenDelta]]:
    """Yield ``deltas`` in order, cut so that no frame of several is large: the router refuses too large ones."""
    batch: list[TokenDelta] = []
    weight = 0
    for delta in deltas:
        mine = _weight(delta)
        if batch and weight + mine > FRAME_BYTES:
            yield batch
            batch, weight = [], 0
        batch.append(delta)
        weight += mine
    if batch:
        yield batch


def parts(delta: TokenDelta) -> Iterator[TokenDelta]:
    """Split ``delta`` if it has many prompt logprobs: the router decodes a frame at a time and serves other requests in
    between."""
    rows = delta.prompt_logprobs
    size = max(PART_LOGPROBS // (1 + max((len(row.top) for row in rows[:2]), default=0)), 1)
    last = max(len(rows) - size, 0)
    for start in range(0, last, size):
        yield TokenDelta(
            rid=delta.rid, index=delta.index, prompt_logprobs=rows[start : min(start + size, last)], usage=delta.usage
        )
    yield dataclasses.replace(delta, prompt_logprobs=rows[last:]) if last else delta


def _weight(delta: TokenDelta) -> int:
    """Estimate the bytes of ``delta`` in a frame."""
    logprobs = sum(1 + len(each.top) + len(each.hidden) // 4 for each in (*delta.logprobs, *delta.prompt_logprobs))
    return 200 + len(delta.text) + 8 * len(delta.token_ids) + 45 * logprobs
