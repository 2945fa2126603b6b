"""One try of a request, how often a request is tried, and the prefill replicas that are held out after a failure.

Owns:      the stream and the leases of the try; the number of the try, and which replicas later tries leave out. Until
           when each prefill replica whose KV transfer failed is held out of choice, and why.
Never:     chooses a replica or starts another try (dispatcher.py). Judges a prefill replica by KV transfers alone:
           those that die or hang are the fleet's (fleet.py). The fault may lie between a replica and a single peer, and
           then neither of them is unhealthy.
Invariant: however a try ends, nothing of it is left open but leases about to return, its outcome is noted, and its
           decision is reported done; so is the second one of `ask_back`, unless it is for the next try. At most
           ``max_tries`` tries fail in a row that each brought fewer than GOES_ON tokens of one choice: an answer
           outlives any number of replicas. A request that was in failed steps of two replicas is not tried again,
           whatever it brought; other requests of those steps are. One KV transfer that succeeds ends the hold of its
           prefill replica; a hold grows only by failures after it.
Thread:    the router's event loop.
"""

import math
import sys
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass

from deployments.channel.channel_server import Stream
from deployments.channel.frames import TakeBack
from deployments.dispatch.leases import LeaseHolder, ReplicaGone, ReplicaHangs
from deployments.dispatch.prefill_leg import PrefillLeg
from deployments.dispatch.progress import Part, Progress
from deployments.record.route_log import Try
from replicas.errors import DiedInStep, EngineDead, Fault, MantaError, Overloaded, StepFailed
from replicas.types import GenerateRequest, PdTransferReport, TokenDelta
from routing.migration import Migration
from routing.router import Router
from routing.types import Ending, RouteOutcome

# A try that brought so many tokens of one choice does not count as failed. The first token after a failure comes from
# the prefill of what was delivered: a request that ends each replica in its next decode step brings one in every try.
# A grammar may force many tokens after one, so of a constrained request deltas count; merged ones as one.
GOES_ON = 2
MOST_AT_FAULT = 2  # replicas in whose failed steps a request may have been
HELD_FIRST_S, HELD_MOST_S = 2.0, 60.0  # that a prefill replica is held out after its first failure, and at most


class TakenBack(MantaError):
    """The replica gave the request back before it was admitted; another one begins it sooner."""

    fault = Fault.UNAVAILABLE

    def __init__(self, message: str, move: Migration | None) -> None:
        super().__init__(message)
        self.move = move  # for which it was asked


@dataclass(frozen=True, slots=True, kw_only=True)
class TryLimits:
    """How often a request is tried, and how long it may wait for a replica."""

    max_tries: int = 3
    retry_wait_s: float = 30.0  # for a replica to take over after a failed try
    max_wait_s: float = math.inf  # of the queue before a new request, as estimated
    objective_s: float = 2.0  # for the first token of a request whose client asks for none
    max_choices_per_key: int = sys.maxsize  # of one API key's requests that run or wait, at this router


class Tries:
    """The tries of one request."""

    def __init__(self, max_tries: int) -> None:
        self._max_tries = max_tries
        self.number = 0  # of the try; rids of tries differ by it
        self.excluded: frozenset[str] = frozenset()
        self.at_fault: list[str] = []  # replicas that it was in a failed step of: one of them may have gone on
        self._num_failed = 0  # since the last try that went on
        self._brought: dict[tuple[str, int], int] = {}  # tokens, or deltas, of this try, by choice: its rid and index
        self._went_on = False

    @property
    def is_last(self) -> bool:
        """Whether the request has failed if this try does."""
        return self._num_failed + 1 >= self._max_tries and not self._went_on

    @property
    def is_last_of_several(self) -> bool:
        return self.is_last and self._num_failed > 0

    def brought(self, delta: TokenDelta, *, constrained: bool) -> None:
        """Count the tokens of ``delta``, which this try brought: as one, where a grammar may have forced them."""
        if delta.token_ids and not self._went_on:
            choice = delta.rid, delta.index
            self._brought[choice] = self._brought.get(choice, 0) + (1 if constrained else len(delta.token_ids))
            self._went_on = self._brought[choice] >= GOES_ON

    def moved(self) -> None:
        """Note that this try ended with nothing wrong and nothing brought."""
        self.number += 1

    def was_in_failed_step(self, replica_id: str) -> None:
        """Note that a step of ``replica_id`` failed with the request in it; a prefill leg's too."""
        if replica_id not in self.at_fault:
            self.at_fault.append(replica_id)

    def _refusal(self, rid: str) -> StepFailed:
        """Say to the client of ``rid`` that a step failed with it; the errors themselves are for logs."""
        return StepFailed(
            f"request {rid} was in a step of the model that failed, on replica {' and on '.join(self.at_fault)}: it is "
            "tried on no other. Report it with this id to those who run the server: the logs of the replicas name the "
            "error and the fields of the request"
        )

    def failed(self, replica_id: str, error: MantaError, rid: str) -> tuple[MantaError, bool]:
        """Note that this try failed at ``replica_id``. Returns: the error for the client of ``rid`` if no other try
        follows, and whether one may."""
        if isinstance(error, StepFailed | DiedInStep):
            self.was_in_failed_step(replica_id)
        if self._went_on:
            self._num_failed, self.excluded = 0, frozenset()
        if not isinstance(error, ReplicaHangs):  # fleet.py leaves out one that hangs
            self.excluded |= {replica_id}
        self._num_failed += 1
        self.number += 1
        self._brought, self._went_on = {}, False
        refused = len(self.at_fault) >= MOST_AT_FAULT
        failure = self._refusal(rid) if refused or isinstance(error, StepFailed) else error
        return failure, self._num_failed < self._max_tries and not refused


