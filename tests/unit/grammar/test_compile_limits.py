"""How long a grammar may take to compile, and what becomes of one whose examiner dies."""

import asyncio
import collections
import os
import queue
import signal
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI

from deployments.dispatch.background import BackgroundStreams
from deployments.dispatch.resumable_streams import ResumableStreams
from deployments.http.http_app import _lifespan
from deployments.output.examined import MAX_OF_CALLER, MAX_WAITING, NUM_EXAMINERS, ExaminedGrammars, TooManyForms
from deployments.tenancy.keys import NO_KEYS
from replicas.errors import Fault, InvalidRequest, Overloaded
from replicas.grammar import examiner
from replicas.grammar.checking import Examined
from replicas.grammar.examiner import Examiner
from replicas.types import Constraint
from tests.harness import fake_engine
from tests.waiting import until_async


@pytest.fixture
def examining() -> Iterator[Examiner]:
    made = Examiner(fake_engine()[0].tokenizer)
    yield made
    made.close()


def dies_of(number: signal.Signals, monkeypatch: pytest.MonkeyPatch, *, times: int) -> None:
    """Send a signal to the process before each of the next questions."""
    left = [None] * times
    asked = examiner._asked

    def killed(process: Any, question: dict[str, Any], within_s: float) -> dict[str, Any] | None:
        if left and "kind" in question:
            left.pop()
            os.kill(process.pid, number)
        return asked(process, question, within_s)

    monkeypatch.setattr(examiner, "_asked", killed)


def test_a_grammar_is_not_blamed_for_a_process_that_was_killed(
    examining: Examiner, monkeypatch: pytest.MonkeyPatch
) -> None:
    examining.start()
    dies_of(signal.SIGKILL, monkeypatch, times=1)
    assert examining.examine("regex", "a+").constraint.text == "a+"
    dies_of(signal.SIGKILL, monkeypatch, times=2)
    with pytest.raises(Overloaded, match="killed twice"):
        examining.examine("regex", "a+")
    monkeypatch.undo()
    assert examining.examine("regex", "a+").constraint.text == "a+"


def test_a_repetition_that_is_too_large_is_refused_in_words_and_a_large_one_is_not(examining: Examiner) -> None:
    """Class 56: it passed, and the answer then ended with "the grammar does not allow token 46880"."""
    for text in ("a{1000000000}", "(ab){500000000}"):
        with pytest.raises(InvalidRequest, match=r"a repetition in it, as .*, is too large"):
            examining.examine("regex", text)
    assert examining.examine("regex", "a{1000}").constraint.text == "a{1000}"


@pytest.mark.parametrize(("number", "error"), [(signal.SIGPROF, InvalidRequest), (signal.SIGKILL, Overloaded)])
def test_only_a_child_that_ends_at_a_limit_blames_its_grammar(
    examining: Examiner, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, error: type[Exception]
) -> None:
    asked: list[dict[str, Any]] = []

    def ended(process: Any, question: dict[str, Any], within_s: float) -> dict[str, Any]:
        asked.append(question)
        return {"ended": -number} if "kind" in question else {}

    monkeypatch.setattr(examiner, "_asked", ended)
    with pytest.raises(error):
        examining.examine("regex", "a+")
    assert len(asked) == (2 if error is InvalidRequest else 3)  # the start, and one try or two


def test_the_death_of_a_child_costs_no_new_start(examining: Examiner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examiner, "MAX_CPU_S", 0.2)
    examining.start()
    process = examining._process
    with pytest.raises(InvalidRequest, match=r"more than 0\.2 s"):
        examining.examine("json_schema", '{"type": "integer", "multipleOf": 999983}')
    assert examining.examine("regex", "a+").constraint.text == "a+"
    assert examining._process is process


def test_a_process_that_stands_still_is_replaced(examining: Examiner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examiner, "MAX_WALL_S", 5.0)
    dies_of(signal.SIGSTOP, monkeypatch, times=1)
    assert examining.examine("regex", "a+").constraint.text == "a+"


