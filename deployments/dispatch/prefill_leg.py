"""The prefill leg of a request that two replicas compute.

Owns:      the tickets, and one open leg: a request on the prefill replica that yields no token to the client.
Never:     decides about another try (dispatcher.py): it fails the decode leg's stream, once, and that ends the try.
Invariant: the leg's end is noted once; after `stop` nothing of it is open but a lease that is about to return.
Thread:    the router's event loop.

    start ─> waits for its end ─┬─ handed off ──────────────────────────> noted
                                ├─ refused, its replica gone or crashed ─> noted; unless the decode side has reported
                                │                                          the KV transfer, its leg is failed with
                                │                                          `PrefillLost`
                                └─ ended by the engines themselves ──────> noted; the decode side knows, and goes on;
                                                                           so if its step failed and its engine did not
"""

import asyncio
import dataclasses
import secrets
from collections.abc import Callable

from deployments.channel.channel_server import Stream
from deployments.dispatch.leases import LeaseHolder
from deployments.dispatch.progress import Part
from deployments.record.route_log import Try
from kvtransfer.types import PdTicket, PeerAddress
from replicas.errors import EngineDead, Fault, MantaError, Overloaded
from replicas.types import Finish, FinishReason, PdLeg, PdTransfer, PdTransferReport
from routing.types import PageFetch

TRY_ENDED = "not known: the try ended first"
TRANSFERRED = "handed off, says the decode replica: the try ended first"


class PrefillLost(MantaError):
    """The replica that was to compute the prompt is gone or refused it; another pair or a single replica can do it."""

    fault = Fault.UNAVAILABLE
    retryable = True


def legs_of(part: Part, *, generation: int, prefill: PeerAddress) -> list[Part]:
    """Return the prefill leg and the decode leg of ``part``: the same request twice, with one ticket of a new room."""
    ticket = PdTicket(room=secrets.randbits(63), generation=generation, prefill=prefill)
    return [
        dataclasses.replace(
            part, request=dataclasses.replace(part.request, kv_transfer=PdTransfer(leg=leg, ticket=ticket))
        )
        for leg in (PdLeg.PREFILL, PdLeg.DECODE)
    ]


def fetching(part: Part, fetch: PageFetch, *, generation: int, donor: PeerAddress) -> Part:
    """Return ``part``, which may be a prefill leg, as it fetches pages before it is computed."""
    ticket = PdTicket(
        room=secrets.randbits(63), generation=generation, prefill=donor, end_len=fetch.end_tokens,
        within_s=fetch.within_s,
    )  # fmt: skip
    own = part.request.kv_transfer
    kv_transfer = PdTransfer(leg=PdLeg.FETCH, ticket=ticket) if own is None else dataclasses.replace(own, fetch=ticket)
    return dataclasses.replace(part, request=dataclasses.replace(part.request, kv_transfer=kv_transfer))


class PrefillLeg:
    """A prefill leg, sent when it is made, until `stop`."""

    def __init__(
        self,
        holder: LeaseHolder,
        noted: Try,
        part: Part,
        *,
        decode: Stream,
        on_end: Callable[[], object],
        on_fault: Callable[[str], object],
        on_fetch: Callable[[PdTransferReport], object],
    ) -> None:
        """``decode``: the stream of the decode leg; this leg waits for a replica that hangs if that one does.
        ``on_end``: called when this leg has ended. ``on_fault``: called with its replica, where it was in a step that
        failed there. ``on_fetch``: called with how its fetch went.
        """
        assert noted.decision.prefill_id is not None
        self._channel = holder.channel
        self._noted = noted
        self._replica_id = noted.decision.prefill_id
        self._decode = decode
        self._on_end = on_end
        self._on_fault = on_fault
        self._on_fetch = on_fetch
        self._stream, [self.lease] = holder.begin(self._replica_id, [part], stays=decode.stays)
        self._watch = asyncio.create_task(self._wait())

    def stop(self) -> None:
        """Close the leg: the request has ended, or is tried again. The caller cancels the lease, or lets it end."""
        self._watch.cancel()
        if self._noted.prefill_end is None:
            report = self._noted.kv_transfer
            self._noted.prefill_end = TRANSFERRED if report is not None and report.transferred else TRY_ENDED
        self._channel.close(self._stream)

    async def _wait(self) -> None:
        try:
            finish = await self._finish()
            error = _lost(finish)
            if finish.retry_as in ("step_failed", "died_in_step"):
                self._on_fault(self._replica_id)
            self._end("handed off" if finish.reason is FinishReason.HANDED_OFF else _words(finish))
        except MantaError as raised:
            error = raised
            self._end(f"{type(raised).__name__}: {raised}")
        told = self._noted.kv_transfer is not None or not self._decode.is_empty  # the decode side knows how it went
        if error is not None and not told:
            why = f"replica {self._replica_id}, which was to compute the prompt: {type(error).__name__}: {error}"
            self._decode.fail(PrefillLost(why))

    async def _finish(self) -> Finish:
        """Wait for the end of the leg. Raises: the error that it was refused with, or ReplicaGone."""
        while True:
            for delta in await self._stream.take():
                if delta.kv_transfer is not None:
                    self._on_fetch(delta.kv_transfer)
                if delta.finish is not None:
                    self._noted.times.prefill = delta.stages
                    return delta.finish

    def _end(self, how: str) -> None:
        self._noted.prefill_end = how
        self._on_end()


def _lost(finish: Finish) -> MantaError | None:
    """Return the error of an end that the decode side may not learn of; the engines exchange every other end."""
    if finish.retry_as in (None, "step_failed"):
        return None
    kind = Overloaded if finish.retry_as == "overloaded" else EngineDead
    return kind(finish.message or "the engine gave it up")


def _words(finish: Finish) -> str:
    return f"{finish.reason.value}: {finish.message}" if finish.message else finish.reason.value
