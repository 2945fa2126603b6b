"""The scheduler over real pools and a fake device whose output depends on every slot it reads;
and what a request holds where no layer sees further back than a window."""

from typing import Any
from unittest.mock import Mock

import pytest

from replicas.errors import Fault
from replicas.request import Req, ReqState
from replicas.scheduler.decode import AheadGate, sample_row
from replicas.scheduler.plan import LOGITS_CHUNK, DecodePlan, ExtendPlan
from replicas.scheduler.prefill import Refusal
from replicas.scheduler.rounds import PATIENCE_S, Deadlines
from replicas.types import Finish, FinishReason
from tests.fakes import continuation
from tests.harness import Bench, choice_of, retract

CACHED = list(range(12))  # three pages of 4


def test_a_request_is_prefilled_then_decoded_to_its_length() -> None:
    """SPEC F01, F08, F16: one extend step, then one decode step a token."""
    bench = Bench()
    req = bench.submit([1, 2, 3, 4, 5], max_new_tokens=3)
    bench.run()
    assert [type(plan) for plan in bench.plans] == [ExtendPlan, DecodePlan, DecodePlan]
    assert req.output_ids.tolist() == continuation([1, 2, 3, 4, 5], 3)
    assert req.finish == Finish(reason=FinishReason.LENGTH)
    assert req.holding is None


def test_a_long_prompt_runs_in_chunks_and_is_not_overtaken() -> None:
    """SPEC F06: at most one request is mid-prompt, and it goes first in the next step."""
    bench = Bench(chunked_prefill_size=16)
    long = bench.submit(list(range(40)), max_new_tokens=2)
    short = bench.submit([900, 901], max_new_tokens=2)
    bench.step()
    assert bench.scheduler.queues.chunked is long
    assert long.computed_len == 16
    assert short.state is ReqState.WAITING
    bench.run()
    assert [len(row.token_ids) for plan in bench.plans if isinstance(plan, ExtendPlan) for row in plan.rows] == [
        16, 16, 8, 2,
    ]  # fmt: skip


def test_different_salts_never_share_a_page() -> None:
    """SPEC E20."""
    bench = Bench(page_size=4)
    bench.submit(list(range(12)), cache_salt="a")
    bench.run()
    other = bench.submit(list(range(12)), cache_salt="b")
    bench.run()
    assert other.cached_tokens == 0


def test_equal_prompts_that_arrive_together_are_computed_once() -> None:
    """SPEC F04: the followers wait a step, then reuse what the first computed."""
    bench = Bench(page_size=4, chunked_prefill_size=256, context_len=256, num_pages=128, in_batch_prefix_len=32)
    reqs = [bench.submit([*range(64), 500 + i], max_new_tokens=2) for i in range(4)]
    bench.step()
    assert set(bench.scheduler.last.refusals.values()) == {Refusal.SHARED_PREFIX}
    bench.run()
    assert [req.cached_tokens for req in reqs] == [0, 64, 64, 64]
    assert bench.scheduler.counters["prefill_tokens"] == 65 + 3


def test_equal_prompts_of_other_salts_do_not_wait_for_each_other() -> None:
    """A wait would tell a tenant by the clock that another has sent its prompt: both run in the first step."""
    bench = Bench(page_size=4, chunked_prefill_size=256, context_len=256, num_pages=128, in_batch_prefix_len=32)
    for salt in "ab":
        bench.submit(range(64), max_new_tokens=2, cache_salt=salt)
    bench.step()
    assert (bench.scheduler.counters["prefill_tokens"], bench.scheduler.last.refusals) == (128, {})
    bench.run()


def test_what_was_reserved_for_output_is_reserved_again_after_a_pause() -> None:
    """SPEC F11: 40 decode steps lower the share; nothing has decoded when the next request comes."""
    bench = Bench(new_token_ratio=0.5, min_new_token_ratio=0.1)
    bench.submit([1, 2, 3], max_new_tokens=41)
    bench.run()
    assert bench.scheduler._ratio.value < 0.5
    bench.submit([4, 5, 6], max_new_tokens=41)
    bench.step()
    assert bench.scheduler._ratio.value == 0.5


