"""What one router asks of the others: a protocol, and its implementation by one Ray Serve call to every router.

Owns:      the handle of the routers' deployment, asked for once.
Never:     stands on a request's way to its tokens; raises for a router that is dying; waits longer than twice ANSWER_S
           for one that hangs.
Invariant: a router that does not answer in time costs its own answer alone, and the answer names it as missing.
Thread:    the event loop of a router, or of the observatory; asking Serve for the handle blocks, so a thread does it.
"""

import asyncio
import logging
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from ray import serve
from ray.exceptions import ActorDiedError, RayError
from ray.serve.exceptions import RayServeException

from deployments.tenancy.quotas import TELL_S, Told

Body = dict[str, Any]  # an answer of ``GET /route/{name}``; or about a response, of which no two routers know
What = Literal["response", "events", "cancel", "delete"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseAsk:
    """What a client asks of a response that is made in the background."""

    owner: str  # name of its caller
    response_id: str
    what: What
    index: int = 0  # of the first event
    within_s: float = 0.0  # how long to wait for an event; less than ANSWER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundRoute:
    """The answer of the other routers about one name."""

    body: Body | None = None  # the newest; None: no router that answered knows the name
    unanswered: str = ""  # which routers did not answer, as a clause; empty if all did


class RouterPeers(Protocol):
    """The other routers of the application."""

    async def find_route(self, name: str) -> FoundRoute:
        """Return the answer of ``GET /route/{name}`` by the last router that decided for that name."""
        ...

    async def ask_response(self, ask: ResponseAsk) -> FoundRoute:
        """Do what a client asks of a response in the background (http/apis/responses.py), at the router that has it."""
        ...

    async def used(self) -> Mapping[str, Told]:
        """Return what the keys have used at each router that answers, by its id."""
        ...

    async def misses(self, last_s: float) -> Mapping[str, Sequence[Body]]:
        """Return why prompts were not cached within ``last_s`` (routing/why.py) at each router that answers, by id."""
        ...


class NoPeers:
    """`RouterPeers` of the only router of its application."""

    async def find_route(self, name: str) -> FoundRoute:
        return FoundRoute()

    async def ask_response(self, ask: ResponseAsk) -> FoundRoute:
        return FoundRoute()

    async def used(self) -> Mapping[str, Told]:
        return {}

    async def misses(self, last_s: float) -> Mapping[str, Sequence[Body]]:
        return {}


async def newest(asked: Sequence[Awaitable[Body | None]], *, within_s: float) -> FoundRoute:
    """Wait for each of ``asked``, all at once, up to ``within_s``; one that fails or is late has not answered."""
    answers = await asyncio.gather(*(asyncio.wait_for(each, within_s) for each in asked), return_exceptions=True)
    failed = [answer for answer in answers if isinstance(answer, BaseException)]
    found = [answer for answer in answers if isinstance(answer, dict)]
    unanswered = ""
    if failed:
        kinds = ", ".join(sorted({type(each).__name__ for each in failed}))
        unanswered = f"{len(failed)} of {len(asked)} routers did not answer within {within_s:g} s ({kinds})"
    return FoundRoute(body=newer(*found), unanswered=unanswered)


def newer(*bodies: Body | None) -> Body | None:
    """Return the newest of ``bodies``: a name that was given twice means the later request."""
    found = [body for body in bodies if body is not None]
    return max(found, key=lambda body: float(body.get("time", 0.0)), default=None)


class NobodyAsked(Exception):
    """The call could not be sent; the message is the kind of the error."""


class Broadcast:
    """One call to all replicas of a deployment, each answer apart: one that hangs does not hold up the others."""

    def __init__(self, *, app_name: str, deployment_name: str) -> None:
        self._names = deployment_name, app_name
        self.handle: Any = None  # serve.DeploymentHandle; Ray's classes are untyped

    async def ask(self, method: str, *args: Any, within_s: float) -> list[Coroutine[Any, Any, Any]]:
        """Call ``method`` of each running replica. Returns: one answer each, to be awaited and cancelled by the caller.

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
    """Await the answer of one replica (ray.serve's ReplicaResult)."""
    try:
        return await call.get_async()
    except asyncio.CancelledError:
        call.cancel()
        raise


log = logging.getLogger(__name__)
ANSWER_S = 2.0  # to reach all routers, and then for each to answer


class RayPeers:
    """`RouterPeers` by Ray Serve. All routers are asked, this one too: it has nothing newer than it has looked up."""

    def __init__(self, *, app_name: str, deployment_name: str, answer_s: float = ANSWER_S) -> None:
        self._routers = Broadcast(app_name=app_name, deployment_name=deployment_name)
        self._answer_s = answer_s

    async def find_route(self, name: str) -> FoundRoute:
        return await self._find("find_route", name, about=name)

    async def find_request(self, name: str) -> FoundRoute:
        """Return what `find_route` does, with the request's row and page keys (observatory/router_view.py)."""
        return await self._find("find_request", name, about=name)

    async def ask_response(self, ask: ResponseAsk) -> FoundRoute:
        return await self._find("ask_response", ask, about=ask.what)  # without keys its id is all that protects it

    async def used(self) -> Mapping[str, Told]:
        return await self._told("told_quotas")

    async def misses(self, last_s: float) -> Mapping[str, Sequence[Body]]:
        return await self._told("told_misses", last_s)

    async def _told(self, method: str, *args: Any) -> dict[str, Any]:
        """Call ``method`` of all routers. Returns: their answers by their ids."""
        try:
            answers = await self._routers.ask(method, *args, within_s=self._answer_s)
        except NobodyAsked as error:
            log.debug("the other routers were not asked for %s: %s", method, error)  # at each look
            return {}
        waited = (asyncio.wait_for(each, min(self._answer_s, TELL_S)) for each in answers)
        told = await asyncio.gather(*waited, return_exceptions=True)
        return dict(each for each in told if not isinstance(each, BaseException))

    async def _find(self, method: str, asked: str | ResponseAsk, *, about: str) -> FoundRoute:
        """``about``: what the log may say of it."""
        try:
            answers = await self._routers.ask(method, asked, within_s=self._answer_s)
        except NobodyAsked as error:
            log.warning("the other routers were not asked about %r: %s", about, error)
            return FoundRoute(unanswered=f"the other routers could not be asked ({error})")
        found = await newest([_body_of(each) for each in answers], within_s=self._answer_s)
        if found.unanswered:
            log.warning("about %r: %s", about, found.unanswered)
        return found


async def _body_of(answer: Awaitable[Body | None]) -> Body | None:
    """Await one router's answer; None from a router that has died."""
    try:
        return await answer
    except ActorDiedError:
        return None
