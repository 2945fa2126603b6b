"""Precedence: which of the requests that wait goes first. What decides it is here, from the top down:

    class      `RequestClass` (replicas/request.py): one of a higher class goes first, whatever follows
    credit     `TenantShares.in_turn`: behind those of tenants that had less, within a priority
    age        `WaitingQueue`, `set_rank`: those that have waited long, by rank
    priority   highest first
    policy     the key that the order makes of a request (`ORDERS` in orders.py); then the rank

Owns:      the requests that wait and hold nothing, in their order; the credit of each tenant: the tokens that may be
           computed for it until others go first.
Never:     makes the keys of an order (orders.py), says how many tokens one gets (budget.py) or which request leaves
           (victims.py). Keeps a place or a token free for anybody.
Invariant: no credit is above the quantum, with which a tenant begins that had no open request. Where one tenant alone
           waits, the order is the policy's, and what is computed takes no credit below 0: nobody had to wait for it. A
           debt is thus what others have waited for.
Thread:    scheduler thread only.
Source:    Deficit Longest Prefix Match, Cao et al. 2025 (arXiv:2501.14312). There the longest prefix goes first
           among those with credit; here what the policy puts first.

The credits of tenants, and what follows from them:

    a step's uncached prompt tokens and decoded tokens, by the tenant's weight ──charge──> credit
    a tenant with credit waits: its requests first, within a priority; none does: each gets a quantum more
    one of these is below its share: it goes first (none above uses up its first credit before others)
    its last one begins: steps are throttled (Throttle)

No key of one request gives this order. Of a tenant without credit, P goes before B, which has credit and a lower
priority; but it goes behind A, which has credit and its own priority, and so behind B too where B stands before A, as
it is aged. So places are counted over all that wait (`_put_behind`).
"""

import enum
import math
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import NamedTuple

from replicas.cache.kv import KvCache
from replicas.config import SchedulerConfig
from replicas.request import Bound, Guide, Req, ReqQueue, ReqState
from replicas.scheduler.orders import (
    ORDERS,
    Order,
    QueueEntry,
    in_time,
    passed_tokens,
    shortest_first,
    sort_keys,
    spare,
)
from replicas.types import TokenIds

PeekLen = Callable[[TokenIds, str], int]  # cached prefix length of (token ids, salt), without side effects
PeekPath = Callable[[TokenIds, str], list[int]]  # and what names the nodes of that prefix

# chunks of prompts that a tenant may have computed before others go first: few, and long prompts of several tenants are
# cut into pieces by turns; many, and a burst makes others wait (simulated: python -m benchmarks router tenants)
QUANTUM = 8
# of a step beside a tenant below its share: so many times what every step takes, and seconds; shorter ones cost tokens
# (simulated: docs/log/2026-11-29-fair-shares.md)
TIMES_FIXED, STEP_S = 4.8, 0.25
THROTTLE_S = 10.0  # after which a tenant that asks now and then is not expected any more
# objectives (`bound_len`); simulated: docs/log/2026-11-29-orders.md
LATEST, MORE = 3.0, 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueRules:
    """The settings of the waiting queue (`SchedulerConfig`), and what it may ask of cache and engine."""

    policy: str
    lpm_max_queue: int
    ageing_s: float
    late_factor: float
    quantum: int  # of `TenantShares`
    peek_len: PeekLen
    peek_path: PeekPath
    counters: Mapping[str, int]  # of the scheduler: how much was computed and begun
    random: Random = field(default_factory=lambda: Random(0))

    @staticmethod
    def of(config: SchedulerConfig, kv: KvCache, counters: Mapping[str, int]) -> "QueueRules":
        assert config.chunked_prefill_size is not None
        return QueueRules(
            policy=config.policy,
            lpm_max_queue=config.lpm_max_queue,
            ageing_s=config.ageing_s,
            late_factor=config.late_factor,
            quantum=QUANTUM * config.chunked_prefill_size,
            peek_len=kv.cache.peek_len,
            peek_path=kv.cache.peek_path,
            counters=counters,
        )


