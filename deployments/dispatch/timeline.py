"""Follows one request from its first decision to its end: its record, its times and stages, the calls to the watch.

Owns:      the record of the open request and its current try; its moments on this router's clock, and the arithmetic of
           its stages, as its client sees them. dispatcher.py calls this; nothing here decides.
Never:     knows metrics; changes what a client gets; raises, whatever a watch does: its errors go to the log.
Invariant: the stages are consecutive, none is negative, and they sum to the time from arrival to the last delta.
           ``opened`` and ``ended`` are called once each for a request, however it ends.
Thread:    the router's event loop.

    arrived ──route──> sent ──queue──┬──prefill──┬──transfer──> first token ──decode──> last delta
                                     engines report durations: their clocks are not this one

``sent`` is when the try that brought the first token was sent, so route includes the tries before it, and reading and
tokenising the prompt. All after the first token is decode, a retry in the middle included. Between the two lie the
prefill and transfer that the replica reports (StageTimes); queue is the rest: waiting there, and the way to and fro.
For a prompt that was handed over, the prefill leg reports queue and prefill, and the rest is transfer: the part of the
pages' way that is left when the prompt is computed. Its queue begins with waiting for row and pages on the decode side:
the prefill side does not queue it before (grant_s in the hand-off's report). If the prefill leg has not reported yet
(after an answer of a token or two), the decode side's times count: transfer is from the first page to the last, and
prefill is the wait before it, with the queue there.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import ParamSpec

from deployments.dispatch.route_log import RouteLog, RouteRecord, Try
from replicas.errors import Overloaded
from replicas.types import Finish, FinishReason, GenerateRequest, StageTimes, TokenDelta
from routing.types import Decision


@dataclass(slots=True, kw_only=True)
class Arrival:
    """An HTTP request at its arrival; it can have several prompts."""

    endpoint: str  # chat, completions, generate, tokens
    arrived_s: float  # monotonic
    time_s: float = field(default_factory=time.time)  # seconds since 1970
    num_prompts: int = 0  # begun


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

    def tell(self, stages: StageTimes) -> None:
        """Take the stages of a choice that has ended; the choice with the first token counts."""
        if self.own is None or before_first_s(stages) < before_first_s(self.own):
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


def _badness(finish: Finish) -> tuple[int, int]:
    order = {FinishReason.ERROR: 2, FinishReason.ABORT: 1}
    return (order.get(finish.reason, 0), finish.http_status)


log = logging.getLogger(__name__)
P = ParamSpec("P")
CLIENT_CLOSED, TIMED_OUT, SHED = 499, 504, 429  # http_status of what ended early
# outcome -> how a record says it ended
ENDINGS: Mapping[str, str] = {
    "ok": "finished",
    "cancelled": "aborted",
    "shed": "refused",
    "invalid": "refused",
    "error": "failed",
    "timeout": "failed",
}


class RequestWatch:
    """An observer of every request of one router; this one ignores all. Each call is short: it runs between tokens."""

    on_gap: Callable[[float, int], None] | None = None  # with each delta: seconds per token since the last, and tokens

    def opened(self, endpoint: str) -> None:
        """Note that a request has come."""

    def decided(self, decision: Decision, *, took_s: float, failure: Exception | None) -> None:
        """Note a decision. ``failure``: of the try before, if there was one."""

    def began(self, noted: Try, timeline: Timeline) -> None:
        """Note the first token."""

    def tried(self, noted: Try) -> None:
        """Note that a try has ended, well or not."""

    def ended(self, timeline: Timeline, *, prompt_tokens: int, outcome: str) -> None:
        """Note the end of a request; ``outcome`` is one of the catalogue's OUTCOMES."""

    def answered(self, endpoint: str, *, outcome: str, total_s: float) -> None:
        """Note an HTTP request without a prompt: refused before, or for no generation."""


def tell(hear: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
    """Call a watch. Its errors are logged: no request fails because counting it did."""
    try:
        hear(*args, **kwargs)
    except Exception:
        log.exception("what watches requests failed; the request goes on")


class Following:
    """The record and times of one open request; a context manager around all its tries."""

    def __init__(
        self,
        request: GenerateRequest,
        arrival: Arrival,
        *,
        routes: RouteLog,
        watch: RequestWatch,
        clock: Callable[[], float],
    ) -> None:
        on_gap = watch.on_gap
        told = None if on_gap is None else lambda gap_s, num_tokens: tell(on_gap, gap_s, num_tokens)
        self.timeline = Timeline(arrival, num_choices=request.sampling.n, on_gap=told)
        self._request = request
        self._routes = routes
        self._watch = watch
        self._clock = clock
        self._record: RouteRecord | None = None
        self._try: Try | None = None

    def __enter__(self) -> "Following":
        self.timeline.arrival.num_prompts += 1
        tell(self._watch.opened, self.timeline.arrival.endpoint)
        return self

    def decided(
        self, decision: Decision, held_out: Mapping[str, str], *, since_s: float, failure: Exception | None
    ) -> Try:
        """Note the next try, about to be sent. ``since_s``: when choosing began."""
        self._close_try()
        now_s = self._clock()
        self._try = self._routes.add(self._request.rid, decision, self.timeline, held_out)
        self._record = self._routes.get(self._request.rid)
        self.timeline.sent(self._try.times, now_s)
        tell(self._watch.decided, decision, took_s=now_s - since_s, failure=failure)
        return self._try

    def saw(self, delta: TokenDelta) -> None:
        """Note a delta on its way to the client."""
        if self.timeline.saw(delta, self._clock()):
            assert self._try is not None
            tell(self._watch.began, self._try, self.timeline)
            self._changed()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close_try()
        self.timeline.end(self._clock())
        outcome = outcome_of(self._finish(), error)
        if self._record is not None:
            self._record.ending = ENDINGS[outcome]
            self._changed()
        tell(self._watch.ended, self.timeline, prompt_tokens=len(self._request.token_ids), outcome=outcome)

    def _finish(self) -> Finish | None:
        """Return how the engines ended the request: all its choices ended, or one failed, which ends the request."""
        worst = self.timeline.worst
        if worst is None or self.timeline.is_whole or worst.reason is FinishReason.ERROR:
            return worst
        return worst if worst.reason is FinishReason.ABORT and worst.http_status == TIMED_OUT else None

    def _close_try(self) -> None:
        if self._try is not None:
            tell(self._watch.tried, self._try)
            self._try = None

    def _changed(self) -> None:
        if self._record is not None:
            self._routes.changed(self._record)


def outcome_of(finish: Finish | None, error: BaseException | None) -> str:
    """Return how a request ended, in the catalogue's words. ``finish``: how its engines ended it, if they did."""
    if finish is not None:
        if finish.reason is FinishReason.ERROR:
            return "error"
        if finish.reason is FinishReason.ABORT:
            return "timeout" if finish.http_status == TIMED_OUT else "cancelled"
        return "ok"
    if error is None or isinstance(error, GeneratorExit | asyncio.CancelledError):
        return "cancelled"
    if isinstance(error, Overloaded):
        return "shed"
    return outcome_of_status(getattr(error, "http_status", 500))


def outcome_of_status(status: int) -> str:
    """Return how a request with this HTTP status ended, in the catalogue's words."""
    if status < 400:
        return "ok"
    if status in (CLIENT_CLOSED, TIMED_OUT):
        return "cancelled" if status == CLIENT_CLOSED else "timeout"
    if status == SHED:
        return "shed"
    return "invalid" if status < 500 else "error"
