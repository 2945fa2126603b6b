"""The files of a file store: which there are, how large, how long unused; and which of them go when it is full.

Owns:      the names of files, and a copy of the folder's listing, which is a guess: other processes of the host add,
           evict and use items at any moment. A file's mtime is when it was last used, by whichever process.
Never:     reads or writes an item's bytes (file.py); follows a link, or opens what another user may have written: the
           root, a shard and an item belong to this user, and no other user may write to a folder (`open_own`).
Invariant: ``num_bytes`` is the sum of the sizes listed; what is deleted was the oldest of those listed.
Thread:    the store's.

    root/<first byte of the key, hex>/<key, hex>.kv          an item
    root/<first byte>/.<key, hex>.<store>-<number>.tmp       an item that is being written; its writer holds a flock

The listing is made a shard at a time, so that opening a store costs nothing however much it holds. Until the first
round is through, the store may exceed its capacity by what is written meanwhile (a write scans too: 64 of them end it).
A round takes a minute at least. A temporary file without a flock has lost its writer, and the scan removes it; a flock
dies with its process, and other than a process id it means the same in every container of the host.
"""

import contextlib
import errno
import fcntl
import heapq
import math
import os
import re
import stat
import time
from collections.abc import Callable, Iterator

from kvtransfer.stores.items import KEY_BYTES, StoreKey
from kvtransfer.stores.store import Untrusted

NUM_SHARDS = 256
LOW_WATER = 0.9  # of the capacity: how far `Folder.trim` goes once it was reached
ROUND_S = 60.0
ABSENT_S = 1.0  # for so long a file that was not there is not looked for again
MOST_ABSENT = 65_536
_ITEM = re.compile(rf"([0-9a-f]{{{2 * KEY_BYTES}}})\.kv")
_TEMPORARY = re.compile(rf"\.[0-9a-f]{{{2 * KEY_BYTES}}}\.[0-9a-f]+-[0-9]+\.tmp")


