"""Publishes a replica's cache events to routers of others, as vLLM and SGLang publish theirs.

Owns:      the sockets: PUB for the batches, ROUTER for those that a subscriber has missed; the last KEPT batches.
Never:     waits for a subscriber: one that reads too slowly loses batches, and sees it by their numbers. Tells a salt:
           its hash stands in ``extra_keys``, and in the adapter's name, so a query without it finds no such page.
Invariant: a batch's number grows by one. What a subscriber has applied in full is what the cache held at that event;
           after events that were lost here, a batch clears everything and tells the whole content.
Thread:    one at a time for `publish`; replays have a thread of their own.

    batch   topic, number (8 bytes, big endian), msgpack [seconds since 1970, [event, ...], 0]
    event   ["BlockStored", hashes, hash before them, token ids, block size, null, medium, adapter, extra_keys]
            ["BlockRemoved", hashes, medium]   ["AllBlocksCleared"]
    replay  number (DEALER, behind an empty part) -> each batch from it on, number and body, then number -1; where the
            first one's number is greater, those before it are lost

Source: the messages of vLLM's KV events and their replay.
"""

import asyncio
import collections
import contextlib
import importlib
import logging
import re
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import msgspec
import xxhash

from kvtransfer.pages import Tier
from replicas.cache.events import AllCleared, CacheEvent, CacheSnapshot, PagesRemoved, PagesStored
from replicas.errors import InvalidConfig

KV_EVENTS_VARIABLE = "MANTA_KV_EVENTS"  # of the replicas: where they publish; unset: nowhere
MEDIA = {Tier.DEVICE: "GPU", Tier.HOST: "CPU", Tier.STORE: "DISK"}
KEPT = 10_000  # batches for replays
MOST_UNSENT = 10_000  # batches for one subscriber; later ones are dropped for it
PORTS = 64  # pairs tried, since the replicas of a node cannot share one
LOOK_S = 0.2
AGAIN_S = 5.0  # after a batch could not be published
LAST = (-1).to_bytes(8, "big", signed=True)

log = logging.getLogger(__name__)


