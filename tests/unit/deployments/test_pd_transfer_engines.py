"""Two real engines with real services behind one router, over memory of this process: the answers are those of one.

SPEC H06, H08, H19. Only Ray and NIXL are absent (tests/serve/apart/test_same_tokens.py).
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import numpy as np
import pytest

from deployments.dispatch.leases import ReplicaInfo
from deployments.record.route_forms import kv_transfer_body, request_row
from deployments.replica.served_engine import ServedEngine, may_fetch
from deployments.watch.observatory.router_view import kv_transfers
from kvtransfer.migration.wire import MigrationAddress
from replicas.engine.loop import EngineLoop
from replicas.types import GenerateRequest, SamplingParams, TokenDelta
from routing.types import Role
from tests.unit.deployments.in_process import House
from tests.unit.deployments.two_engines import Engines, two_engines
from tests.waiting import until_async

pytestmark = [pytest.mark.model, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    with two_engines() as engines:
        yield engines


class Fetching(ServedEngine):
    """A replica of transfer.fetch: auto."""

    def _info(self, migration: MigrationAddress | None) -> ReplicaInfo:
        return replace(super()._info(migration), fetches=may_fetch(self.loop.engine))


class Apart:
    """A house with one prefill and one decode replica, in front of `Engines`."""

    def __init__(self, engines: Engines) -> None:
        self.engines = engines
        self.house = House(always_kv_transfer=True)
        self.num_asked = 0

    async def add(self, loop: EngineLoop, replica_id: str, role: Role) -> None:
        self.house.add(Fetching(loop, replica_id=replica_id, node_id="here", role=role))
        async with asyncio.timeout(30):
            while replica_id not in {view.replica_id for view in self.house.router.views}:
                await asyncio.sleep(0.01)

    def lose(self, replica_id: str) -> None:
        """As the router sees a death: Ray knows, and the connection ends."""
        served = self.house.leases.replicas[replica_id]
        assert isinstance(served, ServedEngine)
        self.house.remove(replica_id)
        for connection in list(served._clients.values()):
            connection.close()

    def request(self, num_tokens: int, *, start: int = 0, **sampling: object) -> GenerateRequest:
        """Prompts that share their first tokens up to the shorter's length; ``start`` makes another family."""
        self.num_asked += 1
        params = replace(SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True), **sampling)  # type: ignore[arg-type]
        ids = (np.arange(start, start + num_tokens) * 7919) % 40_000 + 100
        return GenerateRequest(rid=f"{self.num_asked}.0-me", token_ids=ids.astype(np.int32), sampling=params)

    async def answer(self, request: GenerateRequest) -> list[TokenDelta]:
        async with asyncio.timeout(60):
            return [delta async for delta in self.house.dispatcher.stream(request)]

    async def alone(self, request: GenerateRequest) -> list[TokenDelta]:
        """What the decode engine says without any cache or KV transfer."""
        await self.engines.flush()
        whole = replace(request, rid=f"alone-{request.rid}")
        deltas = [delta async for delta in self.engines.decode.generate(whole)]
        await self.engines.flush()
        return deltas


@pytest.fixture
async def apart(engines: Engines) -> AsyncIterator[Apart]:
    apart = Apart(engines)
    await apart.house.start()
    await engines.flush()
    await apart.add(engines.prefill, "p0", Role.PREFILL)
    await apart.add(engines.decode, "d0", Role.DECODE)
    yield apart
    engines.fabric.resume("decode")
    await apart.house.stop()
    await apart.engines.settle()


