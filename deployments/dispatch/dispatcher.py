"""Brings one request to an end: choose, lease, stream; and when a replica dies, go on with another one.

Owns:      the tries of each open request, the decision for each and why it failed (route_log.py). route_log.py passes
           on what happens to a request.
Never:     parses HTTP; keeps a request open that its client has left.
Invariant: the deltas of `stream` are those of one undisturbed generation: no id lost, doubled or reordered; every
           decision is reported done; the tries are bounded. A request that was sent is never refused afterwards.
Thread:    the router's event loop.

    parts of what is left ─> choose ─> lease + stream ──finish of every choice──> done      queue too long: Saturated
            ^                              │ replica gone, engine dead, overloaded: excluded, reason kept; or it hangs
            └──────────────────────────────┘ at most ``max_tries`` times since tokens came (attempt.py)
                                             or it waits, and `move_waiting` takes it back: no try has failed

A pair's decode leg is the request; its prefill leg runs beside it (prefill_leg.py) and can only end the try.
"""

import asyncio
import collections
import contextlib
import logging
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from deployments.dispatch.attempt import Attempt, HoldOut, TakenBack, Tries, TryLimits
from deployments.dispatch.leases import LeaseHolder
from deployments.dispatch.prefill_leg import PrefillLost, fetching, legs_of
from deployments.dispatch.progress import Charge, Progress, StraightWay, left_after
from deployments.record.rids import client_rid, owner_of
from deployments.record.route_log import Following, RequestWatch, RouteLog, Try
from deployments.record.timeline import Arrival
from deployments.tenancy.quotas import BeyondLimit, Quotas
from kvtransfer.pages import PageKey
from kvtransfer.types import PeerAddress
from replicas.errors import Fault, MantaError, Overloaded, StepFailed
from replicas.types import GenerateRequest, TokenDelta
from routing.migration import LOOK_S, Waiting, migrations
from routing.router import Router
from routing.types import Decision, Ending, NoReplica, RouteOutcome, RouteQuery


class Saturated(MantaError):
    """Every replica's queue is longer than ``router.max_wait_s`` or a strict objective, or the key's choices are too
    many."""

    fault = Fault.TOO_MANY

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteHints:
    """What a client asks about the choice of a replica."""

    session_id: str = ""
    allowed: frozenset[str] | None = None  # None: every replica
    strict: bool = False  # it is refused where its first token is not expected within its objective


NO_HINTS = RouteHints()


def query_of(
    request: GenerateRequest,
    hints: RouteHints,
    excluded: frozenset[str] = frozenset(),
    *,
    one_replica: str = "",
) -> RouteQuery:
    """Make the query for ``request``; ``one_replica``: why prefill and decode must be on one replica."""
    return RouteQuery(
        rid=request.rid,
        token_ids=request.token_ids,
        salt=request.namespace,
        max_new_tokens=request.sampling.max_new_tokens,
        priority=request.priority,
        objective_s=math.inf if request.objective_s is None else request.objective_s,
        offline=request.offline,
        tenant=request.tenant,
        weight=request.weight,
        session_id=hints.session_id,
        allowed=hints.allowed,
        excluded=excluded,
        one_replica=one_replica or why_one_replica(request),
        adapter="" if request.adapter is None else request.adapter.identity,
    )


def why_one_replica(request: GenerateRequest) -> str:
    """Say what in ``request`` a KV transfer cannot carry; "" if nothing."""
    sampling = request.sampling
    if request.offline:
        return "a batch request stays on one replica"
    if sampling.n > 1:
        return f"its {sampling.n} choices share one prompt"
    if sampling.max_new_tokens == 0:
        return "no token is to be made"
    if sampling.pooling is not None:
        return "only its prompt is computed"
    if request.prompt_logprobs_from is not None:
        return "logprobs of the prompt come from where it is computed"
    return ""


def _hints(request: GenerateRequest, hints: RouteHints, failure: MantaError | None) -> RouteHints:
    """Return the hints of a try: a batch request that has failed may go on anywhere."""
    return NO_HINTS if request.offline and failure is not None else hints


