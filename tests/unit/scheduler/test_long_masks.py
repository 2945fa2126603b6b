"""Rows whose masks take longer than a step: in none until the mask is there."""

from typing import Any

import pytest

from replicas.request import Req, ReqState
from replicas.scheduler.precedence import StepTimes
from replicas.scheduler.prefill import Refusal
from replicas.scheduler.tokens import LONG_MASK_S
from replicas.types import Finish, FinishReason
from tests.harness import Bench, retract


class Slow:
    """The guide of an output whose masks take longer than a step, and are there when a test says so."""

    error = None
    mask_s = 10 * LONG_MASK_S

    def __init__(self) -> None:
        self.is_there = self.begun = False

    @property
    def due_s(self) -> float:
        return 0.0 if self.is_there else self.mask_s

    @property
    def is_pending(self) -> bool:
        return self.begun and not self.is_there

    def drop(self) -> None:
        self.begun = False

    def consume(self, token_id: int) -> bool:
        self.is_there = self.begun = False
        return True

    def forced(self) -> None:
        return None

    def words(self) -> None:
        assert self.is_there, "a step waited for it"

    def begin_masks(self, others: object, *, apart: bool = False, first: bool = False) -> None:
        self.begun |= apart


def submit(bench: Bench, prompt: list[int], guide: Slow, *, max_new_tokens: int, **request: Any) -> Req:
    """A request that has its guide before it waits, as an engine gives it."""
    req = bench.submit(prompt, max_new_tokens=max_new_tokens, **request)
    bench.scheduler.queues.waiting.remove(req)
    req.guide = guide
    bench.scheduler.queues.waiting.add(req)
    return req


def beside_one_that_is_free(**options: object) -> tuple[Bench, Req, Req, Slow]:
    """A request that runs, and one whose first mask was there and whose next one is not."""
    bench, guide = Bench(chunked_prefill_size=16, **options), Slow()
    free = bench.submit([1, 2, 3], max_new_tokens=40)
    slow = bench.submit([4, 5, 6], max_new_tokens=4)
    slow.guide, guide.is_there = guide, True
    bench.step()
    assert (free.num_output, slow.num_output) == (1, 1)
    return bench, free, slow, guide


def test_a_row_whose_mask_takes_longer_than_a_step_is_in_none_until_it_is_there() -> None:
    bench, free, slow, guide = beside_one_that_is_free()
    for _ in range(5):
        bench.step()
    assert (free.num_output, slow.num_output, guide.begun) == (6, 1, True)
    assert slow in bench.scheduler.queues.paused
    guide.is_there = True
    bench.step()
    assert (free.num_output, slow.num_output) == (7, 2)
    bench.step()
    assert (free.num_output, slow.num_output) == (8, 2)  # its third is not there


@pytest.mark.parametrize("begun", [True, False])
def test_where_nothing_else_runs_a_step_waits_for_a_mask_but_for_none_that_is_computed_apart(begun: bool) -> None:
    """Such a mask may stand behind others: the engine's thread would wait for all of them."""
    bench, free, slow, guide = beside_one_that_is_free()
    if begun:
        bench.step()
    assert guide.begun is begun
    bench.scheduler.finish(free, Finish(reason=FinishReason.ABORT))
    bench.scheduler.look_again()
    plan = bench.scheduler.schedule()
    assert (plan is None) is begun
    if begun:
        guide.is_there = True
        bench.step()
        assert slow.num_output == 2


def test_the_first_masks_of_two_that_wait_are_computed_at_a_time_and_of_none_that_has_ended() -> None:
    """Else those of running requests, and of other tenants' prompts, stand behind a thousand of them."""
    bench, guides = Bench(chunked_prefill_size=16), [Slow() for _ in range(5)]
    waiting = [submit(bench, [each, 1], guide, max_new_tokens=2) for each, guide in enumerate(guides)]
    bench.step()
    assert [guide.begun for guide in guides] == [True, True, False, False, False]
    bench.scheduler.finish(waiting[0], Finish(reason=FinishReason.ABORT))
    assert not guides[0].begun
    bench.step()
    assert [guide.begun for guide in guides[1:]] == [True, True, False, False]


def test_a_step_looks_at_two_first_masks_however_many_wait_and_at_none_that_is_there() -> None:
    class Counted(Slow):
        looks = 0

        @property
        def due_s(self) -> float:
            Counted.looks += 1
            return super().due_s

    bench = Bench(chunked_prefill_size=16, max_running=1)
    bench.submit([1, 2], max_new_tokens=40)
    bench.step()
    guides = [Counted() for _ in range(100)]
    for guide in guides:
        submit(bench, [3, 4], guide, max_new_tokens=2)
    masks = bench.scheduler.features["masks"]
    for each in guides[:90]:
        each.is_there = True
    masks.looks(0.0)
    assert (Counted.looks, [each.begun for each in guides].index(True)) == (92, 90)
    masks.looks(0.0)
    assert Counted.looks == 94


