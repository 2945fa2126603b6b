"""Which pages are written next, and which writes are on their way: the books between rooms and ports.

Owns:      the write orders that have not ended; the turns of the rooms of each receiver.
Never:     decides what becomes of a room; copies nothing.
Invariant: an order is in the books until its port has said how it ended, or its receiver is dead.
Thread:    the transfer thread.

Rooms of a receiver take turns, a write each; receivers do too. At most MAX_WRITES are on their way to a receiver, so
that one that hangs holds up nobody else.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtransfer.layout import KvLayout
from kvtransfer.ports.rank_port import RankPort, WriteFailed, WriteOrder, Written
from kvtransfer.replay import observe
from kvtransfer.rooms.sender import KVSender
from kvtransfer.types import WriteTimes

MAX_WRITES = 2  # on their way to one receiver: the next is posted while the last one ends


@dataclass(frozen=True, slots=True, kw_only=True)
class _Order:
    room: KVSender
    rank: int
    num_pages: int
    posted_s: float  # real time, for who observes


@dataclass(slots=True)
class _Lane:
    """To one receiver."""

    turns: deque[KVSender] = field(default_factory=deque)  # rooms with something to write
    orders: set[int] = field(default_factory=set)  # on their way


class Writes:
    def __init__(self, layout: KvLayout, ports: Sequence[RankPort], *, pages_per_write: int) -> None:
        self.sent_bytes = 0
        self.sent_pages = 0
        self.times: list[WriteTimes] = []  # of writes that have ended, until the transfer service takes them
        self._layout = layout
        self._ports = ports
        self._pages_per_write = pages_per_write
        self._lanes: dict[str, _Lane] = {}  # by incarnation
        self._orders: dict[int, _Order] = {}
        self._next_order = 1

    def want(self, room: KVSender) -> None:
        """The room may have something to write now."""
        lane = self._lanes.setdefault(room.incarnation, _Lane())
        if room.has_write and room not in lane.turns:
            lane.turns.append(room)

    def post(self) -> set[str]:
        """Writes for each receiver that may have some, one at a time in turn; the digests of the second are made while
        the first is copied. Returns: those that have got one."""
        posted: set[str] = set()
        for _ in range(MAX_WRITES):
            posted |= {incarnation for incarnation, lane in self._lanes.items() if self._post_next(lane)}
        return posted

    def _post_next(self, lane: _Lane) -> bool:
        while lane.turns and not lane.turns[0].has_write:
            lane.turns.popleft()
        if not lane.turns or len(lane.orders) >= MAX_WRITES * len(self._ports):
            return False
        room = lane.turns.popleft()
        self._post(room, lane)
        if room.has_write:
            lane.turns.append(room)
        return True

    def _post(self, room: KVSender, lane: _Lane) -> None:
        write = room.take_write(self._pages_per_write)
        for rank, port in enumerate(self._ports):
            order_id = self._next_order
            self._next_order += 1
            self._orders[order_id] = _Order(room=room, rank=rank, num_pages=len(write.src), posted_s=time.monotonic())
            lane.orders.add(order_id)
            room.posted(order_id)
            port.write(
                WriteOrder(
                    order_id=order_id,
                    incarnation=room.incarnation,
                    room=room.room,
                    generation=room.generation,
                    page_offset=write.page_offset,
                    src_pages=write.src,
                    dst_pages=write.dst,
                    last=write.last,
                    meta=write.meta if rank == 0 else b"",
                )
            )

    def take(self, event: Written | WriteFailed) -> KVSender | None:
        """Book what a port says. Returns: the room, or None for an order that is not known any more."""
        order = self._orders.get(event.order_id)
        if order is None:
            return None
        if isinstance(event, Written):
            self.sent_bytes += event.num_bytes
            self.times += event.times
            self.sent_pages += order.num_pages if order.rank == 0 else 0
            self._observe(order, event.num_bytes)
        if isinstance(event, Written) or event.drained:
            del self._orders[event.order_id]
            self._lanes[order.room.incarnation].orders.discard(event.order_id)
        return order.room

    def forget(self, incarnation: str) -> None:
        """It is dead: nothing reads for it any more."""
        if (lane := self._lanes.pop(incarnation, None)) is not None:
            for order_id in lane.orders:
                del self._orders[order_id]

    def num_to(self, incarnation: str) -> int:
        """Orders on their way to it."""
        lane = self._lanes.get(incarnation)
        return len(lane.orders) if lane is not None else 0

    def _observe(self, order: _Order, num_bytes: int) -> None:
        """The record of a write, if somebody looks (SPEC J02)."""
        if not observe.enabled() or order.room.order is None:
            return
        observe.transfer_submit(
            rid=order.room.order.rid,
            room=order.room.room,
            rank=order.rank,
            device=self._ports[order.rank].info.device,
            dtype=self._layout.dtype,
            buffers_bytes=[num_bytes // order.num_pages] * order.num_pages if order.num_pages else [],
            latency_s=time.monotonic() - order.posted_s,
        )

    def check(self) -> None:
        assert set().union(*(lane.orders for lane in self._lanes.values())) == set(self._orders)
        for order_id, order in self._orders.items():
            assert not order.room.over, f"order {order_id} of a room that is over"
            assert order_id in self._lanes[order.room.incarnation].orders