def bound_len(ahead_len: int, own_len: int, objective_len: float, factor: float) -> float:
    """Count the prompt tokens within which a request has its own computed, where order of arrival computes
    ``ahead_len`` before its ``own_len``. ``objective_len``: those that its objective's time allows; inf: not known.

    It is late anyway if it is passed, so it may be `LATEST` objectives late; where order of arrival takes as long, only
    `MORE` of one later than that. Of a queue longer than `LATEST` objectives, ``factor`` times the rest is computed
    before it: in a lasting overload a bound of fixed length would put all in order of arrival, late.
    """
    if objective_len == math.inf:
        return factor * (ahead_len + own_len)
    beyond_len = (factor - 1.0) * max(0.0, ahead_len - LATEST * objective_len)
    return max(ahead_len + own_len + MORE * objective_len, LATEST * objective_len) + beyond_len


class StepTimes(NamedTuple):
    """What steps took of late; 0 until one was timed."""

    s_per_token: float = 0.0  # of prompts
    step_s: float = 0.0  # of a step that only decodes
    token_s: float = 0.0  # of a new token, of a prompt or of an answer
    fixed_s: float = 0.0  # of any step; what it runs comes on top of that
    prompt_s: float = 0.0  # of a token of a prompt on top
    row_s: float = 0.0  # of a running request on top


def set_rank(req: Req, config: SchedulerConfig) -> None:
    """Give ``req``, which has come, its rank in the queues. With priorities off, its priority is ignored."""
    rank, priority = req.rank, req.rank.request_class.priority
    if priority is not None:
        rank.priority = priority
    elif config.priorities == "off":
        rank.priority = 0
    rank.from_s = req.stamps.arrival_s - req.asked.waited_s
    if priority is None:
        rank.from_s -= rank.priority * config.ageing_s