@pytest.mark.parametrize(("priorities", "retractions"), [("off", (0, 1)), ("on", (1, 0))])
def test_a_full_pool_retracts_the_lowest_priority_then_the_least_output(
    priorities: str, retractions: tuple[int, int]
) -> None:
    """SPEC F11: the tokens of a retracted request are kept and not made again."""
    bench = Bench(num_pages=8, page_size=4, new_token_ratio=0.0, min_new_token_ratio=0.0, priorities=priorities)
    first = bench.submit([1, 2, 3, 4], max_new_tokens=20)
    for _ in range(3):
        bench.step()
    second = bench.submit([5, 6, 7, 8], max_new_tokens=20, priority=5)
    bench.run()
    assert (first.num_retractions, second.num_retractions) == retractions


@pytest.mark.parametrize("prompts", [(4, 7), (7, 4)])
def test_of_equal_outputs_the_longest_prompt_is_retracted(prompts: tuple[int, int]) -> None:
    """SPEC F11: it gives back the most pages; the order in which they joined does not matter."""
    bench = Bench(num_pages=8, page_size=4, new_token_ratio=0.0, min_new_token_ratio=0.0)
    reqs = [bench.submit([100 * i + t for t in range(length)], max_new_tokens=12) for i, length in enumerate(prompts)]
    bench.run()
    assert {req.prompt_len: req.num_retractions for req in reqs} == {4: 0, 7: 1}


def test_a_retraction_has_admission_reserve_more_so_that_none_is_retracted_again() -> None:
    """SPEC F11: nothing was reserved for output. Four requests of 8 pages each share 10."""
    bench = Bench(num_pages=10, page_size=4, new_token_ratio=0.0, min_new_token_ratio=0.0)
    reqs = [bench.submit([10 * i + t for t in range(4)], max_new_tokens=28) for i in range(4)]
    bench.run()
    assert sorted(req.num_retractions for req in reqs) == [0, 1, 1, 1]


def test_a_cached_prefix_that_a_request_reuses_is_not_counted_as_memory_that_it_could_evict() -> None:
    """SPEC F05: the prefix is locked before memory is counted. 4 pages of 8 are cached, the runner holds 1: 3 are free.
    The second needs 1 token beyond its prefix and reserves 12; evicting its own prefix would make room for that.
    """
    bench = Bench(num_pages=8, page_size=4, new_token_ratio=1.0, min_new_token_ratio=1.0)
    bench.submit(list(range(16)), max_new_tokens=1)
    bench.run()
    runner = bench.submit([900, 901], max_new_tokens=4)
    bench.step()
    again = bench.submit([*range(16), 77], max_new_tokens=12)
    bench.step()
    assert bench.scheduler.last.refusals == {(again.rid, 0): Refusal.MEMORY}
    bench.run()
    assert (again.cached_tokens, again.num_retractions, runner.num_retractions) == (16, 0, 0)


def test_a_running_request_gives_the_tree_nothing_before_it_ends() -> None:
    """SPEC E14: one page of prompt is committed after prefill; pages filled in decode follow at the end."""
    bench = Bench(page_size=4)
    req = bench.submit([1, 2, 3, 4], max_new_tokens=12)
    bench.step()
    while req.finish is None:
        assert bench.kv.store.stats().protected_pages == 1
        bench.step()
    assert bench.kv.store.stats().evictable_pages == (4 + 12 - 1) // 4  # the last token's K/V is never computed


def test_admission_reserves_output_so_that_no_request_is_retracted() -> None:
    """SPEC F05: with the whole output reserved, the second waits for the first."""
    bench = Bench(num_pages=8, page_size=4, new_token_ratio=1.0, min_new_token_ratio=1.0)
    first = bench.submit([1, 2, 3, 4], max_new_tokens=20)
    second = bench.submit([5, 6, 7, 8], max_new_tokens=20)
    bench.step()
    assert second.state is ReqState.WAITING
    assert list(bench.scheduler.last.refusals.values()) == [Refusal.MEMORY]
    assert bench.scheduler.blocked == "pool"
    bench.run()
    assert bench.scheduler.blocked == ""
    assert first.num_retractions + second.num_retractions == 0


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_an_abort_at_any_stage_gives_everything_back_but_the_reusable_prefix(steps: int) -> None:
    """SPEC F17: waiting (0), mid-prompt (1, 2), decoding (5)."""
    bench = Bench(chunked_prefill_size=16, page_size=4)
    req = bench.submit(list(range(40)), max_new_tokens=50)
    for _ in range(steps):
        bench.step()
    computed = req.computed_len
    bench.scheduler.finish(req, Finish(reason=FinishReason.ABORT))
    bench.scheduler.check()
    assert not bench.scheduler.has_work
    stats = bench.kv.store.stats()
    assert stats.protected_pages == stats.reserved_pages == 0
    assert stats.evictable_pages == computed // 4
    bench.scheduler.finish(req, Finish(reason=FinishReason.ABORT))  # idempotent
    assert bench.scheduler.counters["aborted"] == 1


