"""Req: one choice of one request inside the engine. Ids and lengths; what it holds; where it is.

Owns:      its tokens and its state. Pages and locks are in ``holding``, which only cache/kv.py gives and takes.
Invariant: moves follow ``MOVES``; a finished request holds nothing. No stage of `stage_times` is negative, and the
           stages sum to the time from arrival to the end.
Thread:    scheduler thread only.

    WAITING ──admit──> PREFILLING ──last chunk──> RUNNING ──stop, length──> FINISHED
       ^                    │                        │
       └────── retract ─────┴──────── retract ───────┘          (abort, error, deadline: from any state to FINISHED)

    decode leg:   WAITING ──grant──> RECEIVING ──its K/V arrived──> RUNNING
                     ^── transfer failed ┘   (a fetch: however it ended)
    prefill leg:  PREFILLING ──last chunk──> HANDING_OFF ──the receiver confirms──> FINISHED

A constrained request whose grammar forces a run of tokens is RUNNING, then PREFILLING for the one step that computes
the run, and RUNNING again.

A decode leg is WAITING in the PreallocQueue until its grant; if its K/V does not arrive, it is computed like any other
request. A prefill leg that has begun is never retracted: a peer may be reading its pages.

Stages, between time stamps that are each set once, where the event happens:

    computed here      arrival ──queue──> admitted ──prefill──> first token ──decode──> end
    prefill leg        arrival ──queue──> admitted ──prefill──> last step ──transfer──> end
    decode leg         arrival ──queue──> granted ──transfer──> K/V and first token ──decode──> end
      that failed, or  arrival ──queue──> granted ──transfer──> failed ──queue──> admitted ──prefill──> ...
      a fetch

A prefill leg starts when its receiver has row and pages, so its queue stage includes the receiver's. A request that
ends early has the stages that it reached. A retracted request stays in its stage: its second wait in the queue counts
as prefill before its first token, and as decode after it.
"""

import enum
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt

from kvtransfer.types import PdTicket
from replicas.types import (
    Finish,
    GenerateRequest,
    PdLeg,
    PdTransfer,
    PdTransferReport,
    SamplingParams,
    StageTimes,
    TokenIds,
    TokenLogprob,
    Usage,
)


class Guide(Protocol):
    """What holds one output to its constraint (replicas/grammar/matcher.py): so requests need not know grammars."""

    @property
    def error(self) -> str | None:
        """Why no further token is allowed, or None."""
        ...

    def consume(self, token_id: int) -> bool:
        """Take in the next token of the output; False if it is not allowed."""
        ...

    def along(self, token_ids: Sequence[int]) -> Sequence[Self]:
        """Return guides that stand behind each of ``token_ids``, the next of the output, up to the first that is not
        allowed or behind which another is forced."""
        ...

    def forced(self) -> int | None:
        """Return the token that alone may come next, where that is known without a mask."""
        ...

    @property
    def mask_s(self) -> float:
        """The CPU seconds that its last mask took."""
        ...

    @property
    def due_s(self) -> float:
        """The CPU seconds that its next mask is expected to take, which is not computed yet; else 0."""
        ...

    @property
    def is_pending(self) -> bool:
        """Whether a thread computes its next mask, or will."""
        ...

    def drop(self) -> None:
        """Compute no mask of it any more: its output is over."""
        ...

    def words(self) -> npt.NDArray[np.int32] | None:
        """Return the mask of the next token, as `SampleRow.mask`."""
        ...

    def begin_masks(self, others: Sequence[Self], *, apart: bool = False, first: bool = False) -> None:
        """Start to compute the masks of this output and of ``others`` while a step runs; ``apart``: over several steps,
        which go before them; ``first``: of a request that waits."""
        ...


