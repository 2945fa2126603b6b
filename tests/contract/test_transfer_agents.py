"""One suite over every `TransferAgent`: memcpy in this process; NIXL over CMA and over tcp between spawned processes.

NIXL never runs in the process of the tests: a hang or a crash of it fails one test.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from kvtransfer.ports.rank_port import ExpectOrder, PeerRanks, PortEvent, WriteFailed, Written
from kvtransfer.types import PageIds
from tests.kv_pools import arrivals, write_order
from tests.local_agents import LocalFabric
from tests.transfer_worker import Kind, LocalSide, Side, Worker, events_until, spread

LIMIT_S = 10.0


class Sides:
    """Hands out sides of one kind; processes that lived through a test serve the next."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self._fabric = LocalFabric()
        self._idle: list[Worker] = []
        self._lent: list[Worker] = []

    def take(self) -> Side:
        if self.kind == "local":
            return LocalSide(self._fabric)
        worker = self._idle.pop() if self._idle else Worker("auto" if self.kind == "cma" else "tcp")
        self._lent.append(worker)
        return worker

    def take_back(self) -> None:
        self._idle += [worker for worker in self._lent if worker.is_alive]
        self._lent.clear()

    def close(self) -> None:
        for worker in self._idle:
            worker.kill()


@pytest.fixture(scope="module", params=["local", "cma", "tcp"])
def of_kind(request: pytest.FixtureRequest) -> Iterator[Sides]:
    sides = Sides(request.param)
    yield sides
    sides.close()


@pytest.fixture
def sides(of_kind: Sides) -> Iterator[Sides]:
    yield of_kind
    of_kind.take_back()


@dataclass(slots=True)
class Engine:
    """An engine on a side."""

    side: Side
    ranks: PeerRanks

    def call(self, method: str, *arguments: Any) -> Any:
        return self.side.call(method, self.ranks.incarnation, *arguments)

    def send(
        self, to: "Engine", src: PageIds, dst: PageIds, *, order_id: int = 1, room: int = 1, meta: bytes = b""
    ) -> None:
        """The whole of a room."""
        self.call("write", write_order(to.ranks.incarnation, src, dst, order_id=order_id, room=room, meta=meta))

    def expect(self, sender: "Engine", pages: PageIds, *, room: int = 1) -> None:
        self.call(
            "expect",
            ExpectOrder(room=room, generation=0, incarnation=sender.ranks.incarnation, pages=pages),
        )


def start(side: Side, *, tp: int = 1, seed: int) -> Engine:
    return Engine(side, side.call("start", tp, seed))


def connect(p: Engine, d: Engine) -> None:
    p.call("connect", d.ranks)
    d.call("connect", p.ranks)


def pair(sides: Sides, *, p_tp: int = 1, d_tp: int = 1) -> tuple[Engine, Engine]:
    p = start(sides.take(), tp=p_tp, seed=1)
    d = start(sides.take(), tp=d_tp, seed=2)
    connect(p, d)
    return p, d


def close(*engines: Engine) -> None:
    """End the engines; their processes serve other tests."""
    for engine in engines:
        engine.call("close")
        engine.side.call("take_events")


def has_come(num_pages: int, *, ways: int = 1, num_written: int = 1) -> Any:
    """Whether over each of ``ways`` pairs of ranks all pages and the last note have come (in any order, as notes
    of writes in flight at the same time may pass each other), and ``num_written`` orders have ended well."""

    def enough(events: list[PortEvent]) -> bool:
        arrived = arrivals(events)
        return (
            sum(event.num_pages for event in arrived) == num_pages * ways
            and sum(event.last for event in arrived) == ways
            and sum(isinstance(event, Written) for event in events) == num_written
        )

    return enough


def has_been_written(events: list[PortEvent]) -> bool:
    return any(isinstance(event, Written) for event in events)


