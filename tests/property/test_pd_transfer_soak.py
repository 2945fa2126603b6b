"""A thousand rooms between three engines under random faults: nothing is lost, nothing is late, nothing is wrong."""

import random
from collections import Counter

import pytest

from tests.transfer_net import Net, Room, SimEngine, endings

NUM_ROOMS = 1000


def begin(net: Net, chance: random.Random) -> None:
    """A new room, or a leg that comes late, or pages."""
    awake = [engine for engine in net.living if not engine.hung]
    late = [r for r in net.rooms[-40:] if not r.leg and r.prefill.alive and not r.prefill.hung]
    ready = [room for engine in awake for room in engine.sendable()]
    kind = chance.choices(["room", "leg", "pages"], [4, 1, 4])[0]
    if kind == "room" and awake:
        prefill, num_pages = chance.choice(net.engines), chance.randint(1, 4)
        leg = prefill.alive and not prefill.hung and chance.random() < 0.8
        decode, first_page = chance.choice(awake), chance.randint(0, num_pages)
        net.kv_transfer(prefill, decode, num_pages=num_pages, first_page=first_page, leg=leg)
    elif kind == "leg" and late:
        room = chance.choice(late)
        room.prefill.expect(room)
    elif kind == "pages" and ready:
        room = chance.choice(ready)
        room.prefill.send(room, chance.randint(0, 3), last=chance.random() < 0.6)


def spoil(net: Net, chance: random.Random) -> None:
    """Mostly nothing."""
    at = chance.randrange(len(net.engines))
    engine = net.engines[at]
    awake = engine.alive and not engine.hung
    dice = chance.random()
    if dice < 0.010:
        net.cut()
    elif dice < 0.015 and awake:
        net.hang(engine)
    elif dice < 0.030 and engine.alive and engine.hung:
        net.resume(engine)
    elif dice < 0.034:
        if engine.alive:
            net.kill(engine)
        if chance.random() < 0.7:
            net.engines[at] = net.add(tp=engine.pools.layout.tp, num_pages=25, port=engine.address.port)
            net.engines.pop()
    elif dice < 0.060:
        faults = net.fabric.faults
        faults.flip_bytes, faults.lose_notes = chance.choice([0, 0, 1]), chance.choice([0, 0, 0, 1])
        faults.hold_checks = chance.randint(0, 4)
    elif dice < 0.100 and awake:
        abort_one(engine, chance)


def abort_one(engine: SimEngine, chance: random.Random) -> None:
    if engine.receiving:
        engine.core.abort_receive(chance.choice(list(engine.receiving)))
    elif engine.sending:
        engine.core.abort_send(chance.choice(list(engine.sending)), "the client is gone")


def settle(net: Net) -> None:
    for engine in net.living:
        if engine.hung:
            net.resume(engine)
    faults = net.fabric.faults
    faults.flip_bytes = faults.lose_notes = faults.hold_checks = 0
    net.run(30.0, step_s=0.2)  # longer than any deadline and any backoff


@pytest.mark.parametrize(("seed", "tps"), [(0, (1, 1, 1)), (1, (2, 1, 2))])
def test_a_thousand_rooms_with_random_faults_end_as_promised_and_all_pages_come_back(
    seed: int, tps: tuple[int, ...]
) -> None:
    """SPEC H19. The simulated engines check books, bytes and deadlines at every turn."""
    net = Net(seed)
    for tp in tps:
        net.add(tp=tp, num_pages=25)
    chance = net.random
    while len(net.rooms) < NUM_ROOMS:
        begin(net, chance)
        spoil(net, chance)
        net.run(chance.choice([0.05, 0.05, 0.05, 0.2]), whole=chance.random() < 0.7)
    settle(net)
    wrong = [text for room in net.rooms for text in endings(room)]
    assert not wrong, wrong
    for engine in net.living:
        assert engine.core.num_open == 0
        assert engine.core.receiving.quarantine.num_pages == 0
        assert not engine.receiving
        assert not engine.sending
        engine.check()
    assert well(net.rooms) > NUM_ROOMS // 4  # it was a test of rooms, not of failures alone


def well(rooms: list[Room]) -> int:
    return Counter(tuple(room.receives) for room in rooms)["Received",]
