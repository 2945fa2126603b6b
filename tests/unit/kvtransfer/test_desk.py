"""Two desks in one process over real sockets; pages by memcpy (SPEC H02, H08, H13, H19)."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest

from kvtransfer.desk import KvTransfer
from kvtransfer.local import LocalFabric
from kvtransfer.types import (
    KVTransferMeta,
    PageIds,
    PdTicket,
    Received,
    ReceiveDrained,
    ReceiveFailed,
    ReceiveOrder,
    SendDone,
    SendDrained,
    SendFailed,
    SendOrder,
    SendReady,
    TransferEvent,
    TransferSettings,
)
from tests.kv_pools import LocalEngine, join_heads, local_engine, page_ids

TOKENS = 14  # 4 pages of 4, the last one half full
WAIT_S = 20.0


@dataclass
class Engine:
    """A desk with its pools, and a thread-safe inbox as an engine has it."""

    pools: LocalEngine
    desk: KvTransfer
    woken: threading.Event
    events: list[TransferEvent] = field(default_factory=list)

    def wait(self, kind: type, room: int) -> TransferEvent:
        """The event of that kind, when it has come."""
        deadline_s = time.monotonic() + WAIT_S
        while True:
            self.events += self.desk.drain_events()
            for event in self.events:
                if isinstance(event, kind) and event.room == room:
                    return event
            left_s = deadline_s - time.monotonic()
            assert left_s > 0, f"no {kind.__name__}; there is {self.events}"
            self.woken.wait(left_s)
            self.woken.clear()

    def of(self, room: int) -> list[str]:
        self.events += self.desk.drain_events()
        return [type(event).__name__ for event in self.events if event.room == room]


Make = Callable[..., Engine]


@pytest.fixture
def make() -> Iterator[Make]:
    fabric = LocalFabric()
    engines: list[Engine] = []

    def build(*, tp: int = 1, seed: int = 0, token: bytes = b"secret", **settings: float) -> Engine:
        pools = local_engine(fabric, tp=tp, seed=seed)
        woken = threading.Event()
        desk = KvTransfer(
            TransferSettings(host="127.0.0.1", token=token, **settings),
            pools.layout,
            lambda: pools.ports,
            on_event=woken.set,
        )
        desk.start()
        engines.append(Engine(pools, desk, woken))
        return engines[-1]

    yield build
    for engine in engines:
        engine.desk.close()


def meta(of: Engine, *, first_page: int = 0, tokens: int = TOKENS) -> KVTransferMeta:
    return KVTransferMeta(
        rid="r",
        fingerprint=of.pools.layout.fingerprint,
        prompt_len=tokens,
        token_range=(first_page * 4, tokens),
        cached_prefix_len=first_page * 4,
        first_token=7,
        first_logprob=(-0.5, ((7, -0.5), (9, -1.5))),
        cached_tokens={"device": 4},
    )


def receive(
    d: Engine, p: Engine, pages: PageIds, *, room: int = 1, first_page: int = 0, deadline_s: float = 20
) -> None:
    ticket = PdTicket(room=room, generation=0, prefill=p.desk.address)
    d.desk.receive(
        ReceiveOrder(
            room=room,
            generation=0,
            rid="r",
            peer=ticket.prefill,
            num_tokens=TOKENS,
            first_page=first_page,
            pages=pages,
            deadline_s=deadline_s,
        )
    )


def expect(p: Engine, *, room: int = 1, deadline_s: float = 20) -> None:
    p.desk.expect_send(SendOrder(room=room, generation=0, rid="r", num_tokens=TOKENS, deadline_s=deadline_s))


@pytest.mark.parametrize(("p_tp", "d_tp"), [(1, 1), (2, 1), (1, 2), (3, 1)])
def test_pages_and_meta_arrive_in_two_chunks_and_both_sides_end_well(make: Make, p_tp: int, d_tp: int) -> None:
    p, d = make(tp=p_tp, seed=1), make(tp=d_tp, seed=2)
    expect(p)
    receive(d, p, page_ids(5, 6, 2, 8))
    assert p.wait(SendReady, 1) == SendReady(room=1, first_page=0)
    p.desk.send_pages(1, 0, page_ids(3, 4))
    p.desk.send_last(1, 2, page_ids(1, 7), meta(p))
    received = d.wait(Received, 1)
    p.wait(SendDone, 1)
    assert isinstance(received, Received)
    assert received.meta == meta(p)
    assert received.num_bytes == 4 * 3072  # all heads of 4 pages, whatever the ranks
    here, there = join_heads(d.pools.pools), join_heads(p.pools.pools)
    assert np.array_equal(here[[5, 6, 2, 8]], there[[3, 4, 1, 7]])
    assert p.of(1) == ["SendReady", "SendDone"]
    assert d.of(1) == ["Received"]
    assert (p.desk.stats().sends_done, d.desk.stats().receives_done) == (1, 1)
