"""Who may speak to a transfer service: the challenge both ways, on sockets of this machine (SPEC H03)."""

import errno
import json
import os
import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvtransfer.errors import BadMessage, NotAuthenticated
from kvtransfer.peers.link import DEAF_S, MAX_STRANGERS, SocketLinks
from kvtransfer.peers.wire import (
    Challenge,
    ChallengeReply,
    Frames,
    Handshake,
    Message,
    PeerHello,
    Ping,
    Welcome,
    decode,
    encode,
)
from kvtransfer.types import PeerAddress
from tests.kv_pools import layout


def hello(name: str, port: int = 1) -> PeerHello:
    address = PeerAddress(host="127.0.0.1", port=port, incarnation=name)
    return PeerHello(address=address, purpose="rooms", layout=layout(), ranks=())


def pair(*, dial: bytes = b"secret", listen: bytes = b"secret") -> tuple[Handshake, Handshake]:
    return (
        Handshake(token=dial, hello=hello("d"), dialled=hello("any").address),
        Handshake(token=listen, hello=hello("p")),
    )


def test_both_sides_learn_each_other_after_both_have_proven_themselves() -> None:
    d, p = pair()
    [challenge] = p.start()
    assert d.start() == []
    [answer] = d.heard(challenge)
    welcome, hello_p = p.heard(answer)
    [hello_d] = d.heard(welcome)
    assert p.peer is None
    p.heard(hello_d)
    d.heard(hello_p)
    assert (d.peer, p.peer) == (hello("p"), hello("d"))


def test_a_dialler_without_the_token_gets_no_metadata() -> None:
    d, p = pair(dial=b"guess")
    [answer] = d.heard(p.start()[0])
    with pytest.raises(NotAuthenticated, match="give all replicas the same one"):
        p.heard(answer)
    assert p.peer is None


def test_a_listener_without_the_token_gets_no_metadata() -> None:
    d, p = pair(listen=b"guess")
    d.heard(p.start()[0])
    with pytest.raises(NotAuthenticated):
        d.heard(Welcome(mac="0" * 64))
    assert d.peer is None


def test_a_mac_is_not_accepted_by_its_maker() -> None:
    """The sides sign different words: a listener cannot answer with the dialler's own proof."""
    d, _ = pair()
    [answer] = d.heard(Challenge(nonce="n", address=hello("p").address))
    assert isinstance(answer, ChallengeReply)
    with pytest.raises(NotAuthenticated):
        d.heard(Welcome(mac=answer.mac))


def test_a_proof_that_is_passed_on_to_another_address_is_none() -> None:
    """M listens where d dials, and passes on what p says."""
    p = Handshake(token=b"secret", hello=hello("p", port=2))
    [challenge] = p.start()
    assert isinstance(challenge, Challenge)
    honest, fooled = (
        Handshake(token=b"secret", hello=hello("d"), dialled=hello("m", port=1).address) for _ in range(2)
    )
    with pytest.raises(BadMessage, match="was dialled, and"):
        honest.heard(challenge)
    [answer] = fooled.heard(msgspec.structs.replace(challenge, address=replace(challenge.address, port=1)))
    with pytest.raises(NotAuthenticated):
        p.heard(answer)


def test_a_peer_cannot_say_hello_as_another_than_it_has_proven_to_be() -> None:
    d, p = pair()
    welcome, _ = p.heard(d.heard(p.start()[0])[0])
    d.heard(welcome)
    with pytest.raises(BadMessage, match="proven to be another"):
        p.heard(hello("another"))
    assert p.peer is None


@pytest.mark.parametrize(
    "early", [hello("x"), Ping(), Welcome(mac="m"), Challenge(nonce="n", address=hello("p").address)]
)
def test_nothing_is_believed_before_the_proof(early: Message) -> None:
    _, p = pair()
    p.start()
    with pytest.raises(BadMessage):
        p.heard(early)
    assert p.peer is None


@dataclass
class Heard:
    """A handler that records its calls."""

    up: list[tuple[int, str]] = field(default_factory=list)
    down: list[tuple[int, str, bool]] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)

    def link_up(self, link: int, hello: PeerHello) -> None:
        self.up.append((link, hello.address.incarnation))

    def link_down(self, link: int, reason: str, *, refused: bool = False) -> None:
        self.down.append((link, reason, refused))

    def heard(self, link: int, message: Message) -> None:
        self.messages.append(message)


class Side:
    """Sockets with an injected clock."""

    def __init__(self, name: str, token: bytes = b"secret") -> None:
        self.links = SocketLinks("127.0.0.1", token=token, call_timeout_s=5.0, now=0.0)
        self.hello = hello(name, self.links.port)
        self.links.introduce(self.hello)
        self.heard = Heard()

    def step(self, now: float = 0.0) -> None:
        self.links.serve(self.links.wait(0.01), self.heard, now)
        self.links.expire(now)

    def close(self) -> None:
        self.links.close_connections()
        self.links.close_listener()


