"""The token channel: order, back-pressure, strangers, and ends."""

import asyncio
import dataclasses
import errno
import shutil
import socket
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from deployments.channel import channel_server
from deployments.channel.channel_client import ChannelClient, batches, parts
from deployments.channel.channel_server import ChannelAddress, ChannelServer
from deployments.channel.frames import (
    LENGTH,
    Asked,
    CacheChanges,
    CacheKeys,
    ChannelHello,
    Deltas,
    EndRequest,
    FrameReader,
    ReplicaReport,
    decode,
    encode,
)
from deployments.dispatch.leases import ReplicaGone
from replicas.cache.events import CacheSnapshot, EventLog
from replicas.types import Finish, FinishReason, TokenDelta, TokenLogprob, Usage
from routing.types import IndexEvent, IndexSnapshot
from tests.unit.deployments.sample_values import stats
from tests.waiting import until_async


class Desk:
    """A server and what it was told."""

    def __init__(self, *, hello_s: float = 5.0) -> None:
        self.reports: list[tuple[str, ReplicaReport]] = []
        self.lost: list[str] = []
        self.num_members = 0
        self.event = asyncio.Event()
        self.events: list[tuple[str, int]] = []  # (replica, seq)
        self.snapshots: list[tuple[str, int]] = []  # (replica, pages)
        self.server = ChannelServer(self, lost_error=lambda r: ReplicaGone(f"{r} was lost"), hello_s=hello_s)

    def on_report(self, replica_id: str, report: ReplicaReport) -> None:
        self.reports.append((replica_id, report))
        self.event.set()

    def on_events(self, replica_id: str, events: Sequence[IndexEvent]) -> None:
        self.events += [(replica_id, event.seq) for event in events]

    def on_snapshot(self, replica_id: str, snapshot: IndexSnapshot) -> None:
        self.snapshots.append((replica_id, len(snapshot.keys)))
        self.event.set()

    def on_lost(self, replica_id: str) -> None:
        self.lost.append(replica_id)
        self.event.set()


@pytest.fixture
async def desk() -> AsyncIterator[Desk]:
    desk = Desk()
    yield desk
    await desk.server.stop()
    desk.server.check()


async def listen(desk: Desk) -> ChannelAddress:
    return await desk.server.start(router_id="router", node_id="here", host="127.0.0.1")


async def connect(
    address: ChannelAddress, *, replica_id: str = "r0", node_id: str = "here", on_asked: Any = lambda *_: None
) -> ChannelClient:
    return await ChannelClient.connect(
        address, replica_id=replica_id, node_id=node_id, on_asked=on_asked, on_lost=lambda client: None
    )


def delta(rid: str, token: int, *, last: bool = False) -> TokenDelta:
    finish = Finish(reason=FinishReason.LENGTH) if last else None
    usage = Usage(prompt_tokens=1, completion_tokens=token + 1, cached_tokens=0)
    return TokenDelta(rid=rid, token_ids=(token,), text=f"{token},", usage=usage, finish=finish)


@pytest.mark.parametrize("node_id", ["here", "another node"])
async def test_deltas_arrive_in_order_over_a_unix_socket_and_over_tcp(desk: Desk, node_id: str) -> None:
    client = await connect(await listen(desk), node_id=node_id)
    stream = desk.server.open(["a"], replica_id="r0")
    for token in range(5):
        client.sink([delta("a", token, last=token == 4)])
    found: list[TokenDelta] = []
    while not found or found[-1].finish is None:
        found += await stream.take()
    assert [token for each in found for token in each.token_ids] == [0, 1, 2, 3, 4]
    assert "".join(each.text for each in found) == "0,1,2,3,4,"


async def test_after_the_socket_was_removed_a_new_replica_attaches_all_the_same(desk: Desk) -> None:
    """A cleaner of /tmp takes it, with its folder; connections that exist live on."""
    address = await listen(desk)
    before = await connect(address)
    shutil.rmtree(Path(address.unix_path).parent)
    after = await connect(address, replica_id="r1")
    for name, client in (("r0", before), ("r1", after)):
        stream = desk.server.open(["a"], replica_id=name)
        client.sink([delta("a", 7)])
        [found] = await asyncio.wait_for(stream.take(), 60)
        assert found.token_ids == (7,)
        desk.server.close(stream)


