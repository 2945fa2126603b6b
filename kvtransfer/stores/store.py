"""The store tier (L3): runs of KV pages by key, on whatever medium keeps bytes.

Owns:      how a call ends, what is counted, and the silence after a failure.
Never:     raises for what a disk or a network does, or waits for either longer than its medium does.
Invariant: a read says OK only for the bytes that were written under that key by this layout. Anything else is a miss
           with a reason; an item that is not whole is deleted.
Thread:    one, except `Store.stats`, which any may call.
"""

import dataclasses
import enum
import errno
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvtransfer.stores.items import (
    HEADER_BYTES,
    LAYOUT_BYTES,
    NO_SECRET,
    Buffer,
    Item,
    StoreKey,
    fault_of_header,
    fault_of_payload,
    num_bytes,
    pack_header,
    shape_in_header,
)

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


class Untrusted(OSError):
    """What lies in an item's place is not this store's: another user may have written it. The medium is not broken."""


class ReadStatus(enum.Enum):
    """How a read ended. Only after OK do the buffers hold anything that may be used."""

    OK = "ok"
    MISSING = "missing"  # no such item, or one of another length
    CORRUPT = "corrupt"  # not what was written, or not by us; it has been deleted
    ERROR = "error"  # the medium failed, now or just before


class WriteStatus(enum.Enum):
    """How a write to a store ended."""

    STORED = "stored"
    PRESENT = "present"  # it was there; it counts as used now
    FULL = "full"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadResult:
    """How a read ended, and why where it is not OK."""

    status: ReadStatus
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteResult:
    """How a write ended, and why where nothing was stored."""

    status: WriteStatus
    reason: str = ""


@dataclass(slots=True, kw_only=True)
class StoreStats:
    """What a store holds, as far as this process knows, and what it has done since it was opened."""

    items: int = 0
    bytes: int = 0  # with headers
    evicted: int = 0
    asked: int = 0  # keys that `Store.contains` was asked for
    asked_s: float = 0.0
    reads: int = 0  # that ended OK; the bytes and seconds are theirs
    read_bytes: int = 0
    read_s: float = 0.0
    missing: int = 0
    corrupt: int = 0
    writes: int = 0  # that ended STORED
    write_bytes: int = 0
    write_s: float = 0.0
    present: int = 0
    full: int = 0
    errors: int = 0  # failures of the medium; calls that the silence after one refused are not counted


class Medium(Protocol):
    """What keeps the bytes of items. Its calls raise OSError, Untrusted for one item's sake; an item's first buffer is
    its header. Reads and writes take many items, answer in their order, and end at the first that fails; what follows
    it may have been read or written, if the medium works ahead."""

    keeps_runs: bool  # whether neighbours with the key of one run (`KeyInRun`) become one object

    def contains(self, keys: Sequence[StoreKey]) -> list[bool]: ...

    def read(self, wanted: Iterable[Item]) -> Iterator[int]:
        """Fill each item's buffers, or at least its first, as far as the item goes. Yields: the item's bytes.

        No buffer of an item is touched after the iterator was closed. Raises: FileNotFoundError when there is none.
        """

    def write(self, items: Iterable[Item]) -> Iterator[bool]:
        """Yields: False when an item of that size was there. Raises: OSError, ENOSPC when it finds no room."""

    def delete(self, key: StoreKey) -> None: ...

    def idle(self) -> bool: ...

    def held(self) -> tuple[int, int, int]:
        """Return the items and bytes held as far as is known, and the items evicted."""

    def close(self) -> None: ...

    def check(self) -> None: ...


