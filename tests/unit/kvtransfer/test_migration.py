"""Pages that are pushed from one replica to others: who gets what, and what faults may not do."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import cast

import numpy as np
import pytest

from kvtransfer.layout import KvLayout
from kvtransfer.migration import migrator as module
from kvtransfer.migration import wire
from kvtransfer.migration.migrator import Migrator
from kvtransfer.migration.plan import Shares
from kvtransfer.migration.wire import Have, Kept, MigrationAddress, MigrationStream, Offer, PageRun, Path
from kvtransfer.types import PeerAddress
from tests.fake_page_home import LAYOUT, PAGE_SIZE, FakePageHome, path

HOT = path(range(12), hits=9)  # 3 pages
CHILD = path([*range(12), *range(50, 58)], first_page=3, parent=0, hits=5)  # 2 pages that continue them
OTHER = path(range(100, 108), salt="s", hits=1)  # 2 pages


@contextlib.asynccontextmanager
async def movers(
    *homes: FakePageHome, layout: KvLayout = LAYOUT
) -> AsyncIterator[list[tuple[Migrator, MigrationAddress]]]:
    found = [Migrator(home.visit, layout, host="127.0.0.1") for home in homes]
    try:
        yield [(each, await each.start()) for each in found]
        for each in found:
            each.check()
    finally:
        for each in found:
            await each.stop()
        for home in homes:
            home.check()


async def test_all_that_is_cached_comes_to_a_target_that_has_nothing() -> None:
    source, target = FakePageHome(HOT, CHILD, OTHER), FakePageHome()
    async with movers(source, target) as [(migrator, _), (other, address)]:
        stats = await migrator.push([address], most_s=5)
    assert target.pages.keys() == source.pages.keys()
    assert (stats.pushed_tokens, stats.pushed_bytes, stats.value_kept, stats.failed) == (28, 7 * 256, 1.0, 0)
    assert (other.stats.received_tokens, other.stats.wrong_pages, other.stats.failed) == (28, 0, 0)


async def test_a_second_push_sends_nothing() -> None:
    source, target = FakePageHome(HOT, CHILD), FakePageHome()
    async with movers(source, target) as [(migrator, _), (_, address)]:
        first = await migrator.push([address], most_s=5)
        second = await migrator.push([address], most_s=5)
    assert first.pushed_tokens == second.pushed_tokens == 20
    assert second.value_kept == 1.0
    assert source.num_reads == 2  # a run each


async def test_what_a_target_has_stays_away_from_the_others() -> None:
    source, has, empty = FakePageHome(HOT, CHILD, OTHER), FakePageHome(HOT), FakePageHome()
    async with movers(source, has, empty) as [(migrator, _), (_, a), (_, b)]:
        stats = await migrator.push([b, a], most_s=5)
    assert len(has.pages) == 5  # the child continues what it has
    assert len(empty.pages) == 2  # it was sent least
    assert stats.pushed_tokens == 4 * PAGE_SIZE


async def test_a_page_that_is_wrong_at_home_is_not_sent_and_the_rest_is(caplog: pytest.LogCaptureFixture) -> None:
    source, target = FakePageHome(HOT, OTHER), FakePageHome()
    source.spoilt.add(("", tuple(range(8))))  # the second page of HOT
    async with movers(source, target) as [(migrator, _), (other, address)]:
        stats = await migrator.push([address], most_s=5)
    assert {salt for salt, _ in target.pages} == {"s"}
    assert (stats.wrong_pages, other.stats.wrong_pages) == (1, 0)
    assert stats.value_kept == pytest.approx(4 / 34)
    assert "a page of 3 that were to be pushed has a wrong digest" in caplog.text


async def test_a_page_that_is_wrong_on_arrival_is_not_taken_nor_what_follows_it() -> None:
    source, target = FakePageHome(HOT), FakePageHome()
    source.spoilt.add(("", tuple(range(8))))
    async with movers(source, target) as [(migrator, _), (other, address)]:
        assert migrator._hello is not None
        stream = await MigrationStream.dial(address, migrator._hello)
        await stream.send(Offer([HOT]))
        await stream.receive(Have)
        found = source.read(HOT, 0, 3)
        assert found is not None
        await stream.send(PageRun(0, 0, found[1].tobytes()), found[0])
        assert (await stream.receive(Kept)).pages == 1
        stream.close()
        assert other.stats.wrong_pages == 1
    assert list(target.pages) == [("", (0, 1, 2, 3))]


async def test_a_full_target_is_left_and_the_next_one_takes_the_rest() -> None:
    source, full, empty = FakePageHome(HOT, CHILD), FakePageHome(room=4), FakePageHome(room=100)
    async with movers(source, full, empty) as [(migrator, _), (_, a), (_, b)]:
        stats = await migrator.push([a, b], most_s=5)
    assert len(full.pages) == 4  # three of HOT and one of CHILD
    assert len(empty.pages) == 5  # CHILD needs all before it
    assert stats.value_kept == 1.0


async def test_another_layout_is_refused_and_named(caplog: pytest.LogCaptureFixture) -> None:
    target, layout = FakePageHome(), replace(LAYOUT, tp=1)
    async with movers(FakePageHome(HOT)) as [(migrator, _)], movers(target, layout=layout) as [(_, address)]:
        stats = await migrator.push([address], most_s=5)
    assert (stats.failed, stats.pushed_bytes, stats.value_kept) == (1, 0, 0.0)
    assert not target.pages
    assert "tp: 2 here, 1 there" in caplog.text


async def test_one_that_does_not_know_the_secret_is_told_nothing() -> None:
    source, target = FakePageHome(HOT), FakePageHome()
    async with movers(source, target) as [(migrator, _), (other, address)]:
        stats = await migrator.push([replace(address, token="0" * 32)], most_s=5)
    assert (stats.failed, other.stats.failed) == (1, 1)
    assert not target.pages


async def test_a_target_that_hangs_costs_its_own_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """It accepts and says nothing; the other target gets all."""
    monkeypatch.setattr(wire, "PEER_S", 1.0)  # of the other one too, which a busy machine may hold up
    source, target = FakePageHome(HOT, CHILD), FakePageHome()
    mute = await asyncio.start_server(lambda reader, writer: asyncio.sleep(0), "127.0.0.1", 0)
    port = mute.sockets[0].getsockname()[1]
    hung = MigrationAddress(peer=PeerAddress(host="127.0.0.1", port=port, incarnation="x"), token="t")
    async with movers(source, target) as [(migrator, _), (_, address)]:
        stats = await migrator.push([hung, address], most_s=60)
    mute.close()
    assert len(target.pages) == 5
    assert stats.failed == 1


async def test_a_push_ends_when_its_time_is_over() -> None:
    source, target = FakePageHome(HOT), FakePageHome()

    async def never(fn: object) -> int:
        await asyncio.Event().wait()
        return 0

    async with movers(source, target) as [(migrator, _), (other, address)]:
        other._visit = never  # type: ignore[assignment]  # the target's engine hangs
        async with asyncio.timeout(30):
            stats = await migrator.push([address], most_s=0.05)
    assert stats.push_s >= 0.05
    assert not target.pages


@pytest.mark.parametrize(
    "lies", [PageRun(7, 0, b"\0" * 16), PageRun(0, 2, b"\0" * 32), PageRun(0, 0, b"\0" * 7), Have([1])]
)
async def test_a_run_that_was_not_offered_ends_the_connection(lies: PageRun | Have) -> None:
    target = FakePageHome()
    async with movers(FakePageHome(HOT), target) as [(migrator, _), (other, address)]:
        assert migrator._hello is not None
        stream = await MigrationStream.dial(address, migrator._hello)
        await stream.send(Offer([HOT]))
        assert (await stream.receive(Have)).pages == [0]
        await stream.send(lies)
        assert await stream.next(within_s=5) is None
        assert other.stats.failed == 1
        stream.close()
    assert target.num_writes == 0


async def test_a_pusher_that_dies_in_a_run_leaves_nothing_behind() -> None:
    """At each byte count: the run is taken whole or not at all."""
    for sent in (0, 1, 255, 256, 400, 767):
        source, target = FakePageHome(HOT), FakePageHome()
        async with movers(source, target) as [(migrator, _), (other, address)]:
            assert migrator._hello is not None
            stream = await MigrationStream.dial(address, migrator._hello)
            await stream.send(Offer([HOT]))
            await stream.receive(Have)
            found = source.read(HOT, 0, 3)
            assert found is not None
            payload, digests = found
            await stream.send(PageRun(0, 0, digests.tobytes()), payload.reshape(-1)[:sent].reshape(1, -1))
            stream.close()
            while other._open:
                await asyncio.sleep(0)
            assert other.stats.failed == 1
        assert not target.pages
        assert target.num_writes == 0


async def test_only_so_many_connections_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_OPEN", 0)
    source, target = FakePageHome(HOT), FakePageHome()
    async with movers(source, target) as [(migrator, _), (_, address)]:
        stats = await migrator.push([address], most_s=5)
    assert (stats.failed, len(target.pages)) == (1, 0)


def test_a_path_goes_to_the_target_that_lacks_least_and_its_child_follows() -> None:
    shares = Shares[str]([HOT, CHILD, OTHER], PAGE_SIZE)
    shares.join("a", [0, 0, 0])
    shares.join("b", [2, 2, 0])
    assert shares.choose(0) == ("b", 2)
    shares.sent("b", 0, 1, 256)
    shares.check()
    assert shares.choose(0) is None  # whole there
    assert shares.choose(1) == ("b", 3)
    assert shares.choose(2) == ("a", 0)  # it was sent least
    shares.lose("b")
    assert shares.choose(1) == ("a", 0)
    shares.check()


def test_value_is_counted_by_own_pages_and_expected_hits() -> None:
    """HOT: 10 hits, CHILD: 6, OTHER: 2, all a minute's: (3 * 10, 2 * 6, 2 * 2) / 46."""
    shares = Shares[str]([HOT, CHILD, OTHER], PAGE_SIZE)
    shares.join("a", [3, 3, 2])
    assert [shares.choose(index) for index in range(3)] == [None, ("a", 3), None]
    assert shares.value_kept == pytest.approx(34 / 46)


