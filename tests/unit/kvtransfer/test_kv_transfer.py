"""Two transfer services in one process over real sockets; pages by memcpy (SPEC H02, H08, H13, H19)."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from kvtransfer.errors import TransferError
from kvtransfer.layout import KvLayout
from kvtransfer.ports.port import AgentPort
from kvtransfer.rooms.kv_transfer import KvTransfer
from kvtransfer.types import (
    KVTransferMeta,
    PageIds,
    PeerAddress,
    Received,
    ReceiveDrained,
    ReceiveFailed,
    ReceiveOrder,
    SendDone,
    SendDrained,
    SendOrder,
    SendReady,
    TransferEvent,
    TransferSettings,
)
from tests.kv_pools import LocalEngine, join_heads, layout, local_engine, meta_of, page_ids
from tests.local_agents import LocalFabric
from tests.waiting import until

TOKENS = 14  # 4 pages of 4, the last one half full
WAIT_S = 20.0


@dataclass
class Engine:
    """A transfer service with its pools, and a thread-safe inbox as an engine has it."""

    pools: LocalEngine
    service: KvTransfer
    woken: threading.Event
    events: list[TransferEvent] = field(default_factory=list)

    def wait(self, kind: type, room: int) -> TransferEvent:
        """The event of that kind, when it has come."""
        deadline_s = time.monotonic() + WAIT_S
        while True:
            self.events += self.service.drain_events()
            for event in self.events:
                if isinstance(event, kind) and event.room == room:
                    return event
            left_s = deadline_s - time.monotonic()
            assert left_s > 0, f"no {kind.__name__}; there is {self.events}"
            self.woken.wait(left_s)
            self.woken.clear()

    def of(self, room: int) -> list[str]:
        self.events += self.service.drain_events()
        return [type(event).__name__ for event in self.events if event.room == room]


Make = Callable[..., Engine]


@pytest.fixture
def make() -> Iterator[Make]:
    fabric = LocalFabric()
    engines: list[Engine] = []

    def build(
        *, tp: int = 1, seed: int = 0, token: bytes = b"secret", of: KvLayout | None = None, **settings: Any
    ) -> Engine:
        pools = local_engine(fabric, tp=tp, seed=seed)
        woken = threading.Event()
        service = KvTransfer(
            TransferSettings(host="127.0.0.1", token=token, **settings),
            of or pools.layout,
            lambda: pools.ports,
            on_event=woken.set,
        )
        service.start()
        engines.append(Engine(pools, service, woken))
        return engines[-1]

    yield build
    for engine in engines:  # idempotent
        engine.service.close()


def meta(of: Engine, *, first_page: int = 0) -> KVTransferMeta:
    logprob = (-0.5, ((7, -0.5), (9, -1.5)))
    return meta_of(
        of.pools.layout, TOKENS, first_token=7, cached_len=first_page * 4, first_logprob=logprob,
        cached_tokens={"device": 4},
    )  # fmt: skip


def receive(d: Engine, p: Engine | PeerAddress, pages: PageIds, *, room: int = 1, first_page: int = 0) -> None:
    order = ReceiveOrder(
        room=room,
        generation=0,
        rid="r",
        peer=p if isinstance(p, PeerAddress) else p.service.address,
        num_tokens=TOKENS,
        first_page=first_page,
        pages=pages,
        deadline_s=20,
    )
    d.service.receive(order)


def expect(p: Engine, *, room: int = 1) -> None:
    p.service.expect_send(SendOrder(room=room, generation=0, rid="r", num_tokens=TOKENS, deadline_s=20))


def begin(p: Engine, d: Engine, *, room: int = 1) -> None:
    """A room of four pages, until it is ready."""
    expect(p, room=room)
    receive(d, p, page_ids(5, 6, 2, 8), room=room)
    assert p.wait(SendReady, room) == SendReady(room=room, first_page=0)


@pytest.mark.parametrize(("p_tp", "d_tp"), [(1, 1), (2, 1), (1, 2), (3, 1)])
def test_pages_and_meta_arrive_in_two_chunks_and_both_sides_end_well(make: Make, p_tp: int, d_tp: int) -> None:
    p, d = make(tp=p_tp, seed=1), make(tp=d_tp, seed=2)
    begin(p, d)
    p.service.send_pages(1, 0, page_ids(3, 4))
    p.service.send_last(1, 2, page_ids(1, 7), meta(p))
    received = d.wait(Received, 1)
    p.wait(SendDone, 1)
    assert isinstance(received, Received)
    assert received.meta == meta(p)
    assert received.num_bytes == 4 * 3072  # all heads of 4 pages, whatever the ranks
    here, there = join_heads(d.pools.pools), join_heads(p.pools.pools)
    assert np.array_equal(here[[5, 6, 2, 8]], there[[3, 4, 1, 7]])
    assert p.of(1) == ["SendReady", "SendDone"]
    assert d.of(1) == ["Received"]
    assert (p.service.stats().sends_done, d.service.stats().receives_done) == (1, 1)
    assert (d.service.stats().received_pages, d.service.stats().received_bytes) == (4, 4 * 3072)
    # over each pair of ranks one write, or two where the first chunk was gone when the second came
    assert len(p.service.drain_write_times()) in range(max(p_tp, d_tp), 2 * max(p_tp, d_tp) + 1)
    assert p.service.drain_write_times() == d.service.drain_write_times() == []


def kv_transfer(p: Engine, d: Engine, *, room: int) -> None:
    """One that goes well."""
    begin(p, d, room=room)
    p.service.send_last(room, 0, page_ids(3, 4, 1, 7), meta(p))
    d.wait(Received, room)
    p.wait(SendDone, room)


def test_another_layout_is_refused_at_once_with_the_field_that_differs_and_nothing_is_written(make: Make) -> None:
    """SPEC H12: mismatch is rejected, not reinterpreted."""
    p, d = make(seed=1, of=replace(layout(), dtype="bfloat16", item_bytes=2)), make(seed=2)
    before = join_heads(d.pools.pools).copy()
    for room in (1, 2):  # while the connection is made, and after
        expect(p, room=room)
        receive(d, p, page_ids(5, 6, 2, 8), room=room)
        failed = d.wait(ReceiveFailed, room)
        d.wait(ReceiveDrained, room)
        assert isinstance(failed, ReceiveFailed)
        assert "dtype: 'float32' here, 'bfloat16' there" in failed.reason
    assert np.array_equal(join_heads(d.pools.pools), before)


def test_a_room_that_is_open_here_is_not_opened_again(make: Make) -> None:
    p, d = make(seed=1), make(seed=2)
    receive(d, p, page_ids(5, 6, 2, 8))
    with pytest.raises(ValueError, match="room 1 is open here"):
        receive(d, p, page_ids(1))
    d.service.abort_receive(1)
    d.wait(ReceiveDrained, 1)
    kv_transfer(p, d, room=2)


def test_a_transfer_service_that_closes_waits_until_no_peer_writes_into_its_pages(make: Make) -> None:
    p, d = make(seed=1), make(seed=2)
    kv_transfer(p, d, room=1)
    begin(p, d, room=2)
    d.service.close()
    p.wait(SendDrained, 2)
    assert d.of(2) == []  # rooms that are open end without events
    until(lambda: p.service.stats().peers == 0)


def test_ports_that_cannot_be_made_fail_the_start_with_their_own_error() -> None:
    def broken() -> list[AgentPort]:
        raise RuntimeError("no such device")

    service = KvTransfer(TransferSettings(host="127.0.0.1", token=b"t"), layout(), broken, on_event=lambda: None)
    with pytest.raises(RuntimeError, match="no such device"):
        service.start()
    service.close()


def test_no_token_is_no_transfer_service() -> None:
    with pytest.raises(ValueError, match="a cluster token is wanted"):
        KvTransfer(TransferSettings(host="127.0.0.1", token=b""), layout(), list, on_event=lambda: None)


def test_a_transfer_thread_that_dies_ends_its_rooms_and_frees_no_page_that_is_written_to(make: Make) -> None:
    p, d = make(seed=1), make(seed=2)
    begin(p, d)
    d.service._order(lambda core: 1 / 0)  # type: ignore[arg-type, return-value]
    p.service._order(lambda core: 1 / 0)  # type: ignore[arg-type, return-value]
    failed = d.wait(ReceiveFailed, 1)
    assert "the transfer thread has failed: ZeroDivisionError" in getattr(failed, "reason", "")
    p.wait(SendDrained, 1)
    receive(d, p, page_ids(1), room=2)
    d.wait(ReceiveDrained, 2)  # its open was never sent
    assert d.of(1) == ["ReceiveFailed"]
    assert d.of(2) == ["ReceiveFailed", "ReceiveDrained"]
    assert isinstance(d.service.error, ZeroDivisionError)


def test_descriptors_are_flat_while_peers_come_and_go_and_all_are_given_back(make: Make) -> None:
    d = make(seed=2)
    for room in range(8):
        p = make(seed=1)
        kv_transfer(p, d, room=room)
        p.service.close()
        if room == 0:
            first = len(os.listdir("/proc/self/fd"))
    until(lambda: len(os.listdir("/proc/self/fd")) <= first)


def test_a_death_declared_by_another_thread_frees_the_rooms_pages(make: Make) -> None:
    d = make()
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts and says nothing: a machine that is gone
        address = PeerAddress(host="127.0.0.1", port=silent.getsockname()[1], incarnation="gone")
        receive(d, address, page_ids(1, 2, 3, 4))
        teller = threading.Thread(target=d.service.peer_is_dead, args=("gone",))
        teller.start()
        teller.join()
        d.wait(ReceiveDrained, 1)
        failed = d.wait(ReceiveFailed, 1)
    assert isinstance(failed, ReceiveFailed)
    assert failed.reason == "its machine is dead, says the supervisor"


def test_agents_that_do_not_come_or_do_not_end_hold_up_neither_start_nor_close(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvtransfer.rooms.kv_transfer.START_TIMEOUT_S", 0.05)
    monkeypatch.setattr("kvtransfer.rooms.kv_transfer.JOIN_S", 0.05)
    come = threading.Event()

    def slow() -> list[AgentPort]:
        come.wait()
        return local_engine(LocalFabric()).ports

    settings = TransferSettings(host="127.0.0.1", token=b"secret", call_timeout_s=0.05)
    service = KvTransfer(settings, layout(), slow, on_event=lambda: None)
    with pytest.raises(TransferError, match="were not ready"):
        service.start()
    service.close()
    assert "does not end" in caplog.text
    come.set()
    service._thread.join(WAIT_S)  # it has closed what came too late
    assert not service._thread.is_alive()
