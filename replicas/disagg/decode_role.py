"""The decode side of hand-offs: takes over a prompt that another replica computes, or computes it after all.

Owns:      the rooms in which this engine receives, from arrival to the room's last event; siblings that wait.
Never:     moves bytes (kvtransfer/) or decides which request gets memory (scheduler/admission.py).
Invariant: pages of a room are not read before `Received`, and freed only after the room's last event.
Thread:    engine thread only.

    submit         WAITING in the PreallocQueue; too long there: computed here, and the room aborted
    granted        RECEIVING: row, locked prefix and pages of the whole sequence; service.receive(missing pages)
    Received       prefix to the radix cache; first token as if sampled here; RUNNING, without a forward

    ReceiveFailed  its own pages to quarantine ── ReceiveDrained ──> free; WAITING like any other: computed here
    abort, deadline: ends at once; service.abort_receive, quarantine ── ReceiveDrained, or Received ──> free

The other choices of an n > 1 request are parked until the prompt of choice 0 is here (or will not come); they find it
in the radix cache. Prompt logprobs and requests without output need a forward over the prompt here: no hand-off then.
"""

from collections.abc import Sequence

import numpy as np

from kvtransfer.replay import observe
from kvtransfer.types import (
    KVTransferMeta,
    PageIds,
    Received,
    ReceiveFailed,
    ReceiveOrder,
)
from replicas.disagg.rooms import HandOffParts, Rooms, leg_of
from replicas.request import CachedTokens, Leg, Req, ReqState
from replicas.scheduler.tokens import NewToken
from replicas.types import HandOff, HandOffReport, PdLeg, TokenLogprob

NEEDS_FORWARD = "logprobs of the prompt, or no output, are wanted: the prompt is computed where the answer is made"


class DecodeRole:
    """The decode legs of one engine; called by `HandOffs`."""

    def __init__(self, parts: HandOffParts) -> None:
        self._service = parts.service
        self._observer = parts.observer
        self._distributions = parts.distributions
        self._scheduler = parts.scheduler
        self._kv = parts.kv
        self._terms = parts.terms
        self._vocab_size = parts.vocab_size
        self._clock = parts.clock
        self.rooms = Rooms(parts.kv)
        self._siblings: dict[str, list[Req]] = {}  # parked, by rid

    def submit(self, reqs: Sequence[Req], hand_off: HandOff) -> None:
        """Queue the legs of one request, for a grant where possible; ``reqs``: all of its choices."""
        first, *siblings = reqs
        first.leg = Leg(role=PdLeg.DECODE, ticket=hand_off.ticket)
        if first.prompt_logprobs_from is not None or first.max_remaining <= 0:
            first.leg.report = HandOffReport(transferred=False, reason=NEEDS_FORWARD)
            for req in reqs:
                self._scheduler.submit(req)
            return
        self.rooms.open(first)
        self._scheduler.ask_grant(first)
        for req in siblings:
            self._scheduler.park(req)
        if siblings:
            self._siblings[first.rid] = siblings

    def ask(self) -> None:
        """Open the rooms of the requests that were granted pages."""
        for req in self._scheduler.queues.away.take_granted():
            leg, holding = leg_of(req), req.holding
            assert holding is not None
            leg.first_page = holding.prefix_len // self._kv.page_size
            pages = self._kv.pages(req, leg.first_page, -(-req.num_tokens // self._kv.page_size))
            self._open(req, leg.first_page, pages)

    def stop_waiting(self) -> list[NewToken]:
        """Compute the requests here that waited too long for row and pages. Returns: reports, as `on_failed`."""
        timeout_s = self._terms.open_timeout_s
        late = self._scheduler.queues.prealloc.older_than(self._clock() - timeout_s)
        for req in late:
            self._dismiss(req)
        reason = f"no row and pages for it on the decode side within {timeout_s:.0f} s"
        return [self._fall_back(req, reason) for req in late]

    def _dismiss(self, req: Req) -> None:
        """Stop the wait of the peer of ``req``, whose room is not open yet: open it for no page, and abort it."""
        leg = leg_of(req)
        leg.closing = True
        self._open(req, req.num_tokens // self._kv.page_size, np.empty(0, dtype=np.int32))
        self._service.abort_receive(leg.ticket.room)

    def _open(self, req: Req, first_page: int, pages: PageIds) -> None:
        """Order pages [first_page, first_page + n) of the sequence, to be written to ``pages`` [n]."""
        ticket = leg_of(req).ticket
        self._service.receive(
            ReceiveOrder(
                room=ticket.room,
                generation=ticket.generation,
                rid=req.rid,
                peer=ticket.prefill,
                num_tokens=req.num_tokens,
                first_page=first_page,
                pages=pages,
                deadline_s=self._terms.room_timeout_s,
            )
        )

    def leave(self, req: Req) -> None:
        """Abort the room of ``req``, which has ended, so that the peer stops sending."""
        leg = leg_of(req)
        self._release_siblings(req)
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
        fault = self._fault(event.meta, req)
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
        token = self._scheduler.received(req, meta.first_token, logprob, cached=cached)
        self._release_siblings(req)
        return token

    def on_failed(self, event: ReceiveFailed) -> NewToken | None:
        """Compute the prompt here. Returns: as `on_received`."""
        req = self.rooms.find(event.room)
        if req is None:
            return None
        leg_of(req).closing = True
        return self._fall_back(req, event.reason) if req.state is ReqState.RECEIVING else None

    def on_drained(self, room: int) -> None:
        self.rooms.end(room)

    def _fall_back(self, req: Req, reason: str) -> NewToken:
        """Compute the prompt here. Returns: no token, so that the report goes out at once and the sender is free."""
        leg_of(req).report = self._report(req, reason=reason)
        self._scheduler.compute_here(req)
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
    ) -> HandOffReport:
        now_s, granted_s = self._clock(), leg_of(req).granted_s
        report = HandOffReport(
            transferred=reason is None,
            reason=reason,
            num_pages=num_pages,
            num_bytes=num_bytes,
            grant_s=(now_s if granted_s is None else granted_s) - req.stamps.arrival_s,
            wait_s=0.0 if granted_s is None else now_s - granted_s,
            transfer_s=transfer_s,
        )
        self._distributions.hand_off(report, granted=granted_s is not None)
        return report
