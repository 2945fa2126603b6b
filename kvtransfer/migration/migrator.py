"""Pushes cached pages from the tiers of one replica into the host tiers of others, and takes what others push.

Owns:      the listener, the connections, and one buffer of RUN_BYTES for each.
Never:     touches a tier but through `PageHome`, whose calls are whole: a run is read or taken in one of them, so that
           a peer or a process that dies at any point leaves no page held. Writes where a request reads.
Invariant: a page is taken only if the digests of all its parts fit. A peer that hangs, dies or lies costs its own
           connection. A page that is pushed twice is taken once.
Thread:    the replica's event loop; the home's calls run on the engine thread, digests on one of the pool's.

    the home's paths by expected hits/s ─> every target is asked what it has ─> each path to the one that lacks least

All tokens cost the same to compute and to send: hits a second order the paths by the seconds that a byte saves.
"""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import numpy as np
import xxhash

from kvtransfer.errors import BadMessage, TransferError
from kvtransfer.layout import KvLayout
from kvtransfer.migration.plan import Shares, bounded
from kvtransfer.migration.wire import (
    Bytes,
    Digests,
    Have,
    Kept,
    MigrationAddress,
    MigrationStream,
    Offer,
    PageRun,
    Path,
)
from kvtransfer.peers.wire import Handshake, PeerHello
from kvtransfer.types import PeerAddress

log = logging.getLogger(__name__)

RUN_BYTES = 32 << 20  # of one read or write of the home: some ms, but each waits for the end of a step
IDLE_S = 30.0  # between two messages of one that pushes: it rests, or waits for its own engine
MAX_OPEN = 16  # connections that came in
T = TypeVar("T")


class PageHome(Protocol):
    """The cached pages of one replica. Engine thread, between two steps; each call is whole."""

    def hottest(self, most_bytes: int) -> list[Path]:
        """Return the paths with the highest rates, parents before children, of which the own pages have at most
        ``most_bytes``."""
        ...

    def held(self, paths: Sequence[Path]) -> list[int]:
        """Return how many of the first pages of each path are here, in the device pool or the host tier."""
        ...

    def read(self, path: Path, first: int, num: int) -> tuple[Bytes, Digests] | None:
        """Copy pages [first, first + num) of ``path``; None if they are not all here."""
        ...

    def write(self, path: Path, first: int, payload: Bytes, digests: Digests) -> int:
        """Take pages [first, first + n) of ``path`` into the host tier, their digests checked, where they are worth
        more than what they displace. Returns: how many of them are here now, without a hole."""
        ...


class Visit(Protocol):
    """Runs a function on the engine thread, between two steps."""

    def __call__(self, fn: Callable[[PageHome], T], /) -> Awaitable[T]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationStats:
    """What has moved since the start; counters only grow. Tokens are whole pages."""

    pushed_tokens: int = 0  # out of here, and kept by others
    pushed_bytes: int = 0
    push_s: float = 0.0
    received_tokens: int = 0  # into here, and kept
    wrong_pages: int = 0  # with a wrong digest: not sent, or not taken
    failed: int = 0  # connections
    value_kept: float = 1.0  # of the last push: the share of the expected hits a second, times tokens, others have now


