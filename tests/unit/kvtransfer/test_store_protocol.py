"""What every store does, whatever keeps its bytes: a folder, and a bucket of a real server that speaks S3 (moto);
and the keys of pages."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pytest

from kvtransfer.layout import KvLayout
from kvtransfer.pages import page_keys
from kvtransfer.stores.items import HEADER_BYTES, Item, pack_header, page_chain, page_chain_keys, store_secret
from kvtransfer.stores.store import Medium, ReadStatus, Store, WriteStatus
from kvtransfer.stores.urls import BACKENDS, parsed

LAYOUT = bytes.fromhex("0011223344556677")
PAGE_BYTES = 1000
Result = TypeVar("Result")
Pages = npt.NDArray[np.uint8]  # [n, PAGE_BYTES]


def run_of_pages(num_pages: int, seed: int) -> Pages:
    return np.random.default_rng(seed).integers(0, 256, (num_pages, PAGE_BYTES), dtype=np.uint8)


def key_of(number: int) -> bytes:
    return page_chain("layout", f"item {number}")


def only(results: Iterable[Result]) -> Result:
    """Return how a call of one item ended."""
    (result,) = results
    return result


def views(pages: Pages) -> list[memoryview]:
    return [page.data for page in pages]


@pytest.fixture(params=BACKENDS)
def medium(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Medium]:
    """Each backend; a new one lacks a URL here."""
    if request.param == "s3":
        place = f"manta-test/{tmp_path.name}/?region=us-east-1&timeout_s=60"
        place += f"&endpoint={request.getfixturevalue('s3_server')}"
    else:
        place = {"file": f"{tmp_path}/store"}[request.param]
    backend, url = parsed(f"{request.param}://{place}")
    medium = backend.open(url, 1_000_000)
    yield medium
    medium.close()


@pytest.fixture
def store(medium: Medium) -> Iterator[Store]:
    store = Store(medium, layout_digest=LAYOUT)
    yield store
    store.check()


def test_what_was_written_is_read_into_pages_that_lie_anywhere(store: Store) -> None:
    written = run_of_pages(3, seed=1)
    assert only(store.write([(key_of(1), views(written))])).status is WriteStatus.STORED
    host = np.zeros((9, PAGE_BYTES), dtype=np.uint8)
    result = only(store.read([(key_of(1), [host[7].data, host[2].data, host[5].data])]))
    assert (result.status, result.reason) == (ReadStatus.OK, "")
    assert np.array_equal(host[[7, 2, 5]], written)
    assert not host[[0, 1, 3, 4, 6, 8]].any()


def batch(pages: Pages) -> list[Item]:
    """Items 0, 1, ... of a page each."""
    return [(key_of(number), [page.data]) for number, page in enumerate(pages)]


def test_many_items_are_written_and_read_in_order(store: Store) -> None:
    written = run_of_pages(100, seed=1)
    store.delete(key_of(7))
    only(store.write(batch(written)[40:41]))
    results = [result.status for result in store.write(batch(written))]
    assert results == [WriteStatus.PRESENT if number == 40 else WriteStatus.STORED for number in range(100)]
    into = np.zeros_like(written)
    for number, result in enumerate(store.read(batch(into))):
        assert result.status is ReadStatus.OK
        assert np.array_equal(into[: number + 1], written[: number + 1])  # what has been said to be there is
    assert (store.stats().reads, store.stats().writes, store.stats().errors) == (100, 100, 0)


@pytest.mark.parametrize("wrong", ["gone", "damaged"])
def test_a_batch_ends_at_the_item_that_is_not_right(store: Store, medium: Medium, wrong: str) -> None:
    """Item 50 of 100; those before it are read, and it alone is deleted."""
    written = run_of_pages(100, seed=1)
    list(store.write(batch(written)))
    store.delete(key_of(50))
    if wrong == "damaged":
        only(medium.write([(key_of(50), [memoryview(bytes(HEADER_BYTES + PAGE_BYTES))])]))
    into = np.zeros_like(written)
    statuses = [result.status for result in store.read(batch(into))]
    bad = ReadStatus.CORRUPT if wrong == "damaged" else ReadStatus.MISSING
    assert statuses == [ReadStatus.OK] * 50 + [bad]
    assert np.array_equal(into[:50], written[:50])
    assert not into[51:].any()
    assert store.contains([key_of(number) for number in range(100)]) == [number != 50 for number in range(100)]
    assert (store.stats().reads, store.stats().corrupt) == (50, int(wrong == "damaged"))


def test_an_item_that_was_never_written_is_missing(store: Store) -> None:
    assert store.contains([key_of(1), key_of(2)]) == [False, False]
    assert only(store.read([(key_of(1), views(run_of_pages(1, seed=1)))])).status is ReadStatus.MISSING
    stats = store.stats()
    assert (stats.asked, stats.missing, stats.errors, stats.corrupt) == (2, 1, 0, 0)


def test_contains_knows_what_was_written_and_what_was_deleted(store: Store) -> None:
    for number in (1, 2):
        only(store.write([(key_of(number), views(run_of_pages(1, seed=number)))]))
    assert store.contains([key_of(1), key_of(3), key_of(2)]) == [True, False, True]
    store.delete(key_of(1))
    store.delete(key_of(3))  # never there: nothing happens
    assert store.contains([key_of(1), key_of(2)]) == [False, True]
    assert only(store.read([(key_of(1), views(run_of_pages(1, seed=1)))])).status is ReadStatus.MISSING
    assert store.stats().errors == 0


def test_a_second_write_finds_the_item_present(store: Store) -> None:
    pages = views(run_of_pages(2, seed=1))
    results = [only(store.write([(key_of(1), pages)])).status for _ in range(3)]
    assert results == [WriteStatus.STORED, WriteStatus.PRESENT, WriteStatus.PRESENT]
    stats = store.stats()
    assert (stats.writes, stats.present, stats.write_bytes) == (1, 2, 2 * PAGE_BYTES)


def test_an_item_of_another_length_is_a_miss_and_is_replaced_by_a_write(store: Store) -> None:
    only(store.write([(key_of(1), views(run_of_pages(2, seed=1)))]))
    three = run_of_pages(3, seed=2)
    result = only(store.read([(key_of(1), views(np.zeros_like(three)))]))
    assert result.status is ReadStatus.MISSING
    assert result.reason == "it holds 2 pages of 2000; 3 of 3000 bytes together are wanted"
    assert store.contains([key_of(1)]) == [True]  # it is whole: somebody else may want it
    assert only(store.write([(key_of(1), views(three))])).status is WriteStatus.STORED
    into = np.zeros_like(three)
    assert only(store.read([(key_of(1), views(into))])).status is ReadStatus.OK
    assert np.array_equal(into, three)


def test_an_item_of_another_layout_is_never_read(store: Store, medium: Medium) -> None:
    pages = run_of_pages(1, seed=1)
    only(Store(medium, layout_digest=bytes(8)).write([(key_of(1), views(pages))]))
    result = only(store.read([(key_of(1), views(pages))]))
    assert result.status is ReadStatus.CORRUPT
    assert result.reason == "layout 0000000000000000, 0011223344556677 is wanted"
    assert store.contains([key_of(1)]) == [False]
    assert store.stats().corrupt == 1


def test_any_flipped_bit_of_header_and_payload_is_found_and_the_item_deleted(store: Store, medium: Medium) -> None:
    pages = run_of_pages(1, seed=1)
    only(store.write([(key_of(1), views(pages))]))
    item = bytearray(HEADER_BYTES + PAGE_BYTES)
    into = [memoryview(item)[:HEADER_BYTES], memoryview(item)[HEADER_BYTES:]]
    assert only(medium.read([(key_of(1), into)])) == len(item)
    assert bytes(item[HEADER_BYTES:]) == pages.tobytes()
    places = [*range(HEADER_BYTES), HEADER_BYTES, len(item) // 2, len(item) - 1]
    for number, place in enumerate(places, start=1):
        flipped = bytearray(item)
        flipped[place] ^= 1 << place % 8
        store.delete(key_of(1))
        only(medium.write([(key_of(1), [memoryview(flipped)])]))
        result = only(store.read([(key_of(1), views(np.zeros_like(pages)))]))
        assert result.status is ReadStatus.CORRUPT, f"byte {place}: {result}"
        assert store.contains([key_of(1)]) == [False]
        assert store.stats().corrupt == number


@pytest.mark.parametrize("length", [0, 1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 1, HEADER_BYTES + 1999])
def test_a_truncated_item_is_found_and_deleted(store: Store, medium: Medium, length: int) -> None:
    pages = run_of_pages(2, seed=1)
    only(store.write([(key_of(1), views(pages))]))
    item = bytearray(HEADER_BYTES + 2 * PAGE_BYTES)
    only(medium.read([(key_of(1), [memoryview(item)])]))
    store.delete(key_of(1))
    only(medium.write([(key_of(1), [memoryview(item)[:length]])]))
    assert only(store.read([(key_of(1), views(pages))])).status is ReadStatus.CORRUPT
    assert store.contains([key_of(1)]) == [False]


def test_items_that_changed_places_are_found(store: Store, medium: Medium) -> None:
    pages = run_of_pages(1, seed=1)
    only(store.write([(key_of(1), views(pages))]))
    item = bytearray(HEADER_BYTES + PAGE_BYTES)
    only(medium.read([(key_of(1), [memoryview(item)])]))
    only(medium.write([(key_of(2), [memoryview(item)])]))
    result = only(store.read([(key_of(2), views(pages))]))
    assert (result.status, result.reason) == (ReadStatus.CORRUPT, f"it is the item of {key_of(1).hex()}")


def test_with_a_key_only_what_was_written_with_it_is_read(medium: Medium) -> None:
    """Others may write to the medium: they know keys and layout, and can pack any header but one with a tag."""
    ours, theirs = store_secret("k" * 32), store_secret("j" * 32)
    assert len({ours, theirs, store_secret("k" * 33)}) == 3
    store = Store(medium, layout_digest=LAYOUT, secret=ours)
    written, into = run_of_pages(2, seed=1), run_of_pages(2, seed=2)
    only(store.write([(key_of(1), views(written))]))
    assert only(store.read([(key_of(1), views(into))])).status is ReadStatus.OK
    assert np.array_equal(into, written)
    item = bytearray(HEADER_BYTES + 2 * PAGE_BYTES)
    only(medium.read([(key_of(1), [memoryview(item)])]))
    payload = views(run_of_pages(2, seed=3))
    forged = [
        pack_header(key_of(1), LAYOUT, payload) + b"".join(payload),
        pack_header(key_of(1), LAYOUT, payload, theirs) + b"".join(payload),
        bytes(item[:HEADER_BYTES]) + b"".join(payload),
    ]
    places = (20, 47, 48, 63, 64, len(item) - 1)
    forged += [bytes([*item[:at], item[at] ^ 1, *item[at + 1 :]]) for at in places]
    for number, each in enumerate(forged, start=1):
        store.delete(key_of(1))
        only(medium.write([(key_of(1), [memoryview(each)])]))
        assert only(store.read([(key_of(1), views(into))])).status is ReadStatus.CORRUPT, number
        assert store.contains([key_of(1)]) == [False]
    assert store.stats().corrupt == len(forged)
    only(store.write([(key_of(1), views(written))]))
    result = only(Store(medium, layout_digest=LAYOUT).read([(key_of(1), views(into))]))
    assert (result.status, result.reason) == (ReadStatus.CORRUPT, "version 2, 1 is wanted")


def test_the_counts_are_those_of_the_calls(store: Store) -> None:
    pages = run_of_pages(4, seed=1)
    for number in range(3):
        only(store.write([(key_of(number), views(pages))]))
        only(store.read([(key_of(number), views(pages))]))
    stats = store.stats()
    assert (stats.writes, stats.write_bytes, stats.reads, stats.read_bytes) == (3, 12_000, 3, 12_000)
    assert stats.write_s > 0
    assert stats.read_s > 0
    assert (stats.errors, stats.full, stats.evicted) == (0, 0, 0)


def test_the_chain_separates_layouts_salts_parents_and_tokens() -> None:
    tokens = np.arange(64, dtype=np.int32)
    root = page_chain("a", "b")
    keys = page_chain_keys(tokens, 16, root)
    assert len(keys) == 4
    assert page_chain_keys(tokens[:40], 16, root) == keys[:2]  # a partial page has none
    assert page_chain_keys(tokens[32:], 16, keys[1]) == keys[2:]
    others = [page_chain("a", "c"), page_chain("ab", ""), page_chain("", "ab"), page_chain("a", ""), keys[0]]
    heads = {page_chain_keys(tokens[:16], 16, other)[0] for other in [root, *others]}
    assert len(heads) == 6
    assert page_chain_keys(tokens[::-1], 16, root)[0] not in heads
    assert {len(key) for key in keys} == {16}


def test_the_layout_is_named_in_eight_bytes(medium: Medium) -> None:
    layout = KvLayout(
        model="m", architecture="MHA", num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32", item_bytes=4,
        page_size=16, tp=1,
    )  # fmt: skip
    Store(medium, layout_digest=bytes.fromhex(layout.fingerprint))
    with pytest.raises(ValueError, match="a layout digest of 8 bytes is wanted, not of 16"):
        Store(medium, layout_digest=layout.fingerprint.encode())


TOKENS = np.arange(64, dtype=np.int32)


def test_keys_of_a_prefix_are_a_prefix_of_the_keys() -> None:
    assert page_keys(TOKENS, 16, "").tolist()[:2] == page_keys(TOKENS[:32], 16, "").tolist()


def test_a_key_tells_its_tokens_all_tokens_before_and_the_salt() -> None:
    changed = TOKENS.copy()
    changed[0] = 99
    keys, others, salted = (page_keys(*args) for args in ((TOKENS, 16, ""), (changed, 16, ""), (TOKENS, 16, "x")))
    assert len({*keys.tolist(), *others.tolist(), *salted.tolist()}) == 12


def test_a_chain_goes_on_from_its_parent() -> None:
    keys = page_keys(TOKENS, 16, "x")
    assert page_keys(TOKENS[16:], 16, "", parent=int(keys[0])).tolist() == keys.tolist()[1:]


def test_a_partial_page_has_no_key() -> None:
    assert len(page_keys(TOKENS[:31], 16, "")) == 1
    assert page_keys(TOKENS[:15], 16, "").dtype == np.uint64
    assert len(page_keys(TOKENS[:15], 16, "")) == 0


def test_keys_are_the_same_in_every_process_and_for_every_layout_of_the_array() -> None:
    """A key that another process, or an older run, made must still name the same page."""
    strided = np.stack([TOKENS, TOKENS], axis=1)[:, 0]
    assert page_keys(strided, 16, "").tolist() == page_keys(TOKENS, 16, "").tolist()
    assert hex(int(page_keys(np.array([1, 2, 3, 4], dtype=np.int32), 4, "")[0])) == "0x6fc1ebd4f4d6ea31"
