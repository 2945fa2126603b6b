"""Brings one request to an end: choose, lease, stream; and when a replica dies, go on with another one.

Owns:      the tries of each open request, what was decided for each and why it failed (route_log.py).
Never:     parses HTTP; keeps a request open that its client has left.
Invariant: the deltas of `stream` are those of one undisturbed generation: no id lost, doubled or reordered; every
           decision is reported done; the tries are bounded. A request that was sent is never refused afterwards.
Thread:    the router's event loop.

    parts of what is left ─> choose ─> lease + stream ──finish of every choice──> done      queue too long: Saturated
            ^                              │ replica gone, engine dead, overloaded: excluded, reason kept
            └──────────────────────────────┘ at most ``max_tries`` times

A pair's decode leg is the request; its prefill leg runs beside it (prefill_leg.py) and can only end the try.
"""

import asyncio
import collections
import contextlib
import logging
import math
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

from deployments.channel_server import ChannelServer, Stream
from deployments.leases import Leases, ReplicaGone
from deployments.prefill_leg import PrefillLeg, PrefillLost, legs_of
from deployments.progress import Part, Progress
from deployments.route_log import RouteLog, Try
from deployments.route_request import NO_HINTS, RouteHints, Saturated, query_of
from kvtransfer.types import PeerAddress
from replicas.errors import EngineDead, MantaError, Overloaded
from replicas.types import GenerateRequest, TokenDelta
from routing.router import Router
from routing.types import Decision, Ending, NoReplica, Outcome, RouteQuery

log = logging.getLogger(__name__)

FRAMES_LATE_S = 5.0  # a lease has returned, its last deltas have not come: the channel is broken
LAST_TRY = "the last try stays on one replica"
LOOK_AGAIN_S = 0.1  # while no replica can take a request that another one left undone


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """One failed try, kept for explanation."""

    rid: str
    number: int
    replica_id: str
    reason: str
    num_delivered: int  # output tokens that the client had by then


