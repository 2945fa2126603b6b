"""One try of a request, and how often a request is tried.

Owns:      the stream and the leases of the try; the number of the try, and which replicas later tries leave out.
Never:     chooses a replica or starts another try (dispatcher.py).
Invariant: however a try ends, nothing of it is left open but leases about to return, its outcome is noted, and its
           decision is reported done. Between two stretches of STEADY_S in which tokens came, at most ``max_tries``
           tries fail: a stream that outlives many replicas goes on, and a request that kills each replica after a few
           tokens kills ``max_tries``.
Thread:    the router's event loop.
"""

from collections.abc import AsyncGenerator, Callable

from deployments.channel.channel_server import ChannelServer, Stream
from deployments.dispatch.leases import LeaseHolder, ReplicaHangs
from deployments.dispatch.prefill_leg import PrefillLeg
from deployments.dispatch.progress import Part, Progress
from deployments.dispatch.route_log import Try
from replicas.errors import EngineDead, MantaError, Overloaded
from replicas.types import HandOffReport, TokenDelta
from routing.router import Router
from routing.types import Ending, RouteOutcome

STEADY_S = 10.0  # a replica that brought tokens for so long was no failed try


class Tries:
    """The tries of one request."""

    def __init__(self, max_tries: int, clock: Callable[[], float]) -> None:
        self._max_tries = max_tries
        self._clock = clock
        self.number = 0  # of the try, over all: names differ by it
        self.excluded: frozenset[str] = frozenset()
        self._num_failed = 0  # since a replica served it for a while
        self._first_s: float | None = None  # when this try brought its first and last tokens
        self._last_s = 0.0

    @property
    def is_last(self) -> bool:
        """Whether the request has failed if this try does."""
        return self._num_failed + 1 >= self._max_tries and not self._steady

    @property
    def is_last_of_several(self) -> bool:
        return self.is_last and self._num_failed > 0

    def brought_tokens(self) -> None:
        self._last_s = self._clock()
        if self._first_s is None:
            self._first_s = self._last_s

    def failed(self, replica_id: str, error: MantaError) -> bool:
        """This try failed at ``replica_id``. Returns: whether there is another one."""
        if self._steady:
            self._num_failed, self.excluded = 0, frozenset()
        if not isinstance(error, ReplicaHangs):  # one that hangs is out of choice for as long as it does (fleet.py)
            self.excluded |= {replica_id}
        self._num_failed += 1
        self.number += 1
        self._first_s = None
        return self._num_failed < self._max_tries

    @property
    def _steady(self) -> bool:
        return self._first_s is not None and self._last_s - self._first_s >= STEADY_S


class Attempt:
    """One try; `run` is called once."""

    def __init__(
        self,
        *,
        channel: ChannelServer,
        router: Router,
        holder: LeaseHolder,
        clock: Callable[[], float],
        noted: Try,
        parts: list[Part],
        before: Part | None,
        progress: Progress,
        tries: Tries,
        on_report: Callable[[str, HandOffReport], None],
    ) -> None:
        """``before``: the prefill leg, where the decision has one; ``parts`` is its decode leg then.
        ``on_report``: told how the hand-off from that replica went."""
        self._channel = channel
        self._router = router
        self._holder = holder
        self._clock = clock
        self._noted = noted
        self._decision = noted.decision
        self._parts = {part.request.rid: part for part in parts}
        self._before = before
        self._progress = progress
        self._tries = tries
        self._on_report = on_report

    async def run(self) -> AsyncGenerator[TokenDelta, None]:
        """The deltas, as the client's own. Raises: what the try failed with."""
        replica_id = self._decision.replica_id
        # on the last try waiting for a replica that hangs can only be better than failing
        stream = self._channel.open(self._parts, replica_id=replica_id, stays=lambda: self._tries.is_last)
        leases = [self._holder.hold(replica_id, part, stream) for part in self._parts.values()]
        prefill = self._start_prefill(stream)
        ending = Ending.ABORTED
        try:
            while not self._progress.done:
                for delta in await stream.take():
                    _raise_if_retryable(delta)
                    self._note(delta, prefill)
                    if delta.is_report:
                        continue
                    yield self._progress.accept(delta, self._parts[delta.rid].choice)
            ending = Ending.FINISHED
        except MantaError:
            ending = Ending.FAILED
            raise
        finally:
            self._channel.close(stream)
            if prefill is not None:
                prefill.stop()
                if self._noted.hand_off is None or not self._noted.hand_off.transferred:
                    prefill.lease.cancel()  # also where the decode leg ended well: nobody waits for its pages
                leases.append(prefill.lease)
            for lease in leases:
                if ending is not Ending.FINISHED:
                    lease.cancel()
                self._holder.let_end(lease)
            report = self._noted.hand_off
            self._noted.outcome = RouteOutcome(
                ending=ending,
                cached_tokens=self._noted.cached_tokens or 0,
                ttft_s=self._noted.ttft_s,
                hand_off_failed=report is not None and not report.transferred,
            )
            self._router.done(self._decision, self._noted.outcome)

    def _start_prefill(self, decode: Stream) -> PrefillLeg | None:
        if self._before is None:
            return None
        assert self._decision.prefill_id is not None
        return PrefillLeg(
            self._channel,
            self._noted,
            self._before,
            replica_id=self._decision.prefill_id,
            decode=decode,
            hold=self._holder.hold,
            on_end=lambda: self._router.prefill_done(self._decision),
        )

    def _note(self, delta: TokenDelta, prefill: PrefillLeg | None) -> None:
        if delta.token_ids:
            self._tries.brought_tokens()
        if self._noted.ttft_s is None and delta.token_ids:
            self._noted.ttft_s = self._clock() - self._decision.time_s
            self._noted.cached_tokens = delta.usage.cached_tokens
        if delta.stages is not None:
            self._noted.times.tell(delta.stages)
        report = delta.hand_off
        if report is None:
            return
        self._noted.hand_off = report
        self._noted.times.came_s = report.transfer_s if report.transferred else None
        if self._decision.prefill_id is not None:
            self._on_report(self._decision.prefill_id, report)
        if report.transferred:
            self._router.link.record(report.num_bytes, report.transfer_s)
        elif prefill is not None:
            prefill.lease.cancel()  # the decode replica computes the prompt itself


def _raise_if_retryable(delta: TokenDelta) -> None:
    """Raises: the error that another replica may mend, as the engine says; every other finish is the client's."""
    finish = delta.finish
    if finish is None or finish.retry_as is None:
        return
    if finish.retry_as == "overloaded":
        raise Overloaded(finish.message or "the replica's waiting queue is full")
    raise EngineDead(finish.message or "the engine died")
