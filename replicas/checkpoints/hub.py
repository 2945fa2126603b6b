"""Asks the Hugging Face hub for files of a model, and says in a sentence why it gave none.

Owns:      how long a hub that is not there is waited for: its library would try for half a minute.
Never:     knows what a model is made of (model_files.py does).
Thread:    any; one look at the hub is made for a process.
"""

import contextlib
import functools
import logging
import socket
import threading
import urllib.request
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from replicas.errors import InvalidConfig

REACH_S = 5.0
_ADVICE = "Check the name, the network and HF_TOKEN, or give a folder"


@contextlib.contextmanager
def asking(name: str, *, near: str = "") -> Iterator[dict[str, Any]]:
    """Ask the hub for ``name`` in the context, where it can be reached; else what it gave before is looked up.

    Args:   near: a folder that may be meant, in words.
    Gives:  arguments for huggingface_hub's functions.
    Raises: InvalidConfig, in one line, if they do not find what is asked for.
    """
    unreached = "" if constants.HF_HUB_OFFLINE else _unreached(constants.ENDPOINT)
    library = logging.getLogger("huggingface_hub")
    before = library.level
    library.setLevel(logging.ERROR)  # it has a line about each of its retries
    try:
        yield {"local_files_only": True} if unreached else {}
    except (OSError, ValueError, HfHubHTTPError, HFValidationError) as error:
        why = f"at {constants.ENDPOINT} cannot be reached ({unreached})" if unreached else _why(error)
        raise InvalidConfig(
            f"model.path = {name!r}: there is no such folder{near}, and the Hugging Face hub {why}. {_ADVICE}"
        ) from error
    finally:
        library.setLevel(before)


def _why(error: Exception) -> str:
    match error:
        case GatedRepoError():
            return "gives it only to users who have accepted its terms on its page"
        case RepositoryNotFoundError():
            return "has no such model, or none for this HF_TOKEN"
        case RevisionNotFoundError():
            return "has no such revision of it"
    if isinstance(error, LocalEntryNotFoundError):  # of two sentences on networks; its cause says more
        error = error.__cause__ if isinstance(error.__cause__, Exception) else error
    return f"did not give it: {next(iter(str(error).strip().splitlines()), type(error).__name__)}"


@functools.cache
def _unreached(endpoint: str) -> str:
    """Say why nothing accepts connections at ``endpoint``, or at the HTTP proxy for it; "" if something does."""
    asked = urlsplit(endpoint)
    proxy = urllib.request.getproxies().get(asked.scheme, "")
    if proxy and not urllib.request.proxy_bypass(asked.hostname or ""):
        asked = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    said = [f"no answer within {REACH_S:g} s"]

    def look() -> None:
        try:
            socket.create_connection((asked.hostname, asked.port or (443 if asked.scheme == "https" else 80))).close()
            said[0] = ""
        except (OSError, ValueError) as error:
            said[0] = str(error)

    thread = threading.Thread(target=look, daemon=True)  # to find the address may take longer, and has no bound
    thread.start()
    thread.join(REACH_S)
    return said[0]
