"""Asks the Hugging Face hub for files of a model, and says in a sentence why it gave none.

Owns:      how long a hub that is not there is waited for: its library would try for half a minute.
Never:     knows what a model is made of (model_files.py does).
Thread:    any; one look at the hub is made for a process.
"""

import contextlib
import functools
import http.client
import logging
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from ssl import SSLError
from typing import Any, cast

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
_HTTP_ERROR = cast(type[Exception], HfHubHTTPError.__bases__[0])  # of the HTTP library that the hub's library has
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
    except (OSError, ValueError, RuntimeError, _HTTP_ERROR, HFValidationError) as error:
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
    """Say why nothing answers at ``endpoint``, asked through the HTTP proxy for it; "" if something does, whatever it
    says: a connection alone proves nothing, and the library waits six minutes for one that says nothing."""
    said = [f"no answer within {REACH_S:g} s"]

    def look() -> None:
        try:
            asked = urllib.request.Request(endpoint, method="HEAD")
            urllib.request.build_opener().open(asked, timeout=2 * REACH_S).close()
            said[0] = ""
        except urllib.error.URLError as error:
            answered = isinstance(error, urllib.error.HTTPError) or isinstance(error.reason, SSLError)
            said[0] = "" if answered else str(error.reason)
        except (OSError, http.client.HTTPException):  # it has begun to answer
            said[0] = ""
        except ValueError as error:  # no address
            said[0] = str(error)

    thread = threading.Thread(target=look, daemon=True)  # to find the address may take longer, and has no bound
    thread.start()
    thread.join(REACH_S)
    return said[0]
