"""One simulated run: the production router in front of simulated replicas, a list of requests through it.

Owns:      what is put together, the record of every request; with a split, the decode replicas and the jobs on their
           way to one.
Never:     chooses; that is `routing.router.Router`, the class that the live system runs, or the oracle.
Invariant: every request is recorded once, after its last token; the same arguments give the same records (the CPU time
           that decisions took aside). A job is at one decode replica at most, which has pages for its prompt and
           answer; the prefill replica keeps a prompt's pages until they have arrived.

    split: prefill ──ready──> waits for a decode replica with room ──transfer──> first token ──> decode ──> ended

Simplifications of a split: a transfer has the stated rate to itself and begins when the whole prompt is computed;
decode replicas hold no prefix cache, so that all of the prompt travels; their state is known without delay.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random

from benchmarks.sim_load import Events, SimRequest
from benchmarks.sim_replica import SimDecode, SimJob, SimPool, SimReplica, Speed
from benchmarks.sim_routers import Limits, Routed, Routers
from routing.types import Ending, RouteOutcome, RouteQuery


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Prefill and decode on separate replicas: how many decode, and how fast K/V travels."""

    num_decoders: int
    bytes_per_token: int = 131_072  # 32 layers x K and V x 8 heads x 128 x 2 bytes: a model of 8 billion parameters
    bytes_per_s: float = 25e9  # half of what a 400 Gbit/s link carries


@dataclass(slots=True, eq=False)
class Decoder:
    """A decode replica, as far as its pages and its batch."""

    capacity: int  # pages
    max_running: int
    batch: SimDecode
    num_requests: int = 0  # decoding, or their K/V on its way here
    num_used: int = 0  # pages

    @property
    def num_free(self) -> int:
        return self.capacity - self.num_used