class ReqState(enum.Enum):
    """Where a request stands between submit and finish; MOVES lists the legal moves."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    RECEIVING = "receiving"  # holds row and pages; another replica is sending its K/V
    HANDING_OFF = "handing_off"  # its prompt is computed; another replica has not confirmed yet that it has the K/V
    RUNNING = "running"
    FINISHED = "finished"


MOVES: dict[ReqState, frozenset[ReqState]] = {
    ReqState.WAITING: frozenset({ReqState.PREFILLING, ReqState.RECEIVING, ReqState.FINISHED}),
    ReqState.PREFILLING: frozenset({ReqState.RUNNING, ReqState.HANDING_OFF, ReqState.WAITING, ReqState.FINISHED}),
    ReqState.RECEIVING: frozenset({ReqState.RUNNING, ReqState.WAITING, ReqState.FINISHED}),
    ReqState.HANDING_OFF: frozenset({ReqState.FINISHED}),
    ReqState.RUNNING: frozenset({ReqState.PREFILLING, ReqState.WAITING, ReqState.FINISHED}),
    ReqState.FINISHED: frozenset(),
}


@dataclass(frozen=True, slots=True)
class Behind:
    """What a request has left behind its window, where all layers have one or some do (cache/parts.py)."""

    gone_len: int = 0  # all: tokens before it, whose pages are no longer held: whole pages; prefix_len is 0 then
    seen_from: int = 0  # some: the first page whose part it sees, or has begun with
    reused_len: int = 0  # some: tokens that it has begun with
    has_moved: bool = False  # some: it has gone on behind these
    cut_at: int = 0  # some: tokens of the prefix that it would have reused if no part were gone
    chunk_end: int = 0  # some: of its prompt, where a chunk ends
    computed_from: int = 0  # some: tokens behind whose pages nothing is kept for others, as another replica ran them
    seen_to: int | None = None  # some: the page from which on it has no parts, in a KV transfer
    num_reserved: int = 0  # some: the most parts that it sees at once


NOTHING_BEHIND = Behind()


@dataclass(slots=True)
class Holding:
    """What a request holds of the pools while it is in flight; cache/kv.py makes and unmakes it."""

    row: int  # its row of the ReqToTokenPool
    lock: object  # receipt of the prefix cache for the locked path
    prefix_len: int  # leading tokens whose pages belong to the tree (whole pages, locked by ``lock``)
    kv_len: int  # tokens that have a slot: [0, prefix_len) the tree's, [prefix_len, kv_len) its own
    behind: Behind = NOTHING_BEHIND


@dataclass(slots=True, eq=False)
class Leg:
    """One side of a KV transfer, as part of its request; driven by replicas/disagg."""

    kv_transfer: PdTransfer
    exposed: bool = False  # a peer may read or write what it holds: it can only leave through quarantine
    detained: object | None = None  # receipt of cache/kv.py, when its pages went to quarantine
    closing: bool = False  # its room has failed or was aborted: only the room's last event is still to come
    first_page: int = 0  # pages of the sequence before this one are the receiver's own
    next_page: int = 0  # prefill leg: pages before this one are sent, or need not be
    granted_s: float | None = None  # decode leg: when it got row and pages
    # when the transfer of its K/V ended, and it waits to be computed: a decode leg's that failed, or a fetch
    waits_again_s: float | None = None
    report: PdTransferReport | None = None  # decode leg, fetch: how it went, until it is in a delta

    @property
    def role(self) -> PdLeg:
        """What it is now: a prefill leg that fetches first is a fetch until that is over."""
        return self.kv_transfer.leg if self.kv_transfer.fetch is None else PdLeg.FETCH

    @property
    def ticket(self) -> PdTicket:
        return self.kv_transfer.fetch or self.kv_transfer.ticket


@dataclass(slots=True, eq=False)
class Stamps:
    """When a request passed each point of its life, in seconds on the engine's clock."""

    arrival_s: float
    admitted_s: float | None = None  # its first step was scheduled, or its K/V had arrived
    first_token_s: float | None = None
    passed_s: float = 0.0  # how long others went before it as their tenants had credit: while it waited, or ran
    ended_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """How long others may go before a request, where the order goes by objectives."""

    own_len: int = 0  # its tokens to compute, as it came
    at_len: float = math.inf  # the prompt tokens that the engine has computed in all when its own must be
    at_begun: float = math.inf  # the requests that have begun in all, where places or pages were short, when it must


OFFLINE = -2000  # the priority of batch requests: below every other


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestClass:
    """A class of requests: one of a higher class goes first, whatever the priorities, tenants and ages.

    A request is of the last class of `CLASSES` that has it. It starts only where no request of a higher class could,
    and is retracted where one of a higher class needs its row, its pages or its adapter's place.
    """

    has: Callable[[GenerateRequest], bool]
    level: int  # the highest goes first; below 0: in the background, and not counted as load
    priority: int | None = None  # of its requests, whatever they ask for; None: what they ask for
    chunk_share: float = 1.0  # of a step's prompt tokens: a request that comes meanwhile waits for the step's end


CLASSES: dict[str, RequestClass] = {
    "ordinary": RequestClass(has=lambda request: True, level=0),
    "batch": RequestClass(has=lambda request: request.offline, level=-1, priority=OFFLINE, chunk_share=1 / 8),
}


@dataclass(slots=True, eq=False)
class Rank:
    """What puts a request before others in queues."""

    request_class: RequestClass = CLASSES["ordinary"]
    priority: int = 0  # higher runs first; 0 for all where the scheduler's priorities are off
    from_s: float = 0.0  # arrival_s, less what it had waited and what its priority is worth; set by the scheduler
    bound: Bound = Bound()  # set once, when it comes to wait


