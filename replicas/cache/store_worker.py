"""The thread between a store (L3) and the host tier: looks, reads and writes, as the store tier asks.

Owns:      the thread "manta-store", its jobs, and the store.
Never:     takes host pages, or touches the tree; it fills and reads the pages that it was given.
Invariant: what `Fetch.num_read` counts is whole in host memory, and sealed; a job ends in OVER, or in
           `Worker.take_puts`, unless the thread has died (`error`).
Thread:    its own; the scheduler's adds jobs and reads how far they are. Reads go before writes.
"""

import collections
import enum
import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvtransfer.stores.items import RUN_BYTES, RUN_TOKENS, StoreKey, keys_in_runs, page_chain, page_chain_keys
from kvtransfer.stores.store import ReadStatus, Store, StoreStats, WriteStatus
from replicas.cache.node import NO_PAGES, TreeNode
from replicas.memory.allocator import Pages
from replicas.types import TokenIds

PROBES = 16  # keys that a look asks for at once
CLOSE_S = 5.0  # how long `close` waits for a store that hangs


class HostBytes(Protocol):
    """The host pages as bytes."""

    @property
    def page_bytes(self) -> int: ...

    def page(self, page: int, *, writes: bool = False) -> npt.NDArray[np.uint8]:
        """[page_bytes], once no copy is in the way of reading it, or of writing it."""
        ...

    def seal(self, page: int) -> None: ...

    def intact(self, page: int) -> bool: ...


class FetchStage(enum.Enum):
    """How far a fetch is."""

    LOOKING = "looking"
    FOUND = "found"  # until host pages are taken for what was found
    READING = "reading"
    OVER = "over"


@dataclass(slots=True, eq=False)
class Fetch:
    """The pages that one prompt wants from the store."""

    token_ids: TokenIds  # the whole pages of the prompt
    salt: str
    first: int  # page from which on the replica has nothing
    asked_s: float
    stage: FetchStage = FetchStage.LOOKING
    keys: list[StoreKey] = field(default_factory=list)  # of the pages that the store has, from ``first`` on
    host_pages: Pages = field(default_factory=lambda: NO_PAGES)
    num_read: int = 0  # of them, good
    num_adopted: int = 0  # of those
    unwanted: bool = False  # its request no longer waits for what is not read yet
    reading_s: float = 0.0  # when READING began


@dataclass(slots=True, eq=False)
class Put:
    """Pages that go to the store; the host pages are pinned."""

    node: TreeNode
    token_ids: TokenIds  # to the end of the node
    first: int
    host_pages: Pages
    num_stored: int = 0  # the first of them that the store has


