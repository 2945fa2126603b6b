"""One room on the decode side.

Owns:      which ranks of the peer have written which pages; the room's deadline, which every page restarts.
Never:     knows sockets, ports or time: `ReceivingRooms` (receiving.py) reports what happened. Never looks at K/V
           bytes: a port has verified what it reports.
Invariant: Received only when every page came from every rank of the peer that has a part of it, all digests were good
           and the meta fits. ReceiveDrained only when the peer sent Drained, is dead, or never got the open.
Thread:    the transfer thread.

    open ─> arrived ... arrived(last, meta) ─> Received, Ack
    any failure ─> ReceiveFailed, Abort ─> Drained from the peer, or its death ─> ReceiveDrained
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from kvtransfer.errors import BadMessage
from kvtransfer.layout import KvLayout, head_slices
from kvtransfer.peers.wire import Abort, Ack, Open, ToSender, decode_meta
from kvtransfer.ports.rank_port import Arrived
from kvtransfer.rooms.transfer_service import KVPoll, move
from kvtransfer.types import KVTransferMeta, Received, ReceiveDrained, ReceiveFailed, ReceiveOrder, TransferEvent


class _Part:
    """The pages that one rank of the peer writes into one of our pools."""

    def __init__(self, num_pages: int) -> None:
        self.seen: npt.NDArray[np.bool_] = np.zeros(num_pages, dtype=np.bool_)  # [n]
        self.last = False

    def has(self, num_pages: int) -> bool:
        """Whether the first ``num_pages`` have come, and nothing will follow."""
        return self.last and bool(self.seen[:num_pages].all())


class KVReceiver:
    """One room of a decode engine, made by the engine's order."""

    def __init__(
        self,
        order: ReceiveOrder,
        layout: KvLayout,
        now: float,
        *,
        events: list[TransferEvent],
        send: Callable[[str, ToSender], None],
    ) -> None:
        self.order = order
        self.state = KVPoll.BOOTSTRAPPING
        self.deadline_s = now + order.deadline_s
        self._limit_s = order.deadline_s  # without a page; the peer gets it in Open, and waits a little longer
        self.over = False  # its last event is emitted
        self._layout = layout
        self._events = events
        self._send = send
        self._parts: dict[tuple[int, int], _Part] = {}  # by (rank here, rank of the peer)
        self._meta: KVTransferMeta | None = None
        self._first_s = 0.0
        self.num_pages = len(order.pages)  # that are to come; of a fetch, fewer if the donor says so
        self.num_bytes = 0  # that have arrived, of all ranks

    @property
    def incarnation(self) -> str:
        return self.order.peer.incarnation

    @property
    def received(self) -> bool:
        return self.state == KVPoll.SUCCESS

    @property
    def draining(self) -> bool:
        return self.state == KVPoll.FAILED and not self.over

    def open(self, theirs: KvLayout, now: float) -> None:
        """The peer is connected: send it the pages to write to."""
        self.state = move(self.state, KVPoll.WAITING_FOR_INPUT)
        self._limit_s = max(self.deadline_s - now, 0.0)
        ours = self._layout
        self._parts = {
            (rank, src_rank): _Part(len(self.order.pages))
            for rank in range(ours.tp)
            for src_rank in range(theirs.tp)
            if head_slices(replace(ours, tp=theirs.tp), src_rank, ours, rank)
        }
        self._send(
            self.incarnation,
            Open(
                room=self.order.room,
                generation=self.order.generation,
                num_tokens=self.order.num_tokens,
                first_page=self.order.first_page,
                pages=tuple(self.order.pages.tolist()),
                deadline_s=self._limit_s,
                prefix=self.order.prefix,
            ),
        )

    def arrived(self, rank: int, event: Arrived, now: float) -> None:
        """Book pages that came to our rank ``rank``; only for a room that is open."""
        assert self.state in (KVPoll.WAITING_FOR_INPUT, KVPoll.TRANSFERRING)
        if self.state == KVPoll.WAITING_FOR_INPUT:
            self.state = move(self.state, KVPoll.TRANSFERRING)
            self._first_s = now
        if event.bad_pages:
            self.fail(f"the digests of {len(event.bad_pages)} pages are wrong", bad_pages=event.bad_pages)
            return
        if wrong := self._take(rank, event):
            self.fail(wrong)
            return
        if event.num_pages and self.order.prefix is None:  # no page comes twice, so this ends
            self.deadline_s = now + self._limit_s
        if self._meta is not None and all(part.has(self.num_pages) for part in self._parts.values()):
            self._complete(self._meta, now)

    def _take(self, rank: int, event: Arrived) -> str:
        """Book the pages. Returns: what is wrong with them, or an empty string."""
        part = self._parts.get((rank, event.src_rank))
        end = event.page_offset + event.num_pages
        if part is None or not 0 <= event.page_offset <= end <= len(part.seen):
            return f"rank {event.src_rank} of the peer wrote pages [{event.page_offset}, {end}), which are not its own"
        if part.seen[event.page_offset : end].any():
            return f"rank {event.src_rank} of the peer wrote pages [{event.page_offset}, {end}) twice"
        part.seen[event.page_offset : end] = True
        part.last = part.last or event.last
        self.num_bytes += event.num_bytes
        if event.last and event.src_rank == 0 and self._meta is None:
            return self._take_meta(event.meta)
        return ""

    def _take_meta(self, data: bytes) -> str:
        try:
            meta = decode_meta(data)
        except BadMessage as error:
            return f"the meta cannot be read: {error}"
        if meta.fingerprint != self._layout.fingerprint:
            return f"the pages have the layout {meta.fingerprint}, {self._layout.fingerprint} is wanted"
        first = self.order.first_page * self._layout.page_size
        if meta.prompt_len != self.order.num_tokens or meta.token_range[0] != first:
            return (
                f"tokens [{meta.token_range[0]}, {meta.prompt_len}) came, [{first}, {self.order.num_tokens}) are wanted"
            )
        if self.order.prefix is not None:
            end, size = meta.token_range[1], self._layout.page_size
            num_pages, odd = divmod(end - first, size)
            if odd or num_pages < 0 or end > self.order.num_tokens:
                return f"tokens {meta.token_range} came, whole pages of [{first}, {self.order.num_tokens}) are wanted"
            self.num_pages = num_pages + self._layout.carried.num_pages(end, size)
        self._meta = meta
        return ""

    def _complete(self, meta: KVTransferMeta, now: float) -> None:
        self.state = move(self.state, KVPoll.SUCCESS)
        self.over = True
        self._events.append(
            Received(
                room=self.order.room, meta=meta, transfer_s=max(now - self._first_s, 0.0), num_bytes=self.num_bytes
            )
        )
        self._send(self.incarnation, Ack(room=self.order.room, generation=self.order.generation))

    def fail(self, reason: str, *, bad_pages: tuple[int, ...] = (), drained: bool = False) -> None:
        """Give up. ``drained``: the peer's Fail said that none of its writes is in flight."""
        if self.state in (KVPoll.FAILED, KVPoll.SUCCESS):
            return
        opened = self.state != KVPoll.BOOTSTRAPPING
        self.state = move(self.state, KVPoll.FAILED)
        self._events.append(
            ReceiveFailed(room=self.order.room, reason=reason, bad_pages=bad_pages, num_bytes=self.num_bytes)
        )
        if drained or not opened:
            self.drained()
        else:
            self.ask()

    def ask(self) -> None:
        """Ask the peer for Drained; again after each reconnection."""
        self._send(self.incarnation, Abort(room=self.order.room, generation=self.order.generation))

    def drained(self) -> None:
        assert self.draining
        self.over = True
        self._events.append(ReceiveDrained(room=self.order.room))

    def expire(self, now: float) -> None:
        if now < self.deadline_s or self.state in (KVPoll.FAILED, KVPoll.SUCCESS):
            return
        at = self.state.name.lower().replace("_", " ")
        if self.state == KVPoll.TRANSFERRING:
            self.fail(f"no page came for {self._limit_s:g} s (it was {at})")
        else:
            self.fail(f"the pages did not come within {self.order.deadline_s:g} s (it was {at})")

    def check(self) -> None:
        assert self.over <= (self.state in (KVPoll.FAILED, KVPoll.SUCCESS))
        assert self.state != KVPoll.SUCCESS or all(part.has(self.num_pages) for part in self._parts.values())
