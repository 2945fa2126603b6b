"""The engine thread: every request is answered, whatever happens to a step, and cache events come out in order."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvtransfer.pages import page_keys
from replicas.cache.events import AllCleared, CacheEvent, PagesStored
from replicas.engine import loop as loops
from replicas.engine.loop import EngineLoop
from replicas.errors import EngineDead, InvalidRequest, Overloaded
from replicas.scheduler.plan import StepPlan, StepResult
from replicas.types import FinishReason, TokenDelta
from tests.fakes import continuation
from tests.harness import ask, at_once, fake_engine
from tests.waiting import until

pytestmark = pytest.mark.model
PROMPT = [5, 6, 7, 8, 9]


@contextmanager
def running(**engine: Any) -> Iterator[EngineLoop]:
    """A loop that runs; ``engine``: options of `fake_engine`."""
    loop = EngineLoop(fake_engine(**engine)[0])
    loop.start()
    yield loop
    loop.stop()


def reasons(deltas: list[TokenDelta]) -> list[FinishReason]:
    return [delta.finish.reason for delta in deltas if delta.finish is not None]


async def test_generate_yields_the_answer() -> None:
    with running() as loop:
        deltas = [delta async for delta in loop.generate(ask("a", PROMPT))]
        assert [token for delta in deltas for token in delta.token_ids] == continuation(PROMPT, 8)
        assert deltas[-1].finish is not None
        assert loop.num_open == 0
        assert sum(loop.tallies().decode_step_s.counts) == 7  # asked from this thread, of the engine's


def test_a_loop_that_has_stopped_has_no_thread_left() -> None:
    """One that ends later may be the last that holds the engine, and frees its weights while the interpreter ends."""
    before = set(threading.enumerate())
    with running():
        assert {each.name for each in set(threading.enumerate()) - before} >= {"manta-engine", "manta-watchdog"}
    assert set(threading.enumerate()) <= before


def test_what_is_not_refused_at_once_is_answered_however_many_came_between_two_steps() -> None:
    """2 run and 4 wait: a request that finds fewer open is accepted, on the caller's thread and on the engine's."""
    engine, _ = fake_engine(max_running=2, max_queued_requests=4)
    loop = EngineLoop(engine)
    got: list[TokenDelta] = []
    for number in range(6):
        loop.submit(ask(f"r{number}", [number]), got.extend)
    with pytest.raises(Overloaded, match="6 requests are open, at most 2 may run and 4 wait"):
        loop.submit(ask("r6", [6]), got.extend)
    loop.start()
    until(lambda: loop.num_open == 0)
    loop.stop()
    ends = {delta.rid: delta.finish.reason for delta in got if delta.finish is not None}
    assert ends == {f"r{number}": FinishReason.LENGTH for number in range(6)}


def test_a_caller_whose_event_loop_has_closed_does_no_harm_to_the_engine() -> None:
    """The answer arrives after its consumer has gone: the engine thread goes on."""
    asked, closed, answered = threading.Event(), threading.Event(), threading.Event()

    def slow(_engine: object) -> None:
        asked.set()
        assert closed.wait(60)
        answered.set()

    async def ask_and_leave() -> None:
        waiting = asyncio.ensure_future(loop.run_on_engine(slow))
        await asyncio.to_thread(asked.wait, 5)
        waiting.cancel()

    with running() as loop:
        asyncio.run(ask_and_leave())  # closes its event loop
        closed.set()
        assert answered.wait(60)
        got: list[TokenDelta] = []
        loop.submit(ask("a", PROMPT), got.extend)
        until(lambda: loop.num_open == 0)
        assert loop.error is None
        assert reasons(got) == [FinishReason.LENGTH]


async def test_a_page_that_is_lost_is_counted_while_the_engine_is_idle_and_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """SPEC F01, D16."""
    with running() as loop:
        assert [delta async for delta in loop.generate(ask("a", PROMPT))][-1].finish is not None
        await loop.run_on_engine(lambda engine: engine.kv.check_idle())
        assert loop.engine.kv.store.failed_checks == 0
        await loop.run_on_engine(lambda engine: engine.kv.store.allocator.alloc(2, rid="a leak"))
        until(lambda: loop.stats().failed_checks >= 2)
    (told,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert told.startswith(
        "2 of 64 pages and 0 rows are lost: no request is open, and 59 pages are free, 3 evictable, 0 protected"
    )


async def test_what_an_ended_request_still_holds_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """SPEC F01, D16: its end forgets to let go of its pages and its row."""
    with running() as loop:
        monkeypatch.setattr(loop.engine.kv, "release", lambda *_, **__: None)
        assert [delta async for delta in loop.generate(ask("a", PROMPT))][-1].finish is not None
        until(lambda: loop.stats().failed_checks >= 2)


async def test_a_consumer_that_leaves_aborts_its_request_and_frees_its_pages() -> None:
    gate = threading.Semaphore(3)
    engine, device = fake_engine()
    engine.steps.launch = at_once(lambda plan: gate.acquire() and device.execute(plan))
    loop = EngineLoop(engine)
    loop.start()
    stream = loop.generate(ask("a", PROMPT, max_new_tokens=100))
    assert (await anext(stream)).token_ids
    await stream.aclose()
    gate.release(100)
    until(lambda: loop.num_open == 0)
    stats = await loop.run_on_engine(lambda engine: engine.stats())
    assert stats.num_aborted == 1
    assert stats.pool.protected_pages == stats.pool.reserved_pages == 0
    loop.stop()


async def test_a_crash_in_a_step_answers_every_open_request_and_refuses_new_ones() -> None:
    def crash(plan: StepPlan) -> StepResult:
        raise RuntimeError("no such kernel")

    engine, _ = fake_engine(execute=crash)
    loop = EngineLoop(engine)
    got: list[TokenDelta] = []
    loop.submit(ask("a", PROMPT), got.extend)
    loop.submit(ask("b", PROMPT, n=2), got.extend)
    loop.start()
    until(lambda: len(got) == 3)
    assert {(delta.rid, delta.index) for delta in got} == {("a", 0), ("b", 0), ("b", 1)}
    assert all(delta.finish and delta.finish.reason is FinishReason.ERROR for delta in got)
    assert all(delta.finish and "no such kernel" in (delta.finish.message or "") for delta in got)
    with pytest.raises(EngineDead, match="no such kernel"):
        loop.submit(ask("c", PROMPT), got.extend)
    with pytest.raises(EngineDead):
        await loop.run_on_engine(lambda engine: engine.stats())
    loop.stop()


async def test_a_step_that_never_ends_is_noticed_and_every_request_is_answered() -> None:
    stuck, began = threading.Event(), threading.Event()

    def hang(plan: StepPlan) -> StepResult:
        began.set()
        stuck.wait(20)
        raise RuntimeError("woken")

    got: list[TokenDelta] = []
    with running(execute=hang, watchdog_s=0.2) as loop:
        loop.submit(ask("a", PROMPT), got.extend)
        await asyncio.to_thread(began.wait, 5)
        waiting = asyncio.ensure_future(loop.run_on_engine(lambda engine: engine.stats()))
        await asyncio.to_thread(until, lambda: len(got) == 1)
        assert got[0].finish is not None
        assert "more than 0 s" in (got[0].finish.message or "")
        with pytest.raises(EngineDead):
            await waiting
        stuck.set()
    assert len(got) == 1


async def test_a_dead_rank_makes_the_loop_unhealthy() -> None:
    engine, _ = fake_engine()
    engine.executor = replace(engine.executor, dead_rank=lambda: "rank 2 exited with code -9")
    loop = EngineLoop(engine)
    loop.start()
    await asyncio.to_thread(until, lambda: loop.error is not None)
    assert "rank 2 exited" in str(loop.error)
    loop.stop()


async def test_requests_with_one_sink_get_one_call_a_step() -> None:
    loop = EngineLoop(fake_engine()[0])
    calls: list[list[TokenDelta]] = []
    sink = calls.append
    for i in range(3):
        loop.submit(ask(f"r{i}", [10 * i + 1, 2], max_new_tokens=4), sink)
    loop.start()
    until(lambda: loop.num_open == 0)
    assert [len(call) for call in calls] == [3, 3, 3, 3]  # one extend step, three decode steps
    loop.stop()


async def test_what_cannot_be_served_is_refused_at_once_and_stop_answers_what_is_open() -> None:
    loop = EngineLoop(fake_engine()[0])
    got: list[TokenDelta] = []
    loop.submit(ask("a", PROMPT, max_new_tokens=100), got.extend)
    with pytest.raises(InvalidRequest, match="already open"):
        loop.submit(ask("a", PROMPT), got.extend)
    with pytest.raises(InvalidRequest, match="temperature"):
        loop.submit(ask("b", PROMPT, temperature=-1.0), got.extend)
    loop.stop()
    assert reasons(got) == [FinishReason.ERROR]


def taken(loop: EngineLoop, num: int) -> list[CacheEvent]:
    """Wait for the engine thread; return the next ``num`` events."""
    events: list[CacheEvent] = []

    def enough() -> bool:
        events.extend(loop.take_cache_events())
        return len(events) >= num

    until(enough)
    return events


async def test_a_finished_request_leaves_numbered_events_and_a_snapshot_that_agrees() -> None:
    prompt = list(range(5, 45))
    with running(record_events=True) as loop:
        assert [delta async for delta in loop.generate(ask("a", prompt))][-1].finish is not None
        snapshot = await loop.run_on_engine(lambda engine: engine.cache_snapshot())
        events = taken(loop, snapshot.seq)
        assert [event.seq for event in events] == list(range(1, snapshot.seq + 1))
        stored = np.concatenate([event.keys for event in events if isinstance(event, PagesStored)])
        assert set(stored.tolist()) == {int(key) for run in snapshot.stored for key in run.keys}
        prompt_keys = page_keys(np.array(prompt, dtype=np.int32), loop.engine.kv.page_size, "")
        assert set(prompt_keys.tolist()) <= set(stored.tolist())
        assert await loop.run_on_engine(lambda engine: engine.flush_cache())
        assert isinstance(taken(loop, 1)[-1], AllCleared)
        assert loop.take_cache_events() == ()


def test_what_comes_during_a_step_is_in_the_statistics_before_the_next_and_waits_since_it_came(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without that a router would take the queue for empty while the next step runs: 5 tokens wait here."""
    monkeypatch.setattr(loops, "STATS_PERIOD_S", 0.0)
    begun, go_on = threading.Semaphore(0), threading.Semaphore(0)

    def execute(plan: StepPlan) -> StepResult:
        begun.release()
        assert go_on.acquire(timeout=60)
        return device.execute(plan)

    engine, device = fake_engine(execute=execute)
    loop = EngineLoop(engine)
    got: list[TokenDelta] = []
    loop.start()
    loop.submit(ask("a", PROMPT), got.extend)
    assert begun.acquire(timeout=60)
    loop.submit(ask("b", [1, 2, 3, 4, 5], max_new_tokens=1), got.extend)
    came_s = time.monotonic()
    until(lambda: time.monotonic() - came_s > 0.02)
    waited_s = time.monotonic() - came_s
    go_on.release()
    assert begun.acquire(timeout=60)  # the next step, which computes b
    stats = loop.stats()
    go_on.release(100)
    until(lambda: loop.num_open == 0)
    loop.stop()
    assert (stats.num_running, stats.num_waiting, stats.waiting_uncached_tokens) == (1, 1, 5)
    [stages] = [delta.stages for delta in got if delta.rid == "b" and delta.stages is not None]
    assert stages.queue_s >= waited_s
