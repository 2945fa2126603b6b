"""A step that fails: what is at fault ends, the answers beside it are those of an engine that nothing happened to, and
an engine that is broken itself dies and says which requests were in its last step."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from replicas.config import CacheConfig, SchedulerConfig
from replicas.engine.engine import Engine
from replicas.engine.failed_steps import MOST_IN_A_ROW
from replicas.engine.loop import EngineLoop
from replicas.errors import Fault, NotSent, Overloaded
from replicas.grammar.matcher import Matcher
from replicas.launch import EngineSettings, load_engine
from replicas.runner.pooling import Pooler
from replicas.runner.sampler import Sampler
from replicas.scheduler.plan import ExtendPlan, PendingStep, StepPlan, StepResult
from replicas.text.detokenizer import Detokenizer
from replicas.types import Constraint, Finish, FinishReason, GenerateRequest, PoolingParams, TokenDelta
from tests.embedded import MODEL
from tests.fakes import continuation
from tests.harness import ask, fake_engine, finish_all
from tests.numerics import tiny
from tests.pair import Pair
from tests.waiting import until

pytestmark = pytest.mark.model
Launch = Callable[[StepPlan], PendingStep]
POISON = 999  # the token of a prompt, or the seed of a request, with which steps fail


def has_poison(plan: StepPlan, *, from_output: int = 0) -> bool:
    if isinstance(plan, ExtendPlan) and any(POISON in row.token_ids for row in plan.rows):
        return True
    return any(row.params.seed == POISON and row.num_output >= from_output for row in plan.sampling)


class Panic(BaseException):
    """As llguidance's, which is no Exception."""


class Failing:
    """A step that fails when it is awaited: others may have been launched behind it."""

    def result(self) -> StepResult:
        raise RuntimeError("no such index")


def failing(launch: Launch, at: str, *, error: type[BaseException] = RuntimeError, **when: int) -> Launch:
    """Fail with the poison when the step is launched, or when its result is asked for."""

    def launched(plan: StepPlan) -> PendingStep:
        if not has_poison(plan, **when):
            return launch(plan)
        if at == "launch":
            raise error("no such index")
        launch(plan).result()  # it writes its K/V, and may have sampled
        return Failing()

    return launched


def ends(deltas: Sequence[TokenDelta]) -> dict[tuple[str, int], Finish]:
    return {(each.rid, each.index): each.finish for each in deltas if each.finish is not None}


def ids(deltas: Sequence[TokenDelta], rid: str, index: int = 0) -> list[int]:
    return [token for each in deltas if (each.rid, each.index) == (rid, index) for token in each.token_ids]


def at_rest(engine: Engine) -> bool:
    engine.scheduler.check()
    pool = engine.stats().pool
    return pool.free_pages + pool.evictable_pages == pool.num_pages


@pytest.mark.parametrize("at", ["launch", "result"])
@pytest.mark.parametrize("overlap", ["on", "off"])
@pytest.mark.parametrize("drafts", ["auto", "off"])
def test_requests_beside_one_that_fails_get_the_tokens_that_they_get_alone(at: str, overlap: str, drafts: str) -> None:
    """Of prompts in chunks, of answers at any token, with drafts and steps made ahead; some find memory short."""
    random = Random(5)
    for number in range(12):
        engine, _ = fake_engine(overlap=overlap, speculation=drafts, num_pages=40)
        engine.steps.launch = failing(engine.steps.launch, at, from_output=random.randrange(6))
        prompts = {f"r{i}": [random.randrange(6) for _ in range(random.randint(1, 40))] for i in range(7)}
        bad = set(random.sample(sorted(prompts), 2))
        deltas = list[TokenDelta]()
        for rid in bad if number % 2 else ():
            prompts[rid].insert(random.randint(0, len(prompts[rid])), POISON)
        for rid in sorted(prompts.keys() - bad):  # so that the cache can guess what comes
            engine.submit(ask("before", prompts[rid], max_new_tokens=12))
            finish_all(engine)
        for rid, prompt in prompts.items():
            deltas += engine.submit(ask(rid, prompt, max_new_tokens=12, seed=POISON if rid in bad else 1))
            deltas += engine.step() if random.random() < 0.5 else []
        deltas += finish_all(engine)
        found = ends(deltas)
        for rid, prompt in prompts.items():
            wanted = continuation(prompt, 12)
            if rid in bad:
                assert (found[rid, 0].fault, found[rid, 0].retry_as) == (Fault.INTERNAL, "step_failed")
                assert ids(deltas, rid) == wanted[: len(ids(deltas, rid))]
            else:
                assert ids(deltas, rid) == wanted
        assert at_rest(engine)
        assert engine.stats().failed_steps >= 1


