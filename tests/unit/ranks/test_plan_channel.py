"""Rank 0's plan channel: which connections are admitted, and what is left when the wait is over."""

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Client, Connection

import pytest

from replicas.errors import EngineDead, Overloaded
from replicas.layers.adapters import DropAdapter, PrepareAdapter
from replicas.ranks.plan_channel import PlanChannel

KEY = b"secret"


@pytest.fixture
def channel() -> PlanChannel:
    return PlanChannel("127.0.0.1", KEY)


def no_one() -> str | None:
    return None


def started(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_strangers_delay_no_follower_and_leave_no_thread_behind(channel: PlanChannel) -> None:
    before = set(threading.enumerate())
    with socket.create_connection(channel.address) as silent, socket.create_connection(channel.address) as loud:
        loud.sendall(b"GET / HTTP/1.0\r\n\r\n")
        ours: list[Connection] = []
        connect = started(lambda: ours.append(Client(channel.address, authkey=KEY)))
        channel.accept(1, timeout_s=10, dead=no_one)
        connect.join(timeout=60)
        assert not set(threading.enumerate()) - before
        silent.settimeout(10)
        with suppress(ConnectionResetError):
            while silent.recv(1000):  # our challenge, and then the end
                pass
    assert len(ours) == len(channel.connections) == 1
    channel.connections[0].send("a plan")
    assert ours[0].recv() == "a plan"
    channel.close()
    ours[0].close()


def test_a_follower_whose_thread_has_yet_to_end_is_not_hung_up(channel: PlanChannel) -> None:
    """It has proved itself, the wait is over, and its thread returns a moment later."""

    class Slow(list[Connection]):
        def append(self, connection: Connection) -> None:
            super().append(connection)
            threading.Event().wait(0.2)  # longer than one check for new connections

    channel._followers = Slow()
    ours: list[Connection] = []
    connect = started(lambda: ours.append(Client(channel.address, authkey=KEY)))
    channel.accept(1, timeout_s=10, dead=no_one)
    connect.join(timeout=60)
    channel.connections[0].send("a plan")
    assert ours[0].recv() == "a plan"
    channel.close()
    ours[0].close()


class Unpicklable(str):
    """A folder for whose pickle no memory is left."""

    def __reduce_ex__(self, protocol: object) -> str:
        raise MemoryError("none is left")


def test_an_order_that_no_memory_is_left_to_send_is_refused_and_the_next_arrives(channel: PlanChannel) -> None:
    ours: list[Connection] = []
    connect = started(lambda: ours.append(Client(channel.address, authkey=KEY)))
    channel.accept(1, timeout_s=10, dead=no_one)
    connect.join(timeout=60)
    with pytest.raises(Overloaded, match="no memory is left"):
        channel.send(PrepareAdapter(1, "a", Unpicklable("/a")))
    channel.send(DropAdapter("b"))
    assert ours[0].poll(10)
    assert ours[0].recv() == DropAdapter("b")
    channel.close()
    ours[0].close()


def test_what_followers_say_is_heard_by_number_and_silence_and_an_end_are_told(channel: PlanChannel) -> None:
    """Of an order of which nobody waited to hear, what was said is passed over."""
    ours: list[Connection] = []
    connect = started(lambda: [ours.append(Client(channel.address, authkey=KEY)) for _ in range(2)])
    channel.accept(2, timeout_s=10, dead=no_one)
    connect.join(timeout=60)
    for number, why in ((1, "an old error"), (2, "no file")):
        ours[0].send((number, why))
        ours[1].send((number, ""))
    assert channel.hear(2, timeout_s=10) == ["no file"]
    ours[0].send((3, ""))
    with pytest.raises(TimeoutError, match="a rank has not said within 0 s how order 3 went"):
        channel.hear(3, timeout_s=0.0)
    for each in ours:
        each.close()
    with pytest.raises(EngineDead, match="a tensor-parallel rank is gone"):
        channel.hear(4, timeout_s=10)
    channel.close()


def test_a_follower_that_never_connects_ends_the_wait_with_the_numbers(
    channel: PlanChannel,
) -> None:
    before = set(threading.enumerate())
    with socket.create_connection(channel.address):
        with pytest.raises(EngineDead, match="0 of 2 ranks connected within 0 s"):
            channel.accept(2, timeout_s=0.2, dead=no_one)
        assert not set(threading.enumerate()) - before
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(channel.address)


def test_a_wait_ends_when_a_follower_dies_or_the_channel_is_closed(channel: PlanChannel) -> None:
    with pytest.raises(EngineDead, match="rank1 exited with code 1 before it was ready"):
        channel.accept(1, timeout_s=10, dead=lambda: "rank1 exited with code 1")
    other = PlanChannel("127.0.0.1", KEY)
    asked = threading.Event()
    errors: list[str] = []

    def wait() -> None:
        with pytest.raises(EngineDead) as error:
            other.accept(1, timeout_s=10, dead=asked.set)  # type: ignore[arg-type]
        errors.append(str(error.value))

    waiting = started(wait)
    assert asked.wait(10)
    other.close()
    waiting.join(timeout=60)
    assert len(errors) == 1
    assert "the ranks' channel was closed before all had connected" in errors[0]
