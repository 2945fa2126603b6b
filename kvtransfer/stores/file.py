"""A store's medium in a folder of the local file system, which the replicas of a host share.

Owns:      the bytes of the files.
Never:     waits for the disk to hold what was written: there is no fsync. What a power failure tears is found by its
           length or digest, and is a miss.
Invariant: an item's name appears when its bytes are complete (written under another name, then renamed), and they
           never change afterwards; a process that is killed leaves at most a temporary file (folder.py removes it).
Thread:    the store's. An item is one read or one write of the kernel, without the GIL.
"""

import contextlib
import errno
import os
import stat
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence

from kvtransfer.stores.folder import Folder, create, item_name, open_own, touch
from kvtransfer.stores.items import HEADER_BYTES, Buffer, Item, StoreKey, num_bytes
from kvtransfer.stores.store import DISK_FULL, Untrusted

MOST_BUFFERS = 1024  # IOV_MAX of Linux
SCANS_PER_WRITE = 4  # until the first round is through
EVICTIONS_PER_IDLE = 8


class FileMedium:
    """A `Medium` of one file an item."""

    keeps_runs = False

    def __init__(self, root: str, *, capacity_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Open or make the folder ``root``. Raises: OSError, Untrusted for one that others may write."""
        self._folder = Folder(root, capacity_bytes=capacity_bytes, clock=clock)
        self._name = uuid.uuid4().hex
        self._num_created = 0

    def contains(self, keys: Sequence[StoreKey]) -> list[bool]:
        return [self._folder.has(key) for key in keys]

    def read(self, wanted: Iterable[Item]) -> Iterator[int]:
        return (self._read(key, into) for key, into in wanted)

    def write(self, items: Iterable[Item]) -> Iterator[bool]:
        for key, item in items:
            for _ in range(0 if self._folder.was_scanned else SCANS_PER_WRITE):
                self._folder.scan_shard()
            with self._folder.shard(key[0], make=True) as shard:
                stored = self._write(key, shard, item)
            yield stored

    def _read(self, key: StoreKey, into: Sequence[Buffer]) -> int:
        try:
            with self._folder.shard(key[0]) as shard:
                file = open_own(item_name(key), stat.S_IFREG, shard)
            try:
                size = os.fstat(file).st_size
                _move_all(os.preadv, file, into if size == num_bytes(into) else [into[0][: min(size, HEADER_BYTES)]])
                with contextlib.suppress(OSError):  # a file system that is mounted read-only can be read
                    self._folder.used(key, size, touch(file))
            finally:
                os.close(file)
        except OSError:
            self._folder.gone(key)
            raise
        return size

    def _write(self, key: StoreKey, shard: int, item: Sequence[Buffer]) -> bool:
        folder, name, size = self._folder, item_name(key), num_bytes(item)
        with contextlib.suppress(FileNotFoundError, Untrusted):  # what is no item of ours is replaced
            file = open_own(name, stat.S_IFREG, shard)
            try:
                if os.fstat(file).st_size == size:
                    folder.used(key, size, touch(file))
                    return False
            finally:
                os.close(file)
        folder.make_room(size)
        self._num_created += 1
        temporary = f".{key.hex()}.{self._name}-{self._num_created}.tmp"
        file = create(temporary, shard)
        try:
            _move_all(os.pwritev, file, item)
            used_ns = touch(file)
            os.rename(temporary, name, src_dir_fd=shard, dst_dir_fd=shard)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=shard)
                if error.errno in DISK_FULL:  # evict, whatever fills the disk: the next write finds more room
                    folder.evict_oldest()
            raise
        finally:
            os.close(file)
        folder.used(key, size, used_ns)
        return True

    def delete(self, key: StoreKey) -> None:
        self._folder.delete(key)

    def idle(self) -> bool:
        folder = self._folder
        if folder.trim(EVICTIONS_PER_IDLE):
            return True
        if folder.wants_scan:
            folder.scan_shard()
        return folder.wants_scan

    def held(self) -> tuple[int, int, int]:
        return len(self._folder), self._folder.num_bytes, self._folder.num_evicted

    def close(self) -> None:
        """Do nothing: no file is open between calls."""

    def check(self) -> None:
        self._folder.check()


def _move_all(move: Callable[[int, Sequence[memoryview], int], int], file: int, buffers: Sequence[Buffer]) -> None:
    """Call preadv or pwritev until every buffer is through, from the start of the file. Raises: OSError."""
    offset = 0
    left = list(buffers)
    while left:
        moved = move(file, left[:MOST_BUFFERS], offset)
        if moved <= 0 and left[0].nbytes:
            raise OSError(errno.EIO, f"the file ends after {offset} bytes")
        offset += moved
        while left and moved >= left[0].nbytes:
            moved -= left.pop(0).nbytes
        if moved:
            left[0] = left[0][moved:]