class Dispatcher:
    """Serves requests with the replicas of one `Router`."""

    def __init__(
        self,
        *,
        router: Router,
        router_id: str,
        channel: ChannelServer,
        leases: Leases,
        max_tries: int = 3,
        retry_wait_s: float = 30.0,
        max_wait_s: float = math.inf,
        routes: RouteLog | None = None,
        transfer_address: Callable[[str], PeerAddress | None] = lambda replica_id: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._router = router
        self.router_id = router_id
        self._channel = channel
        self._leases = leases
        self._max_tries = max_tries
        self._retry_wait_s = retry_wait_s  # how long a request waits for a replica to take over
        self._max_wait_s = max_wait_s  # of the queue before a new request, as estimated
        self._transfer_address = transfer_address  # of the desk of a prefill replica
        self._clock = clock
        self.routes = routes if routes is not None else RouteLog()
        self._ending: set[asyncio.Task[None]] = set()  # leases whose request has ended, about to return
        self.retries: collections.deque[Retry] = collections.deque(maxlen=100)
        self.num_retries = 0
        self.num_open = 0

    async def stream(
        self, request: GenerateRequest, hints: RouteHints = NO_HINTS
    ) -> AsyncGenerator[TokenDelta, None]:
        """The deltas of ``request``; closing the iterator aborts it.

        Raises: what the replica refused it with; NoReplica; Saturated; the last try's error when all failed.
        """
        progress, started_s = Progress(request), self._clock()
        excluded: set[str] = set()
        failure: MantaError | None = None
        self.num_open += 1
        try:
            for number in range(self._max_tries):
                last = LAST_TRY if 0 < number == self._max_tries - 1 else ""
                query = query_of(request, hints, frozenset(excluded), one_replica=last)
                decision = await self._choose(query, failure)
                noted = self.routes.add(request.rid, decision)
                if failure is None:
                    self._refuse_if_saturated(noted)
                left_s = None
                if request.deadline_s is not None:
                    left_s = max(request.deadline_s - (self._clock() - started_s), 0.001)
                attempt = _Attempt(self, noted, progress.parts(number=number, deadline_s=left_s), progress, number)
                try:
                    async with contextlib.aclosing(attempt.run()) as deltas:
                        async for delta in deltas:
                            yield delta
                    return
                except MantaError as error:
                    noted.failure = f"{type(error).__name__}: {error}"
                    if not error.retryable:
                        raise
                    failure = error
                    lost = decision.prefill_id if isinstance(error, PrefillLost) else decision.replica_id
                    assert lost is not None
                    excluded.add(lost)
                    self._record(request, number, lost, error, progress)
            assert failure is not None
            raise failure
        finally:
            self.num_open -= 1

    def explain_only(self, query: RouteQuery) -> Decision:
        """The decision that `stream` would come to now; nothing is sent or remembered. Raises: NoReplica."""
        return self._router.explain_only(query)

    def check(self) -> None:
        """Raises AssertionError if, with no request open, anything is still held for one."""
        self._channel.check()
        self._router.check()
        self.routes.check()
        if self.num_open == 0:
            assert self._channel.num_streams == 0, f"{self._channel.num_streams} streams are open, no request is"
            assert self._router.num_open == 0, f"{self._router.num_open} decisions are open, no request is"

    async def _choose(self, query: RouteQuery, failure: MantaError | None) -> Decision:
        """A decision; a request that a dying replica left undone waits for one to take over."""
        give_up_s = self._clock() + self._retry_wait_s
        while True:
            try:
                return self._router.choose(query)
            except NoReplica as error:
                if failure is None:
                    raise
                if isinstance(failure, Overloaded) or self._clock() > give_up_s:
                    raise failure from error
            await asyncio.sleep(LOOK_AGAIN_S)

    def _refuse_if_saturated(self, noted: Try) -> None:
        """Raises: Saturated, with nothing sent, when even the shortest queue is too long.

        A prompt that is itself long to compute is no reason: trying again later would not help it.
        """
        decision = noted.decision
        if decision.predicted_ttft_s <= self._max_wait_s:
            return
        wait_s = min(each.terms.ttft_s - each.terms.own_s for each in decision.candidates)
        if wait_s <= self._max_wait_s:
            return
        noted.outcome = Outcome(ending=Ending.ABORTED)
        self._router.done(decision, noted.outcome)
        error = Saturated(
            f"every replica's queue is too long: the shortest wait is estimated at {wait_s:.1f} s, at most "
            f"{self._max_wait_s:g} s are allowed (router.max_wait_s): try again later",
            retry_after_s=wait_s - self._max_wait_s,
        )
        noted.failure = f"{type(error).__name__}: {error}"
        raise error

    def _record(
        self, request: GenerateRequest, number: int, replica_id: str, error: MantaError, progress: Progress
    ) -> None:
        retry = Retry(
            rid=request.rid,
            number=number,
            replica_id=replica_id,
            reason=f"{type(error).__name__}: {error}",
            num_delivered=progress.num_delivered,
        )
        self.retries.append(retry)
        self.num_retries += 1
        log.warning(
            "request %s, try %d on replica %s failed after %d tokens: %s",
            retry.rid, number, retry.replica_id, retry.num_delivered, retry.reason,
        )  # fmt: skip

    def _hold(self, replica_id: str, part: Part, stream: Stream) -> "asyncio.Task[None]":
        return asyncio.create_task(self._lease(replica_id, part, stream))

    async def _lease(self, replica_id: str, part: Part, stream: Stream) -> None:
        """Hold the lease of one part; whatever ends it early ends the stream."""
        try:
            error = await self._leases.generate(replica_id, self.router_id, part.request)
        except MantaError as raised:
            error = raised
        except Exception as raised:  # the edge: the request must be answered
            log.exception("the call to replica %s failed", replica_id)
            error = MantaError(f"the call to replica {replica_id} failed: {type(raised).__name__}: {raised}")
        if error is not None:
            stream.fail(error)
            return
        late = ReplicaGone(f"replica {replica_id} ended the request, but its last tokens have not arrived")
        asyncio.get_running_loop().call_later(FRAMES_LATE_S, stream.fail, late)

    def _let_end(self, task: "asyncio.Task[None]") -> None:
        """The request has ended and its lease is about to return: hold the task until it does."""
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)