async def test_a_slow_consumer_gets_one_merged_delta_per_choice(desk: Desk) -> None:
    client = await connect(await listen(desk))
    stream, other = (desk.server.open([rid], replica_id="r0") for rid in "ab")
    for token in range(100):
        client.sink([delta("a", token)])
        client.sink([delta("b", token)])
    client.report(encode(ReplicaReport(stats=stats(), error=None, num_open=2)))  # comes after them
    await desk.event.wait()
    await asyncio.wait_for(other.take(), 60)
    merged: list[TokenDelta] = []
    while sum(len(each.token_ids) for each in merged) < 100:
        merged += await asyncio.wait_for(stream.take(), 60)
    assert [token for each in merged for token in each.token_ids] == list(range(100))
    assert len(merged) < 5
    assert merged[-1].usage.completion_tokens == 100


async def test_a_delta_goes_straight_only_while_the_consumer_waits_for_it(desk: Desk) -> None:
    """Else it would overtake what the consumer has taken and not yet sent."""
    await listen(desk)
    stream, straight = desk.server.open(["a"], replica_id="r0"), list[int]()
    stream.straight = lambda delta: delta.finish is None and not straight.extend(delta.token_ids)

    def arrive(*tokens: int, last: bool = False) -> None:
        for token in tokens:
            stream.put(delta("a", token, last=last))
        stream.pass_on()

    arrive(0)
    [first] = await stream.take()  # nobody waited for it
    arrive(1)
    assert (first.token_ids, straight) == ((0,), [])
    assert [each.token_ids for each in await stream.take()] == [(1,)]
    taken = asyncio.create_task(stream.take())
    await asyncio.sleep(0)
    arrive(2, 3)  # of one read: merged
    assert straight == [2, 3]
    arrive(4, last=True)
    assert [each.token_ids for each in await taken] == [(4,)]


async def test_nothing_goes_straight_past_what_must_be_taken(desk: Desk) -> None:
    """The choices of a request keep their order; an error in the short way is its stream's alone."""
    await listen(desk)
    stream, straight = desk.server.open(["a"], replica_id="r0"), list[int]()
    stream.straight = lambda delta: delta.finish is None and not straight.append(delta.index)
    taken = asyncio.create_task(stream.take())
    await asyncio.sleep(0)
    for index in range(3):
        stream.put(dataclasses.replace(delta("a", 7, last=index == 1), index=index))
    stream.pass_on()
    assert straight == [0]
    assert [each.index for each in await taken] == [1, 2]
    stream.straight = lambda delta: 1 // 0 > 0
    taken = asyncio.create_task(stream.take())
    await asyncio.sleep(0)
    stream.put(delta("a", 8))
    stream.pass_on()
    with pytest.raises(ZeroDivisionError):
        await taken


async def test_deltas_wait_merged_while_the_socket_is_full(desk: Desk) -> None:
    """Bounded: one delta per open choice, however far the engine runs ahead."""
    client = await connect(await listen(desk))
    stream = desk.server.open(["a"], replica_id="r0")
    client.pause_writing()
    for token in range(50):
        client.sink([delta("a", token)])
        await asyncio.sleep(0)
    assert client.num_waiting == 1
    client.resume_writing()
    [merged] = await stream.take()
    assert merged.token_ids == tuple(range(50))
    client.check()


async def test_a_lost_replica_fails_its_streams_after_their_last_delta(desk: Desk) -> None:
    client = await connect(await listen(desk))
    stream = desk.server.open(["a"], replica_id="r0")
    safe = desk.server.open(["b"], replica_id="r1")
    client.sink([delta("a", 0)])
    await asyncio.sleep(0)
    client.close()
    await desk.event.wait()
    assert desk.lost == ["r0"]
    assert [each.token_ids for each in await stream.take()] == [(0,)]
    with pytest.raises(ReplicaGone, match="r0 was lost"):
        await stream.take()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(safe.take(), 0.01)


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n", encode(ChannelHello(token="guess", replica_id="r0"))])
async def test_a_stranger_is_hung_up_on(desk: Desk, data: bytes) -> None:
    address = await listen(desk)
    reader, writer = await asyncio.open_connection(address.host, address.port)
    writer.write(data)
    assert await asyncio.wait_for(reader.read(), 60) == b""
    assert not desk.server.is_connected("r0")
    assert desk.lost == []
    writer.close()