@pytest.mark.parametrize("message", [Offer([HOT, CHILD]), Have([1, 2]), PageRun(0, 1, b"12345678"), Kept(3)])
async def test_a_message_is_what_was_sent(message: wire.Message) -> None:
    got: list[wire.Message | None] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        stream = MigrationStream(reader, writer)
        got.extend([await stream.next(within_s=5), await stream.next(within_s=5)])
        stream.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    stream = MigrationStream(*await asyncio.open_connection(*server.sockets[0].getsockname()))
    await stream.send(message)
    stream.close()
    while len(got) < 2:
        await asyncio.sleep(0)
    server.close()
    assert got == [message, None]


def test_a_path_knows_its_rate_and_pages() -> None:
    assert (HOT.num_pages(PAGE_SIZE), CHILD.num_pages(PAGE_SIZE)) == (3, 5)
    assert HOT.rate == pytest.approx(10 / 60)
    assert Path("", np.arange(4, dtype="<i4").tobytes(), 0, hits=1, idle_s=60.0).rate == pytest.approx(2 / 120)


class _Mortal:
    """A writer whose connection dies when all of them have written ``left`` bytes."""

    left = 0

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer

    def write(self, data: bytes) -> None:
        part = bytes(data)[: max(_Mortal.left, 0)]
        _Mortal.left -= len(data)
        self._writer.write(part)
        if len(part) < len(data):
            self._writer.close()
            raise ConnectionResetError("killed")

    def __getattr__(self, name: str) -> object:
        return getattr(self._writer, name)


