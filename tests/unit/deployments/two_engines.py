"""Two real engines with transfer services over memory of this process, for tests of replicas that are lost; only Ray
and NIXL are absent."""

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from kvtransfer.types import TransferSettings
from replicas.config import CacheConfig, SchedulerConfig
from replicas.engine.loop import EngineLoop
from replicas.launch import EngineSettings, load_engine
from tests.embedded import short_model
from tests.local_agents import LocalAgent, LocalFabric

SETTINGS = TransferSettings(host="127.0.0.1", token=b"a token of this test", heartbeat_s=5.0, call_timeout_s=10.0)


@dataclass(frozen=True, kw_only=True)
class Engines:
    """One engine for each role, and what their transfer services copy through."""

    fabric: LocalFabric
    prefill: EngineLoop
    decode: EngineLoop

    @property
    def both(self) -> tuple[EngineLoop, EngineLoop]:
        return self.prefill, self.decode

    async def flush(self) -> None:
        """Once they are idle, forget what they have cached."""
        await self.settle()
        for loop in self.both:
            assert await loop.run_on_engine(lambda engine: engine.flush_cache())

    async def settle(self) -> None:
        """Nothing runs, no room is open, and every page is free or evictable."""
        async with asyncio.timeout(20):
            for loop in self.both:
                while True:
                    stats = await loop.run_on_engine(lambda engine: engine.stats())
                    pool, service = stats.pool, stats.transfer
                    assert service is not None
                    rooms = service.rooms_receiving + service.rooms_sending + service.rooms_draining
                    if not loop.num_open and not rooms and pool.free_pages + pool.evictable_pages == pool.num_pages:
                        break
                    await asyncio.sleep(0.02)
                await loop.run_on_engine(lambda engine: engine.scheduler.check())


@contextlib.contextmanager
def two_engines(model: str | None = None) -> Iterator[Engines]:
    """``model``: its folder; `short_model` where none is given."""
    fabric = LocalFabric()

    def started(name: str) -> EngineLoop:
        engine = load_engine(
            EngineSettings(
                model=model or short_model(),
                cache=CacheConfig(max_total_tokens=4_000),
                scheduler=SchedulerConfig(chunked_prefill_size=64),
                num_threads=1,
                record_events=True,
                transfer=SETTINGS,
                make_agent=lambda memory: LocalAgent(memory, fabric, name),
            )
        )
        loop = EngineLoop(engine)
        loop.start()
        return loop

    both = Engines(fabric=fabric, prefill=started("prefill"), decode=started("decode"))
    yield both
    both.decode.stop()
    both.prefill.stop()