async def test_deltas_of_a_closed_stream_or_another_replicas_request_are_dropped(desk: Desk) -> None:
    client = await connect(await listen(desk))
    closed, foreign = desk.server.open(["a"], replica_id="r0"), desk.server.open(["b"], replica_id="r1")
    desk.server.close(closed)
    client.sink([delta("a", 0), delta("b", 0), delta("never", 0)])
    await asyncio.sleep(0)
    client.report(encode(ReplicaReport(stats=stats(), error=None, num_open=0)))
    await desk.event.wait()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(foreign.take(), 0.01)
    assert desk.server.num_streams == 1


async def test_what_a_router_asks_arrives_in_order_and_a_replica_that_is_not_connected_is_lost(desk: Desk) -> None:
    asked: list[Asked] = []
    address = await listen(desk)
    with pytest.raises(ReplicaGone, match="r0 was lost"):
        desk.server.send("r0", EndRequest("a"))
    await connect(address, on_asked=lambda client, each: asked.append(each))
    await until_async(lambda: desk.server.is_connected("r0"))
    for rid in "abc":
        desk.server.send("r0", EndRequest(rid))
    await until_async(lambda: len(asked) == 3)
    assert asked == [EndRequest("a"), EndRequest("b"), EndRequest("c")]


async def test_a_replica_hangs_up_on_a_router_of_another_version(desk: Desk) -> None:
    client = await connect(await listen(desk))
    client.data_received(encode(Deltas([delta("a", 0)])))
    await until_async(lambda: client.lost)


async def test_events_and_snapshots_come_in_the_order_they_were_sent(desk: Desk) -> None:
    """A snapshot is sent whatever the socket holds; a report and its events are left out while it is full."""
    client = await connect(await listen(desk))
    log = EventLog()
    log.cleared()
    client.report(encode(CacheChanges.of(log.drain())))
    client.pause_writing()
    log.cleared()
    client.report(encode(CacheChanges.of(log.drain())))  # lost: the reader sees the gap
    client.send(encode(CacheKeys.of(CacheSnapshot(seq=2, stored=()))))
    await desk.event.wait()
    assert (desk.events, desk.snapshots) == ([("r0", 1)], [("r0", 0)])


@pytest.mark.parametrize("said", [b"", b"\x00\x10"])
async def test_who_says_no_hello_is_gone_in_its_time(said: bytes) -> None:
    desk = Desk(hello_s=0.1)
    address = await listen(desk)
    silent, writer = await asyncio.open_connection(address.host, address.port)
    replica = await connect(address)
    writer.write(said)
    assert await asyncio.wait_for(silent.read(), 60) == b""
    assert (desk.server.num_strangers, replica.lost) == (0, False)
    writer.close()
    replica.close()
    await desk.server.stop()


async def test_a_stranger_may_not_announce_more_than_4_kib_and_a_replica_may(desk: Desk) -> None:
    address = await listen(desk)
    stranger, writer = await asyncio.open_connection(address.host, address.port)
    writer.write(LENGTH.pack(4097))
    assert await asyncio.wait_for(stranger.read(), 60) == b""
    writer.close()
    stream = desk.server.open(["a"], replica_id="r0")
    _, writer = await asyncio.open_connection(address.host, address.port)
    long = dataclasses.replace(delta("a", 0), text="x" * 5000)
    writer.write(encode(ChannelHello(token=address.token, replica_id="r0")) + encode(Deltas([long])))  # in one packet
    assert await asyncio.wait_for(stream.take(), 60) == [long]
    writer.close()


async def test_of_65_strangers_the_oldest_goes_and_replicas_stay(desk: Desk) -> None:
    address = await listen(desk)
    replica = await connect(address)
    strangers = []
    for num in range(1, 66):
        strangers.append(await asyncio.open_connection(address.host, address.port))
        await until_async(lambda num=num: desk.server.num_strangers == min(num, 64))  # type: ignore[misc]
    assert await asyncio.wait_for(strangers[0][0].read(), 60) == b""
    assert (desk.server.num_strangers, replica.lost, desk.server.is_connected("r0")) == (64, False, True)
    for _, writer in strangers:
        writer.close()
    await until_async(lambda: desk.server.num_strangers == 0)


