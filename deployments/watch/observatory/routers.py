"""The questions that the observatory asks routers, as a protocol, and its implementation by Ray.

Never:  raises for a router that is dying or hangs: it counts as not answering.
Thread: the observatory's event loop.
"""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, Protocol, cast

from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException

from deployments.fleet.peers import Broadcast, FoundRoute, NobodyAsked, RayPeers
from deployments.watch.observatory.router_view import RouterView
from replicas.cache.tree_view import CacheTree
from replicas.errors import MantaError

log = logging.getLogger(__name__)

DEPLOYMENT = "Router"
OBSERVE_S = 0.8  # less than the period of polls
TREE_S = 5.0


class NoRouter(MantaError):
    """No router of the application answers."""

    http_status = 503
    retryable = True


class Routers(Protocol):
    """The routers of the application that is watched."""

    async def observe(self, since: Mapping[str, int]) -> list[RouterView]:
        """Return the views of the routers that answer in time; ``since``: by router, the ``seq`` of its last answer."""
        ...

    async def cache_tree(self, replica_id: str, *, max_depth: int, min_tokens: int) -> CacheTree:
        """Return a replica's tree through any router. Raises: NoRouter; ReplicaGone."""
        ...

    async def find_request(self, name: str) -> FoundRoute:
        """Return row, page keys and route of the last request with this name (router_view.request_body)."""
        ...


class RayRouters:
    """The routers of one application, asked through Ray Serve."""

    def __init__(self, application: str) -> None:
        self._application = application
        self._all = Broadcast(app_name=application, deployment_name=DEPLOYMENT)
        self._peers = RayPeers(app_name=application, deployment_name=DEPLOYMENT)
        self._one: Any = None  # serve.DeploymentHandle

    async def observe(self, since: Mapping[str, int]) -> list[RouterView]:
        try:
            answers = await self._all.ask("observe", dict(since), within_s=OBSERVE_S)
        except NobodyAsked as error:
            log.debug("no router was asked: %s", error)
            return []
        timed = (asyncio.wait_for(answer, OBSERVE_S) for answer in answers)
        return [view for view in await asyncio.gather(*timed, return_exceptions=True) if isinstance(view, RouterView)]

    async def cache_tree(self, replica_id: str, *, max_depth: int, min_tokens: int) -> CacheTree:
        try:
            async with asyncio.timeout(TREE_S):
                if self._one is None:
                    self._one = await asyncio.to_thread(serve.get_deployment_handle, DEPLOYMENT, self._application)
                answer = self._one.options(method_name="cache_tree").remote(replica_id, max_depth, min_tokens)
                return cast(CacheTree, await answer)
        except RayTaskError as error:
            raise (error.cause if isinstance(error.cause, MantaError) else error) from error
        except (TimeoutError, KeyError, RayError, RayServeException) as error:  # KeyError: none is deployed yet
            raise NoRouter(f"no router answered ({type(error).__name__}): try again in a moment") from error

    async def find_request(self, name: str) -> FoundRoute:
        return await self._peers.find_request(name)