@dataclass(frozen=True, slots=True)
class CachedTokens:
    """Prompt tokens that were reused instead of computed, and where their K/V lay."""

    tokens: int = 0  # in all tiers
    host: int = 0  # of them, loaded from host memory
    store: int = 0  # of them, read from the store first
    kept: int = 0  # leading tokens of the prompt that the cache has got since, or had; 0: it has got none

    def of(self, tokens: int) -> "CachedTokens":
        """Return the parts of ``tokens`` that were reused: this one's ``host`` are those that were loaded, from the
        store too."""
        loaded = min(self.host, tokens)
        store = min(self.store, loaded)
        return CachedTokens(tokens, loaded - store, store)

    @property
    def by_tier(self) -> dict[str, int]:
        """The tokens of each tier: what another replica is told (`KVTransferMeta.cached_tokens`)."""
        return {"device": self.tokens - self.host - self.store, "host": self.host, "store": self.store}

    @staticmethod
    def from_tiers(by_tier: Mapping[str, int], *, prompt_len: int) -> "CachedTokens":
        """Read `by_tier` of another replica. No tier counts beyond ``prompt_len``, whatever it says."""
        store = min(by_tier.get("store", 0), prompt_len)
        host = min(by_tier.get("host", 0), prompt_len - store)
        return CachedTokens(min(sum(by_tier.values()), prompt_len), host, store)


