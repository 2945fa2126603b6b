"""Answers of the embedded model under a constraint: whole, the same however they are scheduled, alone in failing."""

import json
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest

from replicas.engine.engine import Engine
from replicas.errors import Fault
from replicas.grammar.matcher import Matcher
from replicas.scheduler import budget
from replicas.scheduler.tokens import LONG_MASK_S
from replicas.types import Constraint, Finish, FinishReason, GenerateRequest, SamplingParams, TokenDelta, TokenLogprob
from tests import harness
from tests.embedded import short_model
from tests.harness import embedded_engine

pytestmark = pytest.mark.model
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "favourite_colours": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 2},
    },
    "required": ["name", "age", "favourite_colours"],
    "additionalProperties": False,
}
SCHEMA = Constraint(kind="json_schema", text=json.dumps(PERSON))
GREEDY = SamplingParams(max_new_tokens=100, temperature=0.0, constraint=SCHEMA)
SEEDED = replace(GREEDY, temperature=1.0, seed=11)


class Told(NamedTuple):
    """One choice's answer."""

    ids: list[int]
    text: str
    logprobs: list[TokenLogprob]
    finish: Finish


@pytest.fixture(scope="module")
def engine() -> Engine:
    return embedded_engine()


@pytest.fixture(scope="module")
def whole(engine: Engine) -> Told:
    """The greedy answer."""
    return one(engine, request(engine))


def prompt(engine: Engine, text: str = "Describe a person as JSON.") -> np.ndarray:
    return engine.tokenizer.chat([{"role": "user", "content": text}])


def request(engine: Engine, sampling: SamplingParams = GREEDY, rid: str = "a", **changes: Any) -> GenerateRequest:
    return replace(GenerateRequest(rid=rid, token_ids=prompt(engine), sampling=sampling), **changes)


def answers(engine: Engine, *asked: GenerateRequest, each_step: Callable[[], None] | None = None) -> dict[Any, Told]:
    told: dict[tuple[str, int], list[TokenDelta]] = defaultdict(list)
    deltas = [delta for each in asked for delta in engine.submit(each)]
    deadline_s = time.monotonic() + 120
    while engine.has_work:
        made = engine.step()
        engine.scheduler.check()
        if each_step is not None:
            each_step()
        if not made and not engine.scheduler.last.made_progress:
            time.sleep(0.001)  # a grammar is being compiled, on another thread
            assert time.monotonic() < deadline_s
        deltas += made
    for delta in deltas:
        told[(delta.rid, delta.index)].append(delta)
    return {key: _told(each) for key, each in told.items()}


def _told(deltas: list[TokenDelta]) -> Told:
    finish = deltas[-1].finish
    assert finish is not None
    ids = [token for delta in deltas for token in delta.token_ids]
    logprobs = [each for delta in deltas for each in delta.logprobs]
    return Told(ids, "".join(delta.text for delta in deltas), logprobs, finish)


def one(engine: Engine, asked: GenerateRequest) -> Told:
    (told,) = answers(engine, asked).values()
    return told


