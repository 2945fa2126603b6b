"""Recent routing decisions and their outcomes, to explain why a request went where it did; the follower of a request.

A follower keeps a request's record and times from its first decision to its end, and makes the calls to the watch.

Owns:      a bounded ring of records, the oldest dropped for a new request; the order in which they last changed.
Never:     decides anything; holds prompts or texts (a decision holds hashes of pages).
Invariant: at most ``capacity`` records, of which batch requests are one in LINES_SHARE; a record's tries are in
           order, each with its outcome once that is known. A record changes when a try begins or fails, with its first
           token and its end; its number grows with each change. ``opened`` and ``ended`` are called once each for a
           request. An exception of a watch goes to the log, nowhere else.
Thread:    the router's event loop.
"""

import asyncio
import hashlib
import itertools
import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType, TracebackType
from typing import ParamSpec

from dashboards.catalog import ANSWERING, FAILED
from deployments.record.rids import client_rid, owner_of
from deployments.record.timeline import Arrival, LegTimes, Timeline
from deployments.tenancy.quotas import OverQuota
from deployments.tenancy.tenants import OTHERS
from replicas.errors import Fault, Overloaded
from replicas.types import Finish, FinishReason, GenerateRequest, PdTransferReport, Tally, TokenDelta
from routing.migration import Cause
from routing.types import Decision, RouteOutcome
from routing.why import Asked, Miss, PromptHistory

MOST_ADAPTERS = 100  # that are counted by name; the rest is one
MOST_TOLD = 1000  # records in one answer to the observatory
LINES_SHARE = 8  # batch requests, which may be very many, have an eighth of the records, and push out none of others
NONE_HELD_OUT: Mapping[str, str] = MappingProxyType({})


@dataclass(slots=True, kw_only=True)
class Try:
    """One decision for a request, and how the try went."""

    decision: Decision
    cached_tokens: int | None = None  # as the replica counted, in all tiers; None before the first token
    host_tokens: int = 0  # of those, loaded from its host
    store_tokens: int = 0  # of those, read from the store
    drafted_tokens: int = 0  # guesses that steps tried for its choices that have ended
    accepted_tokens: int = 0  # of those, that came true
    ttft_s: float | None = None
    ended_s: float | None = None  # on the router's clock; None while it runs
    outcome: RouteOutcome | None = None  # None while it runs
    failure: str | None = None  # why the request went elsewhere, or was refused
    moved: str | None = None  # it waited, and was given back for another replica: why that one begins it sooner
    kv_transfer: PdTransferReport | None = None  # how the K/V came, as the decode replica saw it
    fetch_report: PdTransferReport | None = None  # how pages came from a donor
    held_out: Mapping[str, str] = field(default_factory=dict)  # prefill replica left out -> why (attempt.py)
    prefill_end: str | None = None  # how the prefill leg ended; None while it runs, or without one
    times: LegTimes = field(default_factory=LegTimes)  # as the engines reported them
    miss: Miss | None = None  # why not more of it was cached; None: nothing was missed, or no token came


@dataclass(slots=True, kw_only=True)
class RouteRecord:
    """All decisions for one request, and its times."""

    rid: str
    timeline: Timeline
    session: str | None = None  # hash of the session's id and its caller, if it has one
    tenant: str = ""
    tries: list[Try] = field(default_factory=list)
    outcome: str = "running"  # then one of the catalogue's OUTCOMES
    seq: int = 0  # of its last change

    @property
    def time_s(self) -> float:
        """When the request arrived, in seconds since 1970."""
        return self.timeline.arrival.time_s

    @property
    def num_tries(self) -> int:
        """The tries but those from which a request that waited has moved."""
        return len(self.tries) - self.num_migrations

    @property
    def num_migrations(self) -> int:
        return sum(each.moved is not None for each in self.tries)

    @property
    def name(self) -> str:
        """The client's name of the request."""
        return client_rid(self.rid)


