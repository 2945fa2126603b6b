"""`Peers` by Ray Serve: one call to every replica of the routers' deployment.

Never:  raises for a router that is dying, or waits longer than ANSWER_S for one that hangs.
Thread: the router's event loop; asking Serve for the handle blocks, and so happens on a thread.
"""

import asyncio
import logging
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

log = logging.getLogger(__name__)

ANSWER_S = 2.0


class RayPeers:
    """All routers, ourselves among them: who has looked already finds nothing more at home."""

    def __init__(self, *, app_name: str, deployment_name: str) -> None:
        self._app_name = app_name
        self._deployment_name = deployment_name
        self._handle: Any = None  # serve.DeploymentHandle; Ray's classes are untyped

    async def find_route(self, name: str) -> dict[str, Any] | None:
        try:
            async with asyncio.timeout(ANSWER_S):
                handle = self._handle
                if handle is None:
                    names = self._deployment_name, self._app_name
                    handle = self._handle = await asyncio.to_thread(serve.get_deployment_handle, *names)
                answers = await handle.broadcast("find_route", name).results_async(return_exceptions=True)
        except (TimeoutError, RayError, RayServeException) as error:
            log.warning("the other routers did not tell about %r: %r", name, error)
            return None
        found = [answer for answer in answers if isinstance(answer, dict)]
        return max(found, key=lambda body: float(body["time"]), default=None)  # a name can come twice: the last bearer
