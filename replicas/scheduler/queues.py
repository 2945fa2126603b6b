"""Queues: every open request of one engine, by what it waits for or what runs it.

Owns:      the membership and the order of each queue. These values only hold; what moves a request from one queue to
           another is in prefill.py, budget.py, decode.py, tokens.py and scheduler.py.
Never:     touches pages; the waiting queue asks how long a cached prefix is.
Invariant: an open request is in exactly one queue, or only in a step under way (one whose last chunk, or the run of
           tokens that its grammar forced, is being computed); see each `check`.
Thread:    scheduler thread only.
"""

import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from replicas.cache.kv import KvCache
from replicas.config import SchedulerConfig
from replicas.request import Bound, Req, ReqQueue, ReqState
from replicas.scheduler.orders import ORDERS, Order, QueueEntry, passed_tokens, sort_keys
from replicas.scheduler.shares import TenantShares
from replicas.types import TokenIds

PeekLen = Callable[[TokenIds, str], int]  # cached prefix length of (token ids, salt), without side effects
PeekPath = Callable[[TokenIds, str], list[int]]  # and what names the nodes of that prefix


# chunks of prompts that a tenant may have computed before others go first: few, and long prompts of several tenants are
# cut into pieces by turns; many, and a burst makes others wait (simulated: python -m benchmarks router tenants)
QUANTUM = 8


