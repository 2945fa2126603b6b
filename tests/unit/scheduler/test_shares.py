"""Shares: several tenants on one engine. The device is a fake whose output depends on every slot it reads."""

import math
from collections.abc import Sequence
from random import Random

import pytest

from replicas.request import Req, ReqState
from replicas.scheduler.plan import DecodePlan, ExtendPlan
from replicas.scheduler.precedence import QUANTUM, THROTTLE_S, StepTimes, TenantShares
from replicas.scheduler.prefill import Refusal
from replicas.scheduler.victims import Need, victims
from replicas.types import Finish, FinishReason, GenerateRequest
from tests.fakes import continuation
from tests.harness import Bench, choice_of

CHUNK = 16


class OneWaits:
    """A store tier that reads for one request and never comes to an end."""

    def __init__(self, waiting: Req) -> None:
        self.waiting = waiting

    def waits(self, req: Req, now_s: float) -> bool:
        return req is self.waiting

    def ask(self, req: Req, longest: int) -> None: ...
    def forget(self, req: Req) -> None: ...
    def check(self) -> None: ...


def prompt(number: int, length: int = 12) -> list[int]:
    return [1000 * number + at for at in range(length)]


def flood(bench: Bench, num: int, tenant: str, *, first: int = 0, **request: object) -> list[Req]:
    return [
        bench.submit(prompt(first + number), tenant=tenant, cache_salt=tenant, **request)  # type: ignore[arg-type]
        for number in range(num)
    ]


def served(reqs: Sequence[Req]) -> int:
    """Tokens that were computed for those of ``reqs`` that have ended."""
    return sum(req.num_tokens - 1 for req in reqs if req.finish is not None)


def trace(bench: Bench, tenant: str) -> list[tuple[object, ...]]:
    """The rows of each step of a random load of one tenant, in a pool that is too small."""
    rng = Random(1)
    for number in range(60):
        bench.submit(
            prompt(rng.randint(0, 9), rng.randint(4, 40)), max_new_tokens=rng.randint(1, 20), tenant=tenant,
            priority=rng.randint(0, 2), objective_s=rng.choice([0.05, 0.5, None]),
        )  # fmt: skip
        if number % 3 == 0:
            bench.step()
    bench.run()
    rows = [[int(getattr(row, "row", row)) for row in plan.rows] for plan in bench.plans]
    return [(type(plan).__name__, *each) for plan, each in zip(bench.plans, rows, strict=True)]


@pytest.mark.parametrize("policy", ["lpm", "on_time", "hrrn"])
def test_one_tenant_alone_runs_as_if_there_were_none(policy: str) -> None:
    without, one = (
        trace(Bench(policy=policy, num_pages=40, priorities="on", ageing_s=0.1), tenant) for tenant in ("", "a")
    )
    assert without == one
    assert len({name for name, *_ in one}) == 2


@pytest.mark.parametrize("policy", ["lpm", "fcfs", "on_time"])
def test_who_has_used_less_goes_before_the_queue_of_another_however_old_that_is(policy: str) -> None:
    bench = Bench(policy=policy, max_running=64, num_pages=256, ageing_s=0.05, lpm_max_queue=16)
    heavy = flood(bench, 40, "heavy", max_new_tokens=8)
    while bench.scheduler.queues.waiting.shares.credit("heavy") > 0.0:
        bench.step()
    backlog = [req for req in heavy if req.state is ReqState.WAITING]
    assert len(backlog) > 20
    light = bench.submit(prompt(500), tenant="light", cache_salt="light")
    assert bench.scheduler.queues.waiting.ordered(bench.clock())[0] is light
    bench.step()
    assert light.computed_len > 0
    bench.run()
    passed = [req.stamps.passed_s for req in backlog]
    assert max(passed) == pytest.approx(0.02)  # from the look above, and the step
    assert light.stamps.passed_s == 0.0


def test_a_flood_does_not_use_up_its_first_credit_before_others_but_a_burst_of_a_quantum_may() -> None:
    for num, first in ((QUANTUM + 1, "light"), (QUANTUM, "heavy")):
        bench = Bench(max_running=64, num_pages=256)
        heavy = flood(bench, 1, "heavy", max_new_tokens=8)
        bench.step()
        heavy += [bench.submit(prompt(at + 1, CHUNK), tenant="heavy", cache_salt="heavy") for at in range(num)]
        light = bench.submit(prompt(500), tenant="light", cache_salt="light")
        shares = bench.scheduler.queues.waiting.shares
        assert shares.credit("heavy") > 0.0
        assert bench.scheduler.queues.waiting.ordered(bench.clock())[0].asked.tenant == first
        bench.step()
        assert (light.computed_len > 0) == (first == "light")
        bench.run()