Make = Callable[..., Side]


@pytest.fixture
def make() -> Iterator[Make]:
    with ExitStack() as sides:

        def build(name: str, **changes: bytes) -> Side:
            side = Side(name, **changes)
            sides.callback(side.close)
            return side

        yield build


def run(*sides: Side, now: float = 0.0) -> None:
    for _ in range(20):
        for side in sides:
            side.step(now)


def test_two_sides_connect_and_messages_flow_both_ways(make: Make) -> None:
    d, p = make("d"), make("p")
    link = d.links.dial(p.hello.address, "rooms")
    run(d, p)
    assert d.heard.up == [(link, "p")]
    [(back, name)] = p.heard.up
    assert name == "d"
    d.links.send(link, Ping())
    p.links.send(back, Ping())
    run(d, p)
    assert d.heard.messages == p.heard.messages == [Ping()]
    p.links.close(back)
    run(d, p)
    assert d.heard.down == [(link, "the peer closed the connection", False)]


def test_a_message_that_cannot_be_served_costs_its_sender_the_connection(make: Make) -> None:
    d, p, other = make("d"), make("p"), make("other")
    links = [side.links.dial(p.hello.address, "rooms") for side in (d, other)]
    run(d, p, other)

    class Broken(Heard):
        def heard(self, link: int, message: Message) -> None:
            raise OverflowError("an error of ours")

    p.heard = Broken(up=p.heard.up)
    d.links.send(links[0], Ping())
    run(d, p, other)
    assert [name for _, name in p.heard.up] in (["d", "other"], ["other", "d"])
    [(_, reason, refused)] = p.heard.down
    assert "an error of ours" in reason
    assert not refused
    assert (d.heard.down, other.heard.down) == ([(links[0], "the peer closed the connection", False)], [])


def test_a_probe_learns_which_process_listens_and_opens_no_link_on_its_side(make: Make) -> None:
    d, p = make("d"), make("p")
    link = p.links.dial(d.hello.address, "probe")
    run(d, p)
    assert p.heard.up == [(link, "d")]
    assert d.heard.up == []
    p.links.close(link)
    run(d, p)
    assert d.links.num_connections == 0


def test_a_dead_address_refuses_and_the_refusal_is_reported(make: Make) -> None:
    d, p = make("d"), make("p")
    p.close()
    link = d.links.dial(p.hello.address, "rooms")
    run(d)
    [(down, _, refused)] = d.heard.down
    assert (down, refused) == (link, True)


def test_a_process_that_does_not_answer_is_no_proof_of_death(make: Make) -> None:
    d, p = make("d"), make("p")  # p has its turn never: it hangs
    link = d.links.dial(p.hello.address, "rooms")
    run(d, now=4.9)
    assert d.heard.down == []
    run(d, now=5.0)
    assert d.heard.down == [(link, "no hello within 5 s", False)]


def test_a_silent_stranger_is_dropped_in_time_and_gets_nothing_but_a_nonce(make: Make) -> None:
    p = make("p")
    with socket.create_connection(("127.0.0.1", p.links.port)) as stranger:
        run(p, now=4.0)
        frames = Frames(10_000)
        frames.feed(stranger.recv(10_000))
        assert [type(decode(body)) for body in frames] == [Challenge]
        run(p, now=8.9)
        assert p.links.num_connections == 1
        run(p, now=9.0)
        assert p.links.num_connections == 0
        assert stranger.recv(1) == b""


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n", encode(hello("x")), encode(Ping()), b"\xff" * 2000])
def test_a_stranger_that_says_anything_else_is_dropped_at_once(make: Make, data: bytes) -> None:
    p = make("p")
    with socket.create_connection(("127.0.0.1", p.links.port)) as stranger:
        stranger.sendall(data)
        run(p)
        assert p.links.num_connections == 0
    assert p.heard.up == []


def frame(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


HALF = st.text(alphabet=st.sampled_from(["\ud800", "\udfff", "a", "\0", "é"]), max_size=4)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | HALF,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(HALF, inner, max_size=3),
    max_leaves=6,
)
TYPES = ("challenge", "answer", "welcome", "hello", "open", "ping", "bye")
WORDS = st.builds(
    lambda kind, fields: frame(json.dumps({"v": 1, "t": kind, **fields}).encode()),
    st.sampled_from(TYPES),
    st.dictionaries(st.sampled_from(["nonce", "mac", "address", "room"]), VALUES, max_size=3),
)
ANSWER = {"v": 1, "t": "answer", "address": {"host": "h", "port": 1, "incarnation": "i"}}
ANSWERS = st.builds(lambda nonce, mac: frame(json.dumps(ANSWER | {"nonce": nonce, "mac": mac}).encode()), HALF, HALF)


