"""What a router tells the observatory: the fleet as it sees it, and the requests that changed."""

import time
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from deployments.fleet.seen import Target
from deployments.record.route_log import RouteRecord, Try
from deployments.record.timeline import Arrival, Timeline
from deployments.settings.schema import AppConfig, parse
from deployments.watch.observatory.router_view import RouterView, kv_transfers, request_body, router_view, scaling_rules
from kvtransfer.pages import page_keys
from replicas.types import PdTransferReport
from routing.types import PageFetch
from tests.unit.deployments.in_process import PAGE_SIZE, House, ScriptedReplica
from tests.unit.deployments.sample_values import ask

MODEL = {"path": "somebody/tiny"}


@pytest.fixture
async def house() -> AsyncIterator[House]:
    async with House() as house:
        await house.ready(ScriptedReplica("r0"))
        yield house


def told(house: House, since: dict[str, int], config: AppConfig | None = None) -> RouterView:
    config = config or parse({"model": MODEL})
    target = Target(address="r:1000", role="router", process_id="r", node_id="nn")
    return router_view(
        dispatcher=house.dispatcher, fleet=house.fleet, config=config, node_id="nn", target=target, since=since
    )


async def serve(house: House, name: str) -> None:
    async for _ in house.dispatcher.stream(ask(rid=f"a1.0-{name}", num_tokens=2 * PAGE_SIZE + 3)):
        pass


async def test_each_request_is_told_once_after_each_change(house: House) -> None:
    await serve(house, "one")
    first = told(house, {})
    assert [(row["rid"], row["outcome"], row["router"]) for row in first.requests] == [("one", "ok", "router")]
    assert told(house, {"router": first.seq}).requests == ()
    await serve(house, "two")
    assert [row["rid"] for row in told(house, {"router": first.seq, "another": 99}).requests] == ["two"]
    assert [row["rid"] for row in told(house, {"another": 99}).requests] == ["one", "two"]  # it has not heard us yet


async def test_requests_that_are_called_alike_have_keys_of_their_own_and_the_clock_is_told(house: House) -> None:
    for digits in ("a1", "b2"):
        async for _ in house.dispatcher.stream(ask(rid=f"{digits}.0-same", num_tokens=20)):
            pass
    before_s = time.time()
    view = told(house, {})
    assert [(row["rid"], row["key"]) for row in view.requests] == [("same", "a1.0-same"), ("same", "b2.0-same")]
    assert view.time_s is not None
    assert before_s <= view.time_s <= time.time()


async def test_a_request_is_told_with_its_row_its_page_keys_and_its_route(house: House) -> None:
    await serve(house, "one")
    body = request_body(house.dispatcher, "one")
    assert body is not None
    assert (body["row"]["rid"], body["route"]["replica"]) == ("one", "r0")
    keys = page_keys(ask(num_tokens=2 * PAGE_SIZE).token_ids, PAGE_SIZE, "")
    assert body["page_keys"] == [f"{key:016x}" for key in keys.tolist()]
    assert len(body["page_keys"]) == 2
    assert request_body(house.dispatcher, "nobody") is None


async def test_fetches_that_have_ended_are_told_with_both_ends(house: House) -> None:
    await serve(house, "one")
    record = house.dispatcher.routes.find("one")
    assert record is not None
    assert kv_transfers(record) == []
    [done] = record.tries
    fetch = PageFetch(
        donor_id="r1", end_tokens=32, num_tokens=32, num_bytes=64, took_s=0.1, compute_s=1.0, within_s=1.0,
        donor_ttft_s=2.0,
    )  # fmt: skip
    report = PdTransferReport(transferred=False, num_bytes=64)
    failed = Try(decision=replace(done.decision, fetch=fetch), fetch_report=report)
    timeline = Timeline(Arrival(endpoint="chat", arrived_s=0.0), num_choices=1)
    twice = RouteRecord(rid="a1.0-x", timeline=timeline, tries=[failed, done])
    assert kv_transfers(twice) == [{"from": "r1", "to": "r0", "bytes": 64, "ok": False}]


def test_rules_are_told_of_roles_that_scale() -> None:
    scaled = {"autoscaling": {"min_replicas": 2, "max_replicas": 5}}
    rules = scaling_rules(parse({"model": MODEL, "mode": "disaggregated", "prefill": scaled, "decode": {"count": 1}}))
    assert rules == {
        "prefill": {
            "min_replicas": 2.0, "max_replicas": 5.0, "ttft_objective_s": 5.0, "pool_high": 0.85, "running_high": 0.9,
            "slack": 0.7,
        }
    }  # fmt: skip