def pick(decoders: Sequence[Decoder], num_pages: int) -> Decoder | None:
    """Return, of those with room, the one with fewest requests, then with most free pages, then the first; or None."""
    able = [each for each in decoders if each.num_free >= num_pages and each.num_requests < each.max_running]
    return min(able, key=lambda each: (each.num_requests, -each.num_free), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The replicas, routers and limits that are simulated."""

    num_replicas: int  # that compute prompts
    pool_tokens: int  # of each replica
    speed: Speed
    erring: float = 1.0  # share of the replicas that have ``speed.rate_error``: every second, say
    split: Split | None = None  # None: a replica decodes what it has computed
    num_routers: int = 1
    knows_adapters: bool = True  # routers look at where a request's adapter is
    page_size: int = 512
    limits: Limits = field(default_factory=Limits)
    seed: int = 0


class HandOffs:
    """The jobs on their way from the prefill replicas to the decode replicas."""

    def __init__(self, split: Split, setup: Setup, events: Events, ended: Callable[[SimReplica, SimJob], None]) -> None:
        """``ended``: the last token is out; it takes the replica that computed the prompt."""
        speed = setup.speed
        self.decoders = [
            Decoder(
                capacity=setup.pool_tokens // setup.page_size,
                max_running=speed.max_running,
                batch=SimDecode(events, base_s=speed.decode_base_s, per_request_s=speed.decode_per_request_s),
            )
            for _ in range(split.num_decoders)
        ]
        self._token_s = split.bytes_per_token / split.bytes_per_s
        self._events = events
        self._ended = ended
        self._ready: deque[tuple[SimReplica, SimJob]] = deque()

    def add(self, replica: SimReplica, job: SimJob) -> None:
        """Take a job whose prompt ``replica`` has computed."""
        self._ready.append((replica, job))
        self._place()

    def check(self) -> None:
        """Raises AssertionError if a decode replica holds more than it can, or pages without a request."""
        for each in self.decoders:
            assert 0 <= each.num_used <= each.capacity
            assert len(each.batch) <= each.num_requests <= each.max_running
            assert each.num_requests > 0 or each.num_used == 0, f"{each.num_used} pages belong to no request"

    def _place(self) -> None:
        """Send the jobs that are ready, in order, until one finds no room: it waits for a request to end."""
        while self._ready and (decoder := pick(self.decoders, self._ready[0][1].num_pages)):
            replica, job = self._ready.popleft()
            decoder.num_requests += 1
            decoder.num_used += job.num_pages
            transfer_s = job.request.input_len * self._token_s
            self._events.after(transfer_s, partial(self._arrived, replica, job, decoder))

    def _arrived(self, replica: SimReplica, job: SimJob, decoder: Decoder) -> None:
        replica.handed_off(job)
        job.ttft_s = self._events.now_s - job.came_s
        decoder.batch.join(job.request.output_len - 1, lambda: self._finish(replica, job, decoder))

    def _finish(self, replica: SimReplica, job: SimJob, decoder: Decoder) -> None:
        decoder.num_requests -= 1
        decoder.num_used -= job.num_pages
        self._ended(replica, job)
        self._place()


ORACLE = "oracle"


def soonest(replicas: Sequence[SimReplica], job: SimJob) -> SimReplica:
    """Return the replica at which ``job`` gets its first token first, by a full view; the first of equals."""
    return min(replicas, key=lambda replica: replica.true_ttft_s(job))


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The course of one request that has ended."""

    number: int
    replica_id: str
    reason: str
    arrival_s: float
    ttft_s: float
    ended_s: float
    input_len: int
    cached_tokens: int
    decision_s: float  # CPU time that choosing took here


class Cluster:
    """One run of one policy over simulated replicas."""

    def __init__(
        self, policy: str, requests: Sequence[SimRequest], setup: Setup, progress: Callable[[], None] = lambda: None
    ) -> None:
        """``progress`` is called when a request has ended. Raises ValueError for an unknown policy or no room."""
        if setup.pool_tokens < setup.page_size or setup.num_replicas < 1:
            raise ValueError(
                f"{setup.num_replicas} replicas of {setup.pool_tokens} tokens at {setup.page_size} a page were wanted: "
                "take at least one replica and one page"
            )
        self.events = Events()
        self.records: list[Record] = []
        self._requests = requests
        self._page_size = setup.page_size
        self._objective_s = setup.speed.objective_s
        self._knows_adapters = setup.knows_adapters
        self._progress = progress
        self._followers: dict[int, list[SimRequest]] = {}
        self._open: dict[int, Routed | None] = {}  # by request; None: routed by the oracle
        self.on_sent: Callable[[SimJob, RouteQuery, Routed], None] = lambda job, query, routed: None  # a request is out
        self.hand_offs = HandOffs(setup.split, setup, self.events, self._ended) if setup.split else None
        self.replicas = [self._replica(index, setup) for index in range(setup.num_replicas)]
        self._by_id = {replica.replica_id: replica for replica in self.replicas}
        self.routers: Routers | None = None
        if policy != ORACLE:
            self.routers = Routers(
                policy,
                self.replicas,
                num=setup.num_routers,
                page_size=setup.page_size,
                limits=setup.limits,
                events=self.events,
                seed=setup.seed,
            )

    def run(self) -> list[Record]:
        """Run every request from its arrival to its last token."""
        if self.routers is not None:
            self.routers.start()
        for request in self._requests:
            if request.after is None:
                self._schedule(request, request.arrival_s)
            else:
                self._followers.setdefault(request.after, []).append(request)
        self.events.run(until=lambda: len(self.records) == len(self._requests))
        return self.records

    def check(self) -> None:
        """Raises AssertionError if a request or a page is lost, or counted twice."""
        assert len({record.number for record in self.records}) == len(self.records)
        for replica in self.replicas:
            replica.pool.check()
        if self.hand_offs is not None:
            self.hand_offs.check()
        if self.routers is not None:
            assert self.routers.num_open == len(self._open)
            self.routers.check()

    def _replica(self, index: int, setup: Setup) -> SimReplica:
        errs = int((index + 1) * setup.erring) > int(index * setup.erring)  # evenly spread over the replicas
        return SimReplica(
            f"r{index:04}",
            speed=setup.speed if errs else replace(setup.speed, rate_error=1.0),
            pool=SimPool(setup.pool_tokens // setup.page_size),
            page_size=setup.page_size,
            events=self.events,
            rng=Random(f"{setup.seed}/replica {index}"),
            ended=self._ended,
            hand_off=self.hand_offs.add if self.hand_offs else None,
        )

    def _schedule(self, request: SimRequest, time_s: float) -> None:
        self.events.at(time_s, lambda: self._arrive(request))

    def _arrive(self, request: SimRequest) -> None:
        job = SimJob(request, self._page_size)
        routed = None
        if self.routers is None:
            replica = soonest(self.replicas, job)
        else:
            query = RouteQuery(
                rid=str(request.number),
                token_ids=request.token_ids()[: request.input_len],
                salt=request.namespace,
                adapter=request.adapter if self._knows_adapters else "",
                objective_s=self._objective_s,
                max_new_tokens=1 if self.hand_offs else request.output_len,  # at the replica that is chosen here
            )
            routed = self.routers.choose(query)
            replica = self._by_id[routed.decision.replica_id]
        self._open[request.number] = routed
        replica.submit(job)
        if routed is not None:
            self.on_sent(job, query, routed)

    def replica(self, replica_id: str) -> SimReplica:
        return self._by_id[replica_id]

    def move(self, job: SimJob, routed: Routed) -> None:
        """Send ``job``, which its replica gave back, where ``routed`` says."""
        before = self._open[job.request.number]
        assert self.routers is not None
        assert before is not None
        self.routers.done(before, RouteOutcome(ending=Ending.CANCELLED))
        self._open[job.request.number] = routed
        self._by_id[routed.decision.replica_id].submit(job)

    def _ended(self, replica: SimReplica, job: SimJob) -> None:
        request = job.request
        routed = self._open.pop(request.number)
        if self.routers is not None and routed is not None:
            outcome = RouteOutcome(ending=Ending.OK, cached_tokens=job.cached_tokens, ttft_s=job.ttft_s - job.waited_s)
            self.routers.done(routed, outcome)
        self.records.append(
            Record(
                number=request.number,
                replica_id=replica.replica_id,
                reason=routed.decision.reason.value if routed else ORACLE,
                arrival_s=job.arrived_s,
                ttft_s=job.ttft_s,
                ended_s=self.events.now_s,
                input_len=request.input_len,
                cached_tokens=job.cached_tokens,
                decision_s=routed.decision_s if routed else 0.0,
            )
        )
        for follower in self._followers.get(request.number, ()):
            self._schedule(follower, self.events.now_s + follower.arrival_s)
        self._progress()
