"""Random arrivals, aborts and tiny pools: every invariant after every step, every answer equal to the oracle's."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from replicas.scheduler.budget import prompt_tokens
from replicas.scheduler.orders import ORDERS
from replicas.scheduler.plan import ExtendPlan
from replicas.scheduler.precedence import MOST_LEFT_OUT, StepTimes
from replicas.types import Finish, FinishReason
from tests.harness import Bench

PREFIXES = [list(range(24)), [*range(8), 99], [7] * 30, []]

arrivals = st.tuples(
    st.just("arrive"),
    st.integers(0, len(PREFIXES) - 1),
    st.lists(st.integers(0, 3), min_size=1, max_size=12),
    st.integers(0, 20),  # max_new_tokens
    st.sampled_from(["", "salt"]),
    st.integers(0, 1),  # priority
    st.sampled_from(["", "one", "two"]),  # tenant
    st.sampled_from([None, None, 0.03, 0.5]),  # deadline_s; a step takes 0.01
    st.sampled_from([None, 0.0, 0.1, 1.0]),  # objective_s
)
actions = st.lists(
    st.one_of(arrivals, st.tuples(st.just("abort"), st.integers(0, 30)), st.tuples(st.just("step"), st.integers(1, 6))),
    max_size=40,
)


def step(bench: Bench, left_out: Counter[str], *, chunk: int, mixed: bool) -> None:
    """With mixing no request starves: each running one makes a token in every step, or is retracted, or waits out the
    prompt of another tenant, for MOST_LEFT_OUT steps in a row at most; ``left_out`` counts these, by rid. What prompts
    have of a step goes by those that do make one."""
    before = [(req, req.num_output, req.num_retractions) for req in bench.scheduler.queues.running]
    plan = bench.step()
    if isinstance(plan, ExtendPlan):
        most = prompt_tokens(chunk, plan.num_decode, page_size=bench.kv.page_size)
        assert plan.num_prompt_tokens <= most
    for req, num_output, num_retractions in before if mixed else ():
        timed_out = req.finish is not None and req.finish.reason is FinishReason.ABORT
        gave_way = req.num_retractions > num_retractions
        if req.num_output == num_output + 1 or gave_way or timed_out:
            left_out[req.rid] = 0
            continue
        left_out[req.rid] += 1
        assert req.asked.tenant, f"{req.rid} made no token"
        assert isinstance(bench.plans[-1], ExtendPlan)
        assert left_out[req.rid] <= MOST_LEFT_OUT, f"{req.rid} made no token for {left_out[req.rid]} steps"


@settings(max_examples=150, deadline=None)
@given(
    actions=actions,
    page_size=st.sampled_from([1, 2, 4, 16]),
    chunk=st.sampled_from([3, 16, 64]),
    spare=st.integers(0, 60),
    ratio=st.sampled_from([0.0, 0.5, 1.0]),
    prefix_cache=st.sampled_from(["radix", "chunk"]),
    policy=st.sampled_from([*sorted(ORDERS), "on_time", "on_time"]),
    mixed=st.booleans(),
    priorities=st.sampled_from(["off", "on"]),
    window=st.sampled_from([None, None, 3, 9]),
    s_per_token=st.sampled_from([0.0, 0.005]),
)
def test_every_request_ends_with_the_oracles_answer_and_nothing_leaks(
    actions: list[tuple[object, ...]],
    page_size: int,
    chunk: int,
    spare: int,
    ratio: float,
    prefix_cache: str,
    policy: str,
    mixed: bool,
    priorities: str,
    window: int | None,
    s_per_token: float,
) -> None:
    """Pool, Table, Radix, Same answer, Salt and Request, after every step."""
    longest = max(len(prefix) for prefix in PREFIXES) + 12 + 20  # one request alone always fits
    bench = Bench(
        num_pages=-(-(longest + spare) // page_size),
        page_size=page_size,
        max_running=4,
        prefix_cache=prefix_cache,
        window=window,
        chunked_prefill_size=chunk,
        new_token_ratio=ratio,
        min_new_token_ratio=min(ratio, 0.1),
        policy=policy,
        mixed_steps=mixed,
        priorities=priorities,
    )
    bench.scheduler.queues.waiting.step_times = StepTimes(s_per_token=s_per_token)
    left_out = Counter[str]()
    for action in actions:
        match action:
            case ("arrive", int(prefix), list(tail), int(length), str(salt), int(priority), str(tenant), deadline_s,
                  objective_s):  # fmt: skip
                prompt = [*PREFIXES[prefix], *tail]
                bench.submit(
                    prompt, max_new_tokens=length, cache_salt=salt, priority=priority, deadline_s=deadline_s,
                    objective_s=objective_s, tenant=tenant, weight=2.0 if tenant == "two" else 1.0,
                )  # fmt: skip
            case ("abort", int(index)) if index < len(bench.reqs):
                bench.scheduler.finish(bench.reqs[index], Finish(reason=FinishReason.ABORT))
                bench.scheduler.check()
            case ("step", int(count)):
                for _ in range(count):
                    step(bench, left_out, chunk=chunk, mixed=mixed)
    for _ in range(2000):
        if bench.scheduler.has_work:
            step(bench, left_out, chunk=chunk, mixed=mixed)
    bench.run(max_steps=0)
    counters = bench.scheduler.counters
    assert counters["finished"] + counters["aborted"] == len(bench.reqs)