def of_tokens(most: float) -> StepTimes:
    """Steps of which a bounded one has ``most`` tokens: it takes twice the fixed part, and a token a second."""
    return StepTimes(fixed_s=most, prompt_s=1.0, row_s=1.0)


def bounded(bench: Bench, num_tokens: int) -> Bench:
    bench.scheduler.queues.waiting.step_times = of_tokens(num_tokens)
    return bench


def test_beside_the_first_credit_of_a_flood_steps_ease_too_and_its_prompts_give_way() -> None:
    bench = bounded(wide(), 10)
    for number in range(16):
        bench.submit(prompt(number, 60), tenant="heavy", cache_salt="heavy", max_new_tokens=40)
    shares = bench.scheduler.queues.waiting.shares
    while len(bench.scheduler.queues.running) < 3 or bench.scheduler.queues.chunked is None:
        bench.step()
    assert shares.credit("heavy") > 0.0
    light = bench.submit(prompt(500, 10), tenant="light", cache_salt="light", max_new_tokens=4)
    plan = bench.step()
    assert isinstance(plan, ExtendPlan)
    assert (len(plan.rows), plan.num_decode, light.num_output) == (1, 0, 1)
    plans = [bench.step() for _ in range(4)]
    assert max(plan.num_prompt_tokens for plan in plans if isinstance(plan, ExtendPlan)) <= 10
    assert shares.credit("heavy") > 0.0
    bench.run()


def test_of_one_tenants_long_prompts_none_gives_way_to_another() -> None:
    bench = Bench(max_running=64, num_pages=4096, context_len=2000, chunked_prefill_size=CHUNK)
    flood(bench, 1, "other", first=900, max_new_tokens=500)
    bench.step()
    longs = [bench.submit(prompt(1 + at, 400), tenant="one", cache_salt="one", max_new_tokens=4) for at in range(2)]
    while any(req.num_output == 0 for req in longs):
        bench.step()
    assert [req.num_retractions for req in longs] == [0, 0]


def test_a_step_has_no_more_tokens_for_a_prompt_beside_its_own_tenants_answers() -> None:
    bench = wide()
    flood(bench, 1, "other", first=900, max_new_tokens=1000)
    bench.step()
    first = bench.submit(prompt(1, 700), tenant="one", cache_salt="one", max_new_tokens=1)
    while first.finish is None:
        bench.step()
    answers = flood(bench, 14, "one", first=10, max_new_tokens=400)
    while any(req.num_output == 0 for req in answers):
        bench.step()
    bench.clock.now_s += 2 * THROTTLE_S
    bench.submit(prompt(1, 700) + prompt(70, 28), tenant="one", cache_salt="one", max_new_tokens=4)
    plan = bench.step()
    assert isinstance(plan, ExtendPlan)
    assert (plan.num_prompt_tokens, plan.num_decode) == (20, 15)


def test_who_has_credit_goes_before_a_debt_also_while_one_that_goes_first_cannot_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(policy="fcfs", max_running=64, num_pages=4096, context_len=2000, chunked_prefill_size=CHUNK)
    shares = bench.scheduler.queues.waiting.shares
    flood(bench, 60, "indebted", max_new_tokens=2)
    for number, tenant in ((900, "first"), (901, "another")):
        flood(bench, 1, tenant, first=number, max_new_tokens=1000)
    (blocked,) = flood(bench, 1, "first", first=902)
    monkeypatch.setattr(bench.kv, "store_tier", OneWaits(blocked))
    while shares.credit("indebted") > 0.0:
        bench.step()
    floods = flood(bench, 20, "flooding", first=100, max_new_tokens=2)
    owed = shares.credit("indebted")
    for _ in range(6):
        bench.step()
    assert sum(req.stamps.admitted_s is not None for req in floods) > 2
    assert shares.credit("indebted") > owed - 2 * CHUNK  # what it had begun, it may end