def is_person(text: str) -> bool:
    person = json.loads(text)
    colours = person["favourite_colours"]
    return (
        sorted(person) == ["age", "favourite_colours", "name"]
        and len(person["name"]) <= 12
        and 0 <= person["age"] <= 120
        and len(colours) <= 2
        and set(colours) <= {"red", "green", "blue"}
    )


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED, replace(SEEDED, n=3), replace(SEEDED, top_k=5, min_p=0.1)])
def test_every_choice_is_a_document_of_the_schema(engine: Engine, sampling: SamplingParams) -> None:
    told = answers(engine, request(engine, sampling))
    assert len(told) == sampling.n
    for each in told.values():
        assert is_person(each.text)
        assert each.finish == Finish(reason=FinishReason.STOP, matched=2)
        assert each.ids[-1] == 2


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED, replace(SEEDED, presence_penalty=0.5, repetition_penalty=1.1)])
def test_a_forced_run_changes_no_id_and_no_logprob(
    engine: Engine, sampling: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = request(engine, sampling, return_logprobs=True, top_logprobs=2)
    counters, before = engine.scheduler.counters, engine.scheduler.counters["forced_tokens"]
    runs = one(engine, asked)
    num_forced = counters["forced_tokens"] - before
    monkeypatch.setattr(budget, "MAX_FORCED", 0)
    stepwise = one(engine, asked)
    assert counters["forced_tokens"] == before + num_forced  # none in the second answer
    assert num_forced >= 3  # "ite_colours" at least
    assert runs[:2] == stepwise[:2]
    assert runs.finish == stepwise.finish
    assert [each.token_id for each in runs.logprobs] == runs.ids
    for quick, slow in zip(runs.logprobs, stepwise.logprobs, strict=True):
        assert quick.logprob == pytest.approx(slow.logprob, abs=1e-3)
        assert [token for token, _ in quick.top] == [token for token, _ in slow.top]
    assert sum(each.logprob == 0.0 and len(each.top) == 1 for each in runs.logprobs) >= num_forced


def test_logprobs_are_those_of_the_tokens_that_are_allowed(engine: Engine) -> None:
    yes_no = replace(GREEDY, constraint=Constraint(kind="regex", text="(yes|no)"))
    told = one(engine, request(engine, yes_no, return_logprobs=True, top_logprobs=20))
    for each in told.logprobs:
        assert 1 <= len(each.top) < 20  # prefixes of "yes" and "no" and nothing else
        assert np.exp([value for _, value in each.top]).sum() == pytest.approx(1.0, abs=1e-4)


@pytest.mark.slow
def test_steps_made_ahead_hold_constrained_rows_to_their_grammar(engine: Engine) -> None:
    """Every step but the first few is launched before the tokens of the one before it are known."""
    overlapping, num_ahead = embedded_engine("on"), 0
    asked = [
        request(engine, GREEDY, "greedy", return_logprobs=True, top_logprobs=2),
        request(engine, replace(SEEDED, n=2, repetition_penalty=1.1), "seeded"),
        request(engine, replace(SEEDED, constraint=None, max_new_tokens=30), "plain"),
    ]

    def count() -> None:
        nonlocal num_ahead
        num_ahead += len(overlapping.scheduler.queues.under_way)

    ahead = answers(overlapping, *asked, each_step=count)
    wanted = answers(engine, *asked)
    assert num_ahead > 20
    for key, told in wanted.items():
        assert ahead[key][:2] == told[:2]
        assert ahead[key].finish == told.finish
        made, theirs = ([each.logprob for each in answer.logprobs] for answer in (ahead[key], told))
        assert made == pytest.approx(theirs, abs=1e-3)


@pytest.mark.slow
def test_an_answer_resumed_at_any_token_goes_on_as_it_would_have(engine: Engine) -> None:
    whole = one(engine, request(engine, SEEDED))
    for cut in range(1, len(whole.ids), 4):
        rest = one(engine, request(engine, SEEDED, resumed_ids=tuple(whole.ids[:cut])))
        assert rest.ids == whole.ids[cut:], f"resumed at {cut}"
        assert rest.finish == whole.finish


def test_a_resumed_output_that_the_constraint_refuses_ends_the_request(engine: Engine) -> None:
    told = one(engine, request(engine, resumed_ids=(5000, 5001)))
    assert (told.ids, told.finish.reason, told.finish.fault) == ([], FinishReason.ERROR, Fault.INVALID)
    assert "does not fit the constraint at token 0" in str(told.finish.message)


def test_a_retracted_request_goes_on_in_its_grammar(engine: Engine) -> None:
    whole = one(engine, request(engine, SEEDED))
    steps = 0

    def retract_once() -> None:
        nonlocal steps
        steps += 1
        running = engine.scheduler.queues.running
        if steps in (6, 9) and running:
            harness.retract(engine.scheduler, running[0])

    again = answers(engine, request(engine, SEEDED), each_step=retract_once)[("a", 0)]
    assert again[:2] == whole[:2]


@pytest.mark.parametrize(
    ("changes", "ends"),
    [
        ({"ignore_eos": True}, "stop"),
        ({"min_new_tokens": 100}, "stop"),
        ({"stop": ("ite_col",)}, "ite_col"),  # within a forced run
        ({"max_new_tokens": 30}, "length"),
    ],
)
def test_a_grammar_and_what_else_ends_an_answer(
    engine: Engine, whole: Told, changes: dict[str, Any], ends: str
) -> None:
    told = one(engine, request(engine, replace(GREEDY, **changes), return_logprobs=True))
    assert told.ids == whole.ids[: len(told.ids)]
    assert [each.token_id for each in told.logprobs] == told.ids
    match ends:
        case "stop":
            assert told[:2] == whole[:2]
            assert told.finish.reason is FinishReason.STOP
        case "length":
            assert (len(told.ids), told.finish.reason) == (30, FinishReason.LENGTH)
        case stop:
            assert told.finish == Finish(reason=FinishReason.STOP, matched=stop)
            assert told.text == whole.text[: whole.text.index(stop)]
            assert len(told.ids) < len(whole.ids)


def test_an_answer_is_held_to_its_constraint_from_the_text_after_which_it_begins(engine: Engine) -> None:
    numbered = Constraint(kind="regex", text="[0-9]{3}", after=" a")
    told = one(engine, request(engine, replace(GREEDY, constraint=numbered)))
    before, behind = told.text.split(" a", 1)
    free = one(engine, request(engine, replace(GREEDY, constraint=None, max_new_tokens=20)))
    assert free.text.startswith(before + " a")
    assert behind.isdigit()
    assert told.finish.reason is FinishReason.STOP


def test_masks_that_leave_nothing_end_their_request_alone(engine: Engine) -> None:
    (letter,) = engine.tokenizer.encode("q", add_special_tokens=False).tolist()
    stuck = replace(GREEDY, allowed_token_ids=(letter,))
    told = answers(engine, request(engine, stuck, "stuck"), request(engine, GREEDY, "fine"))
    assert told[("stuck", 0)].finish.fault is Fault.INVALID
    assert "allowed_token_ids" in str(told[("stuck", 0)].finish.message)
    assert is_person(told[("fine", 0)].text)


def test_a_grammar_that_cannot_be_compiled_ends_its_request_alone(engine: Engine) -> None:
    wrong = replace(GREEDY, constraint=Constraint(kind="regex", text="(a"), n=2)
    told = answers(engine, request(engine, wrong, "wrong"), request(engine, GREEDY, "fine"))
    for index in range(2):
        finish = told[("wrong", index)].finish
        assert (finish.reason, finish.fault) == (FinishReason.ERROR, Fault.INVALID)
        assert "unclosed group" in str(finish.message)
    assert is_person(told[("fine", 0)].text)


@pytest.mark.slow
def test_three_ranks_make_the_ids_of_one() -> None:
    one, ranks = (embedded_engine(tp=tp, model=short_model()) for tp in (1, 3))
    try:
        asked = [request(one, GREEDY, "greedy"), request(one, replace(SEEDED, n=2), "seeded")]
        made = {key: told[:2] for key, told in answers(ranks, *asked).items()}
        assert made == {key: told[:2] for key, told in answers(one, *asked).items()}
    finally:
        ranks.close()


# 30 ways to read each letter: near the limit of llguidance's items, some 5 ms a mask, at every token
MANY_READINGS = Constraint(
    kind="lark",
    text="start: s+\ns: " + " | ".join(f"t{i}" for i in range(30)) + "".join(f"\nt{i}: /[a-z ]/" for i in range(30)),
)


def test_steps_of_others_wait_for_no_long_mask_and_no_id_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven answers whose masks take longer than a step, beside one that is free: its steps wait for less than one of
    these masks in all, where each would have waited for seven."""
    engine = embedded_engine(model=short_model())
    sampling = SamplingParams(max_new_tokens=8, temperature=1.0, ignore_eos=True, constraint=MANY_READINGS)
    slow = [request(engine, replace(sampling, seed=i), rid=f"slow{i}", tenant="theirs") for i in range(7)]
    alone = {rid: told.ids for each in slow for rid, told in answers(engine, each).items()}
    plain = SamplingParams(max_new_tokens=60, temperature=0.0, ignore_eos=True)
    free = request(engine, plain, rid="free", tenant="own")
    alone |= {("free", 0): one(engine, free).ids}

    words, waited_s = Matcher.words, list[float]()

    def counting(matcher: Matcher) -> Any:
        waited_s.append(matcher.due_s)
        return words(matcher)

    monkeypatch.setattr(Matcher, "words", counting)
    with_free = list[float]()

    def each_step() -> None:
        if engine.find("free") is not None:
            with_free.extend(waited_s)
        waited_s.clear()

    told = answers(engine, free, *slow, each_step=each_step)
    assert {key: each.ids for key, each in told.items()} == alone
    assert with_free, "no step of the free answer had a row with a mask"
    assert sum(with_free) < LONG_MASK_S * engine.config.scheduler.max_running_requests
    engine.kv.check_idle()
