"""The environment that Ray reads when it is imported; call `prepare` before that.

Never: imports Ray.
"""

import ipaddress
import os
import secrets
from collections.abc import MutableMapping

from deployments.settings.settings_file import ALL_ADDRESSES

ON_A_CLUSTER = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # "0" is Ray's name for: this machine alone, on its loopback


def prepare(environ: MutableMapping[str, str] = os.environ, *, host: str = ALL_ADDRESSES) -> None:
    """A cluster of our own asks for a token that only it knows, and listens on the loopback where its HTTP server does;
    a cluster that exists keeps its ways.

    With RAY_AUTH_MODE unset, what Ray does depends on files that are lying around.
    Args: host: what clients connect to (http_options).
    """
    if "RAY_ADDRESS" not in environ:
        if "RAY_AUTH_MODE" not in environ:
            environ["RAY_AUTH_MODE"] = "token"
            environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        if is_loopback(host):
            environ.setdefault(ON_A_CLUSTER, "0")
    environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches ``host``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
