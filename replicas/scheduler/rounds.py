"""Rounds: what `Scheduler.schedule` looks for before it plans a step, what its last round found, and the features that
take part in rounds.

Owns:      the table of features: adding one is a class and an entry in `FEATURES`. A heap of the deadlines of open
           requests; how long the heads of the queues have been kept out; of the last round the refusals, the request
           that found no memory, and the requests that it ended.
Never:     ends a request itself: the scheduler does. Chooses which request gives way (victims.py). Judges when a peer
           lets go of a page: a peer may never do so.
Invariant: no ended request is kept. The heap has at most as many empty entries as open ones, and `FEW`. A head is
           reported as starved only while no request holds memory; otherwise an end may free enough.
Thread:    scheduler thread only.
"""

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from replicas.cache.kv import KvCache, longest_reuse
from replicas.errors import Fault
from replicas.request import Guide, Req, ReqState
from replicas.scheduler.budget import CLIP_NEW_TOKENS
from replicas.scheduler.decode import DecodeRows, retract
from replicas.scheduler.plan import DecodePlan, PrefixGroup, StepPlan
from replicas.scheduler.precedence import TenantShares
from replicas.scheduler.prefill import PASSING, ExtendBatch, Refusal, awaits
from replicas.scheduler.queues import PdTransferQueue, Queues
from replicas.scheduler.tokens import LONG_MASK_S, Counters, NewToken, at_fault
from replicas.scheduler.victims import Need, victims
from replicas.types import Finish, FinishReason

FEW = 64
# A live peer lets go within milliseconds of the request; the death of one is proven within its heartbeat (3 s) and the
# grace after it (1 s). A peer that has not let go by then may never do so.
PATIENCE_S = 5.0


class Feature:
    """What a feature does at the points of the scheduler's loop, which names no feature. A feature overrides what it
    needs; the rest does nothing."""

    def opened(self, req: Req) -> None:
        """Note that ``req`` was accepted."""

    def waits(self, req: Req) -> None:
        """Note that ``req`` begins to wait for its turn: at its arrival, or when what it was parked for is over."""

    def ended(self, req: Req) -> None:
        """Note that ``req``, which was `opened`, has ended or was taken back."""

    def looks(self, now_s: float) -> Sequence[tuple[Req, Finish]] | None:
        """Note that a step is about to be planned; none is under way. Returns: requests that must end, if any, and
        why."""

    def plan(
        self, reqs: Sequence[Req], rows: DecodeRows, groups: tuple[PrefixGroup, ...], *, min_saved: int | None
    ) -> DecodePlan | None:
        """Plan a decode step of ``reqs``, whose ``rows`` have slots; None leaves it to the next feature, or the loop.

        Args: min_saved: as of `draft_groups`; None where requests share no reading.
        """
        return None

    def needs_tokens(self, num_running: int) -> bool:
        """Whether the next step, of ``num_running``, is planned only when the tokens of the one under way are known."""
        return False

    def applied(self, plan: StepPlan, reqs: Sequence[Req], tokens: Sequence[NewToken]) -> None:
        """Take in the step of ``plan``, of ``reqs``, which is over."""


@dataclass(frozen=True, slots=True)
class _Tenants(Feature):
    shares: TenantShares

    def opened(self, req: Req) -> None:
        self.shares.opens(req)

    def ended(self, req: Req) -> None:
        self.shares.ends(req)

    def looks(self, now_s: float) -> None:
        self.shares.looks(now_s)

    def needs_tokens(self, num_running: int) -> bool:
        return len(self.shares.throttle.left_out) > 0

    def applied(self, plan: StepPlan, reqs: Sequence[Req], tokens: Sequence[NewToken]) -> None:
        """Charge the tokens that drafts brought; `count_computed` has charged the others."""
        for token in tokens:
            if token.num_accepted:
                self.shares.charge(token.req, token.num_accepted)


@dataclass(frozen=True, slots=True)
class _PdTransfers(Feature):
    away: PdTransferQueue

    def ended(self, req: Req) -> None:
        if req.leg is not None:
            self.away.ended.append(req)


@dataclass(frozen=True, slots=True)
class _Sessions(Feature):
    kv: KvCache

    def opened(self, req: Req) -> None:
        self.kv.arrived(req)


@dataclass(frozen=True, slots=True)
class _Store(Feature):
    kv: KvCache  # it gets its store tier after the scheduler was made

    def waits(self, req: Req) -> None:
        if self.kv.store_tier is not None:
            self.kv.store_tier.ask(req, longest_reuse(req))

    def ended(self, req: Req) -> None:
        if self.kv.store_tier is not None:
            self.kv.store_tier.forget(req)


