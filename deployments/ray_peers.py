"""`Peers` by Ray Serve: one call to every replica of the routers' deployment, each waited for on its own.

Never:  raises for a router that is dying, or waits longer than twice ANSWER_S for one that hangs.
Thread: the router's event loop; asking Serve for the handle blocks, and so happens on a thread.
"""

import asyncio
import logging
from typing import Any

from ray import serve
from ray.exceptions import ActorDiedError, RayError
from ray.serve.exceptions import RayServeException

from deployments.peers import Body, Found, newest

log = logging.getLogger(__name__)

ANSWER_S = 2.0  # to reach all routers, and then for each to answer


class RayPeers:
    """All routers, ourselves among them: who has looked already finds nothing more at home."""

    def __init__(self, *, app_name: str, deployment_name: str, answer_s: float = ANSWER_S) -> None:
        self._app_name = app_name
        self._deployment_name = deployment_name
        self._answer_s = answer_s
        self._handle: Any = None  # serve.DeploymentHandle; Ray's classes are untyped

    async def find_route(self, name: str) -> Found:
        try:
            async with asyncio.timeout(self._answer_s):
                handle = self._handle
                if handle is None:
                    names = self._deployment_name, self._app_name
                    handle = self._handle = await asyncio.to_thread(serve.get_deployment_handle, *names)
                # Serve's public results_async gives all answers or none: one router that hangs would take the others'.
                calls = await handle.broadcast("find_route", name)._fetch_replica_results_async()
        except (TimeoutError, RayError, RayServeException) as error:
            log.warning("the other routers were not asked about %r: %r", name, error)
            return Found(unanswered=f"the other routers could not be asked ({type(error).__name__})")
        found = await newest([_answer(call) for call in calls], within_s=self._answer_s)
        if found.unanswered:
            log.warning("about %r: %s", name, found.unanswered)
        return found


async def _answer(call: Any) -> Body | None:
    """Of one router (ray.serve's ReplicaResult); one that has died knows nothing any more."""
    try:
        body: Body | None = await call.get_async()
    except ActorDiedError:
        return None
    except asyncio.CancelledError:
        call.cancel()
        raise
    return body