@pytest.mark.parametrize("prompt_len", [5, 40])
def test_a_prompt_whose_request_ends_while_its_step_is_under_way_gives_back_what_it_holds(prompt_len: int) -> None:
    """A whole prompt, and the first chunk of one. The other's token stays the other's."""
    bench = Bench(chunked_prefill_size=16)
    other = bench.submit([1, 2, 3], max_new_tokens=3)
    gone = bench.submit(list(range(100, 100 + prompt_len)), max_new_tokens=3)
    plan = bench.scheduler.schedule()
    assert isinstance(plan, ExtendPlan)
    assert len(plan.rows) == 2
    bench.scheduler.finish(gone, Finish(reason=FinishReason.ABORT))
    tokens = bench.scheduler.apply(plan, bench.device.execute(plan))
    bench.scheduler.check()
    assert [token.req for token in tokens] == [other]
    assert bench.scheduler.counters["prefill_tokens"] == 3
    assert gone.holding is None
    bench.run()


def test_of_ended_requests_no_deadline_is_kept_whatever_is_open_before_them() -> None:
    bench = Bench()
    first = bench.submit([1, 2, 3], max_new_tokens=100, deadline_s=10.0)
    ended = [bench.submit([1, 2, 3, i], max_new_tokens=5, deadline_s=20.0 + i) for i in range(500)]
    for req in ended:
        bench.scheduler.finish(req, Finish(reason=FinishReason.ABORT))
    deadlines = bench.scheduler.deadlines
    kept = [deadlines._by_entry.get(entry) for entry in deadlines._heap]
    assert len(kept) <= 66
    assert [req for req in kept if req is not None] == [first]
    assert deadlines.next_s == 10.0
    bench.clock.now_s = 11.0
    bench.scheduler.schedule()
    assert (len(bench.scheduler.last.ended), deadlines.next_s) == (1, None)
    bench.scheduler.check()


def test_a_deadline_ends_a_request_wherever_it_is() -> None:
    bench = Bench()
    running = bench.submit([1, 2, 3], max_new_tokens=100, deadline_s=0.05)
    bench.step()
    bench.clock.now_s = 1.0
    bench.scheduler.schedule()
    assert bench.scheduler.last.ended == [running]
    assert running.finish is not None
    assert running.finish.reason is FinishReason.ABORT
    assert running.finish.fault is Fault.TIMED_OUT
    bench.scheduler.check()


def test_higher_priority_starts_first() -> None:
    bench = Bench(max_running=1, priorities="on")
    low = bench.submit([1, 2, 3], max_new_tokens=2)
    high = bench.submit([4, 5, 6], max_new_tokens=2, priority=5)
    bench.step()
    assert (high.state, low.state) == (ReqState.RUNNING, ReqState.WAITING)
    assert bench.scheduler.last.refusals == {(low.rid, 0): Refusal.RUNNING_LIMIT}
    assert bench.scheduler.blocked == "slots"
    bench.run()


@pytest.mark.parametrize("queue", [{"policy": "lpm"}, {"policy": "fcfs"}, {"policy": "lpm", "lpm_max_queue": 1}])
def test_ageing_crosses_priorities_a_point_is_worth_ageing_s(queue: dict[str, object]) -> None:
    """Security note, item 8: a request that had waited for an hour stood behind three new ones of priority 1000."""
    bench = Bench(priorities="on", ageing_s=5.0, **queue)
    old = bench.submit([1, 2, 3])
    bench.clock.now_s = 49.0
    soon = bench.submit([4, 5, 6], priority=10)
    assert bench.scheduler.queues.waiting.ordered(bench.clock()) == [soon, old]
    bench.clock.now_s = 51.0
    late = [bench.submit([7, 8, i], priority=10) for i in range(3)]
    assert bench.scheduler.queues.waiting.ordered(bench.clock()) == [soon, old, *late]
    bench.run()


