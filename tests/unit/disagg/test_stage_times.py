"""Where each request says that its time went. The clock of these engines moves 10 ms a step, or as a test says."""

from dataclasses import replace

import pytest

from replicas.request import ReqState
from replicas.scheduler.plan import StepPlan, StepResult
from replicas.types import Finish, FinishReason, StageTimes, TokenDelta
from tests.fakes import FakeDevice
from tests.harness import Clock, ask, fake_engine, finish_all
from tests.pair import Pair, Side


class SlowDevice:
    """An engine whose steps take a second of its clock each."""

    def __init__(self, **engine: object) -> None:
        self.clock = Clock()
        self.device: FakeDevice | None = None
        self.engine, self.device = fake_engine(execute=self._execute, clock=self.clock, **engine)  # type: ignore[arg-type]

    def _execute(self, plan: StepPlan) -> StepResult:
        assert self.device is not None
        self.clock.now_s += 1.0
        return self.device.execute(plan)


def ends(deltas: list[TokenDelta]) -> dict[tuple[str, int], StageTimes]:
    """Of each choice, from its last delta; before it only its first token has stages, those before decode."""
    found: dict[tuple[str, int], StageTimes] = {}
    begun: dict[tuple[str, int], StageTimes] = {}
    for delta in deltas:
        choice = delta.rid, delta.index
        if delta.finish is not None:
            assert delta.stages is not None
            found[choice] = delta.stages
            assert begun.get(choice, delta.stages) in (delta.stages, replace(delta.stages, decode_s=0.0))
        else:
            assert (delta.stages is None) == (not delta.token_ids or choice in begun)
            if delta.stages is not None:
                begun[choice] = delta.stages
    return found


def last(side: Side, rid: str) -> tuple[StageTimes, Finish]:
    delta = side.deltas[rid, 0][-1]
    assert delta.stages is not None
    assert delta.finish is not None
    return delta.stages, delta.finish


def total(stages: StageTimes) -> float:
    return stages.queue_s + stages.prefill_s + stages.transfer_s + stages.decode_s


def test_queue_prefill_and_decode_of_a_request_are_the_steps_it_sat_in() -> None:
    slow = SlowDevice()
    engine = slow.engine
    deltas = engine.submit(ask("a", range(20), max_new_tokens=3))  # chunks of 16: two steps of prefill, two of decode
    slow.clock.now_s += 0.5
    deltas += finish_all(engine)
    assert ends(deltas) == {("a", 0): StageTimes(queue_s=0.5, prefill_s=2.0, decode_s=2.0)}


def test_a_request_that_waits_for_a_place_waits_in_the_queue() -> None:
    slow = SlowDevice(max_running=1)
    deltas = [*slow.engine.submit(ask("a", range(4), max_new_tokens=3)), *slow.engine.submit(ask("b", range(9, 12)))]
    deltas += finish_all(slow.engine)
    assert ends(deltas)["a", 0] == StageTimes(prefill_s=1.0, decode_s=2.0)
    assert ends(deltas)["b", 0] == StageTimes(queue_s=3.0, prefill_s=1.0, decode_s=7.0)


def test_an_abort_in_the_queue_and_one_in_the_answer_have_the_stages_they_came_to() -> None:
    slow = SlowDevice(max_running=1)
    slow.engine.submit(ask("a", range(4), max_new_tokens=9))
    slow.engine.submit(ask("b", range(9, 12)))
    for _ in range(3):
        slow.engine.step()
    assert ends(slow.engine.abort("b")) == {("b", 0): StageTimes(queue_s=3.0)}
    slow.clock.now_s += 0.25
    assert ends(slow.engine.abort("a")) == {("a", 0): StageTimes(prefill_s=1.0, decode_s=2.25)}


def test_a_retracted_request_counts_its_second_wait_as_decode() -> None:
    slow = SlowDevice(num_pages=8, page_size=4, max_running=2, new_token_ratio=0.1)
    deltas = []
    for rid, start in (("a", 0), ("b", 50)):
        deltas += slow.engine.submit(ask(rid, range(start, start + 8), max_new_tokens=16))
    deltas += finish_all(slow.engine)
    assert {delta.rid for delta in deltas if delta.usage.num_retractions} == {"a"}
    assert ends(deltas) == {
        ("b", 0): StageTimes(prefill_s=1.0, decode_s=15.0),
        ("a", 0): StageTimes(prefill_s=1.0, decode_s=22.0),  # 7 of them until b had ended, or computed again
    }


def test_a_request_that_was_complete_when_it_came_spent_nothing() -> None:
    engine, _ = fake_engine(clock=Clock())
    deltas = engine.submit(replace(ask("a", range(5), max_new_tokens=2), resumed_ids=(7, 8)))
    assert ends(deltas) == {("a", 0): StageTimes()}


def test_both_legs_of_a_kv_transfer_report_their_own_times() -> None:
    pair = Pair()
    pair.ask("a", range(10), max_new_tokens=4)
    pair.run()
    received, _ = last(pair.decode, "a")
    report = next(delta.kv_transfer for delta in pair.decode.deltas["a", 0] if delta.kv_transfer is not None)
    assert received.queue_s == report.grant_s
    assert received.transfer_s == pytest.approx(report.wait_s)
    assert (received.prefill_s, received.decode_s > 0) == (0.0, True)
    sent, finish = last(pair.prefill, "a")
    assert finish.reason is FinishReason.HANDED_OFF
    assert sent.transfer_s > 0
    assert sent.decode_s == 0.0


def test_a_leg_that_is_computed_where_it_decodes_reports_the_lost_transfer_and_its_second_wait() -> None:
    pair = Pair()
    start_s = pair.clock.now_s
    pair.ask("a", range(10), max_new_tokens=4)
    pair.until(pair.decode, "a", ReqState.RECEIVING)
    req = pair.decode.engine.find("a")
    assert req is not None
    pair.clock.now_s += 2.0
    pair.wire.fail(1)
    pair.decode.take(pair.decode.engine.poll())  # heard: it waits again
    assert req.state is ReqState.WAITING
    pair.clock.now_s += 0.5
    pair.run()
    stages, finish = last(pair.decode, "a")
    assert finish.reason is FinishReason.LENGTH
    assert stages.transfer_s == pytest.approx(2.0, abs=0.05)  # and the turns before it
    assert stages.queue_s == pytest.approx(0.5, abs=0.05)
    assert req.stamps.ended_s is not None
    assert total(stages) == pytest.approx(req.stamps.ended_s - start_s)


def test_an_abort_while_its_kv_is_on_its_way_is_transfer() -> None:
    pair = Pair()
    pair.ask("a", range(10), max_new_tokens=4)
    pair.until(pair.decode, "a", ReqState.RECEIVING)
    pair.clock.now_s += 3.0
    pair.decode.abort("a")
    stages, _ = last(pair.decode, "a")
    assert stages.transfer_s == pytest.approx(3.0)
    assert (stages.prefill_s, stages.decode_s) == (0.0, 0.0)
    pair.run()
