"""Pages that a peer may still read or write: SPEC H19, DESIGN.md section 3 (Pool)."""

import numpy as np
import pytest

from replicas.cache.kv import KvCache
from replicas.errors import InvalidRequest, PagesExhausted
from replicas.request import Req
from replicas.types import GenerateRequest


def make(num_pages: int = 8) -> KvCache:
    return KvCache(num_pages=num_pages, page_size=4, max_requests=2, context_len=64)


def request(rid: str, length: int) -> Req:
    wire = GenerateRequest(rid=rid, token_ids=np.arange(length, dtype=np.int32))
    return Req.make(wire, index=0, now_s=0.0, eos_ids=frozenset())


def cached(kv: KvCache, length: int) -> None:
    """Leave the first ``length`` tokens in the cache."""
    req = request("before", length)
    kv.admit(req)
    kv.extend(req, length)
    req.computed_len = length
    kv.release(req, keep=True)


def pages(kv: KvCache) -> tuple[int, int, int, int, int]:
    pool = kv.store.stats()
    return pool.free_pages, pool.evictable_pages, pool.protected_pages, pool.reserved_pages, pool.quarantined_pages


def test_a_receiver_keeps_its_own_pages_apart_and_lets_the_prefix_go() -> None:
    """Two of five pages are the tree's: three may still be written to."""
    kv = make()
    cached(kv, 8)
    req = request("a", 18)
    assert kv.admit(req, whole=True) == 8
    kv.extend(req, 18)
    assert pages(kv) == (3, 0, 2, 3, 0)
    assert kv.pages(req, 2, 5).tolist() == [3, 4, 5]
    receipt = kv.quarantine(req, locked=False)
    assert (req.holding, req.computed_len) == (None, 0)
    assert pages(kv) == (3, 2, 0, 0, 3)
    kv.check([])
    kv.release_quarantined(receipt)
    assert pages(kv) == (6, 2, 0, 0, 0)
    kv.check([])


def test_a_sender_keeps_what_the_tree_has_locked_too() -> None:
    kv = make()
    req = request("a", 18)
    kv.admit(req)
    kv.extend(req, 18)
    req.computed_len = 18
    kv.commit(req)
    receipt = kv.quarantine(req, locked=True)
    assert pages(kv) == (3, 0, 4, 0, 1)
    kv.check([])
    other = request("b", 30)
    kv.admit(other)
    with pytest.raises(PagesExhausted, match="4 protected and 0 reserved, 1 in quarantine"):
        kv.extend(other, 30)  # nothing of it can be evicted
    kv.release(other, keep=False)
    kv.release_quarantined(receipt)
    assert pages(kv) == (4, 4, 0, 0, 0)
    kv.check([])


def test_a_row_is_free_at_once_and_pages_are_not() -> None:
    kv = make()
    reqs = [request(name, 8) for name in "ab"]
    for req in reqs:
        kv.admit(req)
        kv.extend(req, 8)
    receipts = [kv.quarantine(req, locked=False) for req in reqs]
    again = [request(name, 8) for name in "cd"]
    for req in again:
        kv.admit(req)
        kv.extend(req, 8)
    assert pages(kv) == (0, 0, 0, 4, 4)
    kv.check(again)
    assert {page for receipt in receipts for page in receipt.pages.tolist()} == {1, 2, 3, 4}


def test_a_whole_sequence_may_be_reused_when_no_token_has_to_run_here() -> None:
    kv = make()
    cached(kv, 8)
    req = request("a", 8)
    assert kv.admit(req, whole=True) == 8
    assert len(kv.extend(req, 8)) == 0
    kv.check([req])


def test_flush_waits_for_peers() -> None:
    kv = make()
    req = request("slow", 8)
    kv.admit(req)
    kv.extend(req, 8)
    receipt = kv.quarantine(req, locked=True)
    assert kv.in_use
    with pytest.raises(InvalidRequest, match="in use by slow"):
        kv.flush()
    kv.release_quarantined(receipt)
    assert not kv.in_use
    kv.flush()


def test_a_receipt_is_given_back_once() -> None:
    kv = make()
    req = request("a", 8)
    kv.admit(req)
    kv.extend(req, 8)
    receipt = kv.quarantine(req, locked=False)
    kv.release_quarantined(receipt)
    with pytest.raises(AssertionError, match="have left quarantine before"):
        kv.release_quarantined(receipt)