def test_an_answer_that_takes_too_long_ends_with_the_child_that_makes_it(
    examining: Examiner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child has its parent's output: while it lives, nobody who reads that sees its end."""
    monkeypatch.setattr(examiner, "MAX_CPU_S", 300.0)
    monkeypatch.setattr(examiner, "MAX_WALL_S", 0.5)
    with pytest.raises(Overloaded, match="killed twice"):
        examining.examine("json_schema", '{"type": "integer", "multipleOf": 999983}')


def test_closing_waits_for_no_answer(examining: Examiner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examiner, "MAX_WALL_S", 300.0)
    examining.start()
    stopped, asked = threading.Event(), examiner._asked

    def standing(process: Any, question: dict[str, Any], within_s: float) -> dict[str, Any] | None:
        if "kind" in question:
            os.kill(process.pid, signal.SIGSTOP)
            stopped.set()
        return asked(process, question, within_s)

    monkeypatch.setattr(examiner, "_asked", standing)
    said: list[Exception] = []

    def ask_it() -> None:
        try:
            examining.examine("regex", "a+")
        except Overloaded as error:
            said.append(error)

    thread = threading.Thread(target=ask_it)
    thread.start()
    assert stopped.wait(60.0)
    examining.close()
    thread.join(60.0)
    assert "shutting down" in str(said[0])


def test_an_unforeseen_error_is_an_answer(examining: Examiner) -> None:
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="JSONDecodeError"):
            examining.examine("choice", "[")