@pytest.mark.parametrize("queue", [{"policy": "lpm"}, {"policy": "fcfs"}, {"policy": "hrrn"}])
def test_what_has_waited_at_a_replica_that_is_gone_goes_before_what_came_after_it(queue: dict[str, object]) -> None:
    """A request whose replicas were killed one after another stood behind every new one each time, and never ran."""
    bench = Bench(ageing_s=5.0, **queue)
    bench.clock.now_s = 100.0
    new = bench.submit([1, 2, 3])
    bench.clock.now_s = 106.0
    moved = [bench.submit([4, 5, i], waited_s=waited_s) for i, waited_s in enumerate((3.0, 30.0, 60.0))]
    assert bench.scheduler.queues.waiting.ordered(bench.clock()) == [moved[2], moved[1], new, moved[0]]
    bench.run()


def test_priorities_are_off_unless_asked_for() -> None:
    """A client that may send priorities can hold up all others."""
    bench = Bench(max_running=1)
    first = bench.submit([1, 2, 3], max_new_tokens=2)
    pushy = bench.submit([4, 5, 6], max_new_tokens=2, priority=1000)
    assert bench.scheduler.queues.waiting.ordered(bench.clock()) == [first, pushy]
    bench.step()
    assert (first.state, pushy.state, pushy.rank.priority) == (ReqState.RUNNING, ReqState.WAITING, 0)
    bench.run()


def test_longest_prefix_match_goes_first_until_another_has_aged() -> None:
    """SPEC F03."""
    bench = Bench(page_size=4, chunked_prefill_size=16, max_running=1, ageing_s=5.0, policy="lpm")
    bench.submit(list(range(12)), max_new_tokens=1)
    bench.run()
    stranger = bench.submit([700] * 12)
    cached = bench.submit([*range(12), 5])
    assert bench.scheduler.queues.waiting.ordered(bench.clock()) == [cached, stranger]
    assert bench.scheduler.queues.waiting.ordered(bench.clock() + 6.0) == [stranger, cached]
    bench.run()


def test_without_a_prefix_cache_the_answer_is_the_same() -> None:
    """SPEC E16."""
    bench = Bench(prefix_cache="chunk", chunked_prefill_size=16)
    reqs = [bench.submit(list(range(40)), max_new_tokens=3) for _ in range(3)]
    bench.run()
    assert all(req.cached_tokens == 0 for req in reqs)
    assert all(req.output_ids.tolist() == continuation(range(40), 3) for req in reqs)
    assert bench.kv.store.stats().free_pages == bench.kv.store.stats().num_pages


def test_the_last_token_of_a_prompt_is_never_one_that_the_cache_could_save() -> None:
    """It is computed for its logits: of 12 cached tokens, a prompt of exactly these can use 8, a longer one all."""
    bench = Bench(page_size=4, max_running=1, policy="lpm")
    bench.submit(CACHED, max_new_tokens=1)
    bench.run()
    exact = bench.submit(CACHED)
    longer = bench.submit([*CACHED, 5])
    waiting = bench.scheduler.queues.waiting
    assert waiting.ordered(bench.clock()) == [longer, exact]
    assert waiting.uncached_tokens() == (12 - 8) + (13 - 12)
    bench.run()
    assert (exact.cached_tokens, longer.cached_tokens) == (8, 12)


def test_a_prompt_waits_for_another_of_its_step_only_where_that_saves_it_enough() -> None:
    """SPEC F04: both begin with 64 equal tokens, of which 40 are cached: 24 are less than 32."""
    bench = Bench(page_size=4, chunked_prefill_size=256, context_len=256, num_pages=128, in_batch_prefix_len=32)
    bench.submit(list(range(41)), max_new_tokens=1)
    bench.run()
    reqs = [bench.submit([*range(64), 500 + i], max_new_tokens=2) for i in range(2)]
    bench.step()
    assert [req.state for req in reqs] == [ReqState.RUNNING] * 2
    bench.run()
    assert [req.cached_tokens for req in reqs] == [40, 40]


def test_a_retracted_request_finds_its_own_pages_again() -> None:
    """SPEC F11: nothing but the last page is computed again where no other request needed the memory."""
    bench = Bench(page_size=4)
    req = bench.submit(CACHED, max_new_tokens=8)
    while req.num_output < 4:
        bench.step()
    computed = bench.scheduler.counters["prefill_tokens"]
    retract(bench.scheduler, req)
    bench.scheduler.check()
    assert (req.state, bench.kv.store.stats().evictable_pages) == (ReqState.WAITING, 3)
    assert bench.scheduler.queues.waiting.uncached_tokens() == 4
    bench.run()
    assert bench.scheduler.counters["prefill_tokens"] - computed == 4


