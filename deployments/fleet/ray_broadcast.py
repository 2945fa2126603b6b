"""One call to every replica of a Serve deployment, the answers apart: one that hangs does not take the others'.

Owns:      the deployment's handle, asked for once.
Never:     waits for an answer; whoever awaits one sets its deadline, and ends the call by cancelling.
Thread:    one event loop; asking Serve for the handle blocks, and so happens on a thread.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException


class NobodyAsked(Exception):
    """The call could not be sent; the message is the kind of error that came instead."""


class Broadcast:
    """Calls to all replicas of one deployment."""

    def __init__(self, *, app_name: str, deployment_name: str) -> None:
        self._names = deployment_name, app_name
        self.handle: Any = None  # serve.DeploymentHandle; Ray's classes are untyped

    async def ask(self, method: str, *args: Any, within_s: float) -> list[Coroutine[Any, Any, Any]]:
        """Call ``method`` of each replica that runs; one answer each, to be awaited.

        Args:   within_s: to reach them all.
        Raises: NobodyAsked.
        """
        try:
            async with asyncio.timeout(within_s):
                if self.handle is None:
                    self.handle = await asyncio.to_thread(serve.get_deployment_handle, *self._names)
                # Serve's public results_async gives all answers or none: one that hangs would take the others'.
                calls = await self.handle.broadcast(method, *args)._fetch_replica_results_async()
        except (TimeoutError, KeyError, RayError, RayServeException) as error:  # KeyError: it is not deployed yet
            raise NobodyAsked(type(error).__name__) from error
        return [_answer(call) for call in calls]


async def _answer(call: Any) -> Any:
    """Of one replica (ray.serve's ReplicaResult)."""
    try:
        return await call.get_async()
    except asyncio.CancelledError:
        call.cancel()
        raise
