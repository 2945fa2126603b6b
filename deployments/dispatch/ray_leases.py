"""Calls to exactly one replica by Ray Serve, with Ray's failures as our errors; and which replicas Serve runs.

Owns:   the last published members of each deployment and their listeners; which deployment's handle reaches a replica.
Never:  retries (dispatcher.py).
Thread: the router's event loop; `publish` and `listen` any. Serve's router runs on a thread of its own, and listeners
        are called on the publisher's thread.

Serve pickles request_router.py by value, so the globals there are copies. It shares this module's by import.
"""

import asyncio
import contextvars
import threading
from collections.abc import Awaitable, Callable
from typing import Concatenate, ParamSpec, TypeVar, cast

from ray.exceptions import RayActorError, RayTaskError, TaskCancelledError
from ray.serve.context import _serve_request_context
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from deployments.dispatch.leases import ReplicaCalls, ReplicaGone
from deployments.settings.roles import DEPLOYMENTS
from replicas.errors import MantaError
from routing.types import Role

PIN = "pin:"  # before a replica's id: the session id of a call to that replica and no other
Listener = Callable[[frozenset[str]], None]
P = ParamSpec("P")
T = TypeVar("T")
_lock = threading.Lock()
_members: dict[str, frozenset[str]] = {}  # by "application/deployment"
_listeners: dict[str, list[Listener]] = {}


def publish(deployment: str, members: frozenset[str]) -> None:
    """Tell the listeners that ``members`` are the running replicas of ``deployment`` now."""
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


class RayLeases:
    """`Leases` through the handles of the model replicas' deployments."""

    def __init__(self) -> None:
        self._handles: dict[str, DeploymentHandle] = {}  # by deployment
        self._members: dict[str, frozenset[str]] = {}  # by deployment

    def set_members(self, deployment: str, handle: DeploymentHandle, members: frozenset[str]) -> frozenset[str]:
        """Set the running replicas of one deployment. Returns: those of all deployments."""
        self._handles[deployment] = handle
        self._members[deployment] = members
        return frozenset().union(*self._members.values())

    def role_of(self, replica_id: str) -> Role:
        """Return the role of a running replica, by its deployment."""
        at = next((name for name, members in self._members.items() if replica_id in members), "")
        return next((role for role, name in DEPLOYMENTS.items() if at.endswith(f"/{name}")), Role.UNIFIED)

    async def call(
        self,
        replica_id: str,
        method: Callable[Concatenate[ReplicaCalls, P], Awaitable[T]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Call ``method`` of exactly that replica. Raises: as `Leases.call`."""
        at = next((name for name, members in self._members.items() if replica_id in members), None)
        if at is None:
            raise ReplicaGone(f"replica {replica_id} is no longer running")
        handle = self._handles[at].options(method_name=method.__name__, session_id=f"{PIN}{replica_id}")
        # Serve ends the calls of an HTTP request whose client has left, and a stream may outlive its connection: a call
        # is no part of a request for Serve, and is cancelled below
        apart = contextvars.copy_context()
        apart.run(_serve_request_context.set, None)
        response = apart.run(handle.remote, *args, **kwargs)
        try:
            return cast(T, await response)
        except asyncio.CancelledError:
            response.cancel()
            raise
        except (RayActorError, TaskCancelledError, RayServeException) as error:
            raise ReplicaGone(f"replica {replica_id} is gone: {type(error).__name__}") from error
        except RayTaskError as error:
            cause = error.cause
            raise (cause if isinstance(cause, MantaError) else error) from error