class SlowExaminers:
    """All examiners: each answers when it is told to. ``begun``: the texts, in the order in which they were begun."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[str] = []
        self.time_s = 0.0
        self._answers: dict[str, queue.Queue[Exception | None]] = collections.defaultdict(queue.Queue)
        monkeypatch.setattr(Examiner, "examine", lambda examiner, kind, text: self._examine(kind, text))

    def _examine(self, kind: Any, text: str) -> Examined:
        self.begun.append(text)
        error = self._answers[text].get(timeout=60.0)
        if error is not None:
            raise error
        return Examined(constraint=Constraint(kind=kind, text=text))

    async def answer(self, *texts: str, error: Exception | None = None, time_s: float = 2.0) -> None:
        """Let the examinations of ``texts``, which have begun or soon will, end; each took ``time_s``."""
        for text in texts:
            await until_async(lambda text=text: text in self.begun)  # type: ignore[misc]
            self.time_s += time_s
            self._answers[text].put(error)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> SlowExaminers:
    return SlowExaminers(monkeypatch)


@pytest.fixture
def grammars(slow: SlowExaminers) -> Iterator[ExaminedGrammars]:
    made = ExaminedGrammars(fake_engine()[0].tokenizer, clock=lambda: slow.time_s)
    yield made
    assert not made._asked
    assert not made._lines._lines
    assert len(made._idle) == NUM_EXAMINERS
    made.close()


async def asked(grammars: ExaminedGrammars, *texts: str, caller: str = "") -> list[asyncio.Task[Examined]]:
    """Ask for each of ``texts``. Returns: once all of them are in line."""
    tasks = [asyncio.create_task(grammars.of("regex", text, caller)) for text in texts]
    await asyncio.sleep(0)
    return tasks


async def test_a_grammar_is_examined_once_for_all_that_wait_for_it(
    grammars: ExaminedGrammars, slow: SlowExaminers
) -> None:
    same = [*await asked(grammars, *["a"] * (MAX_WAITING + 1)), *await asked(grammars, "a", caller="B")]
    others = await asked(grammars, *[f"b{i}" for i in range(MAX_WAITING)])
    same[0].cancel()
    await slow.answer("a", error=Overloaded("killed twice"))
    answers = await asyncio.gather(*same, return_exceptions=True)
    assert isinstance(answers[0], asyncio.CancelledError)
    assert all(isinstance(each, Overloaded) for each in answers[1:])
    await slow.answer(*[f"b{i}" for i in range(MAX_WAITING - 1)])
    *good, last = await asyncio.gather(*others, return_exceptions=True)
    assert all(isinstance(each, Examined) for each in good)
    assert "64 grammars wait" in str(last)
    slow.begun.remove("a")
    [again] = await asked(grammars, "a")
    await slow.answer("a")
    assert isinstance(await again, Examined)  # what may be tried again is not kept
    await grammars.of("regex", "a")
    assert sorted(slow.begun) == sorted(["a", *(f"b{i}" for i in range(MAX_WAITING - 1))])


async def test_a_small_grammar_waits_for_no_other_callers(grammars: ExaminedGrammars, slow: SlowExaminers) -> None:
    """Of the bombs of A, one is examined at a time, and those of which the client has hung up are none."""
    bombs = await asked(grammars, *[f"bomb {i}" for i in range(MAX_OF_CALLER + 1)], caller="A")
    [small] = await asked(grammars, "small", caller="B")
    await slow.answer("small", time_s=0.01)
    await small
    assert sorted(slow.begun) == ["bomb 0", "small"]
    for bomb in bombs[:-1]:
        bomb.cancel()
    await asyncio.gather(*bombs[:-1], return_exceptions=True)
    await slow.answer("bomb 0", f"bomb {MAX_OF_CALLER}")
    assert isinstance(await bombs[-1], Examined)
    assert slow.begun[-2:] == ["small", f"bomb {MAX_OF_CALLER}"]
    await grammars.of("regex", "bomb 0")  # it was examined to its end, and its answer is kept


async def test_more_of_one_caller_are_429_and_another_finds_room(
    grammars: ExaminedGrammars, slow: SlowExaminers
) -> None:
    """One is being examined, MAX_OF_CALLER are in line: four callers together cannot fill all places."""
    texts = [f"{i}" for i in range(MAX_OF_CALLER + 1)]
    mine = await asked(grammars, *texts, caller="A")
    with pytest.raises(TooManyForms) as caught:
        await grammars.of("regex", "one more", "A")
    assert (caught.value.fault, caught.value.retry_after_s) == (Fault.TOO_MANY, 2.0)
    [theirs, joined] = [*await asked(grammars, "other", caller="B"), *await asked(grammars, texts[0], caller="B")]
    await slow.answer("other", *texts)
    await asyncio.gather(theirs, joined, *mine)


async def test_the_caller_that_used_the_least_time_is_next(grammars: ExaminedGrammars, slow: SlowExaminers) -> None:
    """C holds one examiner; A has used 4 s of the other when it is B's turn, and B's three together take less."""
    tasks = await asked(grammars, "a0", "a1", "a2", caller="A") + await asked(grammars, "c", caller="C")
    await slow.answer("a0")
    await until_async(lambda: "a1" in slow.begun)
    tasks += await asked(grammars, "b0", "b1", "b2", caller="B")
    await slow.answer("a1")
    await slow.answer("b0", "b1", "b2", time_s=0.1)
    await slow.answer("a2", "c")
    await asyncio.gather(*tasks)
    assert [text for text in slow.begun if text != "c"] == ["a0", "a1", "b0", "b1", "b2", "a2"]


async def test_a_grammar_is_examined_in_the_line_that_comes_first(
    grammars: ExaminedGrammars, slow: SlowExaminers
) -> None:
    """B asks for what stands last in A's line: B does not wait for A's others."""
    bombs = await asked(grammars, "bomb 0", "bomb 1", "both", caller="A")
    [small] = await asked(grammars, "both", caller="B")
    await slow.answer("both")
    await small
    assert sorted(slow.begun) == ["bomb 0", "both"]
    await slow.answer("bomb 0", "bomb 1")
    await asyncio.gather(*bombs)
    assert slow.begun.count("both") == 1


async def test_the_examiner_starts_and_ends_with_the_router() -> None:
    grammars, app = ExaminedGrammars(fake_engine()[0].tokenizer), FastAPI()
    service = SimpleNamespace(examined=grammars, streams=ResumableStreams(), background=BackgroundStreams())
    app.state.service, app.state.keys = service, NO_KEYS
    async with _lifespan(app):
        await until_async(lambda: grammars._examiners[-1]._process is not None)
        process = grammars._examiners[-1]._process
        assert process is not None
        assert grammars._examiners[0]._process is None  # without keys there is one caller
        assert process.poll() is None
    assert process.poll() is not None