def together(**more: Any) -> tuple[Bench, list[Req]]:
    """A leader of 104 + 1 tokens in chunks of 64, and two requests that wait for its first 104."""
    bench = Bench(num_pages=128, context_len=256, chunked_prefill_size=64, mixed_steps=False, **more)
    return bench, [bench.submit([*range(104), 500 + i], max_new_tokens=2) for i in range(3)]


def states(reqs: list[Req]) -> list[ReqState]:
    return [req.state for req in reqs]


def test_prompts_that_wait_for_a_prefix_start_when_its_last_chunk_is_in_the_tree() -> None:
    bench, reqs = together()
    bench.step()
    bench.step()
    assert states(reqs) == [ReqState.RUNNING, ReqState.WAITING, ReqState.WAITING]
    bench.step()
    assert states(reqs) == [ReqState.RUNNING] * 3
    bench.run()
    assert [req.cached_tokens for req in reqs] == [0, 104, 104]
    assert bench.scheduler.counters["prefill_tokens"] == 105 + 2


def test_no_long_prompt_goes_before_those_who_wait_for_a_prefix() -> None:
    """The leader's last step leaves 23 tokens; a prompt of 120 that took them would be mid-prompt for two more."""
    bench, reqs = together(policy="fcfs")
    long = bench.submit(list(range(200, 320)), max_new_tokens=2)
    bench.step()
    bench.step()
    assert states([*reqs, long]) == [ReqState.RUNNING, *[ReqState.WAITING] * 3]
    bench.step()
    assert states([*reqs, long]) == [*[ReqState.RUNNING] * 3, ReqState.PREFILLING]
    bench.run()


def test_a_short_prompt_starts_while_others_wait_for_a_prefix() -> None:
    bench, reqs = together(policy="fcfs")
    short = bench.submit(list(range(200, 210)), max_new_tokens=2)
    bench.step()
    bench.step()
    assert states([*reqs, short]) == [ReqState.RUNNING, ReqState.WAITING, ReqState.WAITING, ReqState.RUNNING]
    bench.run()


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.ERROR])
def test_a_leader_that_ends_mid_prompt_releases_those_who_wait(reason: FinishReason) -> None:
    """Its first chunk is in the tree; the next one of them computes the rest."""
    bench, (leader, *others) = together()
    bench.step()
    assert leader.state is ReqState.PREFILLING
    bench.scheduler.finish(leader, Finish(reason=reason))
    bench.step()
    assert states(others) == [ReqState.RUNNING, ReqState.WAITING]
    while bench.scheduler.has_work:
        bench.step()
    assert [req.cached_tokens for req in others] == [64, 104]
    pool = bench.kv.store.stats()
    assert pool.free_pages + pool.evictable_pages == pool.num_pages


def test_a_prompt_whose_logprobs_are_wanted_waits_for_no_prefix() -> None:
    """It has to compute every token itself."""
    bench = Bench(num_pages=128, context_len=256, chunked_prefill_size=256)
    bench.submit([*range(64), 500], max_new_tokens=2)
    asks = bench.submit([*range(64), 501], max_new_tokens=2, prompt_logprobs_from=0)
    bench.step()
    assert asks.state is ReqState.RUNNING
    bench.run()


def test_the_logits_of_prompts_in_a_step_are_bounded_whoever_asks_for_them() -> None:
    """16 prompts of 512 tokens, whose logprobs are all wanted, and one of which none are: a row for each of 512 tokens
    in a step at most, though it has budget for all; every token's are made."""
    bench = Bench(num_pages=1000, context_len=600, chunked_prefill_size=8192, max_running=20)
    asks = [bench.submit([i, *range(511)], max_new_tokens=1, prompt_logprobs_from=0) for i in range(100, 116)]
    plain = bench.submit([99, *range(200)], max_new_tokens=1)
    rows, made = [], 0
    while bench.scheduler.has_work:
        plan = bench.step()
        if isinstance(plan, ExtendPlan):
            rows.append(sum(len(row.target_ids) for row in plan.rows if row.target_ids is not None))
            made += rows[-1]
    assert max(rows) <= LOGITS_CHUNK == 512
    assert made == 16 * 511
    assert len(rows) <= 18
    assert all(req.finish is not None for req in (*asks, plain))


