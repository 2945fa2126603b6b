"""Asks a running Manta over HTTP; an error says what to do.

Never: draws; imports Ray.
"""

import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

TIMEOUT_S = 10.0
NOT_THERE, UNREACHABLE, REFUSED = 1, 3, 4  # exit statuses; 2 is argparse's


class Unanswered(Exception):
    """Manta did not answer the question; the message says what to do."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status  # of the process

    @property
    def may_pass(self) -> bool:
        """Whether asking again may help without any other change."""
        return self.status == UNREACHABLE


def state(url: str, key: str | None) -> dict[str, Any]:
    """Return the observatory's state. Raises: Unanswered."""
    try:
        return _get(f"{_observatory(url)}/api/state", key)
    except urllib.error.HTTPError as error:
        raise _refused(error, url, key) from error


def route(url: str, rid: str, key: str | None) -> dict[str, Any]:
    """Return what the routers know of request ``rid``. ``url``: theirs, or the observatory's, one step below.

    Raises: Unanswered.
    """
    server, path = _parts(url)
    bases = [server + path, server + path.rpartition("/")[0]] if path else [server]
    for each in bases:
        try:
            return _get(f"{each}/route/{urllib.parse.quote(rid)}", key)
        except urllib.error.HTTPError as error:
            code, said = _error(error)
            if code == "route_not_found":
                raise Unanswered(said, NOT_THERE) from error
            if code in ("admin_key_needed", "invalid_api_key"):
                raise _key_refused(each, key) from error
            if error.code >= 500:
                raise Unanswered(f"{each} answers {error.code}: {said or error.reason}", UNREACHABLE) from error
    raise Unanswered(f"no router of Manta answers under {' or '.join(bases)}: give its address with --url", NOT_THERE)


def _parts(url: str) -> tuple[str, str]:
    """Split ``url`` into the server and a path without a slash at the end. Raises: Unanswered."""
    base = (url if "://" in url else f"http://{url}").rstrip("/")
    try:
        path = urllib.parse.urlsplit(base).path
    except ValueError as error:
        raise Unanswered(f"{url} is no address ({error}): check --url", NOT_THERE) from error
    return base.removesuffix(path), path


def _observatory(url: str) -> str:
    """Return the observatory's address: the path in ``url`` is its own; without one it is the shipped settings'."""
    server, path = _parts(url)
    return server + (path or "/manta")


def _get(url: str, key: str | None = None) -> dict[str, Any]:
    """Fetch JSON. Raises: HTTPError for an error answer; Unanswered for none, or one that is not Manta's."""
    headers = {"Accept": "application/json"} | ({"Authorization": f"Bearer {_sendable(key)}"} if key else {})
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT_S) as answer:
            body = json.load(answer)
    except urllib.error.HTTPError:
        raise
    except (OSError, http.client.IncompleteRead) as error:  # RemoteDisconnected is both kinds
        reason = getattr(error, "reason", None) or str(error) or type(error).__name__
        raise Unanswered(
            f"nothing answers at {url} ({reason}): start Manta with `make serve`, or give its address with --url",
            UNREACHABLE,
        ) from error
    except (ValueError, http.client.HTTPException) as error:  # the address, or the answer
        what = f"{type(error).__name__}: {str(error).strip()}"
        raise Unanswered(f"{url} does not answer as Manta does ({what}): check --url", NOT_THERE) from error
    if not isinstance(body, dict):
        raise Unanswered(f"{url} does not answer as Manta does: check --url", NOT_THERE)
    return body


def _sendable(key: str) -> str:
    """Return ``key`` without white space around it. Raises: Unanswered, without the key, if no header can carry it."""
    bare = key.strip()
    if bare.isprintable() and all(ord(character) < 256 for character in bare):
        return bare
    raise Unanswered(
        "the admin key (of --key-file, or MANTA_ADMIN_KEY) has a character that no HTTP header carries (a line's end, "
        "or one beyond Latin-1): check what was given; if the settings have it so, choose another there",
        REFUSED,
    )


def _refused(error: urllib.error.HTTPError, url: str, key: str | None) -> Unanswered:
    if error.code in (401, 403):
        return _key_refused(url, key)
    if error.code == 404:
        return Unanswered(
            f"{url} answers, but has no observatory: add the application that serves it under /manta to the settings "
            "file (see serve_config.yaml of the project), or give its whole address with --url",
            NOT_THERE,
        )
    return Unanswered(f"{url} answers {error.code}: {_error(error)[1] or error.reason}", UNREACHABLE)


def _key_refused(url: str, key: str | None) -> Unanswered:
    wrong = "the admin key is wrong" if key else "an admin key is asked for"
    return Unanswered(f"{url}: {wrong}; give it in MANTA_ADMIN_KEY, or name a file that holds it: --key-file", REFUSED)


def _error(error: urllib.error.HTTPError) -> tuple[str, str]:
    """Return code and message of our own errors; empty for another server's."""
    try:
        body = json.load(error)["error"]
        return str(body.get("code", "")), str(body["message"])
    except (ValueError, KeyError, TypeError, AttributeError, OSError, http.client.HTTPException):
        return "", ""