_ERRORS = {"engine_dead": EngineDead, "step_failed": StepFailed, "died_in_step": DiedInStep}


class Attempt:
    """One try of a request; `run` is called once."""

    def __init__(
        self,
        *,
        router: Router,
        holder: LeaseHolder,
        clock: Callable[[], float],
        noted: Try,
        parts: list[Part],
        progress: Progress,
        tries: Tries,
        on_report: Callable[[str, PdTransferReport], None],
    ) -> None:
        """``parts``: of the request; on a pair, its prefill leg and its decode leg. ``on_report``: called with a
        prefill replica and how the KV transfer from it went.
        """
        self._router = router
        self._holder = holder
        self._clock = clock
        self._noted = noted
        self._decision = noted.decision
        self._prefill = next((part for part in parts if part.is_prefill), None)
        self._constrained = any(part.request.sampling.constraint is not None for part in parts)
        self._parts = {part.request.rid: part for part in parts if not part.is_prefill}
        self._progress = progress
        self._tries = tries
        self._on_report = on_report
        self._saw: Callable[[TokenDelta], object] = lambda delta: None
        self._stream: Stream | None = None  # while it runs
        self._kept = False  # the replica has admitted the request, or so it says
        self.move: Migration | None = None  # where the request goes if its replica gives it back; it was asked

    async def run(self, saw: Callable[[TokenDelta], object]) -> AsyncGenerator[TokenDelta, None]:
        """Yield the deltas, as the client's own, but those that go straight. Raises: the error that the try failed
        with. ``saw``: called with each delta on its way to the client."""
        # on the last try waiting for a replica that hangs can only be better than failing
        stream, leases = self._holder.begin(
            self._decision.replica_id, self._parts.values(), stays=lambda: self._tries.is_last
        )
        self._stream, self._saw = stream, saw
        stream.kept, stream.straight = self._keep, self._goes_straight
        prefill: PrefillLeg | None = None
        if self._prefill is not None:
            prefill = PrefillLeg(
                self._holder, self._noted, self._prefill, decode=stream, on_end=self._prefill_done,
                on_fault=self._tries.was_in_failed_step, on_fetch=self._fetched,
            )  # fmt: skip
        ending = Ending.CANCELLED
        try:
            while not self._progress.done:
                for delta in await stream.take():
                    self._raise_if_retryable(delta)
                    self._note(delta, prefill)
                    if not delta.is_report:
                        yield self._accepted(delta)
            ending = Ending.OK
        except TakenBack:
            ending = Ending.MOVED
            raise
        except MantaError:
            ending = Ending.ERROR
            raise
        finally:
            self._holder.channel.close(stream)
            if ending is not Ending.MOVED:
                self._keep()
            if prefill is not None:
                prefill.stop()
                if self._noted.kv_transfer is None or not self._noted.kv_transfer.transferred:
                    prefill.lease.cancel()  # also where the decode leg ended well: its pages have no receiver
                leases.append(prefill.lease)
            for lease in leases:
                if ending not in (Ending.OK, Ending.MOVED):
                    lease.cancel()
                self._holder.let_end(lease)
            report = self._noted.kv_transfer
            self._noted.outcome = RouteOutcome(
                ending=ending,
                cached_tokens=self._noted.cached_tokens or 0,
                ttft_s=self._noted.ttft_s,
                engine_s=self._noted.times.before_first_s,
                kv_transfer_failed=report is not None and not report.transferred,
            )
            self._router.done(self._decision, self._noted.outcome)

    @property
    def request(self) -> GenerateRequest:
        """What its client asked for, of which this is a try."""
        return self._progress.request

    @property
    def may_wait(self) -> bool:
        """Whether its replica may not have admitted the request: it has not said so, and nothing has come of it."""
        noted = self._noted
        came = noted.ttft_s is not None or noted.kv_transfer is not None or noted.fetch_report is not None
        return self._stream is not None and not (came or self._progress.started or self._kept)

    def ask_back(self, move: Migration) -> None:
        """Ask the replica for the request. The try goes on until it is given back: then it ends with `TakenBack`, and
        ``move`` is for the next one. Where it ends otherwise, or goes on, the decision of ``move`` is closed here."""
        self.move = move
        try:
            for rid in self._parts:
                self._holder.channel.send(self._decision.replica_id, TakeBack(rid))
        except ReplicaGone:
            self._keep()  # the stream has failed, or is about to

    def _keep(self) -> None:
        """The request stays: close the second decision, if there is one."""
        self._kept = True
        if self.move is not None:
            self._router.stays(self._decision)
            self._router.done(self.move.decision, RouteOutcome(ending=Ending.CANCELLED))
            self.move = None

    def _raise_if_retryable(self, delta: TokenDelta) -> None:
        """Raise the error of a finish that another replica may mend; every other finish is the client's."""
        finish = delta.finish
        if finish is None or finish.retry_as is None:
            return
        if finish.retry_as == "taken_back":
            raise TakenBack(f"replica {self._decision.replica_id} gave it back before it began", self.move)
        if finish.retry_as == "overloaded":
            raise Overloaded(finish.message or "the replica's waiting queue is full")
        raise _ERRORS[finish.retry_as](finish.message or "the engine died")

    def _goes_straight(self, delta: TokenDelta) -> bool:
        """Send ``delta`` by the reader's short way, if it is text alone and that takes it. Returns: whether it did."""
        way, choice = self._progress.straight, self._parts[delta.rid].choice
        if way is None or delta.finish is not None or delta.kv_transfer is not None or not delta.token_ids:
            return False
        if not way.takes(delta.index if choice is None else choice):
            return False
        self._note(delta, None)
        way.send(self._accepted(delta))
        return True

    def _accepted(self, delta: TokenDelta) -> TokenDelta:
        """Turn ``delta``, on its way to the client, into the client's own."""
        delta = self._progress.accept(delta, self._parts[delta.rid].choice)
        self._saw(delta)
        return delta

    def _prefill_done(self) -> None:
        self._router.prefill_done(self._decision)

    def _note(self, delta: TokenDelta, prefill: PrefillLeg | None) -> None:
        self._tries.brought(delta, constrained=self._constrained)
        if self._noted.ttft_s is None and delta.token_ids:
            self._noted.ttft_s = self._clock() - self._decision.time_s
            if self._router.is_open(self._decision):  # else it is a batch request: its wait tells nothing of others'
                self._router.began(self._decision, self._noted.ttft_s)
            self._keep()
            usage = delta.usage
            self._noted.cached_tokens = usage.cached_tokens
            self._noted.host_tokens, self._noted.store_tokens = usage.host_tokens, usage.store_tokens
        if delta.finish is not None:
            self._noted.drafted_tokens += delta.usage.drafted_tokens
            self._noted.accepted_tokens += delta.usage.accepted_tokens
        if delta.stages is not None:
            self._noted.times.tell(delta.stages)
        report = delta.kv_transfer
        if report is None:
            return
        if self._decision.fetch is not None and self._prefill is None:
            self._fetched(report)
            return
        self._noted.kv_transfer = report
        self._noted.times.came_s = report.transfer_s if report.transferred else None
        if self._decision.prefill_id is not None:
            self._on_report(self._decision.prefill_id, report)
        if report.transferred:
            self._router.link.record(report.num_bytes, report.transfer_s)
        elif prefill is not None:
            prefill.lease.cancel()  # the decode replica computes the prompt itself

    def _fetched(self, report: PdTransferReport) -> None:
        self._noted.fetch_report = report
        took_s = report.transfer_s if report.transferred else report.wait_s
        failed = not report.transferred and took_s > 0  # else nothing was asked of the link
        self._router.fetched(self._decision, report.num_bytes, took_s, failed=failed)


