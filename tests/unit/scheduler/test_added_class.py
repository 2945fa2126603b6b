"""What a file adds to the scheduler with one entry: a class of requests, and a feature; both are in this file alone."""

from collections import Counter
from collections.abc import Sequence

import pytest

from replicas.request import CLASSES, Req, ReqState, RequestClass
from replicas.scheduler.plan import ExtendPlan, StepPlan
from replicas.scheduler.rounds import FEATURES, Feature
from replicas.scheduler.tokens import NewToken
from replicas.types import Finish, FinishReason
from tests.fakes import continuation
from tests.harness import Bench, choice_of

PROBE = RequestClass(has=lambda request: request.routing_key == "probe", level=1, chunk_share=0.5)


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of the highest class, of half a step at most."""
    monkeypatch.setitem(CLASSES, "probe", PROBE)


@pytest.mark.usefixtures("probes")
def test_a_request_of_an_added_class_goes_before_those_that_are_aged_or_of_any_priority_or_tenant() -> None:
    bench = Bench(max_running=1, priorities="on", ageing_s=0.05)
    bench.submit([1, 2], max_new_tokens=1)
    aged = bench.submit([3, 4], max_new_tokens=1, tenant="light")
    bench.clock.now_s += 1.0
    high = bench.submit([5, 6], max_new_tokens=1, priority=1000)
    probe = bench.submit([7, 8], max_new_tokens=1, routing_key="probe", priority=-1000, tenant="heavy")
    bench.run()
    admitted = [req.stamps.admitted_s or 0.0 for req in (probe, aged, high)]
    assert admitted[0] == min(admitted)


@pytest.mark.usefixtures("probes")
@pytest.mark.parametrize("max_running", [1, 2])
def test_a_request_of_an_added_class_has_the_row_or_the_step_of_a_lower_one_and_loses_neither(max_running: int) -> None:
    bench = Bench(max_running=max_running, page_size=4, chunked_prefill_size=16)
    running = bench.submit([1, 2], max_new_tokens=9)
    bench.step()
    long = bench.submit(list(range(100, 150)), max_new_tokens=2)  # it waits, or is in the middle of its prompt
    bench.step()
    probe = bench.submit([3, 4], max_new_tokens=6, routing_key="probe", tenant="light")
    bench.step()
    assert probe.num_output == 1
    assert (running.num_retractions, long.num_retractions) == ((1, 0) if max_running == 1 else (0, 1))
    bench.run()
    assert probe.num_retractions == 0
    assert running.output_ids.tolist() == continuation([1, 2], 9)


@pytest.mark.usefixtures("probes")
def test_a_prompt_of_an_added_class_has_its_part_of_a_step() -> None:
    bench = Bench(page_size=4, chunked_prefill_size=32)
    bench.submit(list(range(40)), max_new_tokens=1, routing_key="probe")
    bench.run()
    assert [plan.num_prompt_tokens for plan in bench.plans if isinstance(plan, ExtendPlan)] == [16, 16, 8]


class Witness(Feature):
    """Counts what the loop says of each request; while one that is named "alone" is open, no step is planned ahead."""

    def __init__(self) -> None:
        self.said = Counter[tuple[str, str]]()
        self.num_looks = 0
        self.open = set[str]()

    def opened(self, req: Req) -> None:
        self.said["opened", req.rid] += 1
        self.open.add(req.rid)

    def waits(self, req: Req) -> None:
        self.said["waits", req.rid] += 1

    def ended(self, req: Req) -> None:
        self.said["ended", req.rid] += 1
        self.open.remove(req.rid)

    def looks(self, now_s: float) -> None:
        self.num_looks += 1

    def needs_tokens(self, num_running: int) -> bool:
        return "alone" in self.open

    def applied(self, plan: StepPlan, reqs: Sequence[Req], tokens: Sequence[NewToken]) -> None:
        self.said.update(("token", token.req.rid) for token in tokens)


@pytest.fixture
def witness(monkeypatch: pytest.MonkeyPatch) -> Witness:
    found = Witness()
    monkeypatch.setitem(FEATURES, "witness", lambda queues, kv: found)
    return found


def test_an_added_feature_hears_of_each_request_from_its_beginning_to_its_end(witness: Witness) -> None:
    bench = Bench()
    bench.submit([1, 2], max_new_tokens=5)
    aborted, parked, again = (choice_of(rid, [3, 4], max_new_tokens=2) for rid in ("aborted", "parked", "again"))
    for req in (aborted, parked, again):
        bench.scheduler.park(req)
    bench.scheduler.take_back(again)
    bench.scheduler.unpark(parked)
    bench.scheduler.finish(aborted, Finish(reason=FinishReason.ABORT))
    bench.scheduler.finish(aborted, Finish(reason=FinishReason.ABORT))
    bench.run()
    assert parked.state is ReqState.FINISHED
    assert witness.said == {
        ("opened", "r0"): 1, ("waits", "r0"): 1, ("token", "r0"): 5, ("ended", "r0"): 1,
        ("opened", "parked"): 1, ("waits", "parked"): 1, ("token", "parked"): 2, ("ended", "parked"): 1,
        ("opened", "aborted"): 1, ("ended", "aborted"): 1, ("opened", "again"): 1, ("ended", "again"): 1,
    }  # fmt: skip
    assert witness.num_looks == len(bench.plans)


@pytest.mark.parametrize(("rid", "is_ahead"), [("alone", False), ("another", True)])
def test_an_added_feature_bars_that_a_step_is_planned_ahead(witness: Witness, rid: str, is_ahead: bool) -> None:
    bench = Bench()
    bench.scheduler.submit(choice_of(rid, [1, 2], max_new_tokens=5))
    bench.step()
    plan = bench.scheduler.schedule()
    assert plan is not None
    assert (bench.scheduler.schedule_ahead() is not None) == is_ahead