def test_a_prompt_waits_for_a_long_first_mask_and_others_pass_it() -> None:
    bench, guide = Bench(chunked_prefill_size=16), Slow()
    slow, free = submit(bench, [4, 5, 6], guide, max_new_tokens=2), bench.submit([1, 2, 3], max_new_tokens=40)
    bench.step()
    assert (slow.state, guide.begun, free.num_output) == (ReqState.WAITING, True, 1)
    assert bench.scheduler.last.refusals[(slow.rid, 0)] is Refusal.MASK
    guide.is_there = True
    bench.step()
    assert slow.num_output == 1


def test_one_that_is_paused_keeps_its_place_can_be_retracted_and_can_end() -> None:
    bench, _, slow, _ = beside_one_that_is_free(max_running=2)
    bench.step()
    third = bench.submit([7, 8], max_new_tokens=1)
    bench.step()
    assert third.state is ReqState.WAITING  # both places are taken
    retract(bench.scheduler, slow)
    assert slow.holding is None
    assert not bench.scheduler.queues.paused
    bench.step()
    assert third.finish is not None
    bench.scheduler.finish(slow, Finish(reason=FinishReason.ABORT))
    bench.run()
    bench.kv.check_idle()


def test_the_seconds_of_a_mask_are_charged_as_the_tokens_of_that_time() -> None:
    bench, _, _, _ = beside_one_that_is_free()
    waiting = bench.scheduler.queues.waiting
    masked = bench.submit([9, 9], max_new_tokens=4, tenant="masked")
    masked.guide, waiting.step_times = Slow(), StepTimes(token_s=0.001)
    masked.guide.is_there = True
    before = waiting.shares.credit("masked")
    bench.step()
    assert masked.num_output == 1
    assert waiting.shares.credit("masked") == before - 2 - 20  # its prompt, and 20 ms


def test_steps_are_planned_ahead_while_a_first_mask_is_missing_and_not_once_it_is_there() -> None:
    """A step that is planned ahead makes room for no prompt: the gate alone would let sixteen of them pass."""
    bench, guide = Bench(chunked_prefill_size=16), Slow()
    bench.submit([1, 2, 3], max_new_tokens=60)
    bench.step()
    waits, scheduler = submit(bench, [4, 5, 6], guide, max_new_tokens=4), bench.scheduler
    plan = scheduler.schedule()
    assert scheduler.last.refusals[(waits.rid, 0)] is Refusal.MASK
    ahead = scheduler.schedule_ahead()
    assert plan is not None
    assert ahead is not None
    scheduler.apply(plan, bench.device.execute(plan))
    guide.is_there = True
    assert scheduler.schedule_ahead() is None
    scheduler.apply(ahead, bench.device.execute(ahead))
    bench.step()
    assert waits.num_output == 1


@pytest.mark.parametrize("runs", [False, True])
def test_a_request_whose_mask_cannot_be_begun_ends_and_no_other(runs: bool) -> None:
    class Broken(Slow):
        def begin_masks(self, others: object, *, apart: bool = False, first: bool = False) -> None:
            raise RuntimeError("can't start new thread")

    bench, free, slow, _ = beside_one_that_is_free()
    if runs:
        slow.guide = Broken()
    else:
        bench.scheduler.finish(slow, Finish(reason=FinishReason.ABORT))
        slow = submit(bench, [4, 5, 6], Broken(), max_new_tokens=4)
    bench.step()
    assert slow.finish is not None
    assert (slow.finish.reason, slow.finish.retry_as) == (FinishReason.ERROR, "step_failed")
    assert bench.scheduler.last.ended == [slow]
    assert (free.num_output, free.finish) == (2, None)
    bench.run()
    bench.kv.check_idle()


@pytest.mark.parametrize("request_", [{"tenant": "other"}, {"tenant": "flood", "priority": 5}])
def test_a_flood_of_first_masks_is_passed_by_another_tenant_s_and_by_a_higher_priority_s(
    request_: dict[str, Any],
) -> None:
    """The two that are begun stay so: the next place is that of the first in the order of the queue."""
    bench = Bench(chunked_prefill_size=16, priorities="on")
    flood, guide = [Slow() for _ in range(6)], Slow()
    for each, masked in enumerate(flood):
        submit(bench, [each, 1], masked, max_new_tokens=1, tenant="flood")
    bench.step()
    waits = submit(bench, [70, 1], guide, max_new_tokens=1, **request_)
    bench.step()
    assert [each.begun for each in (*flood, guide)] == [True, True, False, False, False, False, False]
    flood[0].is_there = True
    bench.step()
    assert [each.begun for each in (*flood[1:], guide)] == [True, False, False, False, False, True]
    guide.is_there = True
    bench.step()
    assert waits.num_output == 1
