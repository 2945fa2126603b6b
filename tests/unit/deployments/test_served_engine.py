"""One engine behind the channel: what its routers see of its queue."""

import asyncio
import dataclasses
import re
import threading
import time
from array import array
from collections.abc import AsyncIterator

import pytest

from dashboards.catalog import CATALOG
from deployments.channel.frames import EndRequest, RunRequest
from deployments.dispatch.leases import ReplicaCalls, ReplicaGone
from deployments.replica import served_engine
from deployments.replica.served_engine import ServedEngine
from replicas.engine.loop import EngineLoop
from replicas.errors import EngineDead, MantaError, Overloaded, PromptTooLong
from replicas.scheduler.plan import StepPlan, StepResult
from replicas.types import GenerateRequest
from tests.fake_transfer_service import FakeWire
from tests.harness import fake_engine
from tests.unit.deployments.in_process import House
from tests.unit.deployments.sample_values import ask
from tests.waiting import until_async


async def run(house: House, served: ServedEngine, request: GenerateRequest) -> MantaError | None:
    """Start ``request`` as a router does, and return what its lease returns."""
    house.channel.send(served.replica_id, RunRequest(request))
    return await served.lease("router", request.rid)


@pytest.fixture
def steps() -> threading.Event:
    """While it is cleared, a step of `served` does not end: what it runs is not over before a test has seen it run."""
    event = threading.Event()
    event.set()
    return event


@pytest.fixture
async def served(steps: threading.Event) -> AsyncIterator[ServedEngine]:
    """A started engine over a fake device, at most 2 requests waiting."""

    def execute(plan: StepPlan) -> StepResult:
        steps.wait(60)
        return device.execute(plan)

    engine, device = fake_engine(max_queued_requests=2, execute=execute)
    loop = EngineLoop(engine)
    loop.start()
    served = ServedEngine(loop, replica_id="r0", node_id="here")
    yield served
    served.check()
    await served.stop()


async def test_a_queue_found_full_by_the_engine_thread_is_told_at_once(served: ServedEngine) -> None:
    """As where memory is short: fewer are open than may be (2 + 8). No replica is dead, so none is waited for."""
    served.loop.engine.scheduler.would_wait = lambda num_new: 2 + num_new  # type: ignore[method-assign]
    async with House(retry_wait_s=300.0) as house, asyncio.timeout(60):
        house.add(served)
        assert await house.fleet.wait_ready(30)
        with pytest.raises(Overloaded, match="at most 2 may"):
            [delta async for delta in house.dispatcher.stream(ask())]


async def test_a_replica_shows_its_cache_as_a_tree(house: House, served: ServedEngine) -> None:
    house.add(served)
    assert await house.fleet.wait_ready(30)
    [delta async for delta in house.dispatcher.stream(ask(num_tokens=9, max_new_tokens=4))]  # 12 tokens are computed
    tree = await house.leases.call("r0", ReplicaCalls.cache_tree, 1, 1)
    (node,) = tree.root.children
    assert (tree.page_size, tree.tokens, node.subtree_tokens) == (4, 12, 12)


async def test_two_overlapping_attaches_leave_one_connection_that_works(house: House, served: ServedEngine) -> None:
    """Membership that flaps asks twice; the end of a connection that was replaced must not take the live one along."""
    assert house.address is not None
    await asyncio.gather(served.attach(house.address), served.attach(house.address))
    for _ in range(50):  # what ends, ends now
        await asyncio.sleep(0)
    async with asyncio.timeout(30):
        assert (await run(house, served, ask(max_new_tokens=4))) is None
    assert list(served._clients) == ["router"]


async def test_a_kept_connection_keeps_its_requests_and_a_renewed_one_ends_them(
    house: House, served: ServedEngine, steps: threading.Event
) -> None:
    house.add(served)
    assert await house.fleet.wait_ready(30)
    assert house.address is not None
    first = served._clients["router"]
    await served.attach(house.address)
    assert served._clients["router"] is first
    steps.clear()
    lease = asyncio.create_task(run(house, served, ask(max_new_tokens=100)))
    await until_async(lambda: served.loop.num_open == 1)
    await served.attach(dataclasses.replace(house.address, renew=True))
    steps.set()
    assert served._clients["router"] is not first
    await asyncio.wait_for(lease, 60)
    served.check()
    async with asyncio.timeout(30):
        assert (await run(house, served, ask(rid="a2.0-me", max_new_tokens=4))) is None