def test_one_long_prompt_is_no_flood() -> None:
    bench = wide()
    flood(bench, 1, "other", max_new_tokens=80)
    bench.step()
    bench.submit(prompt(1, 1000), tenant="long", cache_salt="long")
    flood(bench, 1, "other", first=2)
    assert bench.scheduler.queues.waiting.shares.credit("other") > 0.0
    assert bench.scheduler.queues.waiting.ordered(bench.clock())[0].asked.tenant == "long"


def test_who_always_waits_for_little_has_no_more_than_who_floods() -> None:
    bench = Bench(max_running=4, num_pages=256, page_size=4)
    one, two = flood(bench, 180, "one", max_new_tokens=2), flood(bench, 4, "two", first=250, max_new_tokens=2)
    while len(two) < 140:
        bench.step()
        num = 4 - sum(req.state is ReqState.WAITING for req in two)
        two += flood(bench, num, "two", first=250 + len(two), max_new_tokens=2)
    quantum = QUANTUM * CHUNK
    assert served(two) > 10 * quantum
    assert abs(served(two) - served(one)) < 2 * quantum
    bench.run()


def test_tenants_with_endless_queues_are_served_by_their_weights() -> None:
    bench = Bench(max_running=4, num_pages=256, page_size=4)
    one = flood(bench, 200, "one", max_new_tokens=2)
    two = flood(bench, 200, "two", first=200, max_new_tokens=2, weight=2.0)
    bench.step()
    while any(req.state is ReqState.WAITING for req in two):
        bench.step()
    quantum = QUANTUM * CHUNK
    assert served(two) > 20 * quantum
    assert abs(served(two) / 2 - served(one)) < 2 * quantum
    bench.run()


def test_a_higher_priority_goes_first_whatever_its_tenant_has_used() -> None:
    bench = Bench(max_running=2, priorities="on", num_pages=256)
    flood(bench, 30, "heavy", max_new_tokens=8)
    while bench.scheduler.queues.waiting.shares.credit("heavy") > 0.0:
        bench.step()
    light = bench.submit(prompt(500), tenant="light", cache_salt="light")
    urgent = bench.submit(prompt(501), tenant="heavy", cache_salt="heavy", priority=1)
    assert bench.scheduler.queues.waiting.ordered(bench.clock())[:2] == [urgent, light]
    bench.run()


def test_a_place_is_given_to_none_that_would_have_more_than_its_share_then() -> None:
    """Of 8 places among three, 2.67 each: the second has 2 and would have 3, the third has 1 and would have 2."""
    tenants = ["heavy"] * 5 + ["second"] * 2 + ["third"]
    running = [choice_of(f"r{at}", [1], tenant=tenant) for at, tenant in enumerate(tenants)]
    heads = [choice_of("head", [1], tenant=tenant) for tenant in ("second", "third")]
    bench = Bench()
    bench.scheduler.queues.running = running
    found = [victims(Need.PLACE, head, bench.scheduler.queues, bench.kv) for head in heads]
    assert [len(each) for each in found] == [0, 1]
    assert found[1][0] in running[:5]


def test_a_tenant_that_holds_every_place_gives_some_until_it_has_its_share() -> None:
    """One key's 2,560 choices kept another's first token away for 20 s."""
    bench = Bench(max_running=8, num_pages=256, chunked_prefill_size=64)
    heavy = flood(bench, 30, "heavy", max_new_tokens=60)
    while len(bench.scheduler.queues.running) < 8:
        bench.step()
    assert bench.scheduler.queues.waiting.shares.credit("heavy") > 0
    light = flood(bench, 6, "light", first=500, max_new_tokens=30)
    bench.step()
    assert light[0].computed_len > 0
    for _ in range(12):
        bench.step()
    running = [req.asked.tenant for req in bench.scheduler.queues.running]
    assert (running.count("heavy"), running.count("light")) == (4, 4)
    assert sum(req.num_retractions for req in heavy) == 4
    assert not any(req.num_retractions for req in light)
    bench.run()