class AdapterRoom(Protocol):
    """The adapters (LoRA) that this engine holds (engine/adapters.py). Requests that hold pages have theirs; those that
    wait keep none."""

    def look(self, holders: Sequence[Req]) -> None:
        """Begin a look at the requests that wait; ``holders`` have pages. No step is under way."""
        ...

    def ready(self, req: Req) -> bool:
        """Whether ``req`` has its adapter; if not, that is loaded in its turn."""
        ...

    def hint(self, req: Req) -> None:
        """Read the adapter of a request whose turn comes soon."""
        ...

    def in_the_way(self, req: Req, lower: Sequence[Req], holders: Sequence[Req]) -> list[Req]:
        """Choose the requests of lower classes that have to go so that the adapter of ``req`` finds room."""
        ...


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
    num_computed: Callable[[], int]  # the prompt tokens that the engine has computed since its start

    @staticmethod
    def of(config: SchedulerConfig, kv: KvCache, num_computed: Callable[[], int]) -> "QueueRules":
        assert config.chunked_prefill_size is not None
        return QueueRules(
            policy=config.policy,
            lpm_max_queue=config.lpm_max_queue,
            ageing_s=config.ageing_s,
            late_factor=config.late_factor,
            quantum=QUANTUM * config.chunked_prefill_size,
            peek_len=kv.cache.peek_len,
            peek_path=kv.cache.peek_path,
            num_computed=num_computed,
        )


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
    tenants wait, those with credit go before others of no higher priority (shares.py).

    A request ranks by ``Req.rank``: its arrival, at its first replica where that is gone, and earlier by ``ageing_s``
    for each point of its priority. So ageing crosses priorities: a request that arrives more than ``ageing_s`` per
    point of difference later ranks behind. Ageing bounds the wait of requests without any prefix. Queues longer than
    ``lpm_max_queue`` are taken by rank where the order reads prefixes: peeking at every prompt would cost more than it
    gains.

    Under an order by objectives a request ages by work instead: when it comes to wait, it gets a bound, ``late_factor``
    times the prompt tokens that order of arrival puts before its first token. A request is aged when as
    many tokens are left of its bound as it has to compute. The prefix cache is asked about requests that are not late
    yet, and about none in a queue longer than ``lpm_max_queue``.
    """

    def __init__(self, rules: QueueRules) -> None:
        super().__init__()
        self.s_per_token = 0.0  # of prompts, as measured of late; 0 until then
        self.late_len = 0  # uncached tokens, at the last look, of requests before which one goes that can be in time
        self.shares = TenantShares(rules.quantum)
        self._num_of_level = Counter[int]()  # of its requests, by the level of their class; none is 0
        self._rules = rules
        self._random = Random(0)

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
        if req.in_background:
            super().add(req)
            return
        if self._order.by_objective and req.rank.bound.at_len == math.inf:
            ahead_len = mid_prompt_len + sum(other.rank.bound.own_len for other in self._reqs)
            own_len = req.num_tokens - self._cached_len(req)
            at_len = self._rules.num_computed() + self._rules.late_factor * (ahead_len + own_len)
            req.rank.bound = Bound(own_len=own_len, at_len=at_len)
        super().add(req)
        self.shares.waits(req)

    def remove(self, req: Req) -> None:
        super().remove(req)
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
        if self._order.by_objective:
            entries = {req: self._entry(req, now_s) for req in reqs}
            aged = [req for req in reqs if entries[req].left_len <= entries[req].uncached_len]
            young = [req for req in reqs if entries[req].left_len > entries[req].uncached_len]
            self.late_len = passed_tokens(list(entries.values()))
        elif self._order.keys is None or (self._order.reads_prefix and len(reqs) > self._rules.lpm_max_queue):
            return self.shares.in_turn(reqs)
        else:
            aged = [req for req in reqs if now_s - req.rank.from_s >= self._rules.ageing_s]
            young = reqs[len(aged) :]
            entries = {req: self._entry(req, now_s) for req in young} if len(young) > 1 else {}
        if len(young) < 2:
            return self.shares.in_turn(aged + young)
        keys = sort_keys(
            self._rules.policy,
            [entries[req] for req in young],
            [req.asked.routing_key for req in running],
            self._random,
        )
        order = sorted(range(len(young)), key=lambda at: (-young[at].rank.priority, keys[at]))
        return self.shares.in_turn(aged + [young[at] for at in order])

    def _entry(self, req: Req, now_s: float) -> QueueEntry:
        left_s = req.first_by_s - now_s
        if self._order.by_objective and (left_s < 0 or len(self._reqs) > self._rules.lpm_max_queue):
            cached_len = max(0, req.prompt_len - req.rank.bound.own_len)
        else:
            cached_len = self._cached_len(req) if self._order.reads_prefix else 0
        uncached_len = req.num_tokens - cached_len
        return QueueEntry(
            waited_s=now_s - req.stamps.arrival_s + req.asked.waited_s,
            output_len=req.max_remaining,
            routing_key=req.asked.routing_key,
            uncached_len=uncached_len,
            cached_len=cached_len,
            path=self._rules.peek_path(req.ids[: req.num_tokens - 1], req.salt) if self._order.reads_path else (),
            begun=req.num_output > 0,
            left_s=left_s,
            needed_s=uncached_len * self.s_per_token,
            left_len=req.rank.bound.at_len - self._rules.num_computed(),
        )

    def uncached_tokens(self) -> int:
        """Count the tokens to compute if every request started now; an upper bound where they are many."""
        reqs = self.counted
        if len(reqs) > self._rules.lpm_max_queue:
            return sum(req.num_tokens for req in reqs)
        return sum(req.num_tokens - self._cached_len(req) for req in reqs)

    def check(self) -> None:
        """Assert that what is counted is there."""
        found = Counter(req.level for req in self._reqs)
        assert found == self._num_of_level, f"{found} wait by level, {self._num_of_level} are counted"
        self.shares.check(self.counted)

    def _cached_len(self, req: Req) -> int:
        return self._rules.peek_len(req.ids[: req.num_tokens - 1], req.salt)


class PreallocQueue(ReqQueue):
    """Decode legs that hold nothing yet: they need row and pages before their K/V may be sent.

    No request overtakes its head: a head that found no memory bars later local requests (`bars`), and itself waits
    for an older local request that found none.

    Source: SPEC H07; SGLang's DecodePreallocQueue.
    """

    def __init__(self) -> None:
        super().__init__()
        self.short: Req | None = None  # the head, if it found no memory when grants were last made

    def remove(self, req: Req) -> None:
        super().remove(req)
        if self.short is req:
            self.short = None

    def bars(self, req: Req) -> bool:
        """Whether local request ``req`` must wait, because the head needs the memory that it would take. One in the
        background waits for every leg."""
        if req.in_background:
            return len(self) > 0
        return self.short is not None and req.rank.from_s > self.short.rank.from_s

    def older_than(self, time_s: float) -> list[Req]:
        """List the legs that arrived by ``time_s``."""
        return list(itertools.takewhile(lambda req: req.stamps.arrival_s <= time_s, self._reqs))


class HandOffQueue(ReqQueue):
    """Requests that wait for another replica, or for their grammar; no step runs them. Also the news for
    replicas/disagg: grants and ends.

    Each is WAITING (parked until its peer is ready, or its grammar compiled) and holds nothing, or RECEIVING or
    HANDING_OFF with row and pages.
    """

    def __init__(self) -> None:
        super().__init__()
        self.granted: list[Req] = []  # decode legs that got row and pages, until `take_granted`
        self.ended: list[Req] = []  # legs that ended, until `take_ended`

    @property
    def holding(self) -> list[Req]:
        """The requests that hold row and pages."""
        return [req for req in self._reqs if req.state is not ReqState.WAITING]

    def in_state(self, state: ReqState) -> list[Req]:
        return [req for req in self._reqs if req.state is state]

    def take_granted(self) -> list[Req]:
        """Return the decode legs that got row and pages since the last call: their K/V may be requested."""
        granted, self.granted = self.granted, []
        return granted

    def take_ended(self) -> list[Req]:
        """Return the legs that ended since the last call, for whatever reason: their peers must hear of it."""
        ended, self.ended = self.ended, []
        return ended


class UnderWay:
    """The steps that were planned and not applied, oldest first, two at most; and what ended requests still hold there.

    A request of a step under way keeps its row and pages until that step is applied: a kernel may still write to them.
    """

    def __init__(self) -> None:
        self.steps: deque[list[Req]] = deque()
        self._ended: list[tuple[Req, bool]] = []

    def __len__(self) -> int:
        return len(self.steps)

    def __contains__(self, req: Req) -> bool:
        return any(req in step for step in self.steps)

    @property
    def newest(self) -> list[Req]:
        """The requests of the newest step, in the order of its rows."""
        return self.steps[-1]

    @property
    def ended(self) -> list[Req]:
        """The requests that are finished and hold pages to which a step under way still writes."""
        return [req for req, _ in self._ended]

    def begin(self, reqs: list[Req]) -> None:
        self.steps.append(reqs)

    def end(self) -> list[Req]:
        """Remove the oldest step. Returns: its requests, ended or not."""
        return self.steps.popleft()

    def hold(self, req: Req, *, keep: bool) -> None:
        """Keep what ``req``, which ended, holds until no step has it; ``keep``: its pages then go to the cache."""
        self._ended.append((req, keep))

    def take_released(self) -> list[tuple[Req, bool]]:
        """Return what `hold` was given for requests that no step has."""
        if not self._ended:
            return []
        released = [(req, keep) for req, keep in self._ended if req not in self]
        self._ended = [(req, keep) for req, keep in self._ended if req in self]
        return released


@dataclass(slots=True, kw_only=True)
class Queues:
    """All open requests of one engine; what the functions of the scheduler read and change."""

    waiting: WaitingQueue
    chunked: Req | None = None  # mid-prompt; its next chunk goes first. At most one (SPEC F06)
    running: list[Req] = field(default_factory=list)  # one token a step each; by adapter, and in the order of joining
    forced: list[Req] = field(default_factory=list)  # they ran until tokens were forced: the next step extends them
    prealloc: PreallocQueue = field(default_factory=PreallocQueue)
    away: HandOffQueue = field(default_factory=HandOffQueue)
    under_way: UnderWay = field(default_factory=UnderWay)
    adapters: AdapterRoom | None = None  # None: no request has one

    @property
    def holding(self) -> list[Req]:
        """The open requests that hold row and pages and are in a queue: all but those only in a step."""
        return [*self.running, *self.begun, *self.away.holding]

    @property
    def begun(self) -> list[Req]:
        """The requests that are in the middle of a run of forced tokens, or of their prompt."""
        return [*self.forced, *([] if self.chunked is None else [self.chunked])]

    def remove(self, req: Req) -> None:
        """Take ``req`` out of the queue that has it, if one has."""
        if req in self.away:
            self.away.remove(req)
        elif req in self.prealloc:
            self.prealloc.remove(req)
        elif req.state is ReqState.WAITING:
            self.waiting.remove(req)
        elif req.state is ReqState.RUNNING:
            self.running.remove(req)
        elif self.chunked is req:
            self.chunked = None
        elif req in self.forced:
            self.forced.remove(req)

    def check(self) -> None:
        """Raise AssertionError where a request is in a queue that does not fit its state."""
        for req in (*self.waiting, *self.prealloc):
            assert req.state is ReqState.WAITING, f"{req.rid} waits but is {req.state}"
            assert req.holding is None, f"{req.rid} waits but holds {req.holding}"
        self.waiting.check()
        for req in self.prealloc:
            assert req.leg is not None, f"{req.rid} waits for a grant and is no decode leg"
        assert self.prealloc.short is None or self.prealloc.short in self.prealloc, "the head that bars others has left"
        for req in self.away:
            assert req.state in (ReqState.WAITING, ReqState.RECEIVING, ReqState.HANDING_OFF), f"{req.rid}: {req.state}"
            assert (req.holding is None) == (req.state is ReqState.WAITING), f"{req.rid} is {req.state}: {req.holding}"
        for req in self.running:
            assert req.state is ReqState.RUNNING, f"{req.rid} is {req.state}"
            assert req.extend_len == 1, f"{req.rid} lacks the K/V of {req.extend_len} tokens"
        for req in self.forced:
            assert req.state is ReqState.PREFILLING, f"{req.rid} is to be extended and {req.state}"
        for req in self.holding:
            assert req.holding is not None, f"{req.rid} is {req.state} and holds nothing"
        for req in (req for step in self.under_way.steps for req in step):
            assert req.holding is not None, f"{req.rid} is in a step under way and holds nothing"
        for req in self.under_way.ended:
            assert req in self.under_way, f"{req.rid} ended, no step has it, and it holds pages"
