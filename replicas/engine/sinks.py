"""The sink of each open request, and which of its choices have not ended.

Owns:      the open rids: a delta of any other rid is dropped.
Never:     waits; lets one sink's error keep deltas from another.
Invariant: a sink gets exactly one delta with ``finish`` per choice: the engine's, or that of `answer`, whichever comes
           first; after the last one ``on_end`` is called, once. None is opened after `close`.
Thread:    any; sinks are called by the thread that delivers or answers, without the lock.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from replicas.errors import DiedInStep, EngineDead, InvalidRequest, MantaError, Overloaded
from replicas.types import Finish, FinishReason, GenerateRequest, RetryAs, TokenDelta, Usage

log = logging.getLogger(__name__)

Sink = Callable[[list[TokenDelta]], None]


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
    return Finish(
        reason=FinishReason.ERROR, message=str(error), fault=error.fault, retry_as=_retry_as(error)
    )


def _retry_as(error: MantaError) -> RetryAs | None:
    if isinstance(error, Overloaded):
        return "overloaded"
    if isinstance(error, DiedInStep):
        return "died_in_step"
    return "engine_dead" if isinstance(error, EngineDead) else None
