"""The fleet that the page's tests look at has the forms of a real one's answers."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from deployments.http.routes import own_route, request_row
from tests.fake_fleet import FakeFleet
from tests.unit.deployments import sample_values
from tests.unit.deployments.in_process import House, ScriptedReplica


@pytest.fixture
async def house() -> AsyncIterator[House]:
    made = House()
    await made.start()
    made.add(ScriptedReplica("r0"))
    async with asyncio.timeout(5):
        while made.fleet.num_ready < 1:
            await asyncio.sleep(0.005)
    yield made
    await made.stop()


def same_form(fake: Mapping[str, Any], real: Mapping[str, Any]) -> None:
    assert fake.keys() == real.keys()
    for name, value in real.items():
        if isinstance(value, dict):
            same_form(fake[name], value)


async def test_rows_and_explanations_of_the_fake_have_the_form_of_a_routers(house: House) -> None:
    """Both call a request as its client does, and the sentence begins with that name."""
    async for _ in house.dispatcher.stream(sample_values.ask(rid="0123456789abcdef.0-me")):
        pass
    [record] = house.dispatcher.routes.recent()
    real = own_route(house.dispatcher, "me")
    assert real is not None
    fleet = FakeFleet(unified=2, ticks=1)
    [row] = fleet.state["requests"]
    details = fleet.details(row["rid"])
    assert details is not None
    same_form(row, request_row(record, router_id="r"))
    same_form(details["route"], real)
    for route in (real, details["route"]):
        [attempt] = route["tries"]
        assert attempt["sentence"].startswith(f"{route['rid']} (")
        assert route["explanation"].startswith(f"{route['internal_rid']} (")
        assert route["internal_rid"].partition("-")[2] == route["rid"]
    [fake_try], [real_try] = details["route"]["tries"], real["tries"]
    same_form(fake_try | {"candidates": 0}, real_try | {"candidates": 0})
    same_form(fake_try["candidates"][0], real_try["candidates"][0])
