"""`Peers` by Ray Serve: one call to every replica of the routers' deployment, each waited for on its own.

Never:  raises for a router that is dying, or waits longer than twice ANSWER_S for one that hangs.
Thread: the event loop of a router, or of the observatory.
"""

import logging
from collections.abc import Awaitable

from ray.exceptions import ActorDiedError

from deployments.fleet.peers import Body, Found, newest
from deployments.fleet.ray_broadcast import Broadcast, NobodyAsked

log = logging.getLogger(__name__)

ANSWER_S = 2.0  # to reach all routers, and then for each to answer


class RayPeers:
    """All routers, ourselves among them: who has looked already finds nothing more at home."""

    def __init__(self, *, app_name: str, deployment_name: str, answer_s: float = ANSWER_S) -> None:
        self._routers = Broadcast(app_name=app_name, deployment_name=deployment_name)
        self._answer_s = answer_s

    async def find_route(self, name: str) -> Found:
        return await self._find("find_route", name)

    async def find_request(self, name: str) -> Found:
        """As `find_route`, with the request's row and page keys (observatory/router_view.py)."""
        return await self._find("find_request", name)

    async def _find(self, method: str, name: str) -> Found:
        try:
            answers = await self._routers.ask(method, name, within_s=self._answer_s)
        except NobodyAsked as error:
            log.warning("the other routers were not asked about %r: %s", name, error)
            return Found(unanswered=f"the other routers could not be asked ({error})")
        found = await newest([_answer(each) for each in answers], within_s=self._answer_s)
        if found.unanswered:
            log.warning("about %r: %s", name, found.unanswered)
        return found


async def _answer(answer: Awaitable[Body | None]) -> Body | None:
    """Of one router; one that has died knows nothing any more."""
    try:
        return await answer
    except ActorDiedError:
        return None
