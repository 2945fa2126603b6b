"""The moments of one request, and the stages that its time was spent in, as its client sees them.

Owns:      the moments of one request on this router's clock, and the arithmetic of its stages.
Never:     reads a clock; knows metrics.
Invariant: the stages are consecutive, none is negative, and they sum to the time from arrival to the last delta.
Thread:    the router's event loop.

    arrived ──route──> sent ──queue──┬──prefill──┬──transfer──> first token ──decode──> last delta
                                     engines report durations: their clocks are not this one

``sent`` is when the try that brought the first token was sent, so route includes the tries before it, and reading and
tokenising the prompt. All after the first token is decode, a retry in the middle included. Between the two lie the
prefill and transfer that the replica reports (StageTimes); queue is the rest: waiting there, and the way to and fro.
For a prompt that was handed over, the prefill leg reports queue and prefill, and the rest is transfer: the part of the
pages' way that is left when the prompt is computed. Its queue begins with waiting for row and pages on the decode side:
the prefill side does not queue it before (grant_s in the KV transfer's report). If the prefill leg has not reported yet
(after an answer of a token or two), the decode side's times count: transfer is from the first page to the last, and
prefill is the wait before it, with the queue there.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from replicas.errors import Fault
from replicas.types import Finish, FinishReason, StageTimes, TokenDelta
from routing.why import PromptParts


@dataclass(slots=True, kw_only=True)
class Arrival:
    """An HTTP request at its arrival; it can have several prompts."""

    endpoint: str  # chat, completions, generate, tokens
    arrived_s: float  # monotonic
    time_s: float = field(default_factory=time.time)  # seconds since 1970
    num_prompts: int = 0  # begun
    exemplar: dict[str, str] | None = None  # trace_id of the trace that is kept of it; None: of none
    parts: PromptParts | None = None  # of the conversation, if it is one


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """The seconds that a request spent in each stage."""

    route_s: float
    queue_s: float
    prefill_s: float
    transfer_s: float
    decode_s: float

    @property
    def total_s(self) -> float:
        return self.route_s + self.queue_s + self.prefill_s + self.transfer_s + self.decode_s


@dataclass(slots=True)
class LegTimes:
    """The stage times that the replicas of one try reported."""

    own: StageTimes | None = None  # of the choice whose first token came first
    prefill: StageTimes | None = None  # of the prefill leg
    came_s: float | None = None  # from its first page to the last; None: the K/V did not arrive

    @property
    def before_first_s(self) -> float | None:
        """The time at the replica until the first token; None until it is told."""
        return None if self.own is None else before_first_s(self.own)

    def tell(self, stages: StageTimes) -> None:
        """Take the stages of a choice that begins or has ended; the choice with the first token counts."""
        if self.own is None or before_first_s(stages) <= before_first_s(self.own):
            self.own = stages


@dataclass(slots=True)
class _Choice:
    first_s: float
    last_s: float
    num_tokens: int


class Timeline:
    """The moments of one request: call `sent` with each try, `saw` with each delta, `end` once."""

    def __init__(
        self, arrival: Arrival, *, num_choices: int, on_gap: Callable[[float, int], None] | None = None
    ) -> None:
        """``on_gap``: called with each delta but a choice's first: seconds per token, and tokens."""
        self.arrival = arrival
        self.first_s: float | None = None  # moments on the router's clock
        self.ended_s: float | None = None
        self.num_output = 0
        self._num_choices = num_choices
        self._sent_s = arrival.arrived_s
        self._leg = LegTimes()
        self._choices: dict[int, _Choice] = {}
        self._finishes: list[Finish] = []
        self._on_gap = on_gap

    def sent(self, leg: LegTimes, now_s: float) -> None:
        """Note the start of a try; ``leg`` is filled while it runs."""
        if self.first_s is None:
            self._sent_s, self._leg = now_s, leg

    def saw(self, delta: TokenDelta, now_s: float) -> bool:
        """Note a delta for the client. Returns: whether it has the first token of all. About 0.5 us."""
        finish, num_tokens, begins = delta.finish, len(delta.token_ids), False
        if num_tokens:
            choice = self._choices.get(delta.index)
            self.num_output += num_tokens
            if choice is not None:
                if self._on_gap is not None:
                    self._on_gap((now_s - choice.last_s) / num_tokens, num_tokens)
                choice.last_s = now_s
                choice.num_tokens += num_tokens
            else:
                self._choices[delta.index] = _Choice(now_s, now_s, num_tokens)
                if self.first_s is None:
                    self.first_s, begins = now_s, True
        if finish is not None:
            self._finishes.append(finish)
        return begins

    def end(self, now_s: float) -> None:
        self.ended_s = now_s

    @property
    def is_whole(self) -> bool:
        """Whether every choice has its finish."""
        return len(self._finishes) == self._num_choices

    @property
    def finish_reasons(self) -> list[str]:
        """The reasons of the choices that have ended, in order."""
        return [finish.reason.value for finish in self._finishes]

    @property
    def worst(self) -> Finish | None:
        """The worst finish; None before the first."""
        return max(self._finishes, key=_badness, default=None)

    @property
    def last_s(self) -> float | None:
        """From the arrival to the newest token."""
        last_s = max((choice.last_s for choice in self._choices.values()), default=None)
        return None if last_s is None else last_s - self.arrival.arrived_s

    @property
    def ttft_s(self) -> float | None:
        """From the arrival to the first token."""
        return None if self.first_s is None else self.first_s - self.arrival.arrived_s

    @property
    def total_s(self) -> float | None:
        """From the arrival to the end; None until then."""
        return None if self.ended_s is None else self.ended_s - self.arrival.arrived_s

    @property
    def mean_itl_s(self) -> float | None:
        """Mean gap between tokens; None of answers of one token."""
        # all tokens of a first delta came at once: no gap
        gaps = sum(choice.num_tokens - 1 for choice in self._choices.values())
        return sum(choice.last_s - choice.first_s for choice in self._choices.values()) / gaps if gaps else None

    @property
    def stages(self) -> Stages | None:
        """The stages; None until the request has ended, or if a choice has no finish."""
        return None if self.ended_s is None or not self.is_whole else self.stages_so_far

    @property
    def stages_so_far(self) -> Stages:
        """The stages until the request ended. While it runs: until its first token, or before that until it was sent;
        the stage that it is in, decode or queue, still grows."""
        first_s = self.ended_s if self.first_s is None else self.first_s
        first_s = self._sent_s if first_s is None else first_s
        ended_s = first_s if self.ended_s is None else self.ended_s
        queue_s, prefill_s, transfer_s = split(max(first_s - self._sent_s, 0.0), self._leg)
        return Stages(
            route_s=self._sent_s - self.arrival.arrived_s,
            queue_s=queue_s,
            prefill_s=prefill_s,
            transfer_s=transfer_s,
            decode_s=ended_s - first_s,
        )

    def check(self) -> None:
        """Raises AssertionError if the stages do not add up."""
        stages, total_s = self.stages, self.total_s
        if stages is not None and total_s is not None:
            assert abs(stages.total_s - total_s) < 1e-6, (stages, total_s)
            assert min(getattr(stages, name) for name in Stages.__slots__) >= 0.0, stages


