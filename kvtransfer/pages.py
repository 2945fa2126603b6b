"""Names for KV pages that mean the same in every process: the chained hash of a page's tokens and of all before it.

Owns:      the definitions of `PageKey` and `Tier`.
Never:     stands for equality where a wrong page would be read: the radix cache compares the tokens themselves.
Invariant: the keys of a sequence are a prefix of the keys of any longer one with the same salt and page size.
"""

import enum

import numpy as np
import numpy.typing as npt
import xxhash

PageKey = int  # unsigned 64 bits
PageKeys = npt.NDArray[np.uint64]  # [n]
NO_KEYS: PageKeys = np.empty(0, dtype=np.uint64)


class Tier(enum.Enum):
    """Where a cached page lies: in the device pool (L1), in host memory (L2), in a store that replicas share (L3)."""

    DEVICE = "device"
    HOST = "host"
    STORE = "store"


def salt_key(salt: str) -> PageKey:
    """The key before the first page: what separates the namespaces of different salts. 0 for no salt."""
    return int(xxhash.xxh3_64_intdigest(salt.encode())) if salt else 0


def page_keys(token_ids: npt.NDArray[np.int32], page_size: int, salt: str, parent: PageKey | None = None) -> PageKeys:
    """Keys of the whole pages of ``token_ids``: key i = xxh3_64(tokens of page i, seed = key i - 1).

    Args:    token_ids: [n]; a last partial page is left out.
             parent: key of the page before ``token_ids``; None at the start of a sequence, where the salt is the seed.
    Returns: [n // page_size] uint64.
    Source:  hash chains of paged prefix caches (vLLM's block hashes), on xxHash.
    """
    digest = xxhash.xxh3_64_intdigest
    num_pages = len(token_ids) // page_size
    tokens = np.ascontiguousarray(token_ids[: num_pages * page_size], dtype="<i4")
    key = salt_key(salt) if parent is None else int(parent)
    pages: list[bytes] = tokens.view(f"V{4 * page_size}").tolist()  # cut in C: half the time of slices
    keys = [key := digest(page, key) for page in pages]
    return np.array(keys, dtype=np.uint64)
