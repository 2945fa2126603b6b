"""Asks a running Manta over HTTP; an error says what to do.

Never: draws; imports Ray.
"""

import contextlib
import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from deployments.places import is_loopback, proxies_of

TIMEOUT_S = 10.0
ANSWER_TIMEOUT_S = 600.0  # between two parts of an answer: it may wait in a queue
NOT_THERE, UNREACHABLE, REFUSED = 1, 3, 4  # exit statuses; 2 is argparse's


Refused = Callable[[urllib.error.HTTPError], "Unanswered"]


class Unanswered(Exception):
    """Manta did not answer the question; the message says what to do."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status  # of the process

    @property
    def may_pass(self) -> bool:
        """Whether asking again may help without any other change."""
        return self.status == UNREACHABLE


def state(url: str, key: str | None, *, since: int = 0) -> dict[str, Any]:
    """Return the observatory's state; of requests and history what came after version ``since``. Raises: Unanswered."""
    found = _get(f"{_observatory(url)}/api/state?since={since}", key, refused=partial(_refused, url=url, key=key))
    if "version" not in found:
        raise _not_manta(url)
    return found


def route(url: str, rid: str, key: str | None) -> dict[str, Any]:
    """Return what the routers know of request ``rid``. ``url``: theirs, or the observatory's, one step below.

    Raises: Unanswered.
    """
    bases = _bases(url)
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


def replica(url: str, replica_id: str, key: str | None, *, action: str = "") -> dict[str, Any]:
    """Return what the observatory knows of one replica, or have it do ``action`` there. Raises: Unanswered."""
    path = f"{_observatory(url)}/api/replicas/{urllib.parse.quote(replica_id, safe='')}"
    try:
        return _get(f"{path}/{action}", key, {}) if action else _get(path, key)
    except urllib.error.HTTPError as error:
        code, said = _error(error)
        if code in ("admin_key_not_set", "replica_not_found", "not_done", "not_readable"):
            status = REFUSED if error.code == 403 else UNREACHABLE if error.code == 503 else NOT_THERE
            raise Unanswered(f"{url}: {said}", status) from error
        raise _refused(error, url, key) from error


def keys(url: str, key: str | None) -> dict[str, Any]:
    """Return the keys of the routers' file, and their use. Raises: Unanswered."""
    return _get(f"{_base(url)}/keys", key, refused=partial(_refused, url=url, key=key))


def uncached(url: str, last_s: float, key: str | None) -> dict[str, Any]:
    """Return why prompts of the last ``last_s`` seconds were not cached. Raises: Unanswered."""
    return _get(f"{_base(url)}/uncached?last={last_s:g}", key, refused=partial(_refused, url=url, key=key))


