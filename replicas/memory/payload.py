"""K/V of a run of tokens as bytes that mean the same whatever the page size and however many ranks hold them.

Owns:      the definition of a payload, and the port through which host code reads and writes it.
Never:     knows requests or files (replicas/replay.py, kvtransfer/replay.py), or touches a device.
Invariant: a payload holds all heads: what is read with any page size and tp is written with any other, bit for bit.
"""

from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvtransfer.layout import KvLayout
from replicas.memory.allocator import Slots

# uint8 [L, 2, n, K, D * item_bytes]: for each layer its K, then its V, of n tokens in order (SPEC H10)
Payload = npt.NDArray[np.uint8]


class KvBytes(Protocol):
    """The pool of one engine, all of its ranks together. Engine thread, between two steps."""

    @property
    def layout(self) -> KvLayout:
        """What the bytes mean; tp is 1, since a payload holds all heads."""
        ...

    def read(self, slots: Slots) -> Payload:
        """The bytes of ``slots`` [n], in their order."""
        ...

    def write(self, slots: Slots, payload: Payload) -> None:
        """Inverse of `read`. Raises: ValueError, and nothing is written, for a payload of another shape."""
        ...


def payload_shape(layout: KvLayout, num_tokens: int) -> tuple[int, int, int, int, int]:
    """[L, 2, n, K, D * item_bytes] with all heads."""
    return layout.num_layers, 2, num_tokens, layout.num_kv_heads, layout.head_dim * layout.item_bytes
