"""An engine with a step under way between two calls: what a caller, a crash, a deadline and a watchdog find then."""

import re
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from replicas.engine.loop import EngineLoop
from replicas.errors import EngineDead, Fault
from replicas.request import ReqState
from replicas.scheduler import speculation
from replicas.scheduler.plan import DecodePlan, PendingStep, StepPlan, StepResult
from replicas.scheduler.speculation import Speculation
from replicas.types import Finish, FinishReason, GenerateRequest, TokenDelta
from tests.fakes import FakeDevice, continuation
from tests.harness import Clock, ask, fake_engine, finish_all
from tests.told_speculation import Told
from tests.waiting import until

pytestmark = pytest.mark.model
PROMPT = [5, 6, 7, 8, 9]


def test_a_token_that_ends_a_request_keeps_its_pages_until_the_step_made_ahead_is_applied() -> None:
    """Pages of 4: prompt 5 and 3 tokens are two pages; the step under way writes the first slot of a third."""
    engine, _ = fake_engine(overlap="on")
    ids = continuation(PROMPT, 8)
    engine.submit(ask("a", PROMPT, stop_token_ids=(ids[3],)))
    deltas = [delta for _ in range(4) for delta in engine.step()]
    assert deltas[-1].finish == Finish(reason=FinishReason.STOP, matched=ids[3])
    assert deltas[-1].usage.completion_tokens == 4
    held = engine.stats().pool
    assert (held.free_pages, held.reserved_pages + held.protected_pages) == (61, 3)
    assert engine.has_work
    assert not engine.kv.store.stats().evictable_pages
    engine.scheduler.check()
    assert engine.step() == []
    after = engine.stats().pool
    assert (after.free_pages, after.evictable_pages) == (62, 2)
    assert not engine.has_work


def test_a_deadline_ends_at_most_one_step_late() -> None:
    clock = Clock()
    engine, _ = fake_engine(overlap="on", clock=clock)
    request = ask("a", PROMPT, max_new_tokens=50)
    object.__setattr__(request, "deadline_s", 1.0)
    engine.submit(request)
    for _ in range(3):
        engine.step()
    clock.now_s = 1.5
    first, second = engine.step(), engine.step()
    assert [delta.finish for delta in first] == [None]
    assert second[-1].finish is not None
    assert second[-1].finish.fault is Fault.TIMED_OUT
    assert not engine.has_work


def test_a_flush_ends_the_step_under_way_when_no_request_is_open() -> None:
    engine, _ = fake_engine(overlap="on")
    ids = continuation(PROMPT, 3)
    engine.submit(ask("a", PROMPT, stop_token_ids=(ids[1],)))
    engine.step()
    engine.step()
    assert engine.has_work
    assert engine.flush_cache()
    assert engine.stats().pool.free_pages == 64


def test_requests_that_find_no_place_do_not_keep_steps_from_being_made_ahead() -> None:
    engine, _ = fake_engine(overlap="on", max_running=1)
    for rid in ("a", "b"):
        engine.submit(ask(rid, PROMPT, max_new_tokens=12))
    ahead = 0
    while engine.find("b") is not None and engine.find("b").state is ReqState.WAITING:  # type: ignore[union-attr]
        engine.step()
        ahead += len(engine.scheduler.queues.under_way)
    assert ahead == 10  # of 11 decode steps all but the last, whose end makes room
    finish_all(engine)


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        ({}, 10),
        ({"logit_bias": ((3, 1.0),)}, 10),
        ({"frequency_penalty": 0.5, "repetition_penalty": 1.2}, 10),
        ({"allowed_token_ids": tuple(range(900))}, 10),
        ({"min_new_tokens": 6, "stop_token_ids": (1,)}, 10),
        ({"bad_words": ((3, 4),)}, 0),
    ],
)
def test_only_steps_whose_masks_hang_on_the_last_token_are_not_made_ahead(asked: dict[str, Any], wanted: int) -> None:
    """Of the decode steps that make tokens 2 to 12; the first of them, after the prompt, never is."""
    assert steps_ahead(ask("a", PROMPT, max_new_tokens=12, ignore_eos=True, **asked)) == wanted


