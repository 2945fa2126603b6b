"""One room on the prefill side.

Owns:      the pages that the engine gave and that are not yet posted; which writes are in flight; whether the receiver
           still waits for Drained.
Never:     knows sockets, ports or time: `SendingRooms` (sending.py) reports what happened, and posts what it takes.
Invariant: SendDrained or SendDone are emitted only when no write is in flight; no write is taken after FAILED.
Thread:    the transfer thread.

    expect (the leg) ─┐
                      ├─> SendReady ─> send ... send(meta) ─> take_write ... ─> acked, all written ─> SendDone
    opened (Open)   ──┘                                 any failure ─> SendFailed ─> all written or dead ─> SendDrained
"""

from collections.abc import Callable

import numpy as np

from kvtransfer.peers.wire import Drained, Fail, Open, ToReceiver
from kvtransfer.ports.rank_port import WriteOrder
from kvtransfer.rooms.transfer_service import KVPoll, move
from kvtransfer.types import PageIds, SendDone, SendDrained, SendFailed, SendOrder, SendReady, TransferEvent

NO_PAGES: PageIds = np.empty(0, dtype=np.int32)


class KVSender:
    """One room of a prefill engine, made by the prefill leg or by the receiver's open, whichever is first."""

    def __init__(
        self, room: int, generation: int, *, events: list[TransferEvent], send: Callable[[str, ToReceiver], None]
    ) -> None:
        """``events``: for the engine; ``send``: a message to the receiver with this incarnation."""
        self._key = (room, generation)
        self.state = KVPoll.BOOTSTRAPPING
        self.order: SendOrder | None = None
        self.grant: Open | None = None
        self.incarnation = ""  # of the receiver
        self.deadline_s = float("inf")
        self.reason = ""  # why it failed
        self.over = False  # its last event is emitted
        self._events = events
        self._send = send
        self._slack_s = 0.0
        self._unsent = NO_PAGES
        self._num_taken = 0  # pages
        self._meta: bytes | None = None
        self._last_taken = False
        self._acked = False
        self._owes_drained = False  # the receiver waits for Drained
        self._in_flight: set[int] = set()  # order ids

    @property
    def room(self) -> int:
        return self._key[0]

    @property
    def generation(self) -> int:
        return self._key[1]

    def expect(self, order: SendOrder, now: float) -> None:
        """The prefill leg has arrived."""
        assert self.order is None
        self.order = order
        self.deadline_s = now + order.deadline_s
        self._begin(now)

    def opened(self, incarnation: str, grant: Open, now: float, *, wait_s: float, slack_s: float) -> None:
        """The receiver has opened the room. ``wait_s``: for the leg; ``slack_s``: how long after its own deadline the
        receiver may stay silent."""
        assert self.grant is None
        self.incarnation = incarnation
        self.grant = grant
        self._slack_s = slack_s
        self.deadline_s = now + wait_s
        self._begin(now)

    def _begin(self, now: float) -> None:
        if self.order is None or self.grant is None:
            return
        self.deadline_s = now + self.grant.deadline_s + self._slack_s
        if self.order.num_tokens != self.grant.num_tokens:
            self.fail(
                f"the prefill leg has {self.order.num_tokens} tokens and the decode leg {self.grant.num_tokens}: "
                "send the same request to both"
            )
            return
        self.state = move(self.state, KVPoll.WAITING_FOR_INPUT)
        self._events.append(SendReady(room=self.room, first_page=self.grant.first_page, prefix=self.grant.prefix))

    def send(self, page_offset: int, pages: PageIds, meta: bytes | None = None) -> None:
        """Pages [page_offset, page_offset + n) of the sequence are ready; with ``meta``, they are the last."""
        if self.state == KVPoll.FAILED:
            return
        if wrong := self._what_is_wrong(page_offset, pages, meta is not None):
            self.fail(f"the prefill engine gave {wrong}")
            return
        if self.state == KVPoll.WAITING_FOR_INPUT:
            self.state = move(self.state, KVPoll.TRANSFERRING)
        self._unsent = np.concatenate((self._unsent, pages))
        self._meta = meta

    def _what_is_wrong(self, page_offset: int, pages: PageIds, last: bool) -> str:
        if self.grant is None or self.state not in (KVPoll.WAITING_FOR_INPUT, KVPoll.TRANSFERRING):
            return "pages before SendReady"
        if self._meta is not None:
            return "pages after the last"
        given, granted = self._num_taken + len(self._unsent), len(self.grant.pages)
        if page_offset != self.grant.first_page + given:
            return f"pages from {page_offset} on, {self.grant.first_page + given} comes next"
        short = last and given + len(pages) < granted and self.grant.prefix is None  # what has left a cache is not sent
        if given + len(pages) > granted or short:
            return f"{given + len(pages)} pages, the receiver granted {granted}"
        return ""

    @property
    def is_fetch(self) -> bool:
        return self.grant is not None and self.grant.prefix is not None

    @property
    def has_write(self) -> bool:
        return self.state == KVPoll.TRANSFERRING and (
            len(self._unsent) > 0 or (self._meta is not None and not self._last_taken)
        )

    def take_write(self, order_id: int, max_pages: int) -> WriteOrder:
        """The next write, which the caller hands to every rank; it is in flight from now on."""
        assert self.has_write
        assert self.grant is not None
        src, self._unsent = self._unsent[:max_pages], self._unsent[max_pages:]
        start = self._num_taken
        self._num_taken += len(src)
        self._last_taken = self._meta is not None and not len(self._unsent)
        self._in_flight.add(order_id)
        return WriteOrder(
            order_id=order_id,
            incarnation=self.incarnation,
            room=self.room,
            generation=self.generation,
            page_offset=start,
            src_pages=src,
            dst_pages=np.array(self.grant.pages[start : start + len(src)], dtype=np.int32),
            last=self._last_taken,
            meta=(self._meta or b"") if self._last_taken else b"",
        )

    def written(self, order_id: int, now: float) -> None:
        """The write has ended on every rank; also the late good end of one that was reported as failed."""
        self._in_flight.discard(order_id)
        if self.grant is not None and self.state != KVPoll.FAILED:  # the receiver's deadline moves on with every page
            self.deadline_s = now + self.grant.deadline_s + self._slack_s
        self._settle()

    def write_failed(self, order_id: int, reason: str, *, drained: bool) -> None:
        if drained:
            self._in_flight.discard(order_id)
        self.fail(f"a write to the receiver failed: {reason}")
        self._settle()

    def acked(self) -> None:
        """The receiver has verified everything; its message may overtake the end of the last write."""
        if self.state == KVPoll.TRANSFERRING and self._last_taken:
            self._acked = True
            self._settle()
        else:
            self.fail("the receiver acknowledged pages that were not sent")

    def aborted(self) -> None:
        """The receiver gave up, and waits for Drained. Idempotent."""
        self._owes_drained = True
        self._fail("the receiver gave up")
        self._settle()

    def await_ack(self, until_s: float) -> bool:
        """The connection is lost: if only the acknowledgement is missing, wait for it, since the receiver repeats it
        when it is connected again. Returns: whether that is so; otherwise the room is `lost`."""
        if self.state != KVPoll.TRANSFERRING or not self._last_taken or self._in_flight:
            return False
        self.deadline_s = min(self.deadline_s, until_s)
        return True

    def lost(self, reason: str) -> None:
        """The connection is lost: fail. The receiver fails the room too, and sends Abort when it is connected again."""
        self._fail(reason)
        self._settle()

    def dead(self, reason: str) -> None:
        """The receiver's process is gone, and with it every write in flight to it."""
        self._in_flight.clear()
        self.lost(reason)

    def fail(self, reason: str) -> None:
        """Give up, and send the receiver a Fail."""
        if self.state in (KVPoll.FAILED, KVPoll.SUCCESS):
            return
        self._fail(reason)
        if self.grant is not None:
            drained = not self._in_flight
            self._owes_drained = not drained
            self._send(
                self.incarnation, Fail(room=self.room, generation=self.generation, reason=reason, drained=drained)
            )
        self._settle()

    def _fail(self, reason: str) -> None:
        if self.state in (KVPoll.FAILED, KVPoll.SUCCESS):
            return
        self.state = move(self.state, KVPoll.FAILED)
        self.reason = reason
        self.deadline_s = float("inf")
        self._unsent = NO_PAGES
        if self.order is not None:
            self._events.append(SendFailed(room=self.room, reason=reason))

    def _settle(self) -> None:
        if self._in_flight or self.over:
            return
        if self.state == KVPoll.FAILED:
            self.over = True
            if self._owes_drained:
                self._send(self.incarnation, Drained(room=self.room, generation=self.generation))
            if self.order is not None:
                self._events.append(SendDrained(room=self.room))
        elif self._acked:
            self.state = move(self.state, KVPoll.SUCCESS)
            self.over = True
            self._events.append(SendDone(room=self.room))

    def expire(self, now: float) -> None:
        if now < self.deadline_s:
            return
        if self.grant is None:
            self.fail("the receiver did not open the room in time")
        elif self.order is None:
            self.fail("the request did not reach the prefill replica in time")
        else:
            self.fail("the receiver neither acknowledged nor aborted by its deadline")

    def check(self) -> None:
        assert not (self.over and self._in_flight), f"room {self.room} is over with writes in flight"
        assert self.over <= (self.state in (KVPoll.FAILED, KVPoll.SUCCESS))
        assert self.grant is None or self._num_taken + len(self._unsent) <= len(self.grant.pages)
        assert self.state != KVPoll.FAILED or not self.has_write