async def test_members_that_all_come_at_once_push_none_of_them_out(desk: Desk) -> None:
    """After a start of the router each replica connects, and is a stranger until its hello has been read."""
    address = await listen(desk)
    desk.num_members = 200
    strangers = [await asyncio.open_connection(address.host, address.port) for _ in range(200)]
    await until_async(lambda: desk.server.num_strangers == 200)
    clients = [await connect(address, replica_id=f"r{at}") for at in range(64)]
    await until_async(lambda: all(desk.server.is_connected(f"r{at}") for at in range(64)))
    for _, writer in strangers:
        writer.close()
    await until_async(lambda: desk.server.num_strangers == 0)
    assert not any(client.lost for client in clients)


async def test_where_no_file_is_left_a_connection_is_accepted_later(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, accept, refusals = await listen(desk), socket.socket.accept, [OSError(errno.EMFILE, "none left")]

    def accept_later(door: socket.socket) -> tuple[socket.socket, Any]:
        if refusals:
            raise refusals.pop()
        return accept(door)

    monkeypatch.setattr(channel_server, "ACCEPT_AGAIN_S", 0.01)
    monkeypatch.setattr(socket.socket, "accept", accept_later)
    await connect(address)
    await until_async(lambda: desk.server.is_connected("r0"))
    assert not refusals


HEAVY = tuple(  # about 70 kB in a frame
    TokenLogprob(token_id=token, logprob=-1.0, top=tuple((other, -1.0) for other in range(20))) for token in range(100)
)


def test_large_deltas_travel_in_frames_of_their_own_and_in_order() -> None:
    """Prompt logprobs of many requests at once must not add up to a frame that stops the router while it reads it."""
    deltas = [dataclasses.replace(delta(f"r{i}", i), prompt_logprobs=HEAVY if i % 2 else ()) for i in range(6)]
    cut = list(batches(deltas))
    assert [[each.rid for each in batch] for batch in cut] == [["r0", "r1", "r2"], ["r3", "r4"], ["r5"]]
    assert all(len(encode(Deltas(batch))) < 1 << 17 for batch in cut)


async def test_a_long_prompts_logprobs_travel_in_parts_and_are_one_delta_again(desk: Desk) -> None:
    client = await connect(await listen(desk))
    stream = desk.server.open(["a"], replica_id="r0")
    whole = dataclasses.replace(delta("a", 0), prompt_logprobs=HEAVY * 20)  # 42,000 logprobs
    assert [len(part.prompt_logprobs) for part in parts(whole)] == [97] * 19 + [60, 97]
    assert list(parts(delta("a", 0))) == [delta("a", 0)]
    for part in list(parts(whole))[:2]:
        stream.put(part)
    assert stream.is_empty  # nobody is told of a part
    stream.fail(ReplicaGone("r0 was lost"))
    with pytest.raises(ReplicaGone):
        await stream.take()
    desk.server.close(stream)
    stream = desk.server.open(["a"], replica_id="r0")
    client.sink([whole])
    assert await stream.take() == [whole]


class Wire(asyncio.Transport):
    """What was written, call by call."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.writes.append(bytes(data))

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def tokens(self) -> list[list[tuple[int, ...]]]:
        """Of each write, the token ids of each delta."""
        written = [[decode(body) for body in FrameReader().feed(data)] for data in self.writes]
        return [[each.token_ids for message in frames if isinstance(message, Deltas) for each in message.deltas]
                for frames in written]  # fmt: skip


@pytest.mark.parametrize(
    ("steps", "turn_between", "written"),
    [
        ([[(f"r{i}", 0) for i in range(32)]], True, [[(0,)] * 32]),  # one step is one write
        ([[("a", 0)], [("a", 1)], [("a", 2)]], True, [[(0,)], [(1,)], [(2,)]]),  # none waits for company by a timer
        ([[("a", token), ("b", token)] for token in range(4)], False, [[(0, 1, 2, 3)] * 2]),  # only backlog merges
    ],
    ids=["one step", "a turn of the event loop after each step", "steps before the event loop has a turn"],
)
async def test_a_step_is_written_in_the_next_turn_of_the_event_loop(
    steps: list[list[tuple[str, int]]], turn_between: bool, written: list[list[tuple[int, ...]]]
) -> None:
    address = ChannelAddress(router_id="router", node_id="here", unix_path="", host="127.0.0.1", port=1, token="t")
    client, wire = ChannelClient(address, on_asked=lambda client, asked: None, on_lost=lambda client: None), Wire()
    client.connection_made(wire)
    for step in steps:
        client.sink([delta(rid, token) for rid, token in step])
        if turn_between:
            await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert wire.tokens() == written