@dataclass(frozen=True, slots=True)
class _Hold:
    until_s: float
    length_s: float
    reason: str


class HoldOut:
    """The prefill replicas whose last KV transfer failed, each held out of choice for a while."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._holds: dict[str, _Hold] = {}  # by prefill replica

    def take(self, prefill_id: str, report: PdTransferReport) -> None:
        """Note how a KV transfer from ``prefill_id`` went."""
        now_s, before = self._clock(), self._holds.get(prefill_id)
        if report.transferred:
            self._holds.pop(prefill_id, None)
        elif before is None or before.until_s <= now_s:  # KV transfers under way together count as one failure
            length_s = HELD_FIRST_S if before is None else min(2 * before.length_s, HELD_MOST_S)
            self._holds[prefill_id] = _Hold(now_s + length_s, length_s, report.reason or "no reason given")

    def now(self) -> Mapping[str, str]:
        """Return the replicas that are held out, and why."""
        now_s = self._clock()
        self._holds = {each: hold for each, hold in self._holds.items() if now_s < hold.until_s + 2 * HELD_MOST_S}
        return {
            each: f"a KV transfer from it failed ({hold.reason}); not asked for another {hold.until_s - now_s:.1f} s"
            for each, hold in self._holds.items()
            if now_s < hold.until_s
        }
