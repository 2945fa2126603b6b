"""Puts our log lines into Serve's log files, where operators look (``serve`` in Ray's logs, one file per replica).

With observability.log_format: json each line is one JSON object: Serve's own encoding, with the names of the logger and
of the request that the line is about. With MANTA_OBSERVE=1 in the replicas' environment (``runtime_env``) transfers and
decode steps are logged too, a JSON line each (kvtransfer/replay/observe.py). This reads and hashes every prompt's K/V:
not while speed counts.
"""

import itertools
import logging
import os
import re
import time
from collections.abc import Callable
from typing import Any, Literal

from deployments.record.rids import REQUEST, RID
from kvtransfer.replay import observe

OURS = ("deployments", "replicas", "routing", "kvtransfer")
# Serve's lines for each call of the observatory, a second apart, and for each request, of which the router says more
CLOCKWORK = ("CALL observe OK", "CALL lease OK")
WAITS_FOR_REPLICA = "waiting for the first model replica"  # said by the router, read by startup.py
SELDOM_S = 1.0  # between two equal warnings of Serve
MOST_KEPT, MOST_CHARS = 256, 60  # warnings that are told apart, by so much of each: the id of a request comes later


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


def _named(record: logging.LogRecord) -> bool:
    """Filter a line: name its request, and drop Serve's lines that say nothing."""
    if record.name == "ray.serve" and str(record.msg).startswith(CLOCKWORK):
        return False
    for attribute, value in (("request_id", REQUEST.get()), ("rid", RID.get())):
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