class Folder:
    """The listing of a store's root folder, and its eviction."""

    def __init__(self, root: str, *, capacity_bytes: int, clock: Callable[[], float]) -> None:
        """Make ``root`` if it is not there, readable by its owner alone. Raises: OSError, Untrusted."""
        os.makedirs(root, mode=0o700, exist_ok=True)
        os.close(open_own(root, stat.S_IFDIR))
        self.root = root
        self.capacity_bytes = capacity_bytes
        self.num_bytes = 0
        self.num_evicted = 0
        self._clock = clock
        self._shards: list[dict[StoreKey, tuple[int, int]]] = [{} for _ in range(NUM_SHARDS)]  # bytes, mtime in ns
        self._absent: dict[StoreKey, float] = {}  # until when
        self._oldest: list[tuple[int, StoreKey]] = []  # a heap by mtime in ns; may be out of date
        self._above_low_water = False
        self._num_scanned = 0
        self._scan_at = -math.inf

    def __len__(self) -> int:
        return sum(map(len, self._shards))

    @contextlib.contextmanager
    def shard(self, number: int, *, make: bool = False) -> Iterator[int]:
        """Open the folder of a shard, made if ``make`` says so; never the root, which may be a disk that was unmounted.

        Raises: OSError, Untrusted.
        """
        name, root = f"{number:02x}", open_own(self.root, stat.S_IFDIR)
        try:
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, 0o700, dir_fd=root)
            opened = open_own(name, stat.S_IFDIR, root)
        finally:
            os.close(root)
        try:
            yield opened
        finally:
            os.close(opened)

    def has(self, key: StoreKey) -> bool:
        """Whether there is an item, as far as is known; the folder is asked about unknown ones. Raises: OSError."""
        if key in self._shards[key[0]]:
            return True
        if self._absent.get(key, -math.inf) > self._clock():
            return False
        status = self._status(key)
        if status is None:
            self.gone(key)
            return False
        self.used(key, status.st_size, status.st_mtime_ns)
        return True

    def used(self, key: StoreKey, num_bytes: int, mtime_ns: int) -> None:
        """List an item, or its new size and time."""
        self._absent.pop(key, None)
        shard = self._shards[key[0]]
        self.num_bytes += num_bytes - shard.get(key, (0, 0))[0]
        shard[key] = num_bytes, mtime_ns

    def gone(self, key: StoreKey) -> None:
        """Note that there is no such item."""
        self.num_bytes -= self._shards[key[0]].pop(key, (0, 0))[0]
        if len(self._absent) >= MOST_ABSENT:
            self._absent.clear()
        self._absent[key] = self._clock() + ABSENT_S

    def delete(self, key: StoreKey) -> None:
        """Remove an item if it is there. Raises: OSError."""
        with contextlib.suppress(FileNotFoundError, IsADirectoryError, Untrusted), self.shard(key[0]) as shard:
            os.unlink(item_name(key), dir_fd=shard)
        self.gone(key)

    @property
    def wants_scan(self) -> bool:
        return self._clock() >= self._scan_at

    @property
    def was_scanned(self) -> bool:
        """Whether each shard was listed at least once."""
        return self._num_scanned >= NUM_SHARDS

    def scan_shard(self) -> None:
        """List the next shard anew, and remove temporary files that have lost their writer. Raises: OSError."""
        number = self._num_scanned % NUM_SHARDS
        if number == 0:
            self._oldest.clear()
        found: dict[StoreKey, tuple[int, int]] = {}
        with (
            contextlib.suppress(FileNotFoundError, Untrusted),
            self.shard(number) as shard,
            os.scandir(shard) as entries,
        ):
            for entry in entries:
                if item := _ITEM.fullmatch(entry.name):
                    with contextlib.suppress(FileNotFoundError):  # evicted meanwhile
                        status = entry.stat(follow_symlinks=False)
                        found[bytes.fromhex(item[1])] = status.st_size, status.st_mtime_ns
                elif _TEMPORARY.fullmatch(entry.name):
                    _remove_if_abandoned(entry.name, shard)
        self.num_bytes += sum(size for size, _ in found.values()) - sum(s for s, _ in self._shards[number].values())
        self._shards[number] = {key: file for key, file in found.items() if key[0] == number}
        self._num_scanned += 1
        if self.was_scanned:
            self._scan_at = self._clock() + ROUND_S / NUM_SHARDS

    def make_room(self, num_bytes: int) -> None:
        """Evict the oldest items until ``num_bytes`` fit. Raises: OSError, ENOSPC when they cannot."""
        fits = num_bytes <= self.capacity_bytes
        while fits and self.num_bytes + num_bytes > self.capacity_bytes:
            self._above_low_water = True
            fits = self.evict_oldest()
        if not fits:
            raise OSError(errno.ENOSPC, f"an item of {num_bytes} bytes finds no room in {self.capacity_bytes}")

    def trim(self, num_items: int) -> bool:
        """Once the capacity was reached: evict up to ``num_items`` on the way to the low-water mark.

        Returns: whether there is more to evict. Raises: OSError.
        """
        while num_items and self._above_low_water:
            self._above_low_water = self.num_bytes > LOW_WATER * self.capacity_bytes and self.evict_oldest()
            num_items -= 1
        return self._above_low_water

    def evict_oldest(self) -> bool:
        """Delete the item that was unused for longest. Returns: whether one went. Raises: OSError."""
        for _ in range(2):  # the order of before, then a new one
            while self._oldest:
                mtime_ns, key = heapq.heappop(self._oldest)
                if self._shards[key[0]].get(key, (0, 0))[1] != mtime_ns:
                    continue  # used or gone since
                status = self._status(key)
                if status is None:
                    self.gone(key)
                    return True
                if status.st_mtime_ns != mtime_ns:  # used by another process
                    self.used(key, status.st_size, status.st_mtime_ns)
                    heapq.heappush(self._oldest, (status.st_mtime_ns, key))
                    continue
                self.delete(key)
                self.num_evicted += 1
                return True
            self._oldest = [(mtime_ns, key) for shard in self._shards for key, (_, mtime_ns) in shard.items()]
            heapq.heapify(self._oldest)
        return False

    def _status(self, key: StoreKey) -> os.stat_result | None:
        """Look at an item; None when there is none in a shard of this user's. Raises: OSError."""
        try:
            with self.shard(key[0]) as shard:
                return os.stat(item_name(key), dir_fd=shard, follow_symlinks=False)
        except (FileNotFoundError, Untrusted):
            return None

    def check(self) -> None:
        """Raises: AssertionError where the listing contradicts itself."""
        sizes = [size for shard in self._shards for size, _ in shard.values()]
        assert self.num_bytes == sum(sizes), f"{self.num_bytes} bytes are counted, {sum(sizes)} are listed"
        assert all(key[0] == number for number, shard in enumerate(self._shards) for key in shard)
        assert len(self._absent) <= MOST_ABSENT