class Worker:
    """The thread, and what it has been asked for."""

    def __init__(
        self,
        store: Store,
        memory: HostBytes,
        fingerprint: str,
        page_size: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``fingerprint``: of the layout of pages, all ranks'."""
        self.on_event: Callable[[], None] = lambda: None  # called by the thread when a job is over
        self.error: BaseException | None = None  # why the thread has died
        self._store = store
        self._memory = memory
        self._fingerprint = fingerprint
        self._page_size = page_size
        self._reads: collections.deque[Fetch] = collections.deque()
        self._puts: collections.deque[Put] = collections.deque()
        self._done: collections.deque[Put] = collections.deque()
        self._news = threading.Condition()
        self._closing = False
        self._clock = clock
        self._called_s: float | None = None  # when the store was called that has not answered yet
        self._thread = threading.Thread(target=self._main, name="manta-store", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def fetch(self, fetch: Fetch) -> None:
        """Continue ``fetch``: look for it, or read what was found."""
        with self._news:
            self._reads.append(fetch)
            self._news.notify()

    def put(self, put: Put) -> None:
        with self._news:
            self._puts.append(put)
            self._news.notify()

    def take_puts(self) -> list[Put]:
        """Return the puts that are over since the last call."""
        return [self._done.popleft() for _ in range(len(self._done))]

    def drop_queued(self) -> None:
        """End what was asked for and has not begun, as if the store had nothing."""
        with self._news:
            while self._reads:
                self._reads.popleft().stage = FetchStage.OVER
            self._done.extend(self._puts)
            self._puts.clear()

    @property
    def silent_s(self) -> float:
        """Seconds for which the store has not answered a call; 0 while there is none. Any thread may ask."""
        called_s = self._called_s
        return 0.0 if called_s is None else self._clock() - called_s

    def stats(self) -> StoreStats:
        return self._store.stats()

    def close(self) -> None:
        """End the thread; one that hangs in its store is left behind."""
        with self._news:
            self._closing = True
            self._news.notify()
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            self._store.close()

    def _main(self) -> None:
        try:
            while (job := self._next()) is not None:
                if isinstance(job, Put):
                    self._write(job)
                    self._done.append(job)
                elif job.stage is FetchStage.LOOKING:
                    self._look(job)
                else:
                    self._read(job)
                    job.stage = FetchStage.OVER
                self.on_event()
        except BaseException as error:  # noqa: BLE001 - the replica becomes unhealthy
            self.error, self._called_s = error, None
            self.on_event()

    def _next(self) -> Fetch | Put | None:
        """Wait for a job; the store is tidied meanwhile. Returns: None when the end has come."""
        busy = True
        while True:
            with self._news:
                self._called_s = None
                if not (self._reads or self._puts or self._closing or busy):
                    self._news.wait()
                if self._closing:
                    return None
                if self._reads:
                    return self._reads.popleft()
                if self._puts:
                    return self._puts.popleft()
            self._called_s = self._clock()
            busy = self._store.idle()

    def _look(self, fetch: Fetch) -> None:
        """Find how many pages from ``first`` on the store has; most often none.

        A hole is rare: some keys between one that is there and one that is not are asked for, and then those between
        two of them. A hole that was stepped over ends the read.
        """
        keys = self._keys(fetch.token_ids, fetch.salt)[fetch.first :]
        there, gone = -1, len(keys)  # key ``there`` is in the store, ``gone`` is not
        probes = [0] if keys else []
        while probes and not fetch.unwanted:
            self._called_s = self._clock()
            has = [*self._store.contains([keys[at] for at in probes]), False]
            found = has.index(False)
            there, gone = [there, *probes][found], [*probes, gone][found]
            step = -(-(gone - there) // PROBES)
            probes = sorted({*range(there + step, gone, step), gone - 1} - {there})
        fetch.keys = keys[: there + 1]
        fetch.stage = FetchStage.FOUND

    def _read(self, fetch: Fetch) -> None:
        pages = fetch.host_pages.tolist()
        rows = [self._memory.page(page, writes=True) for page in pages]
        results = self._store.read([(key, [row.data]) for key, row in zip(fetch.keys, rows, strict=True)])
        for page in pages:
            if fetch.unwanted or self._closing:
                return
            self._called_s = self._clock()
            if next(results).status is not ReadStatus.OK:
                return
            self._memory.seal(page)
            fetch.num_read += 1

    def _write(self, put: Put) -> None:
        """Write each page that is as it was copied; one that is not is found when it is loaded."""
        keys = self._keys(put.token_ids, put.node.salt)[put.first :]
        pages = zip(keys, put.host_pages.tolist(), strict=True)
        intact = itertools.takewhile(lambda page: self._memory.intact(page[1]), pages)
        self._called_s = self._clock()
        for result in self._store.write((key, [self._memory.page(page).data]) for key, page in intact):
            if result.status not in (WriteStatus.STORED, WriteStatus.PRESENT):
                return
            put.num_stored += 1
            if self._closing:
                return
            self._called_s = self._clock()

    def _keys(self, token_ids: TokenIds, salt: str) -> list[StoreKey]:
        """Return the keys of the whole pages of ``token_ids``, in runs where the store keeps such."""
        keys = page_chain_keys(token_ids, self._page_size, page_chain(self._fingerprint, salt))
        longest = min(RUN_TOKENS // self._page_size, RUN_BYTES // self._memory.page_bytes)
        return keys_in_runs(keys, longest) if self._store.keeps_runs else keys
