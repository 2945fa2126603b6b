"""K/V of a run of tokens as bytes that mean the same for any page size and any number of ranks.

Owns:      the definition of a payload and of the facts needed to read one; the port through which host code reads
           and writes the pools of an engine.
Never:     knows a file (kvtransfer/replay/snapshot.py) or a device (replicas/runner/kv_access.py).
Invariant: a payload holds all heads: what is read with any page size and tp is written with any other, bit for bit.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvtransfer.errors import IncompatibleLayout
from kvtransfer.layout import KvLayout

# uint8 [L, 2, n, K, token_bytes]: for each layer its K, then its V, of n tokens in order (SPEC H10); where the layout's
# dtype is scaled, the scale of each token and head follows its own numbers. MLA: [L, 1, n, 1, token_bytes]
Payload = npt.NDArray[np.uint8]
Slots = npt.NDArray[np.int32]  # [n] KV slots: page * page_size + offset

MAY_DIFFER = frozenset({"page_size", "tp"})  # between the pool that was read and the one to be written


class KvBytes(Protocol):
    """The pool of one engine, all of its ranks together. Engine thread, between two steps."""

    @property
    def layout(self) -> KvLayout:
        """The layout of the bytes; tp is 1, since a payload holds all heads."""
        ...

    def read(self, slots: Slots) -> Payload:
        """Return the bytes of ``slots`` [n], in their order."""
        ...

    def write(self, slots: Slots, payload: Payload) -> None:
        """Write ``payload`` into ``slots``. Raises: ValueError, before anything is written, for another shape."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PayloadMeta:
    """Which K/V a payload holds, and where it lay (SPEC H12)."""

    rid: str
    layout: KvLayout  # tp 1; page_size of the pool that was read
    prompt_len: int
    cached_prefix_len: int  # prompt tokens that the request had reused
    token_range: tuple[int, int]  # [start, end) of the sequence
    row: int  # of the request table it was read through
    slots: Slots  # [end - start] of the pool that was read: request-to-token mapping, for inspection

    def __post_init__(self) -> None:
        start, end = self.token_range
        if not 0 <= start <= end or len(self.slots) != end - start:
            raise ValueError(f"tokens [{start}, {end}) and {len(self.slots)} slots: one slot a token is wanted")

    @property
    def num_tokens(self) -> int:
        return len(self.slots)

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        return payload_shape(self.layout, self.num_tokens)


def payload_shape(layout: KvLayout, num_tokens: int) -> tuple[int, int, int, int, int]:
    """Return the shape of a payload, all heads included."""
    return layout.num_layers, layout.vectors, num_tokens, layout.num_kv_heads, layout.token_bytes


def require_same_meaning(here: KvLayout, there: KvLayout) -> None:
    """Raises: IncompatibleLayout that names every field in which a payload of ``there`` means something else here."""
    differing = here.differences(there, may_differ=MAY_DIFFER)
    if differing:
        raise IncompatibleLayout(
            f"these K/V bytes cannot be used here: {differing}. Load the model that made them, with the "
            "same dtype"
        )