async def test_a_connection_that_dies_at_any_of_50_points_costs_no_page_and_the_next_push_mends_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    init = MigrationStream.__init__

    def mortal(self: MigrationStream, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        init(self, reader, cast(asyncio.StreamWriter, _Mortal(writer)))

    monkeypatch.setattr(MigrationStream, "__init__", mortal)
    monkeypatch.setattr(module, "RUN_BYTES", 512)  # two pages
    most, all_pages, num_failed = 10_000, 7, 0
    _Mortal.left = most
    source, target = FakePageHome(HOT, CHILD, OTHER), FakePageHome()
    async with movers(source, target) as [(migrator, _), (_, address)]:
        assert (await migrator.push([address], most_s=5)).failed == 0
    total = most - _Mortal.left
    assert 3_000 < total < most
    for point in range(50):
        source, target = FakePageHome(HOT, CHILD, OTHER), FakePageHome()
        async with movers(source, target) as [(migrator, _), (other, address)]:
            _Mortal.left = total * point // 50
            num_failed += (await migrator.push([address], most_s=5)).failed
            while other._open:
                await asyncio.sleep(0)
            target.check()
            _Mortal.left = most
            assert (await migrator.push([address], most_s=5)).value_kept == 1.0
            assert len(target.pages) == all_pages
    assert num_failed == 50