class Migrator:
    """The pages of one replica that leave and come; `start` before anything else."""

    def __init__(self, visit: Visit, layout: KvLayout, *, host: str) -> None:
        """``layout``: of one rank; ``host``: the address of this machine that other replicas reach."""
        self.stats = MigrationStats()
        self._visit = visit
        self._layout = layout
        self._page_bytes = layout.num_parts * layout.page_bytes
        self._run_pages = max(RUN_BYTES // self._page_bytes, 1)
        self._host = host
        self._token = secrets.token_hex(16)
        self._hello: PeerHello | None = None
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()  # connections that came in

    async def start(self) -> MigrationAddress:
        """Listen, and return where."""
        self._server = await asyncio.start_server(self._came, self._host, 0)
        port = int(self._server.sockets[0].getsockname()[1])
        address = PeerAddress(host=self._host, port=port, incarnation=secrets.token_hex(8))
        self._hello = PeerHello(address=address, purpose="migration", layout=self._layout, ranks=())
        return MigrationAddress(peer=address, token=self._token)

    async def stop(self) -> None:
        """Close the listener and all connections that came in."""
        if self._server is not None:
            self._server.close()
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    def check(self) -> None:
        """Raises AssertionError if a connection is kept that has ended."""
        assert not any(task.done() for task in self._open)
        assert len(self._open) <= MAX_OPEN

    async def push(
        self, targets: Sequence[MigrationAddress], *, most_s: float, most_bytes: int = 1 << 62, share: float = 0.5
    ) -> MigrationStats:
        """Send what is worth most to ``targets``, for at most ``most_s``. Returns: `stats`.

        Args: share: of the time in which it may keep the link busy.
        """
        loop = asyncio.get_running_loop()
        began_s, shares = loop.time(), Shares[MigrationStream]((), 1)
        try:
            async with asyncio.timeout(most_s), contextlib.AsyncExitStack() as streams:
                paths = bounded(await self._visit(lambda home: home.hottest(most_bytes)))
                shares = Shares(paths, self._layout.page_size)
                await asyncio.gather(*(self._offer(each, shares, streams) for each in targets))
                for index in range(len(paths)):
                    await self._push(shares, index, share)
        except TimeoutError:
            log.info("the push of cached pages ends after %.1f s, as long as it may last", most_s)
        self._count(push_s=loop.time() - began_s)
        self.stats = replace(self.stats, value_kept=shares.value_kept)
        return self.stats

    async def _offer(
        self, target: MigrationAddress, shares: Shares[MigrationStream], streams: contextlib.AsyncExitStack
    ) -> None:
        """Connect, and ask what is there."""
        assert self._hello is not None
        try:
            stream = await MigrationStream.dial(target, self._hello)
            streams.callback(stream.close)
            await stream.send(Offer(shares.paths))
            pages = (await stream.receive(Have)).pages
            if len(pages) != len(shares.paths):
                raise BadMessage(f"{len(pages)} answers to {len(shares.paths)} paths")
            shares.join(stream, pages)
        except TransferError as error:
            self._failed(error)

    async def _push(self, shares: Shares[MigrationStream], index: int, share: float) -> None:
        """Send path ``index`` to a target, or to the next one if that fails."""
        loop, path = asyncio.get_running_loop(), shares.paths[index]
        end = path.num_pages(self._layout.page_size)
        while (chosen := shares.choose(index)) is not None:
            stream, first = chosen
            num = min(end - first, self._run_pages)
            run = await self._visit(lambda home, first=first, num=num: home.read(path, first, num))  # type: ignore[misc]
            if run is None:
                return  # evicted meanwhile
            payload, digests = run
            if await asyncio.to_thread(num_right, payload, digests) < num:
                log.error("a page of %d that were to be pushed has a wrong digest; they stay", num)
                self._count(wrong_pages=1)
                return
            sent_s, link_s = loop.time(), 0.0
            try:
                await stream.send(PageRun(index, first, digests.astype("<u8").tobytes()), payload)
                link_s = loop.time() - sent_s  # the rest is the target's wait for its engine
                kept = min((await stream.receive(Kept)).pages, num)
            except TransferError as error:
                self._failed(error)
                kept = 0
            self._count(pushed_tokens=kept * self._layout.page_size, pushed_bytes=payload.nbytes)
            shares.sent(stream, index, kept, payload.nbytes)
            if kept < num:  # lost, or full of what is worth more, as it will be for all that follows
                shares.lose(stream)
                stream.close()
            await asyncio.sleep(link_s * (1 / share - 1))

    async def _came(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection that came in, to its end."""
        task, stream = asyncio.current_task(), MigrationStream(reader, writer)
        assert task is not None
        assert self._hello is not None
        try:
            if len(self._open) < MAX_OPEN:
                self._open.add(task)
                await stream.meet(Handshake(token=self._token.encode(), hello=self._hello), self._hello)
                await self._receive(stream)
        except TransferError as error:
            self._failed(error)
        except asyncio.CancelledError:
            log.debug("this replica stops")  # and nothing awaits the task
        except Exception:  # the edge: it must not end the listener
            log.exception("a push of another replica ends")
        finally:
            self._open.discard(task)
            stream.close()

    async def _receive(self, stream: MigrationStream) -> None:
        paths = (await stream.receive(Offer)).paths
        await stream.send(Have(await self._visit(lambda home: home.held(paths))))
        while (message := await stream.next(within_s=IDLE_S)) is not None:
            if not isinstance(message, PageRun):
                raise BadMessage(f"a PageRun is wanted, {type(message).__name__} came")
            await stream.send(Kept(await self._take(stream, message, paths)))

    async def _take(self, stream: MigrationStream, run: PageRun, paths: Sequence[Path]) -> int:
        """Receive a run's bytes, and keep its pages up to the first wrong one. Returns: how many."""
        parts = self._layout.num_parts
        num, odd = divmod(len(run.digests), 8 * parts)
        path = paths[run.path] if run.path < len(paths) else None
        end = 0 if path is None else path.num_pages(self._layout.page_size)
        if path is None or odd or not 0 < num <= self._run_pages or run.first + num > end:
            raise BadMessage(f"{num} pages from {run.first} on of path {run.path}, which has {end}")
        payload = np.empty((num, self._page_bytes), dtype=np.uint8)
        await stream.receive_into(payload)
        digests = np.frombuffer(run.digests, dtype="<u8").astype(np.uint64).reshape(num, parts)
        right = await asyncio.to_thread(num_right, payload, digests)
        if right < num:
            log.error("page %d of %d that came has a wrong digest; it is not taken", right, num)
            self._count(wrong_pages=1)
        kept = await self._visit(lambda home: home.write(path, run.first, payload[:right], digests[:right]))
        self._count(received_tokens=kept * self._layout.page_size)
        return kept

    def _count(self, **counts: float) -> None:
        self.stats = replace(self.stats, **{name: getattr(self.stats, name) + each for name, each in counts.items()})

    def _failed(self, error: TransferError) -> None:
        log.warning("a push of cached pages failed: %s", error)
        self._count(failed=1)


def num_right(payload: Bytes, digests: Digests) -> int:
    """Count the pages [n, page_bytes] before the first of which a part does not fit its digest [n, parts]."""
    parts = payload.reshape(*digests.shape, -1)
    for at in range(len(digests)):
        if any(xxhash.xxh3_64_intdigest(part.data) != want for part, want in zip(parts[at], digests[at], strict=True)):
            return at
    return len(digests)