MOST_FIRST = 2  # masks of waiting requests that are computed at a time


@dataclass(frozen=True, slots=True)
class _Masks(Feature):
    """The masks of grammars: those of a step's rows take no longer than half a step. What would take longer is computed
    apart, and its row is in no step until it is there; nor is a prompt begun whose first mask is not."""

    queues: Queues

    @property
    def _most_s(self) -> float:
        return max(self.queues.waiting.step_times.step_s / 2, LONG_MASK_S)

    def looks(self, now_s: float) -> Sequence[tuple[Req, Finish]]:
        faults = [fault for req in self._first for fault in _begun(req, first=True)]
        guides = [(at, req.guide) for at, req in enumerate(self.queues.decoding)]
        guided = [(each.due_s, at, each) for at, each in guides if each is not None]
        if guided or self.queues.paused:
            faults += self._pause(sorted(guided, key=lambda each: each[:2]))
        return faults

    def _pause(self, guided: Sequence[tuple[float, int, Guide]]) -> list[tuple[Req, Finish]]:
        """Pause those requests of ``guided``, the quickest first, whose masks would make the step longer. Returns: as
        `looks`."""
        left_s, paused, decoding = self._most_s, set[int](), self.queues.decoding
        for number, (due_s, at, guide) in enumerate(guided):
            alone = number == 0 and len(guided) == len(decoding)  # one goes on if nothing else runs
            if due_s <= left_s or (alone and not guide.is_pending):
                left_s -= due_s
            else:
                paused.add(at)
        self.queues.running = [req for at, req in enumerate(decoding) if at not in paused]
        self.queues.paused = [req for at, req in enumerate(decoding) if at in paused]
        return [fault for req in self.queues.paused for fault in _begun(req, first=False)]

    @property
    def _first(self) -> list[Req]:
        """The next ones of requests that wait for their first mask: no more, since a request may wait for long. A mask
        of one that waits is long until it is there, so a request is looked at again only while it is one of these."""
        long_masks, found = self.queues.waiting.long_masks, list[Req]()
        while len(found) < min(MOST_FIRST, len(long_masks)):
            req, guide = next(itertools.islice(long_masks.items(), len(found), None))
            if guide.due_s > LONG_MASK_S:
                found.append(req)
            else:
                del long_masks[req]
        return found

    def ended(self, req: Req) -> None:
        if req.guide is not None:
            req.guide.drop()

    def needs_tokens(self, num_running: int) -> bool:
        queues, long_masks = self.queues, self.queues.waiting.long_masks
        if any(req.guide is not None and not req.guide.due_s for req in queues.paused):
            return True
        num_missing, _ = len(long_masks), self._first  # of which it takes out what has come
        if len(long_masks) < num_missing:
            return True
        return sum(req.guide.mask_s for req in queues.running if req.guide is not None) > self._most_s

    def applied(self, plan: StepPlan, reqs: Sequence[Req], tokens: Sequence[NewToken]) -> None:
        """Charge what the masks took as the tokens that would have been computed meanwhile."""
        waiting = self.queues.waiting
        token_s = waiting.step_times.token_s
        for req, guide in ((token.req, token.req.guide) for token in tokens):
            if guide is not None and token_s:
                waiting.shares.charge(req, int(guide.mask_s / token_s))


def _begun(req: Req, *, first: bool) -> Iterator[tuple[Req, Finish]]:
    """Begin the mask of ``req`` apart. Returns: the request and its end if that fails: it would wait for ever."""
    assert req.guide is not None
    try:
        req.guide.begin_masks((), apart=True, first=first)
    except BaseException as error:  # noqa: BLE001
        yield req, at_fault(req, error)


FEATURES: dict[str, Callable[[Queues, KvCache], Feature]] = {
    "tenants": lambda queues, kv: _Tenants(queues.waiting.shares),
    "masks": lambda queues, kv: _Masks(queues),
    "kv_transfers": lambda queues, kv: _PdTransfers(queues.away),
    "sessions": lambda queues, kv: _Sessions(kv),
    "store": lambda queues, kv: _Store(kv),
}

Entry = tuple[float, str, int]  # of the heap: the deadline, id and index of a request


