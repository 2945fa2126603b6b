"""Puts our log lines into Serve's log files, where operators look (``serve`` in Ray's logs, one file per replica).

With observability.log_format: json each line is one JSON object: Serve's own encoding, with the names of the logger and
of the request that the line is about. With MANTA_OBSERVE=1 in the replicas' environment (``runtime_env``) hand-offs and
decode steps are logged too, a JSON line each (kvtransfer/replay/observe.py). This reads and hashes every prompt's K/V:
not while speed counts.
"""

import contextlib
import itertools
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Literal

from kvtransfer.replay import observe
from replicas.types import EngineStats, each_told

log = logging.getLogger(__name__)

OURS = ("deployments", "replicas", "routing", "kvtransfer")
# Serve's lines for each call of the observatory, a second apart, and for each request, of which the router says more
CLOCKWORK = ("CALL observe OK", "CALL lease OK")
ACCESS = {"serve_access_log": True}  # extra of a line about each request: Serve's enable_access_log: false drops it
WAITS_FOR_REPLICA = "waiting for the first model replica"  # said by the router, read by startup.py
SELDOM_S = 1.0  # between two equal warnings of Serve
MOST_KEPT, MOST_CHARS = 256, 60  # warnings that are told apart, by so much of each: the id of a request comes later
ACTIVITY_S = 10.0  # from one line about what a replica does to the next; none while it does nothing
_REQUEST: ContextVar[str | None] = ContextVar("request", default=None)  # what the client calls it
_RID: ContextVar[str | None] = ContextVar("rid", default=None)  # one try of it (rids.py)


def into_serve() -> None:
    """Send our loggers to Serve's handlers; call once in each Serve replica, after Serve has set up its logging."""
    serve = logging.getLogger("ray.serve")
    serve.addFilter(Seldom())
    for handler in serve.handlers:
        handler.addFilter(_named)  # after Serve's, which would name the request as its proxy does
    for name in OURS:
        logger = logging.getLogger(name)
        logger.handlers = list(serve.handlers)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    observe.enable(os.environ.get("MANTA_OBSERVE") == "1")


def options(log_format: Literal["text", "json"]) -> dict[str, Any]:
    """Return the logging options of a deployment; none for text, so that the file's other logging settings hold."""
    if log_format == "text":
        return {}
    return {"logging_config": {"encoding": "JSON", "additional_log_standard_attrs": ["name"]}}


@contextlib.contextmanager
def about(*, request: str | None = None, rid: str | None = None) -> Iterator[None]:
    """Name the request and the rid in lines written inside, also in tasks started inside. Takes 3 us."""
    names = [(variable, variable.set(value)) for variable, value in ((_REQUEST, request), (_RID, rid)) if value]
    try:
        yield
    finally:
        for variable, token in names:
            variable.reset(token)


def _named(record: logging.LogRecord) -> bool:
    """Filter a line: name its request, and drop Serve's lines that say nothing."""
    if record.name == "ray.serve" and str(record.msg).startswith(CLOCKWORK):
        return False
    for attribute, value in (("request_id", _REQUEST.get()), ("rid", _RID.get())):
        if value is not None:
            setattr(record, attribute, value)
    return True


class Seldom(logging.Filter):
    """Lets one line in SELDOM_S pass of each place in Serve's code that warns, and has that line count the others: for
    a replica that cannot be reached Serve writes one for each try of each request, some 90 a second."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._said: dict[tuple[str, int, str], tuple[float, itertools.count[int]]] = {}  # when, and those left out

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        now_s, text = self._clock(), re.sub(r"\d+", "", record.getMessage())[:MOST_CHARS]
        key = (record.pathname, record.lineno, text)
        said_s, left_out = self._said.get(key, (-SELDOM_S, itertools.count()))
        if now_s - said_s < SELDOM_S:
            next(left_out)
            return False
        if more := next(left_out):
            record.msg, record.args = f"{record.getMessage()} ({more} more such lines)", ()
        if len(self._said) >= MOST_KEPT:
            self._said.clear()
        self._said[key] = (now_s, itertools.count())
        return True


class ActivityLog:
    """The line in a replica's log about what it does, every ACTIVITY_S: what one searches after an incident, where no
    metrics are kept. Looks at no token."""

    def __init__(self, stats: EngineStats, clock: Callable[[], float]) -> None:
        self._before = stats
        self._since_s = clock()
        self._clock = clock

    def look(self, stats: EngineStats) -> None:
        """Write the line if it is time, and if there is something to tell."""
        took_s = self._clock() - self._since_s
        if took_s < ACTIVITY_S:
            return
        before, self._before = self._before, stats
        self._since_s += took_s
        told = _activity(before, stats, took_s)
        if any(value for name, value in told.items() if not name.endswith("_percent")):
            text = ", ".join(f"{name} {value}" for name, value in told.items())
            log.info("%s", text, extra=told)


def _activity(before: EngineStats, now: EngineStats, took_s: float) -> dict[str, Any]:
    """Return the figures of the line about the ``took_s`` between two statistics."""
    looked_up = now.lookup_tokens - before.lookup_tokens
    hit = round(100 * (now.cached_tokens - before.cached_tokens) / looked_up) if looked_up else None
    named = [(how.log, getattr(now, name), getattr(before, name), how.is_counter)
             for name, how in each_told(type(now)) if how.log]  # fmt: skip
    return {
        **{name: value for name, value, _, is_counter in named if not is_counter},
        "handing_over": now.num_handed_over,
        **{name: value - old for name, value, old, is_counter in named if is_counter},
        "kv_percent": round(100 * now.pool.utilization),
        **({} if hit is None else {"hit_percent": hit}),
        "prefill_tok_s": round((now.prefill_tokens - before.prefill_tokens) / took_s, 1),
        "decode_tok_s": round((now.decode_tokens - before.decode_tokens) / took_s, 1),
    }
