"""The roles of an engine in KV transfers, their terms, and the rooms each keeps. The prefill role computes the K/V of
a prompt, sends it chunk by chunk, and frees it when it has arrived. The decode role takes over a prompt that another
replica computes, or computes it after all.

Owns:      which rooms each role has open, from the request's arrival to the room's last event, and which request each
           belongs to; siblings that wait.
Never:     moves bytes (kvtransfer/) or decides which request runs, or gets memory (scheduler/).
Invariant: a room stays until its last event, which frees what its request left in quarantine.
           Prefill: a page that was given to the service stays locked or pinned until then: its request is never
           retracted, and if it ends early its pages go to quarantine. Before the last chunk only whole, computed,
           committed pages are sent: those are final, and commit no longer swaps them.
           Decode: pages of a room are not read before `Received`, and freed only after the room's last event.
           Recurrent states behind the prompt's last token, or the windows at its end, go in pages behind its own
           (`kv.handed_len`), which either side holds as it holds the others, and frees when they are copied out or the
           room is over.
Thread:    engine thread only.

Prefill

    submit        parked, WAITING; service.expect_send ── SendReady(first_page) ──> WaitingQueue
    admitted      PREFILLING; cached pages from first_page on are sent before the forward
    each chunk    its whole pages are sent
    last chunk    HANDING_OFF; the rest, what is carried, and the meta with the first token: service.send_last
    SendDone      pages go, the prefix stays in the cache; ends with HANDED_OFF

    SendFailed    at any time: ends with ERROR at once, pages stay in quarantine ── SendDrained ──> free
    abort, deadline, broken logits: ends at once; service.abort_send, quarantine ── SendDrained, or SendDone ──> free

Decode

    submit         WAITING in the PreallocQueue; too long there: computed here, and the room aborted
    granted        RECEIVING: row, locked prefix and pages of the whole sequence; service.receive(missing pages)
    Received       what is carried to its place, prefix to the radix cache; first token as if sampled here; RUNNING, no
                   forward

    ReceiveFailed  its own pages to quarantine ── ReceiveDrained ──> free; WAITING like any other: computed here
    abort, deadline: ends at once; service.abort_receive, quarantine ── ReceiveDrained, or Received ──> free

Fetch: a decode leg without a prefill leg. It is granted pages up to `PdTicket.end_len`, and what a donor has cached of
them, up to the last border where it has the window or states, is written there, with these. `Received`: they go to the
cache, and it waits like any other to compute the rest. Late, failed or refused: it computes all.
`Donor`: SendReady ── pages locked, sent ── SendDone or SendDrained ──> unlocked
A prefill leg may fetch first (`PdTransfer.fetch`): what its decode replica has of the answers before.

The other choices of an n > 1 request are parked until the prompt of choice 0 is here (or will not come), and so are
later requests, prefill legs too, that begin with what is being fetched; they find it in the radix cache.
Prompt logprobs and requests without output need a forward over the prompt here, without a transfer.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from kvtransfer.replay import observe
from kvtransfer.rooms.transfer_service import TransferService
from kvtransfer.types import (
    KVTransferMeta,
    PageIds,
    Prefix,
    Received,
    ReceiveFailed,
    ReceiveOrder,
    SendFailed,
    SendOrder,
    SendReady,
    WriteTimes,
)
from replicas.cache.kv import KvCache, came, carried_parts, goes_on_at, handed_len, longest_reuse, see_no_more
from replicas.cache.parts import SnapshotAllocator
from replicas.cache.quarantine import Detained
from replicas.errors import Fault, InvalidRequest, Overloaded, PagesExhausted
from replicas.observer import Observer
from replicas.request import CachedTokens, Leg, Req, ReqState
from replicas.scheduler.budget import let_go
from replicas.scheduler.scheduler import Scheduler
from replicas.scheduler.tokens import NewToken
from replicas.types import (
    SECONDS,
    Finish,
    FinishReason,
    PdLeg,
    PdTransferReport,
    Tally,
    TallyCounts,
    TokenLogprob,
)

NEEDS_FORWARD = "logprobs of the prompt, or no output, are wanted: the prompt is computed where the answer is made"
NO_FETCH = "not all of what would be fetched can be used here: it is computed"
NO_ROOM = "the pool has no room for the prompt and pages that carry its states or windows: it is computed here"


@dataclass(frozen=True, slots=True, kw_only=True)
class PdTransferTerms:
    """How this engine takes part in KV transfers."""

    fingerprint: str  # of its KV layout; goes with what it sends
    open_timeout_s: float = 180.0  # as a sender: for the receiver to open the room; as a receiver: for row and pages
    room_timeout_s: float = 180.0  # as a receiver: without a page
    pinned: bool = False  # a device may hold the memory of the pool: it cannot be given back


class Carrier(Protocol):
    """Copies what a request needs beside K and V of its pages into others, and back: recurrent states, or the windows
    at its end. Complete, on all ranks, when it returns. Raises: Overloaded without memory for it; RuntimeError where it
    is not there or cannot be copied."""

    def put(self, row: int, num_tokens: int, parts: PageIds, pages: PageIds) -> None:
        """Copy the states of ``row`` behind ``num_tokens``, or ``parts`` of the window pool, into ``pages``."""
        ...

    def take(self, row: int, num_tokens: int, parts: PageIds, pages: PageIds) -> None:
        """Let the states of ``row``, or ``parts``, be what ``pages`` carry. Part 0 takes what is here already."""
        ...


class PdTransferTallies:
    """How the times of one engine's KV transfers and writes spread, in seconds. The engine thread writes."""

    def __init__(self) -> None:
        self._of = {name: Tally(SECONDS) for name in ("grant_s", "wait_s", "post_s", "wire_s")}

    def kv_transfer(self, report: PdTransferReport, *, granted: bool) -> None:
        """Count the decode side of a transfer that arrived or failed. One that failed before it was ``granted`` row and
        pages counts in ``grant_s``, with the time it waited, and not in ``wait_s``."""
        self._of["grant_s"].add(report.grant_s)
        if granted:
            self._of["wait_s"].add(report.wait_s)

    def writes(self, writes: Iterable[WriteTimes]) -> None:
        """Count the transfer library's own times of writes that succeeded."""
        for write in writes:
            self._of["post_s"].add(write.post_s)
            self._of["wire_s"].add(write.wire_s)

    def read(self) -> dict[str, TallyCounts]:
        """Return the fields of `EngineTallies`; any thread."""
        return {name: tally.read() for name, tally in self._of.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class PdTransferParts:
    """The parts of one engine that its roles in KV transfers work with."""

    service: TransferService
    scheduler: Scheduler
    kv: KvCache
    terms: PdTransferTerms
    vocab_size: int
    clock: Callable[[], float]
    observer: Observer
    tallies: PdTransferTallies
    carrier: Carrier | None = None  # of a model that keeps more of a text than K and V in the pool's pages
    may_lend: Callable[[], bool] = lambda: True  # whether the pool has its memory


class Rooms:
    """Open rooms of one role, by number."""

    def __init__(self, kv: KvCache) -> None:
        self._kv = kv
        self._open: dict[int, tuple[Req, Leg]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Req]:
        return iter([req for req, _ in self._open.values()])

    def __contains__(self, room: int) -> bool:
        return room in self._open

    def require_new(self, room: int) -> None:
        """Raise InvalidRequest if ``room`` is open: writes of an earlier try may still be under way."""
        if room in self._open:
            raise InvalidRequest(
                f"room {room} belongs to request {self._open[room][0].rid} here: take a new room for every try",
                param="kv_transfer",
            )

    def open(self, req: Req) -> None:
        room = leg_of(req).ticket.room
        assert room not in self._open, f"room {room} is open"
        self._open[room] = req, leg_of(req)

    def find(self, room: int) -> Req | None:
        """Return the request of ``room``, ended or not; None if the room is not open here."""
        return self._open.get(room, (None,))[0]

    def end(self, room: int) -> Req | None:
        """Close ``room`` after its last event: no peer touches its pages. Returns: its request."""
        if room not in self._open:
            return None
        req, leg = self._open.pop(room)
        leg.exposed = False
        if leg.detained is not None:
            assert isinstance(leg.detained, Detained)
            self._kv.store.release_quarantined(leg.detained)
            leg.detained = None
        return req


def leg_of(req: Req) -> Leg:
    assert req.leg is not None, f"request {req.rid} takes part in no KV transfer"
    return req.leg


class PrefillRole:
    """The prefill legs of one engine; called by `PdTransfers`."""

    def __init__(self, parts: PdTransferParts) -> None:
        self._service = parts.service
        self._observer = parts.observer
        self._scheduler = parts.scheduler
        self._kv = parts.kv
        self._terms = parts.terms
        self._carrier = parts.carrier
        self.rooms = Rooms(parts.kv)

    def begin(self, req: Req, leg: Leg) -> None:
        """Let ``req``, which was accepted, wait until its receiver has opened the room."""
        req.leg = leg
        self.rooms.open(req)
        self._scheduler.queues.away.add(req)
        self._expect(req)

    def decline(self, req: Req) -> None:
        """Fail the room of ``req``, which has ended before its leg could begin, so that the receiver stops waiting."""
        self._expect(req)
        self._service.abort_send(leg_of(req).kv_transfer.ticket.room, _why(req))

    def _expect(self, req: Req) -> None:
        ticket = leg_of(req).kv_transfer.ticket
        self._service.expect_send(
            SendOrder(
                room=ticket.room,
                generation=ticket.generation,
                rid=req.rid,
                num_tokens=req.num_tokens,
                deadline_s=self._terms.open_timeout_s,
            )
        )

    def send_pages(self) -> None:
        """Send the whole computed pages that are unsent: before a step those from the cache, after it those it made."""
        for req in self.rooms:
            leg, end = leg_of(req), req.computed_len // self._kv.page_size
            if req.state is ReqState.PREFILLING and end > leg.next_page:
                self._service.send_pages(leg.ticket.room, leg.next_page, self._kv.pages(req, leg.next_page, end))
                leg.next_page = end

    def send_last(self, token: NewToken) -> NewToken | None:
        """Send what is unsent of a computed prompt, what is carried, and its first token. Returns: the end of the
        request, if no pages are left to carry its states or windows."""
        req, leg = token.req, leg_of(token.req)
        assert token.token_id is not None
        logprob = token.logprob
        if self._carrier is not None and (refusal := self._pack(req, self._carrier)) is not None:
            return self._fail(req, refusal)
        end = -(-handed_len(req, self._kv) // self._kv.page_size)
        skipped = leg.first_page * self._kv.page_size
        meta = KVTransferMeta(
            rid=req.rid,
            fingerprint=self._terms.fingerprint,
            prompt_len=req.num_tokens,
            token_range=(skipped, req.num_tokens),
            cached_prefix_len=skipped,
            first_token=token.token_id,
            first_logprob=None if logprob is None or logprob.logprob is None else (logprob.logprob, logprob.top),
            cached_tokens=req.cached.by_tier,
        )
        if observe.enabled():
            self._observer.before_send(req, skipped)
        self._service.send_last(leg.ticket.room, leg.next_page, self._kv.pages(req, leg.next_page, end), meta)
        leg.next_page = end
        return None

    def _pack(self, req: Req, carrier: Carrier) -> str | None:
        """Copy the states or windows of ``req`` into pages behind its own. Returns: why there are none."""
        try:
            self._kv.extend(req, handed_len(req, self._kv), carries=True)
            row, pages = _carried_of(req, self._kv, req.num_tokens)
            own = self._kv.pages(req, 0, -(-req.num_tokens // self._kv.page_size))
            carrier.put(row, req.num_tokens, carried_parts(own, self._kv), pages)
            see_no_more(req, self._kv)
        except PagesExhausted as error:
            return f"no pages carry its states or windows: {error}"
        except (Overloaded, RuntimeError) as error:
            return f"its states or windows cannot be sent: {error}"
        return None

    def leave(self, req: Req) -> None:
        """Abort the room of ``req``, which has ended, so that the receiver stops waiting."""
        leg = leg_of(req)
        if leg.ticket.room in self.rooms and not leg.closing:
            leg.closing = True
            self._service.abort_send(leg.ticket.room, _why(req))

    def on_ready(self, event: SendReady, *, follows: Callable[[Req], bool]) -> NewToken | None:
        """Start the prefill, unless it ``follows`` a fetch. Returns: the end of the request, if the receiver asks for
        pages that cannot be sent."""
        req = self.rooms.find(event.room)
        if req is None or req.state is ReqState.FINISHED:
            return None
        most = req.num_tokens // self._kv.page_size
        if not 0 <= event.first_page <= most:
            return self._fail(req, f"the receiver wants pages from {event.first_page} on; there are {most} whole ones")
        leg = leg_of(req)
        leg.first_page = leg.next_page = event.first_page
        leg.exposed = True
        if not follows(req):
            self._scheduler.unpark(req)
        return None

    def on_done(self, room: int) -> NewToken | None:
        """Finish the request: the receiver has everything. Returns: its end, unless it ended before."""
        req = self.rooms.end(room)
        if req is None or req.state is ReqState.FINISHED:
            return None
        self._scheduler.finish(req, Finish(reason=FinishReason.HANDED_OFF))
        return NewToken(req, None, None)

    def on_failed(self, event: SendFailed) -> NewToken | None:
        """Fail the request. Returns: its end, unless it ended before."""
        req = self.rooms.find(event.room)
        if req is None:
            return None
        leg_of(req).closing = True
        return self._fail(req, event.reason)

    def on_drained(self, room: int) -> None:
        self.rooms.end(room)

    def _fail(self, req: Req, reason: str) -> NewToken | None:
        if req.state is ReqState.FINISHED:
            return None
        message = f"the KV transfer failed: {reason}"
        self._scheduler.finish(req, Finish(reason=FinishReason.ERROR, message=message, fault=Fault.UNAVAILABLE))
        return NewToken(req, None, None)


def _fetches(req: Req) -> bool:
    return leg_of(req).role is PdLeg.FETCH


class Donor:
    """Lends cached pages to the replicas that fetch them, from the order to the room's last event."""

    def __init__(self, parts: PdTransferParts) -> None:
        self._service = parts.service
        self._kv = parts.kv
        self._fingerprint = parts.terms.fingerprint
        self._carrier = parts.carrier
        self._may_lend = parts.may_lend
        self._lent: dict[int, Detained] = {}  # by room

    def __len__(self) -> int:
        return len(self._lent)

    def serve(self, room: int, first_page: int, prefix: Prefix) -> None:
        """Send what is cached of ``prefix`` from page ``first_page`` on, and the last window or the states behind it.
        What the peer has not by then it computes."""
        if not self._may_lend():
            self._service.abort_send(room, "the pages' memory is given back")
            return
        ids, ps = np.frombuffer(prefix.token_ids, dtype="<i4").astype(np.int32), self._kv.page_size
        try:
            pages, receipt = self._kv.store.lend(ids, prefix.salt, f"fetch-{room}", self._kv.carried)
        except PagesExhausted as error:
            self._service.abort_send(room, f"no pages carry its states or windows: {error}")
            return
        refusal = self._carry(pages, receipt, first_page)
        if refusal is not None:
            self._kv.store.release_quarantined(receipt)
            self._service.abort_send(room, refusal)
            return
        self._lent[room] = receipt
        meta = KVTransferMeta(
            rid="",
            fingerprint=self._fingerprint,
            prompt_len=len(ids),
            token_range=(first_page * ps, len(pages) * ps),
            cached_prefix_len=first_page * ps,
            first_token=0,
        )
        self._service.send_last(room, first_page, np.concatenate([pages[first_page:], receipt.pages]), meta)

    def _carry(self, pages: PageIds, receipt: Detained, first_page: int) -> str | None:
        """Copy the window or states behind ``pages`` into those of ``receipt``. Returns: why nothing can be sent."""
        if len(pages) < first_page or (len(pages) == first_page and not len(receipt.pages)):
            return "the pages are not cached here any more"
        if self._carrier is None:
            return None
        try:
            if isinstance(parts := self._kv.store.parts, SnapshotAllocator):
                parts.show(pages)
            self._carrier.put(0, len(pages) * self._kv.page_size, carried_parts(pages, self._kv), receipt.pages)
        except (Overloaded, RuntimeError) as error:
            return f"its states or windows cannot be sent: {error}"
        return None

    def end(self, room: int) -> None:
        """Take the pages of ``room`` back, after its last event."""
        if (receipt := self._lent.pop(room, None)) is not None:
            self._kv.store.release_quarantined(receipt)


def _carried_of(req: Req, kv: KvCache, num_tokens: int) -> tuple[int, PageIds]:
    """Return the row of ``req``, and the pages that carry what is behind ``num_tokens`` of it."""
    assert req.holding is not None
    first = -(-num_tokens // kv.page_size)
    return req.holding.row, kv.pages(req, first, first + kv.carried.num_pages(num_tokens, kv.page_size))


def _why(req: Req) -> str:
    assert req.finish is not None
    return req.finish.message or f"the request ended with {req.finish.reason.value}"


class DecodeRole:
    """The decode legs of one engine; called by `PdTransfers`."""

    def __init__(self, parts: PdTransferParts, prefill: PrefillRole) -> None:
        self._prefill = prefill
        self._service = parts.service
        self._observer = parts.observer
        self._tallies = parts.tallies
        self._scheduler = parts.scheduler
        self._kv = parts.kv
        self._terms = parts.terms
        self._carrier = parts.carrier
        self._vocab_size = parts.vocab_size
        self._clock = parts.clock
        self.rooms = Rooms(parts.kv)
        self._siblings: dict[str, list[Req]] = {}  # parked, by the rid whose prompt they wait for
        self._told: list[NewToken] = []  # reports that no event of a room brought

    def submit(self, reqs: Sequence[Req], leg: Leg) -> None:
        """Queue the ``leg`` of one request, for a grant where possible; ``reqs``: all of its choices."""
        first, *siblings = reqs
        first.leg = leg
        if (reason := self._no_kv_transfer(first)) is not None:
            leg.report = PdTransferReport(transferred=False, reason=reason)
            self._scheduler.accept(first)
            self._told.append(NewToken(first, None, None))
            self._goes_on(first)
            for req in siblings:
                self._scheduler.submit(req)
            return
        self.rooms.open(first)
        ask_grant(self._scheduler, first)
        for req in siblings:
            self._scheduler.park(req)
        if siblings:
            self._siblings[first.rid] = siblings

    def follows(self, req: Req) -> bool:
        """Let ``req`` be unparked once a fetch is over that brings some of its prompt. Returns: whether one does."""
        first = fetch_for(req, self.rooms, self._kv)
        if first is not None:
            self._siblings.setdefault(first.rid, []).append(req)
        return first is not None

    def _goes_on(self, req: Req) -> None:
        """Let ``req``, whose pages are here or will not come, wait for its turn, or for its receiver if it has one."""
        leg = leg_of(req)
        if leg.kv_transfer.fetch is None:
            self._scheduler.wait(req)
        else:
            own = Leg(kv_transfer=replace(leg.kv_transfer, fetch=None), report=leg.report)
            self._prefill.begin(req, own)

    def _no_kv_transfer(self, req: Req) -> str | None:
        """Return why the prompt of ``req`` is computed here, whatever its peer does; None if it may come."""
        if _fetches(req):
            end_len = leg_of(req).ticket.end_len
            if end_len % self._kv.page_size or not 0 < end_len <= longest_reuse(req, whole=True):
                return NO_FETCH
        elif req.prompt_logprobs_from is not None or req.max_remaining <= 0:
            return NEEDS_FORWARD
        full = self._carrier is not None and handed_len(req, self._kv) >= self._kv.store.size.num_tokens
        return NO_ROOM if full else None

    def ask(self) -> None:
        """Open the rooms of the requests that were granted pages."""
        for req in self._scheduler.queues.away.take_granted():
            leg, holding = leg_of(req), req.holding
            assert holding is not None
            leg.first_page = holding.prefix_len // self._kv.page_size
            end_len = leg.ticket.end_len
            if _fetches(req) and goes_on_at(req.ids[:end_len], req.salt, self._kv) == end_len == holding.prefix_len:
                self.rooms.end(leg.ticket.room)  # it has been computed here meanwhile
                came(req, self._kv, end_len)
                self._told.append(self._has(req, end_len, self._report(req)))
                continue
            pages = self._kv.pages(req, leg.first_page, -(-handed_len(req, self._kv) // self._kv.page_size))
            self._open(req, leg.first_page, pages)

    def stop_waiting(self) -> list[NewToken]:
        """Compute the requests here that waited too long for row and pages. Returns: as `on_failed`, all reports since
        the last call that no event of a room brought."""
        now_s, most_s = self._clock(), self._terms.open_timeout_s

        def limit_s(req: Req) -> float:
            return leg_of(req).ticket.within_s if _fetches(req) else most_s

        late = [req for req in self._scheduler.queues.prealloc if req.stamps.arrival_s + limit_s(req) <= now_s]
        for req in late:
            self._dismiss(req)
            why = f"no row and pages for it on the decode side within {limit_s(req):.0f} s"
            self._told.append(self._fall_back(req, why))
        told, self._told = self._told, []
        return told

    def _dismiss(self, req: Req) -> None:
        """Stop the wait of the peer of ``req``, whose room is not open yet: open it for no page, and abort it."""
        leg = leg_of(req)
        leg.closing = True
        if _fetches(req):  # no peer waits
            self.rooms.end(leg.ticket.room)
            return
        self._open(req, req.num_tokens // self._kv.page_size, np.empty(0, dtype=np.int32))
        self._service.abort_receive(leg.ticket.room)

    def _open(self, req: Req, first_page: int, pages: PageIds) -> None:
        """Order pages [first_page, first_page + n) of the sequence, to be written to ``pages`` [n]."""
        ticket, num_tokens, prefix = leg_of(req).ticket, req.num_tokens, None
        if _fetches(req):
            num_tokens = ticket.end_len
            prefix = Prefix(salt=req.salt, token_ids=req.ids[:num_tokens].astype("<i4").tobytes())
        self._service.receive(
            ReceiveOrder(
                room=ticket.room,
                generation=ticket.generation,
                rid=req.rid,
                peer=ticket.prefill,
                num_tokens=num_tokens,
                first_page=first_page,
                pages=pages,
                deadline_s=self._terms.room_timeout_s if prefix is None else ticket.within_s,
                prefix=prefix,
            )
        )

    def leave(self, req: Req) -> None:
        """Abort the room of ``req``, which has ended, so that the peer stops sending."""
        leg = leg_of(req)
        self._release_siblings(req)
        if leg.kv_transfer.leg is PdLeg.PREFILL:  # that fetches first: its receiver waits for it too
            self._prefill.decline(req)
        if self.rooms.find(leg.ticket.room) is not req or leg.closing:
            return
        if leg.granted_s is None:
            self.rooms.end(leg.ticket.room)  # its peer was never asked
        else:
            leg.closing = True
            self._service.abort_receive(leg.ticket.room)

    def on_received(self, event: Received) -> NewToken | None:
        """Start decoding, or compute the prompt here if the K/V is wrong.

        Returns: the first token; a report without a token if the prompt is computed here; None for a request that has
                 ended.
        """
        req = self.rooms.end(event.room)
        if req is None or req.state is not ReqState.RECEIVING:
            return None
        if _fetches(req):
            return self._fetched(req, event)
        fault = self._fault(event.meta, req) or self._unpack(req, req.num_tokens)
        if fault is not None:
            return self._fall_back(req, fault)
        leg, meta = leg_of(req), event.meta
        if observe.enabled():
            self._observer.after_restore(req, leg.first_page * self._kv.page_size)
        num_pages = -(-req.num_tokens // self._kv.page_size) - leg.first_page
        leg.report = self._report(req, num_pages=num_pages, num_bytes=event.num_bytes, transfer_s=event.transfer_s)
        logprob = None
        if req.return_logprobs and meta.first_logprob is not None:
            value, top = meta.first_logprob
            logprob = TokenLogprob(token_id=meta.first_token, logprob=value, top=top)
        cached = CachedTokens.from_tiers(meta.cached_tokens, prompt_len=req.prompt_len)
        token = received(self._scheduler, req, meta.first_token, logprob, cached=cached)
        self._release_siblings(req)
        return token

    def _fetched(self, req: Req, event: Received) -> NewToken:
        """Let a request wait for its turn whose pages are here. Returns: no token, so that the report goes out."""
        first = leg_of(req).first_page * self._kv.page_size
        end_len = event.meta.token_range[1]  # whole pages of those that were asked for (kvtransfer/rooms/receiver.py)
        if (fault := self._unpack(req, end_len)) is not None:
            return self._fall_back(req, fault, num_bytes=event.num_bytes)
        num_pages = (end_len - first) // self._kv.page_size
        report = self._report(req, num_pages=num_pages, num_bytes=event.num_bytes, transfer_s=event.transfer_s)
        return self._has(req, end_len, report)

    def _has(self, req: Req, end_len: int, report: PdTransferReport) -> NewToken:
        """As `_fetched`: pages of ``end_len`` tokens are here, as ``report`` says."""
        leg_of(req).report = report
        fetched(self._scheduler, req, end_len)
        self._goes_on(req)
        self._release_siblings(req)
        return NewToken(req, None, None)

    def _unpack(self, req: Req, num_tokens: int) -> str | None:
        """Copy the states or windows behind ``num_tokens`` of ``req`` out of the pages that carried them. Returns: why
        it has none."""
        if self._carrier is None:
            return None
        parts = None
        try:
            parts, (row, pages) = came(req, self._kv, num_tokens), _carried_of(req, self._kv, num_tokens)
            self._carrier.take(row, num_tokens, parts, pages)
        except (Overloaded, RuntimeError) as error:
            see_no_more(req, self._kv, parts)
            return f"its states or windows cannot be taken over: {error}"
        return None

    def on_failed(self, event: ReceiveFailed) -> NewToken | None:
        """Compute the prompt here. Returns: as `on_received`."""
        req = self.rooms.find(event.room)
        if req is None:
            return None
        leg_of(req).closing = True
        if req.state is not ReqState.RECEIVING:
            return None
        return self._fall_back(req, event.reason, num_bytes=event.num_bytes)

    def on_drained(self, room: int) -> None:
        self.rooms.end(room)

    def _fall_back(self, req: Req, reason: str, *, num_bytes: int = 0) -> NewToken:
        """Compute the prompt here. Returns: no token, so that the report goes out at once and the sender is free."""
        leg_of(req).report = self._report(req, reason=reason, num_bytes=num_bytes)
        give_up(self._scheduler, req)
        self._goes_on(req)
        self._release_siblings(req)
        return NewToken(req, None, None)

    def _release_siblings(self, req: Req) -> None:
        for sibling in self._siblings.pop(req.rid, ()):
            if sibling.state is not ReqState.FINISHED:
                self._scheduler.unpark(sibling)

    def _fault(self, meta: KVTransferMeta, req: Req) -> str | None:
        """Return why ``meta`` does not fit ``req``; the transfer service has checked fingerprint and digests."""
        first = leg_of(req).first_page * self._kv.page_size
        if (meta.rid, meta.prompt_len, meta.token_range) != (req.rid, req.num_tokens, (first, req.num_tokens)):
            return f"K/V of {meta.rid} {meta.token_range} of {meta.prompt_len} came, not {(first, req.num_tokens)}"
        if not 0 <= meta.first_token < self._vocab_size:
            return f"token {meta.first_token} is not in the vocabulary of {self._vocab_size}"
        if req.return_logprobs and meta.first_logprob is None:
            return "the first token came without its logprob"
        return None

    def _report(
        self,
        req: Req,
        *,
        reason: str | None = None,
        num_pages: int = 0,
        num_bytes: int = 0,
        transfer_s: float = 0.0,
    ) -> PdTransferReport:
        now_s, granted_s = self._clock(), leg_of(req).granted_s
        report = PdTransferReport(
            transferred=reason is None,
            reason=reason,
            num_pages=num_pages,
            num_bytes=num_bytes,
            grant_s=(now_s if granted_s is None else granted_s) - req.stamps.arrival_s,
            wait_s=0.0 if granted_s is None else now_s - granted_s,
            transfer_s=transfer_s,
        )
        self._tallies.kv_transfer(report, granted=granted_s is not None)
        return report


def fetch_for(req: Req, legs: Iterable[Req], kv: KvCache) -> Req | None:
    """Return the one of ``legs`` whose fetch is under way, if it brings more of the prompt of ``req`` than is here. It
    waits for none of a lower class or priority."""
    for leg in legs:
        end_len = leg_of(leg).ticket.end_len
        if (leg.level, leg.rank.priority) < (req.level, req.rank.priority):
            continue
        if not _fetches(leg) or leg_of(leg).closing or leg.state not in (ReqState.WAITING, ReqState.RECEIVING):
            continue
        prefix = req.ids[:end_len]
        if leg.salt != req.salt or end_len > longest_reuse(req) or not np.array_equal(prefix, leg.ids[:end_len]):
            continue
        if goes_on_at(prefix, req.salt, kv) < end_len:
            return leg
    return None


def ask_grant(scheduler: Scheduler, req: Req) -> None:
    """Let ``scheduler`` accept a decode leg. It gets row and pages when they fit, and is then among
    `PdTransferQueue.take_granted`."""
    scheduler.accept(req)
    scheduler.queues.prealloc.add(req)
    scheduler.look_again()


def received(
    scheduler: Scheduler, req: Req, token_id: int, logprob: TokenLogprob | None, *, cached: CachedTokens
) -> NewToken:
    """Take in the complete K/V of a RECEIVING request, and its next token; it runs on without a forward.

    Args: cached: what its sender did not compute.
    """
    scheduler.queues.away.remove(req)
    req.computed_len = req.num_tokens
    scheduler.kv.cut(req)  # the pages that carried its states or windows
    if req.stamps.admitted_s is None:
        req.stamps.admitted_s, req.cached = scheduler.clock(), cached
    scheduler.kv.commit(req)
    req.move(ReqState.RUNNING)
    scheduler.queues.running.append(req)
    return scheduler.take(req, [(token_id, logprob)])


def fetched(scheduler: Scheduler, req: Req, end_len: int) -> None:
    """Take a RECEIVING request back, which is to be computed from ``end_len`` on: the pages before, which are here, go
    to the cache. It has yet to wait."""
    scheduler.queues.away.remove(req)
    req.computed_len = end_len
    scheduler.kv.cut(req)  # pages that did not come: nothing writes to them any more
    assert req.leg is not None
    req.leg.exposed, req.leg.waits_again_s = False, scheduler.clock()
    let_go(req, scheduler.kv, keep=True)
    req.move(ReqState.WAITING)


def give_up(scheduler: Scheduler, req: Req) -> None:
    """Take a leg back, granted or not, whose K/V will not come or is wrong. It has yet to wait."""
    scheduler.queues.remove(req)
    if req.state is ReqState.RECEIVING:
        assert req.leg is not None
        req.leg.waits_again_s = scheduler.clock()
        let_go(req, scheduler.kv, keep=False)
        req.move(ReqState.WAITING)
