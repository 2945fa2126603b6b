"""What a replica publishes builds, at a subscriber, the cache that it has; and no subscriber holds it up."""

import asyncio
import struct
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest

from deployments.channel import kv_events
from deployments.channel.kv_events import LAST, KvEvents
from deployments.replica.served_engine import ServedEngine
from kvtransfer.pages import Tier
from replicas.cache.events import EventLog, PagesStored
from replicas.cache.radix import RadixCache
from replicas.engine.engine import Engine
from replicas.engine.loop import EngineLoop
from replicas.errors import InvalidConfig
from tests.harness import fake_engine
from tests.unit.deployments.in_process import House
from tests.unit.deployments.sample_values import ask as asked
from tests.waiting import until_async

zmq = pytest.importorskip("zmq")
PAGE = 4


class Subscriber:
    """The blocks of one publisher by medium, as its messages tell them, in the form of vLLM's example."""

    def __init__(self, events: KvEvents, *, most: int = 0, topic: bytes = b"") -> None:
        self.topic = topic
        self.context = zmq.Context()
        self.sub, self.ask = self.context.socket(zmq.SUB), self.context.socket(zmq.DEALER)
        if most:
            self.sub.setsockopt(zmq.RCVHWM, most)
        self.sub.connect(events.endpoint)
        self.ask.connect(events.replay)
        self.sub.subscribe(topic)
        self.next, self.blocks, self.gaps = 0, dict[int, set[str]](), 0
        self.parents: dict[int, int | None] = {}
        self.extra: dict[int, Any] = {}

    def read(self, within_ms: int = 500) -> None:
        while self.sub.poll(within_ms):
            topic, number, body = self.sub.recv_multipart()
            assert topic == self.topic
            self.take(struct.unpack(">Q", number)[0], body)

    def take(self, number: int, body: bytes) -> None:
        if number < self.next:
            return
        self.gaps += number != self.next
        self.next = number + 1
        _, events, rank = msgspec.msgpack.decode(body)
        assert rank == 0
        for kind, *fields in events:
            match kind, fields:
                case "BlockStored", [hashes, parent, ids, size, None, medium, adapter, extra]:
                    assert len(ids) == len(hashes) * size
                    for at, each in enumerate(hashes):
                        self.blocks.setdefault(each, set()).add(medium)
                        self.parents[each], parent = parent, each
                        self.extra[each] = (adapter, extra and extra[at])
                case "BlockRemoved", [hashes, medium]:
                    for each in hashes:
                        self.blocks.get(each, set()).discard(medium)
                case "AllBlocksCleared", []:
                    self.blocks.clear()
                case _:
                    raise AssertionError(kind)
        self.blocks = {key: media for key, media in self.blocks.items() if media}

    def replay(self, first: int) -> None:
        self.ask.send_multipart((b"", struct.pack(">Q", first)))
        assert self.ask.poll(5000)
        while True:
            _, number, body = self.ask.recv_multipart()
            if number == LAST:
                return
            self.take(struct.unpack(">Q", number)[0], body)

    def close(self) -> None:
        self.context.destroy(linger=0)


@pytest.fixture
def published() -> Iterator[tuple[KvEvents, RadixCache, EventLog]]:
    log = EventLog()
    events = KvEvents("tcp://127.0.0.1:0")
    yield events, RadixCache(PAGE, events=log), log
    events.close()


def held(cache: RadixCache) -> set[int]:
    return {int(key) for stored in cache.snapshot().stored for key in stored.keys}


def insert(cache: RadixCache, ids: Sequence[int], salt: str = "") -> None:
    num = len(ids) // PAGE
    cache.insert(np.array(ids[: num * PAGE], dtype=np.int32), np.arange(1, num + 1, dtype=np.int32), salt)


def test_a_subscriber_has_what_the_cache_has(published: tuple[KvEvents, RadixCache, EventLog]) -> None:
    """1,000 random prompts with evictions and flushes; the first batches by replay, as it came late."""
    events, cache, log = published
    rng, subscriber = Random(3), None
    for turn in range(1000):
        insert(cache, [rng.randrange(3) for _ in range(rng.randrange(60))], rng.choice(["", "", "salt"]))
        if rng.random() < 0.3:
            cache.evict(rng.randrange(1, 40))
        if rng.random() < 0.01:
            cache.reset()
        assert events.publish(log.drain())
        if turn == 100:
            subscriber = Subscriber(events)
            subscriber.read(200)
            subscriber.replay(0)
    assert subscriber is not None
    subscriber.read()
    subscriber.replay(subscriber.next)
    assert subscriber.blocks.keys() == held(cache)
    assert len(subscriber.blocks) > 10
    assert subscriber.gaps == 0
    for key, (_, extra) in subscriber.extra.items():
        parent = subscriber.parents[key]
        assert parent is None or subscriber.extra[parent][1] == extra
    subscriber.close()