class Store:
    """Runs of pages by key, verified.

    The pages of a run may lie anywhere; a read fills them and a write takes from them without a copy where the medium
    can. After a read that is not OK their content is undefined.
    """

    def __init__(
        self,
        medium: Medium,
        *,
        layout_digest: bytes,
        secret: bytes = NO_SECRET,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args: layout_digest: of 8 bytes; see `page_chain`. secret: see `store_secret`. Raises: ValueError."""
        if len(layout_digest) != LAYOUT_BYTES:
            raise ValueError(f"a layout digest of {LAYOUT_BYTES} bytes is wanted, not of {len(layout_digest)}")
        self._medium = medium
        self._layout = layout_digest
        self._secret = secret
        self._clock = clock
        self._reading = Backoff(clock)
        self._writing = Backoff(clock)
        self._stats = StoreStats()

    @property
    def keeps_runs(self) -> bool:
        return self._medium.keeps_runs

    def contains(self, keys: Sequence[StoreKey]) -> list[bool]:
        """Say for each key whether its item is there: a guess, another process may evict or add at any moment."""
        started = self._clock()
        found = [False] * len(keys)
        if not self._reading.remaining_s():
            try:
                found = self._medium.contains(keys)
            except OSError:
                self._failed(self._reading)
            self._stats.asked += len(keys)
            self._stats.asked_s += self._clock() - started
        return found

    def read(self, wanted: Sequence[Item]) -> Iterator[ReadResult]:
        """Read items into their pages. Yields: how each ended, in order, to the first that is not OK."""
        if wait_s := self._reading.remaining_s():
            yield ReadResult(status=ReadStatus.ERROR, reason=f"a read failed; the next is tried in {wait_s:.1f} s")
            return
        stats = self._stats
        headers = [bytearray(HEADER_BYTES) for _ in wanted]
        whole = zip(wanted, headers, strict=True)
        sizes = self._medium.read([(key, [memoryview(header), *into]) for (key, into), header in whole])
        for (key, into), header in zip(wanted, headers, strict=True):
            started = self._clock()  # what a medium that works ahead has done meanwhile costs nothing
            try:
                result = self._verify(key, next(sizes), header, into)
            except FileNotFoundError:
                result = ReadResult(status=ReadStatus.MISSING, reason="there is no such item")
            except Untrusted as error:
                result = ReadResult(status=ReadStatus.CORRUPT, reason=str(error))
            except OSError as error:
                self._failed(self._reading)
                yield ReadResult(status=ReadStatus.ERROR, reason=str(error))
                return
            self._reading.worked()
            if result.status is ReadStatus.OK:
                stats.reads += 1
                stats.read_bytes += num_bytes(into)
                stats.read_s += self._clock() - started
            elif result.status is ReadStatus.MISSING:
                stats.missing += 1
            else:
                stats.corrupt += 1
                self.delete(key)
            yield result
            if result.status is not ReadStatus.OK:
                return

    def write(self, items: Iterable[Item]) -> Iterator[WriteResult]:
        """Store each item's pages, unless an item of that size is there. Yields: how each ended, in order, to the first
        that is neither STORED nor PRESENT."""
        if wait_s := self._writing.remaining_s():
            yield WriteResult(status=WriteStatus.ERROR, reason=f"a write failed; the next is tried in {wait_s:.1f} s")
            return
        stats = self._stats
        for_medium, each = itertools.tee(items)
        writes = self._medium.write(
            (key, [memoryview(pack_header(key, self._layout, pages, self._secret)), *pages])
            for key, pages in for_medium
        )
        for _, pages in each:
            started = self._clock()
            try:
                stored = next(writes)
            except Untrusted as error:
                stats.errors += 1
                yield WriteResult(status=WriteStatus.ERROR, reason=str(error))
                return
            except OSError as error:
                if error.errno in DISK_FULL:
                    stats.full += 1
                    yield WriteResult(status=WriteStatus.FULL, reason=str(error))
                    return
                self._failed(self._writing)
                yield WriteResult(status=WriteStatus.ERROR, reason=str(error))
                return
            self._writing.worked()
            if not stored:
                stats.present += 1
                yield WriteResult(status=WriteStatus.PRESENT)
                continue
            stats.writes += 1
            stats.write_bytes += num_bytes(pages)
            stats.write_s += self._clock() - started
            yield WriteResult(status=WriteStatus.STORED)

    def delete(self, key: StoreKey) -> None:
        try:
            self._medium.delete(key)
        except OSError:
            self._failed(self._writing)

    def idle(self) -> bool:
        """Do one small piece of housekeeping, milliseconds of it. Returns: whether another one is due."""
        try:
            return not self._writing.remaining_s() and self._medium.idle()
        except OSError:
            self._failed(self._writing)
            return False

    def stats(self) -> StoreStats:
        items, held, evicted = self._medium.held()
        return dataclasses.replace(self._stats, items=items, bytes=held, evicted=evicted)

    def close(self) -> None:
        self._medium.close()

    def check(self) -> None:
        """Raises: AssertionError where the medium's books contradict themselves."""
        self._medium.check()

    def _verify(self, key: StoreKey, size: int, buffer: bytearray, into: Sequence[Buffer]) -> ReadResult:
        header = bytes(buffer[:size])
        if fault := fault_of_header(header, key, self._layout, self._secret):
            return ReadResult(status=ReadStatus.CORRUPT, reason=fault)
        num_pages, length = shape_in_header(header)
        if size != HEADER_BYTES + length:
            fault = f"it has {size} bytes, its header says {HEADER_BYTES + length}"
            return ReadResult(status=ReadStatus.CORRUPT, reason=fault)
        if (num_pages, length) != (len(into), num_bytes(into)):
            wanted = f"{len(into)} of {num_bytes(into)} bytes together are wanted"
            return ReadResult(status=ReadStatus.MISSING, reason=f"it holds {num_pages} pages of {length}; {wanted}")
        if fault := fault_of_payload(header, into, self._secret):
            return ReadResult(status=ReadStatus.CORRUPT, reason=fault)
        return ReadResult(status=ReadStatus.OK)

    def _failed(self, backoff: "Backoff") -> None:
        self._stats.errors += 1
        backoff.failed()


class Backoff:
    """Keeps a broken medium from being asked all the time: 0.5 s of silence, doubled to 30 s by each failure."""

    FIRST_S = 0.5
    MOST_S = 30.0

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._wait_s = self.FIRST_S
        self._until = float("-inf")

    def remaining_s(self) -> float:
        """Seconds until the next try is allowed; 0 when it is."""
        return max(self._until - self._clock(), 0.0)

    def failed(self) -> None:
        self._until = self._clock() + self._wait_s
        self._wait_s = min(self._wait_s * 2, self.MOST_S)

    def worked(self) -> None:
        self._wait_s = self.FIRST_S