class WaitingQueue(ReqQueue):
    """Requests that hold nothing yet: the highest class first (`RequestClass`), those in the background by rank. Of the
    others aged requests are tried first; then highest priority; then by the policy's order (orders.py). Where several
    tenants wait, those with credit go before others of no higher priority (`TenantShares`).

    A request ranks by ``Req.rank``: its arrival, at its first replica where that is gone, and earlier by ``ageing_s``
    for each point of its priority. So ageing crosses priorities: a request that arrives more than ``ageing_s`` per
    point of difference later ranks behind. Ageing bounds the wait of requests without any prefix. Queues longer than
    ``lpm_max_queue`` are taken by rank where the order reads prefixes: peeking at every prompt would cost more than it
    gains.

    Under an order by objectives a request ages by work instead: when it comes to wait, it gets a bound on the prompt
    tokens that are computed before its first token (`bound_len`). A request is aged when as many tokens are left of
    its bound as it has to compute; or, since no prompt is computed while places or pages are short, when
    ``late_factor`` times as many requests have begun at such times as order of arrival puts before it. It
    goes before one of a higher priority only once it has waited ``ageing_s`` for each point. The prefix cache is asked
    about requests that are not late yet, and about none in a queue longer than ``lpm_max_queue``.
    """

    def __init__(self, rules: QueueRules) -> None:
        super().__init__()
        self.step_times = StepTimes()
        self.late_len = 0  # uncached tokens, at the last look, of requests before which one goes that can be in time
        self.long_masks: dict[Req, Guide] = {}  # of its requests with a grammar, until their next mask is there
        self.shares = TenantShares(rules.quantum)
        self._num_of_level = Counter[int]()  # of its requests, by the level of their class; none is 0
        self._rules = rules

    @property
    def _order(self) -> Order:
        return ORDERS[self._rules.policy]

    @property
    def late_factor(self) -> float:
        """``scheduler.late_factor`` where the order goes by objectives, else 0."""
        return self._rules.late_factor if self._order.by_objective else 0.0

    def add(self, req: Req, *, mid_prompt_len: int = 0) -> None:
        """Add ``req``; ``mid_prompt_len``: the tokens still to compute of a prompt that has begun."""
        self._num_of_level[req.level] += 1
        if req.guide is not None:
            self.long_masks[req] = req.guide
        if req.in_background:
            super().add(req)
            return
        if self._order.by_objective:
            own_len = self.uncached_len(req)
            if req.rank.bound.at_len == math.inf:
                req.rank.bound = self._bound(req, mid_prompt_len, own_len)
            else:  # it was retracted, and has computed a part
                req.rank.bound = replace(req.rank.bound, own_len=min(req.rank.bound.own_len, own_len))
        super().add(req)
        self.shares.waits(req)

    def _bound(self, req: Req, mid_prompt_len: int, own_len: int) -> Bound:
        ahead_len = mid_prompt_len + sum(other.rank.bound.own_len for other in self._reqs)
        s_per_token, objective_s = self.step_times.s_per_token, req.asked.objective_s
        objective_len = math.inf if objective_s is None or s_per_token <= 0 else objective_s / s_per_token
        factor, counters = self._rules.late_factor, self._rules.counters
        return Bound(
            own_len=own_len,
            at_len=counters["prefill_tokens"] + bound_len(ahead_len, own_len, objective_len, factor),
            at_begun=counters["begun_where_short"] + factor * self.num_counted,
        )

    def remove(self, req: Req) -> None:
        super().remove(req)
        self.long_masks.pop(req, None)
        self._num_of_level[req.level] -= 1
        self._num_of_level += Counter()  # without what is 0
        if not req.in_background:
            self.shares.begins(req)
        if not self._reqs:
            self.late_len = 0

    @property
    def counted(self) -> list[Req]:
        """The requests that wait and are not in the background."""
        if min(self._num_of_level, default=0) >= 0:
            return list(self._reqs)
        return [req for req in self._reqs if not req.in_background]

    @property
    def num_counted(self) -> int:
        """The number of those."""
        return sum(num for level, num in self._num_of_level.items() if level >= 0)

    def above(self, level: int) -> list[Req]:
        """List the requests whose class is above ``level``."""
        if max(self._num_of_level, default=level) <= level:
            return []
        return [req for req in self._reqs if req.level > level]

    def ordered(self, now_s: float, running: Iterable[Req] = ()) -> list[Req]:
        """List the requests in the order in which to try them. Stable: ties keep their rank.

        Args: running: requests that run; ``routing-key`` goes by theirs.
        """
        reqs = sorted(self._reqs, key=lambda req: req.rank.from_s)
        if len(self._num_of_level) == 1 and not reqs[0].in_background:
            return self._in_order(reqs, now_s, running)
        found = self._in_order([req for req in reqs if not req.in_background], now_s, running)
        return sorted([*found, *(req for req in reqs if req.in_background)], key=lambda req: -req.level)

    def _in_order(self, reqs: list[Req], now_s: float, running: Iterable[Req]) -> list[Req]:
        order = self._order
        if order.by_objective:
            entries = self._entries(reqs, now_s)
            aged = self._aged(reqs, entries, now_s)
            late = set(aged)
            young = [req for req in reqs if req not in late]
            # as nearly always where little waits; it is also what `passed_tokens` counts
            alone_in_time = len(reqs) == 1 and entries[reqs[0]].needed_s <= entries[reqs[0]].left_s
            self.late_len = 0 if alone_in_time else passed_tokens(list(entries.values()))
        elif order.keys is None or (order.reads_prefix and len(reqs) > self._rules.lpm_max_queue):
            return self.shares.in_turn(reqs)
        else:
            aged = [req for req in reqs if now_s - req.rank.from_s >= self._rules.ageing_s]
            young = reqs[len(aged) :]
            entries = self._entries(young, now_s) if len(young) > 1 else {}
        if len(young) < 2:
            return self.shares.in_turn(aged + young)
        keys = sort_keys(
            self._rules.policy,
            [entries[req] for req in young],
            [req.asked.routing_key for req in running],
            self._rules.random,
        )
        places = sorted(range(len(young)), key=lambda at: (-young[at].rank.priority, keys[at]))
        return self.shares.in_turn(aged + [young[at] for at in places])

    def _aged(self, reqs: Sequence[Req], entries: Mapping[Req, QueueEntry], now_s: float) -> list[Req]:
        """Return those that others have passed as far as their bounds allow."""
        num_begun = self._rules.counters["begun_where_short"]
        by_s = now_s - self._rules.ageing_s * max((req.rank.priority for req in reqs), default=0)
        return [
            req
            for req in reqs
            if (entries[req].left_len <= entries[req].uncached_len or num_begun >= req.rank.bound.at_begun)
            and req.rank.from_s <= by_s
        ]

    def _entries(self, reqs: Sequence[Req], now_s: float) -> dict[Req, QueueEntry]:
        """Make what the order reads of each of ``reqs``. What is the same for all is looked up once."""
        order, s_per_token, peek_path = self._order, self.step_times.s_per_token, self._rules.peek_path
        many, num_computed = len(self._reqs) > self._rules.lpm_max_queue, self._rules.counters["prefill_tokens"]
        entries = dict[Req, QueueEntry]()
        for req in reqs:
            left_s, asked, num_tokens, bound = req.first_by_s - now_s, req.asked, req.num_tokens, req.rank.bound
            if order.by_objective and (many or left_s < 0):
                cached_len = max(0, req.prompt_len - bound.own_len)
            else:
                cached_len = self._cached_len(req) if order.reads_prefix else 0
            uncached_len = num_tokens - cached_len
            entries[req] = QueueEntry(
                waited_s=now_s - req.stamps.arrival_s + asked.waited_s,
                output_len=req.max_remaining,
                routing_key=asked.routing_key,
                uncached_len=uncached_len,
                cached_len=cached_len,
                path=peek_path(req.ids[: num_tokens - 1], req.salt) if order.reads_path else (),
                begun=num_tokens > req.prompt_len,
                left_s=left_s,
                needed_s=uncached_len * s_per_token,
                left_len=bound.at_len - num_computed,
            )
        return entries

    def in_time_before(self, chunked: Req, now_s: float) -> list[Req]:
        """Return the request that goes before the rest of ``chunked``, which is mid-prompt, or none: the first of those
        that can be in time, where ``chunked`` cannot be beside them and every bound allows it. It goes first by the
        order alone: nothing waits that goes before it for its class, priority, tenant, age or its first token."""
        reqs = self.counted
        if not reqs or not self._order.by_objective or len(reqs) > self._rules.lpm_max_queue:
            return []
        entries = self._entries([*reqs, chunked], now_s)
        entries[chunked].uncached_len = chunked.num_tokens - chunked.computed_len
        entries[chunked].needed_s = entries[chunked].uncached_len * self.step_times.s_per_token
        if any(each.begun for each in entries.values()) or self._aged([*reqs, chunked], entries, now_s):
            return []
        rank = {req: self.shares.rank(req) for req in entries}
        highest = max(rank[req] for req in reqs)
        firsts = [req for req in reqs if rank[req] == highest]
        able = in_time([entries[req] for req in (*firsts, chunked)])
        if rank[chunked] > highest or not able or len(firsts) in able:
            return []
        first = firsts[shortest_first([entries[req] for req in firsts], able)[0]]
        return [first] if entries[first].uncached_len <= spare(list(entries.values())) else []

    def order_masks(self, order: Sequence[Req]) -> None:
        """Put the long masks that no thread computes yet into ``order``, but by class, and one tenant after the other:
        they are computed one by one."""
        if len(self.long_masks) < 2:
            return
        pending = {req: guide for req, guide in self.long_masks.items() if guide.is_pending}
        turns = Counter(req.asked.tenant for req in pending)
        places = list[tuple[int, int]]()
        rest = [req for req in order if req in self.long_masks and req not in pending]
        for req in rest:
            places.append((-req.level, turns[req.asked.tenant]))
            turns[req.asked.tenant] += 1
        by_place = sorted(range(len(rest)), key=places.__getitem__)
        self.long_masks = pending | {rest[at]: self.long_masks[rest[at]] for at in by_place}

    def uncached_len(self, req: Req) -> int:
        """Count the tokens of ``req`` to compute if it started now."""
        return req.num_tokens - self._cached_len(req)

    def uncached_tokens(self) -> int:
        """Count the tokens to compute if every request started now; an upper bound where they are many."""
        reqs = self.counted
        if len(reqs) > self._rules.lpm_max_queue:
            return sum(req.num_tokens for req in reqs)
        return sum(map(self.uncached_len, reqs))

    def check(self) -> None:
        """Assert that what is counted is there."""
        found = Counter(req.level for req in self._reqs)
        assert found == self._num_of_level, f"{found} wait by level, {self._num_of_level} are counted"
        self.shares.check(self.counted)

    def _cached_len(self, req: Req) -> int:
        return self._rules.peek_len(req.ids[: req.num_tokens - 1], req.salt)