def test_a_choice_that_fails_ends_its_request_and_no_other() -> None:
    engine, _ = fake_engine()
    engine.steps.launch = failing(engine.steps.launch, "launch")
    engine.submit(ask("n", [1, 2], n=3, seed=POISON))  # choice 0 keeps the seed
    engine.submit(ask("good", [3, 4]))
    deltas = finish_all(engine)
    assert {key: end.retry_as for key, end in ends(deltas).items()} == {
        **{("n", index): "step_failed" for index in range(3)},
        ("good", 0): None,
    }
    assert at_rest(engine)


def test_what_a_failed_step_has_written_is_no_cached_prefix() -> None:
    engine, _ = fake_engine()
    engine.steps.launch = failing(engine.steps.launch, "result")
    prompt = [7] * 8 + [POISON] + [8] * 20  # two pages before, in the chunk of 16
    engine.submit(ask("bad", prompt))
    finish_all(engine)
    assert engine.kv.cache.peek_len(np.array(prompt, np.int32), "") == 0
    assert at_rest(engine)


def test_a_request_that_fails_alone_in_an_idle_engine_ends_and_the_log_says_what_it_asked_for_without_its_text(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine, _ = fake_engine()
    engine.steps.launch = failing(engine.steps.launch, "launch")
    form = Constraint(kind="regex", text="secret")
    engine.submit(ask("bad", [1, POISON], stop=("secret",), bad_words=((5,), (6,)), constraint=form, top_p=0.5))
    (end,) = ends(_compiled(engine)).values()
    assert (end.message, end.retry_as) == ("a step failed with RuntimeError: no such index", "step_failed")
    (told,) = [record.getMessage() for record in caplog.records if "choice 0, ends" in record.getMessage()]
    assert "prompt_len=2" in told
    assert "top_p=0.5, bad_words=2, stop=1, constraint=regex" in told
    assert "secret" not in caplog.text
    assert str(POISON) not in told


def _compiled(engine: Engine) -> list[TokenDelta]:
    deltas = list[TokenDelta]()

    def ended() -> bool:
        deltas.extend(engine.step())
        return not engine.open_rids

    until(ended)
    return deltas


@pytest.mark.parametrize(
    ("idle_works", "error", "retry_as"),
    [
        (True, RuntimeError("no such kernel"), "step_failed"),
        (False, RuntimeError("no such kernel"), "step_failed"),
        (True, Overloaded("a step did not fit into the memory"), "overloaded"),  # another process has it
    ],
)
def test_an_engine_in_which_nothing_works_dies_and_tells_who_was_in_its_step(
    idle_works: bool, error: Exception, retry_as: str
) -> None:
    """At once where the dummy page fails too, else after so many steps in a row; c only shared the engine."""
    engine, device = fake_engine(max_running=2)

    def broken(plan: StepPlan) -> PendingStep:
        slots = plan.rows[0].slots if isinstance(plan, ExtendPlan) else plan.slots
        if idle_works and not slots.any():
            return device.launch(plan)
        raise error

    engine.steps.launch = broken
    loop, got = EngineLoop(engine), list[TokenDelta]()
    num_before = 2 * MOST_IN_A_ROW if idle_works else 0  # two end in each step
    for rid in (*(f"r{number}" for number in range(num_before)), "a", "b", "c"):
        loop.submit(ask(rid, [1, 2, 3]), got.extend)
    loop.start()
    until(lambda: loop.num_open == 0)
    loop.stop()
    found = {rid: end.retry_as for (rid, _), end in ends(got).items()}
    assert loop.error is not None
    assert {rid: found.pop(rid) for rid in "abc"} == {"a": "died_in_step", "b": "died_in_step", "c": "engine_dead"}
    assert list(found.values()) == [retry_as] * num_before


def test_steps_that_fail_between_others_that_do_not_never_end_the_engine() -> None:
    engine, _ = fake_engine()
    engine.steps.launch = failing(engine.steps.launch, "launch")
    for number in range(2 * MOST_IN_A_ROW):
        engine.submit(ask(f"bad{number}", [POISON]))
        finish_all(engine)
        engine.submit(ask(f"good{number}", [number]))
        assert ids(finish_all(engine), f"good{number}") == continuation([number], 8)
    assert engine.stats().failed_steps == 2 * MOST_IN_A_ROW


def test_a_step_that_fails_by_the_rows_that_meet_in_it_ends_nobody() -> None:
    engine, device = fake_engine()

    def crowded(plan: StepPlan) -> PendingStep:
        if len(plan.rows) > 2:
            raise MemoryError("three are too many")
        return device.launch(plan)

    engine.steps.launch = crowded
    for number in range(5):
        engine.submit(ask(f"r{number}", [number]))
    deltas = finish_all(engine)
    assert [ids(deltas, f"r{number}") for number in range(5)] == [continuation([number], 8) for number in range(5)]
    assert at_rest(engine)


@pytest.mark.parametrize("at", ["launch", "result"])
def test_a_step_that_fails_once_ends_nobody_and_the_one_made_ahead_follows_what_is_made_anew(at: str) -> None:
    engine, device = fake_engine(overlap="on")
    num_launched = 0

    def launched(plan: StepPlan) -> PendingStep:
        nonlocal num_launched
        num_launched += 1
        if num_launched % 10:  # more than the parts of a step that runs again
            return device.launch(plan)
        if at == "launch":
            raise RuntimeError("no such index")
        return Failing()

    engine.steps.launch = launched
    for number in range(5):
        engine.submit(ask(f"r{number}", [number], max_new_tokens=30 + number))
    deltas = finish_all(engine)
    for number in range(5):
        assert ids(deltas, f"r{number}") == continuation([number], 30 + number)
    assert engine.stats().failed_steps == num_launched // 10 > 1  # the one made ahead did not fail
    assert at_rest(engine)


def test_a_step_without_memory_runs_in_parts_and_ends_only_what_fits_nowhere_for_others_to_try() -> None:
    """Here three prompts fit beside each other, and the poisoned one does not even alone: all its choices end."""
    engine, _ = fake_engine()
    launch = engine.steps.launch

    def short(plan: StepPlan) -> PendingStep:
        if has_poison(plan) or plan.num_requests > 3:
            raise Overloaded("a step did not fit into the memory")
        return launch(plan)

    engine.steps.launch = short
    for rid in range(6):
        engine.submit(ask(f"r{rid}", [rid], max_new_tokens=12))
    engine.submit(ask("bad", [POISON], n=2))
    deltas = finish_all(engine)
    for rid in range(6):
        assert ids(deltas, f"r{rid}") == continuation([rid], 12)
    found = ends(deltas)
    for index in range(2):
        assert (found["bad", index].fault, found["bad", index].retry_as) == (Fault.UNAVAILABLE, "overloaded")
    assert at_rest(engine)


def test_a_plan_that_cannot_be_sent_to_other_ranks_ends_a_request_and_not_the_engine() -> None:
    engine, _ = fake_engine()
    engine.config = replace(engine.config, parallel=replace(engine.config.parallel, tp=2))
    engine.steps.launch = failing(engine.steps.launch, "launch", error=NotSent)
    engine.submit(ask("good", [1], max_new_tokens=12))
    engine.submit(ask("bad", [POISON]))
    deltas = finish_all(engine)
    assert ids(deltas, "good") == continuation([1], 12)
    assert (ends(deltas)["bad", 0].fault, ends(deltas)["bad", 0].retry_as) == (Fault.UNAVAILABLE, "overloaded")
    assert at_rest(engine)


@pytest.mark.parametrize("error", [RuntimeError, Panic])
def test_with_several_ranks_a_step_that_fails_ends_the_engine_as_others_may_be_a_step_behind(
    error: type[BaseException],
) -> None:
    engine, _ = fake_engine()
    engine.config = replace(engine.config, parallel=replace(engine.config.parallel, tp=2))
    engine.steps.launch = failing(engine.steps.launch, "launch", error=error)
    loop, got = EngineLoop(engine), list[TokenDelta]()
    loop.submit(ask("good", [1]), got.extend)
    loop.submit(ask("bad", [POISON]), got.extend)
    loop.start()
    until(lambda: loop.num_open == 0)
    loop.stop()
    assert {end.retry_as for end in ends(got).values()} == {"died_in_step"}


@pytest.mark.parametrize("sides", [("prefill",), ("decode",), ("prefill", "decode")])
def test_a_kv_transfer_of_which_one_side_fails_leaves_the_others_alone(sides: tuple[str, ...]) -> None:
    """Where the prompt fails, the decode side hears that it does not come, and computes it; no page of the failed chunk
    is sent."""
    pair = Pair(page_size=4)
    for name in sides:
        side = getattr(pair, name)
        side.engine.steps.launch = failing(side.engine.steps.launch, "result", from_output=1 if name == "decode" else 0)
    prompts = {"bad": [POISON, *range(30)] if "prefill" in sides else [*range(30)], "a": [*range(5, 40)], "b": [3]}
    for rid, prompt in prompts.items():
        pair.ask(rid, prompt, max_new_tokens=8, seed=POISON if rid == "bad" and "decode" in sides else 1)
    pair.run()
    for rid in ("a", "b"):
        assert pair.decode.ids(rid) == continuation(prompts[rid], 8)
    ended = {name: getattr(pair, name).deltas["bad", 0][-1].finish for name in ("prefill", "decode")}
    assert {name for name, end in ended.items() if end.retry_as == "step_failed"} == set(sides)
    if "decode" not in sides:
        assert not pair.decode.report("bad").transferred
        assert pair.decode.ids("bad") == continuation(prompts["bad"], 8)
    assert pair.at_rest


@pytest.mark.parametrize("left", [False, True])
def test_a_step_in_which_nothing_works_writes_the_table_for_requests_that_wait_beside_it(left: bool) -> None:
    """The plan of the only request that runs brings the row of one whose pages are on their way. ``left``: the client
    of the first goes away before its step is awaited."""
    pair, prompt = Pair(), list(range(100, 145))
    steps = pair.decode.engine.steps
    begin, steps.launch = steps.begin, failing(steps.launch, "launch")

    def begun(plan: StepPlan) -> None:
        begin(plan)
        if left and has_poison(plan):
            pair.decode.abort("bad")

    steps.begin = begun  # type: ignore[method-assign]
    pair.decode.submit(ask("bad", [POISON]))
    pair.ask("a", prompt)
    pair.run()
    assert pair.decode.end("bad") is (FinishReason.ABORT if left else FinishReason.ERROR)
    assert pair.decode.ids("a") == continuation(prompt, 8)
    assert pair.decode.report("a").transferred


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    tiny.save("llama", folder, vocab_size=49_152)
    for file in Path(MODEL).glob("*token*.json"):
        shutil.copy(file, folder)
    return str(folder)


@pytest.fixture(scope="module", params=["on", "off"])
def engine(request: pytest.FixtureRequest, tiny_model: str) -> Iterator[Engine]:
    scheduler = SchedulerConfig(chunked_prefill_size=32, max_running_requests=8, overlap=request.param)
    cache = CacheConfig(page_size=16, max_total_tokens=2048)
    made = load_engine(EngineSettings(model=tiny_model, cache=cache, scheduler=scheduler, num_threads=1))
    yield made
    made.close()


def beside(bad: GenerateRequest) -> list[GenerateRequest]:
    good = [ask(f"r{i}", [5 * i + j for j in range(9 * i + 4)], max_new_tokens=10, seed=i) for i in range(4)]
    forms = [replace(each, sampling=replace(each.sampling, temperature=1.0)) for each in good[:2]]
    held = replace(good[3].sampling, constraint=Constraint(kind="regex", text="[a-z]{30}"))
    return [*forms, bad, good[2], replace(good[3], sampling=held)]


def raises(method: Callable[..., Any], when: Callable[..., bool]) -> Callable[..., Any]:
    """Let ``method`` raise ``when`` its arguments say so."""

    def instead(*args: Any, **kwargs: Any) -> Any:
        if when(*args):
            raise IndexError("tensors used as indices must be long")
        return method(*args, **kwargs)

    return instead


FORM = Constraint(kind="regex", text="[0-9]{40}")


def sampler(patch: pytest.MonkeyPatch, engine: Engine, bad: GenerateRequest) -> None:
    found = raises(Sampler._logprobs, lambda me, logits, made, rows: any(row.params.seed == POISON for row in rows))
    patch.setattr(Sampler, "_logprobs", found)


def attention(patch: pytest.MonkeyPatch, engine: Engine, bad: GenerateRequest) -> None:
    runner = engine.steps.launch.__self__.runner  # type: ignore[attr-defined]
    backend, begin = runner.attention, type(runner.attention).begin
    now = list[bool]()
    launch = engine.steps.launch

    def launched(plan: StepPlan) -> PendingStep:
        now[:] = [has_poison(plan, from_output=2)]
        return launch(plan)

    patch.setattr(engine.steps, "launch", launched)
    patch.setattr(type(backend), "begin", raises(begin, lambda me, batch: now == [True]))


def words(patch: pytest.MonkeyPatch, engine: Engine, bad: GenerateRequest) -> None:
    def is_bad(me: Matcher, *_: object) -> bool:
        req = engine.find("bad")
        return req is not None and req.guide is me and req.num_output >= 2

    patch.setattr(Matcher, "words", raises(Matcher.words, is_bad))


def consume(patch: pytest.MonkeyPatch, engine: Engine, bad: GenerateRequest) -> None:
    def is_bad(me: Matcher, *_: object) -> bool:
        req = engine.find("bad")
        return req is not None and req.guide is me and req.num_output >= 2

    patch.setattr(Matcher, "consume", raises(Matcher.consume, is_bad))


def detokenizer(patch: pytest.MonkeyPatch, engine: Engine, bad: GenerateRequest) -> None:
    def is_bad(me: Detokenizer, *_: object) -> bool:
        return any(c.detokenizer is me and c.req.num_output >= 2 for c in engine._open.choices("bad"))

    for name in ("push", "flush"):
        patch.setattr(Detokenizer, name, raises(getattr(Detokenizer, name), is_bad))


@pytest.mark.parametrize("place", [sampler, attention, words, consume, detokenizer])
def test_a_fault_in_any_part_of_a_step_ends_its_own_request(
    engine: Engine, place: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = ask("bad", [9, 8, 7], max_new_tokens=10, seed=POISON, constraint=FORM)
    bad = replace(bad, return_logprobs=True)
    wanted = {}
    for request in beside(bad):
        engine.submit(request)
        wanted[request.rid] = ids(_compiled(engine), request.rid)
    place(monkeypatch, engine, bad)
    for request in beside(bad):
        engine.submit(request)
    deltas = _compiled(engine)
    for rid in ("r0", "r1", "r2", "r3"):
        assert ids(deltas, rid) == wanted[rid]
    end = ends(deltas)["bad", 0]
    assert (end.fault, end.retry_as) == (Fault.INTERNAL, "step_failed")
    assert "must be long" in (end.message or "")
    assert ids(deltas, "bad") == wanted["bad"][: len(ids(deltas, "bad"))]
    assert at_rest(engine)


def test_a_mean_over_chunks_is_the_same_where_a_step_of_it_ran_twice() -> None:
    hidden = torch.arange(12.0).view(6, 2)
    pooler, pooling = Pooler(), PoolingParams(method="mean")
    for start, sample in ((0, False), (2, False), (4, True)):
        token_ids = slots = np.zeros(2, np.int32)
        row = replace(_row(), token_ids=token_ids, slots=slots, prefix_len=start, sample=sample, pooling=pooling)
        plan = ExtendPlan(table_writes=(), rows=(row,), sampling=())
        once, again = (pooler.pooled(plan, hidden[start : start + 2]) for _ in range(2))
        assert {index: made.tolist() for index, made in again.items()} == ({0: [5.0, 6.0]} if sample else {})
        assert once.keys() == again.keys()
        assert all(torch.equal(once[index], made) for index, made in again.items())


def _row() -> Any:
    from replicas.scheduler.plan import idle_extend

    return idle_extend(0, 2).rows[0]
