"""The loop hands out what entered and left the cache, off the requests' way."""

import threading
import time

import numpy as np
import pytest

from kvtransfer.pages import page_keys
from replicas.cache.events import AllCleared, CacheEvent, PagesStored
from replicas.engine.loop import EngineLoop
from tests.harness import ask, fake_engine

pytestmark = pytest.mark.model
PROMPT = list(range(5, 45))


def taken(loop: EngineLoop, num: int) -> list[CacheEvent]:
    """The next ``num`` events; waits for the engine thread."""
    events: list[CacheEvent] = []
    deadline_s = time.monotonic() + 5
    while len(events) < num:
        assert time.monotonic() < deadline_s, f"{len(events)} of {num} events came"
        events += loop.take_cache_events()
        threading.Event().wait(0.005)
    return events


async def test_a_finished_request_leaves_numbered_events_and_a_snapshot_that_agrees() -> None:
    engine, _ = fake_engine(record_events=True)
    loop = EngineLoop(engine)
    loop.start()
    assert [delta async for delta in loop.generate(ask("a", PROMPT))][-1].finish is not None
    snapshot = await loop.run_on_engine(lambda engine: engine.cache_snapshot())
    events = taken(loop, snapshot.seq)
    assert [event.seq for event in events] == list(range(1, snapshot.seq + 1))
    stored = np.concatenate([event.keys for event in events if isinstance(event, PagesStored)])
    assert set(stored.tolist()) == {int(key) for run in snapshot.stored for key in run.keys}
    prompt_keys = page_keys(np.array(PROMPT, dtype=np.int32), engine.kv.page_size, "")
    assert set(prompt_keys.tolist()) <= set(stored.tolist())
    assert await loop.run_on_engine(lambda engine: engine.flush_cache())
    assert isinstance(taken(loop, 1)[-1], AllCleared)
    assert loop.take_cache_events() == ()
    loop.stop()


async def test_an_engine_that_records_nothing_tells_nothing() -> None:
    engine, _ = fake_engine()
    loop = EngineLoop(engine)
    loop.start()
    assert [delta async for delta in loop.generate(ask("a", PROMPT))][-1].finish is not None
    assert (await loop.run_on_engine(lambda engine: engine.cache_snapshot())).stored == ()
    assert loop.take_cache_events() == ()
    loop.stop()