def test_those_that_cannot_start_are_looked_at_again_after_16_steps_planned_without_a_look() -> None:
    """None ended; what running requests still reserve has shrunk, so that one may fit."""
    gate, steps = AheadGate(), 0
    gate.looked()
    while not gate.must_look:
        gate.planned()
        steps += 1
        assert steps <= 16
    assert steps == 16


def test_a_head_is_starved_once_it_has_lacked_memory_for_as_long_as_patience_lasts() -> None:
    deadlines = Deadlines()
    first, second = (choice_of(rid, [1, 2]) for rid in ("first", "second"))
    assert deadlines.starved([first], 1.0) == []
    assert deadlines.starved([first, second], PATIENCE_S) == []
    assert deadlines.starved([first, second], 1.0 + PATIENCE_S) == [first]
    assert deadlines.starved([second], 2.0 + PATIENCE_S) == []
    assert deadlines.starved([first, second], 2 * PATIENCE_S) == [second]  # the first was none meanwhile


def test_a_token_is_masked_by_its_requests_guide_or_by_the_one_behind_the_draft_before_it() -> None:
    own, behind = Mock(), Mock()
    req = choice_of("a", [1, 2])
    assert sample_row(req).mask is None
    assert sample_row(req, guide=behind).mask is behind.words
    req.guide = own
    assert [sample_row(req).mask, sample_row(req, guide=behind).mask] == [own.words, behind.words]


@pytest.mark.parametrize(("num_more", "is_ahead"), [(1, False), (2, True)])
def test_a_step_is_planned_ahead_of_any_token_but_a_requests_last(num_more: int, is_ahead: bool) -> None:
    bench = Bench()
    bench.submit([1, 2], max_new_tokens=1 + num_more)
    bench.step()
    assert bench.scheduler.schedule() is not None
    assert (bench.scheduler.schedule_ahead() is not None) == is_ahead


def held(bench: Bench) -> tuple[int, int]:
    """Pages that requests share with the tree, and their own."""
    stats = bench.kv.store.stats()
    return stats.protected_pages, stats.reserved_pages


def test_pages_before_the_window_go_back_one_by_one_and_the_prompts_lock_when_it_is_unseen() -> None:
    """A window of 6 and 2 tokens of slack, pages of 4: three pages at most, where a page is cut on both sides."""
    bench = Bench(window=6, page_size=4)
    prompt = list(range(50, 62))
    bench.submit(prompt, max_new_tokens=60)
    seen = []
    while bench.scheduler.has_work:
        bench.step()
        seen.append(held(bench))
    assert seen[0] == (3, 0)
    assert seen[7] == (3, 2), "token 19 is computed, which sees the prompt's last: nothing has gone back"
    assert seen[8] == (0, 2), "of 20 tokens the first 12 are unseen: the lock goes back"
    assert set(seen[8:-1]) == {(0, 2), (0, 3)}
    assert seen[-1] == (0, 0)
    again = bench.submit(prompt, max_new_tokens=1)
    bench.run()
    assert again.cached_tokens == 8, "the prompt stays in the tree, whole; one token of it is run"


def test_an_answer_within_the_window_is_kept_for_the_next_turn_and_one_beyond_is_not() -> None:
    for max_new_tokens, cached in ((9, 20), (40, 12)):
        bench = Bench(window=32, page_size=4)
        first = bench.submit(list(range(12)), max_new_tokens=max_new_tokens)
        bench.run()
        turn = bench.submit(first.ids[: first.num_tokens].tolist(), max_new_tokens=1)
        bench.run()
        assert turn.cached_tokens == cached


def test_a_request_that_gave_pages_back_is_retracted_and_goes_on_with_the_same_answer() -> None:
    bench = Bench(window=6, page_size=4)
    req, other = bench.submit([1, 2, 3] * 5, max_new_tokens=50), bench.submit([4] * 9, max_new_tokens=50)
    for _ in range(30):
        bench.step()
    assert req.holding is not None
    assert req.holding.behind.gone_len == 36
    retract(bench.scheduler, req)
    bench.scheduler.check()
    bench.run()
    assert (req.num_retractions, other.num_retractions) == (1, 0)
