"""One router asks the others about a request: the newest answer counts, and one that hangs costs only its own."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from ray.exceptions import ActorDiedError, RayError

from deployments.fleet.peers import Body, FoundRoute, NoPeers, RayPeers, ResponseAsk, newer, newest
from deployments.http.http_app import make_app
from deployments.http.service import Service
from deployments.record.route_log import RouteLog
from deployments.tenancy import quotas
from tests.unit.deployments.in_process import House, ScriptedReplica

SOON_S = 0.05  # how long these tests wait for a router that hangs
OLD: Body = {"rid": "mine", "internal_rid": "a.0-mine", "router": "one", "time": 1.0}
NEW: Body = {"rid": "mine", "internal_rid": "b.0-mine", "router": "two", "time": 2.0}


CANCEL = ResponseAsk(owner="me", response_id="resp_1", what="cancel")


class Call:
    """One router's answer as Serve hands it over: a body, an error, or (with neither) one that never comes."""

    def __init__(self, answer: Body | tuple[str, quotas.Told] | BaseException | None, *, hangs: bool = False) -> None:
        self.answer = answer
        self.hangs = hangs
        self.cancelled = False

    async def get_async(self) -> Body | tuple[str, quotas.Told] | None:
        if self.hangs:
            await asyncio.Event().wait()
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer

    def cancel(self) -> None:
        self.cancelled = True


class Handle:
    """A deployment handle, as far as RayPeers uses one."""

    def __init__(self, *calls: Call, error: Exception | None = None) -> None:
        self.calls = calls
        self.error = error

    def broadcast(self, method: str, *asked: str | ResponseAsk) -> "Handle":
        assert (method, *asked) in (("find_route", "mine"), ("ask_response", CANCEL), ("told_quotas",))
        return self

    async def _fetch_replica_results_async(self) -> list[Call]:
        if self.error is not None:
            raise self.error
        return list(self.calls)


def peers(*calls: Call, error: Exception | None = None) -> RayPeers:
    found = RayPeers(app_name="app", deployment_name="routers", answer_s=SOON_S)
    found._routers.handle = Handle(*calls, error=error)
    return found


async def test_a_router_that_hangs_does_not_lose_the_answer_of_one_that_does_not() -> None:
    hung = Call(None, hangs=True)
    found = await peers(Call(OLD), hung, Call(None)).find_route("mine")
    assert found.body == OLD
    assert found.unanswered == "1 of 3 routers did not answer within 0.05 s (TimeoutError)"
    assert hung.cancelled


async def test_the_newest_of_several_answers_counts() -> None:
    assert await peers(Call(OLD), Call(NEW), Call(None)).find_route("mine") == FoundRoute(body=NEW)
    assert (newer(NEW, OLD), newer(None, OLD), newer(None, None)) == (NEW, OLD, None)


async def test_a_router_that_died_knows_nothing_and_one_that_fails_has_not_answered() -> None:
    assert await peers(Call(ActorDiedError()), Call(None)).find_route("mine") == FoundRoute()
    found = await peers(Call(RayError("the network is down")), Call(None)).find_route("mine")
    assert found == FoundRoute(unanswered="1 of 2 routers did not answer within 0.05 s (RayError)")


async def test_when_no_router_can_be_asked_that_is_said() -> None:
    found = await peers(error=RayError("no controller")).find_route("mine")
    assert found == FoundRoute(unanswered="the other routers could not be asked (RayError)")


async def test_routers_are_asked_at_once_and_not_one_after_the_other() -> None:
    both = asyncio.Barrier(2)

    async def answer(body: Body) -> Body:
        await both.wait()  # nobody answers before both were asked
        return body

    assert await newest([answer(OLD), answer(NEW)], within_s=5.0) == FoundRoute(body=NEW)


async def test_the_router_that_has_a_response_answers_for_the_others() -> None:
    body: Body = {"response": {"status": "cancelled"}}
    assert await peers(Call(None), Call(body)).ask_response(CANCEL) == FoundRoute(body=body)
    assert (await peers(Call(None), Call(None, hangs=True)).ask_response(CANCEL)).unanswered.startswith("1 of 2")


async def test_what_keys_have_used_is_that_of_the_routers_which_answer() -> None:
    told = quotas.Told(used={7: {"key": [1.0, 20.0, 4.0]}}, expected={"key": [0.0, 0.0, 9.0]}, choices={"key": 1})
    assert await peers(Call(("one", told)), Call(None, hangs=True), Call(RayError("lost"))).used() == {"one": told}
    assert await peers(error=RayError("no controller")).used() == {}
    slow = peers(Call(("one", told)), Call(None, hangs=True))
    slow._answer_s = 60.0
    async with asyncio.timeout(5):
        assert await slow.used() == {"one": told}  # what has come until the next look


async def test_the_log_names_no_response_and_no_caller(caplog: pytest.LogCaptureFixture) -> None:
    await peers(Call(None, hangs=True)).ask_response(CANCEL)
    await peers(error=RayError("no controller")).ask_response(CANCEL)
    assert [record.args[0] for record in caplog.records if isinstance(record.args, tuple)] == ["cancel"] * 2
    assert CANCEL.response_id not in caplog.text


@dataclasses.dataclass
class Told(NoPeers):
    """RouterPeers that all say the same."""

    found: FoundRoute

    async def find_route(self, name: str) -> FoundRoute:
        return self.found


@pytest.fixture
async def ours() -> AsyncIterator[House]:
    """A router that has decided for the request "mine", whose id is a1.0-mine, at time 1.5."""
    async with House() as house:
        await house.ready(ScriptedReplica("r0"))
        await house.collect(rid="a1.0-mine")
        record = house.dispatcher.routes.find("mine")
        assert record is not None
        record.timeline.arrival.time_s = 1.5
        yield house


async def get(service: Service, house: House, name: str, told: FoundRoute) -> httpx.Response:
    app = make_app(dataclasses.replace(service, dispatcher=house.dispatcher, fleet=house.fleet, peers=Told(told)))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://manta") as client:
        return await client.get(f"/route/{name}")


@pytest.mark.model
async def test_a_newer_decision_of_another_router_goes_before_our_own(service: Service, ours: House) -> None:
    def router(answer: httpx.Response) -> Any:
        return answer.json()["router"]

    assert router(await get(service, ours, "mine", FoundRoute(body=OLD))) == "router"
    assert router(await get(service, ours, "mine", FoundRoute(body=NEW))) == "two"
    assert router(await get(service, ours, "a1.0-mine", FoundRoute(body=NEW))) == "router"  # that name is ours alone
    assert router(await get(service, ours, "mine", FoundRoute(unanswered="one hangs"))) == "router"


@pytest.mark.model
async def test_not_found_is_said_only_when_every_router_has_answered(service: Service, ours: House) -> None:
    ours.dispatcher.routes = RouteLog(capacity=7)
    assert (await get(service, ours, "mine", FoundRoute())).status_code == 404
    silent = await get(service, ours, "mine", FoundRoute(unanswered="1 of 2 routers did not answer within 2 s"))
    assert (silent.status_code, silent.headers["retry-after"]) == (503, "1")
    error = silent.json()["error"]
    assert (error["code"], error["type"]) == ("routers_silent", "service_unavailable")
    assert error["message"] == (
        "no decision for 'mine' was found, but 1 of 2 routers did not answer within 2 s: try again in a moment"
    )
