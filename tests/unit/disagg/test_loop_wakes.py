"""An engine's thread sleeps while another replica works, and the transfer service wakes it."""

import threading
import time
from dataclasses import replace

import pytest

from kvtransfer.types import PdTicket, ReceiveDrained, ReceiveFailed
from replicas.engine.loop import IDLE_WAIT_S, EngineLoop
from replicas.types import FinishReason, PdLeg, PdTransfer, TokenDelta
from tests.fake_transfer_service import FakeWire
from tests.fakes import continuation
from tests.harness import ask, fake_engine
from tests.waiting import until

pytestmark = pytest.mark.model
PROMPT = list(range(100, 120))


def test_an_engine_that_only_waits_for_a_peer_sleeps_until_its_transfer_service_has_news() -> None:
    wire = FakeWire()
    engine, _ = fake_engine(wire=wire)
    (service,) = wire.services
    looks = []
    drain = service.drain_events
    service.drain_events = lambda: (looks.append(1), drain())[1]  # type: ignore[method-assign]
    loop, got = EngineLoop(engine), list[TokenDelta]()
    loop.start()
    ticket = PdTicket(room=1, generation=0, prefill=service.address)
    kv_transfer = PdTransfer(leg=PdLeg.DECODE, ticket=ticket)
    loop.submit(replace(ask("a", PROMPT), kv_transfer=kv_transfer), got.extend)
    until(lambda: wire.room(1).order is not None)
    threading.Event().wait(0.1)
    before, began_s = len(looks), time.monotonic()
    threading.Event().wait(0.3)
    num_looks, took_s = len(looks) - before, time.monotonic() - began_s
    assert num_looks <= 2 + took_s / IDLE_WAIT_S  # it looks up every half second, not every 2 ms
    service.emit(ReceiveFailed(room=1, reason="its peer died"))
    until(lambda: bool(got) and got[-1].finish is not None)
    assert [token for delta in got for token in delta.token_ids] == continuation(PROMPT, 8)
    assert got[-1].finish is not None
    assert got[-1].finish.reason is FinishReason.LENGTH
    until(lambda: loop.stats().pool.quarantined_pages == 5)
    service.emit(ReceiveDrained(room=1))
    until(lambda: loop.stats().pool.quarantined_pages == 0)  # also when it has nothing else to do
    loop.stop()
    assert service.closed