def test_the_step_in_which_a_lighter_tenant_begins_holds_no_prompt_of_a_heavier_one_but_of_a_higher_priority() -> None:
    bench = Bench(max_running=64, num_pages=256, chunked_prefill_size=64, priorities="on")
    heavy = flood(bench, 40, "heavy", max_new_tokens=8)
    while bench.scheduler.queues.waiting.shares.credit("heavy") > 0.0:
        bench.step()
    light = bench.submit(prompt(500), tenant="light", cache_salt="light")
    bench.step()
    assert len(bench.plans[-1].rows) - bench.plans[-1].num_decode == 1  # type: ignore[union-attr]
    assert light.computed_len == 12
    assert Refusal.SHARE in bench.scheduler.last.refusals.values()
    waiting = sum(req.state is ReqState.WAITING for req in heavy)
    urgent = bench.submit(prompt(501), tenant="heavy", cache_salt="heavy", priority=1)
    bench.submit(prompt(502), tenant="light", cache_salt="light")
    bench.step()
    assert urgent.computed_len == 12
    assert len(bench.plans[-1].rows) - bench.plans[-1].num_decode == 2  # type: ignore[union-attr]
    bench.step()
    assert sum(req.state is ReqState.WAITING for req in heavy) < waiting  # it goes on in the next step
    bench.run()


def out_of_credit(bench: Bench, *, max_new_tokens: int = 60) -> None:
    """Have a tenant flood ``bench``, until it has requests that run and no credit."""
    flood(bench, 80, "heavy", max_new_tokens=max_new_tokens)
    while bench.scheduler.queues.waiting.shares.credit("heavy") > 0.0 or not bench.scheduler.queues.running:
        bench.step()


def test_running_requests_without_credit_make_no_token_in_the_step_in_which_a_lighter_tenant_begins() -> None:
    bench = bounded(Bench(max_running=64, num_pages=2048, chunked_prefill_size=64), 40)
    out_of_credit(bench)
    running = [*bench.scheduler.queues.running]
    made = [req.num_output for req in running]
    light = bench.submit(prompt(500, 40), tenant="light", cache_salt="light")
    plan = bench.step()
    assert isinstance(plan, ExtendPlan)
    assert (len(plan.rows), plan.num_decode, light.num_output) == (1, 0, 1)
    assert [req.num_output for req in running] == made
    plan = bench.step()
    assert isinstance(plan, ExtendPlan)
    assert plan.num_decode == len(running) + 1
    assert [req.num_output for req in running] == [num + 1 for num in made]
    assert [req.stamps.passed_s for req in running] == pytest.approx([0.01] * len(running))
    assert not any(req.num_retractions for req in running)
    bench.run()


def test_running_requests_are_left_out_of_no_two_steps_in_a_row() -> None:
    bench = bounded(Bench(max_running=64, num_pages=2048), 1)
    out_of_credit(bench)
    made = list[bool]()
    for number in range(6):
        bench.submit([1000 * (500 + number)], tenant="light", cache_salt="light", max_new_tokens=1)
        plan = bench.step()
        assert isinstance(plan, ExtendPlan)
        made.append(plan.num_decode > 0)
    assert made == [False, True] * 3
    bench.run()


def test_no_step_is_planned_ahead_behind_one_that_leaves_a_request_out() -> None:
    """Else one whose last token is due would be left out of that too, and of those behind it."""
    bench = bounded(Bench(context_len=400, num_pages=256), 4)
    heavy = bench.submit(prompt(1), tenant="heavy", max_new_tokens=150)
    while heavy.max_remaining > 5:
        bench.step()
    bench.submit(prompt(500, 4), tenant="light", max_new_tokens=60)
    while heavy.max_remaining > 1:
        bench.step()
    bench.submit(prompt(501, 4), tenant="light", max_new_tokens=1)
    plan = bench.scheduler.schedule()
    assert isinstance(plan, ExtendPlan)
    assert plan.num_decode == 1  # the first light one
    assert bench.scheduler.schedule_ahead() is None
    bench.scheduler.apply(plan, bench.device.execute(plan))
    bench.step()
    assert heavy.finish is not None
    bench.run()


def test_where_two_tenants_flood_neither_is_left_out() -> None:
    """What one gains so the other loses, and steps of few requests make fewer tokens."""
    bench = bounded(Bench(max_running=64, num_pages=2048), 4)
    for tenant, first in (("one", 0), ("two", 100)):
        flood(bench, 60, tenant, first=first, max_new_tokens=20)
    for _ in range(40):
        running = len(bench.scheduler.queues.running)
        plan = bench.step()
        assert isinstance(plan, ExtendPlan)
        assert plan.num_decode == running
    assert len({req.asked.tenant for req in bench.scheduler.queues.running}) == 2
    bench.run()


