"""Two replicas with real engines in one process: what one computed, the other need not; answers are the same."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import numpy as np
import pytest

from deployments.replica.cache_migration import ReplicaMigrations
from deployments.replica.served_engine import ServedEngine
from replicas.config import CacheConfig, SchedulerConfig
from replicas.engine.loop import EngineLoop
from replicas.launch import EngineSettings, load_engine
from replicas.types import FinishReason, GenerateRequest, SamplingParams, TokenDelta
from tests.embedded import short_model
from tests.unit.deployments.in_process import House
from tests.waiting import until_async

pytestmark = pytest.mark.model
CACHE = CacheConfig(max_total_tokens=2_000, host_memory_bytes=64 << 20)


@pytest.fixture(scope="module")
def loops() -> Iterator[list[EngineLoop]]:
    scheduler = SchedulerConfig(max_running_requests=4)
    found = [
        EngineLoop(
            load_engine(
                EngineSettings(
                    model=short_model(), cache=CACHE, scheduler=scheduler, num_threads=1, record_events=True
                )
            )
        )
        for _ in range(2)
    ]
    for loop in found:
        loop.start()
    yield found
    for loop in found:
        loop.stop()


@pytest.fixture
async def replicas(loops: list[EngineLoop]) -> AsyncIterator[list[ServedEngine]]:
    """Both engines, empty, each as a replica."""
    made, all_migrations = [], []
    for at, loop in enumerate(loops):
        assert await loop.run_on_engine(lambda engine: engine.flush_cache())
        home = loop.engine.executor.page_home
        assert home is not None
        all_migrations.append(ReplicaMigrations(loop, home, host="127.0.0.1"))
        made.append(ServedEngine(loop, replica_id=f"r{at}", node_id="here", migrations=all_migrations[-1]))
    yield made
    for migrations in all_migrations:
        migrations.check()
        await migrations.stop()
    for loop in loops:
        await until_async(lambda loop=loop: not loop.num_open, 60.0)  # type: ignore[misc]
        loop.engine.kv.check([])


def request(rid: str, length: int, *, new: int = 4, seed: int = 1) -> GenerateRequest:
    ids = np.random.default_rng(seed).integers(100, 40_000, length).astype(np.int32)
    return GenerateRequest(rid=rid, token_ids=ids, sampling=SamplingParams(max_new_tokens=new, temperature=0.0))


async def run(house: House, asked: GenerateRequest) -> list[TokenDelta]:
    async with asyncio.timeout(60):
        return [delta async for delta in house.dispatcher.stream(asked)]


def tokens(deltas: list[TokenDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


async def test_what_a_leaving_replica_has_computed_is_a_host_hit_where_it_went(replicas: list[ServedEngine]) -> None:
    """Prompts of 600 tokens; 37 pages of 16 come along."""
    first, second = replicas
    async with House(policy="estimated_ttft", report_period_s=0.1) as house:
        await house.ready(first)
        before = [await run(house, request(f"a{seed}.0-me", 600, seed=seed)) for seed in range(2)]
        await house.ready(second)
        house.leases.replicas.pop("r0")
        house.fleet.set_members(house.leases.replicas)  # it drains; its connection lives
        await until_async(lambda: second._migrations.stats.received_tokens >= 1184)  # type: ignore[union-attr]
        await first._migrations.finish()  # type: ignore[union-attr]
        after = [await run(house, request(f"b{seed}.0-me", 600, seed=seed)) for seed in range(2)]
    assert [tokens(each) for each in after] == [tokens(each) for each in before]
    usages = [each[-1].usage for each in after]
    assert [(usage.cached_tokens, usage.host_tokens) for usage in usages] == [(592, 592), (592, 592)]
    assert first._migrations.stats.value_kept == 1.0  # type: ignore[union-attr]


async def test_a_new_replica_is_filled_before_its_first_request(replicas: list[ServedEngine]) -> None:
    first, second = replicas
    async with House(policy="estimated_ttft", report_period_s=0.1, fill_s=10.0) as house:
        await house.ready(first)
        before = await run(house, request("a1.0-me", 600))
        second.loop.engine.steps.times.num_extend = second.loop.engine.steps.times.num_decode = 0  # as if it were new
        await house.ready(second)
        house.remove("r0")
        after = await run(house, request("b1.0-me", 600))
    assert tokens(after) == tokens(before)
    assert after[-1].usage.host_tokens == 592


async def test_a_request_that_outlives_the_drain_time_goes_on_elsewhere_without_computing_its_prompt(
    replicas: list[ServedEngine],
) -> None:
    first, second = replicas
    async with House(policy="estimated_ttft", report_period_s=0.1) as house:
        await house.ready(first)
        whole = await run(house, request("a1.0-me", 600, new=192))
        assert await first.loop.run_on_engine(lambda engine: engine.flush_cache())
        await house.ready(second)
    assert len(tokens(whole)) == 192
    async with House(policy="estimated_ttft", report_period_s=0.1, drain_s=0.1) as house:
        await house.ready(first)
        got: list[TokenDelta] = []
        stream = house.dispatcher.stream(request("c1.0-me", 600, new=192))
        got.append(await anext(stream))
        await house.ready(second)
        computed = second.loop.engine.stats().prefill_tokens
        house.leases.replicas.pop("r0")
        house.fleet.set_members(house.leases.replicas)
        async with asyncio.timeout(60):
            got += [delta async for delta in stream]
        [retry] = house.dispatcher.retries
    assert tokens(got) == tokens(whole)
    assert got[-1].finish is not None
    assert got[-1].finish.reason is FinishReason.LENGTH
    assert retry.replica_id == "r0"
    assert 0 < retry.num_delivered < 192
    assert second.loop.engine.stats().prefill_tokens - computed <= 192 + 16  # none of its prompt