@pytest.mark.parametrize("how", ["its router is lost", "its router gives it up", "its router is silent"])
async def test_what_a_request_has_made_is_remembered_for_the_router_that_goes_on_with_it(
    house: House, served: ServedEngine, steps: threading.Event, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Of all choices that run, also where a failure had made each a request of its own; a further one is its own."""
    allowed, steps_begun = threading.Semaphore(40), list[float]()  # of a hundred that it takes

    def next_step(timeout_s: float) -> None:
        steps_begun.append(time.monotonic())
        allowed.acquire(timeout=timeout_s)

    monkeypatch.setattr(steps, "wait", next_step)
    house.add(served)
    assert await house.fleet.wait_ready(30)
    first = served._clients["router"]
    rids = ("a1.1c0-me", "a1.1c3-me", "a2.0-other")
    requests = [dataclasses.replace(ask(rid=rid, max_new_tokens=100), recall=rid[:2]) for rid in rids]
    leases = [asyncio.create_task(run(house, served, request)) for request in requests]
    await until_async(lambda: len(steps_begun) > 8)
    if how == "its router is lost":
        first.close()
        await until_async(lambda: first.lost)
    elif how == "its router gives it up":
        house.channel.send("r0", EndRequest(rids[0]))
        await until_async(lambda: rids[0] not in served._runs)
    made = await served.recall("a1")
    allowed.release(1000)
    assert made.keys() == {0, 3}
    assert min(map(len, made.values())) >= 2
    assert await served.recall("unknown") == {}
    await asyncio.wait_for(asyncio.gather(*leases), 60)
    again = await served.recall("a1")
    assert [again[choice][: len(ids)] for choice, ids in made.items()] == list(made.values())
    if how != "its router is lost":
        assert len((await served.recall("a2"))[0]) == 99, "of a whole answer the end is due"


def test_outputs_are_remembered_for_a_while_the_longest_of_each_choice_and_within_bounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 0.0
    outputs = served_engine.Outputs(lambda: now_s)
    outputs.add("a", {0: array("i", range(5)), 1: array("i", [7])})
    outputs.add("a", {0: array("i", range(3)), 2: array("i", [8, 9])})
    assert outputs.find("a") == {0: [0, 1, 2, 3], 1: [], 2: [8]}
    now_s = served_engine.REMEMBERED_S - 1
    outputs.add("b", {0: array("i", range(4))})
    now_s += 1
    assert (outputs.find("a"), outputs.find("b")) == ({}, {0: [0, 1, 2]})
    monkeypatch.setattr(served_engine, "MOST_OUTPUT_IDS", 6)
    outputs.add("c", {0: array("i", range(4))})
    assert (outputs.find("b"), outputs.find("c")) == ({}, {0: [0, 1, 2]})
    monkeypatch.setattr(served_engine, "MOST_OUTPUTS", 1)
    outputs.add("d", {0: array("i", range(2))})
    assert (outputs.find("c"), outputs.find("d")) == ({}, {0: [0]})


async def test_a_lease_that_overtakes_its_request_waits_for_it(house: House, served: ServedEngine) -> None:
    await house.ready(served)
    lease = asyncio.create_task(served.lease("router", "a1.0-me"))
    await asyncio.sleep(0)
    assert not served.loop.num_open
    house.channel.send("r0", RunRequest(ask(max_new_tokens=4)))
    assert await asyncio.wait_for(lease, 60) is None


async def test_a_lease_whose_request_does_not_come_is_given_up(
    house: House, served: ServedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_engine, "START_S", 0.01)
    await house.ready(served)
    error = await asyncio.wait_for(served.lease("router", "a1.0-me"), 60)
    assert isinstance(error, ReplicaGone)
    assert "the request has not come" in str(error)


async def test_a_refusal_waits_for_its_lease(house: House, served: ServedEngine) -> None:
    await house.ready(served)
    too_long = ask(num_tokens=served.loop.engine.config.model.context_len + 1)
    house.channel.send("r0", RunRequest(too_long))
    house.channel.send("r0", RunRequest(ask(rid="a2.0-me", max_new_tokens=4)))  # the connection goes on
    assert await asyncio.wait_for(served.lease("router", "a2.0-me"), 60) is None
    assert isinstance(await served.lease("router", too_long.rid), PromptTooLong)


async def test_a_replica_whose_transfer_thread_has_failed_is_unhealthy_and_says_so() -> None:
    """Every KV transfer to or from it would fail for ever; a new process has a new transfer service."""
    wire = FakeWire()
    engine, _ = fake_engine(wire=wire)
    served = ServedEngine(EngineLoop(engine), replica_id="r0", node_id="here")
    await served.check_health()
    assert served._report(engine.stats()).error is None
    wire.services[0].error = RuntimeError("a bug")
    says = "the transfer thread has failed: RuntimeError('a bug')"
    assert served._report(engine.stats()).error == says
    with pytest.raises(EngineDead, match=re.escape(says)):
        await served.check_health()


async def test_the_report_of_a_hung_engine_says_for_how_long_its_step_has_run() -> None:
    """The event loop lives and reports; the engine thread does not come back from the device."""
    began, release = threading.Event(), threading.Event()

    def hang(plan: StepPlan) -> StepResult:
        began.set()
        release.wait(20)
        raise RuntimeError("woken")

    engine, _ = fake_engine(execute=hang)
    loop = EngineLoop(engine)
    served = ServedEngine(loop, replica_id="r0", node_id="here")
    assert served._report(loop.stats()).step_age_s == 0.0
    loop.start()
    started_s = time.monotonic()
    loop.submit(ask(), lambda deltas: None)
    await asyncio.to_thread(began.wait, 5)
    first = served._report(loop.stats()).step_age_s
    await asyncio.to_thread(release.wait, 0.05)
    second = served._report(loop.stats()).step_age_s
    assert 0 <= first < first + 0.05 <= second <= time.monotonic() - started_s
    release.set()
    await served.stop()


async def test_however_many_wait_for_a_flush_the_engine_is_asked_once_each_50_ms(
    served: ServedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def flush() -> bool:
        asked.append(len(asked) >= 3)
        return asked[-1]

    monkeypatch.setattr(served.loop.engine, "flush_cache", flush)
    started_s = time.monotonic()
    callers = [asyncio.create_task(served.flush_cache(10.0)) for _ in range(100)]
    callers += [asyncio.create_task(served.flush_cache(0.0))]
    left = callers.pop(0)
    await asyncio.sleep(0)
    left.cancel()  # its client has gone: the others are not
    assert await asyncio.wait_for(asyncio.gather(*callers), 10) == [True] * 99 + [False]
    assert asked == [False, False, False, True]
    assert time.monotonic() - started_s >= 0.15
    assert await served.flush_cache(0.0)


async def test_a_replica_that_drains_gets_nothing_new_ends_what_runs_and_has_serve_replace_it(
    served: ServedEngine, steps: threading.Event
) -> None:
    stays = EngineLoop(fake_engine()[0])
    stays.start()
    other = ServedEngine(stays, replica_id="r1", node_id="here")
    async with House() as house, asyncio.timeout(60):
        await house.ready(served, other)
        steps.clear()
        running = asyncio.create_task(run(house, served, ask(rid="a1.0-long", max_new_tokens=100)))
        await until_async(lambda: served.loop.num_open == 1)
        await house.leases.call("r0", ReplicaCalls.drain)
        await until_async(lambda: {each.replica_id: each.state for each in house.fleet.seen()}["r0"] == "draining")
        assert house.fleet.num_ready == 1
        for number in range(4):
            [delta async for delta in house.dispatcher.stream(ask(rid=f"b{number}.0-new", max_new_tokens=2))]
            record = house.dispatcher.routes.find("new")
            assert record is not None
            assert record.tries[-1].decision.replica_id == "r1"
        steps.set()
        assert await running is None  # it ended as if nothing had been
        with pytest.raises(ReplicaGone, match="an operator asked for it"):
            await served.check_health()
        await other.check_health()
    await other.stop()


async def test_a_snapshot_that_memory_was_short_for_is_told_as_such_not_as_a_request_that_is_gone(
    served: ServedEngine, steps: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(*given: object) -> None:
        raise Overloaded("no memory")

    monkeypatch.setattr(served_engine, "extract", short)
    steps.clear()
    served.loop.submit(ask(), lambda deltas: None)
    taken = asyncio.create_task(served.snapshot("me", 0))
    await asyncio.sleep(0)
    steps.set()
    assert await taken == "no memory"
    await until_async(lambda: not served.loop.open_rids())


def test_what_a_rank_decided_is_told_as_filled_in() -> None:
    """SPEC L04, A08: on a GPU memory and rows are open until the rank has looked."""
    engine, _ = fake_engine(num_pages=64, page_size=4, max_running=8)
    open_ = dataclasses.replace(
        engine.config,
        cache=dataclasses.replace(engine.config.cache, device_memory_bytes=None),
        scheduler=dataclasses.replace(engine.config.scheduler, max_running_requests=None),
        origin={},
    )
    engine.config = open_
    token_bytes = 2 * open_.model.num_layers * open_.model.num_kv_heads * open_.model.head_dim * 4
    told = {name: each["value"] for name, each in served_engine.filled_in(engine).items()}
    wanted = {
        "cache.kv_dtype": "float32",
        "cache.device_memory_bytes": 64 * 4 * token_bytes,
        "scheduler.max_running_requests": 8,
    }
    assert told == wanted
    given = dataclasses.replace(open_.cache, kv_dtype="int8", device_memory_bytes=1 << 20)
    engine.config = dataclasses.replace(open_, cache=given)
    assert list(served_engine.filled_in(engine)) == ["scheduler.max_running_requests"]


@pytest.mark.model
def test_an_engine_knows_how_long_each_phase_of_its_start_took(engine_loop: EngineLoop) -> None:
    times = engine_loop.engine.started.times
    assert set(times) == set(CATALOG["replica_start_seconds"].labels["phase"])
    assert all(took_s > 0 for took_s in times.values())
    assert times["load_weights"] + times["warm_up"] < times["total"]