def failed(events: list[PortEvent], *, drained: bool) -> list[WriteFailed]:
    return [event for event in events if isinstance(event, WriteFailed) and event.drained is drained]


@pytest.mark.parametrize("num_pages", [0, 1, 16, 64])
def test_scattered_pages_arrive_bit_for_bit_and_nothing_else_changes(sides: Sides, num_pages: int) -> None:
    """SPEC H09, H11, H13."""
    p, d = pair(sides)
    src, dst = spread(num_pages, 3), spread(num_pages, 4)
    wanted = d.call("pages")
    wanted[dst] = p.call("pages")[src]
    d.expect(p, dst)
    p.send(d, src, dst, meta=b"meta")
    events = events_until([p.side, d.side], has_come(num_pages), LIMIT_S)
    np.testing.assert_array_equal(d.call("pages"), wanted)
    assert Written(order_id=1, num_bytes=num_pages * 49152) in events
    arrived = arrivals(events)
    assert sum(event.num_pages for event in arrived) == num_pages
    assert [event.meta for event in arrived if event.last] == [b"meta"]
    assert not [event for event in arrived if event.bad_pages]
    close(p, d)


def test_each_write_that_has_ended_has_its_times(sides: Sides) -> None:
    """40 pages, half the heads of each to each of two ranks: two writes."""
    p, d = pair(sides, d_tp=2)
    src, dst = spread(40, 3), spread(40, 4)
    d.expect(p, dst)
    p.send(d, src, dst)
    events = events_until([p.side, d.side], has_come(40, ways=2), LIMIT_S)
    (times,) = [event.times for event in events if isinstance(event, Written)]
    assert len(times) == 2
    for each in times:
        assert 0 <= each.post_s <= each.wire_s < LIMIT_S
    assert sum(each.wire_s for each in times) > 0
    close(p, d)


def test_a_note_never_comes_before_its_data(sides: Sides) -> None:
    """The page is digested when its note is read; 30 times other bytes go to one place."""
    p, d = pair(sides)
    one = np.array([7], dtype=np.int32)
    for room in range(30):
        p.call("refill", 7, room)
        d.expect(p, one, room=room)
        p.send(d, one, one, order_id=room, room=room)
        (arrived,) = arrivals(events_until([p.side, d.side], has_come(1), LIMIT_S))
        assert (arrived.room, arrived.bad_pages) == (room, ())
    close(p, d)


@pytest.mark.parametrize(("p_tp", "d_tp"), [(2, 1), (1, 2), (3, 1)])
def test_unequal_ranks_exchange_the_heads_they_share(sides: Sides, p_tp: int, d_tp: int) -> None:
    """SPEC H12; ranks are agents of one process here, which is allowed too."""
    p, d = pair(sides, p_tp=p_tp, d_tp=d_tp)
    src, dst = spread(5, 3), spread(5, 4)
    wanted = d.call("pages")
    wanted[dst] = p.call("pages")[src]
    d.expect(p, dst)
    p.send(d, src, dst)
    ways = max(p_tp, d_tp)
    events = events_until([p.side, d.side], has_come(5, ways=ways, num_written=p_tp), LIMIT_S)
    np.testing.assert_array_equal(d.call("pages"), wanted)
    assert sum(event.num_bytes for event in arrivals(events)) == 5 * 49152
    assert not [event for event in arrivals(events) if event.bad_pages]
    close(p, d)


