"""An engine's transfer service: a thread of its own, which owns the agents, the sockets and the rooms.

Owns:      the thread and its pace; two queues, orders in and events out.
Never:     decides anything: `TransferCore` does. Never makes the engine wait.
Invariant: ports are made, used and closed on the transfer thread; every room's last event is given once, also when
           the thread has failed (except ReceiveDrained, which would be untrue then).
Thread:    the methods belong to the engine's thread, all else to "manta-transfer".

    engine ── orders ──> deque, wake ──> transfer thread: ports, messages, orders; then deadlines; then new writes
           <─ events ─── deque, on_event ──
The order within a turn matters: what came before its deadline counts, even when both are found in one turn.
"""

import collections
import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Callable, Sequence

from kvtransfer.errors import TransferError
from kvtransfer.layout import KvLayout
from kvtransfer.peers.link import SocketLinks
from kvtransfer.peers.wire import PeerHello
from kvtransfer.ports.rank_port import RankPort
from kvtransfer.rooms.transfer_core import TransferCore
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
    SendFailed,
    SendOrder,
    SendReady,
    TransferEvent,
    TransferSettings,
    TransferStats,
    WriteTimes,
)

log = logging.getLogger(__name__)

BUSY_WAIT_S = 0.00005  # after something happened; it grows with each idle turn, to 4 ms after about 20 ms
GROWTH = 1.3
WAITING_S = 0.004  # rooms are open and nothing moves; a peer that posts a write sends Posted, which wakes us
IDLE_WAIT_S = 0.05  # no room is open; the agents' own connections can wait this long
MIN_SELECT_S = 0.001
DEADLINE_STEP_S = 0.002  # how exactly deadlines are kept
START_TIMEOUT_S = 330.0  # longer than the other ranks have for theirs
MAX_WRITE_TIMES = 4096  # kept until `drain_write_times`
JOIN_S = 10.0  # beyond what the goodbye may take: agents that do not close

Order = Callable[[TransferCore], None]