def test_a_page_on_the_host_has_another_medium(published: tuple[KvEvents, RadixCache, EventLog]) -> None:
    events, cache, log = published
    insert(cache, range(8))
    stored = log.drain()
    assert isinstance(stored[0], PagesStored)
    keys, ids = stored[0].keys, stored[0].token_ids
    events.publish(stored)
    log.stored(keys, None, PAGE, ids, Tier.HOST, salt="\1lora\1mine")
    events.publish(log.drain())
    subscriber = Subscriber(events)
    subscriber.replay(0)
    assert list(subscriber.blocks.values()) == [{"CPU"}, {"CPU"}]
    [(name, extra)] = {(name, tuple(extra)) for name, extra in subscriber.extra.values()}
    assert name == f"lora@{extra[0]}", "its salt's hash, not the salt"
    log.removed(keys, Tier.HOST)
    events.publish(log.drain())
    subscriber.replay(subscriber.next)
    assert not subscriber.blocks
    subscriber.close()


def test_after_lost_events_the_whole_content_is_told(published: tuple[KvEvents, RadixCache, EventLog]) -> None:
    events, cache, log = published
    insert(cache, range(40))
    assert events.publish(log.drain())
    cache.evict(3)
    log.drain()  # lost
    insert(cache, range(100, 120))
    assert not events.publish(log.drain())
    events.start_over(cache.snapshot())
    subscriber = Subscriber(events)
    subscriber.replay(0)
    assert subscriber.blocks.keys() == held(cache)
    subscriber.close()


def test_a_subscriber_that_does_not_read_delays_nobody_and_sees_its_gap(
    published: tuple[KvEvents, RadixCache, EventLog], monkeypatch: pytest.MonkeyPatch
) -> None:
    events, cache, log = published
    slow = Subscriber(events, most=1)
    slow.read(200)
    insert(cache, range(4000))
    [stored] = log.drain()
    for seq in range(1, 40_000 // 16):
        assert events.publish([PagesStored(
            seq=seq, keys=stored.keys, parent_key=None, page_size=PAGE, token_ids=stored.token_ids)])  # fmt: skip
    events._kept = type(events._kept)(list(events._kept)[-10:], maxlen=10)
    slow.replay(0)
    assert slow.gaps == 1
    assert slow.next == 40_000 // 16 - 1
    slow.close()


async def test_a_served_replica_tells_its_cache_and_a_publisher_that_fails_holds_nothing_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A batch cannot be sent, nor the next one, which tells the whole cache; its router hears as ever, also while that
    waits for a step."""
    monkeypatch.setattr(kv_events, "AGAIN_S", 0.0)
    events = KvEvents("tcp://127.0.0.1:0/kv@here@model")
    fails, send = [True, True], events._send

    def sends(told: list[list[Any]]) -> None:
        if fails:
            fails.pop()
            raise zmq.ZMQError(zmq.ENOTSOCK)
        send(told)

    monkeypatch.setattr(events, "_send", sends)
    engine, _ = fake_engine(record_events=True)
    loop = EngineLoop(engine)
    loop.start()
    run, step_ends = loop.run_on_engine, asyncio.Event()

    async def runs_after_a_step(told: Callable[[Engine], Any]) -> Any:
        await step_ends.wait()
        return await run(told)

    monkeypatch.setattr(loop, "run_on_engine", runs_after_a_step)
    served = ServedEngine(loop, replica_id="r0", node_id="here", report_period_s=0.01, kv_events=events)
    subscriber = Subscriber(events, topic=b"kv@here@model")
    async with House() as house:
        await house.ready(served)
        for n in range(100):
            request = asked(rid=f"a{n}", num_tokens=20, max_new_tokens=1)
            [delta async for delta in house.dispatcher.stream(request)]
            if n == 9:
                assert events._seq == 0
                await until_async(lambda: house.router.applied("r0") == engine.cache_snapshot().seq > 0)
                step_ends.set()
            if subscriber.sub.poll(20):
                break
        await until_async(lambda: not fails and events._seq == engine.cache_snapshot().seq > 0)
        assert house.router.applied("r0") == events._seq
        subscriber.replay(0)
        subscriber.read(0)
        await served.stop()
    assert subscriber.blocks.keys() == {int(key) for stored in engine.cache_snapshot().stored for key in stored.keys}
    assert subscriber.blocks
    subscriber.close()


def test_ports_that_are_taken_are_passed_over_and_what_nobody_can_bind_is_refused() -> None:
    first = KvEvents("tcp://127.0.0.1:0")
    port = int(first.endpoint.rpartition(":")[2])
    second = KvEvents(f"tcp://127.0.0.1:{port}")
    assert first.endpoint != second.endpoint
    assert int(second.endpoint.rpartition(":")[2]) > port
    with pytest.raises(InvalidConfig, match="can be bound: give another"):
        KvEvents("tcp://192.0.2.1:5557")
    with pytest.raises(InvalidConfig, match="must be tcp://HOST:PORT"):
        KvEvents("5557")
    first.close()
    second.close()
