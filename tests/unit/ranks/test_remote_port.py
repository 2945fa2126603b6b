"""Ports of ranks in other processes: neither waits for the other, a rank closes before the service does, and one that
hangs is lost as one that has died is (SPEC H19)."""

import socket
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection, Listener
from typing import cast

import numpy as np
import pytest

from kvtransfer.errors import PeerLost
from kvtransfer.peers.link import SocketLinks
from kvtransfer.peers.wire import Message, PeerHello
from kvtransfer.ports.port import AgentPort
from kvtransfer.ports.rank_port import ExpectOrder, NoteCounts, RankInfo
from kvtransfer.rooms.kv_transfer import KvTransfer
from kvtransfer.types import PeerAddress, SendDrained, SendFailed, SendOrder, TransferSettings
from replicas.ranks import remote_port
from replicas.ranks.port import PortSpec
from replicas.ranks.remote_port import PortChannel, PortReport, RemotePort, serve_port
from tests.kv_pools import layout, local_engine
from tests.local_agents import LocalFabric

WAIT_S = 20.0  # for anything
SETTINGS = TransferSettings(host="127.0.0.1", token=b"secret", rank_timeout_s=0.1)
SPEC = PortSpec(layout=layout(), settings=SETTINGS)
INFO = RankInfo(rank=1, agent="x", metadata=b"", base_address=0, num_pages=10, device=0)
KEY = b"key"


def connections() -> tuple[Connection, Connection]:
    one, other = socket.socketpair()
    return Connection(one.detach()), Connection(other.detach())


def order(room: int, num_pages: int = 64) -> ExpectOrder:
    return ExpectOrder(room=room, generation=0, incarnation="i", pages=np.arange(1, num_pages + 1, dtype=np.int32))


def expect_many(port: RemotePort) -> None:
    for room in range(10_000):
        port.expect(order(room))


def test_a_follower_that_reads_nothing_is_lost_and_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that waited for it would not come back."""
    monkeypatch.setattr("replicas.ranks.remote_port.MAX_UNREAD_BYTES", 100_000)
    here, there = connections()
    there.send(INFO)
    port = RemotePort(here, timeout_s=10.0)
    with pytest.raises(PeerLost, match=r"rank 1 of this replica is gone.*unread"):
        expect_many(port)
    there.close()
    port.close()


def test_messages_come_whole_and_in_order_through_a_full_socket() -> None:
    here, there = (PortChannel(each) for each in connections())
    for room in range(3000):
        here.send(("expect", room, b"x" * 500))
    taken: list[object] = []
    while len(taken) < 3000:
        taken += there.take()
        here.flush()
    assert taken == [("expect", room, b"x" * 500) for room in range(3000)]
    here.send("last")
    here.close()
    assert there.take() == ["last"]
    with pytest.raises(EOFError):
        there.take()
    there.close()


class Rank:
    """A rank as its transfer service sees it, at a time that the test sets."""

    def __init__(self) -> None:
        here, there = connections()
        there.send(INFO)
        self.now = 0.0
        self.port = RemotePort(here, timeout_s=10.0, clock=lambda: self.now)
        self.channel = PortChannel(there)

    def say(self, notes: NoteCounts | None = None) -> None:
        self.channel.send(PortReport(events=(), notes=notes or NoteCounts()))

    def listen(self, until_s: float) -> None:
        """Every half second, as the transfer service does more often."""
        while self.now < until_s:
            self.now += 0.5
            assert self.port.poll() == []


@pytest.fixture
def rank() -> Iterator[Rank]:
    rank = Rank()
    yield rank
    rank.channel.close()
    rank.port.close()


def test_a_rank_that_says_nothing_for_its_time_is_lost_and_not_waited_for(rank: Rank) -> None:
    rank.listen(9.5)
    with pytest.raises(PeerLost, match=r"rank 1 of this replica has given no sign of life for 10 s"):
        rank.listen(10.0)
    start_s = time.monotonic()
    rank.port.close()
    assert time.monotonic() - start_s < remote_port.CLOSE_S / 2


def test_a_sign_of_life_that_comes_late_is_one(rank: Rank) -> None:
    for late_s in (9.5, 19.5, 29.5):
        rank.listen(late_s)
        rank.say()
    rank.listen(39.5)
    with pytest.raises(PeerLost):
        rank.listen(40.0)


def test_time_in_which_the_transfer_service_itself_was_held_up_counts_as_one_second(rank: Rank) -> None:
    """A machine that stops and goes on: the transfer service may have its turn before the rank has."""
    rank.listen(8.5)
    rank.now += 60.0
    rank.listen(69.0)
    with pytest.raises(PeerLost):
        rank.listen(69.5)


def test_a_sign_of_life_says_what_notes_were_lost_there(rank: Rank) -> None:
    counts = NoteCounts(late=3, malformed=1, early=2)
    rank.say(counts)
    rank.listen(0.5)
    assert rank.port.note_counts == counts


def test_a_rank_that_hangs_ends_the_transfer_service_and_its_rooms_with_the_reason() -> None:
    """The engine hears of it as of a transfer thread that crashed: its replica is replaced."""
    here, there = connections()
    there.send(INFO)
    own, woken = local_engine(LocalFabric(), tp=2).ports[0], threading.Event()
    service = KvTransfer(SETTINGS, layout(2), lambda: [own, RemotePort(here, timeout_s=0.3)], on_event=woken.set)
    service.start()
    service.expect_send(SendOrder(room=1, generation=0, rid="r", num_tokens=4, deadline_s=180.0))
    assert woken.wait(WAIT_S)
    failed, drained = service.drain_events()
    assert isinstance(failed, SendFailed)
    assert "rank 1 of this replica has given no sign of life for 0.3 s" in failed.reason
    assert drained == SendDrained(room=1)
    assert isinstance(service.error, PeerLost)
    service.close()
    there.close()


class Probe:
    """Asks an address who lives there."""

    def __init__(self) -> None:
        self.links = SocketLinks("127.0.0.1", token=b"secret", call_timeout_s=5.0, now=0.0)
        address = PeerAddress(host="127.0.0.1", port=self.links.port, incarnation="probe")
        self.links.introduce(PeerHello(address=address, purpose="rooms", layout=layout(), ranks=()))
        self.answers: list[str] = []

    def link_up(self, link: int, hello: PeerHello) -> None:
        self.answers.append(hello.address.incarnation)

    def link_down(self, link: int, reason: str, *, refused: bool = False) -> None:
        self.answers.append("refused" if refused else reason)

    def heard(self, link: int, message: Message) -> None: ...

    def ask(self, address: PeerAddress) -> str:
        self.answers.clear()
        link = self.links.dial(address, "probe")
        while not self.answers:
            self.links.serve(self.links.wait(5.0), self, 0.0)
        self.links.close(link)
        return self.answers[0]


@pytest.fixture
def own() -> AgentPort:
    """The follower's."""
    return local_engine(LocalFabric()).ports[0]


