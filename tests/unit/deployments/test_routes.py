"""The row of a request, and which rows have changed; the fake fleet of the page's tests has the same forms."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from deployments.dispatch.dispatcher import RouteHints
from deployments.http.routes import own_route
from deployments.record.route_forms import request_row
from deployments.record.route_log import RouteLog
from deployments.record.timeline import Arrival
from replicas.errors import InvalidRequest
from routing.types import NoReplica
from tests.fake_fleet import FakeFleet
from tests.unit.deployments.in_process import House, ScriptedReplica, changed_rows
from tests.unit.deployments.sample_values import ask
from tests.waiting import until_async

KEYS = {
    "rid", "router", "time", "endpoint", "outcome", "finish", "caller", "session", "tenant", "replica", "prefill",
    "policy", "reason", "tries", "prompt_tokens",
    "output_tokens", "cached_tokens", "predicted_tokens", "best_tokens", "ttft_s", "itl_s", "last_s", "total_s",
    "stages", "tries_at", "miss",
}  # fmt: skip


async def test_a_row_tells_what_became_of_a_request_and_its_stages_sum_to_the_total(house: House) -> None:
    await house.ready(ScriptedReplica("r0", die_at=0), ScriptedReplica("r1"))
    arrival = Arrival(endpoint="chat", arrived_s=house.dispatcher._clock() - 1.0, time_s=1763722000.0)
    async for _ in house.dispatcher.stream(ask(), arrival=arrival):
        pass
    [record] = house.dispatcher.routes.recent()
    row = request_row(record, router_id="router")
    assert row.keys() == KEYS  # deployments/watch/observatory/README.md
    told = {name: row[name] for name in ("rid", "router", "time", "endpoint", "outcome", "replica", "tries")}
    assert told == {"rid": "me", "router": "router", "time": 1763722000.0, "endpoint": "chat", "outcome": "ok",
                    "replica": "r1", "tries": 2}  # fmt: skip
    assert (row["prompt_tokens"], row["output_tokens"], row["cached_tokens"]) == (4, 8, 0)
    assert row["total_s"] >= row["last_s"] > row["ttft_s"] > 1.0
    assert list(row["stages"]) == ["route_s", "queue_s", "prefill_s", "transfer_s", "decode_s"]
    assert sum(row["stages"].values()) == pytest.approx(row["total_s"])
    assert row["stages"]["route_s"] > 1.0  # the first try too
    first, second = row["tries_at"]
    assert (first["replica"], second["replica"], second["failure"]) == ("r0", "r1", None)
    assert "ReplicaGone" in first["failure"]
    assert 1.0 < first["start_s"] < first["end_s"] <= second["start_s"] < second["end_s"] <= row["total_s"]


async def test_a_row_has_hashes_of_its_key_and_session_and_the_reason_of_its_end(house: House) -> None:
    await house.ready(ScriptedReplica("r0"))
    of = RouteHints(session_id="talk of alice@example.org")
    for rid in ("0123456789abcdef77aa.0-one", "0123456789abcdee77aa.0-two", "0123456789abcded88bb.0-three"):
        await house.collect(of, rid=rid)
    await house.collect(rid="0123456789abcdec.0-four")
    rows, _ = changed_rows(house.dispatcher, 0)
    assert [row["caller"] for row in rows] == ["77aa", "77aa", "88bb", None]
    one, two, other, none = (row["session"] for row in rows)
    assert one == two != other, "another caller's session may be called so too"
    assert (len(one), none, {row["finish"] for row in rows}) == (8, None, {"length"})


async def test_only_what_changed_is_told_again(house: House) -> None:
    await house.ready(replica := ScriptedReplica("r0"))
    await house.collect(rid="a.0-x")
    await house.collect(rid="b.0-y")
    rows, seq = changed_rows(house.dispatcher, 0)
    assert [row["rid"] for row in rows] == ["x", "y"]
    assert changed_rows(house.dispatcher, seq) == ((), seq)
    stream = house.dispatcher.stream(ask(rid="c.0-z"))
    await anext(stream)
    [begun], after = changed_rows(house.dispatcher, seq)
    assert (begun["rid"], begun["outcome"], begun["total_s"]) == ("z", "running", None)
    assert begun["ttft_s"] == pytest.approx(sum(begun["stages"].values()))
    assert [(each["replica"], each["end_s"]) for each in begun["tries_at"]] == [("r0", None)]
    await stream.aclose()
    [ended], _ = changed_rows(house.dispatcher, after)
    assert ended["outcome"] == "cancelled"
    assert ended["total_s"] == pytest.approx(sum(ended["stages"].values()))
    assert ended["stages"]["decode_s"] > 0
    assert replica.requests
    all_rows, _ = changed_rows(house.dispatcher, 10**9)  # of a router before this one
    assert [row["rid"] for row in all_rows] == ["x", "y", "z"]


async def test_a_failed_try_is_told_while_the_request_waits_for_another_replica(house: House) -> None:
    await house.ready(ScriptedReplica("r0", die_at=3))
    answer = asyncio.create_task(house.collect(rid="a.0-x"))
    await until_async(lambda: house.dispatcher.num_retries == 1)
    [row], _ = changed_rows(house.dispatcher, 0)
    [lost] = row["tries_at"]
    assert (row["outcome"], lost["replica"], "ReplicaGone" in lost["failure"]) == ("running", "r0", True)
    assert 0 <= lost["start_s"] < lost["end_s"]
    await house.ready(ScriptedReplica("r1"))
    await answer
    [row], _ = changed_rows(house.dispatcher, 0)
    assert [(each["replica"], each["prefill"]) for each in row["tries_at"]] == [("r0", None), ("r1", None)]
    assert row["tries_at"][0] == lost


async def test_no_more_is_told_than_is_kept(house: House) -> None:
    await house.ready(ScriptedReplica("r0"))
    house.dispatcher.routes = routes = RouteLog(capacity=2)
    for rid in ("a.0-x", "b.0-y", "c.0-z"):
        await house.collect(rid=rid)
        routes.check()
    rows, seq = changed_rows(house.dispatcher, 0)
    assert [row["rid"] for row in rows] == ["y", "z"]
    assert seq == 9  # a decision, a first token and an end each


async def test_what_was_refused_says_so_and_what_was_never_decided_has_no_row(house: House) -> None:
    with pytest.raises(NoReplica):
        await house.collect(rid="a.0-early")
    await house.ready(ScriptedReplica("r0", refuse=InvalidRequest("n: too many")))
    with pytest.raises(InvalidRequest):
        await house.collect(rid="b.0-me")
    [row], _ = changed_rows(house.dispatcher, 0)
    assert (row["rid"], row["outcome"], row["ttft_s"]) == ("me", "invalid", None)


def same_form(fake: Mapping[str, Any], real: Mapping[str, Any]) -> None:
    assert fake.keys() == real.keys()
    for name, value in real.items():
        if isinstance(value, dict):
            same_form(fake[name], value)


async def test_rows_and_explanations_of_the_fake_have_the_form_of_a_routers(house: House) -> None:
    """Both call a request as its client does, and the sentence begins with that name."""
    await house.ready(ScriptedReplica("r0"))
    await house.collect(rid="0123456789abcdef.0-me")
    [record] = house.dispatcher.routes.recent()
    real = own_route(house.dispatcher, "me")
    assert real is not None
    fleet = FakeFleet(unified=2, ticks=1)
    [row] = fleet.state["requests"]
    details = fleet.details(row["rid"])
    assert details is not None
    same_form(row, request_row(record, router_id="r") | {"missed": []})  # which the observatory adds
    same_form(details["route"], real)
    for route in (real, details["route"]):
        [attempt] = route["tries"]
        assert attempt["sentence"].startswith(f"{route['rid']} (")
        assert route["explanation"].startswith(f"{route['internal_rid']} (")
        assert route["internal_rid"].partition("-")[2] == route["rid"]
    [fake_try], [real_try] = details["route"]["tries"], real["tries"]
    same_form(fake_try | {"candidates": 0}, real_try | {"candidates": 0})
    same_form(fake_try["candidates"][0], real_try["candidates"][0])