class Precedence(enum.IntEnum):
    """Which of the tenants that share an engine go first: those of the highest that waits."""

    NO_CREDIT = 0
    ABOVE_SHARE = 1  # it has credit, and several requests wait, with more than a quantum of prompts, cached or not
    FIRST = 2


Rank = tuple[int, int, Precedence]  # of a request: the level of its class, its priority, and its tenant's


def waits_out(rank: Rank, begun: Iterable[Rank]) -> bool:
    """Whether the step in which requests of the ranks ``begun`` compute their prompts is to hold nothing of one of
    ``rank``: one of a higher class, or one of no lower priority whose tenant goes before its own, would wait for it."""
    level, priority, precedence = rank
    return any(each[0] > level or (each[0] == level and each[1] >= priority and each[2] > precedence) for each in begun)


Size = Callable[[Req], float]


def beyond_share(reqs: Sequence[Req], size: Size, *, head: Req | None = None) -> dict[str, float]:
    """Return by tenant how much of ``size`` its ``reqs`` have beyond its share, by weight, of what all have. ``head``:
    counts with its weight too, and with nothing."""
    weights = {req.asked.tenant: req.asked.weight for req in ([*reqs, head] if head is not None else reqs)}
    held = dict.fromkeys(weights, 0.0)
    for req in reqs:
        held[req.asked.tenant] += size(req)
    whole = sum(held.values()) / sum(weights.values()) if weights else 0.0
    return {tenant: held[tenant] - whole * weight for tenant, weight in weights.items()}


