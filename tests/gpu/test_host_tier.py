"""Pages between a GPU's pool and the host tier: the same bytes as a CPU's, on a stream that is not the engine's."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from replicas.errors import InvalidConfig
from replicas.memory import host as host_tier
from replicas.memory.host import HostKVCache
from replicas.memory.pool import MHATokenToKVPool
from tests.gpu import fake_cuda

PAGES = np.array([4, 5, 6, 2, 9], np.int32)  # of the device
PLACES = np.array([1, 2, 3, 4, 7], np.int32)  # on the host: three runs, 4 5 6, 2 and 9


def pool_of(seed: int) -> MHATokenToKVPool:
    """10 random pages of 2 layers x K, V x 2 heads x 16 tokens x 8 floats: 4,096 bytes; and the sink."""
    pool = MHATokenToKVPool(10, 16, 2, 2, 8, torch.float32, "cuda")
    pool.buffer.copy_(torch.randn(pool.buffer.shape, generator=torch.Generator().manual_seed(seed)).to("cuda"))
    torch.cuda.synchronize()  # as after a step's result
    return pool


def tier(tp: int = 1, rank: int = 0) -> HostKVCache:
    host = HostKVCache.create(8, rank_page_bytes=4096, tp=tp)
    if rank:
        host = HostKVCache(host.memory, rank)
    host.pin()
    return host


def bytes_of(pool: MHATokenToKVPool, pages: np.ndarray) -> np.ndarray:
    return pool.buffer.cpu().view(torch.uint8).numpy().reshape(11, -1)[pages]


@pytest.mark.parametrize("most_bytes", [8 << 20, 2 * 4096, 1], ids=["runs", "pairs", "pages"])
def test_pages_go_to_the_host_and_come_back_byte_for_byte(
    gpu: fake_cuda.FakeCuda | None, monkeypatch: pytest.MonkeyPatch, most_bytes: int
) -> None:
    """A run is one copy, up to the number of bytes of one. What is written over the pages right after a write-back is
    not what it kept; what was loaded is there to be read at once."""
    monkeypatch.setattr(host_tier, "COPY_BYTES", most_bytes)
    pool, host = pool_of(1), tier()
    before = bytes_of(pool, PAGES)
    if gpu is not None:
        gpu.waits.clear(), gpu.copied_on.clear()
    host.backup(pool, PAGES, PLACES)
    pool.buffer[PAGES.tolist()] = 7.0
    if gpu is not None:
        assert len(gpu.copied_on) == {8 << 20: 3, 2 * 4096: 4, 1: 5}[most_bytes]
        assert not gpu.waits, "for a stream, or for a copy out of pageable memory"
        assert gpu.streams[0] not in [*gpu.fenced, *gpu.copied_on], "the engine's stream"
    np.testing.assert_array_equal(host.view[PLACES], before)
    assert all(host.intact(page) for page in PLACES)
    loaded = PAGES - 1
    assert host.load(pool, PLACES, loaded).all()
    host.view[PLACES] = 0  # by a store's thread
    np.testing.assert_array_equal(bytes_of(pool, loaded), before)
    if gpu is not None:
        assert gpu.waits == ["copy"], "of this test"
        assert gpu.streams[0] in gpu.copied_on[0].behind, "the step under way may still write the pages"
    host.close()


def test_in_the_background_the_engines_thread_waits_for_no_copy_and_others_for_theirs(
    gpu: fake_cuda.FakeCuda | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps may write what was copied out, and read what was copied in; another thread holds the digests up. A store
    reads and writes another page meanwhile."""
    pool, host = pool_of(1), tier()
    host.in_background = True
    before, main, door = bytes_of(pool, PAGES), threading.current_thread(), threading.Event()
    waits, synchronize = list[threading.Thread](), torch.cuda.Event.synchronize

    def noted(event: Any) -> None:
        waits.append(threading.current_thread())
        if waits[-1] is not main:
            assert door.wait(60)
        synchronize(event)

    monkeypatch.setattr(torch.cuda.Event, "synchronize", noted)
    host.backup(pool, PAGES[:3], PLACES[:3], wait=False)
    host.backup(pool, PAGES[3:], PLACES[3:], wait=False)
    pool.buffer[PAGES.tolist()] = 7.0
    host.page(8, writes=True)[:] = 3
    host.seal(8)
    assert host.intact(8)
    assert set(host._backups) == set(PLACES.tolist()), "none is over"
    assert main not in waits
    door.set()
    loaded, record = PAGES - 1, torch.cuda.Event.record

    def published(event: Any, *stream: Any) -> None:
        assert host._loaded is not event, "a store's thread may wait for it already"
        record(event, *stream)

    monkeypatch.setattr(torch.cuda.Event, "record", published)
    assert host.load(pool, PLACES, loaded).all(), "it waits for the digests"
    assert host._loaded is not None
    assert main not in waits
    np.testing.assert_array_equal(host.view[PLACES], before)
    host.view[PLACES] = 0  # by a store's thread
    np.testing.assert_array_equal(bytes_of(pool, loaded), before)
    host.close()


