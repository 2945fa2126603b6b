"""The engine over real pools, scheduler and tokenizer, and a fake device."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from replicas.errors import Fault, InvalidRequest, Overloaded, PromptTooLong
from replicas.request import ReqState
from replicas.scheduler.plan import BROKEN, StepPlan, StepResult
from replicas.types import AdapterRef, Finish, FinishReason, GenerateRequest, SamplingParams, TokenIds
from tests.fakes import continuation
from tests.harness import ask, at_once, fake_engine, finish_all, retract

pytestmark = pytest.mark.model
PROMPT = [5, 6, 7, 8, 9]


def test_deltas_carry_every_token_once_and_the_last_one_says_why() -> None:
    engine, _ = fake_engine()
    engine.submit(ask("a", PROMPT))
    deltas = finish_all(engine)
    assert [token for delta in deltas for token in delta.token_ids] == continuation(PROMPT, 8)
    assert "".join(delta.text for delta in deltas) == engine.tokenizer.decode(continuation(PROMPT, 8), True)
    assert [delta.finish for delta in deltas[:-1]] == [None] * 7
    assert deltas[-1].finish == Finish(reason=FinishReason.LENGTH)
    assert deltas[-1].usage.prompt_tokens == 5
    assert deltas[-1].usage.completion_tokens == 8
    assert engine.open_rids == []


def test_an_engine_that_serves_no_adapters_refuses_a_request_with_one_rather_than_answer_it_by_the_model() -> None:
    engine, device = fake_engine()
    request = replace(ask("a", PROMPT), adapter=AdapterRef(identity="0" * 64, path="/adapters/a"))
    with pytest.raises(InvalidRequest, match="this replica serves its model alone"):
        engine.submit(request)
    assert (engine.open_rids, device.num_computed) == ([], 0)


def test_the_choices_of_one_request_share_the_prompts_pages() -> None:
    engine, device = fake_engine()
    prompt = list(range(100, 150))
    engine.submit(ask("a", prompt, n=3, max_new_tokens=2))
    deltas = finish_all(engine)
    finished = {delta.index: delta for delta in deltas if delta.finish is not None}
    assert sorted(finished) == [0, 1, 2]
    assert [finished[i].usage.cached_tokens for i in range(3)] == [0, 48, 48]
    assert device.num_computed == 50 + 2 + 2 + 3  # one prompt, two tails of 50 - 48, one decode step each


def test_a_stop_token_ends_the_request_and_makes_no_text() -> None:
    engine, _ = fake_engine()
    ids = continuation(PROMPT, 8)
    engine.submit(ask("a", PROMPT, stop_token_ids=(ids[3],)))
    deltas = finish_all(engine)
    assert [token for delta in deltas for token in delta.token_ids] == ids[:4]
    assert "".join(delta.text for delta in deltas) == engine.tokenizer.decode(ids[:3], True)
    assert deltas[-1].finish == Finish(reason=FinishReason.STOP, matched=ids[3])


@pytest.mark.parametrize("delivered", range(9))
def test_a_request_resumed_after_any_token_continues_exactly(delivered: int) -> None:
    """Failed over. Text and tokens join without a seam, even when all had been delivered."""
    engine, _ = fake_engine()
    engine.submit(ask("whole", PROMPT))
    whole = finish_all(engine)
    first_text = "".join(delta.text for delta in whole[:delivered])
    resumed = replace(ask("resumed", PROMPT), resumed_ids=tuple(continuation(PROMPT, delivered)))
    deltas = engine.submit(resumed) + finish_all(engine)
    assert [token for delta in deltas for token in delta.token_ids] == continuation(PROMPT, 8)[delivered:]
    assert first_text + "".join(delta.text for delta in deltas) == "".join(delta.text for delta in whole)
    assert deltas[-1].finish == Finish(reason=FinishReason.LENGTH)
    assert deltas[-1].usage.completion_tokens == 8


def test_output_beyond_the_context_ends_with_length() -> None:
    engine, _ = fake_engine()
    engine.submit(ask("a", range(120), max_new_tokens=1000))
    deltas = finish_all(engine)
    assert deltas[-1].usage.completion_tokens == 8
    assert deltas[-1].finish == Finish(reason=FinishReason.LENGTH)


def test_a_request_that_wants_no_output_ends_after_its_prompt() -> None:
    engine, _ = fake_engine()
    engine.submit(ask("a", PROMPT, max_new_tokens=0))
    (delta,) = finish_all(engine)
    assert delta.token_ids == ()
    assert delta.finish == Finish(reason=FinishReason.LENGTH)


def test_a_prompt_that_can_never_fit_is_refused_with_the_lengths() -> None:
    engine, _ = fake_engine()
    with pytest.raises(PromptTooLong, match=r"context length is 128 tokens\. .* in 128 tokens, .* at most 127 tokens"):
        engine.submit(ask("a", range(128)))
    small, _ = fake_engine(num_pages=4)
    with pytest.raises(PromptTooLong, match=r"context length is 16 tokens here .* is 128, the KV pool holds 16\)"):
        small.submit(ask("a", range(16)))


def test_wrong_requests_are_refused_and_leave_nothing_behind() -> None:
    engine, _ = fake_engine(max_queued_requests=2)
    empty = GenerateRequest(rid="a", token_ids=np.array([], dtype=np.int32))
    with pytest.raises(InvalidRequest, match="prompt: is empty"):
        engine.submit(empty)
    with pytest.raises(InvalidRequest, match=r"token ids must be in \[0, 1000\)"):
        engine.submit(ask("a", [1000]))
    with pytest.raises(InvalidRequest, match="top_p"):
        engine.submit(ask("a", PROMPT, top_p=0.0))
    engine.submit(ask("a", PROMPT))
    with pytest.raises(InvalidRequest, match="already open"):
        engine.submit(ask("a", PROMPT))
    with pytest.raises(Overloaded, match="3 requests would wait, at most 2 may"):
        engine.submit(ask("b", PROMPT, n=10))  # beside "a", 7 of 8 may run
    assert engine.open_rids == ["a"]
    finish_all(engine)


@pytest.mark.parametrize("kind", [list, tuple, np.array, lambda ids: np.array(ids, np.int64), torch.tensor])
def test_a_prompt_is_any_sequence_of_ints(kind: Callable[[list[int]], TokenIds]) -> None:
    request = GenerateRequest(rid="a", token_ids=kind([3, 1, 2]), sampling=SamplingParams(max_new_tokens=4))
    assert request.token_ids.dtype == np.int32
    assert request.token_ids.tolist() == [3, 1, 2]
    engine, _ = fake_engine()
    engine.submit(request)
    assert [token for delta in finish_all(engine) for token in delta.token_ids] == continuation([3, 1, 2], 4)


@pytest.mark.parametrize(
    ("prompt", "wanted"),
    [
        ("Hello", "must be a sequence of ints, got str: 'Hello'"),
        ([1, 2.5], r"must be a sequence of ints, got list: \[1, 2.5\]"),
        ([[1, 2], [3, 4]], "must be a sequence of ints, got list"),
        ([[1, 2], [3]], "must be a sequence of ints, got list"),
        (None, "must be a sequence of ints, got NoneType"),
        ([True], "must be a sequence of ints"),
        ([1, -1], r"token ids must be in \[0, 2\*\*31\)"),
        ([2**31], r"token ids must be in \[0, 2\*\*31\)"),
        ([2**70], r"token ids must be in \[0, 2\*\*31\)"),
    ],
)
def test_what_is_no_sequence_of_ints_is_refused_by_name(prompt: TokenIds, wanted: str) -> None:
    with pytest.raises(InvalidRequest, match=f"token_ids: {wanted}") as error:
        GenerateRequest(rid="a", token_ids=prompt)
    assert error.value.param == "token_ids"


@pytest.mark.parametrize("num_before", [0, 1, 2])
def test_a_request_is_refused_once_as_many_are_open_as_may_run_and_wait(num_before: int) -> None:
    """However many were there at the last step: a request that can start with the next step does not count."""
    engine, _ = fake_engine(max_running=2, max_queued_requests=4)
    for number in range(num_before):
        engine.submit(ask(f"r{number}", [number]))
    engine.step()
    for number in range(num_before, 6):
        engine.submit(ask(f"r{number}", [number]))
    with pytest.raises(Overloaded, match="5 requests would wait, at most 4 may"):
        engine.submit(ask("r6", [6]))
    deltas = finish_all(engine)
    ends = {delta.rid: delta.finish for delta in deltas if delta.finish is not None}
    assert ends == {f"r{number}": Finish(reason=FinishReason.LENGTH) for number in range(6)}


def test_while_memory_is_short_a_place_to_run_in_is_no_room() -> None:
    """8 may run, but the pool carries one: 2 more may wait, and again as many as ever once it is empty."""
    engine, _ = fake_engine(max_queued_requests=2, num_pages=10, chunked_prefill_size=64)
    engine.submit(ask("runs", range(24), max_new_tokens=16))
    engine.submit(ask("waits", range(100, 124), max_new_tokens=16))
    engine.step()
    engine.submit(ask("waits too", PROMPT))
    with pytest.raises(Overloaded, match="3 requests would wait, at most 2 may"):
        engine.submit(ask("late", PROMPT))
    engine.abort("waits")
    engine.abort("waits too")
    finish_all(engine)
    for number in range(10):
        engine.submit(ask(f"r{number}", PROMPT))
    with pytest.raises(Overloaded, match="3 requests would wait, at most 2 may"):
        engine.submit(ask("late", PROMPT))
    finish_all(engine)


def test_broken_logits_end_their_own_request_and_no_other() -> None:
    engine, device = fake_engine()

    def execute(plan: StepPlan) -> StepResult:
        result = device.execute(plan)
        pairs = zip(plan.sampling, result.token_ids, strict=True)
        broken = [BROKEN if row.params.seed == 13 else int(token) for row, token in pairs]
        return StepResult(token_ids=np.array(broken, dtype=np.int32))

    engine.steps.launch = at_once(execute)
    engine.submit(ask("sound", PROMPT))
    engine.submit(ask("broken", [50, 51], seed=13))
    deltas = finish_all(engine)
    ends = {delta.rid: delta.finish for delta in deltas if delta.finish is not None}
    assert ends["sound"] == Finish(reason=FinishReason.LENGTH)
    assert ends["broken"] is not None
    assert (ends["broken"].reason, ends["broken"].fault) == (FinishReason.ERROR, Fault.INTERNAL)
    assert [t for d in deltas if d.rid == "sound" for t in d.token_ids] == continuation(PROMPT, 8)
    engine.scheduler.check()


@pytest.mark.parametrize("new", [0, 1])
def test_a_request_that_fills_the_whole_pool_still_runs(new: int) -> None:
    """No waiting for pages that do not exist: with no output wanted, the prompt alone may take all of them."""
    engine, _ = fake_engine(num_pages=4)
    engine.submit(ask("a", range(16 - new), max_new_tokens=new))
    engine.submit(ask("b", [1, 2], max_new_tokens=2))
    for _ in range(20):
        engine.step()
    assert not engine.has_work


def test_abort_ends_every_choice_once_and_unknown_rids_are_ignored() -> None:
    engine, _ = fake_engine()
    engine.submit(ask("a", PROMPT, n=2))
    engine.step()
    deltas = engine.abort("a")
    assert [(delta.index, delta.finish and delta.finish.reason) for delta in deltas] == [
        (0, FinishReason.ABORT),
        (1, FinishReason.ABORT),
    ]
    assert engine.abort("a") == []
    engine.scheduler.check()
    assert not engine.has_work


def test_flush_forgets_prefixes_but_not_under_an_open_request() -> None:
    engine, _ = fake_engine()
    engine.submit(ask("a", range(20)))
    assert not engine.flush_cache()
    finish_all(engine)
    assert engine.stats().pool.evictable_pages == 6  # 20 prompt + 7 of 8 output tokens
    assert engine.flush_cache()
    assert engine.stats().pool.free_pages == 64


def test_a_request_that_waits_is_given_back_and_leaves_nothing() -> None:
    engine, _ = fake_engine(max_running=1)
    engine.submit(ask("runs", [1, 2, 3], max_new_tokens=2))
    engine.submit(ask("waits", [4, 5, 6], max_new_tokens=2))
    engine.step()
    [delta] = engine.take_back("waits")
    assert delta.finish is not None
    assert (delta.token_ids, delta.finish.retry_as) == ((), "taken_back")
    assert engine.take_back("waits") == []  # it is not open
    assert {each.rid for each in finish_all(engine)} == {"runs"}
    engine.kv.check_idle()


def test_a_request_that_was_admitted_is_never_given_back() -> None:
    engine, _ = fake_engine(max_running=1)
    engine.submit(ask("long", list(range(40)), max_new_tokens=3))
    engine.step()  # a chunk of 16: mid-prompt
    assert engine.take_back("long") == []
    while not (req := engine.find("long")).num_output:  # type: ignore[union-attr]
        engine.step()
    assert engine.take_back("long") == []
    engine.land()
    retract(engine.scheduler, req)
    assert req.state is ReqState.WAITING
    assert engine.take_back("long") == []
    assert len([token for delta in finish_all(engine) for token in delta.token_ids]) == 2


def test_a_request_of_which_one_choice_has_failed_in_the_queue_gives_back_the_other() -> None:
    engine, _ = fake_engine(max_running=1)
    engine.submit(ask("runs", [1, 2, 3], max_new_tokens=2))
    engine.submit(ask("two", [4, 5, 6], max_new_tokens=2, n=2))
    engine.step()
    engine._end(engine._open.choices("two")[0], Finish(reason=FinishReason.ERROR))
    [delta] = engine.take_back("two")
    assert (delta.rid, delta.index) == ("two", 1)
    assert {each.rid for each in finish_all(engine)} == {"runs"}
    engine.kv.check_idle()


def test_a_request_of_which_one_choice_has_run_is_not_given_back_in_part() -> None:
    engine, _ = fake_engine(max_running=1)
    engine.submit(ask("two", [1, 2, 3], max_new_tokens=1, n=2))
    while not [delta for delta in engine.step() if delta.finish is not None]:
        pass
    assert engine.open_rids == ["two"]  # the other choice waits for the place
    assert engine.take_back("two") == []
    finish_all(engine)
