"""The open requests of an engine: their choices (tokens in, text and deltas out), and the sinks that deltas go to.

Owns:      each choice's detokenizer, what its caller has not received yet, and the index of open choices. A choice
           leaves the index with the delta that carries its finish. Of sinks the open rids: a delta of any other rid is
           dropped.
Never:     ends a request, except for stop strings, which only text can show; waits; lets one sink's error keep deltas
           from another.
Invariant: every choice that is added gets exactly one delta with ``finish``: the engine's, or that of `Sinks.answer`,
           whichever comes first; after the last one ``on_end`` is called, once. None is opened after `Sinks.close`.
Thread:    choices: the engine thread only. Sinks: any; they are called by the thread that delivers or answers, without
           the lock.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from replicas.errors import DiedInStep, EngineDead, InvalidRequest, MantaError, Overloaded
from replicas.request import Req, stage_times
from replicas.scheduler.tokens import NewToken, at_fault, stop_reason
from replicas.text.detokenizer import Detokenizer
from replicas.types import (
    Finish,
    FinishReason,
    GenerateRequest,
    RetryAs,
    StageTimes,
    TokenDelta,
    TokenLogprob,
    Usage,
)

if TYPE_CHECKING:
    from replicas.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

Sink = Callable[[list[TokenDelta]], None]


@dataclass(slots=True, eq=False)
class Choice:
    """One choice of an open request: its sequence and its text."""

    req: Req
    detokenizer: Detokenizer
    prompt_logprobs_due: tuple[TokenLogprob, ...] | None  # what precedes req.prompt_logprobs; None: nothing to send

    @staticmethod
    def make(
        request: GenerateRequest, index: int, *, tokenizer: "Tokenizer", now_s: float, eos_ids: frozenset[int]
    ) -> "Choice":
        """Make choice ``index`` of ``request``, in state WAITING."""
        req = Req.make(request, index=index, now_s=now_s, eos_ids=eos_ids)
        detokenizer = Detokenizer.of(req.sampling, tokenizer)
        due: tuple[TokenLogprob, ...] | None = None
        if request.prompt_logprobs_from is not None:
            first = TokenLogprob(token_id=int(request.token_ids[0]), logprob=None)  # nothing precedes it
            due = (first,) if request.prompt_logprobs_from == 0 else ()
        return Choice(req=req, detokenizer=detokenizer, prompt_logprobs_due=due)

    def replay(self) -> Finish | None:
        """Take in the output that another replica delivered. Returns: why that completes the choice, if it does."""
        req = self.req
        if not req.num_resumed:
            return None
        finish = stop_reason(req)
        shown = req.output_ids[: self._num_shown(finish)]
        delivered = self.detokenizer.push([int(token) for token in shown])
        if delivered.matched_stop is not None:
            return Finish(reason=FinishReason.STOP, matched=delivered.matched_stop)
        return finish

    def push(self, token_id: int) -> tuple[str, Finish | None]:
        """Decode ``token_id``. Returns: the text that it adds, and the end if that completes a stop string."""
        shows = self._num_shown(self.req.finish) == self.req.num_output
        pushed = self.detokenizer.push([token_id] if shows else [])
        if pushed.matched_stop is None:
            return pushed.text, None
        return pushed.text, Finish(reason=FinishReason.STOP, matched=pushed.matched_stop)

    def push_run(self, token: NewToken) -> tuple[NewToken, str, Finish | None]:
        """Decode a token and those that came with it. Returns: the token with those up to the one that completes a stop
        string, their text, and the end if there is such a one."""
        assert token.token_id is not None
        ids, text = (token.token_id, *(token_id for token_id, _ in token.more)), ""
        num_shown = len(ids) - (self.req.num_output - self._num_shown(self.req.finish))
        for index, token_id in enumerate(ids[:num_shown]):
            pushed = self.detokenizer.push([token_id])
            text += pushed.text
            if pushed.matched_stop is not None:
                self.req.num_tokens -= len(ids) - 1 - index
                self.req.computed_len = min(self.req.computed_len, self.req.num_tokens - 1)
                finish = Finish(reason=FinishReason.STOP, matched=pushed.matched_stop)
                return token._replace(more=token.more[:index]), text, finish
        return token, text, None

    def delta(self, token: NewToken | None, text: str) -> TokenDelta:
        """Make the delta for the caller; the last one if the request has ended."""
        req = self.req
        prompt_logprobs: tuple[TokenLogprob, ...] = ()
        if self.prompt_logprobs_due is not None and req.stamps.first_token_s is not None:
            prompt_logprobs = (*self.prompt_logprobs_due, *req.prompt_logprobs)
            self.prompt_logprobs_due = None
        if req.finish is not None and not isinstance(req.finish.matched, str):
            try:
                text += self.detokenizer.flush()
            except BaseException as error:  # noqa: BLE001
                req.finish = at_fault(req, error)
        report = None
        if req.leg is not None:
            report, req.leg.report = req.leg.report, None
        token_ids: tuple[int, ...] = ()
        logprobs: tuple[TokenLogprob, ...] = ()
        if token is not None and token.token_id is not None:
            token_ids = (token.token_id, *(token_id for token_id, _ in token.more))
            if token.logprob is not None:
                more = (logprob or _certain(token_id, req.top_logprobs) for token_id, logprob in token.more)
                logprobs = (token.logprob, *more)
        return TokenDelta(
            rid=req.rid,
            index=req.index,
            token_ids=token_ids,
            text=text,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            usage=req.usage(),
            finish=req.finish,
            kv_transfer=report,
            stages=self._stages(begins=bool(token_ids) and req.num_output - req.num_resumed == len(token_ids)),
        )

    def _stages(self, *, begins: bool) -> StageTimes | None:
        """Return the stages for the last delta, and for that of the first token (``begins``), so that a router can
        tell queue from prefill while the request runs."""
        stamps, ended = self.req.stamps, self.req.finish is not None
        if not ended and not begins:
            return None
        stages = stage_times(self.req, stamps.ended_s if ended else stamps.first_token_s)
        return replace(stages, passed_s=stamps.passed_s) if stamps.passed_s else stages

    def _num_shown(self, finish: Finish | None) -> int:
        """Count the output tokens that become text; a stop token does not, unless the request includes stops."""
        by_id = finish is not None and isinstance(finish.matched, int)
        return self.req.num_output - (1 if by_id and not self.req.sampling.include_stop else 0)


def _certain(token_id: int, num_top: int) -> TokenLogprob:
    """Return the logprob of the only token allowed."""
    return TokenLogprob(token_id=token_id, logprob=0.0, top=((token_id, 0.0),) if num_top else ())


class OpenRequests:
    """The choices that have not ended, by request id and by sequence."""

    def __init__(self) -> None:
        self._choices: dict[str, list[Choice]] = {}  # all of each request of which one is open
        self.by_req: dict[Req, Choice] = {}  # the same choices, for a lookup per token

    def __len__(self) -> int:
        return len(self._choices)

    def __contains__(self, rid: str) -> bool:
        return rid in self._choices

    @property
    def rids(self) -> list[str]:
        return list(self._choices)

    def add(self, rid: str, choices: Sequence[Choice]) -> None:
        assert rid not in self._choices, f"request {rid} is open"
        self._choices[rid] = list(choices)
        self.by_req.update((choice.req, choice) for choice in choices)

    def choices(self, rid: str) -> list[Choice]:
        """List the open choices of a request; none if it is not open."""
        return [choice for choice in self._choices.get(rid, ()) if choice.req in self.by_req]

    def unadmitted(self, rid: str) -> list[Choice]:
        """List the open choices of a request none of which was ever admitted; none for any other request."""
        was_admitted = any(choice.req.was_admitted for choice in self._choices.get(rid, ()))
        return [] if was_admitted else self.choices(rid)

    def find(self, rid: str, index: int) -> Req | None:
        """Return choice ``index`` of an open request."""
        return next((choice.req for choice in self.choices(rid) if choice.req.index == index), None)

    def take_delta(self, choice: Choice, token: NewToken | None = None, text: str = "") -> TokenDelta:
        """Make the next delta of an open choice; a choice that has ended leaves with it."""
        delta = choice.delta(token, text)
        if delta.finish is not None:
            del self.by_req[choice.req]
            if not self.choices(choice.req.rid):
                del self._choices[choice.req.rid]
        return delta


@dataclass(slots=True, kw_only=True)
class _Open:
    """One open request."""

    sink: Sink
    on_end: Callable[[], object]
    remaining: set[int]  # choices that have not ended


class Sinks:
    """The open requests of one engine, indexed by request id."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[str, _Open] = {}
        self._closed: EngineDead | None = None

    def __len__(self) -> int:
        return len(self._open)

    def open(
        self, request: GenerateRequest, sink: Sink, on_end: Callable[[], object], *, max_waiting: int, max_running: int
    ) -> None:
        """Open ``request``. Raises: the error of `close`; InvalidRequest for a rid that is open; Overloaded."""
        with self._lock:
            if self._closed is not None:
                raise self._closed
            if request.rid in self._open:
                raise InvalidRequest(f"rid {request.rid!r} is already open", param="rid")
            num_open = sum(len(each.remaining) for each in self._open.values())
            if num_open + request.num_choices > max_waiting + max_running:
                most = f"{max_running} may run and {max_waiting} wait"
                raise Overloaded(f"{num_open} requests are open, at most {most}: try again later")
            self._open[request.rid] = _Open(sink=sink, on_end=on_end, remaining=set(range(request.num_choices)))

    def close(self, error: EngineDead) -> EngineDead:
        """Refuse further requests. Returns: the error that they get: that of the first call."""
        with self._lock:
            if self._closed is None:
                self._closed = error
            return self._closed

    def rids(self, sink: Sink | None = None) -> list[str]:
        """Return the open requests of ``sink``, or all."""
        with self._lock:
            return [rid for rid, each in self._open.items() if sink is None or each.sink is sink]

    def deliver(self, deltas: list[TokenDelta]) -> None:
        """Call each sink once, with all deltas of its requests."""
        by_sink: dict[int, tuple[Sink, list[TokenDelta]]] = {}
        ended = []
        with self._lock:
            for delta in deltas:
                found = self._open.get(delta.rid)
                if found is None:
                    continue  # already answered by the watchdog
                by_sink.setdefault(id(found.sink), (found.sink, []))[1].append(delta)
                if delta.finish is not None:
                    found.remaining.discard(delta.index)
                    if not found.remaining:
                        ended.append(self._open.pop(delta.rid))
        for sink, batch in by_sink.values():
            _call(sink, batch)
        for each in ended:
            each.on_end()

    def answer(self, rid: str, error: MantaError) -> None:
        """End ``rid`` with an error, without the engine's help."""
        with self._lock:
            found = self._open.pop(rid, None)
        if found is None:
            return
        finish = failed(error)
        usage = Usage(prompt_tokens=0, completion_tokens=0, cached_tokens=0)
        _call(
            found.sink,
            [TokenDelta(rid=rid, index=index, usage=usage, finish=finish) for index in sorted(found.remaining)],
        )
        found.on_end()

    def answer_all(self, error: EngineDead) -> None:
        for rid in self.rids():
            self.answer(rid, DiedInStep(str(error)) if rid in error.rids else error)

    def check(self) -> None:
        """Raise AssertionError if a request is open whose choices have all ended."""
        with self._lock:
            assert all(each.remaining for each in self._open.values())


def _call(sink: Sink, batch: list[TokenDelta]) -> None:
    try:
        sink(batch)
    except Exception:
        log.exception("a sink raised; its deltas are lost, the engine goes on")


def failed(error: MantaError) -> Finish:
    """Tell a caller that its request ends with ``error``."""
    return Finish(reason=FinishReason.ERROR, message=str(error), fault=error.fault, retry_as=_retry_as(error))


def _retry_as(error: MantaError) -> RetryAs | None:
    if isinstance(error, Overloaded):
        return "overloaded"
    if isinstance(error, DiedInStep):
        return "died_in_step"
    return "engine_dead" if isinstance(error, EngineDead) else None
