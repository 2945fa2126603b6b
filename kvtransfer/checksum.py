"""64-bit digests of KV pages: the sender's and the receiver's must be equal before a page is used.

Owns:      what a digest is taken over.
Invariant: the digest of a page covers exactly the bytes that one rank sends another, in the order of their slices; a
           list of them is in the order of the pages, so that exchanged pages differ too.
Thread:    any.

The digest is XXH3-64 (Collet; https://xxhash.com), taken over views of the pool without a copy. It reads each byte once
at about the speed of a copy of the same bytes (`python -m benchmarks transfer`); a changed byte goes unseen with
probability 2**-64.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from kvtransfer.layout import KvLayout, PageSlice
from kvtransfer.memory import KvMemory, PageBytes
from kvtransfer.ports import Digests
from kvtransfer.types import PageIds

Spans = tuple[tuple[int, int], ...]  # (start, end) in a page, in bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class KvHashes:
    """What K and V hold, for comparison before and after a hand-off (SPEC J01, J03)."""

    k_hash: int
    v_hash: int


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


def kv_hashes(memory: KvMemory, pages: PageIds, num_tokens: int) -> KvHashes:
    """Of the first ``num_tokens`` tokens that ``pages`` hold, all layers of this rank; what lies behind them in the
    last page does not count. Equal on two ranks that hold the same heads in pages of the same size.

    Raises: ValueError when the pages hold fewer tokens.
    """
    layout = memory.layout
    if not 0 <= num_tokens <= len(pages) * layout.page_size:
        raise ValueError(f"{num_tokens} tokens are wanted of {len(pages)} pages of {layout.page_size}")
    num_pages = -(-num_tokens // layout.page_size)
    hashes = (xxhash.xxh3_64(), xxhash.xxh3_64())
    for index, page in enumerate(memory.read(pages[:num_pages])):
        num_here = min(num_tokens - index * layout.page_size, layout.page_size)
        for kind, digest in enumerate(hashes):
            for start, end in _token_spans(layout, kind, num_here):
                digest.update(page.data[start:end])
    return KvHashes(k_hash=hashes[0].intdigest(), v_hash=hashes[1].intdigest())


def _token_spans(layout: KvLayout, kind: int, num_tokens: int) -> Spans:
    """Where the first tokens of a page lie: ``kind`` 0 is K, 1 is V."""
    heads, head_bytes = layout.heads_per_rank, layout.head_bytes
    if num_tokens == layout.page_size:  # all heads of a layer are one run
        starts = [(layer * 2 + kind) * heads * head_bytes for layer in range(layout.num_layers)]
        return tuple((start, start + heads * head_bytes) for start in starts)
    num_bytes = num_tokens * layout.head_dim * layout.item_bytes
    starts = [((la * 2 + kind) * heads + head) * head_bytes for la in range(layout.num_layers) for head in range(heads)]
    return tuple((start, start + num_bytes) for start in starts)
