"""Follows one request from its first decision to its end: its record, its times, and the calls to the watch.

Owns:      the record of the open request and its current try. dispatcher.py calls this; nothing here decides.
Never:     changes what a client gets; raises, whatever a watch does: its errors go to the log.
Invariant: ``opened`` and ``ended`` are called once each for a request, however it ends.
Thread:    the router's event loop.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import ParamSpec

from deployments.dispatch.route_log import RouteLog, RouteRecord, Try
from deployments.dispatch.timeline import Arrival, Timeline
from replicas.errors import Overloaded
from replicas.types import Finish, FinishReason, GenerateRequest, TokenDelta
from routing.types import Decision

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