class TenantShares:
    """The credits of the tenants of one engine."""

    def __init__(self, quantum: int) -> None:
        self._quantum = float(quantum)  # tokens by weight 1
        self._credits: dict[str, float] = {}  # of tenants that were charged; any other has a whole quantum
        self._open: Counter[str] = Counter()  # requests, by tenant
        self._waiting: dict[str, tuple[int, int]] = {}  # of them, those that wait: how many, and their tokens
        self._passed: list[Req] = []  # at the last look, behind others only for want of credit
        self._looked_s = 0.0
        self.throttle = Throttle(self)

    def opens(self, req: Req) -> None:
        """Note that ``req`` has come."""
        self._open[req.asked.tenant] += 1

    def ends(self, req: Req) -> None:
        """Note that ``req`` has ended."""
        self._open[req.asked.tenant] -= 1
        if not self._open[req.asked.tenant]:
            del self._open[req.asked.tenant]
            self._credits.pop(req.asked.tenant, None)

    def waits(self, req: Req) -> None:
        """Note that ``req`` waits."""
        num, num_tokens = self._waiting.get(req.asked.tenant, (0, 0))
        self._waiting[req.asked.tenant] = num + 1, num_tokens + req.num_tokens

    def begins(self, req: Req) -> None:
        """Note that ``req`` waits no more."""
        num, num_tokens = self._waiting.pop(req.asked.tenant)
        if num > 1:
            self._waiting[req.asked.tenant] = num - 1, num_tokens - req.num_tokens

    @property
    def chunk_len(self) -> float:
        """The most tokens of prompts in a step."""
        return self._quantum / QUANTUM

    @property
    def several(self) -> bool:
        """Whether several tenants have open requests."""
        return len(self._open) > 1

    def credit(self, tenant: str) -> float:
        return self._credits.get(tenant, self._quantum)

    def charge(self, req: Req, num_tokens: int) -> None:
        """Take what was computed for a request from its tenant's credit, where there are others."""
        asked = req.asked
        if not asked.tenant or req.in_background or asked.tenant not in self._open:
            return  # no key is asked for; it runs only where no other waits; its tenant's last request has ended
        credit = self.credit(asked.tenant)
        left = credit - num_tokens / asked.weight
        others_wait = len(self._waiting) > (asked.tenant in self._waiting)
        self._credits[asked.tenant] = left if others_wait else max(left, min(credit, 0.0))

    def spend(self, req: Req) -> None:
        """Take all credit of a tenant that holds more than its share: another one is to have what it gives."""
        self._credits[req.asked.tenant] = min(self.credit(req.asked.tenant), 0.0)

    def precedence(self, req: Req) -> Precedence:
        """Tell which tenants that of ``req`` goes before."""
        if not req.asked.tenant:
            return Precedence.FIRST  # no key is asked for
        if self.credit(req.asked.tenant) <= 0.0:
            return Precedence.NO_CREDIT
        num, num_tokens = self._waiting.get(req.asked.tenant, (0, 0))
        above = num > 1 and num_tokens > self._quantum * req.asked.weight
        return Precedence.ABOVE_SHARE if above else Precedence.FIRST

    def goes_before(self, head: Req, req: Req) -> bool:
        """Whether ``head``, which waits, is to have what ``req`` would have of a step."""
        precedence, credit = self.precedence(req), self.credit(req.asked.tenant)
        owes_more = precedence is Precedence.NO_CREDIT and self.credit(head.asked.tenant) > credit
        return head.rank.priority >= req.rank.priority and (owes_more or self.precedence(head) > precedence)

    def rank(self, req: Req) -> "Rank":
        """Return what tells which requests ``req`` waits out."""
        return req.level, req.rank.priority, self.precedence(req)

    def looks(self, now_s: float) -> None:
        """Count the time since the last look for those that others went before: another step is about to be planned."""
        waited = (req for req in self._passed if req.stamps.admitted_s is None)
        for req in (*waited, *self.throttle.left_out):
            if req.finish is None:
                req.stamps.passed_s += now_s - self._looked_s
        self._looked_s = now_s

    def is_last(self, req: Req) -> bool:
        """Whether no request of the tenant of ``req`` waits but that one, if it does: its tenant is below its share."""
        return self._waiting.get(req.asked.tenant, (0, 0))[0] <= (req.state is ReqState.WAITING)

    def heads(self, waiting: Iterable[Req]) -> list[Req]:
        """Return the oldest of ``waiting`` of each tenant that has credit, or waits alone; the oldest first."""
        found = dict[str, Req]()
        for req in sorted(waiting, key=lambda req: req.rank.from_s):
            tenant = req.asked.tenant
            if tenant not in found and (len(self._waiting) == 1 or self.credit(tenant) > 0.0):
                found[tenant] = req
        return list(found.values())

    def in_turn(self, order: list[Req]) -> list[Req]:
        """Put requests behind the last one of no lower priority whose tenant goes first.

        Args: order: the requests that wait, in that of the policy.
        """
        if len(self._waiting) < 2:
            if order and self.credit(order[0].asked.tenant) <= 0.0:
                self._credits = {order[0].asked.tenant: 0.0}  # it has used most, and nobody else waits: all begin anew
            self._passed = []
            return order
        self._refill()
        precedence = {tenant: self.precedence(req) for tenant, req in _one_of_each(order).items()}
        before, found = {req: at for at, req in enumerate(order)}, order
        for least in sorted(set(precedence.values()))[1:]:
            found = _put_behind(found, {tenant for tenant, each in precedence.items() if each < least})
        self._passed = [req for at, req in enumerate(found) if at > before[req]]
        return found

    def check(self, waiting: Iterable[Req]) -> None:
        """Raise AssertionError if what waits is not what was counted."""
        found = TenantShares(0)
        for req in waiting:
            found.waits(req)
        assert found._waiting == self._waiting, f"{found._waiting} wait, {self._waiting} are counted"

    def _refill(self) -> None:
        """Give all that have no credit as many quanta as it takes until one that waits has some."""
        best = max(self.credit(tenant) for tenant in self._waiting)
        if best > 0.0:
            return
        more = (int(-best // self._quantum) + 1) * self._quantum
        for tenant, credit in self._credits.items():
            if credit <= 0.0:
                self._credits[tenant] = min(credit + more, self._quantum)


def _put_behind(order: Sequence[Req], tenants: Container[str]) -> list[Req]:
    """Put the requests of ``tenants`` behind the last one of no lower priority of any other."""
    able = [req.asked.tenant not in tenants for req in order]
    newest = {req.rank.priority: at for at, req in enumerate(order) if able[at]}
    behind, last = dict[int, int](), -1
    for priority in sorted({req.rank.priority for req in order}, reverse=True):
        behind[priority] = last = max(last, newest.get(priority, -1))
    places = [at if able[at] else max(at, behind[req.rank.priority]) for at, req in enumerate(order)]
    return [order[at] for at in sorted(range(len(order)), key=lambda at: (places[at], places[at] > at))]


class Throttle:
    """Bounds the steps of other tenants beside a tenant below its share: one that goes first, has no other waiting, and
    runs no more requests than its share.

    While a request of such a tenant begins or runs, steps are bounded: to TIMES_FIXED times the fixed part, STEP_S at
    most, or twice the fixed part where that is longer. Running requests that wait it out make a token by turns, as many
    a step as the bound leaves. If its prompt takes so long by itself, none of them does; in the step after that, as
    many do as take a quarter. Until THROTTLE_S later, prompts of tenants that do not go first have the rest of a step.
    """

    def __init__(self, shares: TenantShares) -> None:
        self._shares = shares
        self._bound = -math.inf, False  # until when steps are bounded; whether the last one had none that waits it out
        self.left_out: list[Req] = []  # running requests that make no token in the step under way

    def most_prompt_len(self, num_rows: int, now_s: float, times: StepTimes) -> float:
        """Return how many prompt tokens a step may have beside ``num_rows`` running requests."""
        if now_s >= self._bound[0] or not times.prompt_s:
            return math.inf
        return _left_s(times, num_rows) / times.prompt_s

    def leave_out(
        self, running: Sequence[Req], begin: Sequence[Req], length: Callable[[Req], int], now_s: float, times: StepTimes
    ) -> None:
        """Choose which of ``running`` make no token in the next step: the last ones wait longest, and do.

        Args: begin: those whose prompts may be in it. length: tells how much of one is left.
        """
        shares, (until_s, had_none), self.left_out = self._shares, self._bound, []
        self._bound = until_s, False
        if not shares.several or _left_s(times, len(running), shares.chunk_len) >= 0.0:
            return
        precedence = {tenant: shares.precedence(req) for tenant, req in _one_of_each(begin, running).items()}
        beyond = beyond_share([req for req in running if not req.in_background], lambda req: 1.0)
        firsts = {each for each, of in precedence.items() if of is Precedence.FIRST and beyond.get(each, 0.0) < 1e-9}

        def below_share(reqs: Iterable[Req]) -> Iterator[Req]:
            able = (req for req in reqs if req.asked.tenant in firsts and not req.in_background)
            return filter(shares.is_last, able)

        prompts = list(below_share(begin))
        ranks = {(req.level, req.rank.priority, Precedence.FIRST) for req in (*prompts, *below_share(running))}
        if not ranks:
            return
        self._bound = now_s + THROTTLE_S, False
        begin_len = 0.0
        for req in prompts:
            if begin_len < shares.chunk_len:  # no step holds more
                begin_len = min(begin_len + length(req), shares.chunk_len)
        if not times.row_s or _left_s(times, len(running), begin_len) >= 0.0:
            return
        others = [
            req for req in running if waits_out((req.level, req.rank.priority, precedence[req.asked.tenant]), ranks)
        ]
        left = _left_s(times, len(running) - len(others), begin_len) / times.row_s
        least = 0.0 if begin_len and not had_none else max(1.0, _left_s(times) / times.row_s / 4)
        self.left_out = others[: len(others) - int(min(max(left, least), len(others)))]
        self._bound = now_s + THROTTLE_S, len(self.left_out) == len(others)


def _left_s(times: StepTimes, num_rows: int = 0, prompt_len: float = 0.0) -> float:
    """Return what a bounded step has left beside so many running requests and prompt tokens; inf: nothing is known."""
    fixed_s = times.fixed_s
    if not fixed_s:
        return math.inf
    most_s = min(TIMES_FIXED * fixed_s, max(STEP_S, 2 * fixed_s))
    return most_s - fixed_s - num_rows * times.row_s - prompt_len * times.prompt_s


def _one_of_each(*reqs: Iterable[Req]) -> dict[str, Req]:
    """Return a request of each tenant."""
    return {req.asked.tenant: req for each in reqs for req in each}
