"""The ids of requests, unique in the application, which carry the name that the client gave. They also tell
which request the log lines of a task are about (logs.py writes it into them).

    internal rid = <16 hex digits><16 of its owner, where keys are asked for>.<try>-<the client's name>
The digits make it unique in the whole application; its owner (keys.py) may abort it; the try tells a retry's deltas
from those of a replica that was given up; the client's name lets ``/abort_request`` find it on any replica.
"""

import contextlib
import re
import secrets
from collections.abc import Iterator
from contextvars import ContextVar

from replicas.errors import InvalidRequest

_NAME = re.compile(r"[A-Za-z0-9._:/@+=-]{1,128}")
_NUM_DIGITS = 16
REQUEST: ContextVar[str | None] = ContextVar("request", default=None)  # what the client calls it
RID: ContextVar[str | None] = ContextVar("rid", default=None)  # one try of it


def new_digits() -> str:
    """Make what begins an id, and no other one of the application."""
    return secrets.token_hex(_NUM_DIGITS // 2)


def new_rid(client_rid: str) -> str:
    return f"{new_digits()}.0-{client_rid}"


def owned(rid: str, owner: str) -> str:
    """Return ``rid``, which has no owner yet, as ``owner``'s."""
    digits, dot, rest = rid.partition(".")
    return f"{digits}{owner}{dot}{rest}"


def owner_of(rid: str) -> str:
    """Return the owner of ``rid``; "" without one."""
    return rid.partition(".")[0][_NUM_DIGITS:]


def with_try(rid: str, number: int, choice: int | None = None) -> str:
    """Return the rid for try ``number`` of the request, or of its choice ``choice`` alone."""
    digits, _, rest = rid.partition(".")
    _, _, client_rid = rest.partition("-")
    return f"{digits}.{number}{'' if choice is None else f'c{choice}'}-{client_rid}"


def choice_of(rid: str) -> int | None:
    """Return the choice that ``rid`` is of alone; None for a whole request."""
    found = re.match(r"[^.]*\.\d+c(\d+)-", rid)
    return None if found is None else int(found[1])


def client_rid(rid: str) -> str:
    """Return the name that the client gave."""
    return rid.partition("-")[2]


def check_name(name: str) -> str:
    """Return ``name`` if a request may have it. Raises: InvalidRequest."""
    if not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"rid: must be 1 to 128 of the characters A-Z a-z 0-9 . _ : / @ + = -, got {name[:64]!r}", param="rid"
        )
    return name


def clean_name(name: str | None) -> str:
    """Return ``name`` if it is fit for a header and a log line, whose message begins behind ``--``; else a new name."""
    return name if name is not None and _NAME.fullmatch(name) and name != "--" else secrets.token_hex(8)


@contextlib.contextmanager
def about(*, request: str | None = None, rid: str | None = None) -> Iterator[None]:
    """Name the request and the rid in lines written inside, also in tasks started inside. Takes 3 us."""
    names = [(variable, variable.set(value)) for variable, value in ((REQUEST, request), (RID, rid)) if value]
    try:
        yield
    finally:
        for variable, token in names:
            variable.reset(token)
