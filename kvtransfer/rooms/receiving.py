"""The decode side of a transfer service: its rooms, and the quarantine of those that failed.

Owns:      the receivers; which failed rooms the peer may still write to, and since when; what the ports expect.
Never:     touches sockets or pages; asks for a connection, and opens its rooms when there is one. Never releases a
           room from quarantine by time.
Invariant: a room that failed after its open was sent stays in quarantine until the peer sends Drained or its death is
           proven (peers/liveness.py).
Thread:    the transfer thread.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtransfer.layout import KvLayout
from kvtransfer.peers.wire import Ack, Drained, Fail, ToSender
from kvtransfer.ports.rank_port import Arrived, ExpectOrder, RankPort
from kvtransfer.rooms.receiver import KVReceiver
from kvtransfer.rooms.transfer_service import KVPoll
from kvtransfer.types import ReceiveOrder, TransferEvent

RoomKey = tuple[int, int]  # room, generation


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantinedPages:
    """The pages of one failed room that its peer may still write to."""

    incarnation: str
    since_s: float
    num_pages: int


class PageQuarantine:
    """Failed rooms whose pages a peer may still write to, indexed by room and generation; the oldest first."""

    def __init__(self) -> None:
        self._held: dict[RoomKey, QuarantinedPages] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: RoomKey) -> bool:
        return key in self._held

    @property
    def num_pages(self) -> int:
        return sum(held.num_pages for held in self._held.values())

    def hold(self, key: RoomKey, held: QuarantinedPages) -> None:
        assert key not in self._held, f"room {key} is in quarantine already"
        self._held[key] = held

    def release(self, key: RoomKey) -> None:
        del self._held[key]

    def of(self, incarnation: str) -> list[RoomKey]:
        return [key for key, held in self._held.items() if held.incarnation == incarnation]

    def oldest_s(self, now: float) -> float:
        """How long the oldest has waited; 0 when there is none."""
        return max((now - held.since_s for held in self._held.values()), default=0.0)


log = logging.getLogger(__name__)

ACK_AGAIN_S = 60.0  # after the end of a room; a sender waits less
MAX_ACKS = 1000
WARN_S = 30.0  # warn when a room has been in quarantine this long, and again each time it has passed


class ReceivingRooms:
    """All rooms in which one engine receives, indexed by room and generation."""

    def __init__(
        self,
        layout: KvLayout,
        ports: Sequence[RankPort],
        *,
        events: list[TransferEvent],
        send: Callable[[str, ToSender], None],
    ) -> None:
        self._layout = layout
        self._ports = ports
        self._events = events
        self._send = send
        self._rooms: dict[RoomKey, KVReceiver] = {}
        self._by_room: dict[int, KVReceiver] = {}
        self._layouts: dict[str, KvLayout] = {}  # of the peers that are connected
        self._acks: deque[tuple[str, float, Ack]] = deque(maxlen=MAX_ACKS)  # of rooms that ended well
        self.quarantine = PageQuarantine()
        self._warned_s = 0.0
        self.received_pages = 0
        self.received_bytes = 0
        self.num_done = 0
        self.num_failed = 0
        self.num_mismatches = 0
        self.num_late = 0

    # the engine's orders

    def receive(self, order: ReceiveOrder, now: float, *, refusal: str) -> None:
        """``refusal``: why the peer cannot be reached or used, if that is known."""
        key = (order.room, order.generation)
        room = KVReceiver(order, self._layout, now, events=self._events, send=self._send)
        self._rooms[key] = self._by_room[order.room] = room
        if refusal:
            room.fail(refusal)
        elif order.peer.incarnation in self._layouts:
            self._open(room, now)
        self._settle(room, now)

    def abort(self, room: int, now: float) -> None:
        if (receiver := self._by_room.get(room)) is not None:
            receiver.fail("the request is gone")
            self._settle(receiver, now)

    def _open(self, room: KVReceiver, now: float) -> None:
        order = room.order
        for port in self._ports:  # before the peer can write
            port.expect(
                ExpectOrder(
                    room=order.room, generation=order.generation, incarnation=room.incarnation, pages=order.pages
                )
            )
        room.open(self._layouts[room.incarnation], now)

    # reports of the peer table

    def peer_up(self, incarnation: str, layout: KvLayout, now: float) -> None:
        """The peer is connected, maybe again: rooms in quarantine ask for Drained, rooms that wait are opened."""
        self._layouts[incarnation] = layout
        for of, ended_s, ack in self._acks:
            if of == incarnation and now < ended_s + ACK_AGAIN_S:  # the first may have been lost with the connection
                self._send(incarnation, ack)
        for room in self._of(incarnation):
            if room.draining:
                room.ask()
            elif room.state == KVPoll.BOOTSTRAPPING:
                self._open(room, now)

    def peer_down(self, incarnation: str, reason: str, now: float) -> None:
        """The connection was lost or could not be established."""
        self._layouts.pop(incarnation, None)
        for room in self._of(incarnation):
            room.fail(reason)
            self._settle(room, now)

    def peer_dead(self, incarnation: str, reason: str, now: float) -> None:
        """Its processes are gone, and what they sent has landed."""
        self.peer_down(incarnation, reason, now)
        for room in self._of(incarnation):
            room.drained()
            self._settle(room, now)

    def peer_broken(self, incarnation: str, reason: str, now: float) -> None:
        """Its endpoint failed: notes for the rooms that are open now are lost."""
        for room in self._of(incarnation):
            if room.state != KVPoll.BOOTSTRAPPING:
                room.fail(reason)
                self._settle(room, now)

    def has_business(self, incarnation: str) -> bool:
        return any(True for _ in self._of(incarnation))

    # reports of the peers and the ports

    def heard(self, incarnation: str, message: Fail | Drained, now: float) -> None:
        room = self._rooms.get((message.room, message.generation))
        if room is None or room.incarnation != incarnation or room.state == KVPoll.BOOTSTRAPPING:
            self.num_late += 1
            return
        if isinstance(message, Fail):
            if room.draining:
                if message.drained:  # it gave up by itself, before it read our abort
                    room.drained()
            else:
                room.fail(message.reason, drained=message.drained)
        elif room.draining:
            room.drained()
        else:
            room.fail("the peer dropped the room", drained=True)
        self._settle(room, now)

    def arrived(self, rank: int, event: Arrived, now: float) -> None:
        room = self._rooms.get((event.room, event.generation))
        if (
            room is None
            or room.incarnation != event.incarnation
            or room.state not in (KVPoll.WAITING_FOR_INPUT, KVPoll.TRANSFERRING)
        ):
            self.num_late += 1
            return
        for page in event.bad_pages:
            log.error("room %d: page %d has a wrong digest after its transfer to rank %d", event.room, page, rank)
        self.num_mismatches += len(event.bad_pages)
        room.arrived(rank, event, now)
        if room.received:
            self.received_pages += room.num_pages
            self.received_bytes += room.num_bytes
        self._settle(room, now)

    # the loop

    def expire(self, now: float) -> None:
        for room in list(self._rooms.values()):
            room.expire(now)
            self._settle(room, now)
        if (oldest_s := self.quarantine.oldest_s(now)) >= WARN_S and now >= self._warned_s + WARN_S:
            self._warned_s = now
            log.warning(
                "%d pages of %d rooms are in quarantine, the oldest for %.0f s: a prefill replica hangs or cannot be "
                "reached; its pages come back when it answers or when its process has ended",
                self.quarantine.num_pages,
                len(self.quarantine),
                oldest_s,
            )

    def fail_all(self, reason: str, now: float) -> None:
        for room in list(self._rooms.values()):
            room.fail(reason)
            self._settle(room, now)

    @property
    def next_s(self) -> float:
        """The next deadline."""
        return min((room.deadline_s for room in self._rooms.values() if not room.draining), default=float("inf"))

    @property
    def num_rooms(self) -> int:
        return len(self._rooms)

    def _of(self, incarnation: str) -> list[KVReceiver]:
        return [room for room in self._rooms.values() if room.incarnation == incarnation]

    def _settle(self, room: KVReceiver, now: float) -> None:
        """Update the books after ``room`` may have changed its state."""
        if room.state not in (KVPoll.FAILED, KVPoll.SUCCESS):
            return
        key = (room.order.room, room.order.generation)
        held = key in self.quarantine
        if not held:
            self.num_done += room.state == KVPoll.SUCCESS
            self.num_failed += room.state == KVPoll.FAILED
            for port in self._ports:
                port.forget(*key)
        if room.draining and not held:
            held_pages = QuarantinedPages(incarnation=room.incarnation, since_s=now, num_pages=len(room.order.pages))
            self.quarantine.hold(key, held_pages)
        if room.received:
            self._acks.append((room.incarnation, now, Ack(room=key[0], generation=key[1])))
        if room.over:
            if held:
                self.quarantine.release(key)
            del self._rooms[key]
            del self._by_room[room.order.room]

    def check(self) -> None:
        for key, room in self._rooms.items():
            room.check()
            assert not room.over, f"room {key} is over and still in the books"
            assert room.draining == (key in self.quarantine), f"room {key}: {room.state.name}"
            assert self._by_room[room.order.room] is room
        assert len(self._by_room) == len(self._rooms)
        assert len(self.quarantine) == sum(room.draining for room in self._rooms.values())
