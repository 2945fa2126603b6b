"""The host tier's pages (L2): host memory in which pages of the device pool are kept, shared by all ranks of a replica.

Owns:      the memory, and the digest of each rank's part of each page.
Never:     knows which pages are in use (cache/tiers.py).
Invariant: a page is the parts of all ranks one after the other, each byte for byte as in that rank's device pool;
           where all ranks have the same bytes (`KvLayout.num_parts` is 1) it is that of rank 0. ``digests`` hold
           XXH3-64 of what `backup` or the tier's owner put there, and `load` gives the device nothing else. Page 0 is
           not used, as in the device pool.
           On a GPU, copies run on a stream of their own, and each call waits for its copies alone: the pages that are
           copied out are complete, as those that go to a peer are, so the step under way is not waited for; pages that
           are copied in may still be written by it, so those copies run behind it.
Thread:    the runner's for `backup` and `load`. Others read and write pages that are theirs (store, peers).
Source:    SPEC C11; SGLang's HiCache, host pool.
"""

import mmap
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from replicas.errors import InvalidConfig
from replicas.memory.pool import MHATokenToKVPool, populate

COPY_BYTES = 8 << 20  # of a copy at most: the digests of one are taken while the next one runs

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
        self._writes = rank < memory.tp
        self._part = part = rank if self._writes else 0
        whole = np.frombuffer(self._map, dtype=np.uint8)
        num_digests = (memory.num_pages + 1) * memory.tp
        self.digests = whole[: 8 * num_digests].view(np.uint64).reshape(memory.num_pages + 1, memory.tp)
        self.view = whole[memory.digest_bytes :].reshape(memory.num_pages + 1, memory.page_bytes)
        self._stream: torch.cuda.Stream | None = None  # of copies from and to a GPU
        start = part * memory.rank_page_bytes
        self._own = self.view[:, start : start + memory.rank_page_bytes]

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

    def commit(self, most_s: float) -> int:
        """Have the system give the memory now, for at most ``most_s`` seconds, as `MHATokenToKVPool.commit` does."""
        return populate(self.view.ctypes.data, self.view.nbytes, most_s)

    def pin(self) -> None:
        """Let a GPU reach the memory without a copy in between."""
        status = _cudart().cudaHostRegister(self.view.ctypes.data, self.view.nbytes, 0)
        if int(status) != 0:
            why = _cudart().cudaGetErrorString(status)
            with suppress(RuntimeError):  # CUDA keeps the error too, and reports it at the next launch of anything
                torch.zeros(1, device="cuda")
            raise InvalidConfig(f"cache.host_memory_bytes: the GPU's driver cannot pin the memory: {why}")
        self._is_pinned = True

    def backup(self, pool: MHATokenToKVPool, device_pages: PageIds, host_pages: PageIds) -> None:
        """Copy this rank's part of ``device_pages`` [n] to ``host_pages`` [n], and take the digests; a rank whose part
        is another's does nothing."""
        if not self._writes:
            return
        if pool.device.type == "cpu":
            source = pool.page_rows()
            for device, host in zip(device_pages.tolist(), host_pages.tolist(), strict=True):
                self._own[host] = row = source[device]
                self.digests[host, self._part] = xxhash.xxh3_64_intdigest(row.data)
            return
        copied = []
        with torch.cuda.stream(self._copy_stream(pool)):
            for device, host, num in self._runs(device_pages, host_pages):
                self._tensor(host, num, pool).copy_(pool.buffer[device : device + num], non_blocking=True)
                copied.append((torch.cuda.Event(), host, num))  # type: ignore[no-untyped-call]
                copied[-1][0].record()
        for event, first, num in copied:
            event.synchronize()
            for host in range(first, first + num):
                self.digests[host, self._part] = xxhash.xxh3_64_intdigest(self._own[host].data)

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
        stream, at = self._copy_stream(pool), 0
        stream.wait_stream(torch.cuda.current_stream(pool.device))
        with torch.cuda.stream(stream):
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
        copied.synchronize()  # a thread may write the host's pages next, and the engine's stream read the device's
        return ok

    def seal(self, page: int) -> None:
        """Take the digests of ``page`` [all ranks], which its owner has just written and verified otherwise."""
        self.digests[page] = self._digests_of(page)

    def intact(self, page: int) -> bool:
        """Whether the digests of all ranks' parts of ``page`` fit: before it leaves for a store or a peer."""
        return bool(np.array_equal(self._digests_of(page), self.digests[page]))

    def close(self) -> None:
        """Close the memory to those who have not attached yet, and unpin it: the driver remembers a pinned range beyond
        its mapping, and would refuse the next one at these addresses."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if self._is_pinned:
            _cudart().cudaHostUnregister(self.view.ctypes.data)
            self._is_pinned = False

    def _digests_of(self, page: int) -> npt.NDArray[np.uint64]:
        """[tp] the digests of the bytes that are there."""
        parts = self.view[page].reshape(self.memory.tp, -1)
        return np.array([xxhash.xxh3_64_intdigest(part.data) for part in parts], dtype=np.uint64)

    def _is_right(self, host_page: int) -> bool:
        """Whether the digest of this rank's part fits."""
        return bool(xxhash.xxh3_64_intdigest(self._own[host_page].data) == self.digests[host_page, self._part])

    def _copy_stream(self, pool: MHATokenToKVPool) -> torch.cuda.Stream:
        if self._stream is None:
            self._stream = torch.cuda.Stream(pool.device)  # type: ignore[no-untyped-call]
        return self._stream

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