class _Attempt:
    """One try: the parts of a request on one replica, or its two legs on a pair."""

    def __init__(
        self, dispatcher: Dispatcher, noted: Try, parts: list[Part], progress: Progress, number: int
    ) -> None:
        self._dispatcher = dispatcher
        self._noted = noted
        self._decision = noted.decision
        self._before: Part | None = None  # the prefill leg
        if noted.decision.prefill_id is not None:
            address = dispatcher._transfer_address(noted.decision.prefill_id)
            assert address is not None, f"prefill replica {noted.decision.prefill_id} told no transfer address"
            [whole] = parts  # what has several parts is never handed over (route_request.py)
            self._before, decode = legs_of(whole, generation=number, prefill=address)
            parts = [decode]
        self._parts = {part.request.rid: part for part in parts}
        self._progress = progress

    async def run(self) -> AsyncGenerator[TokenDelta, None]:
        dispatcher, replica_id = self._dispatcher, self._decision.replica_id
        stream = dispatcher._channel.open(self._parts, replica_id=replica_id)
        leases = [dispatcher._hold(replica_id, part, stream) for part in self._parts.values()]
        prefill = self._start_prefill(stream)
        ending = Ending.ABORTED
        try:
            while not self._progress.done:
                for delta in await stream.take():
                    self._raise_if_retryable(delta)
                    self._note(delta)
                    if prefill is not None and self._noted.hand_off and not self._noted.hand_off.transferred:
                        prefill.lease.cancel()  # the decode replica computes the prompt itself
                    yield self._progress.accept(delta, self._parts[delta.rid].choice)
            ending = Ending.FINISHED
        except MantaError:
            ending = Ending.FAILED
            raise
        finally:
            dispatcher._channel.close(stream)
            for lease in leases:
                if ending is not Ending.FINISHED:
                    lease.cancel()
                dispatcher._let_end(lease)
            if prefill is not None:
                prefill.stop(cancel=ending is not Ending.FINISHED)
                dispatcher._let_end(prefill.lease)
            self._noted.outcome = Outcome(
                ending=ending, cached_tokens=self._noted.cached_tokens or 0, ttft_s=self._noted.ttft_s
            )
            dispatcher._router.done(self._decision, self._noted.outcome)

    def _start_prefill(self, decode: Stream) -> PrefillLeg | None:
        dispatcher, decision = self._dispatcher, self._decision
        if self._before is None or decision.prefill_id is None:
            return None
        return PrefillLeg(
            dispatcher._channel,
            self._noted,
            self._before,
            replica_id=decision.prefill_id,
            decode=decode,
            lease=dispatcher._hold,
            on_end=lambda: dispatcher._router.prefill_done(decision),
        )

    def _note(self, delta: TokenDelta) -> None:
        if delta.hand_off is not None:
            self._noted.hand_off = delta.hand_off
            if delta.hand_off.transferred:
                self._dispatcher._router.link.record(delta.hand_off.num_bytes, delta.hand_off.transfer_s)
        if self._noted.ttft_s is None and delta.token_ids:
            self._noted.ttft_s = self._dispatcher._clock() - self._decision.time_s
            self._noted.cached_tokens = delta.usage.cached_tokens

    @staticmethod
    def _raise_if_retryable(delta: TokenDelta) -> None:
        """Raises: the error that another replica may mend, as the engine says; every other finish is the client's."""
        finish = delta.finish
        if finish is None or finish.retry_as is None:
            return
        if finish.retry_as == "overloaded":
            raise Overloaded(finish.message or "the replica's waiting queue is full")
        raise EngineDead(finish.message or "the engine died")