def test_beside_a_lighter_tenant_and_for_a_while_after_it_prompts_of_others_get_the_rest_of_a_bounded_step() -> None:
    bench = bounded(Bench(max_running=64, num_pages=2048, context_len=800, chunked_prefill_size=64), 12)
    out_of_credit(bench, max_new_tokens=2)
    for number in range(12):
        bench.submit(prompt(100 + number, 100), tenant="heavy", cache_salt="heavy", max_new_tokens=2)

    def longest() -> int:
        """The most prompt tokens of the next steps."""
        plans = [bench.step() for _ in range(3)]
        return max(plan.num_prompt_tokens for plan in plans if isinstance(plan, ExtendPlan))

    assert longest() > 20
    light = bench.submit(prompt(500, 4), tenant="light", cache_salt="light", max_new_tokens=5)
    bench.step()
    assert (light.num_output, longest()) == (1, 8)  # 12 but for its row, and the chunk ends with a page
    while light.finish is None:
        bench.step()
    assert longest() == 12
    bench.clock.now_s += THROTTLE_S
    assert longest() > 20
    bench.run()


def test_beside_a_lighter_tenants_answer_running_requests_of_a_flood_take_turns() -> None:
    """5 rows a step, of which one is the light one's: the others get 4 in turn, those that waited longest first."""
    bench = bounded(Bench(max_running=64, num_pages=2048, chunked_prefill_size=64), 5)
    out_of_credit(bench)
    queues = bench.scheduler.queues
    light = bench.submit(prompt(500, 5), tenant="light", cache_salt="light", max_new_tokens=60)
    bench.step()
    heavy = [req for req in queues.decoding if req is not light]
    made = {req: req.num_output for req in heavy}
    assert len(heavy) >= 8
    num_steps = 2 * len(heavy)
    for _ in range(num_steps):
        plan = bench.step()
        assert (plan.num_decode if isinstance(plan, ExtendPlan) else len(plan.rows)) == 5  # type: ignore[union-attr]
        assert bench.scheduler.schedule_ahead() is None
    assert light.num_output == 1 + num_steps
    turns = [req.num_output - made[req] for req in heavy]
    assert min(turns) > 0
    assert max(turns) - min(turns) <= 1
    bench.run()


def test_a_prompt_counts_for_no_more_than_a_step_can_hold() -> None:
    """Of 100 tokens a chunk of 64 leaves room for every row, however long the rest of the prompt is."""
    bench = bounded(wide(), 100)
    out_of_credit(bench, max_new_tokens=200)
    running = len(bench.scheduler.queues.running)
    assert 8 <= running <= 36
    light = bench.submit(prompt(500, 700), tenant="light", cache_salt="light")
    for _ in range(4):
        bench.step()
        assert not bench.scheduler.queues.paused
    assert light.computed_len > 0


def test_who_waits_for_a_place_leaves_none_out_whose_end_it_waits_for() -> None:
    """Both places belong to the heavy one, by its weight. One of its requests no step leaves out, for its priority."""
    bench = bounded(Bench(max_running=2, num_pages=256, priorities="on"), 1)
    for priority, max_new_tokens in ((1, 100), (0, 50)):
        flood(bench, 1, "heavy", first=priority, max_new_tokens=max_new_tokens, weight=3.0, priority=priority)
    while len(bench.scheduler.queues.running) < 2:
        bench.step()
    shares = bench.scheduler.queues.waiting.shares
    light = bench.submit(prompt(500), tenant="light", cache_salt="light", max_new_tokens=1)
    shares.charge(bench.reqs[0], 10_000)
    assert shares.credit("heavy") < 0.0
    for num in range(bench.reqs[1].num_output + 1, 20):
        assert bench.step() is not None
        assert bench.scheduler.last.refusals == {(light.rid, 0): Refusal.RUNNING_LIMIT}
        assert bench.reqs[1].num_output == num
    while light.state is ReqState.WAITING:
        assert bench.step() is not None
        assert bench.scheduler.last.made_progress
    assert not any(req.num_retractions for req in bench.reqs)
    bench.run()


