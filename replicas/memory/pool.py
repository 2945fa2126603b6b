"""The KV bytes of one rank: one allocation, page-major and head-major.

Owns:      the device memory of K and V.
Never:     knows which pages are in use (memory/allocator.py) or what they hold.
Invariant: slot s lives at page s // page_size, offset s % page_size; page 0 is the dummy sink of padded tokens
           (SPEC C05).
Thread:    the runner's.
"""

import ctypes
import math
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

ALIGNMENT = 4096  # bytes; a memory page, what transfer libraries register
COMMIT_BYTES = 4 << 20  # that `commit` asks the system for at a time
_MADV_DONTNEED = 4  # private memory is as it was when it was mapped: zero, or the file's
_MADV_POPULATE_WRITE = 23  # Linux 5.14: memory is there as if it had been written, and what it holds stays


class MHATokenToKVPool:
    """K and V of every layer: ``buffer`` [num_pages + 1, L, 2, K, page_size, D] (SPEC C01, C02).

    On CPU the memory is zero and touched lazily: start-up costs nothing, and a slot that was never written reads 0, so
    that a masked one cannot bring a NaN into attention.
    """

    vectors = 2  # of a token, layer and head: K and V
    def __init__(
        self,
        num_pages: int,
        page_size: int,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_layers = num_layers
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.dtype = dtype
        self.device = torch.device(device)
        shape, stored = self.storage()
        self.buffer = zeros(shape, stored, self.device)

    def commit(self, most_s: float) -> int:
        """Have the system give a CPU pool its memory now, from its first page on, for at most ``most_s`` seconds: what
        is not given then is given when it is touched. Returns: the bytes that were given.

        That is a moment on most machines. A virtual one may wait 2 ms for each MB that its host has not given it yet:
        26 of the 160 ms of a prompt of 256 tokens.
        """
        return populate(self.buffer.data_ptr(), self.buffer.nbytes, most_s)

    def give_back(self) -> None:
        """Give the memory of a CPU pool back to the system: it is zero again, and comes as it is touched."""
        give_back(self.buffer.data_ptr(), self.buffer.nbytes)

    def storage(self) -> tuple[tuple[int, ...], torch.dtype]:
        """Return shape and dtype of ``buffer``."""
        shape = (self.num_pages + 1, self.num_layers, 2, self.num_kv_heads, self.page_size, self.head_dim)
        return shape, self.dtype

    @property
    def page_bytes(self) -> int:
        """The bytes of one page, all layers, K and V."""
        return self.buffer.stride(0) * self.buffer.element_size()

    def page_rows(self) -> npt.NDArray[np.uint8]:
        """[num_pages + 1, page_bytes] the bytes of a CPU pool, shared."""
        rows: npt.NDArray[np.uint8] = self.bytes_of_pages().numpy()
        return rows

    def bytes_of_pages(self) -> Tensor:
        """[num_pages + 1, page_bytes] uint8: the pool's bytes, shared."""
        return self.buffer.view(torch.uint8).view(self.num_pages + 1, -1)

    def get_key_buffer(self, layer: int) -> Tensor:
        """[num_pages + 1, K, page_size, D] strided view."""
        return self.buffer[:, layer, 0]

    def get_value_buffer(self, layer: int) -> Tensor:
        """[num_pages + 1, K, page_size, D] strided view."""
        return self.buffer[:, layer, 1]

    def get_kv_buffer(self, layer: int) -> tuple[Tensor, Tensor]:
        return self.get_key_buffer(layer), self.get_value_buffer(layer)

    def scales(self, layer: int) -> tuple[float, float]:
        """Return what every number of K, and of V, of ``layer`` is multiplied by when it is read."""
        return 1.0, 1.0

    def set_kv_buffer(self, layer: int, loc: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k, v [T, K, D] at slots ``loc`` [T], cast to the pool's dtype."""
        loc = loc.long()
        page, offset = loc // self.page_size, loc % self.page_size
        self.get_key_buffer(layer)[page, :, offset] = k.to(self.dtype)
        self.get_value_buffer(layer)[page, :, offset] = v.to(self.dtype)

    def read_kv(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Copy K and V [n, K, D] of ``slots`` [n] int64."""
        page, offset = slots // self.page_size, slots % self.page_size
        return self.get_key_buffer(layer)[page, :, offset], self.get_value_buffer(layer)[page, :, offset]

    def set_index_keys(self, index: int, loc: Tensor, keys: Tensor, *, behind: int) -> None:
        """Store the ``keys`` [T, Di] of index number ``index`` at slots ``loc`` [T], behind as many layers of K and V.
        Of pools of floats without scales."""
        at = self._index_vectors(index, loc, keys.shape[1], behind)
        filled = F.pad(keys, (0, -keys.shape[1] % self.head_dim))
        self._by_token()[at] = filled.view(len(keys), -1, self.head_dim).to(self.dtype)

    def read_index_keys(self, index: int, slots: Tensor, dim: int, *, behind: int) -> Tensor:
        """Undo `set_index_keys`. Returns: [len(slots), dim]."""
        return self._by_token()[self._index_vectors(index, slots, dim, behind)].flatten(1)[:, :dim]

    def _index_vectors(self, index: int, slots: Tensor, dim: int, behind: int) -> tuple[Tensor, ...]:
        """Find the vectors of a token that hold a key of ``dim`` numbers: a layer has 2 * K, those of its K first."""
        first, count = 2 * self.num_kv_heads * behind, -(-dim // self.head_dim)
        vectors = torch.arange(count, device=self.device) + (first + index * count)
        layer, within = vectors // (2 * self.num_kv_heads), vectors % (2 * self.num_kv_heads)
        page, offset = slots[:, None] // self.page_size, slots[:, None] % self.page_size
        return layer, within // self.num_kv_heads, page, offset, within % self.num_kv_heads

    def get_contiguous_buf_infos(self) -> tuple[list[int], list[int], list[int]]:
        """Return what a transfer library registers (SPEC C10): addresses, lengths in bytes, and bytes of an item.

        One region, whose items are whole pages: page p is the ``page_bytes`` bytes from address + p * page_bytes.
        """
        return [self.buffer.data_ptr()], [self.buffer.numel() * self.buffer.element_size()], [self.page_bytes]

    def read_pages(self, pages: Sequence[int]) -> Tensor:
        """Copy ``pages``: [n, *buffer.shape[1:]]."""
        return self.buffer[torch.as_tensor(pages, dtype=torch.int64, device=self.device)]

    def read_slots(self, slots: npt.NDArray[np.int32]) -> Tensor:
        """Copy ``slots`` [n], token by token: [L, 2, n, K, D], 1 for 2 where ``vectors`` is (SPEC H10, H17)."""
        page, offset = self._places(slots)
        return self._by_token()[:, :, page, offset]

    def write_slots(self, slots: npt.NDArray[np.int32], data: Tensor) -> None:
        """Undo `read_slots`, bit for bit, whatever the page size of the pool that was read."""
        shape = (self.num_layers, self.vectors, len(slots), self.num_kv_heads, self.head_dim)
        if data.shape != shape or data.dtype != self.buffer.dtype:
            raise ValueError(
                f"{shape} {self.buffer.dtype} is wanted for {len(slots)} slots, got {tuple(data.shape)} {data.dtype}"
            )
        page, offset = self._places(slots)
        self._by_token()[:, :, page, offset] = data.to(self.device)

    def _by_token(self) -> Tensor:
        """[L, 2, num_pages + 1, page_size, K, D] strided view; indexing it is twice as fast as permuting the result."""
        return self.buffer.permute(1, 2, 0, 4, 3, 5)

    def _places(self, slots: npt.NDArray[np.int32]) -> tuple[Tensor, Tensor]:
        at = torch.from_numpy(slots.astype(np.int64)).to(self.device)
        return at // self.page_size, at % self.page_size

    def write_pages(self, pages: Sequence[int], data: Tensor) -> None:
        """Undo `read_pages`, bit for bit."""
        if data.shape[1:] != self.buffer.shape[1:] or data.dtype != self.buffer.dtype or len(data) != len(pages):
            raise ValueError(
                f"{len(pages)} pages of {tuple(self.buffer.shape[1:])} {self.buffer.dtype} are wanted, "
                f"got {tuple(data.shape)} {data.dtype}"
            )
        self.buffer[torch.as_tensor(pages, dtype=torch.int64, device=self.device)] = data.to(self.device)


def populate(address: int, num_bytes: int, most_s: float) -> int:
    """Have the system give memory now, from ``address`` (whole memory pages) on, for at most ``most_s`` seconds.
    Returns: the bytes that were given."""
    deadline = time.monotonic() + most_s
    for start in range(0, num_bytes, COMMIT_BYTES):
        if time.monotonic() > deadline:
            return start
        if _madvise(address + start, min(COMMIT_BYTES, num_bytes - start), _MADV_POPULATE_WRITE):
            return start  # an older system, or no memory is left
    return num_bytes


def give_back(address: int, num_bytes: int) -> None:
    """Give private memory, from ``address`` (whole memory pages) on, back to the system; what is in it is lost."""
    whole = num_bytes - num_bytes % ALIGNMENT
    if _madvise(address, whole, _MADV_DONTNEED):
        raise OSError(ctypes.get_errno(), f"the system takes no {whole} bytes back")


def _madvise(address: int, num_bytes: int, advice: int) -> int:
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return int(madvise(address, num_bytes, advice))


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Make zeros on ``device``."""
    return lazy_zeros(shape, dtype) if device.type == "cpu" else torch.zeros(shape, dtype=dtype, device=device)


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Make zeros that cost nothing until they are touched: calloc through numpy; torch.zeros writes every byte."""
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.zeros(num_bytes + ALIGNMENT, dtype=np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return torch.from_numpy(memory[start : start + num_bytes]).view(dtype).view(shape)