def test_steps_whose_logprobs_are_wanted_are_made_ahead() -> None:
    assert steps_ahead(replace(ask("a", PROMPT, max_new_tokens=12, ignore_eos=True), return_logprobs=True)) == 10


def steps_ahead(request: GenerateRequest) -> int:
    engine, _ = fake_engine(overlap="on")
    engine.submit(request)
    made = 0
    while engine.has_work:
        engine.step()
        made += len(engine.scheduler.queues.under_way)
    return made


def broken_launch(device: FakeDevice, fail: Callable[[], StepResult]) -> Callable[[StepPlan], PendingStep]:
    """The third step made ahead fails when its result is asked for."""
    made = 0

    class Failing:
        def result(self) -> StepResult:
            return fail()

    def launch(plan: StepPlan) -> PendingStep:
        nonlocal made
        made += isinstance(plan, DecodePlan) and plan.follows is not None
        return Failing() if made >= 3 else device.launch(plan)

    return launch


@pytest.mark.parametrize("says", ["illegal memory access", "has been running for more than"])
def test_a_step_under_way_that_crashes_or_never_ends_answers_every_request_once(says: str) -> None:
    stuck = threading.Event()

    def fail() -> StepResult:
        if says != "illegal memory access":
            stuck.wait(20)
        raise RuntimeError("illegal memory access")

    engine, device = fake_engine(overlap="on", watchdog_s=0.2)
    engine.steps.launch = broken_launch(device, fail)
    loop, got = EngineLoop(engine), list[TokenDelta]()
    for rid in ("a", "b"):
        loop.submit(ask(rid, PROMPT, max_new_tokens=30), got.extend)
    loop.start()
    until(lambda: loop.num_open == 0)
    assert isinstance(loop.error, EngineDead)
    stuck.set()
    loop.stop()
    assert sorted(delta.rid for delta in got if delta.finish) == ["a", "b"]
    assert all(says in (delta.finish.message or "") for delta in got if delta.finish)


def test_steps_wait_for_tokens_while_guesses_come_true_and_are_launched_ahead_again_soon_after() -> None:
    """Of 60 tokens 20 can be guessed. Then eight steps without a draft wait, and each sixteenth."""
    engine, _ = fake_engine(overlap="on")
    ids, plans, launch = continuation(PROMPT, 60), list[DecodePlan](), engine.steps.launch
    engine.scheduler.features["speculation"] = Told(engine, {("a", 0): ids[:20]}, length=3)

    def watched(plan: StepPlan) -> PendingStep:
        plans.extend([plan] if isinstance(plan, DecodePlan) else [])
        return launch(plan)

    engine.steps.launch = watched
    engine.submit(ask("a", PROMPT, max_new_tokens=60))
    assert [token for delta in finish_all(engine) for token in delta.token_ids] == ids
    kinds = "".join("d" if plan.draft_rows else "a" if plan.follows is not None else "w" for plan in plans)
    assert re.fullmatch(r"w?[dw]+d(w{8})(a+)w(a+)w?a*", kinds), kinds


def test_steps_do_not_wait_for_tokens_where_none_has_room_for_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "MOST_ROWS", 3)
    engine, _ = fake_engine(overlap="on")
    scheduler = engine.scheduler
    scheduler.features["speculation"] = Speculation(scheduler.kv, scheduler.counters, step_s={}, clock=lambda: 0.0)
    plans, launch = list[DecodePlan](), engine.steps.launch

    def watched(plan: StepPlan) -> PendingStep:
        plans.extend([plan] if isinstance(plan, DecodePlan) else [])
        return launch(plan)

    engine.steps.launch = watched
    for rid in ("a", "b"):
        engine.submit(ask(rid, PROMPT, max_new_tokens=30))
    finish_all(engine)
    assert sum(plan.follows is None for plan in plans) <= 2
    assert len(plans) > 25
