"""Who receives each open request's deltas, and which of its choices have yet to end.

Owns:      the open rids: nothing is delivered to one that is not among them.
Never:     waits, or lets one sink's error keep deltas from another.
Invariant: a sink gets exactly one delta with ``finish`` per choice: the engine's, or that of `answer`, whichever comes
           first. None is opened after `close`.
Thread:    any; sinks are called by the thread that delivers or answers, without the lock.
"""

import logging
import threading
from collections.abc import Callable
from typing import Literal

from replicas.errors import EngineDead, InvalidRequest, MantaError, Overloaded
from replicas.types import Finish, FinishReason, GenerateRequest, TokenDelta, Usage

log = logging.getLogger(__name__)

Sink = Callable[[list[TokenDelta]], None]


class Sinks:
    """By rid."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_rid: dict[str, Sink] = {}
        self._remaining: dict[str, set[int]] = {}  # choices that have not finished
        self._closed: EngineDead | None = None

    def __len__(self) -> int:
        return len(self._by_rid)

    def open(self, request: GenerateRequest, sink: Sink, *, max_waiting: int, max_running: int) -> None:
        """Raises: the error of `close`; InvalidRequest for a rid that is open; Overloaded."""
        with self._lock:
            if self._closed is not None:
                raise self._closed
            if request.rid in self._by_rid:
                raise InvalidRequest(f"rid {request.rid!r} is already open", param="rid")
            num_open = sum(len(choices) for choices in self._remaining.values())
            if num_open + request.num_choices > max_waiting + max_running:
                most = f"{max_running} may run and {max_waiting} wait"
                raise Overloaded(f"{num_open} requests are open, at most {most}: try again later")
            self._by_rid[request.rid] = sink
            self._remaining[request.rid] = set(range(request.num_choices))

    def close(self, error: EngineDead) -> EngineDead:
        """Refuse what is opened from now on. Returns: why, which is what the first call said."""
        with self._lock:
            if self._closed is None:
                self._closed = error
            return self._closed

    def deliver(self, deltas: list[TokenDelta]) -> None:
        """To each sink at once what is for its requests."""
        by_sink: dict[int, tuple[Sink, list[TokenDelta]]] = {}
        with self._lock:
            for delta in deltas:
                sink = self._by_rid.get(delta.rid)
                if sink is None:
                    continue  # already answered by the watchdog
                by_sink.setdefault(id(sink), (sink, []))[1].append(delta)
                if delta.finish is not None:
                    self._end_choice(delta.rid, delta.index)
        for sink, batch in by_sink.values():
            _call(sink, batch)

    def answer(self, rid: str, error: MantaError) -> None:
        """Tell whoever waits for ``rid`` that it ended with an error, without the engine's help."""
        with self._lock:
            sink = self._by_rid.pop(rid, None)
            remaining = self._remaining.pop(rid, set())
        if sink is None:
            return
        finish = Finish(
            reason=FinishReason.ERROR,
            message=str(error),
            http_status=error.http_status,
            retry_as=_retry_as(error),
        )
        usage = Usage(prompt_tokens=0, completion_tokens=0, cached_tokens=0)
        _call(sink, [TokenDelta(rid=rid, index=index, usage=usage, finish=finish) for index in sorted(remaining)])

    def answer_all(self, error: EngineDead) -> None:
        for rid in list(self._by_rid):
            self.answer(rid, error)

    def _end_choice(self, rid: str, index: int) -> None:
        remaining = self._remaining[rid]
        remaining.discard(index)
        if not remaining:
            del self._remaining[rid], self._by_rid[rid]


def _call(sink: Sink, batch: list[TokenDelta]) -> None:
    try:
        sink(batch)
    except Exception:
        log.exception("a sink raised; its deltas are lost, the engine goes on")


def _retry_as(error: MantaError) -> Literal["overloaded", "engine_dead"] | None:
    if isinstance(error, Overloaded):
        return "overloaded"
    return "engine_dead" if isinstance(error, EngineDead) else None
