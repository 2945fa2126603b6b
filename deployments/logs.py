"""Puts our log lines into Serve's log files, where operators look (``serve`` in Ray's logs, one file per replica).

With observability.log_format: json each line is one JSON object: Serve's own encoding, with the names of the logger and
of the request that the line is about. With MANTA_OBSERVE=1 in the replicas' environment (``runtime_env``) hand-offs and
decode steps are logged too, a JSON line each (kvtransfer/replay/observe.py). This reads and hashes every prompt's K/V:
not while speed counts.
"""

import contextlib
import logging
import os
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, Literal

from kvtransfer.replay import observe

OURS = ("deployments", "replicas", "routing", "kvtransfer")
CLOCKWORK = "CALL observe OK"  # Serve's line for each call of the observatory, a second apart
WAITS_FOR_REPLICA = "waiting for the first model replica"  # said by the router, read by startup.py
_REQUEST: ContextVar[str | None] = ContextVar("request", default=None)  # what the client calls it
_RID: ContextVar[str | None] = ContextVar("rid", default=None)  # one try of it (rids.py)


def into_serve() -> None:
    """Send our loggers to Serve's handlers; call once in each Serve replica, after Serve has set up its logging."""
    serve = logging.getLogger("ray.serve")
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
    """Filter a line: name its request, and drop the lines that come every second."""
    if record.name == "ray.serve" and str(record.msg).startswith(CLOCKWORK):
        return False
    for attribute, value in (("request_id", _REQUEST.get()), ("rid", _RID.get())):
        if value is not None:
            setattr(record, attribute, value)
    return True
