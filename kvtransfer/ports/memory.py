"""One rank's pages as the transfer sees them: their addresses, their bytes, and the digests of those.

Owns:      a reference that keeps the pool alive (the engine owns the memory); what a digest is taken over.
Never:     knows which pages are in use; imports torch (a pool comes as an array, or as an address with a reader).
Invariant: page p is the ``layout.page_bytes`` bytes from base_address + p * page_bytes; the region never moves and is
           never freed while a peer knows its address. The digest of a page covers exactly the bytes that one rank
           sends another, in the order of their slices; digests are in the order of the pages, so that exchanged pages
           differ too.
Thread:    any; it only reads.

The host cannot read a page in device memory: the pool's owner gives a *reader* that copies pages to the host, and the
digests are made from those copies. A digest is XXH3-64 (Collet; https://xxhash.com), taken over views of the pool
without a copy. It reads each byte once at about the speed of a copy of the same bytes (`python -m benchmarks
transfer`); a changed byte goes unseen with probability 2**-64.
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from kvtransfer.layout import KvLayout, PageSlice
from kvtransfer.ports.rank_port import Digests
from kvtransfer.types import PageIds

PageBytes = npt.NDArray[np.uint8]  # [page_bytes] one page on the host
PageReader = Callable[[PageIds], npt.NDArray[np.uint8]]  # [n] pages -> [n, page_bytes] copies on the host


class KvMemory:
    """The region of one rank's pool; page 0, the sink, is part of it."""

    def __init__(
        self, layout: KvLayout, *, base_address: int, num_pages: int, device: int, on_host: bool, owner: object
    ) -> None:
        """Use `of_array` or `of_device`."""
        self.layout = layout
        self.base_address = base_address
        self.num_pages = num_pages
        self.device = device  # index of the device; 0 for host memory
        self.on_host = on_host
        self.view: npt.NDArray[np.uint8] | None = None  # [num_pages, page_bytes], host memory only
        self._reader: PageReader | None = None
        self._owner = owner

    @staticmethod
    def of_array(layout: KvLayout, pool: npt.NDArray[np.generic]) -> "KvMemory":
        """Host memory: ``pool`` [num_pages, ...], contiguous, of any dtype; a tensor's ``.numpy()`` shares its bytes.

        Raises: ValueError when the array is not that of ``layout``.
        """
        if not pool.flags.c_contiguous:
            raise ValueError("a KV pool must be one contiguous array; this one has gaps: register its base instead")
        page_bytes = pool.nbytes // max(len(pool), 1)
        if page_bytes != layout.page_bytes:
            raise ValueError(
                f"a page of this array has {page_bytes} bytes, of the layout {layout.page_bytes}: describe the pool as "
                "it is (layers, heads of one rank, page size, dtype)"
            )
        memory = KvMemory(
            layout, base_address=pool.ctypes.data, num_pages=len(pool), device=0, on_host=True, owner=pool
        )
        memory.view = pool.reshape(-1).view(np.uint8).reshape(len(pool), layout.page_bytes)
        return memory

    @staticmethod
    def of_device(
        layout: KvLayout, *, base_address: int, num_pages: int, device: int, owner: object, reader: PageReader
    ) -> "KvMemory":
        """Device memory: ``owner`` is what keeps it allocated, ``reader`` copies pages of it to the host."""
        memory = KvMemory(
            layout, base_address=base_address, num_pages=num_pages, device=device, on_host=False, owner=owner
        )
        memory._reader = reader
        return memory

    @property
    def num_bytes(self) -> int:
        return self.num_pages * self.layout.page_bytes

    def read(self, pages: PageIds) -> Sequence[PageBytes]:
        """[n] the pages' bytes: views of host memory, copies of device memory."""
        self.require_pages(pages)
        if self.view is not None:
            return [self.view[page] for page in pages]
        assert self._reader is not None
        return list(self._reader(pages))

    def require_pages(self, pages: PageIds) -> None:
        """Raises: ValueError for a page that this pool does not have."""
        if len(pages) and (int(pages.min()) < 0 or int(pages.max()) >= self.num_pages):
            raise ValueError(f"pages {int(pages.min())} to {int(pages.max())} are wanted of a pool of {self.num_pages}")


Spans = tuple[tuple[int, int], ...]  # (start, end) in a page, in bytes


def source_spans(slices: Sequence[PageSlice]) -> Spans:
    """What the sender reads of a page."""
    return tuple((part.src_offset, part.src_offset + part.num_bytes) for part in slices)


def destination_spans(slices: Sequence[PageSlice]) -> Spans:
    """What the receiver gets of a page."""
    return tuple((part.dst_offset, part.dst_offset + part.num_bytes) for part in slices)


def page_digest(page: PageBytes, spans: Spans) -> int:
    """Of ``page`` [page_bytes], the bytes of ``spans`` one after the other."""
    data = page.data
    if len(spans) == 1:
        start, end = spans[0]
        return xxhash.xxh3_64_intdigest(data[start:end])
    digest = xxhash.xxh3_64()
    for start, end in spans:
        digest.update(data[start:end])
    return digest.intdigest()


def page_digests(memory: KvMemory, pages: PageIds, spans: Spans) -> Digests:
    """[n] one for each of ``pages``."""
    return np.array([page_digest(page, spans) for page in memory.read(pages)], dtype=np.uint64)