def adapters(url: str, key: str | None, action: str = "", body: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the adapters that have names, and where they are; or do the ``action``: ``load`` the one of ``body`` under
    a name, or ``unload`` one. Raises: Unanswered."""
    path, refused = f"/{action}_lora_adapter" if action else "/adapters", partial(_adapter_refused, url=url, key=key)
    return _get(f"{_base(url)}{path}", key, body, timeout_s=ANSWER_TIMEOUT_S, refused=refused)


def first_model(url: str, key: str | None) -> str:
    """Return the name of the model that is served. Raises: Unanswered."""
    found = _get(f"{_base(url)}/v1/models", key, refused=partial(_chat_refused, url=url, key=key))
    try:
        return str(found["data"][0]["id"])
    except (KeyError, IndexError, TypeError) as error:
        raise Unanswered(f"{url} lists no model: check --url", NOT_THERE) from error


def batches(url: str, key: str | None) -> list[dict[str, Any]]:
    """Return the last batches of ``key``, the newest first. Raises: Unanswered."""
    found = _get(f"{_base(url)}/v1/batches?limit=100", key, refused=partial(_chat_refused, url=url, key=key))
    return list(found["data"])


def batch(url: str, batch_id: str, key: str | None, *, cancel: bool = False) -> dict[str, Any]:
    """Return one batch of ``key``, or have it end. Raises: Unanswered."""
    path = f"{_base(url)}/v1/batches/{urllib.parse.quote(batch_id, safe='')}{'/cancel' * cancel}"
    return _get(path, key, {} if cancel else None, refused=partial(_chat_refused, url=url, key=key))


@contextlib.contextmanager
def answer(url: str, body: Mapping[str, Any], key: str | None) -> Iterator[tuple[Mapping[str, str], Iterator[bytes]]]:
    """Send a chat request. Gives: the answer's headers, and its lines as they come. Raises: Unanswered."""
    refused = partial(_chat_refused, url=url, key=key)
    with (
        _understood(url, refused),
        _open(f"{_base(url)}/v1/chat/completions", key, body, timeout_s=ANSWER_TIMEOUT_S) as opened,
    ):
        yield opened.headers, iter(opened)


def _chat_refused(error: urllib.error.HTTPError, url: str, key: str | None) -> Unanswered:
    if error.code in (401, 403):
        wrong = "the API key is wrong" if key else "an API key is asked for"
        advice = "give it in MANTA_API_KEY, or name a file that holds it: --key-file"
        return Unanswered(f"{url}: {wrong}; {advice}", REFUSED)
    return _answers(error, url, UNREACHABLE if error.code >= 429 else NOT_THERE)


def _adapter_refused(error: urllib.error.HTTPError, url: str, key: str | None) -> Unanswered:
    return _key_refused(url, key) if error.code in (401, 403) else _chat_refused(error, url, key)


def _answers(error: urllib.error.HTTPError, url: str, status: int) -> Unanswered:
    return Unanswered(f"{url} answers {error.code}: {_error(error)[1] or error.reason}", status)


def _base(url: str) -> str:
    return "".join(_parts(url))


def _bases(url: str) -> list[str]:
    """Return where the routers may be: at ``url``, or one step above it, where it is the observatory's."""
    server, path = _parts(url)
    return [server + path, server + path.rpartition("/")[0]] if path else [server]


def _parts(url: str) -> tuple[str, str]:
    """Split ``url`` into the server and a path without a slash at the end. Raises: Unanswered."""
    base = (url if "://" in url else f"http://{url}").partition("?")[0].rstrip("/")
    try:
        path = urllib.parse.urlsplit(base).path
    except ValueError as error:
        raise Unanswered(f"{url} is no address ({error}): check --url", NOT_THERE) from error
    return base.removesuffix(path), path


def _observatory(url: str) -> str:
    """Return the observatory's address: the path in ``url`` is its own; without one it is the shipped settings'."""
    server, path = _parts(url)
    return server + (path or "/manta")


def _get(
    url: str, key: str | None = None, body: Mapping[str, Any] | None = None, *, timeout_s: float = TIMEOUT_S,
    refused: Refused | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Fetch JSON, with a ``body`` by POST. Raises: Unanswered for no answer, or one that is not Manta's; what
    ``refused`` makes of an error answer, without it HTTPError."""
    with _understood(url, refused), _open(url, key, body, timeout_s=timeout_s) as answer:
        found = json.load(answer)
    if not isinstance(found, dict):
        raise _not_manta(_parts(url)[0])
    return found


def _not_manta(url: str) -> Unanswered:
    return Unanswered(f"{url} does not answer as Manta does: check --url", NOT_THERE)


def _open(url: str, key: str | None, body: Mapping[str, Any] | None = None, *, timeout_s: float = TIMEOUT_S) -> Any:
    headers = {"Accept": "application/json"} | ({"Authorization": f"Bearer {_sendable(key)}"} if key else {})
    data = None if body is None else json.dumps(body).encode()
    headers |= {"Content-Type": "application/json"} if data is not None else {}
    return opened(urllib.request.Request(url, data=data, headers=headers), timeout_s=timeout_s)


def opened(asked: urllib.request.Request, *, timeout_s: float, is_ours: bool = False) -> Any:
    """Open what is ``asked``. No HTTP proxy is asked for this machine, or for what ``is_ours``: started from here."""
    directly = is_ours or is_loopback(urllib.parse.urlsplit(asked.full_url).hostname or "")
    opener = urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if directly else []))
    return opener.open(asked, timeout=timeout_s)


@contextlib.contextmanager
def _understood(url: str, refused: Refused | None = None) -> Iterator[None]:
    """Raise Unanswered for an error on the way to ``url``, and for an error answer what ``refused`` makes of it;
    without that it stays what it is (HTTPError)."""
    try:
        yield
    except urllib.error.HTTPError as error:
        if refused is None:
            raise
        raise refused(error) from error
    except (OSError, http.client.IncompleteRead) as error:  # RemoteDisconnected is both kinds
        reason = getattr(error, "reason", None) or str(error) or type(error).__name__
        host = urllib.parse.urlsplit(url).hostname or ""
        proxies = [] if is_loopback(host) or urllib.request.proxy_bypass(host) else proxies_of()
        through = f", asked through {', '.join(proxies)}" if proxies else ""
        raise Unanswered(
            f"nothing answers at {_parts(url)[0]} ({reason}{through}): start Manta with `make serve`, or give its "
            "address with --url",
            UNREACHABLE,
        ) from error
    except (ValueError, http.client.HTTPException) as error:  # the address, or the answer
        what = f"{type(error).__name__}: {str(error).strip()}"
        raise Unanswered(f"{_parts(url)[0]} does not answer as Manta does ({what}): check --url", NOT_THERE) from error


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
    return _answers(error, url, UNREACHABLE)


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