@settings(max_examples=60, deadline=None)
@given(said=st.lists(st.binary(max_size=40) | st.binary(max_size=40).map(frame) | WORDS | ANSWERS, max_size=3))
@example(said=[frame(b'{"v":1,"t":"answer","address":{"host":"h","port":1,"incarnation":"i"},"nonce":"\\ud800","mac":"x"}')])
@example(said=[frame(b'{"v":1,"t":"answer","address":{"host":"h","port":1,"incarnation":"i"},"nonce":"a","mac":"\\ud800"}')])
@example(said=[frame(b'{"v":1,"t":"answer","nonce":' + b"[" * 900)])
def test_whatever_a_stranger_says_costs_at_most_its_own_connection(said: list[bytes]) -> None:
    p = Side("p")
    try:
        with (
            socket.create_connection(("127.0.0.1", p.links.port)) as other,
            socket.create_connection(("127.0.0.1", p.links.port)) as stranger,
        ):
            p.step()
            p.step()
            stranger.sendall(b"".join(said))
            stranger.shutdown(socket.SHUT_WR)
            for _ in range(5):
                p.step()
            assert p.links.num_connections == 1
            assert p.heard.up == []
            other.close()
    finally:
        p.close()


def test_many_strangers_do_not_use_up_the_descriptors(make: Make) -> None:
    p = make("p")
    strangers = [socket.create_connection(("127.0.0.1", p.links.port)) for _ in range(MAX_STRANGERS + 20)]
    for _ in range(MAX_STRANGERS + 20):
        p.step()
    assert p.links.num_connections == MAX_STRANGERS
    for stranger in strangers:
        stranger.close()


def test_many_strangers_of_one_host_push_out_none_of_another(make: Make) -> None:
    p = make("p")
    with socket.socket() as slow:
        slow.bind(("127.0.0.3", 0))
        slow.connect(("127.0.0.1", p.links.port))
        p.step()
        strangers = [socket.create_connection(("127.0.0.1", p.links.port)) for _ in range(MAX_STRANGERS + 5)]
        for _ in range(MAX_STRANGERS + 5):
            p.step()
        slow.setblocking(False)
        assert slow.recv(4096)  # its challenge
        with pytest.raises(BlockingIOError):  # and it is still connected
            slow.recv(1)
    for stranger in strangers:
        stranger.close()


def test_it_listens_on_the_given_address_only(make: Make) -> None:
    p = make("p")
    with socket.socket() as probe:
        probe.settimeout(1.0)
        assert probe.connect_ex(("127.0.0.2", p.links.port)) != 0  # another loopback address of this machine


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, before[1]))
    taken: list[int] = []
    try:
        with suppress(OSError):
            while True:
                taken.append(os.dup(0))
        yield
    finally:
        for each in taken:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_without_a_descriptor_a_caller_waits_a_second_and_is_served_then(make: Make) -> None:
    p = make("p")
    with socket.socket() as caller:
        with no_descriptor_left():
            caller.connect(("127.0.0.1", p.links.port))
            p.step()
            assert p.links.next_s == DEAF_S
            assert p.links.wait(0.0) == []  # it does not spin
        run(p, now=0.9)
        assert p.links.num_connections == 0
        run(p, now=1.0)
        assert p.links.num_connections == 1


def test_without_a_descriptor_a_dial_fails_and_proves_no_death(make: Make) -> None:
    d, p = make("d"), make("p")
    with no_descriptor_left():
        link = d.links.dial(p.hello.address, "rooms")
        d.step()
    [(down, reason, refused)] = d.heard.down
    assert (down, refused) == (link, False)
    assert "Too many open files" in reason


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", 70_000), ("no such host", 1), ("a\0b", 1)])
def test_an_address_that_cannot_be_is_a_failed_dial(make: Make, host: str, port: int) -> None:
    d = make("d")
    link = d.links.dial(PeerAddress(host=host, port=port, incarnation="x"), "rooms")
    run(d)
    assert [(down, refused) for down, _, refused in d.heard.down] == [(link, False)]


def test_a_peer_that_has_hung_up_while_it_was_dialled_is_a_failed_dial(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    d, p = make("d"), make("p")
    link = d.links.dial(p.hello.address, "rooms")

    def hung_up(_: socket.socket) -> None:
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

    monkeypatch.setattr(socket.socket, "getpeername", hung_up)
    run(d)
    assert [(down, refused) for down, _, refused in d.heard.down] == [(link, False)]