def split(waited_s: float, leg: LegTimes) -> tuple[float, float, float]:
    """Split the time from sending to the first token into queue, prefill and transfer (see the module's docstring)."""
    own, before = leg.own or StageTimes(), leg.prefill
    if leg.came_s is not None and before is not None:
        queue_s = min(before.queue_s, waited_s)
        prefill_s = min(before.prefill_s, waited_s - queue_s)
        return queue_s, prefill_s, waited_s - queue_s - prefill_s
    prefill_s, transfer_s = own.prefill_s, own.transfer_s
    if leg.came_s is not None:
        prefill_s, transfer_s = max(own.transfer_s - leg.came_s, 0.0), leg.came_s
    prefill_s = min(prefill_s, waited_s)
    transfer_s = min(transfer_s, waited_s - prefill_s)
    return waited_s - prefill_s - transfer_s, prefill_s, transfer_s


def before_first_s(stages: StageTimes) -> float:
    return stages.queue_s + stages.prefill_s + stages.transfer_s


def _badness(finish: Finish) -> tuple[int, bool, bool]:
    order = {FinishReason.ERROR: 2, FinishReason.ABORT: 1}
    return order.get(finish.reason, 0), finish.fault is Fault.TIMED_OUT, finish.fault is not Fault.INVALID