class KvTransfer:
    """The `TransferService` of a running engine: its thread, and the queues to and from it."""

    def __init__(
        self,
        settings: TransferSettings,
        layout: KvLayout,
        make_ports: Callable[[], Sequence[RankPort]],
        *,
        on_event: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``make_ports``: one for each rank; called on the transfer thread, the only one that uses them.
        ``on_event``: see `TransferService.on_event`.

        Raises: OSError when ``settings.host`` is no address of this machine.
        """
        if not settings.token:
            raise ValueError("a cluster token is wanted: without it any process could write into the pool")
        self._settings = settings
        self._layout = layout
        self.on_event = on_event
        self.holds_back = False
        self._clock = clock
        self._orders: collections.deque[Order] = collections.deque()
        self._events: collections.deque[TransferEvent] = collections.deque()
        self._receiving: dict[int, bool] = {}  # rooms whose last event the engine has not taken -> whether they failed
        self._sending: dict[int, bool] = {}
        self._shown: tuple[TransferStats, tuple[PeerAddress, ...]] = (TransferStats(), ())  # and the peers out of reach
        self._write_times: collections.deque[WriteTimes] = collections.deque(maxlen=MAX_WRITE_TIMES)
        self._started = threading.Event()
        self._stopping = False
        self._error: BaseException | None = None
        self._crashed = threading.Event()  # and the ports are closed
        self._links = SocketLinks(
            settings.host, token=settings.token, call_timeout_s=settings.call_timeout_s, now=clock()
        )
        self.address = PeerAddress(host=settings.host, port=self._links.port, incarnation=uuid.uuid4().hex)
        self._thread = threading.Thread(target=self._main, args=(make_ports,), name="manta-transfer", daemon=True)

    def start(self) -> None:
        """Start the thread and wait until the ports are made. Raises: what making them raised."""
        self._thread.start()
        if not self._started.wait(START_TIMEOUT_S):
            self._stopping = True  # ports that are made later are closed
            raise TransferError(f"the transfer agents were not ready within {START_TIMEOUT_S:g} s")
        if self._error is not None:
            raise self._error

    # TransferService

    def receive(self, order: ReceiveOrder) -> None:
        """Raises: ValueError for a room that is open here; its number is free after its last event."""
        self._take_room(self._receiving, order.room)
        if self._crashed.is_set():  # the thread will never see this room
            reason = f"the transfer thread has failed: {self._error!r}"
            self._events += (ReceiveFailed(room=order.room, reason=reason), ReceiveDrained(room=order.room))
        self._order(lambda core: core.receive(order))

    def abort_receive(self, room: int) -> None:
        self._order(lambda core: core.abort_receive(room))

    def expect_send(self, order: SendOrder) -> None:
        """Raises: ValueError for a room that is open here; its number is free after its last event."""
        self._take_room(self._sending, order.room)
        self._order(lambda core: core.expect_send(order))

    def send_pages(self, room: int, page_offset: int, pages: PageIds) -> None:
        self._order(lambda core: core.send(room, page_offset, pages, None))

    def send_last(self, room: int, page_offset: int, pages: PageIds, meta: KVTransferMeta) -> None:
        self._order(lambda core: core.send(room, page_offset, pages, meta))

    def abort_send(self, room: int, reason: str) -> None:
        self._order(lambda core: core.abort_send(room, reason))

    def peer_is_dead(self, incarnation: str) -> None:
        self._order(lambda core: core.peer_is_dead(incarnation))

    def out_of_reach(self) -> tuple[PeerAddress, ...]:
        return self._shown[1]

    def drain_events(self) -> list[TransferEvent]:
        events = []
        with contextlib.suppress(IndexError):
            while True:
                events.append(self._events.popleft())
        if self._crashed.is_set():
            events += self._last_events(events)
        for event in events:
            self._note(event)
        return events

    def stats(self) -> TransferStats:
        return self._shown[0]

    def drain_write_times(self) -> list[WriteTimes]:
        return [self._write_times.popleft() for _ in range(len(self._write_times))]

    def close(self) -> None:
        """End all rooms without events: wait until nothing is in flight, at most call_timeout_s, then say goodbye."""
        self._stopping = True
        if self._thread.is_alive():
            self._links.wake()
            self._thread.join(self._settings.call_timeout_s + JOIN_S)
            if self._thread.is_alive():
                log.error("the transfer thread does not end; the pool's memory must stay until this process does")

    @property
    def error(self) -> BaseException | None:
        """What ended the thread, if it was not `close`."""
        return self._error

    def _take_room(self, rooms: dict[int, bool], room: int) -> None:
        if room in rooms:
            raise ValueError(f"room {room} is open here: take another number for another try")
        rooms[room] = False

    def _order(self, order: Order) -> None:
        if self._crashed.is_set():
            self.on_event()  # `drain_events` fails the room
            return
        self._orders.append(order)
        self._links.wake()

    def _note(self, event: TransferEvent) -> None:
        if isinstance(event, SendReady) and event.prefix is not None:
            self._sending[event.room] = False
        elif isinstance(event, ReceiveFailed):
            self._receiving[event.room] = True
        elif isinstance(event, SendFailed):
            self._sending[event.room] = True
        elif isinstance(event, Received | ReceiveDrained):
            self._receiving.pop(event.room, None)
        elif isinstance(event, SendDone | SendDrained):
            self._sending.pop(event.room, None)

    def _last_events(self, events: list[TransferEvent]) -> list[TransferEvent]:
        """The last events of the rooms of a thread that has failed, after ``events``. Our agents are gone, so nothing
        reads our pages; peers may write into the pages of receiving rooms at any time, so those never drain."""
        for event in events:
            self._note(event)
        reason = f"the transfer thread has failed: {self._error!r}"
        last: list[TransferEvent] = []
        for room, failed in self._sending.items():
            last += [] if failed else [SendFailed(room=room, reason=reason)]
            last.append(SendDrained(room=room))
        last += [ReceiveFailed(room=room, reason=reason) for room, failed in self._receiving.items() if not failed]
        return last

    # the transfer thread

    def _main(self, make_ports: Callable[[], Sequence[RankPort]]) -> None:
        ports: Sequence[RankPort] = ()
        try:
            ports = make_ports()
            core = self._open(ports)
            self._started.set()
            self._run(core)
            self._say_goodbye(core)
        except BaseException as error:  # any error: the engine must learn of it, and its rooms must end
            self._error = error
            if self._started.is_set():
                log.exception("the transfer thread has failed")
        finally:
            self._links.close_connections()
            for port in ports:
                port.close()
            self._links.close_listener()  # last: from now on peers may take us for dead
            if self._error is not None and self._started.is_set():
                self._crashed.set()
                self.on_event()
            self._started.set()

    def _open(self, ports: Sequence[RankPort]) -> TransferCore:
        ranks = tuple(port.info for port in ports)
        self._links.introduce(PeerHello(address=self.address, purpose="rooms", layout=self._layout, ranks=ranks))
        return TransferCore(self._settings, self._layout, ports, self._links, self._clock())

    def _run(self, core: TransferCore) -> None:
        expire_s = 0.0
        wait_s = 0.0
        while not self._stopping:
            moved = self._turn(core, wait_s)
            if core.now >= expire_s:
                self._links.expire(core.now)
                core.expire()
                expire_s = core.now + DEADLINE_STEP_S
            moved |= core.post_writes(holds_back=self.holds_back)
            self._publish(core)
            wait_s = self._pace(core, wait_s, moved)

    def _turn(self, core: TransferCore, wait_s: float) -> bool:
        """Sleep, then take what ports, links and the engine report. Returns: whether anything happened."""
        if 0 < wait_s < MIN_SELECT_S:  # finer than a selector waits
            time.sleep(wait_s)
            wait_s = 0.0
        ready = self._links.wait(wait_s)
        core.now = self._clock()
        moved = core.poll_ports()
        moved |= self._links.serve(ready, core, core.now)
        moved |= self._take_orders(core)
        return moved

    def _take_orders(self, core: TransferCore) -> bool:
        taken = False
        with contextlib.suppress(IndexError):
            while True:
                order = self._orders.popleft()
                taken = True
                order(core)
        return taken

    def _publish(self, core: TransferCore) -> None:
        self._shown = core.stats(), core.peers.out_of_reach()
        self._write_times.extend(core.sending.take_write_times())
        if core.events:
            self._events.extend(core.events)
            core.events.clear()
            self.on_event()

    def _pace(self, core: TransferCore, wait_s: float, moved: bool) -> float:
        """How long to sleep: not at all after something happened, then longer with each idle turn."""
        if moved or core.events or self._orders:
            return 0.0
        longest_s = WAITING_S if core.num_open else IDLE_WAIT_S
        next_s = min(core.next_s, self._links.next_s) - core.now
        return max(min(wait_s * GROWTH, longest_s, next_s), BUSY_WAIT_S)

    def _say_goodbye(self, core: TransferCore) -> None:
        """Fail all rooms and wait for their drain: no peer may write into the pool or read from it once it is freed."""
        deadline_s = self._clock() + self._settings.call_timeout_s
        core.fail_all("the peer is shutting down")
        while core.num_open and core.now < deadline_s:
            if not self._turn(core, BUSY_WAIT_S):
                self._links.expire(core.now)
                core.expire()
            core.fail_all("the peer is shutting down")
        core.peers.say_bye()
        while self._links.num_unsent_bytes and core.now < deadline_s:
            self._turn(core, BUSY_WAIT_S)
        if core.num_open:
            log.warning("closed with %d rooms of peers that did not answer", core.num_open)