def test_a_killed_peer_is_a_failure_and_its_successor_is_served(sides: Sides) -> None:
    """SPEC H19: D dies with a write behind it and one before it; a new D has a new incarnation."""
    p, d = pair(sides)
    d.expect(p, spread(2, 4))
    p.send(d, spread(2, 3), spread(2, 4))
    events_until([p.side, d.side], has_come(2), LIMIT_S)
    d.side.kill()
    p.send(d, spread(64, 3), spread(64, 4), order_id=2, room=2)
    events = events_until([p.side], lambda seen: bool(failed(seen, drained=True)), LIMIT_S)
    assert [event.order_id for event in failed(events, drained=True)] == [2]
    p.call("disconnect", d.ranks.incarnation)
    again = start(sides.take(), seed=5)
    connect(p, again)
    again.expect(p, spread(3, 6))
    p.send(again, spread(3, 5), spread(3, 6), order_id=3)
    events = events_until([p.side, again.side], has_come(3), LIMIT_S)
    assert Written(order_id=3, num_bytes=3 * 49152) in events
    np.testing.assert_array_equal(again.call("pages")[spread(3, 6)], p.call("pages")[spread(3, 5)])
    close(p, again)


def test_a_stopped_peer_is_given_up_without_letting_go_of_what_may_still_be_read(sides: Sides) -> None:
    """SPEC H19: nothing ends while D hangs; its order is drained only when D is dead and disconnected."""
    p, d = pair(sides)
    p.send(d, spread(1, 3), spread(1, 4))
    events_until([p.side, d.side], has_been_written, LIMIT_S)  # connected and idle
    d.side.stop()
    p.send(d, spread(64, 3), spread(64, 4), order_id=2, room=2)
    assert events_until([p.side], bool, 1.0) == []
    d.side.kill()
    p.call("disconnect", d.ranks.incarnation)
    events = events_until([p.side], lambda seen: bool(failed(seen, drained=True)), LIMIT_S)
    [last] = failed(events, drained=True)
    assert (last.order_id, events[-1]) == (2, last)
    close(p)


def test_over_tcp_nothing_lands_that_is_written_behind_a_fence_until_both_connect_anew() -> None:
    """Over CMA the writer itself copies, on the same machine, which is not dead then."""
    workers = [Worker("tcp"), Worker("tcp")]
    try:
        p, d = start(workers[0], seed=1), start(workers[1], seed=2)
        connect(p, d)
        src, dst, later = spread(4, 1), *np.split(spread(8, 2), 2)
        d.expect(p, dst)
        p.send(d, src, dst)
        assert has_come(4)(events_until([p.side, d.side], has_come(4), LIMIT_S))
        before = d.call("pages")
        d.call("fence", p.ranks.incarnation, "127.0.0.1")
        d.expect(p, later, room=2)
        p.send(d, src, later, order_id=2, room=2)
        events = events_until([p.side, d.side], lambda found: bool(failed(found, drained=True)), LIMIT_S)
        assert failed(events, drained=True)
        assert np.array_equal(d.call("pages"), before)
        for here, there in ((p, d), (d, p)):
            here.call("disconnect", there.ranks.incarnation)
        connect(p, d)
        d.expect(p, later, room=3)
        p.send(d, src, later, order_id=3, room=3)
        assert has_come(4)(events_until([p.side, d.side], has_come(4), LIMIT_S))
    finally:
        for worker in workers:
            worker.kill()


def test_an_agent_belongs_to_one_thread(sides: Sides) -> None:
    if sides.kind == "local":
        pytest.skip("memory needs no owner: LocalAgent locks")
    engine = start(sides.take(), seed=1)
    assert "belongs to one thread" in engine.call("call_from_another_thread")
    close(engine)


def test_two_hundred_rooms_leave_no_descriptor_open(sides: Sides) -> None:
    """Each with its own hello, which is idempotent, and its own write."""
    p, d = pair(sides)
    one = np.array([1], dtype=np.int32)

    def run(rooms: range) -> None:
        for room in rooms:
            connect(p, d)
            d.expect(p, one, room=room)
            p.send(d, one, one, order_id=room, room=room)
            assert arrivals(events_until([p.side, d.side], has_come(1), LIMIT_S))
            d.call("forget", room)

    run(range(1, 11))
    before = p.side.call("num_open_files"), d.side.call("num_open_files")
    run(range(11, 211))
    assert (p.side.call("num_open_files"), d.side.call("num_open_files")) == before
    close(p, d)
