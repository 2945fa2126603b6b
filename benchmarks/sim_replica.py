"""A simulated replica: a queue, one prompt at a time at a fixed rate, a decode batch, a pool with a prefix cache.

Owns:      what the replica does, and what it reports of itself.
Never:     sees another replica or the router.
Invariant: prompts start in the order of the queue's policy; every job is started once and ended once. Cached + private
           == used <= capacity; a page in use is never evicted, and a page is evicted before the page in front of it:
           what is cached is prefixes.

    submit ──> waiting ──(pages for prompt and answer are free)──> prefill ──started──> decode ──ended──> released
                                                                      └─(it only prefills)──hand_off──> released

Simplifications: prefill and decode do not slow each other (the rates are those of a replica that does both); pages for
the whole answer are taken at the start, so nothing is ever retracted. A replica that only prefills takes pages for the
prompt and keeps them until `handed_off`.
"""

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from random import Random

import numpy as np

from benchmarks.sim_load import Events, SimRequest
from kvtransfer.pages import PageKey, page_keys
from replicas.scheduler.orders import ORDERS, Order, QueueEntry, passed_tokens, sort_keys
from routing.types import IndexEvent, KeysRemoved, KeysStored, ReplicaView


class SimPool:
    """A prefix cache of ``capacity`` pages. Keys are chained hashes: a key stands for its page and all before it."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.num_private = 0  # pages being computed, or not whole
        self._idle: OrderedDict[PageKey, None] = OrderedDict()  # evictable, least recently used first
        self._users: dict[PageKey, int] = {}  # cached and in use: by how many requests
        self.events: list[IndexEvent] = []  # what was stored and removed, from the first on; they count from 1

    @property
    def num_cached(self) -> int:
        return len(self._idle) + len(self._users)

    @property
    def num_used(self) -> int:
        return self.num_cached + self.num_private

    @property
    def utilization(self) -> float:
        """The share of the pool that a new request cannot get."""
        return (len(self._users) + self.num_private) / self.capacity

    def match_len(self, keys: Sequence[PageKey]) -> int:
        """Return how many of the first ``keys`` are cached. Changes nothing."""
        return sum(1 for _ in takewhile(self._has, keys))

    def take(self, keys: Sequence[PageKey], extra: int) -> bool:
        """Use the cached ``keys`` and take ``extra`` private pages, evicting what must go: all of it or nothing."""
        revived = sum(key not in self._users for key in keys)
        if len(self._users) + revived + self.num_private + extra > self.capacity:
            return False
        for key in keys:
            self._use(key)
        self._evict(self.num_used + extra - self.capacity)
        self.num_private += extra
        return True

    def store(self, keys: Sequence[PageKey]) -> None:
        """Make private pages, one for each of ``keys``, cached and in use; those that are cached already are freed."""
        new = [key for key in keys if not self._has(key)]
        for key in keys:
            self._use(key)
        self.num_private -= len(keys)
        self._tell(KeysStored, new)

    def release(self, keys: Sequence[PageKey], extra: int) -> None:
        """End a request: its cached ``keys`` (from the first page on) may be evicted, ``extra`` pages are free."""
        for key in reversed(keys):
            users = self._users[key] - 1
            if users:
                self._users[key] = users
            else:
                del self._users[key]
                self._idle[key] = None
        self.num_private -= extra

    def cached_keys(self) -> tuple[PageKey, ...]:
        """Return all cached pages; those in use count as the most recently used."""
        return (*self._idle, *self._users)

    def check(self) -> None:
        """Raises AssertionError if pages do not add up."""
        assert self.num_used <= self.capacity, f"{self.num_used} pages in a pool of {self.capacity}"
        assert self.num_private >= 0, "more private pages were given back than taken"
        assert not self._idle.keys() & self._users.keys(), "a page is both in use and evictable"
        assert all(users > 0 for users in self._users.values())

    def _use(self, key: PageKey) -> None:
        self._idle.pop(key, None)
        self._users[key] = self._users.get(key, 0) + 1

    def _evict(self, num: int) -> None:
        self._tell(KeysRemoved, [self._idle.popitem(last=False)[0] for _ in range(num)])

    def _has(self, key: PageKey) -> bool:
        return key in self._users or key in self._idle

    def _tell(self, kind: type[KeysStored] | type[KeysRemoved], keys: Sequence[PageKey]) -> None:
        if keys:
            self.events.append(kind(seq=len(self.events) + 1, keys=np.array(keys, dtype=np.uint64)))


class SimDecode:
    """A decode batch. Between two changes of it the duration of a step is constant: steps are not simulated one by
    one."""

    def __init__(self, events: Events, *, base_s: float, per_request_s: float) -> None:
        self._events = events
        self._base_s = base_s
        self._per_request_s = per_request_s
        self._ends: list[tuple[float, int, Callable[[], None]]] = []  # by the step at which it ends, order of joining
        self._joined = 0
        self._steps = 0.0  # since the start
        self._steps_at_s = 0.0  # when ``_steps`` was right
        self._version = 0  # of the batch; an end that was scheduled for another is void

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def step_s(self) -> float:
        """The duration of a step of the batch as it is; 0 while it is empty."""
        return self._base_s + self._per_request_s * len(self._ends) if self._ends else 0.0

    def join(self, num_steps: int, ended: Callable[[], None]) -> None:
        """Decode ``num_steps`` tokens, then call ``ended``; at once where there are none."""
        if not num_steps:
            ended()
            return
        self._advance()
        heapq.heappush(self._ends, (self._steps + num_steps, self._joined, ended))
        self._joined += 1
        self._schedule()

    def _advance(self) -> None:
        if self._ends and self.step_s > 0:
            self._steps += (self._events.now_s - self._steps_at_s) / self.step_s
        self._steps_at_s = self._events.now_s

    def _schedule(self) -> None:
        self._version += 1
        if self._ends:
            version = self._version
            left = max(0.0, self._ends[0][0] - self._steps)
            self._events.after(left * self.step_s, lambda: self._end(version))

    def _end(self, version: int) -> None:
        if version != self._version:
            return
        self._steps, _, ended = heapq.heappop(self._ends)
        self._steps_at_s = self._events.now_s
        self._schedule()
        ended()


SMOOTHING = 0.2  # weight of the newest measurement of the prefill rate: the last five or so prompts decide


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """How fast a replica is, and how well it knows; which prompt it takes next."""

    prefill_tokens_per_s: float
    chunk_tokens: int = 2048  # progress within a prompt shows in reports at this grain
    decode_base_s: float = 0.02  # a decode step of a small model on one GPU
    decode_per_request_s: float = 0.0002  # and what each request of the batch adds
    queue: str = "fcfs"  # order of the waiting queue, a scheduler.policy
    lpm_max_queue: int = 128  # and what goes with it
    ageing_s: float = 5.0
    objective_s: float = 5.0  # for the first token
    late_factor: float = 2.0
    max_running: int = 256
    rate_error: float = 1.0  # the replica measures its prefill rate this many times too high
    rate_noise: float = 0.1  # and each measurement varies by this share
    adapters: int = 0  # that it holds at once; requests with one need this
    adapter_load_s: float = 0.0  # to load another, in which nothing else begins


class SimJob:
    """A request at a simulated replica: what it needs there, and what came of it."""

    __slots__ = (
        "bound", "cached_tokens", "came_s", "keys", "num_pages", "num_prompt_pages", "request", "ttft_s",
        "uncached_seen", "waited_s",
    )  # fmt: skip

    def __init__(self, request: SimRequest, page_size: int) -> None:
        self.request = request
        tokens = request.token_ids()[:-1]  # no step computes the K/V of the last token
        keys = page_keys(tokens, page_size, request.namespace)
        self.keys: list[PageKey] = keys.tolist()  # whole pages of prompt and answer
        self.num_prompt_pages = request.input_len // page_size
        self.num_pages = -(-len(tokens) // page_size)
        self.cached_tokens = 0  # once started
        self.uncached_seen = 0  # prompt tokens that no page held when it came
        self.bound = 0.0  # when the replica has computed so many prompt tokens, it must be through
        self.came_s = 0.0  # to the replica where it is
        self.waited_s = 0.0  # before that, at others
        self.ttft_s = 0.0  # once it has its first token

    @property
    def arrived_s(self) -> float:
        """When it came to the router: by that it queues."""
        return self.came_s - self.waited_s

    @property
    def routing_key(self) -> str:
        """What stands for its session: the second page of its prompt. The first is the same system prompt for many."""
        return str(self.keys[1]) if self.num_prompt_pages > 1 else ""

    def reusable(self, page_size: int) -> Sequence[PageKey]:
        """Return the keys of the prompt's pages that a cache may serve: the last token of a prompt must always run."""
        return self.keys[: (self.request.input_len - 1) // page_size]


class SimReplica:
    """One simulated replica of the model."""

    def __init__(
        self,
        replica_id: str,
        *,
        speed: Speed,
        pool: SimPool,
        page_size: int,
        events: Events,
        rng: Random,
        ended: Callable[["SimReplica", SimJob], None],
        hand_off: Callable[["SimReplica", SimJob], None] | None = None,
    ) -> None:
        """``ended``: the last token is there. ``rng`` draws the errors of measurement.

        ``hand_off`` takes a job whose prompt is computed, and calls `handed_off` later; None: answers are decoded here.
        """
        self.replica_id = replica_id
        self.pool = pool
        self.joins_s = 0.0  # when routers learn of it
        self.still_until_s = 0.0
        self._speed = speed
        self._page_size = page_size
        self._events = events
        self._rng = rng
        self._ended = ended
        self._hand_off = hand_off
        self._waiting: deque[SimJob] = deque()
        self._running: dict[SimJob, None] = {}  # prompts computed: decoded here, or not handed off yet
        self._shuffle = Random(0)
        self._prefilling: SimJob | None = None
        self._prefill_began_s = 0.0
        self._decode = SimDecode(events, base_s=speed.decode_base_s, per_request_s=speed.decode_per_request_s)
        self._measured_rate = 0.0  # 0 until the first prompt is through
        self._computed = 0  # prompt tokens, of whole prompts
        self._adapters = OrderedDict[str, None]()  # held, the one used longest ago first
        self.loaded_s: list[float] = []  # when an adapter was

    @property
    def num_running(self) -> int:
        return len(self._running) + (self._prefilling is not None)

    def submit(self, job: SimJob) -> None:
        """Take ``job`` into the queue. Raises ValueError if it can never run."""
        if job.num_pages > self.pool.capacity:
            raise ValueError(
                f"request {job.request.number} needs {job.num_pages} pages, a pool has {self.pool.capacity}: "
                "raise --pool-tokens"
            )
        matched = self.pool.match_len(job.reusable(self._page_size))
        job.uncached_seen = job.request.input_len - matched * self._page_size
        job.came_s = self._events.now_s
        ahead = self._waiting_uncached() + self._prefill_rest()
        job.bound = self._computed + self._speed.late_factor * (ahead + job.uncached_seen)
        behind = [other.arrived_s > job.arrived_s for other in self._waiting]
        self._waiting.insert(behind.index(True) if any(behind) else len(behind), job)
        self._start_next()

    def take_back(self, job: SimJob) -> bool:
        """Give ``job`` back if it waits. Returns: whether it did."""
        if job not in self._waiting:
            return False
        self._waiting.remove(job)
        job.waited_s += self._events.now_s - job.came_s
        return True

    def stand_still(self, seconds: float) -> None:
        """Begin no prompt, report nothing and answer nothing for ``seconds``; what runs goes on."""
        self.still_until_s = self._events.now_s + seconds
        self._events.at(self.still_until_s, self._start_next)

    @property
    def is_still(self) -> bool:
        return self._events.now_s < self.still_until_s

    def view(self, time_s: float) -> ReplicaView:
        """Return the replica's report of itself; ``time_s`` is when the router will get it."""
        return ReplicaView(
            replica_id=self.replica_id,
            time_s=time_s,
            num_running=self.num_running,
            num_waiting=len(self._waiting),
            queued_uncached_tokens=self._waiting_uncached() + self._prefill_rest(),
            late_uncached_tokens=self._late_uncached(),
            late_factor=self._speed.late_factor if ORDERS[self._speed.queue].by_objective else 0.0,
            pool_utilization=self.pool.utilization,
            pool_pages=self.pool.capacity,
            page_size=self._page_size,
            prefill_tokens_per_s=self._measured_rate,
            decode_step_s=self._decode.step_s,
            max_running_requests=self._speed.max_running,
            adapters=frozenset(self._adapters),
            adapter_load_s=self._speed.adapter_load_s if self.loaded_s else 0.0,
        )

    def true_ttft_s(self, job: SimJob) -> float:
        """Return when ``job`` would get its first token if it came now: the oracle's figure, which no report holds."""
        keys = job.reusable(self._page_size)
        ahead = [*self._waiting, *([self._prefilling] if self._prefilling else [])]
        stored = (_common_len(keys, other.keys[: other.num_prompt_pages]) for other in ahead)  # by then
        held = max([self.pool.match_len(keys), *stored])
        own = job.request.input_len - held * self._page_size
        rest_s = 0.0
        if self._prefilling is not None:
            uncached = self._prefilling.request.input_len - self._prefilling.cached_tokens
            rest_s = self._prefill_began_s + uncached / self._speed.prefill_tokens_per_s - self._events.now_s
        return rest_s + (self._waiting_uncached() + own) / self._speed.prefill_tokens_per_s

    def _waiting_uncached(self) -> int:
        return sum(job.uncached_seen for job in self._waiting)

    def _late_uncached(self) -> int:
        """Count the tokens of waiting jobs that a job which can be in time goes before."""
        order = ORDERS[self._speed.queue]
        if not order.by_objective:
            return 0
        many = len(self._waiting) > self._speed.lpm_max_queue
        return passed_tokens([self._entry(job, order, many=many) for job in self._waiting])

    def _prefill_rest(self) -> int:
        """Return the tokens of the current prompt that are not computed, whole chunks counted."""
        job = self._prefilling
        if job is None:
            return 0
        done = (self._events.now_s - self._prefill_began_s) * self._speed.prefill_tokens_per_s
        chunk = self._speed.chunk_tokens
        return max(0, job.request.input_len - job.cached_tokens - int(done) // chunk * chunk)

    def _start_next(self) -> None:
        if self._prefilling is not None or not self._waiting or self.num_running >= self._speed.max_running:
            return
        if self.is_still:
            return
        job = self._next()
        keys = job.reusable(self._page_size)
        matched = self.pool.match_len(keys)
        if not self.pool.take(keys[:matched], self._num_pages(job) - matched):
            return  # until a request ends
        self._waiting.remove(job)
        job.cached_tokens = matched * self._page_size
        self._prefilling, self._prefill_began_s = job, self._events.now_s
        uncached = job.request.input_len - job.cached_tokens
        takes_s = self._hold(job.request.adapter) + uncached / self._speed.prefill_tokens_per_s
        self._events.after(takes_s, lambda: self._prefilled(job))

    def _hold(self, adapter: str) -> float:
        """Use ``adapter``, in place of the one used longest ago. Returns: how long loading it takes."""
        if not adapter:
            return 0.0
        known = adapter in self._adapters
        self._adapters[adapter] = None
        self._adapters.move_to_end(adapter)
        if len(self._adapters) > self._speed.adapters:
            self._adapters.popitem(last=False)
        if not known:
            self.loaded_s.append(self._events.now_s)
        return 0.0 if known else self._speed.adapter_load_s

    def _prefilled(self, job: SimJob) -> None:
        self.pool.store(job.keys[job.cached_tokens // self._page_size : job.num_prompt_pages])
        self._prefilling = None
        self._computed += job.request.input_len - job.cached_tokens
        self._measure()
        self._running[job] = None
        if self._hand_off is not None:
            self._hand_off(self, job)
        else:
            job.ttft_s = job.waited_s + self._events.now_s - job.came_s
            self._decode.join(job.request.output_len - 1, lambda: self._finish(job))
        self._start_next()

    def handed_off(self, job: SimJob) -> None:
        """Release the pages of ``job``, whose K/V has arrived at its decode replica."""
        del self._running[job]
        self.pool.release(job.keys[: job.num_prompt_pages], self._num_pages(job) - job.num_prompt_pages)
        self._start_next()

    def _num_pages(self, job: SimJob) -> int:
        """Return the pages that ``job`` takes at this replica."""
        return job.num_pages if self._hand_off is None else -(-job.request.input_len // self._page_size)

    def _next(self) -> SimJob:
        """Return the waiting job that is tried next, as replicas/scheduler/queues.py orders them."""
        speed, first = self._speed, self._waiting[0]
        order, many = ORDERS[speed.queue], len(self._waiting) > speed.lpm_max_queue
        if order.keys is None:
            return first
        if not order.by_objective:
            aged = self._events.now_s - first.came_s >= speed.ageing_s
            if aged or (order.reads_prefix and many):
                return first
        waiting = [self._entry(job, order, many=many) for job in self._waiting]
        running = [job.routing_key for job in self._running] if self._hand_off is None else []
        keys = sort_keys(speed.queue, waiting, running, self._shuffle)
        return self._waiting[min(range(len(keys)), key=lambda at: (keys[at], at))]

    def _entry(self, job: SimJob, order: Order, *, many: bool) -> QueueEntry:
        """Make what ``order`` reads of ``job``."""
        speed, waited_s, page_size = self._speed, self._events.now_s - job.came_s, self._page_size
        left_s, input_len = speed.objective_s - waited_s, job.request.input_len
        if order.by_objective and (many or left_s < 0):
            matched = (input_len - job.uncached_seen) // page_size
        else:
            matched = self.pool.match_len(job.reusable(page_size)) if order.reads_prefix else 0
        uncached_len = input_len - matched * page_size
        return QueueEntry(
            waited_s=waited_s,
            output_len=job.request.output_len,
            routing_key=job.routing_key,
            uncached_len=uncached_len,
            cached_len=matched * page_size,
            path=job.keys[:matched],
            left_s=left_s,
            needed_s=uncached_len / self._measured_rate if self._measured_rate else 0.0,
            left_len=job.bound - self._computed,
        )

    def _finish(self, job: SimJob) -> None:
        del self._running[job]
        self.pool.store(job.keys[job.num_prompt_pages :])
        self.pool.release(job.keys, job.num_pages - len(job.keys))
        self._ended(self, job)
        self._start_next()

    def _measure(self) -> None:
        speed = self._speed
        noise = self._rng.uniform(1 - speed.rate_noise, 1 + speed.rate_noise)
        sample = speed.prefill_tokens_per_s * speed.rate_error * noise
        old = self._measured_rate
        self._measured_rate = old + SMOOTHING * (sample - old) if old else sample


def _common_len(keys: Sequence[PageKey], others: Sequence[PageKey]) -> int:
    """Return how many keys two sequences share from the start."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(keys, others, strict=False)))
