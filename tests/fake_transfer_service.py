"""Transfer services without threads, sockets or bytes: they copy slots between FakeDevices, on request.

What is due waits, room by room, until `FakeWire.pump`; a test decides what happens next, and what fails. Writes that
were posted before their room failed still happen, with garbage: pages that were reused too early show at once.
"""

import collections
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

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
    TransferStats,
    WriteTimes,
)
from tests.fakes import FakeDevice

GARBAGE = -9  # what a late write leaves behind
PAGE_BYTES = 100


@dataclass(slots=True, eq=False)
class FakeRoom:
    """What both transfer services did about one room."""

    number: int
    receiver: "FakeTransferService | None" = None
    order: ReceiveOrder | None = None
    sender: "FakeTransferService | None" = None
    ready: bool = False  # SendReady is out
    next_page: int = 0  # of the sequence; what the sender has to go on with
    arrived: int = 0  # pages
    failed: str | None = None
    receiver_over: bool = False  # its last event is out, or only ReceiveDrained is missing
    sender_over: bool = False
    due: collections.deque[Callable[[], None]] = field(default_factory=collections.deque)


class FakeWire:
    """Joins transfer services. ``muted`` rooms never answer."""

    def __init__(self) -> None:
        self.services: list[FakeTransferService] = []
        self.rooms: dict[int, FakeRoom] = {}
        self.muted: set[int] = set()
        self.draining = True  # False: no side reports that a failed room's writes are over

    def join(self, device: FakeDevice, *, page_size: int) -> "FakeTransferService":
        service = FakeTransferService(self, device, page_size, name=f"service{len(self.services)}")
        self.services.append(service)
        return service

    @property
    def num_due(self) -> int:
        return sum(len(room.due) for room in self._live())

    def pump(self, count: int | None = None, *, pick: int = 0) -> None:
        """Do ``count`` due things (all by default), each of the ``pick``-th room that has any."""
        while count is None or count > 0:
            live = self._live()
            if not live:
                return
            live[pick % len(live)].due.popleft()()
            count = None if count is None else count - 1

    def room(self, number: int) -> FakeRoom:
        return self.rooms.setdefault(number, FakeRoom(number))

    def fail(self, number: int, reason: str = "the wire broke") -> None:
        """Fail both sides that have not ended well, and later report that nothing is under way."""
        room = self.room(number)
        if room.failed is not None:
            return
        room.failed = reason
        if room.receiver is not None and not room.receiver_over:
            room.receiver_over = True
            room.receiver.emit(ReceiveFailed(room=number, reason=reason))
            room.due.append(lambda: self._drained(room, room.receiver, ReceiveDrained(room=number)))
        if room.sender is not None and not room.sender_over:
            room.sender_over = True
            room.sender.emit(SendFailed(room=number, reason=reason))
            room.due.append(lambda: self._drained(room, room.sender, SendDrained(room=number)))

    def expire(self) -> None:
        """Fail the rooms to which only one side came, as the real services' open_timeout_s and room_timeout_s do."""
        for room in self.rooms.values():
            if (room.sender is None) != (room.receiver is None):
                self.fail(room.number, "the other side did not come in time")

    def _live(self) -> list[FakeRoom]:
        return [room for room in self.rooms.values() if room.due and room.number not in self.muted]

    def _drained(self, room: FakeRoom, service: "FakeTransferService | None", event: TransferEvent) -> None:
        assert service is not None
        if self.draining:
            service.emit(event)
        else:
            room.due.append(lambda: self._drained(room, service, event))
            self.muted.add(room.number)

    def resume_draining(self) -> None:
        self.draining = True
        self.muted.clear()