def test_who_finds_no_memory_leaves_none_out_whose_end_it_waits_for() -> None:
    bench = bounded(Bench(num_pages=16, max_running=8, new_token_ratio=1.0, min_new_token_ratio=1.0), 1)
    flood(bench, 1, "heavy", max_new_tokens=40, weight=9.0)
    bench.step()
    light = bench.submit(prompt(500), tenant="light", cache_salt="light", max_new_tokens=20)
    bench.scheduler.queues.waiting.shares.charge(bench.reqs[0], 10_000)
    bench.step()
    assert bench.scheduler.last.refusals == {(light.rid, light.index): Refusal.MEMORY}
    for _ in range(4):
        assert bench.step() is not None
        assert not bench.scheduler.queues.paused
    assert light.state is ReqState.WAITING


def test_no_step_is_empty_where_the_prompt_that_others_made_room_for_does_not_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = bounded(Bench(max_running=64, num_pages=2048), 1)
    out_of_credit(bench)
    for req in list(bench.scheduler.queues.waiting):
        bench.scheduler.finish(req, Finish(reason=FinishReason.ABORT))
    while bench.scheduler.queues.chunked is not None:
        bench.step()
    running = len(bench.scheduler.queues.running)
    light = bench.submit(prompt(500), tenant="light", cache_salt="light")
    monkeypatch.setattr(bench.kv, "store_tier", OneWaits(light))
    plan = bench.step()
    assert isinstance(plan, DecodePlan)
    assert len(plan.rows) == running > 1
    assert not bench.scheduler.queues.paused


def light_and_heavy(num_light: int, num_heavy: int) -> tuple[TenantShares, list[Req], list[Req]]:
    """Requests that run, of a tenant with credit and of one without."""
    shares = TenantShares(QUANTUM * CHUNK)
    found = [[choice_of(f"{of} {at}", [1], tenant=of) for at in range(num)]
             for of, num in (("light", num_light), ("heavy", num_heavy))]  # fmt: skip
    for req in (*found[0], *found[1]):
        shares.opens(req)
        req.state = ReqState.RUNNING
    shares._credits = {"heavy": -1.0}
    return shares, found[0], found[1]


def left_out(shares: TenantShares, running: list[Req], begin: Sequence[Req] = (), *, most: float = 4) -> list[Req]:
    shares.throttle.leave_out(running, begin, lambda req: req.num_tokens, 0.0, of_tokens(most))
    return shares.throttle.left_out


def test_no_tenant_that_runs_more_than_its_share_is_light() -> None:
    shares, light, heavy = light_and_heavy(3, 4)
    assert left_out(shares, [*light, *heavy]) == heavy[:3]
    shares, light, heavy = light_and_heavy(5, 4)
    assert left_out(shares, [*light, *heavy]) == []
    assert shares.throttle.most_prompt_len(0, 0.0, of_tokens(1)) == math.inf


def test_of_light_prompts_that_fill_a_bounded_step_each_has_its_own_and_shorter_ones_share_one() -> None:
    for length, together in ((12, [1, 0]), (5, [1, 1])):
        bench = bounded(wide(), 10)
        out_of_credit(bench)
        lights = [bench.submit(prompt(500 + n, length), tenant=f"light {n}", max_new_tokens=4) for n in range(2)]
        bench.step()
        assert sorted((req.num_output for req in lights), reverse=True) == together
        bench.step()
        assert min(req.num_output for req in lights) > 0
        bench.run()


def test_where_nobody_floods_light_prompts_share_steps_however_many_run() -> None:
    bench = bounded(Bench(max_running=64, num_pages=4096, context_len=1600, chunked_prefill_size=256), 10)
    for n in range(30):
        bench.submit(prompt(n, 4), tenant=f"light {n}", max_new_tokens=60)
    while len(bench.scheduler.queues.waiting):
        bench.step()
    lights = [bench.submit(prompt(500 + n, 12), tenant=f"other {n}", max_new_tokens=4) for n in range(2)]
    bench.step()
    assert [req.num_output for req in lights] == [1, 1]
    bench.run()


def test_of_two_steps_with_prompts_of_light_tenants_one_has_rows_of_others_however_these_change() -> None:
    shares, _, heavy = light_and_heavy(0, 12)
    head = choice_of("head", [1] * 5, tenant="light")
    shares.opens(head)
    shares.waits(head)
    assert [num - len(left_out(shares, heavy[:num], [head])) for num in range(8, 13)] == [0, 1, 0, 1, 0]


