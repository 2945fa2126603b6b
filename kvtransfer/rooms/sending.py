"""The prefill side of a transfer service: its rooms, the receivers it knows, and which pages are written next.

Owns:      the senders; the write orders that have not ended on every rank; what is remembered of rooms that are over.
Never:     touches sockets or pages; ports do what the orders say.
Invariant: a write order stays in the books until every rank has reported its end, or its receiver is dead. Drained is
           sent for a room only when none of its orders is in flight, and none will be.
Thread:    the transfer thread.

Rooms of one receiver take turns, one write each, and so do receivers; a write has pages_per_write pages at most. At
most MAX_WRITES are in flight to one receiver, so that one that hangs delays no other.
"""

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvtransfer.layout import KvLayout
from kvtransfer.peers.wire import Abort, Drained, Fail, Open, Posted, ToReceiver, ToSender
from kvtransfer.ports.rank_port import PeerRanks, RankPort, WriteFailed, Written
from kvtransfer.replay import observe
from kvtransfer.rooms.sender import KVSender
from kvtransfer.types import PageIds, SendDrained, SendFailed, SendOrder, TransferEvent, TransferSettings, WriteTimes

log = logging.getLogger(__name__)

# Of a donor's time, the part in which it copies pages for those that fetch, while its own requests decode. With a
# twentieth, fetches came too late (docs/log/2026-11-29-fetches.md).
FETCH_SHARE = 0.25
MAX_WRITES = 2  # in flight to one receiver: the next is posted while the last one ends
MAX_ENDED = 10_000  # rooms that are remembered as over
RoomKey = tuple[int, int]  # room, generation


@dataclass(slots=True, eq=False)
class _Receiver:
    """A decode engine that said hello."""

    ranks: PeerRanks
    refusal: str  # why its rooms cannot be served
    turns: deque[KVSender] = field(default_factory=deque)  # rooms with something to write, the next one first
    in_flight: set[int] = field(default_factory=set)  # order ids
    broken: bool = False  # a write failed; the ports connect anew when none is in flight

    @property
    def num_pages(self) -> int:
        return min((rank.num_pages for rank in self.ranks.ranks), default=0)


@dataclass(slots=True, kw_only=True)
class _Order:
    """A write order that has not ended on every rank."""

    room: KVSender
    num_pages: int
    ranks: set[int]  # on which it has not ended
    posted_s: float  # real time, for the observer