class Deadlines:
    """The deadlines of open requests, earliest first, on the scheduler's clock."""

    def __init__(self) -> None:
        self._heap: list[Entry] = []
        self._open: dict[Req, Entry] = {}
        self._by_entry: dict[Entry, Req] = {}
        self._starved_s: dict[Req, float] = {}  # when a head of a queue was first found without memory

    def add(self, req: Req) -> None:
        if (ends_by_s := req.ends_by_s) is not None:
            entry = self._open[req] = ends_by_s, req.rid, req.index
            self._by_entry[entry] = req
            heapq.heappush(self._heap, entry)

    def remove(self, req: Req) -> None:
        """Forget ``req``, which has ended."""
        entry = self._open.pop(req, None)
        if entry is None:
            return
        del self._by_entry[entry]
        if len(self._heap) > 2 * len(self._open) + FEW:
            self._heap = list(self._by_entry)
            heapq.heapify(self._heap)
        while self._heap and self._heap[0] not in self._by_entry:
            heapq.heappop(self._heap)

    @property
    def next_s(self) -> float | None:
        """The earliest deadline, if there is one."""
        return self._heap[0][0] if self._heap else None

    def due(self, now_s: float) -> Req | None:
        """Return the open request whose deadline passed first, if one has; end and `remove` it before the next call."""
        return self._by_entry[self._heap[0]] if self._heap and self._heap[0][0] <= now_s else None

    def starved(self, heads: Sequence[Req], now_s: float) -> list[Req]:
        """Return those of ``heads``, heads of queues which found no memory while no request holds any, that have waited
        for PATIENCE_S: requests behind them that fit can then go on."""
        self._starved_s = {head: self._starved_s.get(head, now_s) for head in heads}
        return [head for head in heads if now_s - self._starved_s[head] >= PATIENCE_S]

    def check(self) -> None:
        """Raise AssertionError if an ended request is kept, or more empty entries than allowed."""
        assert all(req.finish is None for req in self._open), "an ended request is kept"
        assert len(self._heap) <= 2 * len(self._open) + FEW, f"{len(self._heap)} entries of {len(self._open)} requests"


def deadline_passed(req: Req, now_s: float) -> Finish:
    message = f"deadline passed after {now_s - req.stamps.arrival_s:.1f} s, {req.num_output} tokens made"
    return Finish(reason=FinishReason.ABORT, message=message, fault=Fault.TIMED_OUT)


def cannot_start(head: Req, kv: KvCache) -> Finish | None:
    """Tell why ``head`` can never be admitted: the pages that it needs stay in quarantine. None if none are there."""
    pool = kv.store.stats()
    detained = pool.quarantined_pages + pool.protected_pages  # no request holds a lock, so a peer reads what is locked
    if not detained:
        return None
    message = (
        f"{head.num_tokens} tokens need more than the {kv.store.available_tokens()} of {pool.total_tokens} that are "
        f"available: {detained} pages are in quarantine until the peer of a failed KV transfer lets go of them; try "
        "again elsewhere, or later"
    )
    return Finish(reason=FinishReason.ERROR, message=message, fault=Fault.UNAVAILABLE, retry_as="overloaded")


def starved(
    short: Req | None, queues: Queues, deadlines: Deadlines, kv: KvCache, now_s: float
) -> Iterator[tuple[Req, Finish]]:
    """Find the heads of queues that found no memory for too long, while no request holds any, and why each ends.

    Args: short: the head of those that wait, if it found none.
    """
    if queues.away.holding or queues.chunked is not None:
        return
    for head in deadlines.starved([head for head in (short, queues.prealloc.short) if head is not None], now_s):
        if (finish := cannot_start(head, kv)) is not None:
            yield head, finish


@dataclass(slots=True)
class LastRound:
    """What the last `Scheduler.schedule` found, for explanation and for its caller."""

    made_progress: bool = False  # it found something to run, granted a decode leg, or ended a starved request
    ended: list[Req] = field(default_factory=list)  # requests that it ended: deadline passed, or starved
    refusals: dict[tuple[str, int], Refusal] = field(default_factory=dict)  # as of the last look at the waiting queue
    short: Req | None = None  # the request that found no memory at that look

    def looked(self, batch: ExtendBatch, queues: Queues, *, granted: bool) -> None:
        """Note what a look at the queues found: the prompts of ``batch``, and whether a decode leg was ``granted``."""
        self.refusals = batch.refusals
        self.made_progress |= granted or batch.loaded > 0
        self.short = batch.short or queues.prealloc.short or (None if batch.rows else queues.chunked)

    @property
    def is_short(self) -> bool:
        """Whether a request that is not in the background found no memory at the last look."""
        short = self.short
        return short is not None and short.state is not ReqState.FINISHED and not short.in_background

    def would_wait(self, num_new: int, queues: Queues, *, max_running: int) -> int:
        """Count the requests that would wait if ``num_new`` came: all that hold nothing, less the free places that they
        would fill. While memory is short, no place is free."""
        num_starting = queues.waiting.num_counted + len(queues.prealloc) + num_new
        num_waiting = num_starting + len(queues.away.in_state(ReqState.WAITING))
        if self.is_short:
            num_starting = 0
        num_holding = sum(not req.in_background for req in queues.holding)  # others give their places up
        return num_waiting - min(num_starting, max_running - num_holding)

    def blocked(self, queues: Queues) -> str:
        """Say what kept waiting requests from starting: "pool", "slots" (requests that run) or ""."""
        waiting = queues.waiting.counted
        if not (waiting or queues.chunked is not None or len(queues.prealloc)):
            return ""
        if self.is_short:
            return "pool"
        return "slots" if any(self.refusals.get((r.rid, r.index)) is Refusal.RUNNING_LIMIT for r in waiting) else ""