def ids(deltas: list[TokenDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def logprobs(deltas: list[TokenDelta]) -> list[float | None]:
    return [each.logprob for delta in deltas for each in delta.logprobs]


def transferred(apart: Apart, number: int = -1) -> bool:
    report = apart.house.dispatcher.routes.recent()[-1].tries[number].kv_transfer
    assert report is not None, apart.house.dispatcher.routes.recent()[-1]
    return report.transferred


@pytest.mark.parametrize("num_tokens", [5, 16, 200])
@pytest.mark.parametrize("how", [{}, {"temperature": 0.9, "seed": 5}])
async def test_the_answer_is_that_of_one_replica(apart: Apart, num_tokens: int, how: dict[str, object]) -> None:
    request = replace(apart.request(num_tokens, **how), return_logprobs=True, top_logprobs=2)
    expected = await apart.alone(request)
    deltas = await apart.answer(request)
    assert transferred(apart)
    assert ids(deltas) == ids(expected)
    assert logprobs(deltas) == pytest.approx(logprobs(expected), abs=1e-4)
    assert "".join(delta.text for delta in deltas) == "".join(delta.text for delta in expected)
    assert deltas[-1].usage == expected[-1].usage


async def test_the_second_time_both_sides_hold_the_prefix_and_usage_tells_of_it(apart: Apart) -> None:
    longer = apart.request(240)
    expected = await apart.alone(longer)
    await apart.answer(apart.request(200))
    num_pages = apart.house.router.num_pages  # the flush is told to it too, and takes back what it expects
    await until_async(lambda: num_pages("p0") == num_pages("d0") == (12, 0))
    deltas = await apart.answer(longer)
    assert ids(deltas) == ids(expected)
    assert deltas[-1].usage.cached_tokens == 192  # 12 pages, of prefill
    last = apart.house.dispatcher.routes.recent()[-1].tries[-1]
    assert last.kv_transfer is not None
    assert last.kv_transfer.num_pages == 3  # of 15, 12 were here
    assert last.decision.pair is not None
    [(_, expects)] = last.decision.pair.rows()  # the router knew
    assert (expects.cached_tokens, expects.own_tokens, expects.transfer_pages) == (192, 48, 3)


async def test_the_prefill_replica_takes_the_answer_before_from_the_decode_replica(
    apart: Apart, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 150 tokens it has 6 pages, and the decode replica 8. However quick computing is here, they are fetched."""
    monkeypatch.setattr("routing.fetch.GAIN", -1e9)
    monkeypatch.setattr("routing.fetch.GAIN_S", -1e9)
    monkeypatch.setattr("routing.policies.LEAST_WITHIN_S", 60.0)
    first = apart.request(100, start=6_000, max_new_tokens=40)
    answer = ids(await apart.answer(first))
    num_pages = apart.house.router.num_pages
    await until_async(lambda: (num_pages("p0"), num_pages("d0")) == ((6, 0), (8, 0)))
    second = apart.request(0)
    second = replace(second, token_ids=np.array([*first.token_ids, *answer, *range(300, 310)], dtype=np.int32))
    deltas = await apart.answer(second)
    record = apart.house.dispatcher.routes.recent()[-1]
    assert [(each["from"], each["to"], each["ok"]) for each in kv_transfers(record)] == [
        ("d0", "p0", True), ("p0", "d0", True),
    ]  # fmt: skip
    last = record.tries[-1]
    [drawn] = request_row(record, router_id="router")["tries_at"]
    assert drawn["fetch"]["from"] == "d0"
    assert drawn["start_s"] <= drawn["fetch"]["start_s"] < drawn["fetch"]["end_s"]
    assert last.decision.fetch is not None
    assert (last.decision.fetch.donor_id, last.decision.fetch.num_tokens) == ("d0", 32)
    body = kv_transfer_body(last)
    assert (body["fetch"]["report"]["transferred"], body["fetch"]["report"]["num_pages"]) == (True, 2)
    assert "It fetched 32 tokens from d0" in body["fetch"]["sentence"]
    assert (body["kv_transfer"]["transferred"], body["kv_transfer"]["num_pages"]) == (True, 2)
    assert deltas[-1].usage.cached_tokens == 128
    assert ids(deltas) == ids(await apart.alone(second))


async def test_its_time_is_told_by_both_legs_with_the_first_token_and_at_the_end(apart: Apart) -> None:
    """200 tokens in four chunks at the prefill replica, then the pages' way, then 39 more tokens."""
    stream = apart.house.dispatcher.stream(apart.request(200, start=3_000, max_new_tokens=40))
    async with asyncio.timeout(60), contextlib.aclosing(stream) as deltas:
        first = await anext(deltas)
        record = apart.house.dispatcher.routes.recent()[-1]
        row = request_row(record, router_id="router")
        async for _ in deltas:
            pass
    assert (first.finish, row["outcome"]) == (None, "running")
    assert min(row["stages"]["prefill_s"], row["stages"]["transfer_s"]) > 0
    assert sum(row["stages"].values()) == pytest.approx(row["ttft_s"])
    times, stages = record.tries[-1].times, record.timeline.stages
    record.timeline.check()
    assert stages is not None
    assert times.prefill is not None
    assert times.came_s is not None
    assert stages.prefill_s == times.prefill.prefill_s > 0
    assert min(stages.transfer_s, stages.decode_s) > 0
    [sent] = request_row(record, router_id="router")["tries_at"]
    assert (sent["prefill"], sent["replica"]) == ("p0", "d0")


@pytest.mark.parametrize("stage", ["queued", "transferring", "streaming"])
async def test_a_client_that_leaves_leaves_nothing_behind(apart: Apart, stage: str) -> None:
    long = stage == "queued"
    request = apart.request(700 if long else 100, start=17_000, max_new_tokens=400)
    if stage == "transferring":
        apart.engines.fabric.hang("decode")
    stream = apart.house.dispatcher.stream(request)
    first = asyncio.create_task(anext(stream))
    async with asyncio.timeout(20):
        if stage == "queued":
            while not apart.engines.prefill.num_open:
                await asyncio.sleep(0.005)
        elif stage == "transferring":
            while not apart.engines.decode.stats().num_receiving:
                await asyncio.sleep(0.005)
        else:
            await first
    first.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await first
    await stream.aclose()
    apart.engines.fabric.resume("decode")
    await apart.engines.settle()