def test_a_batch_beside_a_light_tenant_has_the_rest_of_a_bounded_step_and_ends() -> None:
    bench = bounded(Bench(max_running=64, num_pages=4096, context_len=1600, chunked_prefill_size=256), 12)
    batch = [bench.submit(prompt(n, 90), tenant="batch", max_new_tokens=9, offline=True) for n in range(12)]
    light = bench.submit(prompt(500, 5), tenant="light", max_new_tokens=600)
    bench.step()
    plans = list[object]()
    while not all(req.finish for req in batch):
        plans.append(bench.step())
        assert light.num_output == len(plans) + 1
    assert max(plan.num_prompt_tokens for plan in plans if isinstance(plan, ExtendPlan)) <= 12
    bench.run()


def test_the_tenants_of_many_rows_are_looked_at_once_and_not_at_all_where_steps_are_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shares, light, heavy = light_and_heavy(20, 200)
    asked, precedence = list[str](), shares.precedence
    monkeypatch.setattr(
        TenantShares, "precedence", lambda self, req: (asked.append(req.asked.tenant), precedence(req))[1]
    )
    assert len(left_out(shares, [*light, *heavy], most=100)) == 120
    assert sorted(asked) == ["heavy", "light"]
    asked.clear()
    assert left_out(shares, [*light, *heavy], most=1000) == []
    assert left_out(shares, [*light, *heavy], most=220 + CHUNK) == []
    assert asked == []


def test_of_waiting_heads_only_those_below_their_share_are_looked_up_in_the_cache() -> None:
    shares, _, heavy = light_and_heavy(0, 8)
    heads = [choice_of(f"head {of}", [1] * 5, tenant=of) for of in ("heavy", *"abcdef")]
    for req in heads:
        shares.opens(req)
        shares.waits(req)
    looked = list[Req]()
    shares.throttle.leave_out(
        heavy, heads, lambda req: (looked.append(req), 5)[1], 0.0, of_tokens(4)
    )
    assert looked == heads[1:5]  # which fill a step
    assert shares.throttle.left_out == heavy


def test_a_bounded_step_follows_what_every_step_takes() -> None:
    """4.8 times that on a fast replica, 0.25 s on a slower one, twice that where it is longer; none where nothing is
    known. So many of 21 rows, one of them the light one's, make a token."""
    for fixed_s, row_s, most in ((0.02, 0.01, 7), (0.06, 0.02, 9), (0.1, 0.02, 7), (12.0, 1.0, 12), (0.0, 1.0, 21)):
        shares, light, heavy = light_and_heavy(1, 20)
        times = StepTimes(fixed_s=fixed_s, row_s=row_s)
        shares.throttle.leave_out([*light, *heavy], [], len, 0.0, times)  # type: ignore[arg-type]
        assert len(shares.throttle.left_out) == 21 - most


def lengths(bench: Bench, *, own: int = 0, line: int = 0) -> list[int]:
    """The prompt tokens of each step of a tenant's burst, beside one long answer of another, behind a prompt of its own
    or a line of a batch of that many tokens."""
    bench.submit(prompt(900, 30), tenant="other", cache_salt="other", max_new_tokens=1000)
    bench.step()
    bench.clock.now_s += 2 * THROTTLE_S
    if own:
        bench.submit(prompt(901, own), tenant="one", cache_salt="one", max_new_tokens=60)
    if line:
        bench.submit(prompt(902, line), tenant="other", cache_salt="other", max_new_tokens=400, offline=True)
    for _ in range(30):
        bench.step()
    assert all(req.num_output for req in bench.reqs)
    flood_ = [bench.submit(prompt(n, 60), tenant="one", cache_salt="one", max_new_tokens=2) for n in range(24)]
    plans = []
    while any(req.num_output == 0 for req in flood_):
        plans.append(bench.step())
    return [plan.num_prompt_tokens for plan in plans if isinstance(plan, ExtendPlan)]


def wide() -> Bench:
    return Bench(max_running=64, num_pages=4096, context_len=1600, chunked_prefill_size=64)


def test_steps_ease_neither_for_a_tenants_own_light_prompt_nor_for_a_line_of_a_batch() -> None:
    plain = lengths(wide())
    assert max(plain) == 32
    assert lengths(wide(), own=4) == plain
    assert max(lengths(wide(), line=6)) == 32