@dataclass(slots=True, eq=False)
class Req:
    """One sequence being generated.

    ``ids[:num_tokens]`` is prompt + output; the K/V of ``ids[:computed_len]`` is in the pool.
    """

    rid: str
    index: int
    sampling: SamplingParams
    salt: str  # the request's namespace: its adapter's part included
    stamps: Stamps
    asked: GenerateRequest  # as it came
    prompt_len: int
    ids: TokenIds  # [prompt_len + max_new_tokens] buffer
    num_tokens: int
    eos_ids: frozenset[int]  # that end it, beside sampling.stop_token_ids; empty with ignore_eos, unless constrained
    num_resumed: int = 0  # leading output tokens that another replica already delivered
    rank: Rank = field(default_factory=Rank)
    return_logprobs: bool = False
    top_logprobs: int = 0
    prompt_logprobs_from: int | None = None
    state: ReqState = ReqState.WAITING
    holding: Holding | None = None
    leg: Leg | None = None  # None: not part of a KV transfer
    guide: Guide | None = None  # None: not constrained, or its grammar is being compiled
    computed_len: int = 0  # tokens whose K/V is computed, reused ones included
    cached: CachedTokens = CachedTokens()  # prompt tokens reused at first admission
    num_retractions: int = 0
    drafted: tuple[int, int] = (0, 0)  # tokens that steps tried as drafts, and of them those that came true
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: Finish | None = None

    @staticmethod
    def make(request: GenerateRequest, *, index: int, now_s: float, eos_ids: frozenset[int]) -> "Req":
        """Make choice ``index`` of ``request``, in state WAITING."""
        sampling = request.sampling.for_choice(index)
        prompt_len = len(request.token_ids)
        ids = np.empty(prompt_len + max(sampling.max_new_tokens, len(request.resumed_ids)), dtype=np.int32)
        ids[:prompt_len] = request.token_ids
        resumed = request.resumed_ids
        ids[prompt_len : prompt_len + len(resumed)] = resumed
        return Req(
            rid=request.rid,
            index=index,
            sampling=sampling,
            salt=request.namespace,
            stamps=Stamps(now_s),
            asked=request,
            prompt_len=prompt_len,
            ids=ids,
            num_tokens=prompt_len + len(resumed),
            rank=Rank(next(each for each in reversed(CLASSES.values()) if each.has(request)), request.priority),
            num_resumed=len(resumed),
            eos_ids=frozenset() if sampling.ignore_eos and sampling.constraint is None else eos_ids,
            return_logprobs=request.return_logprobs,
            top_logprobs=request.top_logprobs,
            prompt_logprobs_from=request.prompt_logprobs_from,
        )

    @property
    def ends_by_s(self) -> float | None:
        """When it is ended, on the engine's clock."""
        left_s = self.asked.deadline_s
        return None if left_s is None else self.stamps.arrival_s + left_s

    @property
    def first_by_s(self) -> float:
        """When its first token is late, on the engine's clock."""
        left_s = self.asked.objective_s
        return math.inf if left_s is None else self.stamps.arrival_s + left_s

    @property
    def is_prefill_leg(self) -> bool:
        """Whether only the first token is sampled here, and another replica decodes."""
        return self.leg is not None and self.leg.role is PdLeg.PREFILL

    @property
    def level(self) -> int:
        """The level of its class."""
        return self.rank.request_class.level

    @property
    def in_background(self) -> bool:
        """Whether it is no load that others wait for: it gives its place up to any of these."""
        return self.rank.request_class.level < 0

    @property
    def was_admitted(self) -> bool:
        """Whether it has ever held memory here, or a peer may know of it."""
        started = self.stamps.admitted_s is not None or self.holding is not None
        return started or (self.leg is not None and (self.leg.exposed or self.leg.granted_s is not None))

    @property
    def stop_ids(self) -> frozenset[int]:
        """The ids that end it: end of sequence (unless ignored) and its own stop ids."""
        stop = self.sampling.stop_token_ids
        return self.eos_ids.union(stop) if stop else self.eos_ids

    @property
    def num_output(self) -> int:
        return self.num_tokens - self.prompt_len

    @property
    def output_ids(self) -> TokenIds:
        return self.ids[self.prompt_len : self.num_tokens]

    @property
    def extend_len(self) -> int:
        """The number of tokens still to run before the next one can be sampled (>= 1 while unfinished)."""
        return self.num_tokens - self.computed_len

    @property
    def max_remaining(self) -> int:
        """The number of output tokens that it may still make."""
        return self.sampling.max_new_tokens + self.prompt_len - self.num_tokens

    def move(self, state: ReqState) -> None:
        """Change state; an illegal move raises."""
        if state not in MOVES[self.state]:
            raise ValueError(f"request {self.rid}[{self.index}]: illegal move {self.state.value} -> {state.value}")
        self.state = state

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were reused when it was first admitted, from all tiers."""
        return self.cached.tokens

    def append(self, token_id: int) -> None:
        """Add a sampled token (its K/V is not yet computed)."""
        self.ids[self.num_tokens] = token_id
        self.num_tokens += 1

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.prompt_len,
            completion_tokens=self.num_output,
            cached_tokens=self.cached.tokens,
            host_tokens=self.cached.host,
            store_tokens=self.cached.store,
            kept_tokens=min(self.cached.kept, self.prompt_len),
            num_retractions=self.num_retractions,
            drafted_tokens=self.drafted[0],
            accepted_tokens=self.drafted[1],
        )


def below(reqs: Iterable[Req], req: Req) -> list[Req]:
    """List those of ``reqs`` whose class is lower than that of ``req``."""
    return [each for each in reqs if each.level < req.level]


class ReqQueue:
    """Requests in the order in which they were added, each at most once."""

    def __init__(self) -> None:
        self._reqs: dict[Req, None] = {}

    def __len__(self) -> int:
        return len(self._reqs)

    def __iter__(self) -> Iterator[Req]:
        return iter(self._reqs)

    def __contains__(self, req: Req) -> bool:
        return req in self._reqs

    def add(self, req: Req) -> None:
        self._reqs[req] = None

    def remove(self, req: Req) -> None:
        del self._reqs[req]


def stage_times(req: Req, end_s: float | None) -> StageTimes:
    """Read the stages until ``end_s``, when the request ended or had its first token, off its stamps."""
    stamps, first_s = req.stamps, req.stamps.first_token_s
    assert end_s is not None, f"request {req.rid} has not come so far"
    leg = req.leg
    queue_s = transfer_s = 0.0
    since_s = stamps.arrival_s
    if leg is not None and leg.granted_s is not None:
        queue_s, since_s = leg.granted_s - since_s, leg.granted_s
        if leg.waits_again_s is None:  # received, or ended before
            come_s = end_s if first_s is None else first_s
            return StageTimes(queue_s=queue_s, transfer_s=come_s - since_s, decode_s=end_s - come_s)
        transfer_s, since_s = leg.waits_again_s - since_s, leg.waits_again_s
    if stamps.admitted_s is None:
        return StageTimes(queue_s=queue_s + end_s - since_s, transfer_s=transfer_s)
    queue_s += stamps.admitted_s - since_s
    if first_s is None:
        return StageTimes(queue_s=queue_s, prefill_s=end_s - stamps.admitted_s, transfer_s=transfer_s)
    prefill_s, after_s = first_s - stamps.admitted_s, end_s - first_s
    if req.is_prefill_leg:
        return StageTimes(queue_s=queue_s, prefill_s=prefill_s, transfer_s=after_s)
    return StageTimes(queue_s=queue_s, prefill_s=prefill_s, transfer_s=transfer_s, decode_s=after_s)
