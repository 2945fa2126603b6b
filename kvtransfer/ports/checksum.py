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

import numpy as np
import xxhash

from kvtransfer.layout import PageSlice
from kvtransfer.ports.memory import KvMemory, PageBytes
from kvtransfer.ports.rank_port import Digests
from kvtransfer.types import PageIds

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