@pytest.mark.parametrize("blocked", [False, True])
def test_steps_have_no_more_tokens_for_a_light_prompt_that_does_not_end_in_them(
    blocked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that waits for its pages; one that is longer than a step."""
    bench = wide()
    for number in range(60):
        bench.submit(prompt(number, 60), tenant="heavy", cache_salt="heavy", max_new_tokens=40)
    while bench.scheduler.queues.waiting.shares.credit("heavy") > 0.0 or len(bench.scheduler.queues.running) < 8:
        bench.step()
    light = bench.submit(prompt(700, 20 if blocked else 300), tenant="light", cache_salt="light", max_new_tokens=4)
    if blocked:
        monkeypatch.setattr(bench.kv, "store_tier", OneWaits(light))
    for _ in range(8):
        plan = bench.step()
        assert isinstance(plan, ExtendPlan)
        assert plan.num_prompt_tokens <= 32 if plan.num_decode else light.num_output == 1


def test_a_long_prompt_gives_way_between_two_chunks_and_loses_nothing_that_it_has_computed() -> None:
    bench = Bench(chunked_prefill_size=CHUNK, num_pages=256, context_len=400)
    long = bench.submit(prompt(1, 320), tenant="heavy", cache_salt="heavy", max_new_tokens=2)
    flood(bench, 4, "heavy", first=2)
    for _ in range(QUANTUM + 1):  # its quantum, and a chunk for which nobody waits
        bench.step()
    light = bench.submit(prompt(500, 8), tenant="light", cache_salt="light", max_new_tokens=2)
    bench.step()
    bench.step()
    assert light.state is not ReqState.WAITING
    assert long.num_retractions == 1
    bench.run()
    assert bench.scheduler.counters["prefill_tokens"] == 320 + 4 * 12 + 8
    assert long.output_ids.tolist() == continuation(prompt(1, 320), 2)


def test_a_long_prompt_of_which_nothing_would_be_kept_does_not_give_way() -> None:
    """Else two such prompts began anew by turns for ever."""
    bench = Bench(chunked_prefill_size=CHUNK, num_pages=256, context_len=400, prefix_cache="chunk")
    longs = [bench.submit(prompt(each, 320), tenant=str(each), max_new_tokens=1) for each in (1, 500)]
    bench.run()
    assert [long.num_retractions for long in longs] == [0, 0]


def test_when_pages_run_out_the_tenant_that_has_most_beyond_its_share_loses_them_first() -> None:
    bench = Bench(num_pages=24, page_size=4, max_running=8, new_token_ratio=0.0, min_new_token_ratio=0.0)
    heavy = flood(bench, 5, "heavy", max_new_tokens=40)
    light = bench.submit(prompt(500), tenant="light", cache_salt="light", max_new_tokens=40)
    bench.run()
    assert sum(req.num_retractions for req in heavy) > 0
    assert light.num_retractions == 0


def test_a_tenant_begins_with_a_whole_quantum_and_nothing_is_kept_of_one_that_has_gone() -> None:
    bench = Bench(num_pages=256)
    shares = bench.scheduler.queues.waiting.shares
    flood(bench, 30, "heavy")
    flood(bench, 30, "light", first=500)
    for _ in range(10):
        bench.step()
    assert shares.credit("heavy") < QUANTUM * CHUNK
    bench.run()
    assert (shares.credit("heavy"), shares.several) == (QUANTUM * CHUNK, False)


def test_tenant_and_weight_come_with_the_request() -> None:
    asked = GenerateRequest(rid="a", token_ids=[1, 2], tenant="t", weight=3.0)  # type: ignore[arg-type]
    req = Req.make(asked, index=0, now_s=0.0, eos_ids=frozenset())
    assert (req.asked.tenant, req.asked.weight) == ("t", 3.0)


def test_where_a_tenant_without_credit_waits_alone_all_begin_anew() -> None:
    shares = TenantShares(100)
    alone, runs = (choice_of(name, [1, 2], tenant=name) for name in ("alone", "runs"))
    for req in (alone, runs):
        shares.opens(req)
    shares.waits(alone)
    shares._credits = {"alone": 0.0, "runs": -50.0}
    assert shares.in_turn([alone]) == [alone]
    assert [shares.credit(req.asked.tenant) for req in (alone, runs)] == [0.0, 100.0]