class SendingRooms:
    """All rooms in which one engine sends, indexed by room and generation."""

    def __init__(
        self,
        layout: KvLayout,
        settings: TransferSettings,
        ports: Sequence[RankPort],
        *,
        events: list[TransferEvent],
        send: Callable[[str, ToReceiver], None],
    ) -> None:
        """``events``: for the engine; ``send``: a message to the receiver with this incarnation."""
        self._layout = layout
        self._settings = settings
        self._ports = ports
        self._events = events
        self._send = send
        self._rooms: dict[RoomKey, KVSender] = {}
        self._by_room: dict[int, KVSender] = {}  # those with a leg
        self._ended: OrderedDict[RoomKey, tuple[float, str]] = OrderedDict()  # -> when, and why
        self._receivers: dict[str, _Receiver] = {}  # by incarnation
        self._orders: dict[int, _Order] = {}
        self._num_orders = 0  # that were ever posted
        self._write_times: list[WriteTimes] = []
        self._rests_until_s = 0.0  # from fetches
        self.sent_bytes = 0
        self.sent_pages = 0
        self.num_done = 0
        self.num_failed = 0
        self.num_late = 0

    # the engine's orders

    def expect(self, order: SendOrder, now: float) -> None:
        key = (order.room, order.generation)
        if key in self._ended:
            self._events.append(SendFailed(room=order.room, reason=self._ended[key][1]))
            self._events.append(SendDrained(room=order.room))
            self.num_failed += 1
            return
        room = self._rooms.get(key) or self._new(key)
        self._by_room[order.room] = room
        room.expect(order, now)
        self._sweep(now)

    def send(self, room: int, page_offset: int, pages: PageIds, meta: bytes | None, now: float) -> None:
        """Hand pages to a room; one that is over ignores them."""
        sender = self._by_room.get(room)
        if sender is None:
            return
        sender.send(page_offset, pages, meta)
        if sender.has_write and sender not in (turns := self._receivers[sender.incarnation].turns):
            turns.append(sender)
        self._sweep(now)

    def abort(self, room: int, reason: str, now: float) -> None:
        if (sender := self._by_room.get(room)) is not None:
            sender.fail(reason)
            self._sweep(now)

    # messages of the receivers

    def heard(self, incarnation: str, message: ToSender, now: float) -> None:
        key = (message.room, message.generation)
        room = self._rooms.get(key)
        if room is not None and room.incarnation not in ("", incarnation):
            room = None
        if isinstance(message, Open):
            self._opened(incarnation, message, room, now)
        elif room is None:
            self.num_late += 1
            if isinstance(message, Abort):
                self._bury(key, "the receiver gave up", now)
                self._send(incarnation, Drained(room=message.room, generation=message.generation))
        elif isinstance(message, Abort):
            self._aborted(incarnation, room)
        elif room.grant is not None:
            room.acked()
        self._sweep(now)

    def _aborted(self, incarnation: str, room: KVSender) -> None:
        if room.grant is None:  # the leg is here, the open is not and will not be
            room.fail("the receiver gave up")
            self._send(incarnation, Drained(room=room.room, generation=room.generation))
        else:
            room.aborted()

    def _opened(self, incarnation: str, message: Open, room: KVSender | None, now: float) -> None:
        key = (message.room, message.generation)
        receiver = self._receivers[incarnation]
        if room is not None and room.grant is not None:
            self.num_late += 1  # the same open again
            return
        refusal = receiver.refusal or self._refusal(message, receiver)
        if key in self._ended:
            self.num_late += 1
            refusal = self._ended[key][1]
        elif room is None and key in self._rooms:
            refusal = "the room was opened by another receiver"
        elif receiver.broken:
            refusal = "a write to the receiver failed just now"
        if refusal:
            self._send(
                incarnation, Fail(room=message.room, generation=message.generation, reason=refusal, drained=True)
            )
            if key not in self._ended and key not in self._rooms:
                self._bury(key, refusal, now)
            elif room is not None:
                room.fail(refusal)
            return
        room = room or self._new(key)
        if message.prefix is not None:
            order = SendOrder(
                room=message.room, generation=message.generation, rid=f"fetch-{message.room}",
                num_tokens=message.num_tokens, deadline_s=message.deadline_s,
            )  # fmt: skip
            self._by_room[message.room] = room
            room.expect(order, now)
        room.opened(
            incarnation,
            message,
            now,
            wait_s=self._settings.open_timeout_s,
            slack_s=self._settings.call_timeout_s,
        )

    def _refusal(self, message: Open, receiver: _Receiver) -> str:
        """Return why an open cannot be right, or an empty string. Page 0 is the sink of every pool."""
        pages = message.pages
        size = self._layout.page_size
        whole = -(-message.num_tokens // size) + self._layout.carried.num_pages(message.num_tokens, size)
        if message.prefix is not None and (wrong := self._wrong_fetch(message, whole)):
            return wrong
        if message.first_page < 0 or message.first_page + len(pages) > whole:
            return f"pages [{message.first_page}, {message.first_page + len(pages)}) of a sequence of {whole} pages"
        if pages and not (min(pages) > 0 and max(pages) < receiver.num_pages and len(set(pages)) == len(pages)):
            return f"the pages are not distinct pages of a pool of {receiver.num_pages}"
        return ""

    def _wrong_fetch(self, message: Open, whole: int) -> str:
        assert message.prefix is not None
        end, tokens = message.first_page + len(message.pages), len(message.prefix.token_ids)
        if message.room in self._by_room:
            return "the room is in use here"
        if message.num_tokens % self._layout.page_size or end != whole or tokens != 4 * message.num_tokens:
            return f"{tokens} bytes of tokens for {message.num_tokens} tokens up to page {end} of {whole}"
        return ""

    # reports of the peer table

    def receiver_up(self, ranks: PeerRanks, refusal: str) -> None:
        """It said hello, maybe again after a lost connection; orders in flight stay in the books."""
        if (receiver := self._receivers.get(ranks.incarnation)) is None:
            self._receivers[ranks.incarnation] = _Receiver(ranks, refusal)
        else:
            receiver.ranks, receiver.refusal = ranks, refusal

    def receiver_down(self, incarnation: str, reason: str, now: float) -> None:
        for room in self._of(incarnation):
            if not room.await_ack(now + self._settings.call_timeout_s):
                room.lost(reason)
        self._sweep(now)

    def receiver_dead(self, incarnation: str, reason: str, now: float) -> None:
        for room in self._of(incarnation):
            room.dead(reason)
        if (receiver := self._receivers.pop(incarnation, None)) is not None:
            for order_id in receiver.in_flight:  # its process is gone: nothing reads for it
                del self._orders[order_id]
        self._sweep(now)

    def has_business(self, incarnation: str) -> bool:
        receiver = self._receivers.get(incarnation)
        return (receiver is not None and bool(receiver.in_flight)) or bool(self._of(incarnation))

    # reports of the ports

    def wrote(self, rank: int, event: Written | WriteFailed, now: float) -> PeerRanks | None:
        """Book what the port of ``rank`` reports.

        Returns: the receiver whose endpoint has failed, once nothing is in flight over it: connect to it anew.
        """
        order = self._orders.get(event.order_id)
        if order is None:
            self.num_late += 1
            return None
        room = order.room
        receiver = self._receivers[room.incarnation]
        if isinstance(event, Written) or event.drained:
            order.ranks.discard(rank)
        if not order.ranks:
            del self._orders[event.order_id]
            receiver.in_flight.discard(event.order_id)
        if isinstance(event, Written):
            self._book(order, rank, event)
            if room.is_fetch and rank == 0:
                copied_s = sum(times.post_s for times in event.times)
                self._rests_until_s = max(self._rests_until_s, now) + copied_s * (1 / FETCH_SHARE - 1)
            if not order.ranks:
                room.written(event.order_id, now)
        else:
            if not receiver.broken:
                log.warning("a write to %s failed: %s", room.incarnation, event.reason)
            receiver.broken = True
            room.write_failed(event.order_id, event.reason, drained=not order.ranks)
            for other in self._of(room.incarnation):  # the endpoint is gone: none of them can go on
                other.fail(f"a write to the receiver failed: {event.reason}")
        self._sweep(now)
        if not receiver.broken or receiver.in_flight:
            return None
        receiver.broken = False
        return receiver.ranks

    def _book(self, order: _Order, rank: int, event: Written) -> None:
        """Count a good end on one rank; write its record if observation is on (SPEC J02)."""
        self.sent_bytes += event.num_bytes
        self.sent_pages += order.num_pages if rank == 0 else 0
        self._write_times += event.times
        if not observe.enabled() or order.room.order is None:
            return
        observe.transfer_submit(
            rid=order.room.order.rid,
            room=order.room.room,
            rank=rank,
            device=self._ports[rank].info.place,
            dtype=self._layout.dtype,
            buffers_bytes=[event.num_bytes // order.num_pages] * order.num_pages if order.num_pages else [],
            latency_s=time.monotonic() - order.posted_s,
        )

    # the loop

    def post_writes(self, now: float, *, holds_back: bool) -> bool:
        """Post writes to each receiver, one at a time in turn; the digests of the second are made while the first is
        copied. ``holds_back``: for fetches only in FETCH_SHARE of the time. Returns: whether there was any."""
        if not holds_back:
            self._rests_until_s = now
        posted: set[str] = set()
        for _ in range(MAX_WRITES):
            posted |= {each for each, receiver in self._receivers.items() if self._post_next(receiver, now)}
        for incarnation in posted:
            self._send(incarnation, Posted())
        return bool(posted)

    def _post_next(self, receiver: _Receiver, now: float) -> bool:
        receiver.turns = deque(room for room in receiver.turns if room.has_write)
        able = (room for room in receiver.turns if not room.is_fetch or now >= self._rests_until_s)
        if len(receiver.in_flight) >= MAX_WRITES or (room := next(able, None)) is None:
            return False
        receiver.turns.remove(room)
        self._num_orders += 1
        write = room.take_write(self._num_orders, self._settings.pages_per_write)
        self._orders[write.order_id] = _Order(
            room=room,
            num_pages=len(write.src_pages),
            ranks=set(range(len(self._ports))),
            posted_s=time.monotonic(),
        )
        receiver.in_flight.add(write.order_id)
        for port in self._ports:
            port.write(write)
        if room.has_write:
            receiver.turns.append(room)
        return True

    def expire(self, now: float) -> None:
        for room in list(self._rooms.values()):
            room.expire(now)
        keep_s = 2 * max(self._settings.open_timeout_s, self._settings.room_timeout_s)
        while self._ended:
            key, (ended_s, _) = next(iter(self._ended.items()))
            if ended_s + keep_s > now and len(self._ended) <= MAX_ENDED:
                break
            del self._ended[key]
        self._sweep(now)

    @property
    def next_s(self) -> float:
        """The next deadline."""
        return min((room.deadline_s for room in self._rooms.values()), default=float("inf"))

    def take_write_times(self) -> list[WriteTimes]:
        """The times of writes that have ended since the last call, of all ranks."""
        times, self._write_times = self._write_times, []
        return times

    @property
    def num_rooms(self) -> int:
        return len(self._rooms)

    @property
    def num_draining(self) -> int:
        return sum(bool(room.reason) for room in self._rooms.values())

    def fail_all(self, reason: str, now: float) -> None:
        for room in list(self._rooms.values()):
            room.fail(reason)
        self._sweep(now)

    def _new(self, key: RoomKey) -> KVSender:
        room = self._rooms[key] = KVSender(*key, events=self._events, send=self._send)
        return room

    def _of(self, incarnation: str) -> list[KVSender]:
        return [room for room in self._rooms.values() if room.incarnation == incarnation]

    def _bury(self, key: RoomKey, reason: str, now: float) -> None:
        self._ended[key] = (now, reason)

    def _sweep(self, now: float) -> None:
        """Drop the rooms that are over, and remember their keys."""
        for key in [key for key, room in self._rooms.items() if room.over]:
            room = self._rooms.pop(key)
            if room.order is not None:
                del self._by_room[room.room]
                self.num_done += not room.reason
                self.num_failed += bool(room.reason)
            self._bury(key, room.reason or "the room is done", now)

    def check(self) -> None:
        for room in self._rooms.values():
            room.check()
            assert not room.over, f"room {room.room} is over and still in the books"
        assert set().union(*(receiver.in_flight for receiver in self._receivers.values())) == set(self._orders)
        for order_id, order in self._orders.items():
            assert order.ranks, f"order {order_id} has ended on every rank and is still in the books"
            assert not order.room.over, f"order {order_id} of a room that is over"
            assert order_id in self._receivers[order.room.incarnation].in_flight
        assert all(len(receiver.in_flight) <= MAX_WRITES for receiver in self._receivers.values())
        assert all(room.order is not None for room in self._by_room.values())
        assert all(room in self._rooms.values() for room in self._by_room.values())
