"""The row of a request, and which have changed since one last asked."""

from collections.abc import AsyncIterator

import pytest

from deployments.dispatch.route_log import RouteLog
from deployments.dispatch.timeline import Arrival
from deployments.http.routes import changed_rows, request_row
from replicas.errors import InvalidRequest
from routing.types import NoReplica
from tests.unit.deployments.in_process import House, ScriptedReplica
from tests.unit.deployments.sample_values import ask
from tests.unit.deployments.test_route_log import ready, run

KEYS = {
    "rid", "router", "time", "endpoint", "outcome", "replica", "prefill", "policy", "reason", "tries", "prompt_tokens",
    "output_tokens", "cached_tokens", "predicted_tokens", "best_tokens", "ttft_s", "total_s", "stages",
}  # fmt: skip


@pytest.fixture
async def house() -> AsyncIterator[House]:
    house = House()
    await house.start()
    yield house
    await house.stop()


async def test_a_row_tells_what_became_of_a_request_and_its_stages_sum_to_the_total(house: House) -> None:
    await ready(house, ScriptedReplica("r0", die_at=0), ScriptedReplica("r1"))
    arrival = Arrival(endpoint="chat", arrived_s=house.dispatcher._clock() - 1.0, time_s=1763722000.0)
    async for _ in house.dispatcher.stream(ask(), arrival=arrival):
        pass
    [record] = house.dispatcher.routes.recent()
    row = request_row(record, router_id="router")
    assert row.keys() == KEYS  # deployments/watch/observatory/README.md
    told = {name: row[name] for name in ("rid", "router", "time", "endpoint", "outcome", "replica", "tries")}
    assert told == {"rid": "me", "router": "router", "time": 1763722000.0, "endpoint": "chat", "outcome": "finished",
                    "replica": "r1", "tries": 2}  # fmt: skip
    assert (row["prompt_tokens"], row["output_tokens"], row["cached_tokens"]) == (4, 8, 0)
    assert row["total_s"] > row["ttft_s"] > 1.0
    assert list(row["stages"]) == ["route_s", "queue_s", "prefill_s", "transfer_s", "decode_s"]
    assert sum(row["stages"].values()) == pytest.approx(row["total_s"])
    assert row["stages"]["route_s"] > 1.0  # the first try too


async def test_only_what_changed_is_told_again(house: House) -> None:
    await ready(house, replica := ScriptedReplica("r0"))
    await run(house, "a.0-x")
    await run(house, "b.0-y")
    rows, seq = changed_rows(house.dispatcher, 0)
    assert [row["rid"] for row in rows] == ["x", "y"]
    assert changed_rows(house.dispatcher, seq) == ((), seq)
    stream = house.dispatcher.stream(ask(rid="c.0-z"))
    await anext(stream)
    [begun], after = changed_rows(house.dispatcher, seq)
    assert (begun["rid"], begun["outcome"], begun["total_s"], begun["stages"]) == ("z", "running", None, None)
    assert begun["ttft_s"] is not None
    await stream.aclose()
    [ended], _ = changed_rows(house.dispatcher, after)
    assert (ended["outcome"], ended["stages"]) == ("aborted", None)
    assert replica.requests
    all_rows, _ = changed_rows(house.dispatcher, 10**9)  # of a router before this one
    assert [row["rid"] for row in all_rows] == ["x", "y", "z"]


async def test_no_more_is_told_than_is_kept(house: House) -> None:
    await ready(house, ScriptedReplica("r0"))
    house.dispatcher.routes = routes = RouteLog(capacity=2)
    for rid in ("a.0-x", "b.0-y", "c.0-z"):
        await run(house, rid)
        routes.check()
    rows, seq = changed_rows(house.dispatcher, 0)
    assert [row["rid"] for row in rows] == ["y", "z"]
    assert seq == 9  # a decision, a first token and an end each


async def test_what_was_refused_says_so_and_what_was_never_decided_has_no_row(house: House) -> None:
    with pytest.raises(NoReplica):
        await run(house, "a.0-early")
    await ready(house, ScriptedReplica("r0", refuse=InvalidRequest("n: too many")))
    with pytest.raises(InvalidRequest):
        await run(house, "b.0-me")
    [row], _ = changed_rows(house.dispatcher, 0)
    assert (row["rid"], row["outcome"], row["ttft_s"]) == ("me", "refused", None)
