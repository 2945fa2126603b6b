"""A simulated replica: a queue, one prompt at a time at a fixed rate, a decode batch, a pool with a prefix cache.

Owns:      what the replica really does, and what it reports of itself.
Never:     sees another replica or the router.
Invariant: first come, first served; every job is started once and ended once; the pool is never over its capacity.

    submit ──> waiting ──(pages for prompt and answer are free)──> prefill ──started──> decode ──ended──> released
                                                                      └─(it only prefills)──hand_off──> released

Simplifications: prefill and decode do not slow each other (the rates are those of a replica that does both); pages for
the whole answer are taken at the start, so nothing is ever retracted. One that only prefills (sim_split.py) takes
pages for the prompt and keeps them until `handed_off`.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from benchmarks.sim_decode import SimDecode
from benchmarks.sim_events import Events
from benchmarks.sim_pool import SimPool
from benchmarks.sim_requests import SimRequest
from kvtransfer.pages import PageKey, page_keys
from routing.types import ReplicaView

SMOOTHING = 0.2  # weight of the newest measurement of the prefill rate: the last five or so prompts decide


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """How fast a replica is, and how well it knows."""

    prefill_tokens_per_s: float
    chunk_tokens: int = 2048  # progress within a prompt shows in reports at this grain
    decode_base_s: float = 0.02  # a decode step of a small model on one GPU
    decode_per_request_s: float = 0.0002  # and what each request of the batch adds
    max_running: int = 256
    rate_error: float = 1.0  # the replica measures its prefill rate this many times too high
    rate_noise: float = 0.1  # and each measurement varies by this share


class SimJob:
    """A request at a replica."""

    __slots__ = ("cached_tokens", "keys", "num_pages", "num_prompt_pages", "request", "uncached_seen")

    def __init__(self, request: SimRequest, page_size: int) -> None:
        self.request = request
        tokens = request.token_ids()[:-1]  # no step computes the K/V of the last token
        self.keys: list[PageKey] = page_keys(tokens, page_size, "").tolist()  # whole pages of prompt and answer
        self.num_prompt_pages = request.input_len // page_size
        self.num_pages = -(-len(tokens) // page_size)
        self.cached_tokens = 0  # once started
        self.uncached_seen = 0  # prompt tokens that no page held when it came

    def reusable(self, page_size: int) -> Sequence[PageKey]:
        """Keys of the prompt's pages that a cache may serve: the last token of a prompt must always run."""
        return self.keys[: (self.request.input_len - 1) // page_size]


class SimReplica:
    """One replica."""

    def __init__(
        self,
        replica_id: str,
        *,
        speed: Speed,
        pool: SimPool,
        page_size: int,
        events: Events,
        rng: Random,
        started: Callable[[SimJob], None],
        ended: Callable[["SimReplica", SimJob], None],
        hand_off: Callable[["SimReplica", SimJob], None] | None = None,
    ) -> None:
        """``started``: the first token is there; ``ended``: the last one. ``rng`` draws the errors of measurement.

        ``hand_off`` takes a job whose prompt is computed, and calls `handed_off` later; None: answers are decoded here.
        """
        self.replica_id = replica_id
        self.pool = pool
        self.computed_tokens = 0  # of prompts, since the start
        self._speed = speed
        self._page_size = page_size
        self._events = events
        self._rng = rng
        self._started = started
        self._ended = ended
        self._hand_off = hand_off
        self._num_leaving = 0  # prompts computed and not handed off
        self._waiting: deque[SimJob] = deque()
        self._waiting_uncached = 0  # sum of uncached_seen
        self._prefilling: SimJob | None = None
        self._prefill_began_s = 0.0
        self._decode = SimDecode(events, base_s=speed.decode_base_s, per_request_s=speed.decode_per_request_s)
        self._measured_rate = 0.0  # 0 until the first prompt is through

    @property
    def num_running(self) -> int:
        return len(self._decode) + self._num_leaving + (self._prefilling is not None)

    def submit(self, job: SimJob) -> None:
        """Take ``job`` into the queue. Raises ValueError if it can never run."""
        if job.num_pages > self.pool.capacity:
            raise ValueError(
                f"request {job.request.number} needs {job.num_pages} pages, a pool has {self.pool.capacity}: "
                "raise --pool-tokens"
            )
        matched = self.pool.match_len(job.reusable(self._page_size))
        job.uncached_seen = job.request.input_len - matched * self._page_size
        self._waiting.append(job)
        self._waiting_uncached += job.uncached_seen
        self._start_next()

    def view(self, time_s: float) -> ReplicaView:
        """What the replica says of itself; ``time_s`` is when the router will hear it."""
        return ReplicaView(
            replica_id=self.replica_id,
            time_s=time_s,
            num_running=self.num_running,
            num_waiting=len(self._waiting),
            queued_uncached_tokens=self._waiting_uncached + self._prefill_rest(),
            pool_utilization=self.pool.utilization,
            pool_pages=self.pool.capacity,
            page_size=self._page_size,
            prefill_tokens_per_s=self._measured_rate,
            decode_step_s=self._decode.step_s,
            max_running_requests=self._speed.max_running,
        )

    def true_ttft_s(self, job: SimJob) -> float:
        """When ``job`` would get its first token if it came now; for the oracle, no report holds it."""
        keys = job.reusable(self._page_size)
        held = self.pool.match_len(keys)
        ahead = [*self._waiting, *([self._prefilling] if self._prefilling else [])]
        for other in ahead:  # what they will have stored by then
            held = max(held, _common_len(keys, other.keys[: other.num_prompt_pages]))
        own = job.request.input_len - held * self._page_size
        rest_s = 0.0
        if self._prefilling is not None:
            uncached = self._prefilling.request.input_len - self._prefilling.cached_tokens
            rest_s = self._prefill_began_s + uncached / self._speed.prefill_tokens_per_s - self._events.now_s
        return rest_s + (self._waiting_uncached + own) / self._speed.prefill_tokens_per_s

    def _prefill_rest(self) -> int:
        """Tokens of the current prompt that are not computed, whole chunks counted."""
        job = self._prefilling
        if job is None:
            return 0
        done = (self._events.now_s - self._prefill_began_s) * self._speed.prefill_tokens_per_s
        chunk = self._speed.chunk_tokens
        return max(0, job.request.input_len - job.cached_tokens - int(done) // chunk * chunk)

    def _start_next(self) -> None:
        if self._prefilling is not None or not self._waiting or self.num_running >= self._speed.max_running:
            return
        job = self._waiting[0]
        keys = job.reusable(self._page_size)
        matched = self.pool.match_len(keys)
        if not self.pool.take(keys[:matched], self._num_pages(job) - matched):
            return  # until a request ends
        self._waiting.popleft()
        self._waiting_uncached -= job.uncached_seen
        job.cached_tokens = matched * self._page_size
        self._prefilling, self._prefill_began_s = job, self._events.now_s
        uncached = job.request.input_len - job.cached_tokens
        self.computed_tokens += uncached
        self._events.after(uncached / self._speed.prefill_tokens_per_s, lambda: self._prefilled(job))

    def _prefilled(self, job: SimJob) -> None:
        self.pool.store(job.keys[job.cached_tokens // self._page_size : job.num_prompt_pages])
        self._prefilling = None
        self._measure()
        if self._hand_off is not None:
            self._num_leaving += 1
            self._hand_off(self, job)
        else:
            self._started(job)
            if job.request.output_len > 1:
                self._decode.join(job.request.output_len - 1, lambda: self._finish(job))
            else:
                self._finish(job)
        self._start_next()

    def handed_off(self, job: SimJob) -> None:
        """``job``'s K/V is elsewhere."""
        self._num_leaving -= 1
        self.pool.release(job.keys[: job.num_prompt_pages], self._num_pages(job) - job.num_prompt_pages)
        self._start_next()

    def _num_pages(self, job: SimJob) -> int:
        """That it takes here."""
        return job.num_pages if self._hand_off is None else -(-job.request.input_len // self._page_size)

    def _finish(self, job: SimJob) -> None:
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
    """How many keys two sequences share from the start."""
    for index, (key, other) in enumerate(zip(keys, others, strict=False)):
        if key != other:
            return index
    return min(len(keys), len(others))
