"""Prefill and decode apart: prompts are computed on some replicas, answers on others, the K/V travels between.

Owns:      the decode replicas, and the jobs on their way to one.
Never:     picks where a prompt is computed; that is the router's choice.
Invariant: a job is at one decode replica at most, which has pages for its prompt and answer; jobs are placed in the
           order in which their prompts were ready. The prefill replica keeps a prompt's pages until they have arrived.

    prefill ──ready──> waits for a decode replica with room ──transfer──> first token is out ──> decode ──> ended

Simplifications: a transfer has the stated rate to itself, and begins when the whole prompt is computed; decode replicas
hold no prefix cache, so that all of the prompt travels; where the decode replicas stand is known without delay, since
all they get passes here.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.sim_decode import SimDecode
from benchmarks.sim_events import Events
from benchmarks.sim_replica import SimJob, SimReplica


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """What is apart, and how fast K/V travels."""

    num_decoders: int
    bytes_per_token: int = 131_072  # 32 layers x K and V x 8 heads x 128 x 2 bytes: a model of 8 billion parameters
    bytes_per_s: float = 25e9  # half of what a 400 Gbit/s link carries


@dataclass(slots=True, eq=False)
class Decoder:
    """A decode replica."""

    capacity: int  # pages
    max_running: int
    batch: SimDecode
    num_requests: int = 0  # decoding, or their K/V on its way here
    num_used: int = 0  # pages

    @property
    def num_free(self) -> int:
        return self.capacity - self.num_used


def pick(decoders: Sequence[Decoder], num_pages: int) -> Decoder | None:
    """Of those with room the one with fewest requests, then with most free pages, then the first; None without room."""
    able = [each for each in decoders if each.num_free >= num_pages and each.num_requests < each.max_running]
    return min(able, key=lambda each: (each.num_requests, -each.num_free), default=None)


class HandOffs:
    """From the prefill replicas to the decode replicas."""

    def __init__(
        self,
        split: Split,
        decoders: Sequence[Decoder],
        *,
        events: Events,
        started: Callable[[SimJob], None],
        ended: Callable[[SimReplica, SimJob], None],
    ) -> None:
        """``started``: the first token is out; ``ended``: the last one, with the replica that computed the prompt."""
        self.decoders = decoders
        self._token_s = split.bytes_per_token / split.bytes_per_s
        self._events = events
        self._started = started
        self._ended = ended
        self._ready: deque[tuple[SimReplica, SimJob]] = deque()

    def add(self, replica: SimReplica, job: SimJob) -> None:
        """``job``'s prompt is computed at ``replica``."""
        self._ready.append((replica, job))
        self._place()

    def check(self) -> None:
        """Raises AssertionError if a decode replica holds more than it can, or what nobody uses."""
        for each in self.decoders:
            assert 0 <= each.num_used <= each.capacity
            assert len(each.batch) <= each.num_requests <= each.max_running
            assert each.num_requests > 0 or each.num_used == 0, f"{each.num_used} pages are nobody's"

    def _place(self) -> None:
        while self._ready:
            replica, job = self._ready[0]
            decoder = pick(self.decoders, job.num_pages)
            if decoder is None:
                return  # until a request ends
            self._ready.popleft()
            decoder.num_requests += 1
            decoder.num_used += job.num_pages
            self._send(replica, job, decoder)

    def _send(self, replica: SimReplica, job: SimJob, decoder: Decoder) -> None:
        transfer_s = job.request.input_len * self._token_s
        self._events.after(transfer_s, lambda: self._arrived(replica, job, decoder))

    def _arrived(self, replica: SimReplica, job: SimJob, decoder: Decoder) -> None:
        replica.handed_off(job)
        self._started(job)
        if job.request.output_len > 1:
            decoder.batch.join(job.request.output_len - 1, lambda: self._finish(replica, job, decoder))
        else:
            self._finish(replica, job, decoder)

    def _finish(self, replica: SimReplica, job: SimJob, decoder: Decoder) -> None:
        decoder.num_requests -= 1
        decoder.num_used -= job.num_pages
        self._ended(replica, job)
        self._place()