def give_way(
    last: LastRound, queues: Queues, kv: KvCache, counters: Counters, *, max_running: int, now_s: float
) -> None:
    """Retract what others are to have before prompts are chosen: the step of one in the middle of its prompt, whose
    pages stay cached, and the place of a running request."""

    def could_begin(reqs: Sequence[Req]) -> Iterator[Req]:
        """A head that waited for something else than room at the last look gets the room of no other."""
        return (req for req in reqs if last.refusals.get((req.rid, req.index)) not in PASSING)

    def take_from(need: Need, reqs: Iterable[Req]) -> list[Req]:
        """Retract those that must leave so that the first of ``reqs`` for which any can has what it needs."""
        found = next(filter(None, (victims(need, req, queues, kv) for req in reqs)), [])
        for victim in found:
            retract(victim, queues, kv, counters, kept=need in (Need.TURN, Need.TIME))
        return found

    shares, chunked = queues.waiting.shares, queues.chunked
    higher = [] if chunked is None else queues.waiting.above(chunked.level)
    if queues.prealloc.short is not None:
        take_from(Need.ROOM, [queues.prealloc.short])
    heads = list(could_begin(shares.heads(queues.waiting.counted))) if shares.several else []
    full, freed = len(queues.holding) >= max_running, list[Req]()
    if full or last.is_short:
        freed = take_from(Need.PLACE if full else Need.PAGES, heads)
        for victim in freed:
            shares.spend(victim)
    if chunked is not None:
        take_from(Need.STEP, itertools.islice(could_begin(higher), 1))
        take_from(Need.TURN, heads)
    begun = queues.chunked
    begin = [] if begun is None else [begun]
    begin += [
        head for head in heads
        if freed or not (full or last.refusals.get((head.rid, head.index)) is Refusal.MEMORY)
    ]  # fmt: skip
    shares.throttle.leave_out(
        queues.running, begin, lambda req: req.extend_len if req is begun else queues.waiting.uncached_len(req),
        now_s, queues.waiting.step_times,
    )  # fmt: skip
    if shares.throttle.left_out:
        left_out = set(shares.throttle.left_out)
        queues.paused += [req for req in queues.running if req in left_out]
        queues.running = [req for req in queues.running if req not in left_out]
    if queues.chunked is not None:
        first = could_begin(queues.waiting.in_time_before(queues.chunked, now_s))
        take_from(Need.TIME, (req for req in first if begins_at_once(req, queues, kv, now_s)))


def resume(queues: Queues) -> bool:
    """Take those that were left out of the next step into it after all, where it would be empty. Returns: whether any
    was: no prompt began that they were to make room for."""
    throttle = queues.waiting.shares.throttle
    if queues.running or not throttle.left_out:
        return False
    queues.running = [req for req in throttle.left_out if req in queues.paused]
    queues.paused = [req for req in queues.paused if req not in queues.running]
    throttle.left_out = []
    return True


def begins_at_once(req: Req, queues: Queues, kv: KvCache, now_s: float) -> bool:
    """Whether ``req`` begins once it gets the step of the one mid-prompt: its adapter, mask and stored prefix are here,
    and the pool has room for all that it and those in flight may still need."""
    if queues.chunked is None or req.asked.adapter not in (None, queues.chunked.asked.adapter):
        return False
    if awaits(req, kv, now_s) is not None:
        return False
    in_flight = [req, *queues.decoding, *queues.away.in_state(ReqState.RECEIVING)]
    need = req.num_tokens + sum(min(each.max_remaining, CLIP_NEW_TOKENS) for each in in_flight)
    return need <= kv.store.available_tokens()
