"""Ports of ranks in other processes: neither side waits for the other, and a rank closes before the desk does."""

import socket
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection, Listener

import numpy as np
import pytest

from kvtransfer.errors import PeerLost
from kvtransfer.link import SocketLinks
from kvtransfer.local import LocalFabric
from kvtransfer.ports import ExpectOrder, RankInfo
from kvtransfer.types import PeerAddress, TransferSettings
from kvtransfer.wire import Hello, Message
from replicas.runner import remote_port
from replicas.runner.port import PortSpec
from replicas.runner.port_channel import PortChannel
from replicas.runner.remote_port import RemotePort, serve_port
from tests.kv_pools import layout, local_engine

SPEC = PortSpec(layout=layout(), settings=TransferSettings(host="127.0.0.1", token=b"secret"))
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
    monkeypatch.setattr("replicas.runner.port_channel.MAX_UNREAD_BYTES", 100_000)
    here, there = connections()
    there.send(INFO)
    port = RemotePort(here)
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


class Probe:
    """Asks an address who lives there."""

    def __init__(self) -> None:
        self.links = SocketLinks("127.0.0.1", token=b"secret", call_timeout_s=5.0, now=0.0)
        address = PeerAddress(host="127.0.0.1", port=self.links.port, incarnation="probe")
        self.links.introduce(Hello(address=address, purpose="rooms", layout=layout(), ranks=()))
        self.answers: list[str] = []

    def link_up(self, link: int, hello: Hello) -> None:
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
def follower(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[RemotePort, threading.Thread]]:
    """The port of rank 0 to a follower's, which lives in a thread."""
    own = local_engine(LocalFabric()).ports[0]
    monkeypatch.setattr(remote_port, "make_port", lambda *_, **__: own)
    with Listener(("127.0.0.1", 0), authkey=KEY) as listener:
        thread = threading.Thread(target=serve_port, args=(None, 1, SPEC, listener.address, KEY))
        thread.start()
        port = RemotePort(listener.accept())
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


def test_a_rank_whose_desk_is_gone_closes_its_agent_by_itself(follower: tuple[RemotePort, threading.Thread]) -> None:
    port, thread = follower
    port._channel.close()  # as the kernel does when rank 0's process dies
    thread.join(10.0)
    assert not thread.is_alive()
    assert port.info.alive_at is not None
    probe = Probe()
    assert probe.ask(port.info.alive_at) == "refused"
    probe.links.close_connections()
    probe.links.close_listener()
