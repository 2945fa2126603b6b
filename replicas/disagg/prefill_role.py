"""The prefill side of hand-offs: computes the K/V of a prompt, sends it chunk by chunk, frees it when it has arrived.

Owns:      the rooms in which this engine sends, from the request's arrival to the room's last event.
Never:     moves bytes (kvtransfer/) or decides which request runs (scheduler/).
Invariant: a page that was given to the service stays locked or pinned until the room's last event: its
           request is never retracted, and if it ends early its pages go to quarantine. Before the last chunk only
           whole, computed, committed pages are sent: those are final, and commit no longer swaps them.
Thread:    engine thread only.

    submit        parked, WAITING; service.expect_send ── SendReady(first_page) ──> WaitingQueue
    admitted      PREFILLING; cached pages from first_page on are sent before the forward
    each chunk    its whole pages are sent
    last chunk    HANDING_OFF; the rest, and the meta with the first token: service.send_last
    SendDone      pages go, the prefix stays in the cache; ends with HANDED_OFF

    SendFailed    at any time: ends with ERROR at once, pages stay in quarantine ── SendDrained ──> free
    abort, deadline, broken logits: ends at once; service.abort_send, quarantine ── SendDrained, or SendDone ──> free
"""

from kvtransfer.replay import observe
from kvtransfer.types import KVTransferMeta, SendFailed, SendOrder, SendReady
from replicas.disagg.rooms import HandOffParts, Rooms, leg_of
from replicas.errors import Fault
from replicas.request import Leg, Req, ReqState
from replicas.scheduler.tokens import NewToken
from replicas.types import Finish, FinishReason, HandOff, PdLeg


class PrefillRole:
    """The prefill legs of one engine; called by `HandOffs`."""

    def __init__(self, parts: HandOffParts) -> None:
        self._service = parts.service
        self._observer = parts.observer
        self._scheduler = parts.scheduler
        self._kv = parts.kv
        self._terms = parts.terms
        self.rooms = Rooms(parts.kv)

    def submit(self, req: Req, hand_off: HandOff) -> None:
        """Park ``req`` until its receiver has opened the room."""
        ticket = hand_off.ticket
        req.leg = Leg(role=PdLeg.PREFILL, ticket=ticket)
        self.rooms.open(req)
        self._scheduler.park(req)
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

    def send_last(self, token: NewToken) -> None:
        """Send what is unsent of a computed prompt, with its first token."""
        req, leg = token.req, leg_of(token.req)
        assert token.token_id is not None
        logprob = token.logprob
        end = -(-req.num_tokens // self._kv.page_size)
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

    def leave(self, req: Req) -> None:
        """Abort the room of ``req``, which has ended, so that the receiver stops waiting."""
        leg = leg_of(req)
        if leg.ticket.room in self.rooms and not leg.closing:
            leg.closing = True
            self._service.abort_send(leg.ticket.room, _why(req))

    def on_ready(self, event: SendReady) -> NewToken | None:
        """Start the prefill. Returns: the end of the request, if the receiver asks for pages that cannot be sent."""
        req = self.rooms.find(event.room)
        if req is None or req.state is ReqState.FINISHED:
            return None
        most = req.num_tokens // self._kv.page_size
        if not 0 <= event.first_page <= most:
            return self._fail(req, f"the receiver wants pages from {event.first_page} on; there are {most} whole ones")
        leg = leg_of(req)
        leg.first_page = leg.next_page = event.first_page
        leg.exposed = True
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
        message = f"the hand-off failed: {reason}"
        self._scheduler.finish(req, Finish(reason=FinishReason.ERROR, message=message, fault=Fault.UNAVAILABLE))
        return NewToken(req, None, None)


def _why(req: Req) -> str:
    assert req.finish is not None
    return req.finish.message or f"the request ended with {req.finish.reason.value}"
