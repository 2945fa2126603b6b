"""The prefill side of a transfer service: its rooms, the receivers it knows, and whose pages are written next.

Owns:      the senders; what is remembered of rooms that are over. Its writes are in the books of writes.py.
Never:     touches sockets or pages; ports do what the orders say.
Invariant: Drained is told of a room only when none of its orders is on its way, and no more will be.
Thread:    the transfer thread.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence

from kvtransfer.layout import KvLayout
from kvtransfer.peers.wire import Abort, Drained, Fail, Open, Posted, ToReceiver, ToSender
from kvtransfer.ports.rank_port import PeerRanks, RankPort, WriteFailed, Written
from kvtransfer.ports.writes import Writes
from kvtransfer.rooms.sender import KVSender
from kvtransfer.types import PageIds, SendDrained, SendFailed, SendOrder, TransferEvent, TransferSettings, WriteTimes

log = logging.getLogger(__name__)

MAX_ENDED = 10_000  # rooms that are remembered as over
RoomKey = tuple[int, int]  # room, generation


class _Receiver:
    """A decode engine that said hello."""

    def __init__(self, ranks: PeerRanks, refusal: str) -> None:
        self.ranks = ranks
        self.refusal = refusal  # why its rooms cannot be served
        self.num_pages = min((rank.num_pages for rank in ranks.ranks), default=0)
        self.broken = False  # a write failed; to be connected anew when the last one has ended


class SendingRooms:
    def __init__(
        self,
        layout: KvLayout,
        settings: TransferSettings,
        ports: Sequence[RankPort],
        *,
        emit: Callable[[TransferEvent], None],
        tell: Callable[[str, ToReceiver], None],
        mend: Callable[[PeerRanks], None],
    ) -> None:
        """``mend``: the ports' endpoint to this receiver has failed, and nothing is on its way over it any more."""
        self._layout = layout
        self._settings = settings
        self._emit = emit
        self._tell = tell
        self._mend = mend
        self._rooms: dict[RoomKey, KVSender] = {}
        self._by_room: dict[int, KVSender] = {}  # those with a leg
        self._ended: OrderedDict[RoomKey, tuple[float, str]] = OrderedDict()  # -> when, and why
        self._receivers: dict[str, _Receiver] = {}
        self._writes = Writes(layout, ports, pages_per_write=settings.pages_per_write)
        self.num_done = 0
        self.num_failed = 0
        self.num_late = 0

    # the engine's orders

    def expect(self, order: SendOrder, now: float) -> None:
        key = (order.room, order.generation)
        if key in self._ended:
            self._emit(SendFailed(room=order.room, reason=self._ended[key][1]))
            self._emit(SendDrained(room=order.room))
            self.num_failed += 1
            return
        room = self._rooms.get(key) or self._new(key)
        self._by_room[order.room] = room
        room.expect(order, now)
        self._sweep(now)

    def send(self, room: int, page_offset: int, pages: PageIds, meta: bytes | None, now: float) -> None:
        """A room that is over ignores it."""
        sender = self._by_room.get(room)
        if sender is None:
            return
        sender.send(page_offset, pages, meta)
        self._writes.want(sender)
        self._sweep(now)

    def abort(self, room: int, reason: str, now: float) -> None:
        if (sender := self._by_room.get(room)) is not None:
            sender.fail(reason)
            self._sweep(now)

    # what the receivers say

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
                self._tell(incarnation, Drained(room=message.room, generation=message.generation))
        elif isinstance(message, Abort):
            self._aborted(incarnation, room)
        elif room.grant is not None:
            room.acked()
        self._sweep(now)

    def _aborted(self, incarnation: str, room: KVSender) -> None:
        if room.grant is None:  # the leg is here, the open is not and will not be
            room.fail("the receiver gave up")
            self._tell(incarnation, Drained(room=room.room, generation=room.generation))
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
            self._tell(
                incarnation, Fail(room=message.room, generation=message.generation, reason=refusal, drained=True)
            )
            if key not in self._ended and key not in self._rooms:
                self._bury(key, refusal, now)
            elif room is not None:
                room.fail(refusal)
            return
        room = room or self._new(key)
        room.opened(
            incarnation,
            message,
            now,
            wait_s=self._settings.open_timeout_s,
            slack_s=self._settings.call_timeout_s,
        )

    def _refusal(self, message: Open, receiver: _Receiver) -> str:
        """Why an open cannot be right, or nothing. Page 0 is everybody's sink."""
        pages = message.pages
        whole = -(-message.num_tokens // self._layout.page_size)
        if message.first_page < 0 or message.first_page + len(pages) > whole:
            return f"pages [{message.first_page}, {message.first_page + len(pages)}) of a sequence of {whole} pages"
        if pages and not (min(pages) > 0 and max(pages) < receiver.num_pages and len(set(pages)) == len(pages)):
            return f"the pages are not distinct pages of a pool of {receiver.num_pages}"
        return ""

    # what happens to them

    def receiver_up(self, ranks: PeerRanks, refusal: str) -> None:
        """It said hello; again after a lost connection, when what is on its way is still in the books."""
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
        self._receivers.pop(incarnation, None)
        self._writes.forget(incarnation)
        self._sweep(now)

    def has_business(self, incarnation: str) -> bool:
        return self._writes.num_to(incarnation) > 0 or bool(self._of(incarnation))

    # what the ports say

    def port_event(self, event: Written | WriteFailed, now: float) -> None:
        room = self._writes.take(event)
        if room is None:
            self.num_late += 1
            return
        receiver = self._receivers[room.incarnation]
        if isinstance(event, Written):
            room.written(event.order_id, now)
        else:
            if not receiver.broken:
                log.warning("a write to %s failed: %s", room.incarnation, event.reason)
            receiver.broken = True
            room.write_failed(event.order_id, event.reason, drained=event.drained)
            for other in self._of(room.incarnation):  # the endpoint is gone: none of them can go on
                other.fail(f"a write to the receiver failed: {event.reason}")
        if receiver.broken and not self._writes.num_to(room.incarnation):
            receiver.broken = False
            self._mend(receiver.ranks)
        self._sweep(now)

    # the loop

    def post_writes(self) -> bool:
        """Writes for each receiver that may have some. Returns whether there was any."""
        posted = self._writes.post()
        for incarnation in posted:
            self._tell(incarnation, Posted())
        return bool(posted)

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

    @property
    def sent_bytes(self) -> int:
        return self._writes.sent_bytes

    @property
    def sent_pages(self) -> int:
        return self._writes.sent_pages

    def take_write_times(self) -> list[WriteTimes]:
        """Of writes that have ended since the last call, of all ranks."""
        times, self._writes.times = self._writes.times, []
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
        room = self._rooms[key] = KVSender(*key, emit=self._emit, tell=self._tell)
        return room

    def _of(self, incarnation: str) -> list[KVSender]:
        return [room for room in self._rooms.values() if room.incarnation == incarnation]

    def _bury(self, key: RoomKey, reason: str, now: float) -> None:
        self._ended[key] = (now, reason)

    def _sweep(self, now: float) -> None:
        """Forget rooms that are over, but for their names."""
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
        self._writes.check()
        assert all(room.order is not None for room in self._by_room.values())
        assert all(room in self._rooms.values() for room in self._by_room.values())
