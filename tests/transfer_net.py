"""Engines with transfer services in one process and in one thread: a network, memory and a clock that obey the test.

`Net` carries messages on request, loses connections, and lets processes die, hang and come again on their old
address. `SimEngine` is what replicas/ is to a transfer service: it hands out pages, takes them back by the rules of
`TransferService`, and knows the content of every page that no peer may write to.
"""

import itertools
import random
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from kvtransfer.peers.wire import Message, PeerHello, Purpose, decode, encode
from kvtransfer.ports.rank_port import Arrived
from kvtransfer.rooms.transfer_core import TransferCore
from kvtransfer.types import (
    PageIds,
    PeerAddress,
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
from tests.kv_pools import join_heads, local_engine, meta_of
from tests.local_agents import LocalFabric

PAGE = 4  # tokens
SETTINGS = TransferSettings(
    host="sim", token=b"secret", open_timeout_s=3.0, room_timeout_s=4.0, call_timeout_s=1.0, pages_per_write=2
)


@dataclass
class Room:
    """One KV transfer as the test sees it."""

    number: int
    prefill: "SimEngine"
    decode: "SimEngine"
    num_pages: int  # of the sequence
    first_page: int  # that the decode side does not have
    dst: PageIds  # [num_pages - first_page]
    src: PageIds  # [num_pages]
    content: npt.NDArray[np.float32]  # [num_pages, ...] of the prefill side
    deadline_s: float
    given: int = -1  # pages that the prefill engine has sent; -1: not ready
    leg: bool = False  # the prefill leg has arrived
    last: bool = False
    sends: list[str] = field(default_factory=list)  # names of events
    receives: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return self.num_pages * PAGE


@dataclass
class _End:
    """One end of a connection."""

    engine: "SimEngine"
    link: int
    inbox: deque[Message] = field(default_factory=deque)
    other: "_End | None" = None
    closed: bool = False  # here
    broken: str = ""  # reported after what is in the inbox


@dataclass
class _Dial:
    engine: "SimEngine"
    link: int
    address: PeerAddress
    purpose: Purpose
    deadline_s: float
    given_up: bool = False


class SimLinks:
    """Implements `Links` for one engine."""

    def __init__(self, net: "Net", engine: "SimEngine") -> None:
        self.net = net
        self.engine = engine

    def dial(self, address: PeerAddress, purpose: Purpose) -> int:
        link = next(self.net.numbers)
        deadline_s = self.net.now + SETTINGS.call_timeout_s
        self.net.dials.append(_Dial(self.engine, link, address, purpose, deadline_s))
        return link

    def send(self, link: int, message: Message) -> None:
        end = self.net.ends.get(link)
        if end is not None and end.other is not None and not end.broken:
            end.other.inbox.append(decode(encode(message)[4:]))

    def close(self, link: int) -> None:
        for dial in self.net.dials:
            dial.given_up |= dial.link == link
        end = self.net.ends.pop(link, None)
        if end is not None and end.other is not None:
            end.other.broken = end.other.broken or "the peer closed the connection"


class Net:
    def __init__(self, seed: int = 0) -> None:
        self.now = 100.0
        self.random = random.Random(seed)
        self.numbers = itertools.count(1)
        self.fabric = LocalFabric()
        self.ends: dict[int, _End] = {}
        self.dials: list[_Dial] = []
        self.listeners: dict[int, SimEngine] = {}  # by port
        self.engines: list[SimEngine] = []
        self.rooms: list[Room] = []
        self.unreachable: set[int] = set()  # ports that cannot be reached just now
        self.followers: dict[int, PeerAddress] = {}  # by port: processes of ranks after the first
        self.orphans: list[SimEngine] = []  # rank 0's process is gone, the others live on

    def add(self, *, tp: int = 1, num_pages: int = 13, port: int | None = None) -> "SimEngine":
        engine = SimEngine(self, port or 1000 + len(self.engines), tp=tp, num_pages=num_pages)
        self.engines.append(engine)
        self.listeners[engine.address.port] = engine
        self.followers |= {address.port: address for address in engine.followers}
        return engine

    @property
    def living(self) -> list["SimEngine"]:
        return [engine for engine in self.engines if engine.alive]

    def kill(self, engine: "SimEngine") -> None:
        """All its processes."""
        self.kill_rank(engine, 0)
        self.bury(engine)

    def bury(self, orphan: "SimEngine") -> None:
        """The processes of its other ranks end too."""
        self.orphans.remove(orphan)
        for agent in orphan.pools.agents[1:]:
            self.fabric.kill(agent)
        for address in orphan.followers:
            del self.followers[address.port]

    def kill_rank(self, engine: "SimEngine", rank: int) -> None:
        """Rank 0: the others live until `bury`, and what they have posted lands. Another one: the engine ends with it
        (a transfer service whose rank is lost closes the others' agents)."""
        if rank > 0:
            self.kill(engine)
            return
        engine.alive = False
        self.orphans.append(engine)
        self.fabric.kill(engine.pools.agents[0])
        del self.listeners[engine.address.port]
        for link, end in list(self.ends.items()):
            if end.engine is engine:
                SimLinks(self, engine).close(link)
        self.dials = [dial for dial in self.dials if dial.engine is not engine]

    def hang(self, engine: "SimEngine") -> None:
        engine.hung = True
        for agent in engine.pools.agents:
            self.fabric.hang(agent)

    def resume(self, engine: "SimEngine") -> None:
        engine.hung = False
        for agent in engine.pools.agents:
            self.fabric.resume(agent)

    def cut(self) -> None:
        """All connections that are up break; each end learns it by itself, and what is on its way is lost."""
        for end in self.ends.values():
            end.broken = end.broken or "connection reset"
            end.inbox.clear()

    def serve_dials(self) -> None:
        """Connections come about."""
        for dial in list(self.dials):
            target = self.listeners.get(dial.address.port)
            if dial.given_up:
                self.dials.remove(dial)
            elif dial.engine.hung:
                continue
            elif dial.address.port in self.followers:
                self.dials.remove(dial)
                dial.engine.core.link_up(dial.link, self._follower_hello(dial))
            elif target is None:
                self.dials.remove(dial)
                dial.engine.core.link_down(dial.link, "refused", refused=True)
            elif target.hung or dial.address.port in self.unreachable:
                if self.now >= dial.deadline_s:
                    self.dials.remove(dial)
                    dial.engine.core.link_down(dial.link, "no hello")
            else:
                self.dials.remove(dial)
                self._connect(dial, target)

    def _connect(self, dial: _Dial, target: "SimEngine") -> None:
        if dial.purpose == "rooms":
            near = self.ends[dial.link] = _End(dial.engine, dial.link)
            link = next(self.numbers)
            far = self.ends[link] = _End(target, link, other=near)
            near.other = far
            target.core.link_up(link, dial.engine.hello)
        dial.engine.core.link_up(dial.link, target.hello)

    def _follower_hello(self, dial: _Dial) -> PeerHello:
        return PeerHello(
            address=self.followers[dial.address.port], purpose="rooms", layout=dial.engine.pools.layout, ranks=()
        )

    def turn(self, *, whole: bool = True) -> None:
        """Every process that lives and does not hang has its turn; ``whole``: it hears all that was sent to it."""
        for orphan in self.orphans:
            for port in orphan.pools.ports[1:]:
                port.poll()
        for engine in self.random.sample(self.living, len(self.living)):
            if not engine.hung:
                engine.turn(whole=whole)
        self.serve_dials()

    def run(self, seconds: float, *, step_s: float = 0.05, whole: bool = True) -> None:
        for _ in range(max(round(seconds / step_s), 1)):
            self.now += step_s
            self.turn(whole=whole)

    def kv_transfer(
        self, prefill: "SimEngine", decode: "SimEngine", *, num_pages: int, first_page: int = 0, leg: bool = True
    ) -> Room | None:
        """Begin one, if both have the pages."""
        if len(decode.free) < num_pages - first_page or len(prefill.free) < num_pages or prefill is decode:
            return None
        src = prefill.take(num_pages)
        room = Room(
            number=len(self.rooms) + 1,
            prefill=prefill,
            decode=decode,
            num_pages=num_pages,
            first_page=first_page,
            dst=decode.take(num_pages - first_page),
            src=src,
            content=prefill.bytes_of(src).copy(),
            deadline_s=self.now + SETTINGS.room_timeout_s,
        )
        self.rooms.append(room)
        decode.receive(room)
        if leg:
            prefill.expect(room)
        return room


class SimEngine:
    """A process: transfer service, pools, and an engine's books of its pages."""

    def __init__(self, net: Net, port: int, *, tp: int, num_pages: int) -> None:
        self.net = net
        self.pools = local_engine(net.fabric, tp=tp, num_pages=num_pages, seed=port)
        self.address = PeerAddress(host="sim", port=port, incarnation=self.pools.incarnation)
        self.alive = True
        self.hung = False
        self.links = SimLinks(net, self)
        self.core = TransferCore(SETTINGS, self.pools.layout, self.pools.ports, self.links, net.now)
        self._take_arrived = self.core.receiving.arrived
        self.core.receiving.arrived = self._arrived  # type: ignore[method-assign]
        self.followers = tuple(
            PeerAddress(host="sim", port=next(net.numbers) + 10_000, incarnation=agent)
            for agent in self.pools.agents[1:]
        )
        alive_at = (None, *self.followers)
        ranks = tuple(replace(port.info, alive_at=at) for port, at in zip(self.pools.ports, alive_at, strict=True))
        self.hello = PeerHello(address=self.address, purpose="rooms", layout=self.pools.layout, ranks=ranks)
        self.num_pages = num_pages
        self.free = list(range(1, num_pages))
        self.writable: Counter[int] = Counter()  # pages of rooms that come or are in quarantine
        self.pinned: Counter[int] = Counter()  # pages of rooms that go
        self.kept = self.bytes_of(np.arange(num_pages)).copy()  # content of the pages that no peer may write to
        self.receiving: dict[int, Room] = {}
        self.sending: dict[int, Room] = {}
        self.fresh = itertools.count(port * 1_000_000)

    # pages

    def bytes_of(self, pages: npt.NDArray[np.integer]) -> npt.NDArray[np.float32]:
        return join_heads([pool[pages] for pool in self.pools.pools])

    def take(self, num: int) -> PageIds:
        pages = [self.free.pop(self.net.random.randrange(len(self.free))) for _ in range(num)]
        return np.array(pages, dtype=np.int32)

    def reuse(self, pages: PageIds) -> None:
        """Give them to another request, which writes at once."""
        for page in pages.tolist():
            assert page not in self.free
            self.free.append(page)
            value = float(next(self.fresh))
            for pool in self.pools.pools:
                pool[page] = value
            self.kept[page] = value

    # what the engine does

    def receive(self, room: Room) -> None:
        self.receiving[room.number] = room
        self.writable.update(room.dst.tolist())
        self.core.now = self.net.now
        self.core.receive(
            ReceiveOrder(
                room=room.number,
                generation=1,
                rid="r",
                peer=room.prefill.address,
                num_tokens=room.num_tokens,
                first_page=room.first_page,
                pages=room.dst,
                deadline_s=SETTINGS.room_timeout_s,
            )
        )

    def _arrived(self, rank: int, event: Arrived, now: float) -> None:
        """Each page that comes moves its room's deadline on."""
        if event.num_pages and event.room in self.receiving:
            self.receiving[event.room].deadline_s = now + SETTINGS.room_timeout_s
        self._take_arrived(rank, event, now)

    def expect(self, room: Room) -> None:
        room.leg = True
        self.sending[room.number] = room
        self.pinned.update(room.src.tolist())
        self.core.now = self.net.now
        wait_s = SETTINGS.open_timeout_s
        order = SendOrder(room=room.number, generation=1, rid="r", num_tokens=room.num_tokens, deadline_s=wait_s)
        self.core.expect_send(order)

    def send(self, room: Room, num: int, *, last: bool) -> None:
        """The next pages of a room that is ready."""
        start = room.given
        end = room.num_pages if last else min(start + num, room.num_pages)
        room.given, room.last = end, last
        cached_len = room.first_page * PAGE
        meta = meta_of(self.pools.layout, room.num_tokens, first_token=room.number, cached_len=cached_len)
        self.core.now = self.net.now
        self.core.send(room.number, start, room.src[start:end], meta if last else None)

    def sendable(self) -> list[Room]:
        return [room for room in self.sending.values() if room.given >= 0 and not room.last]

    def turn(self, *, whole: bool) -> None:
        """As in KvTransfer: ports, messages; then deadlines; then writes."""
        core = self.core
        core.now = self.net.now
        core.poll_ports()
        for end in [end for end in self.net.ends.values() if end.engine is self]:
            count = len(end.inbox) if whole else self.net.random.randint(0, len(end.inbox))
            for _ in range(count):
                if end.inbox:
                    core.heard(end.link, end.inbox.popleft())
            if end.broken and not end.inbox and end.link in self.net.ends:
                self.links.close(end.link)
                core.link_down(end.link, end.broken)
        core.expire()
        core.post_writes(holds_back=True)
        core.check()
        for event in core.events:
            self.take_event(event)
        core.events.clear()
        self.check()

    def take_event(self, event: TransferEvent) -> None:
        name = type(event).__name__
        if isinstance(event, SendReady | SendDone | SendFailed | SendDrained):
            room = self.sending[event.room]
            room.sends.append(name)
            if isinstance(event, SendReady):
                room.given = event.first_page
            elif isinstance(event, SendDone | SendDrained):
                del self.sending[event.room]
                self.pinned.subtract(room.src.tolist())
                self.reuse(room.src)
        else:
            room = self.receiving[event.room]
            room.receives.append(name)
            if isinstance(event, Received):
                assert event.meta.first_token == room.number
                assert np.array_equal(self.bytes_of(room.dst), room.content[room.first_page :]), "wrong bytes"
            if isinstance(event, Received | ReceiveDrained):
                del self.receiving[event.room]
                self.writable.subtract(room.dst.tolist())
                self.reuse(room.dst)
        if isinstance(event, SendFailed | ReceiveFailed):
            room.reasons.append(event.reason)

    def check(self) -> None:
        """The books balance, no page changed that no peer may write to, and no wait is over its limit."""
        unsent = [room for room in self.net.rooms if room.prefill is self and not room.leg]
        held = [*self.writable.elements(), *self.pinned.elements(), *(p for room in unsent for p in room.src.tolist())]
        assert sorted([*self.free, *held]) == list(range(1, self.num_pages)), "a page is lost or in two places"
        still = [page for page in range(self.num_pages) if not self.writable[page]]
        assert np.array_equal(self.bytes_of(np.array(still)), self.kept[still]), "a page of another room changed"
        for room in self.receiving.values():
            assert room.receives or self.net.now < room.deadline_s, f"room {room.number} waits past its deadline"
            assert room.receives in ([], ["ReceiveFailed"])
        for room in self.sending.values():
            assert room.sends in ([], ["SendReady"], ["SendFailed"], ["SendReady", "SendFailed"])


def endings(room: Room) -> Iterator[str]:
    """What is wrong with how a room ended on the sides that live; nothing when the promise was kept."""
    if room.decode.alive and room.receives not in (["Received"], ["ReceiveFailed", "ReceiveDrained"]):
        yield f"room {room.number} received {room.receives}: {room.reasons}"
    good = (["SendReady", "SendDone"], ["SendFailed", "SendDrained"], ["SendReady", "SendFailed", "SendDrained"])
    if room.prefill.alive and room.leg and room.sends not in good:
        yield f"room {room.number} sent {room.sends}: {room.reasons}"