class FakeTransferService:
    """Implements TransferService; one side's view of a FakeWire."""

    def __init__(
        self, wire: FakeWire, device: FakeDevice, page_size: int, *, name: str
    ) -> None:
        self.address = PeerAddress(host="fake", port=0, incarnation=name)
        self.device = device
        self.wire = wire
        self.free_pages: Callable[[], set[int]] = set  # of its pool: nothing may be read from or written to these
        self.shared_pages: Callable[[], set[int]] = set  # of its prefix cache: nothing may be written to these
        self.on_event: Callable[[], None] = lambda: None
        self.holds_back = False
        self.closed = False
        self.error: BaseException | None = None
        self._page_size = page_size
        self._events: list[TransferEvent] = []
        self.write_times: list[WriteTimes] = []  # a test's to fill

    def receive(self, order: ReceiveOrder) -> None:
        room = self.wire.room(order.room)
        assert room.receiver is None, "a room is opened twice"
        room.receiver, room.order = self, order
        if order.prefix is not None:  # a fetch: no leg comes
            room.sender = next(service for service in self.wire.services if service.address == order.peer)
        self._meet(room)

    def abort_receive(self, room: int) -> None:
        assert self.wire.room(room).receiver is self
        if not self.wire.room(room).receiver_over:
            self.wire.fail(room, "the receiver gave up")

    def expect_send(self, order: SendOrder) -> None:
        room = self.wire.room(order.room)
        assert room.sender is None, "a room is expected twice"
        room.sender = self
        self._meet(room)

    def send_pages(self, room: int, page_offset: int, pages: PageIds) -> None:
        assert len(pages), "an empty send"
        self._send(self.wire.room(room), page_offset, pages, None)

    def send_last(self, room: int, page_offset: int, pages: PageIds, meta: KVTransferMeta) -> None:
        self._send(self.wire.room(room), page_offset, pages, meta)

    def abort_send(self, room: int, reason: str) -> None:
        assert self.wire.room(room).sender is self
        if not self.wire.room(room).sender_over:
            self.wire.fail(room, reason)

    def peer_is_dead(self, incarnation: str) -> None:
        """Rooms here end when the wire says so."""

    def out_of_reach(self) -> tuple[PeerAddress, ...]:
        return ()

    def drain_events(self) -> list[TransferEvent]:
        events, self._events = self._events, []
        return events

    def waits(self, kind: type[TransferEvent]) -> bool:
        """Whether such an event has not been taken yet."""
        return any(isinstance(event, kind) for event in self._events)

    def change(self, **changes: Any) -> None:
        """Change fields of the one event that has not been taken yet, or of its meta."""
        (event,) = self._events
        meta = {} if not isinstance(event, Received) else {"meta": replace(event.meta, **changes)}
        self._events = [replace(event, **(meta or changes))]

    def stats(self) -> TransferStats:
        return TransferStats()

    def drain_write_times(self) -> list[WriteTimes]:
        times, self.write_times = self.write_times, []
        return times

    def close(self) -> None:
        self.closed = True

    def emit(self, event: TransferEvent) -> None:
        self._events.append(event)
        self.on_event()

    def _meet(self, room: FakeRoom) -> None:
        """Once both are here the sender is ready; a side that comes to a failed room fails at once."""
        if room.failed is not None:
            reason, room.failed = room.failed, None
            self.wire.fail(room.number, reason)
        elif room.sender is not None and room.order is not None:
            room.due.append(lambda: self._ready(room))

    @staticmethod
    def _ready(room: FakeRoom) -> None:
        if room.failed is None and room.sender is not None and room.order is not None:
            room.ready, room.next_page = True, room.order.first_page
            room.sender.emit(
                SendReady(room=room.number, first_page=room.order.first_page, prefix=room.order.prefix)
            )

    def _send(self, room: FakeRoom, page_offset: int, pages: PageIds, meta: KVTransferMeta | None) -> None:
        assert room.sender is self
        if room.failed is not None:
            return
        assert room.ready, "pages before SendReady"
        assert page_offset == room.next_page, f"pages from {page_offset} on, not {room.next_page}: a hole"
        room.next_page += len(pages)
        slots = self._slots(pages)
        content = (self.device.tokens[slots].copy(), self.device.positions[slots].copy())
        assert (content[1][: self._page_size] >= 0).all() or meta is not None, "a page was sent before it was computed"
        room.due.append(lambda: self._write(room, page_offset, slots, content, meta))

    def _write(
        self,
        room: FakeRoom,
        page_offset: int,
        source: np.ndarray,
        content: tuple[np.ndarray, np.ndarray],
        meta: KVTransferMeta | None,
    ) -> None:
        assert room.order is not None
        assert room.receiver is not None
        positions = self.device.positions[source]
        assert np.array_equal(self.device.tokens[source], content[0]), "a page changed while it was being sent"
        assert np.array_equal(positions, content[1]), "a page changed while it was being sent"
        first = page_offset - room.order.first_page
        pages = room.order.pages[first : first + len(source) // self._page_size]
        target, receiver = self._slots(pages), room.receiver
        assert not self.free_pages() & set((source // self._page_size).tolist()), "a page that is sent is free"
        assert not receiver.free_pages() & set(pages.tolist()), "a page that is written to is free"
        assert not receiver.shared_pages() & set(pages.tolist()), "a page that is written to is in the prefix cache"
        device = receiver.device
        device.tokens[target] = content[0] if room.failed is None else GARBAGE
        device.positions[target] = content[1] if room.failed is None else GARBAGE
        room.arrived += len(source) // self._page_size
        if meta is not None and room.failed is None:
            self._complete(room, meta)

    def _complete(self, room: FakeRoom, meta: KVTransferMeta) -> None:
        assert room.order is not None
        assert room.receiver is not None
        first, end = meta.token_range
        short = room.order.prefix is not None and end == first + room.arrived * self._page_size
        assert short or room.arrived == len(room.order.pages), "the last write came before all pages"
        room.receiver_over = True
        num_bytes = room.arrived * PAGE_BYTES
        room.receiver.emit(Received(room=room.number, meta=meta, transfer_s=0.25, num_bytes=num_bytes))
        room.due.append(lambda: self._confirm(room))

    def _confirm(self, room: FakeRoom) -> None:
        if not room.sender_over:
            room.sender_over = True
            self.emit(SendDone(room=room.number))

    def _slots(self, pages: Sequence[int] | PageIds) -> np.ndarray:
        ids = np.asarray(pages, dtype=np.int64)
        return (ids[:, None] * self._page_size + np.arange(self._page_size)).reshape(-1)
