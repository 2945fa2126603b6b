"""An engine's part in KV transfers: passes requests and the transfer service's events to the two roles.

Owns:      the transfer service, and both roles over it.
Never:     waits: events are taken when the engine calls.
Invariant: without a transfer service there is no leg, and nothing here does anything.
Thread:    engine thread only, except `check` (read-only).

    engine.submit ─> submit        engine.step: poll ─> schedule ─> before_step ─> run ─> apply ─> after_step
    engine.abort  ─> settle                         between the layers of a step on a CPU: lend
"""

from collections.abc import Sequence

from kvtransfer.types import (
    Received,
    ReceiveDrained,
    ReceiveFailed,
    SendDone,
    SendDrained,
    SendFailed,
    SendReady,
    TransferEvent,
    TransferStats,
)
from replicas.disagg.roles import DecodeRole, Donor, PdTransferParts, PrefillRole
from replicas.errors import InvalidRequest
from replicas.request import Leg, Req, ReqState
from replicas.scheduler.tokens import NewToken
from replicas.types import GenerateRequest, PdLeg, PdTransfer

LEND_S = 0.01  # between two looks for fetches in the middle of a step


class PdTransfers:
    """Both sides of all KV transfers of one engine."""

    def __init__(self, parts: PdTransferParts) -> None:
        self._service = parts.service
        self.tallies = parts.tallies
        self._scheduler = parts.scheduler
        self._prefill = PrefillRole(parts)
        self._decode = DecodeRole(parts, self._prefill)
        self._donor = Donor(parts)
        self._clock = parts.clock
        self._lent_s = float("-inf")  # when `lend` looked last
        self._later: list[TransferEvent] = []  # that it left to `poll`

    @property
    def num_handing_off(self) -> int:
        """The number of prefill legs whose receiver has yet to open, whose prompt is computed, or that drain; the
        queues count those that wait or run."""
        away = self._scheduler.queues.away
        return sum(req in away or req.state is ReqState.FINISHED for req in self._prefill.rooms)

    @property
    def num_open(self) -> int:
        """The number of rooms whose last event has not come."""
        return len(self._prefill.rooms) + len(self._decode.rooms) + len(self._donor)

    def submit(self, request: GenerateRequest, reqs: Sequence[Req]) -> None:
        """Start the leg of ``request``; ``reqs`` are its choices. Raises: InvalidRequest for a room that is in use."""
        kv_transfer = request.kv_transfer
        assert kv_transfer is not None
        leg = Leg(kv_transfer=kv_transfer)
        if leg.role is PdLeg.PREFILL:
            (req,) = reqs
            self._scheduler.accept(req)
            self._prefill.begin(req, leg)
        else:
            self._decode.submit(reqs, leg)

    def follows(self, req: Req) -> bool:
        """Park ``req``, which has no leg, if a fetch brings some of its prompt. Returns: whether that is so."""
        if not self._decode.follows(req):
            return False
        self._scheduler.park(req)
        return True

    def require_new_room(self, request: GenerateRequest) -> None:
        """Raise InvalidRequest if an earlier try of the room has not ended here."""
        kv_transfer = request.kv_transfer
        assert kv_transfer is not None
        role = self._prefill if kv_transfer.leg is PdLeg.PREFILL else self._decode
        role.rooms.require_new(kv_transfer.ticket.room)
        if kv_transfer.fetch is not None:
            self._decode.rooms.require_new(kv_transfer.fetch.room)

    def poll(self) -> list[NewToken]:
        """Take the events of the service. Returns: first tokens that came, and (without a token) ends of legs and
        reports of KV transfers that failed."""
        later, self._later = self._later, []
        made = [self._take(event) for event in [*later, *self._service.drain_events()]]
        made += self._decode.stop_waiting()
        self.settle()
        return [token for token in made if token is not None]

    def lend(self) -> None:
        """Serve the fetches that are asked for, in the middle of a step: a peer waits less than the step takes. All
        other events are left to `poll`."""
        if (now_s := self._clock()) - self._lent_s < LEND_S:
            return
        self._lent_s = now_s
        asked: list[TransferEvent] = []
        for event in self._service.drain_events():
            is_fetch = isinstance(event, SendReady) and event.prefix is not None
            (asked if is_fetch else self._later).append(event)
        for event in asked:  # after all others are kept: if this fails the step runs again, and the engine goes on
            self._take(event)

    def before_step(self) -> None:
        """Open the rooms that were granted pages and send the pages that were cached; after `Scheduler.schedule`."""
        self._decode.ask()
        self._prefill.send_pages()
        self.settle()

    def after_step(self, tokens: list[NewToken]) -> list[NewToken]:
        """Send what the step made; after `Scheduler.apply`. Returns: ``tokens``, of prefill legs their ends alone."""
        self._prefill.send_pages()
        own = [
            self._prefill.send_last(token) if token.req.state is ReqState.HANDING_OFF else token for token in tokens
        ]
        self.settle()
        return [token for token in own if token is not None]

    def settle(self) -> None:
        """Close the rooms of legs that have ended, and say whether requests decode; after every call that may end a
        request, and before each step."""
        self._service.holds_back = bool(self._scheduler.queues.decoding)
        for req in self._scheduler.queues.away.take_ended():
            (self._prefill if req.is_prefill_leg else self._decode).leave(req)

    def stats(self) -> TransferStats:
        """Return the statistics of the service; records the times of the writes that ended since the last call."""
        self.tallies.writes(self._service.drain_write_times())
        return self._service.stats()

    def close(self) -> None:
        self._service.close()

    def _take(self, event: TransferEvent) -> NewToken | None:
        match event:
            case SendReady(prefix=prefix) if prefix is not None:
                self._donor.serve(event.room, event.first_page, prefix)
            case SendReady():
                return self._prefill.on_ready(event, follows=self._decode.follows)
            case SendDone():
                self._donor.end(event.room)
                return self._prefill.on_done(event.room)
            case SendFailed():
                return self._prefill.on_failed(event)
            case SendDrained():
                self._donor.end(event.room)
                self._prefill.on_drained(event.room)
            case Received():
                return self._decode.on_received(event)
            case ReceiveFailed():
                return self._decode.on_failed(event)
            case ReceiveDrained():
                self._decode.on_drained(event.room)
        return None


def require_possible(request: GenerateRequest, kv_transfer: PdTransfer, *, has_transfer: bool) -> None:
    """Raise InvalidRequest if ``request`` is a leg that this engine cannot take."""
    if not has_transfer:
        raise InvalidRequest(
            "kv_transfer: this replica takes part in no KV transfers: start it with transfer settings, or send "
            "the whole request",
            param="kv_transfer",
        )
    if kv_transfer.leg is not PdLeg.PREFILL:
        return
    if request.prompt_logprobs_from is not None or request.sampling.max_new_tokens == 0:
        raise InvalidRequest(
            "kv_transfer: a request that wants logprobs of its prompt, or no output, cannot be handed off after its "
            "prompt: send the whole request to one replica",
            param="kv_transfer",
        )