class RouteLog:
    """The records of the most recent ``capacity`` requests."""

    def __init__(self, capacity: int = 1000) -> None:
        self.capacity = capacity
        self._records: OrderedDict[str, RouteRecord] = OrderedDict()  # by rid, oldest first
        self._by_name: dict[str, str] = {}  # client's name -> rid of the most recent request with it
        self._by_change: OrderedDict[str, RouteRecord] = OrderedDict()  # by rid; what changed last is last
        self._lines: deque[str] = deque()  # rids of the records of lines, oldest first
        self._most_lines = max(1, capacity // LINES_SHARE)
        self._seq = 0

    def add(
        self,
        rid: str,
        decision: Decision,
        timeline: Timeline,
        held_out: Mapping[str, str] = NONE_HELD_OUT,
        *,
        session_id: str = "",
        tenant: str = "",
        offline: bool = False,
    ) -> Try:
        """Add the next try of request ``rid``; ``offline``: it is a batch request."""
        record = self._records.get(rid)
        if record is None:
            owned = f"{owner_of(rid)} {session_id}".encode()  # two callers may have named theirs alike
            session = hashlib.blake2b(owned, digest_size=4).hexdigest() if session_id else None
            record = self._records[rid] = RouteRecord(rid=rid, timeline=timeline, session=session, tenant=tenant)
            self._by_name[record.name] = rid
            if offline:
                self._lines.append(rid)
            if len(self._lines) > self._most_lines:
                self._drop(self._lines[0])
            elif len(self._records) > self.capacity:
                self._drop(next(iter(self._records)))
        attempt = Try(decision=decision, held_out=held_out)
        record.tries.append(attempt)
        self.changed(record)
        return attempt

    def changed(self, record: RouteRecord) -> None:
        """Note that ``record`` has changed, if it is still kept."""
        if record.rid in self._records:
            self._seq += 1
            record.seq = self._seq
            self._by_change[record.rid] = record
            self._by_change.move_to_end(record.rid)

    def changed_since(self, seq: int, *, most: int | None = None) -> tuple[list[RouteRecord], int]:
        """Return the records that changed after change number ``seq``, the longest unchanged first, and the number to
        ask with next. 0, or a number of another life of this router, asks for all. ``most``: return only this many, the
        last changed; later calls do not return the others either."""
        known = seq if seq <= self._seq else 0
        newer = itertools.takewhile(lambda record: record.seq > known, reversed(self._by_change.values()))
        return list(itertools.islice(newer, most))[::-1], self._seq

    def running(self) -> list[RouteRecord]:
        """Return the kept records of requests that run and have a token, oldest first."""
        return [each for each in self._records.values() if each.outcome == "running" and each.timeline.num_output]

    def get(self, rid: str) -> RouteRecord | None:
        return self._records.get(rid)

    def recent(self) -> list[RouteRecord]:
        """Return all kept records, oldest first."""
        return list(self._records.values())

    def find(self, name: str) -> RouteRecord | None:
        """Find a record by the client's name (the most recent one with it), the answer's id, or the internal rid."""
        for each in (name, *(name.removeprefix(kind) for kind in ("chatcmpl-", "cmpl-", "msg_"))):
            found = self._records.get(self._by_name.get(each, each))
            if found is not None:
                return found
        return None

    def __len__(self) -> int:
        return len(self._records)

    def check(self) -> None:
        """Raises AssertionError if there are too many records, or a name leads to none or to another's."""
        assert len(self._records) <= self.capacity
        assert len(self._lines) <= self._most_lines
        assert [rid for rid in self._records if rid in self._lines] == list(self._lines)
        assert all(self._records[rid].name == name for name, rid in self._by_name.items())
        assert self._by_change.keys() == self._records.keys()
        numbers = [record.seq for record in self._by_change.values()]
        assert numbers == sorted(numbers)

    def _drop(self, rid: str) -> None:
        """Forget the record of ``rid``, the oldest of all, or of those of lines."""
        record = self._records.pop(rid)
        if self._lines and self._lines[0] == rid:
            self._lines.popleft()
        del self._by_change[rid]
        if self._by_name.get(record.name) == rid:
            del self._by_name[record.name]


log = logging.getLogger(__name__)

ACCESS = {"serve_access_log": True}  # extra of a line about each request: Serve's enable_access_log: false drops it
P = ParamSpec("P")


OBJECTIVES: Mapping[str, float] = {"ttft_objective_s": 2.0, "itl_objective_s": 0.1}


def judged(
    ttft_s: float | None, itl_s: float | None, outcome: str, objectives: Mapping[str, float] = OBJECTIVES
) -> dict[str, bool]:
    """Return whether a request met each objective (ttft, itl) that it can be held against.

    Failing before the first token misses ttft, and failing after it itl: an overload that refuses or times out must not
    look like one that serves all requests in time. Cancelled and invalid requests are not judged.
    """
    if outcome not in ("running", "ok", *FAILED):
        return {}
    met, failed = {}, outcome in FAILED
    if ttft_s is not None or failed:
        met["ttft"] = ttft_s is not None and ttft_s <= objectives["ttft_objective_s"]
    if ttft_s is not None and failed:
        met["itl"] = False
    elif itl_s is not None and outcome == "ok":
        met["itl"] = itl_s <= objectives["itl_objective_s"]
    return met


def predicted_tokens(noted: Try) -> int:
    """Return the tokens predicted to be cached where the prompt was computed in the end (as routing/fleet_state.py)."""
    failed = noted.kv_transfer is not None and not noted.kv_transfer.transferred
    if failed and noted.decision.pair is not None:
        return noted.decision.pair.chosen.cached_tokens
    return noted.decision.overlap_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A request that has ended, with all that is known of it."""

    request: GenerateRequest
    session_id: str
    answer: Sequence[int]  # token ids of its first choice
    timeline: Timeline
    record: RouteRecord | None  # None: no decision was made
    outcome: str


class RequestWatch:
    """An observer of every request of one router. Each call is short: it runs between tokens.

    This one counts what the live view and its alerts need (``counts``, by the names of dashboards/alerts.py).
    """

    on_gap: Callable[[float, int], None] | None = None  # with each delta: seconds per token since the last, and tokens
    on_end: "Callable[[Ended], None] | None" = None  # with each request that has ended (recording.py)
    gaps: Tally | None = None  # those gaps, where they are counted

    def __init__(self, objectives: Mapping[str, float] = OBJECTIVES) -> None:
        self.objectives = objectives
        self.counts: Counter[str] = Counter()  # they only grow, as the next
        # (name, kind) of adapters: requests, and input and output tokens
        self.adapters = Counter({(OTHERS, kind): 0 for kind in ("requests", "input", "output")})

    def opened(self, endpoint: str) -> None:
        """Note that a request has come."""

    def decided(self, decision: Decision, *, took_s: float, failure: Exception | None) -> None:
        """Note a decision. ``failure``: of the try before, if there was one."""

    def began(self, noted: Try, timeline: Timeline) -> None:
        """Note the first token."""
        self.counts["predicted"] += predicted_tokens(noted)
        self.counts["actual"] += noted.cached_tokens or 0

    def moved(self, cause: Cause) -> None:
        """Note that a request that waited goes to another replica."""

    def tried(self, noted: Try) -> None:
        """Note that a try has ended, well or not."""

    def ended(self, timeline: Timeline, *, prompt_tokens: int, outcome: str, adapter: str = "") -> None:
        """Note the end of a request; ``outcome`` is one of the catalogue's OUTCOMES; ``adapter``: by its name."""
        self._count(outcome, judged(timeline.ttft_s, timeline.mean_itl_s, outcome, self.objectives))
        if adapter:
            if self.requests_of(adapter) is None:
                adapter = OTHERS
            tokens = {(adapter, "input"): prompt_tokens, (adapter, "output"): timeline.num_output}
            self.adapters.update({(adapter, "requests"): 1, **tokens})

    def requests_of(self, adapter: str) -> int | None:
        """Return how many requests ended with ``adapter``; None where they count as those of others."""
        full = len(self.adapters) > 3 * MOST_ADAPTERS
        return self.adapters.get((adapter, "requests"), None if full else 0)

    def responded(self, status: int) -> None:
        """Note the end of an HTTP response to a request, with its status; CLIENT_CLOSED: it had none."""

    def answered(self, endpoint: str, *, outcome: str, total_s: float) -> None:
        """Note an HTTP request without a prompt: refused before, or for no generation."""
        self._count(outcome, judged(None, None, outcome) if endpoint in ANSWERING else {})

    def streams_detached(self, num: int) -> None:
        """Note how many streams wait for their clients now."""

    def stream_resumed(self, how: str) -> None:
        """Note a client that came back: its stream was ``kept``, or its request runs ``again``."""

    def lines_running(self, num: int) -> None:
        """Note how many batch requests run now."""

    def batches_stalled(self, num: int) -> None:
        """Note how many batches do not go on now, as their folder cannot keep what lines became."""

    def line_ran(self, outcome: str) -> None:
        """Note what has become of a batch request: one of the catalogue's LINES."""

    def stream_expired(self) -> None:
        """Note a stream that was given up, with something for a client that did not come back in time."""

    def _count(self, outcome: str, met: Mapping[str, bool]) -> None:
        counts = self.counts
        counts["requests"] += 1
        counts["failed"] += outcome in ("error", "timeout")
        counts["shed"] += outcome == "shed"
        for slo, in_time in met.items():
            counts[f"{slo}_judged"] += 1
            counts[f"{slo}_missed"] += not in_time


def tell(hear: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
    """Call a watch. Its errors are logged: no request fails because counting it did."""
    try:
        hear(*args, **kwargs)
    except Exception:
        log.exception("what watches requests failed; the request goes on")


class Following:
    """The record and times of one open request; a context manager around all its tries."""

    def __init__(
        self,
        request: GenerateRequest,
        arrival: Arrival,
        *,
        routes: RouteLog,
        prompts: PromptHistory,
        watch: RequestWatch,
        clock: Callable[[], float],
        session_id: str = "",
        num_restored: int | None = None,
    ) -> None:
        """``num_restored``: the output tokens that are known of another router's run; None: this is the first."""
        on_gap = watch.on_gap
        told = None if on_gap is None else lambda gap_s, num_tokens: tell(on_gap, gap_s, num_tokens)
        self.timeline = Timeline(arrival, num_choices=request.sampling.n, on_gap=told)
        self._request = request
        self._session_id = session_id
        self._num_restored = num_restored
        self._answer: list[int] | None = [] if watch.on_end is not None else None  # None: it is not asked for
        self._routes = routes
        self._prompts = prompts
        self._watch = watch
        self._clock = clock
        self._record: RouteRecord | None = None
        self._try: Try | None = None

    def __enter__(self) -> "Following":
        self.timeline.arrival.num_prompts += 1
        tell(self._watch.opened, self.timeline.arrival.endpoint)
        return self

    def decided(
        self, decision: Decision, held_out: Mapping[str, str], *, since_s: float, failure: Exception | None
    ) -> Try:
        """Note the next try, about to be sent. ``since_s``: when choosing began."""
        self._close_try()
        now_s = self._clock()
        self._try = self._routes.add(
            self._request.rid, decision, self.timeline, held_out, session_id=self._session_id,
            tenant=self._request.tenant, offline=self._request.offline,
        )  # fmt: skip
        self._record = self._routes.get(self._request.rid)
        self.timeline.sent(self._try.times, now_s)
        tell(self._watch.decided, decision, took_s=now_s - since_s, failure=failure)
        return self._try

    def moved(self, cause: Cause) -> None:
        """Note that the replica gave the request back while it waited; another try follows. ``cause``: of
        routing/migration.py."""
        assert self._try is not None
        self._try.moved = cause
        tell(self._watch.moved, cause)
        self.failed()

    def failed(self) -> None:
        """Note that the try has failed; another one may follow once there is a replica for it."""
        self._close_try()
        self._changed()

    def saw(self, delta: TokenDelta) -> None:
        """Note a delta on its way to the client."""
        if self._answer is not None and delta.index == 0:
            self._answer += delta.token_ids
        if self.timeline.saw(delta, self._clock()):
            assert self._try is not None
            tell(self._judge, self._try)
            tell(self._watch.began, self._try, self.timeline)
            self._changed()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close_try()
        self.timeline.end(self._clock())
        outcome = outcome_of(self._finish(), error)
        if self._record is not None:
            self._record.outcome = outcome
            self._changed()
        adapter = "" if self._request.adapter is None else self._request.adapter.name
        prompt_tokens = len(self._request.token_ids)
        tell(self._watch.ended, self.timeline, prompt_tokens=prompt_tokens, outcome=outcome, adapter=adapter)
        if self._watch.on_end is not None:
            tell(self._watch.on_end, self._ended(outcome))
        told = told_of(self._request, self.timeline, self._record, outcome, num_restored=self._num_restored)
        text = " ".join(f"{name}={value}" for name, value in told.items())
        log.info("finished %s", text, extra={**told, **ACCESS})

    def _ended(self, outcome: str) -> Ended:
        return Ended(
            request=self._request,
            session_id=self._session_id,
            answer=self._answer or (),
            timeline=self.timeline,
            record=self._record,
            outcome=outcome,
        )

    def _finish(self) -> Finish | None:
        """Return how the engines ended the request: all its choices ended, or one failed, which ends the request."""
        worst = self.timeline.worst
        if worst is None or self.timeline.is_whole or worst.reason is FinishReason.ERROR:
            return worst
        return worst if worst.reason is FinishReason.ABORT and worst.fault is Fault.TIMED_OUT else None

    def _close_try(self) -> None:
        if self._try is not None:
            self._try.ended_s = self._clock()
            if self._try.miss is not None:
                self._try.miss = self._prompts.settled(self._try.miss, self._try.decision)
            tell(self._watch.tried, self._try)
            self._try = None

    def _judge(self, noted: Try) -> None:
        """Say why not more of the prompt was cached, if all of it could have been."""
        request = self._request
        computed = request.prompt_logprobs_from is not None or request.sampling.pooling is not None
        if computed or request.offline or self._num_restored is not None or noted.cached_tokens is None:
            return
        asked = Asked(
            token_ids=request.token_ids,
            owner=owner_of(request.rid),
            tenant=request.tenant,
            salt=request.cache_salt,
            adapter="" if request.adapter is None else request.adapter.identity,
            session_id=self._session_id,
            parts=self.timeline.arrival.parts,
        )
        noted.miss = self._prompts.judge(noted.decision, noted.cached_tokens, asked)

    def _changed(self) -> None:
        if self._record is not None:
            self._routes.changed(self._record)


def told_of(
    request: GenerateRequest,
    timeline: Timeline,
    record: RouteRecord | None,
    outcome: str,
    *,
    num_restored: int | None = None,
) -> dict[str, str | int | float]:
    """Return what the log says of a request that has ended: its replicas are those of its last try, its cached tokens
    those of the first that had a token; nothing that is unknown."""
    tries = record.tries if record is not None else []
    last = tries[-1] if tries else None
    first = next((each for each in tries if each.cached_tokens is not None), None)
    cached = None if first is None else first.cached_tokens

    def rounded(seconds: float | None) -> float | None:
        return None if seconds is None else round(seconds, 4)

    told: dict[str, str | int | float | None] = {
        "rid": request.rid,
        "key": owner_of(request.rid) or None,
        "tenant": request.tenant or None,
        "adapter": None if request.adapter is None else request.adapter.name,
        "model_replica": None if last is None else last.decision.replica_id,  # Serve's "replica" is the router's own
        "prefill_replica": None if last is None else last.decision.prefill_id,
        "prompt": len(request.token_ids),
        "cached_l1": None if first is None or cached is None else cached - first.host_tokens - first.store_tokens,
        "cached_l2": None if first is None else first.host_tokens,
        "cached_l3": None if first is None else first.store_tokens,
        "output": timeline.num_output,
        "queue_s": rounded(None if timeline.first_s is None else timeline.stages_so_far.queue_s),
        "ttft_s": rounded(timeline.ttft_s),
        "itl_s": rounded(timeline.mean_itl_s),
        "total_s": rounded(timeline.total_s),
        "finish": ",".join(timeline.finish_reasons) or None,
        "outcome": outcome,
        "tries": 0 if record is None else record.num_tries,
        "migrations": (record and record.num_migrations) or None,
        "stream": request.recall[:16] or None,  # that can go on at another router: all that has run of it has this
        "restored": num_restored,
    }
    return {name: value for name, value in told.items() if value is not None}


def outcome_of(finish: Finish | None, error: BaseException | None) -> str:
    """Return how a request ended, in the catalogue's words. ``finish``: how its engines ended it, if they did."""
    if finish is not None:
        if finish.reason is FinishReason.ERROR:
            return "error"
        if finish.reason is FinishReason.ABORT:
            return "timeout" if finish.fault is Fault.TIMED_OUT else "cancelled"
        return "ok"
    if error is None or isinstance(error, GeneratorExit | asyncio.CancelledError):
        return "cancelled"
    if isinstance(error, Overloaded):
        return "shed"
    if isinstance(error, OverQuota):
        return "invalid"  # it says nothing about the fleet
    return outcome_of_fault(getattr(error, "fault", Fault.INTERNAL))


def outcome_of_fault(fault: Fault) -> str:
    """Return how a request ended that failed so."""
    return _OUTCOMES.get(fault, "invalid")


_OUTCOMES = {
    Fault.CANCELLED: "cancelled",
    Fault.TIMED_OUT: "timeout",
    Fault.TOO_MANY: "shed",
    Fault.INTERNAL: "error",
    Fault.UNAVAILABLE: "error",
    Fault.DISK_FULL: "error",
}