@pytest.fixture
def follower(own: AgentPort, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[RemotePort, threading.Thread]]:
    """The port of rank 0 to a follower's, which lives in a thread."""
    monkeypatch.setattr(remote_port, "make_port", lambda *_, **__: own)
    with Listener(("127.0.0.1", 0), authkey=KEY) as listener:
        thread = threading.Thread(target=serve_port, args=(None, 1, SPEC, listener.address, KEY))
        thread.start()
        port = RemotePort(listener.accept(), timeout_s=WAIT_S)
        yield port, thread
        port.close()
        thread.join()


def test_a_rank_answers_as_long_as_its_agent_lives_and_has_closed_when_close_returns(
    follower: tuple[RemotePort, threading.Thread],
) -> None:
    port, _ = follower
    assert port.info.alive_at is not None
    probe = Probe()
    assert probe.ask(port.info.alive_at) == port.info.agent
    port.expect(order(1, num_pages=2))
    assert port.poll() == []
    port.close()
    assert probe.ask(port.info.alive_at) == "refused"
    probe.links.close_connections()
    probe.links.close_listener()


def test_a_rank_whose_service_is_gone_closes_its_agent_by_itself(
    follower: tuple[RemotePort, threading.Thread],
) -> None:
    port, thread = follower
    port._channel.close()  # as the kernel does when rank 0's process dies
    thread.join(10.0)
    assert not thread.is_alive()
    assert port.info.alive_at is not None
    probe = Probe()
    assert probe.ask(port.info.alive_at) == "refused"
    probe.links.close_connections()
    probe.links.close_listener()


def test_a_rank_that_has_nothing_to_say_says_that_it_lives_and_what_notes_it_dropped(
    own: AgentPort, follower: tuple[RemotePort, threading.Thread]
) -> None:
    """Ten times within its time, 0.1 s; there is neither a room nor an event."""
    port, _ = follower
    own._agent.inbox.append(("a peer", b"no note"))  # type: ignore[attr-defined]
    deadline_s = time.monotonic() + WAIT_S
    reports: list[PortReport] = []
    while len(reports) < 3 or reports[-1].notes != NoteCounts(malformed=1):
        assert time.monotonic() < deadline_s
        port._channel.wait(WAIT_S)
        reports += cast(list[PortReport], port._channel.take())
    assert not any(report.events for report in reports)
