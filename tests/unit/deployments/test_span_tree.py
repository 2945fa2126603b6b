"""What a trace tells of requests that were handed over, retried or aborted; the plain ones are in test_tracing.py."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from deployments.dispatch.route_log import RouteRecord
from deployments.http.tracing import span_tree
from routing.types import Role
from tests.unit.deployments.in_process import House, ScriptedReplica
from tests.unit.deployments.pair_in_process import Desks, HandOffReplica
from tests.unit.deployments.sample_values import ask


@pytest.fixture
async def house() -> AsyncIterator[House]:
    made = House(always_hand_off=True)
    await made.start()
    yield made
    await made.stop()


async def add(house: House, *replicas: ScriptedReplica) -> None:
    for replica in replicas:
        house.add(replica)
    async with asyncio.timeout(5):
        while len(house.router.views) < len(replicas):
            await asyncio.sleep(0.005)


async def run(house: House) -> RouteRecord:
    async for _ in house.dispatcher.stream(ask(rid="a1.0-me")):
        pass
    [record] = house.dispatcher.routes.recent()
    return record


async def test_a_hand_off_has_a_span_with_both_ends_and_what_came(house: House) -> None:
    desks = Desks()
    await add(house, HandOffReplica("p0", Role.PREFILL, desks), HandOffReplica("d0", Role.DECODE, desks))
    record = await run(house)
    report = record.tries[-1].hand_off
    assert report is not None
    stages = {stage.name: stage for stage in span_tree([record]).stages}
    assert list(stages) == ["manta.route", "manta.queue", "manta.prefill", "manta.kv_transfer", "manta.decode"]
    assert stages["manta.kv_transfer"].attributes == {
        "manta.request": "me", "manta.source": "p0", "manta.target": "d0", "manta.transferred": True,
        "manta.pages": report.num_pages, "manta.bytes": report.num_bytes,
    }  # fmt: skip
    assert stages["manta.prefill"].attributes["manta.replica"] == "p0"
    assert stages["manta.decode"].attributes["manta.replica"] == "d0"


async def test_stages_sum_to_the_total(house: House) -> None:
    await add(house, ScriptedReplica("r0"))
    record = await run(house)
    stages = span_tree([record]).stages
    total_s = record.timeline.total_s
    assert total_s is not None
    assert sum(stage.end_ns - stage.start_ns for stage in stages) == pytest.approx(total_s * 1e9, abs=2000)
    assert stages[0].start_ns == pytest.approx(record.time_s * 1e9, abs=1000)


async def test_a_try_that_failed_is_told_by_its_errors_name_alone(house: House) -> None:
    await add(house, ScriptedReplica("r0", die_at=0), ScriptedReplica("r1"))
    record = await run(house)
    tree = span_tree([record])
    assert tree.failed_tries == ({"manta.replica": "r0", "error.type": "ReplicaGone"},)
    assert (tree.error, tree.attributes["manta.outcome"]) == (None, "finished")


async def test_an_aborted_request_has_no_stages(house: House) -> None:
    replica = ScriptedReplica("r0")
    await add(house, replica)
    deltas = house.dispatcher.stream(ask(rid="a1.0-me"))
    await anext(deltas)
    await deltas.aclose()
    tree = span_tree(house.dispatcher.routes.recent())
    assert (tree.stages, tree.error, tree.attributes["manta.outcome"]) == ((), None, "aborted")


async def test_several_prompts_are_summed(house: House) -> None:
    await add(house, ScriptedReplica("r0"))
    for rid in ("a1.0-me", "a2.0-me"):
        async for _ in house.dispatcher.stream(ask(rid=rid)):
            pass
    tree = span_tree(house.dispatcher.routes.recent())
    told = [tree.attributes[f"gen_ai.usage.{name}_tokens"] for name in ("input", "output")]
    assert told == [2 * 4, 2 * 8]
    assert tree.attributes["gen_ai.response.finish_reasons"] == ["length", "length"]
    assert len(tree.stages) == 2 * 4
