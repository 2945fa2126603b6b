"""The host tier's pages (L2): host memory in which pages of the device pool are kept, shared by all ranks of a replica.

Owns:      the memory, and the digest of each rank's part of each page.
Never:     knows which pages are in use (cache/tiers.py).
Invariant: a page is the parts of all ranks one after the other, each byte for byte as in that rank's device pool;
           where all ranks have the same bytes (`KvLayout.num_parts` is 1) it is that of rank 0. ``digests`` hold
           XXH3-64 of what `backup` or the tier's owner put there, and `load` gives the device nothing else. Page 0 is
           not used, as in the device pool.
           On a GPU, copies run on a stream of their own: the pages that are copied out are complete, as those that go
           to a peer are, so the step under way is not waited for; pages that are copied in may still be written by it,
           so those copies run behind it. A call waits for its copies alone; where ``in_background`` is set, it waits
           for none, the next step on the device does, and a thread takes the digests. Whoever reads or writes the
           memory meanwhile waits for them: for those of a page (`page`), or for all (``view``, ``digests``).
Thread:    the runner's for `backup` and `load`. Others read and write pages that are theirs (store, peers).
Source:    SPEC C11; SGLang's HiCache, host pool.
"""

import logging
import mmap
import os
import queue
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from replicas.errors import InvalidConfig
from replicas.memory.pool import MHATokenToKVPool, populate

log = logging.getLogger(__name__)

COPY_BYTES = 8 << 20  # of a copy at most: the digests of one are taken while the next one runs

CLOSE_S = 5.0  # how long `close` waits for a device that hangs

NO_DIGEST = 0  # of a page that is being copied, or that could not be: as good as no page has it