class KvEvents:
    """The publisher of one replica."""

    def __init__(self, endpoint: str) -> None:
        """``endpoint``: tcp://HOST:PORT, or tcp://HOST:PORT/TOPIC; replays are at the next port. Where these are taken,
        the next two are tried.

        Raises: InvalidConfig.
        """
        try:
            self._zmq = importlib.import_module("zmq")
        except ImportError as error:
            raise InvalidConfig(f"{KV_EVENTS_VARIABLE} needs pyzmq: pip install -e '.[events]'") from error
        found = re.fullmatch(r"(tcp://[^:/]+:\d{1,5})(?:/(.*))?", endpoint)
        if found is None:
            raise InvalidConfig(
                f"{KV_EVENTS_VARIABLE} = {endpoint[:64]!r}: must be tcp://HOST:PORT or tcp://HOST:PORT/TOPIC, such as "
                "tcp://*:5557"
            )
        self._topic = (found[2] or "").encode()
        self._context = self._zmq.Context()
        self._pub, self._router = self._context.socket(self._zmq.PUB), self._context.socket(self._zmq.ROUTER)
        self._pub.setsockopt(self._zmq.SNDHWM, MOST_UNSENT)
        self._router.setsockopt(self._zmq.SNDHWM, 0)  # a replay is KEPT batches at most, of which none may be dropped
        self.endpoint, self.replay = self._bound(found[1])
        self._kept = collections.deque[tuple[int, bytes]](maxlen=KEPT)
        self._num_batches = 0
        self._seq = 0  # of the last cache event
        self._behind = False  # what was published is not all that happened
        self._has_host = False
        self._encoder = msgspec.msgpack.Encoder()
        self._going = True
        self._thread = threading.Thread(target=self._replay_forever, name="kv-events", daemon=True)
        self._thread.start()
        log.info("cache events are published at %s, replays at %s", self.endpoint, self.replay)

    def publish(self, events: Sequence[CacheEvent]) -> bool:
        """Publish ``events``. Returns: False where one before them is missing: `start_over` then."""
        new = [event for event in events if event.seq > self._seq]
        self._behind = self._behind or (bool(new) and new[0].seq != self._seq + 1)
        if self._behind:
            return False
        if new:
            self._behind = True
            self._send([each for event in new for each in self._told(event)])
            self._behind, self._seq = False, new[-1].seq
        return True

    def start_over(self, snapshot: CacheSnapshot) -> None:
        """Publish the whole content of the cache, in the place of what was published before."""
        self._behind = True
        self._send([["AllBlocksCleared"], *(each for event in snapshot.stored for each in self._told(event))])
        self._behind, self._seq = False, snapshot.seq

    def close(self) -> None:
        self._going = False
        self._thread.join()
        self._pub.close(linger=0)
        self._context.term()

    def _told(self, event: CacheEvent) -> Iterator[list[Any]]:
        match event:
            case PagesStored(keys=keys, parent_key=parent, page_size=page_size, token_ids=ids, tier=tier, salt=space):
                adapter, _, salt = space[1:].partition("\1") if space.startswith("\1") else ("", "", space)
                digest = xxhash.xxh3_64_hexdigest(salt.encode()) if salt else ""
                name = f"{adapter}@{digest}" if salt else adapter or None
                extra = [[digest]] * len(keys) if salt else None
                hashes = keys.tolist()
                yield ["BlockStored", hashes, parent, ids.tolist(), page_size, None, MEDIA[tier], name, extra]
                if tier is Tier.HOST:
                    self._has_host = True
                    yield ["BlockRemoved", hashes, MEDIA[Tier.DEVICE]]
            case PagesRemoved(keys=keys, tier=tier):
                yield ["BlockRemoved", keys.tolist(), MEDIA[tier]]
                if tier is Tier.DEVICE and self._has_host:
                    yield ["BlockRemoved", keys.tolist(), MEDIA[Tier.HOST]]
            case AllCleared():
                yield ["AllBlocksCleared"]

    def _send(self, told: list[list[Any]]) -> None:
        if not told:
            return
        body, number = self._encoder.encode([time.time(), told, 0]), self._num_batches
        self._num_batches += 1
        self._kept.append((number, body))
        parts = self._topic, number.to_bytes(8, "big"), body
        self._pub.send_multipart(parts, self._zmq.NOBLOCK)  # PUB drops, never waits

    def _replay_forever(self) -> None:
        while self._going:
            try:
                if self._router.poll(int(LOOK_S * 1000)):
                    self._replay(self._router.recv_multipart())
            except Exception:  # the edge: a subscriber may send anything
                log.exception("a replay of cache events failed; going on")
        self._router.close(linger=0)

    def _replay(self, asked: list[bytes]) -> None:
        *to, number = asked  # who asks, and an empty part
        first = int.from_bytes(number, "big")
        for at, body in [each for each in list(self._kept) if each[0] >= first]:
            self._router.send_multipart((*to, at.to_bytes(8, "big"), body), self._zmq.NOBLOCK)
        self._router.send_multipart((*to, LAST, b""), self._zmq.NOBLOCK)

    def _bound(self, endpoint: str) -> tuple[str, str]:
        """Bind both sockets. Returns: where."""
        host, _, port = endpoint.rpartition(":")
        for first in range(int(port), min(int(port) + 2 * PORTS, 65_535), 2):
            tried = f"{host}:{first or '*'}", f"{host}:{first + 1 if first else '*'}"
            try:
                self._pub.bind(tried[0])
            except self._zmq.ZMQError:
                continue
            own = self._pub.getsockopt_string(self._zmq.LAST_ENDPOINT)
            try:
                self._router.bind(tried[1])
            except self._zmq.ZMQError:
                self._pub.unbind(own)
                continue
            return own, self._router.getsockopt_string(self._zmq.LAST_ENDPOINT)
        raise InvalidConfig(
            f"{KV_EVENTS_VARIABLE}: neither {endpoint} nor one of the {PORTS} pairs of ports from it on can be "
            "bound: give another one"
        )


class SteadyPublisher:
    """Publishes on an event loop, and never raises: what fails or is missing is told anew, with all of the cache."""

    def __init__(self, to: KvEvents, snapshot: Callable[[], Awaitable[CacheSnapshot]]) -> None:
        """``snapshot``: takes one of the cache, once the step under way has ended."""
        self._to, self._snapshot = to, snapshot
        self._over: asyncio.Task[None] | None = None  # that tells all of the cache
        self._again_s = 0.0

    def publish(self, events: Sequence[CacheEvent]) -> None:
        """Publish ``events``; none while all of the cache is told, which has them."""
        if time.monotonic() < self._again_s or (self._over is not None and not self._over.done()):
            return
        with self._guarded():
            if not self._to.publish(events):
                self._over = asyncio.create_task(self._start_over())

    async def close(self) -> None:
        if self._over is not None:
            self._over.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._over
        await asyncio.to_thread(self._to.close)

    async def _start_over(self) -> None:
        with self._guarded():
            self._to.start_over(await self._snapshot())

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except Exception:  # the edge: reports to routers go on
            log.exception("cache events could not be published; all of the cache is, in %g s", AGAIN_S)
            self._again_s = time.monotonic() + AGAIN_S