def item_name(key: StoreKey) -> str:
    return f"{key.hex()}.kv"


def open_own(path: str, kind: int, folder: int | None = None, access: int = os.O_RDONLY) -> int:
    """Open a folder or a file that only this user can write to. A link is not followed, and a FIFO is not waited for.

    Args:    kind: S_IFDIR or S_IFREG. folder: that ``path`` is in; None: the current one.
    Returns: its descriptor.
    Raises:  OSError; Untrusted, which says why.
    """
    try:
        file = os.open(path, access | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link; a socket
            raise Untrusted(f"{path} is no {_KINDS[kind]}") from error
        raise
    status = os.fstat(file)
    if fault := _fault_of(status, kind):
        os.close(file)
        raise Untrusted(f"{path} {fault}")
    return file


def read_own(path: str) -> bytes:
    """Read a file that only this user, or root, can have written. Links are followed, as those of a mounted secret; a
    FIFO is not waited for. Raises: OSError; Untrusted."""
    with open(path, "rb", opener=lambda name, access: os.open(name, access | os.O_CLOEXEC | os.O_NONBLOCK)) as file:
        status = os.fstat(file.fileno())
        if fault := _fault_of(status, stat.S_IFREG, root_too=True):
            raise Untrusted(f"{path} {fault}")
        return file.read()


_KINDS = {stat.S_IFDIR: "folder", stat.S_IFREG: "file"}


def _fault_of(status: os.stat_result, kind: int, *, root_too: bool = False) -> str:
    """Return in words why others may have written what has this status; empty where they cannot."""
    if stat.S_IFMT(status.st_mode) != kind:
        return f"is no {_KINDS[kind]}"
    if status.st_uid != os.geteuid() and not (root_too and status.st_uid == 0):
        return f"belongs to user {status.st_uid}, and this process is user {os.geteuid()}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"can be written by others (mode {stat.S_IMODE(status.st_mode):o})"
    return ""


def touch(file: int) -> int:
    """Set a file's mtime to now. Returns: it, in ns. The kernel's own clock for it ticks in milliseconds."""
    now = time.time_ns()
    os.utime(file, ns=(now, now))
    return now


def create(name: str, shard: int) -> int:
    """Create a temporary file and lock it, so that it is not taken for abandoned. Returns: its descriptor.

    Raises: OSError.
    """
    while True:
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=shard)
        fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file).st_nlink:
            return file
        os.close(file)  # another process's scan came before the lock


def _remove_if_abandoned(name: str, shard: int) -> None:
    with contextlib.suppress(FileNotFoundError, BlockingIOError, Untrusted):
        file = open_own(name, stat.S_IFREG, shard, os.O_RDWR)  # over NFS a lock wants it
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(name, dir_fd=shard)
        finally:
            os.close(file)
