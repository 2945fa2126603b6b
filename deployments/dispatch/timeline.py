"""When what happened to one request, and what its time was spent on, as its client felt it.

Owns:      the moments of one request on this router's clock, and the arithmetic of its stages.
Never:     reads a clock; knows metrics.
Invariant: the stages are consecutive, none is negative, and they sum to the time from arrival to the last delta.
Thread:    the router's event loop.

    arrived ──route──> sent ──queue──┬──prefill──┬──transfer──> first token ──decode──> last delta
                                     engines tell how long, not when: their clocks are not ours

``sent`` is when the try that brought the first token was sent, so that tries before it, and reading and tokenising the
prompt, are route. All after the first token is decode, a retry in the middle included. Between the two lie what the
replica says of its prefill and transfer (StageTimes), and queue is the rest: waiting there, and the way to it and back.
Of a prompt that was handed over, the prefill leg says queue and prefill, and the rest is transfer: what is left of the
pages' way when the prompt is computed. Its queue begins with waiting for row and pages on the decode side: before that
has them, the prefill side does not queue it (the hand-off's report has that part as grant_s). Where the prefill leg's
word has not come by then (after an answer of a token or two), the decode side's counts: transfer is from the first page
to the last, and prefill the wait before it, with the queue there.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from replicas.types import Finish, FinishReason, StageTimes, TokenDelta


@dataclass(slots=True, kw_only=True)
class Arrival:
    """One HTTP request when it came; several prompts can come with one."""

    endpoint: str  # chat, completions, generate, tokens
    arrived_s: float  # monotonic
    time_s: float = field(default_factory=time.time)  # seconds since 1970
    num_prompts: int = 0  # begun


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """Seconds of each stage."""

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
    """What the replicas of one try told of it."""

    own: StageTimes | None = None  # of the choice whose first token came first
    prefill: StageTimes | None = None  # of the prefill leg
    came_s: float | None = None  # from the first page that came from there to the last; None: the K/V did not

    def tell(self, stages: StageTimes) -> None:
        """One choice has ended."""
        if self.own is None or before_first_s(stages) < before_first_s(self.own):
            self.own = stages


@dataclass(slots=True)
class _Choice:
    first_s: float
    last_s: float
    num_tokens: int


class Timeline:
    """One request: `sent` with each try, `saw` with each delta, `end` once."""

    def __init__(
        self, arrival: Arrival, *, num_choices: int, on_gap: Callable[[float, int], None] | None = None
    ) -> None:
        """``on_gap``: told of the gap before each delta but a choice's first: seconds per token, and tokens."""
        self.arrival = arrival
        self.first_s: float | None = None  # moments on the router's clock
        self.ended_s: float | None = None
        self.num_output = 0
        self._num_left = num_choices
        self._sent_s = arrival.arrived_s
        self._leg = LegTimes()
        self._choices: dict[int, _Choice] = {}
        self._finishes: list[Finish] = []
        self._on_gap = on_gap

    def sent(self, leg: LegTimes, now_s: float) -> None:
        """A try begins; ``leg`` is filled while it runs."""
        if self.first_s is None:
            self._sent_s, self._leg = now_s, leg

    def saw(self, delta: TokenDelta, now_s: float) -> bool:
        """A delta for the client; True with the first token of all. About 0.5 us."""
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
            self._num_left -= 1
            self._finishes.append(finish)
        return begins

    def end(self, now_s: float) -> None:
        self.ended_s = now_s

    @property
    def is_whole(self) -> bool:
        """Every choice has its finish, whatever the client did afterwards."""
        return self._num_left == 0

    @property
    def finish_reasons(self) -> list[str]:
        """Of the choices that have ended, in the order of their ends."""
        return [finish.reason.value for finish in self._finishes]

    @property
    def worst(self) -> Finish | None:
        """Of the finishes, the one that says least well; None while none has come."""
        return max(self._finishes, key=_badness, default=None)

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
        # the first delta's further tokens came with its first, and have no gap
        gaps = sum(choice.num_tokens - 1 for choice in self._choices.values())
        return sum(choice.last_s - choice.first_s for choice in self._choices.values()) / gaps if gaps else None

    @property
    def stages(self) -> Stages | None:
        """None until it has ended, or if it never came to its end."""
        if self.ended_s is None or not self.is_whole:
            return None
        first_s = self.ended_s if self.first_s is None else self.first_s
        queue_s, prefill_s, transfer_s = split(max(first_s - self._sent_s, 0.0), self._leg)
        return Stages(
            route_s=self._sent_s - self.arrival.arrived_s,
            queue_s=queue_s,
            prefill_s=prefill_s,
            transfer_s=transfer_s,
            decode_s=self.ended_s - first_s,
        )

    def check(self) -> None:
        """Raises AssertionError if the stages do not add up."""
        stages, total_s = self.stages, self.total_s
        if stages is not None and total_s is not None:
            assert abs(stages.total_s - total_s) < 1e-6, (stages, total_s)
            assert min(getattr(stages, name) for name in Stages.__slots__) >= 0.0, stages


def split(waited_s: float, leg: LegTimes) -> tuple[float, float, float]:
    """(queue, prefill, transfer) of the time between sending and the first token, as the module's docstring says."""
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


def _badness(finish: Finish) -> tuple[int, int]:
    order = {FinishReason.ERROR: 2, FinishReason.ABORT: 1}
    return (order.get(finish.reason, 0), finish.http_status)
