"""What an item of a store is: its key, and the header by which its bytes are recognised and verified.

Owns:      the chain of keys over layout, salt and tokens; the header.
Never:     reads or writes a file or a socket.
Invariant: bytes pass `fault_of_header` and `fault_of_payload` only if they were packed under that key and layout; with
           a secret, only if the process that packed them had it.

An item is one page or more, the bytes of all ranks. Its key should be that of its last page, which stands for every
token before it. A medium may keep the items of a run of pages together (`KeyInRun`). An item's header is 64 bytes:
    magic 8, version 4, number of pages 4, payload bytes 8, layout digest 8, key 16, then
    version 1: xxh3-64 of the payload 8, xxh3-64 of the 56 bytes before 8
    version 2: BLAKE2b-128 of the 48 bytes before and the payload, keyed with the store's secret 16
"""

import hashlib
import hmac
import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

StoreKey = bytes  # [16]
Buffer = memoryview  # of uint8: one page, ``view[page].data``
Item = tuple[StoreKey, Sequence[Buffer]]

KEY_BYTES = 16
RUN_TOKENS, RUN_BYTES = 64, 4 << 20  # the most that a run has; two prompts that part in a run share none of it
LAYOUT_BYTES = 8
MAGIC = b"MantaKV\n"
PLAIN, KEYED = 1, 2  # versions
NO_SECRET = b""  # of a store that only its owner can write
_FIELDS = struct.Struct(f"<8sIIQ{LAYOUT_BYTES}s{KEY_BYTES}s")
_DIGEST = struct.Struct("<Q")
_TAG_BYTES = 2 * _DIGEST.size
HEADER_BYTES = _FIELDS.size + _TAG_BYTES


def store_secret(key: str) -> bytes:
    """Derive what items are tagged with from ``cache.store_key``."""
    return hashlib.blake2b(key.encode(), digest_size=hashlib.blake2b.MAX_KEY_SIZE, person=b"manta-store-key").digest()


def page_chain(layout_fingerprint: str, salt: str) -> StoreKey:
    """The key before the first page.

    Args:    layout_fingerprint: all that decides a page's bytes: `KvLayout.fingerprint`, and tp where the ranks' parts
             of a page lie one after the other.
    """
    named = len(layout_fingerprint).to_bytes(4, "little") + layout_fingerprint.encode() + salt.encode()
    return hashlib.blake2b(named, digest_size=KEY_BYTES, person=b"manta-store").digest()


def page_chain_keys(token_ids: npt.NDArray[np.int32], page_size: int, parent: StoreKey) -> list[StoreKey]:
    """Keys of the whole pages of ``token_ids``: key i = blake2b-128(key i - 1, tokens of page i).

    Args:    token_ids: [n]; a last partial page is left out.
             parent: the key of the page before ``token_ids``, `page_chain` at the start of a sequence.
    Returns: [n // page_size].
    Source:  hash chains of paged prefix caches (vLLM's block hashes), with a cryptographic hash: who reads an item
             compares no tokens, so no client may be able to choose tokens that collide.
    """
    num_pages = len(token_ids) // page_size
    tokens = np.ascontiguousarray(token_ids[: num_pages * page_size], dtype="<i4")
    pages: list[bytes] = tokens.view(f"V{4 * page_size}").tolist()
    blake2b, key = hashlib.blake2b, parent
    return [key := blake2b(key + page, digest_size=KEY_BYTES).digest() for page in pages]


class KeyInRun(bytes):
    """The key of a page that knows its run: the pages of a chain from a multiple of ``num_pages`` on."""

    run: StoreKey  # the key of the run's last page
    place: int  # of the page in its run
    num_pages: int  # of the run


def keys_in_runs(keys: Sequence[StoreKey], num_pages: int) -> list[StoreKey]:
    """Tell the keys of a chain, from its first page on, their runs; the last pages may fill none, and keep theirs."""
    in_runs = list(keys)
    for at in range(len(keys) // num_pages * num_pages if num_pages > 1 else 0):
        in_runs[at] = key = KeyInRun(keys[at])
        key.run, key.place, key.num_pages = keys[at // num_pages * num_pages + num_pages - 1], at % num_pages, num_pages
    return in_runs


def num_bytes(buffers: Sequence[Buffer]) -> int:
    return sum(buffer.nbytes for buffer in buffers)


def pack_header(key: StoreKey, layout_digest: bytes, pages: Sequence[Buffer], secret: bytes = NO_SECRET) -> bytes:
    """Return the header of the item that holds ``pages``."""
    version = KEYED if secret else PLAIN
    fields = _FIELDS.pack(MAGIC, version, len(pages), num_bytes(pages), layout_digest, key)
    if secret:
        return fields + _tag(fields, pages, secret)
    fields += _DIGEST.pack(_digest(pages))
    return fields + _DIGEST.pack(xxhash.xxh3_64_intdigest(fields))


def fault_of_header(header: bytes, key: StoreKey, layout_digest: bytes, secret: bytes = NO_SECRET) -> str:
    """Return what is wrong with a header, in words; empty when it is one of this key, layout and version."""
    if len(header) < HEADER_BYTES:
        return f"{len(header)} bytes, fewer than a header's {HEADER_BYTES}"
    magic, version, _, _, layout, named = _FIELDS.unpack_from(header)
    if magic != MAGIC:
        return f"it begins with {magic!r}, not {MAGIC!r}"
    if version != (wanted := KEYED if secret else PLAIN):
        return f"version {version}, {wanted} is wanted"
    if not secret and header[-_DIGEST.size :] != _DIGEST.pack(xxhash.xxh3_64_intdigest(header[: -_DIGEST.size])):
        return "its header is damaged"
    if layout != layout_digest:
        return f"layout {layout.hex()}, {layout_digest.hex()} is wanted"
    return "" if named == key else f"it is the item of {named.hex()}"


def shape_in_header(header: bytes) -> tuple[int, int]:
    """Return the number of pages and the bytes of payload that a header without fault names."""
    _, _, num_pages, length, _, _ = _FIELDS.unpack_from(header)
    return num_pages, length


def fault_of_payload(header: bytes, pages: Sequence[Buffer], secret: bytes = NO_SECRET) -> str:
    """Return what is wrong with the pages that were read behind a header without fault; empty when nothing is."""
    if secret:
        named = _tag(header[: _FIELDS.size], pages, secret)
        return "" if hmac.compare_digest(named, header[_FIELDS.size :]) else "its tag is not of this store's key"
    (wanted,) = _DIGEST.unpack_from(header, _FIELDS.size)
    found = _digest(pages)
    return "" if found == wanted else f"xxh3 {found:016x}, {wanted:016x} is wanted"


def _tag(fields: bytes, pages: Sequence[Buffer], secret: bytes) -> bytes:
    digest = hashlib.blake2b(fields, key=secret, digest_size=_TAG_BYTES, person=b"manta-item")
    for page in pages:
        digest.update(page)
    return digest.digest()


def _digest(pages: Sequence[Buffer]) -> int:
    digest = xxhash.xxh3_64()
    for page in pages:
        digest.update(page)
    return digest.intdigest()
