"""Two processes with a service each, pages over NIXL: what happens when one dies or hangs (SPEC H08, H13, H19)."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvtransfer.types import (
    PageIds,
    Received,
    ReceiveDrained,
    ReceiveFailed,
    ReceiveOrder,
    SendDone,
    SendDrained,
    SendFailed,
    SendOrder,
    SendReady,
)
from tests.kv_pools import layout, meta_of
from tests.transfer_process import LAST, EngineProcess
from tests.waiting import until

pytestmark = pytest.mark.slow

N = 8  # pages of a room, two writes of 4
TOKENS = N * 4
ROOM = 1

Make = Callable[..., EngineProcess]


@pytest.fixture
def make() -> Iterator[Make]:
    processes: list[EngineProcess] = []

    def build(**changes: Any) -> EngineProcess:
        processes.append(EngineProcess(seed=len(processes), **changes))
        return processes[-1]

    yield build
    for process in processes:
        process.close()


def src(room: int) -> PageIds:
    return np.arange(1 + N * (room % 8), 1 + N * (room % 8) + N, dtype=np.int32)


def dst(room: int) -> PageIds:
    return src(room)[::-1].copy()


def open_room(d: EngineProcess, p: EngineProcess, *, room: int = ROOM) -> None:
    d.call(
        "receive",
        ReceiveOrder(
            room=room,
            generation=0,
            rid="r",
            peer=p.address,
            num_tokens=TOKENS,
            first_page=0,
            pages=dst(room),
            deadline_s=15.0,
        ),
    )


def bring_leg(p: EngineProcess, *, room: int = ROOM) -> None:
    p.call("expect_send", SendOrder(room=room, generation=0, rid="r", num_tokens=TOKENS, deadline_s=15.0))


def send_half(p: EngineProcess, *, room: int = ROOM) -> None:
    p.wait(SendReady, room)
    p.call("send_pages", room, 0, src(room)[:4])


def send_rest(p: EngineProcess, *, room: int = ROOM) -> None:
    p.call("send_last", room, 4, src(room)[4:], meta_of(layout(), TOKENS, first_token=5))


def whole(p: EngineProcess, d: EngineProcess, *, room: int) -> None:
    """A room that goes well."""
    bring_leg(p, room=room)
    open_room(d, p, room=room)
    send_half(p, room=room)
    send_rest(p, room=room)
    assert d.wait(Received, room).meta.first_token == 5
    p.wait(SendDone, room)
    assert np.array_equal(d.pages(dst(room)), p.pages(src(room)))


STATES = ["open, no leg", "ready", "half sent"]


def advance(p: EngineProcess, d: EngineProcess, state: str, *, room: int) -> None:
    """Bring ``room`` to ``state``, over a connection that has carried another one before."""
    whole(p, d, room=room + 100)
    open_room(d, p, room=room)
    if state == "open, no leg":
        until(lambda: p.stats().rooms_sending == 1)  # the open is parked
        return
    bring_leg(p, room=room)
    p.wait(SendReady, room)
    if state == "half sent":
        sent = p.stats().sent_pages
        send_half(p, room=room)
        until(lambda: p.stats().sent_pages == sent + 4)


@pytest.mark.parametrize(("transport", "p_tp", "d_tp"), [("auto", 1, 1), ("tcp", 2, 1), ("auto", 1, 2)])
def test_pages_arrive_bit_for_bit(make: Make, transport: str, p_tp: int, d_tp: int) -> None:
    p, d = make(transport=transport, tp=p_tp), make(transport=transport, tp=d_tp)
    for room in (1, 2):
        whole(p, d, room=room)


def test_a_killed_prefill_process_fails_its_rooms_and_their_pages_are_free_after_the_grace(make: Make) -> None:
    d = make()
    for room, state in enumerate(STATES):
        p = make()
        advance(p, d, state, room=room)
        p.kill()
        d.wait(ReceiveFailed, room, within_s=30.0)
        d.wait(ReceiveDrained, room, within_s=30.0)  # refused, and 1 s of grace
    assert d.stats().rooms_draining == 0
    whole(make(), d, room=4)


def test_a_killed_decode_process_drains_its_senders_and_another_one_is_served(make: Make) -> None:
    p = make()
    for room, state in enumerate(STATES):
        d = make()
        advance(p, d, state, room=room)
        d.kill()
        if state == "open, no leg":
            bring_leg(p, room=room)
        p.wait(SendFailed, room, within_s=30.0)
        p.wait(SendDrained, room, within_s=30.0)
    whole(p, make(), room=4)


def test_a_stopped_prefill_process_keeps_pages_in_quarantine_until_it_goes_on_or_is_killed(make: Make) -> None:
    p, d = make(), make()
    for room, state in enumerate(STATES):
        advance(p, d, state, room=room)
        p.stop()
        assert "silent for 3 s" in d.wait(ReceiveFailed, room, within_s=30.0).reason
        open_room(d, p, room=room + 50)
        d.wait(ReceiveDrained, room + 50)  # nothing was sent; that it ends at once, test_transfer_peers.py shows
        until(lambda: d.stats().oldest_drain_s > 1.5)
        assert not d.has(ReceiveDrained, room)  # never by time alone
        assert d.stats().rooms_draining == 1
        p.resume()
        d.wait(ReceiveDrained, room, within_s=60.0)
        if state == "open, no leg":
            bring_leg(p, room=room)
        p.wait(SendDrained, room)
    advance(p, d, "half sent", room=5)
    p.stop()
    d.wait(ReceiveFailed, 5, within_s=30.0)
    p.kill()
    d.wait(ReceiveDrained, 5, within_s=60.0)


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_a_stopped_decode_process_holds_up_only_its_own_rooms_and_goes_on(make: Make, transport: str) -> None:
    p, d, other = make(transport=transport), make(transport=transport), make(transport=transport)
    for room, state in enumerate(STATES):
        advance(p, d, state, room=room)
        d.stop()
        if state == "half sent":
            send_rest(p, room=room)  # over tcp this write cannot end
        whole(p, other, room=room + 10)  # while it is not yet known that the first one hangs
        if state == "open, no leg":
            bring_leg(p, room=room)
        p.wait(SendFailed, room, within_s=30.0)
        whole(p, other, room=room + 20)
        d.resume()
        p.wait(SendDrained, room, within_s=60.0)
        until(lambda: d.stats().rooms_receiving + d.stats().rooms_draining == 0)
        if d.has(Received, room):  # all had come before it heard that the other side gave up
            assert np.array_equal(d.pages(dst(room)), p.pages(src(room)))
        else:
            d.wait(ReceiveDrained, room)
        whole(p, d, room=room + 30)


def test_a_thousand_rooms_with_aborts_and_stops_leave_no_descriptor_and_no_room(make: Make) -> None:
    """SPEC H19. Two receivers, eight rooms at a time, one in four aborted by either side, a stop now and then."""
    chance = random.Random(0)
    p, receivers = make(), [make(), make()]
    for room, each in enumerate(receivers):
        whole(p, each, room=room)
    before = [each.num_descriptors() for each in (p, *receivers)]
    received = 0
    for start in range(1000, 2000, 8):
        rooms = {room: chance.choice(receivers) for room in range(start, start + 8)}
        stopped = chance.choice(receivers) if start % 160 == 0 else None
        for room, d in rooms.items():
            bring_leg(p, room=room)
            open_room(d, p, room=room)
        if stopped is not None:
            stopped.stop()
        for room, d in rooms.items():
            match chance.randrange(8):
                case 0:
                    d.call("abort_receive", room)
                case 1:
                    p.call("abort_send", room, "the client is gone")
                case _ if stopped is None:
                    send_half(p, room=room)
                    send_rest(p, room=room)
                case _:
                    p.call("abort_send", room, "its receiver hangs")
        if stopped is not None:
            stopped.resume()
        for room, d in rooms.items():
            p.wait(LAST, room)
            d.wait(LAST, room)
            received += d.has(Received, room)
        for each in (p, *receivers):
            each.events.clear()
    assert received > 500
    assert [each.num_descriptors() for each in (p, *receivers)] == before
    for each in (p, *receivers):
        stats = each.stats()
        assert (stats.rooms_sending, stats.rooms_receiving, stats.rooms_draining) == (0, 0, 0)
    for room, each in enumerate(receivers, 2000):
        whole(p, each, room=room)