PageIds = npt.NDArray[np.int32]  # [n]
Ok = npt.NDArray[np.bool_]  # [n]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """Where the memory of a host tier lies and what it holds; what a follower attaches to. Picklable."""

    path: str  # of the mapping, while the process that made it lives
    num_pages: int
    rank_page_bytes: int  # of one rank's part
    tp: int  # parts of a page: of ranks 0 to tp - 1; every other rank has what rank 0 has

    @property
    def page_bytes(self) -> int:
        """The bytes of a page, all ranks."""
        return self.tp * self.rank_page_bytes

    @property
    def digest_bytes(self) -> int:
        """The bytes of the digests, which stand before the pages; whole memory pages."""
        return -(-(self.num_pages + 1) * self.tp * 8 // mmap.PAGESIZE) * mmap.PAGESIZE

    @property
    def num_bytes(self) -> int:
        return self.digest_bytes + (self.num_pages + 1) * self.page_bytes


@dataclass(slots=True, eq=False)
class _Backup:
    """Copies to the host: (event behind it, first host page, number) of each, and whether their digests are taken."""

    copies: list[tuple[torch.cuda.Event, int, int]] = field(default_factory=list)
    is_over: threading.Event = field(default_factory=threading.Event)


class HostKVCache:
    """The host pages of one replica as one of its ranks sees them: ``view`` [num_pages + 1, page_bytes] uint8, all
    ranks', and ``digests`` [num_pages + 1, tp] uint64."""

    def __init__(self, memory: HostMemory, rank: int) -> None:
        """Attach to ``memory``; use `create` on rank 0. Raises: InvalidConfig when that is of another machine."""
        self._fd, self._is_pinned = -1, False
        try:
            fd = os.open(memory.path, os.O_RDWR)
        except OSError as error:
            raise InvalidConfig(
                f"cache.host_memory_bytes: rank {rank} cannot reach the host tier of rank 0 ({error}); its ranks must "
                "run on one machine, in one PID namespace"
            ) from error
        try:
            self._map = mmap.mmap(fd, memory.num_bytes)
        finally:
            os.close(fd)
        self.memory = memory
        self.in_background = False  # no other rank has a part, and no peer writes pages of the device
        self._writes = rank < memory.tp
        self._part = part = rank if self._writes else 0
        whole = np.frombuffer(self._map, dtype=np.uint8)
        num_digests = (memory.num_pages + 1) * memory.tp
        self._digests = whole[: 8 * num_digests].view(np.uint64).reshape(memory.num_pages + 1, memory.tp)
        self._view = whole[memory.digest_bytes :].reshape(memory.num_pages + 1, memory.page_bytes)
        self._stream: torch.cuda.Stream | None = None  # of copies from and to a GPU
        self._backups: dict[int, _Backup] = {}  # by host page: the last one to it, until it is over
        self._ending = threading.Lock()  # of a backup, or of its place by the next one to the same page
        self._loaded: torch.cuda.Event | None = None  # behind the last copies to the device
        self._unfinished: queue.SimpleQueue[tuple[_Backup, PageIds] | None] | None = None  # of the thread, once it runs
        start = part * memory.rank_page_bytes
        self._own = self._view[:, start : start + memory.rank_page_bytes]

    @staticmethod
    def create(num_pages: int, *, rank_page_bytes: int, tp: int) -> "HostKVCache":
        """Make the memory, on rank 0; the others attach to ``memory`` until `close`. It is given when it is touched."""
        fd = os.memfd_create("manta-host-tier")
        path = f"/proc/{os.getpid()}/fd/{fd}"
        memory = HostMemory(path=path, num_pages=num_pages, rank_page_bytes=rank_page_bytes, tp=tp)
        try:
            os.ftruncate(fd, memory.num_bytes)
            cache = HostKVCache(memory, 0)
        except BaseException:
            os.close(fd)
            raise
        cache._fd = fd
        return cache

    @property
    def view(self) -> npt.NDArray[np.uint8]:
        """The pages, once no copy runs; no `backup` and no `load` may touch those that are written."""
        self.settle()
        return self._view

    @property
    def digests(self) -> npt.NDArray[np.uint64]:
        """The digests, once no copy runs."""
        self.settle()
        return self._digests

    @property
    def page_bytes(self) -> int:
        """The bytes of a page, all ranks."""
        return self.memory.page_bytes

    def page(self, page: int, *, writes: bool = False) -> npt.NDArray[np.uint8]:
        """The bytes of ``page`` [page_bytes], once it is not copied to, and where it is to be written, not copied from
        either. Any thread."""
        self._await([page])
        if writes and self._loaded is not None:
            self._loaded.synchronize()
        row: npt.NDArray[np.uint8] = self._view[page]
        return row

    def settle(self) -> None:
        """Wait for the copies that run, and for their digests. Any thread."""
        self._await(list(self._backups))
        if self._loaded is not None:
            self._loaded.synchronize()

    def _await(self, host_pages: Iterable[int]) -> None:
        """Wait until nothing is copied to ``host_pages``."""
        for page in host_pages:
            if (backup := self._backups.get(page)) is not None:
                backup.is_over.wait()

    def commit(self, most_s: float) -> int:
        """Have the system give the memory now, for at most ``most_s`` seconds, as `MHATokenToKVPool.commit` does."""
        return populate(self._view.ctypes.data, self._view.nbytes, most_s)

    def pin(self) -> None:
        """Let a GPU reach the memory without a copy in between."""
        status = _cudart().cudaHostRegister(self._view.ctypes.data, self._view.nbytes, 0)
        if int(status) != 0:
            why = _cudart().cudaGetErrorString(status)
            with suppress(RuntimeError):  # CUDA keeps the error too, and reports it at the next launch of anything
                torch.zeros(1, device="cuda")
            raise InvalidConfig(f"cache.host_memory_bytes: the GPU's driver cannot pin the memory: {why}")
        self._is_pinned = True

    def backup(
        self, pool: MHATokenToKVPool, device_pages: PageIds, host_pages: PageIds, *, wait: bool = True
    ) -> None:
        """Copy this rank's part of ``device_pages`` [n] to ``host_pages`` [n], and take the digests; a rank whose part
        is another's does nothing. ``wait``: False leaves it to the background, where one may run: pages of which that
        fails are not intact."""
        if not self._writes:
            return
        if pool.device.type == "cpu":
            source = pool.page_rows()
            for device, host in zip(device_pages.tolist(), host_pages.tolist(), strict=True):
                self._own[host] = row = source[device]
                self._digests[host, self._part] = xxhash.xxh3_64_intdigest(row.data)
            return
        made, of_steps = _Backup(), torch.cuda.current_stream(pool.device)
        with self._ending:
            self._digests[host_pages, self._part] = NO_DIGEST
            self._backups |= dict.fromkeys(host_pages.tolist(), made)
        try:
            with self._copying(pool):
                for device, host, num in self._runs(device_pages, host_pages):
                    self._tensor(host, num, pool).copy_(pool.buffer[device : device + num], non_blocking=True)
                    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                    event.record()
                    made.copies.append((event, host, num))
                if self.in_background and not wait:
                    of_steps.wait_event(event)  # the next step may write the pages
                    self._finish_later(made, host_pages)
                    return
        except BaseException:
            self._end(made, host_pages)
            raise
        self._finish(made, host_pages)

    def _finish_later(self, backup: _Backup, host_pages: PageIds) -> None:
        """Raises: RuntimeError when the system gives no thread."""
        if self._unfinished is None:
            unfinished = queue.SimpleQueue[tuple[_Backup, PageIds] | None]()
            threading.Thread(target=self._main, args=(unfinished,), name="manta-host-tier", daemon=True).start()
            self._unfinished = unfinished
        self._unfinished.put((backup, host_pages))

    def _main(self, unfinished: "queue.SimpleQueue[tuple[_Backup, PageIds] | None]") -> None:
        """Finish backups in the order in which they were begun, until None comes."""
        while (each := unfinished.get()) is not None:
            try:
                self._finish(*each)
            except Exception as error:  # noqa: BLE001 - its pages are not intact, and loading them finds that
                log.warning("%d pages that left the device are lost: %r", len(each[1]), error)

    def _finish(self, backup: _Backup, host_pages: PageIds) -> None:
        """Wait for the copies of ``backup`` to ``host_pages``, and take the digests."""
        try:
            for event, first, num in backup.copies:
                event.synchronize()
                for host in range(first, first + num):
                    digest = xxhash.xxh3_64_intdigest(self._own[host].data)
                    with self._ending:
                        if self._backups.get(host) is backup:
                            self._digests[host, self._part] = digest
        finally:
            self._end(backup, host_pages)

    def _end(self, backup: _Backup, host_pages: PageIds) -> None:
        with self._ending:
            for host in host_pages.tolist():
                if self._backups.get(host) is backup:
                    del self._backups[host]
        backup.is_over.set()

    def load(self, pool: MHATokenToKVPool, host_pages: PageIds, device_pages: PageIds) -> Ok:
        """Copy this rank's part of ``host_pages`` [n] to ``device_pages`` [n]. Returns: [n] whether the digest fits;
        the device's page is not to be read where it does not."""
        ok = np.zeros(len(host_pages), dtype=np.bool_)
        if pool.device.type == "cpu":
            rows = pool.page_rows()
            for at, host in enumerate(host_pages.tolist()):
                ok[at] = self._is_right(host)
                if ok[at]:
                    rows[device_pages[at]] = self._own[host]
            return ok
        self._await(host_pages.tolist())
        of_steps, at = torch.cuda.current_stream(pool.device), 0
        with self._copying(pool) as stream:
            stream.wait_stream(of_steps)
            for device, host, num in self._runs(device_pages, host_pages):
                right = ok[at : at + num] = [self._is_right(page) for page in range(host, host + num)]
                at += num
                if all(right):
                    pool.buffer[device : device + num].copy_(self._tensor(host, num, pool), non_blocking=True)
                    continue
                for i in np.flatnonzero(right).tolist():
                    pool.buffer[device + i].copy_(self._tensor(host + i, 1, pool)[0], non_blocking=True)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
            self._loaded = copied  # recorded: other threads wait for it
        # the engine's stream may read the device's pages next; and who writes the host's waits in `settle`, or here
        if self.in_background:
            of_steps.wait_event(copied)
        else:
            copied.synchronize()
        return ok

    def seal(self, page: int) -> None:
        """Take the digests of ``page`` [all ranks], which its owner has just written and verified otherwise."""
        digests = self._digests_of(page)
        self._digests[page] = digests

    def intact(self, page: int) -> bool:
        """Whether the digests of all ranks' parts of ``page`` fit: before it leaves for a store or a peer."""
        digests = self._digests_of(page)  # once the page has its own
        return bool(np.array_equal(digests, self._digests[page]))

    def close(self) -> None:
        """Close the memory to those who have not attached yet, and unpin it: the driver remembers a pinned range beyond
        its mapping, and would refuse the next one at these addresses. While a device that hangs may still copy, the
        memory stays as it is."""

        def settle() -> None:
            with suppress(RuntimeError):  # of a GPU that has failed
                self.settle()

        settling = threading.Thread(target=settle, name="manta-host-tier-end", daemon=True)
        if self._stream is not None:
            settling.start()
            settling.join(CLOSE_S)
        if self._unfinished is not None:
            self._unfinished.put(None)
            self._unfinished = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if settling.is_alive():
            log.warning("the host tier stays pinned: the GPU has not ended its copies in %.0f s", CLOSE_S)
        elif self._is_pinned:
            _cudart().cudaHostUnregister(self._view.ctypes.data)
            self._is_pinned = False

    def _digests_of(self, page: int) -> npt.NDArray[np.uint64]:
        """[tp] the digests of the bytes that are there."""
        parts = self.page(page).reshape(self.memory.tp, -1)
        return np.array([xxhash.xxh3_64_intdigest(part.data) for part in parts], dtype=np.uint64)

    def _is_right(self, host_page: int) -> bool:
        """Whether the digest of this rank's part fits."""
        return bool(xxhash.xxh3_64_intdigest(self._own[host_page].data) == self._digests[host_page, self._part])

    @contextmanager
    def _copying(self, pool: MHATokenToKVPool) -> Iterator[torch.cuda.Stream]:
        """Yield the stream of copies, the current one within. Where one cannot be made, those before it are over when
        the error goes on."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(pool.device)  # type: ignore[no-untyped-call]
        try:
            with torch.cuda.stream(self._stream):
                yield self._stream
        except BaseException:
            with suppress(RuntimeError):
                self._stream.synchronize()
            raise

    def _runs(self, device_pages: PageIds, host_pages: PageIds) -> Iterator[tuple[int, int, int]]:
        """Cut a copy into (first device page, first host page, number), pages that lie behind one another on both
        sides in one; parts of pages do not."""
        most = max(1, COPY_BYTES // self.memory.rank_page_bytes) if self.memory.tp == 1 else 1
        first = 0
        for at in range(1, len(host_pages) + 1):
            whole = at == len(host_pages) or at - first == most
            if whole or device_pages[at] != device_pages[at - 1] + 1 or host_pages[at] != host_pages[at - 1] + 1:
                yield int(device_pages[first]), int(host_pages[first]), at - first
                first = at

    def _tensor(self, host_page: int, num: int, pool: MHATokenToKVPool) -> torch.Tensor:
        """This rank's part of ``num`` pages, shaped as the pool's pages; of one, where pages have other parts too."""
        rows = torch.from_numpy(self._own[host_page : host_page + num]).view(pool.buffer.dtype)
        return rows.view(num, *pool.buffer.shape[1:])


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
