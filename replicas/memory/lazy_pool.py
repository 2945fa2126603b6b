"""A KV pool whose layers have no memory until they are written: for a model whose layers run in stages, each of which
needs its own K and V alone (SPEC C09).

Owns:      the memory of each layer that was written and not dropped.
Never:     serves an engine: its pages are not one run of bytes through all layers, which hand-offs, the host tier and
           the compiled kernels take. The engine's pool (memory/pool.py) costs nothing before it is touched on a CPU.
Invariant: num_bytes == layers that have memory x layer_bytes <= reserved_bytes. What a sizing must leave room for is
           reserved_bytes, whatever has memory now.
Thread:    the runner's.
"""

import math

import torch
from torch import Tensor


class LazyKVCache:
    """A `KvPool` (attention/base.py) of layers [num_pages + 1, 2, K, page_size, D] that are made at their first write;
    page 0 is the dummy sink."""

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
        self.page_size = page_size
        self.dtype = dtype
        self.device = torch.device(device)
        self._shape = (num_pages + 1, 2, num_kv_heads, page_size, head_dim)
        self._layers: list[Tensor | None] = [None] * num_layers

    @property
    def layer_bytes(self) -> int:
        """The bytes of one layer, its dummy page included."""
        return math.prod(self._shape) * self.dtype.itemsize

    @property
    def reserved_bytes(self) -> int:
        """The bytes once every layer has memory."""
        return len(self._layers) * self.layer_bytes

    @property
    def num_bytes(self) -> int:
        """The bytes of the layers that have memory now."""
        return sum(layer.nbytes for layer in self._layers if layer is not None)

    @property
    def page_bytes(self) -> int:
        """The bytes of one page in all layers, as a sizing counts it: written or not."""
        return self.reserved_bytes // self._shape[0]

    def get_or_alloc(self, layer: int) -> Tensor:
        """Return the memory of ``layer``, zeros if it is new."""
        found = self._layers[layer]
        if found is None:
            found = self._layers[layer] = torch.zeros(self._shape, dtype=self.dtype, device=self.device)
        return found

    def drop(self, layer: int) -> None:
        """Forget the K and V of ``layer``, whose stage is over, and give its memory back."""
        self._layers[layer] = None

    def get_key_buffer(self, layer: int) -> Tensor:
        """[num_pages + 1, K, page_size, D] strided view."""
        return self.get_or_alloc(layer)[:, 0]

    def get_value_buffer(self, layer: int) -> Tensor:
        """[num_pages + 1, K, page_size, D] strided view."""
        return self.get_or_alloc(layer)[:, 1]

    def scales(self, layer: int) -> tuple[float, float]:
        return 1.0, 1.0

    def set_kv_buffer(self, layer: int, loc: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k, v [T, K, D] at slots ``loc`` [T], cast to the pool's dtype."""
        page, offset = loc.long() // self.page_size, loc.long() % self.page_size
        self.get_key_buffer(layer)[page, :, offset] = k.to(self.dtype)
        self.get_value_buffer(layer)[page, :, offset] = v.to(self.dtype)

    def read_kv(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Copy K and V [n, K, D] of ``slots`` [n] int64. Raises: ValueError for a layer that was never written."""
        if self._layers[layer] is None:
            raise ValueError(f"layer {layer} has no K and V: none were written since it was made or dropped")
        page, offset = slots // self.page_size, slots % self.page_size
        return self.get_key_buffer(layer)[page, :, offset], self.get_value_buffer(layer)[page, :, offset]

    def get_contiguous_buf_infos(self) -> tuple[list[int], list[int], list[int]]:
        """Return address, length in bytes and bytes of an item of each layer that has memory; items are its pages."""
        made = [layer for layer in self._layers if layer is not None]
        return (
            [layer.data_ptr() for layer in made],
            [layer.nbytes for layer in made],
            [layer.nbytes // self._shape[0] for layer in made],
        )