def test_a_page_that_is_copied_to_again_keeps_the_digest_of_what_came_last(
    gpu: fake_cuda.FakeCuda | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first copy is over; and a copy that fails leaves no page that counts as intact."""
    pool, host = pool_of(1), tier()
    host.in_background = True
    first, last, doors = PAGES[:1], PAGES[1:2], [threading.Event(), threading.Event()]
    after, synchronize, coming = bytes_of(pool, last), torch.cuda.Event.synchronize, iter(doors)

    def late(event: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            assert next(coming).wait(60)
        synchronize(event)

    monkeypatch.setattr(torch.cuda.Event, "synchronize", late)
    host.backup(pool, first, PLACES[:1], wait=False)
    under_way = host._backups[1]
    host.backup(pool, last, PLACES[:1], wait=False)
    doors[0].set()
    assert under_way.is_over.wait(60)
    assert (list(host._backups), host._is_right(1)) == ([1], False), "another thread would take it as it is"
    doors[1].set()
    np.testing.assert_array_equal(host.view[PLACES[:1]], after)
    assert host.intact(1)
    host.close()


def failing(call: Callable[..., Any], at: int, error: Exception) -> Callable[..., Any]:
    """``call``, but for the ``at``-th time, when it raises ``error``."""
    calls = iter(range(1, 1000))

    def one(*args: Any, **options: Any) -> Any:
        if next(calls) == at:
            raise error
        return call(*args, **options)

    return one


@pytest.mark.parametrize(
    ("owner", "name", "at"), [(HostKVCache, "_tensor", 3), (threading.Thread, "start", 1)], ids=["copy", "no thread"]
)
def test_a_copy_that_cannot_be_made_leaves_none_under_way_and_no_page_that_counts_as_intact(
    gpu: fake_cuda.FakeCuda | None, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, at: int
) -> None:
    """To the host, and from there: nobody waits for it, and the pages may be given to others at once."""
    pool, host = pool_of(1), tier()
    host.in_background = True
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, failing(getattr(owner, name), at, RuntimeError("out of memory")))
        with pytest.raises(RuntimeError, match="out of memory"):
            host.backup(pool, PAGES, PLACES, wait=False)
    assert not host._backups, "whose owner waits for ever"
    assert gpu is None or not gpu.copies
    assert not any(host.intact(page) for page in PLACES)
    host.backup(pool, PAGES, PLACES, wait=False)
    host.settle()
    with monkeypatch.context() as patch:
        patch.setattr(HostKVCache, "_tensor", failing(HostKVCache._tensor, 3, RuntimeError("out of memory")))
        with pytest.raises(RuntimeError, match="out of memory"):
            host.load(pool, PLACES, PAGES)
    assert gpu is None or not gpu.copies
    host.close()


def test_a_backup_that_fails_is_logged_and_the_next_one_is_made(
    gpu: fake_cuda.FakeCuda | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pool, host = pool_of(1), tier()
    host.in_background = True
    late = failing(torch.cuda.Event.synchronize, 1, ValueError("what is this"))
    monkeypatch.setattr(torch.cuda.Event, "synchronize", lambda event: late(event))
    for pages in (slice(1), slice(1, 2)):
        host.backup(pool, PAGES[pages], PLACES[pages], wait=False)
    assert [host.intact(page) for page in PLACES[:2]] == [False, True]
    assert "1 pages that left the device are lost: ValueError('what is this')" in caplog.text
    host.close()


def test_memory_to_which_a_device_that_hangs_may_still_copy_stays_pinned(
    gpu: fake_cuda.FakeCuda | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host_tier, "CLOSE_S", 0.05)
    pool, host = pool_of(1), tier()
    host.in_background = True
    door, synchronize = threading.Event(), torch.cuda.Event.synchronize
    monkeypatch.setattr(torch.cuda.Event, "synchronize", lambda event: (door.wait(60), synchronize(event)))
    host.backup(pool, PAGES, PLACES, wait=False)
    assert all(each.daemon for each in threading.enumerate() if each.name.startswith("manta-host-tier"))
    host.close()
    assert "the host tier stays pinned: the GPU has not ended its copies in 0 s" in caplog.text
    with pytest.raises(InvalidConfig, match="cannot pin the memory"):
        host.pin()
    door.set()
    monkeypatch.setattr(host_tier, "CLOSE_S", 60.0)
    host.close()
    host.pin()
    host.close()


@pytest.mark.parametrize("seed", range(3))
def test_whatever_runs_in_the_background_a_page_holds_what_came_last(
    gpu: fake_cuda.FakeCuda | None, seed: int
) -> None:
    """Steps write pages of the device, a store writes pages of the host, and pages are copied between the two."""
    pool, host, draw = pool_of(1), tier(), np.random.default_rng(seed)
    host.in_background = True
    on_device, on_host = dict(enumerate(bytes_of(pool, np.arange(11)))), dict[int, np.ndarray]()
    for what in draw.integers(0, 4, 400).tolist():
        pages = draw.permutation(np.arange(1, 11, dtype=np.int32))[:3]
        places = draw.permutation(np.arange(1, 9, dtype=np.int32))[:3]
        if what == 0:
            made = torch.from_numpy(draw.standard_normal(pool.buffer[0].shape, np.float32))
            pool.buffer[int(pages[0])].copy_(made.to("cuda"))
            on_device[int(pages[0])] = made.view(torch.uint8).numpy().reshape(-1)
        elif what == 1:
            host.view[places[0]] = on_host[int(places[0])] = draw.integers(0, 256, 4096, np.uint8)
            host.seal(int(places[0]))
        elif what == 2:
            host.backup(pool, pages, places, wait=bool(draw.integers(4) == 0))
            on_host |= {int(place): on_device[int(page)] for place, page in zip(places, pages, strict=True)}
        elif all(int(place) in on_host for place in places):
            assert host.load(pool, places, pages).all()
            on_device |= {int(page): on_host[int(place)] for place, page in zip(places, pages, strict=True)}
    np.testing.assert_array_equal(bytes_of(pool, np.arange(1, 11)), [on_device[page] for page in range(1, 11)])
    np.testing.assert_array_equal(host.view[list(on_host)], list(on_host.values()))
    assert all(host.intact(place) for place in on_host)
    host.close()


def test_a_wrong_page_within_a_run_is_not_loaded_and_the_others_are(gpu: fake_cuda.FakeCuda | None) -> None:
    pool, host = pool_of(2), tier()
    before = bytes_of(pool, PAGES)
    host.backup(pool, PAGES, PLACES)
    host.view[2, 100] ^= 1
    pool.buffer.zero_()
    assert host.load(pool, PLACES, PAGES).tolist() == [True, False, True, True, True]
    before[1] = 0
    np.testing.assert_array_equal(bytes_of(pool, PAGES), before)
    host.close()


def test_a_rank_copies_its_part_of_each_page(gpu: fake_cuda.FakeCuda | None) -> None:
    """The second of two: its parts of neighbouring pages do not lie behind one another."""
    pool, host = pool_of(3), tier(tp=2, rank=1)
    before = bytes_of(pool, PAGES)
    host.backup(pool, PAGES, PLACES)
    assert gpu is None or len(gpu.copied_on) == 1 + len(PAGES), "a copy of each, and that of this test"
    np.testing.assert_array_equal(host.view[PLACES, 4096:], before)
    assert not host.view[PLACES, :4096].any()
    pool.buffer.zero_()
    assert host.load(pool, PLACES, PAGES).all()
    np.testing.assert_array_equal(bytes_of(pool, PAGES), before)
    host.close()


@pytest.mark.usefixtures("gpu")
def test_a_closed_tiers_addresses_can_be_pinned_again_and_pinned_ones_are_refused() -> None:
    host = tier()
    with pytest.raises(InvalidConfig, match=r"cache\.host_memory_bytes: the GPU's driver cannot pin the memory: "):
        host.pin()
    assert torch.ones(2, device="cuda").sum().item() == 2, "the next kernel reports an error of its own alone"
    host.close()
    host.pin()
    host.close()