log = logging.getLogger(__name__)

UNWATCHED = RequestWatch()  # of batch requests, which have no objectives and counts of their own
LAST_TRY = "the last try stays on one replica"
LOOK_AGAIN_S = 0.1  # for a replica that can take over a request
MEET_S = 5.0  # how long a new request waits for a replica that Serve has started and that has not reported yet


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """A failed try, kept for explanation."""

    rid: str
    number: int
    replica_id: str
    reason: str
    num_delivered: int  # output tokens that the client had received


class RequestDeltas:
    """The deltas of one request, which runs while they are iterated; closing them aborts it."""

    def __init__(self, progress: Progress, deltas: AsyncGenerator[TokenDelta, None]) -> None:
        self._progress = progress
        self._deltas = deltas

    def __aiter__(self) -> "RequestDeltas":
        return self

    def __anext__(self) -> Awaitable[TokenDelta]:
        return self._deltas.__anext__()

    async def aclose(self) -> None:
        await self._deltas.aclose()

    def go_straight(self, way: StraightWay | None) -> None:
        """Let ``way`` take text as it arrives; what it takes is not iterated."""
        self._progress.straight = way


class Dispatcher:
    """The open requests of one router; serves each with the replicas that its `Router` chooses."""

    def __init__(
        self,
        router: Router,
        holder: LeaseHolder,
        *,
        limits: TryLimits,
        routes: RouteLog | None = None,
        watch: RequestWatch | None = None,
        transfer_address: Callable[[str], PeerAddress | None] = lambda replica_id: None,
        expects_one: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``transfer_address``: of the transfer service of a replica. ``expects_one``: whether a replica that
        Serve has started is about to report."""
        self.router_id = holder.router_id
        self._router = router
        self._holder = holder
        self._limits = limits
        self._transfer_address = transfer_address
        self._expects_one = expects_one
        self._clock = clock
        self._hold_out = HoldOut(clock)
        self.routes = routes if routes is not None else RouteLog()
        self.prompts = router.prompts
        self.retries: collections.deque[Retry] = collections.deque(maxlen=100)
        self.num_retries = 0
        self.num_open = 0
        self.quotas: Quotas | None = None  # where there is a file of keys; the router sets it
        self.choices: collections.Counter[str] = collections.Counter()  # that run or wait, by the key's name
        self._running: dict[Attempt, Waiting] = {}  # the tries that run
        self.watch = watch if watch is not None else RequestWatch()

    def stream(
        self,
        request: GenerateRequest,
        hints: RouteHints = NO_HINTS,
        arrival: Arrival | None = None,
        made: Mapping[int, Sequence[int]] | None = None,
        charge: Charge | None = None,
    ) -> RequestDeltas:
        """Return the deltas of ``request``.

        Args: arrival: of its HTTP request; None: now. made: output ids of choices from a run of another router; the
              deltas go on behind them. charge: of several prompts (`together`); None: it is counted alone.
        Raises, once they are iterated: the error of the replica that refused it; NoReplica; Saturated; OverQuota;
              BeyondLimit; the last error.
        """
        progress = Progress(self.with_objective(request))
        progress.restore(made or {})
        return RequestDeltas(progress, self._stream(progress, hints, arrival, charge, resumes=made is not None))

    async def _stream(
        self, progress: Progress, hints: RouteHints, arrival: Arrival | None, charge: Charge | None, *, resumes: bool
    ) -> AsyncGenerator[TokenDelta, None]:
        request, started_s = progress.request, self._clock()
        tries = Tries(self._limits.max_tries)
        failure: MantaError | None = None
        counting = self._counted([request]) if charge is None else contextlib.nullcontext(charge)
        with self._follow(progress, hints, arrival, started_s, resumes=resumes) as following, counting as counted:
            while True:
                last = LAST_TRY if tries.is_last_of_several else ""
                now = left_after(progress.so_far(), self._clock() - started_s)
                held_out = self._hold_out.now()
                query = query_of(now, _hints(now, hints, failure), tries.excluded, one_replica=last)
                query = self._bounded(query, held_out)
                decision, since_s = await self._choose(query, failure)
                noted = following.decided(decision, held_out, since_s=since_s, failure=failure)
                if tries.number == 0:
                    self._refuse_if_late(noted, hints, request, resumes=resumes)
                    self._refuse_if_saturated(noted, request)
                    self._charge(counted, noted, progress)
                attempt = self._attempt(noted, progress, tries, waited_s=self._clock() - started_s)
                self._running[attempt] = Waiting(
                    query=query, decision=decision, arrived_s=started_s, key=owner_of(request.rid)
                )
                try:
                    async with contextlib.aclosing(attempt.run(following.saw)) as deltas:
                        async for delta in deltas:
                            yield delta
                    return
                except TakenBack as error:
                    failure = error
                    following.moved("freed" if error.move is None else error.move.cause)
                    tries.moved()
                except MantaError as error:
                    noted.failure = f"{type(error).__name__}: {error}"
                    if not error.retryable:
                        raise
                    following.failed()
                    lost = decision.prefill_id if isinstance(error, PrefillLost) else decision.replica_id
                    assert lost is not None
                    self._record(request, tries.number, lost, error, progress)
                    failure, again = tries.failed(lost, error, client_rid(request.rid))
                    if not again:
                        raise failure from None
                finally:
                    del self._running[attempt]

    def with_objective(self, request: GenerateRequest) -> GenerateRequest:
        """Give ``request`` the objective of its first token that all are held against, if its client gave none."""
        if request.offline or request.objective_s is not None:
            return request
        return replace(request, objective_s=self._limits.objective_s)

    async def move_forever(self) -> None:
        """Call `move_waiting` again and again."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                self.move_waiting()
            except Exception:  # the edge: requests go on where they are
                log.exception("moving requests that wait failed; trying again")

    def move_waiting(self) -> None:
        """Ask replicas for the requests that wait there and would begin sooner elsewhere (routing/migration.py)."""
        waiting = {of: attempt for attempt, of in self._running.items() if attempt.may_wait}
        for of, attempt in waiting.items():
            of.is_asked = attempt.move is not None
        for move in migrations(self._router, waiting, self._clock()):
            waiting[move.waiting].ask_back(move)

    def explain_only(self, query: RouteQuery) -> Decision:
        """Return the decision that `stream` would make now; nothing is sent or remembered. Raises: NoReplica."""
        return self._router.explain_only(self._bounded(query, self._hold_out.now()))

    def check(self) -> None:
        """Raises AssertionError if no request is open and something is still held for one."""
        self._holder.channel.check()
        self._router.check()
        self.routes.check()
        if self.num_open == 0:
            num_streams = self._holder.channel.num_streams
            assert num_streams == 0, f"{num_streams} streams are open, no request is"
            assert self._router.num_open == 0, f"{self._router.num_open} decisions are open, no request is"
            assert not self._running, f"{len(self._running)} tries run, no request is open"
            assert not self.choices, f"choices are counted for {self.choices}, no request is open"

    def _bounded(self, query: RouteQuery, held_out: Mapping[str, str]) -> RouteQuery:
        most_s = self._limits.max_wait_s / self._router.overrun.beyond(self._limits.max_wait_s)
        return replace(query, max_wait_s=most_s, excluded=query.excluded | held_out.keys())

    @contextlib.contextmanager
    def _counted(self, requests: Sequence[GenerateRequest]) -> Iterator[Charge | None]:
        """Count the choices of an HTTP request as its key's, while they run or wait; none of a batch request. Gives:
        what counts its tokens once they are sent, if its key is of the file. Raises: Saturated, BeyondLimit, if it has
        too many choices."""
        key, num_new = owner_of(requests[0].rid), sum(each.sampling.n for each in requests if not each.offline)
        entry = None if self.quotas is None else self.quotas.key_of(key)
        self._check_choices(key, num_new, None if entry is None else entry.limits.choices)
        self.num_open += len(requests)
        self.choices[key] += num_new
        charge = None if self.quotas is None or entry is None else Charge(requests, self.quotas, entry)
        failed = False
        try:
            yield charge
        except Exception:
            failed = True
            raise
        finally:
            if charge is not None:
                charge.end(failed=failed)
            self.num_open -= len(requests)
            self.choices[key] -= num_new
            if not self.choices[key]:
                del self.choices[key]

    def _check_choices(self, key: str, num_new: int, limit: int | None) -> None:
        """Raise Saturated or BeyondLimit if ``num_new`` more choices are too many for ``key``. ``limit``: its own."""
        num, most, where = self.choices[key], self._limits.max_choices_per_key, "router.max_choices_per_key"
        if self.quotas is not None and limit is not None:
            num, most, where = num + self.quotas.choices_elsewhere(key), limit, "limits.choices of the key"
        if not key or not num_new or num + num_new <= most:
            return
        if num_new > most:
            raise BeyondLimit(
                f"n: the request has {num_new} choices in all, and an API key may have {most} at once ({where}): ask "
                "for fewer, or send fewer prompts at a time",
                param="n",
            )
        raise Saturated(
            f"{num} choices of this API key run or wait, {num_new} more would exceed {most} "
            f"({where}): send fewer at a time, or try again later",
            retry_after_s=1.0,
        )

    @contextlib.asynccontextmanager
    async def together(self, requests: Sequence[GenerateRequest], hints: RouteHints) -> AsyncIterator[Charge]:
        """Count the prompts of one HTTP request as one. Gives: what `stream` takes with each. Raises: as `_counted`."""
        with self._counted(requests) as charge:
            if charge is not None:
                charge.uncached_len = await self._uncached_len(requests, hints)
            yield charge or Charge(requests)

    async def _uncached_len(self, requests: Sequence[GenerateRequest], hints: RouteHints) -> int:
        """Estimate how many prompt tokens are to be computed: those that neither a cache has nor an earlier one of
        ``requests`` computes."""
        total, seen = 0, set[PageKey]()
        for request in requests:
            try:
                decision = self.explain_only(query_of(request, hints))
            except NoReplica:  # it may be about to come, and has cached nothing
                return sum(len(each.token_ids) for each in requests)
            keys = set(decision.keys.tolist())
            total += len(request.token_ids) - max(decision.overlap_tokens, len(keys & seen) * self._router.page_size)
            seen |= keys
            await asyncio.sleep(0)  # a decision each; 256 of them would block the loop
        return total

    def _charge(self, charge: Charge | None, noted: Try, progress: Progress) -> None:
        """Count a request that is about to be sent. Raises: OverQuota, BeyondLimit."""
        if charge is None:
            return
        try:
            charge.sends(progress, len(progress.request.token_ids) - noted.decision.overlap_tokens)
        except MantaError as error:
            self._refuse(noted, error)
            raise

    def _refuse(self, noted: Try, error: MantaError) -> None:
        """Close a decision with which nothing was sent."""
        noted.outcome = RouteOutcome(ending=Ending.CANCELLED)
        self._router.done(noted.decision, noted.outcome)
        noted.failure = f"{type(error).__name__}: {error}"

    def _follow(
        self, progress: Progress, hints: RouteHints, arrival: Arrival | None, now_s: float, *, resumes: bool
    ) -> Following:
        came = arrival if arrival is not None else Arrival(endpoint="generate", arrived_s=now_s)
        return Following(
            progress.request,
            came,
            routes=self.routes,
            prompts=self.prompts,
            watch=UNWATCHED if progress.request.offline else self.watch,
            clock=self._clock,
            session_id=hints.session_id,
            num_restored=progress.num_restored if resumes else None,
        )

    async def _choose(self, query: RouteQuery, failure: MantaError | None) -> tuple[Decision, float]:
        """Return a decision and when choosing began; after a failed try, wait for a replica that can take over. A new
        request waits for one that is about to report: Serve stops the last old replica once a new one runs. One that
        was taken back goes where it was to go, if that replica is still there."""
        began_s = self._clock()
        give_up_s = began_s + self._limits.retry_wait_s
        move = failure.move if isinstance(failure, TakenBack) else None
        if move is not None:
            if self._router.is_open(move.decision):
                return move.decision, began_s
            self._router.done(move.decision, RouteOutcome(ending=Ending.CANCELLED))  # one of a pair may be there
        while True:
            since_s = self._clock()
            try:
                return self._router.choose(query), since_s
            except NoReplica as error:
                if failure is None:
                    if self._clock() - began_s >= MEET_S or not self._expects_one():
                        raise
                elif isinstance(failure, Overloaded | StepFailed) or self._clock() > give_up_s:
                    raise failure from error
            await asyncio.sleep(LOOK_AGAIN_S)

    def _attempt(self, noted: Try, progress: Progress, tries: Tries, *, waited_s: float) -> Attempt:
        """Make the attempt for what is left of the request, on the replicas of the decision."""
        parts = progress.parts(number=tries.number, waited_s=waited_s)
        prefill_id, fetch = noted.decision.prefill_id, noted.decision.fetch
        if prefill_id is not None:
            address = self._transfer_address(prefill_id)
            assert address is not None, f"prefill replica {prefill_id} told no transfer address"
            [whole] = parts  # what has several parts is never handed over (dispatcher.py)
            parts = legs_of(whole, generation=tries.number, prefill=address)
        if fetch is not None and (donor := self._transfer_address(fetch.donor_id)) is not None:
            parts = [
                fetching(each, fetch, generation=tries.number, donor=donor)
                if each.is_prefill == (prefill_id is not None)
                else each
                for each in parts
            ]
        return Attempt(
            router=self._router,
            holder=self._holder,
            clock=self._clock,
            noted=noted,
            parts=parts,
            progress=progress,
            tries=tries,
            on_report=self._hold_out.take,
        )

    def _refuse_if_late(self, noted: Try, hints: RouteHints, request: GenerateRequest, *, resumes: bool) -> None:
        """Raise Saturated, with nothing sent, if the client is strict about its objective, and its first token is not
        expected within it even before all that it may pass. A stream that resumes has had its first token."""
        decision = noted.decision
        late_s = decision.predicted_ttft_s - decision.objective_s
        if hints.strict and not resumes and late_s > 0.0:
            assert request.objective_s is not None, "what has none is never late"
            advice = "try again later, or" if decision.shortest_wait_s >= late_s else "shorten the prompt, or"
            error = Saturated(
                f"its first token is expected after {decision.predicted_ttft_s:.1f} s, which is later than its strict "
                f"x-manta-objective of {request.objective_s:g} s: {advice} allow more time",
                retry_after_s=late_s,
            )
            self._refuse(noted, error)
            raise error

    def _refuse_if_saturated(self, noted: Try, request: GenerateRequest) -> None:
        """Raise Saturated, with nothing sent, if even the shortest queue is too long.

        A prompt that itself takes long to compute is no reason: trying again later would not help. Where requests have
        waited longer than allowed of late, and than estimated, this one is expected to. A batch request is let in only
        where others keep their objective.
        """
        offline, decision = request.offline, noted.decision
        most_s = self._limits.objective_s if offline else self._limits.max_wait_s
        overrun = self._router.overrun.beyond(most_s)
        wait_s = decision.shortest_wait_s * overrun
        if decision.predicted_ttft_s * overrun <= most_s or wait_s <= most_s:
            return
        late = f" (first tokens take {overrun:.1f} times their estimate)" if overrun > 1.05 else ""
        setting = "observability.ttft_objective_s" if offline else "router.max_wait_s"
        error = Saturated(
            f"every replica's queue is too long: the shortest wait is estimated at {wait_s:.1f} s{late}, at most "
            f"{most_s:g} s are allowed ({setting}): try again later",
            retry_after_s=wait_s - most_s,
        )
        self._refuse(noted, error)
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
            retry.rid, number + 1, retry.replica_id, retry.num_delivered, retry.reason,
        )  # fmt: skip
