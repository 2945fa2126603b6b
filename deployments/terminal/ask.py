"""Asks a running Manta over HTTP, and says what to do when it does not answer.

Never: draws; imports Ray.
"""

import json
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

TIMEOUT_S = 10.0
NOT_THERE, UNREACHABLE, REFUSED = 1, 3, 4  # exit statuses; 2 is argparse's


class Unanswered(Exception):
    """Manta did not give what was asked for; the message says what to do."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status  # of the process

    @property
    def may_pass(self) -> bool:
        """Whether asking again, with nothing changed, may help."""
        return self.status == UNREACHABLE


def state(url: str, key: str | None) -> dict[str, Any]:
    """The observatory's state. Raises: Unanswered."""
    try:
        return _get(f"{_observatory(url)}/api/state", key)
    except urllib.error.HTTPError as error:
        raise _refused(error, url, key) from error


def route(url: str, rid: str, key: str | None) -> dict[str, Any]:
    """What the routers know of request ``rid``. Raises: Unanswered."""
    try:
        return _get(f"{_based(url)}/route/{urllib.parse.quote(rid)}", key)
    except urllib.error.HTTPError as error:
        if error.code not in (404, 503):
            raise _refused(error, url, key) from error
        said = _message(error)
        if not said:
            raise Unanswered(
                f"{url} answers {error.code} to /route: is this Manta's router? Give its address with --url",
                NOT_THERE,
            ) from error
        raise Unanswered(said, NOT_THERE if error.code == 404 else UNREACHABLE) from error


def _based(url: str) -> str:
    return (url if "://" in url else f"http://{url}").rstrip("/")


def _observatory(url: str) -> str:
    """A path in ``url`` is the observatory's own; without one it is where the shipped settings put it."""
    base = _based(url)
    return base if urllib.parse.urlsplit(base).path else f"{base}/manta"


def _get(url: str, key: str | None) -> dict[str, Any]:
    headers = {"Accept": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT_S) as answer:
            body = json.load(answer)
    except urllib.error.HTTPError:
        raise
    except ValueError as error:  # the address, or the answer
        raise Unanswered(f"{url} does not answer as Manta does ({error}): check --url", NOT_THERE) from error
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise Unanswered(
            f"nothing answers at {url} ({reason}): start Manta with `make serve`, or give its address with --url",
            UNREACHABLE,
        ) from error
    if not isinstance(body, dict):
        raise Unanswered(f"{url} does not answer as Manta does: check --url", NOT_THERE)
    return body


def _refused(error: urllib.error.HTTPError, url: str, key: str | None) -> Unanswered:
    if error.code in (401, 403):
        wrong = "the admin key is wrong" if key else "an admin key is asked for"
        return Unanswered(f"{url}: {wrong}; give it with --key or in MANTA_ADMIN_KEY", REFUSED)
    if error.code == 404:
        return Unanswered(
            f"{url} answers, but has no observatory: add the application that serves it under /manta to the settings "
            "file (see serve_config.yaml of the project), or give its whole address with --url",
            NOT_THERE,
        )
    return Unanswered(f"{url} answers {error.code}: {_message(error) or error.reason}", UNREACHABLE)


def _message(error: urllib.error.HTTPError) -> str:
    """What our own errors say; empty for another server's."""
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError, OSError):
        return ""
