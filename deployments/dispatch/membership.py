"""Which replicas run, as Ray Serve tells this process: the meeting point of its request router and our fleet.

Serve pickles request_router.py by value, so that its globals are not ours; this module is imported by both, and shared.

Owns:   the last published set per deployment and who wants to hear of changes.
Thread: any; Serve's router runs on a thread of its own. Listeners are called on the publisher's thread.
"""

import threading
from collections.abc import Callable

Listener = Callable[[frozenset[str]], None]

_lock = threading.Lock()
_members: dict[str, frozenset[str]] = {}  # by "application/deployment"
_listeners: dict[str, list[Listener]] = {}


def publish(deployment: str, members: frozenset[str]) -> None:
    """``members`` are the running replicas of ``deployment`` now."""
    with _lock:
        _members[deployment] = members
        listeners = list(_listeners.get(deployment, ()))
    for listener in listeners:
        listener(members)


def listen(deployment: str, listener: Listener) -> None:
    """Call ``listener`` with the members as of now and after every change."""
    with _lock:
        _listeners.setdefault(deployment, []).append(listener)
        members = _members.get(deployment, frozenset())
    listener(members)


def key(app_name: str, deployment_name: str) -> str:
    return f"{app_name}/{deployment_name}"
