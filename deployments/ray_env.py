"""The environment that Ray reads when it is imported; call `prepare` before that.

Never: imports Ray.
"""

import os
import secrets
from collections.abc import MutableMapping


def prepare(environ: MutableMapping[str, str] = os.environ) -> None:
    """A cluster of our own asks for a token that only it knows; a cluster that exists keeps its ways.

    With RAY_AUTH_MODE unset, what Ray does depends on files that are lying around.
    """
    if "RAY_ADDRESS" not in environ and "RAY_AUTH_MODE" not in environ:
        environ["RAY_AUTH_MODE"] = "token"
        environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
