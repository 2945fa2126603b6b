"""What the observatory asks: all routers once a second, Serve every LOOK_S, one router or all for what clients ask.

Owns:      the timing of the poll, and the last answer of Serve.
Never:     raises for a router that is dying or hangs, or ends by an error: what fails counts as not answering.
Thread:    the observatory's event loop; Serve is asked on another thread, and the poll does not wait for it.
"""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast

from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException

from deployments.fleet.peers import Broadcast, FoundRoute, NobodyAsked, RayPeers
from deployments.watch.observatory.router_view import RouterView
from deployments.watch.observatory.serve_details import ServeDetails
from deployments.watch.observatory.state import PERIOD_S, State
from replicas.cache.tree_view import CacheTree
from replicas.errors import Fault, MantaError

log = logging.getLogger(__name__)

DEPLOYMENT = "Router"
OBSERVE_S = 0.8  # less than the period of polls
TREE_S = 5.0
LOOK_S = 5.0  # how often Serve is asked: 5 ms of its controller each time


class NoRouter(MantaError):
    """No router of the application answers."""

    fault = Fault.UNAVAILABLE
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
        return cast(CacheTree, await self.ask_replica(replica_id, "cache_tree", max_depth, min_tokens))

    async def ask_replica(self, replica_id: str, method: str, *args: Any) -> Any:
        """Call ``method``, one of `ReplicaCalls`, of a replica through any router. Raises: NoRouter; ReplicaGone."""
        try:
            async with asyncio.timeout(TREE_S):
                if self._one is None:
                    self._one = await asyncio.to_thread(serve.get_deployment_handle, DEPLOYMENT, self._application)
                return await self._one.options(method_name="ask_replica").remote(replica_id, method, *args)
        except RayTaskError as error:
            raise (error.cause if isinstance(error.cause, MantaError) else error) from error
        except (TimeoutError, KeyError, RayError, RayServeException) as error:  # KeyError: none is deployed yet
            raise NoRouter(
                f"no router answered for replica {replica_id} ({type(error).__name__}): the routers or the replica are "
                "busy or hang; try again in a moment"
            ) from error

    async def find_request(self, name: str) -> FoundRoute:
        return await self._peers.find_request(name)


class Watch:
    """The poll of routers and of Serve; `run` it until cancelled."""

    def __init__(
        self,
        *,
        routers: Routers,
        look: Callable[[], ServeDetails],
        state: State,
        on_poll: Callable[[float], None] = lambda took_s: None,
        on_view: Callable[[RouterView], None] = lambda view: None,
        keep: Callable[[bytes], None] = lambda kept: None,
        clock: Callable[[], float] = time.monotonic,
        calendar: Callable[[], float] = time.time,
    ) -> None:
        """``look`` and ``keep``, which gets what outlives this observatory, block. ``on_poll`` gets the duration of
        each poll, ``on_view`` the newest answer.
        ``clock`` is for ages, ``calendar`` for what is shown."""
        self._routers = routers
        self._look = look
        self._state = state
        self._on_poll = on_poll
        self._on_view = on_view
        self._keep = keep
        self._clock = clock
        self._calendar = calendar
        self._details = ServeDetails()
        self._details_are_new = False
        self._failing = ""

    async def run(self) -> None:
        beside = [asyncio.create_task(each) for each in (self._look_forever(), self._keep_forever())]
        try:
            while True:
                started_s = time.monotonic()
                await self.poll()
                await asyncio.sleep(max(PERIOD_S - (time.monotonic() - started_s), 0.05))
        finally:
            for each in beside:
                each.cancel()

    async def poll(self) -> None:
        """Ask all routers once."""
        started_s = time.perf_counter()
        try:
            views = await self._routers.observe(self._state.merged.since)
            self._on_poll(time.perf_counter() - started_s)
            new, self._details_are_new = self._details_are_new, False
            self._state.advance(views, self._details, self._clock(), time_s=self._calendar(), details_are_new=new)
            if self._state.merged.latest is not None:
                self._on_view(self._state.merged.latest)
        except Exception:  # the next poll may succeed, and must come
            log.exception("a poll failed")

    async def look(self) -> None:
        """Ask Serve once."""
        try:
            self._details = await asyncio.to_thread(self._look)
            self._details_are_new, self._failing = True, ""
        except Exception as error:  # noqa: BLE001  # Ray's errors have no common base
            if self._failing != repr(error):
                log.warning("Serve did not say which replicas there are: %r", error)
            self._failing = repr(error)

    def restore(self, kept: bytes) -> None:
        """Go on with what an observatory before this one kept; what cannot be read is left out."""
        try:
            zero_s, feed = json.loads(kept) if kept else (0.0, None)
            if feed is not None:
                self._state.feed.restore(feed, self._calendar() - self._clock() - zero_s)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            log.warning("what an observatory before this one kept cannot be read: %r", error)

    async def _keep_forever(self) -> None:
        last = ""
        while True:
            kept = json.dumps(self._state.feed.kept())
            if kept != last:
                zero_s = self._calendar() - self._clock()
                try:
                    await asyncio.to_thread(self._keep, f"[{zero_s}, {kept}]".encode())
                    last = kept
                except Exception as error:  # noqa: BLE001  # Ray's errors have no common base; it is tried again
                    log.warning("the events are not kept: %r", error)
            await asyncio.sleep(PERIOD_S)

    async def _look_forever(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(LOOK_S)
