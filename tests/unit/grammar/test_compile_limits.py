"""How long a grammar may take to compile, and what becomes of one whose examiner dies."""

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI

from deployments.http.http_app import _lifespan
from deployments.output.examined import MAX_WAITING, ExaminedGrammars
from replicas.errors import InvalidRequest, Overloaded
from replicas.grammar import examiner
from replicas.grammar.checking import Examined
from replicas.grammar.examiner import Examiner
from replicas.types import Constraint
from tests.harness import fake_engine


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
    assert examining.examine("regex", "a+").constraint.text == "a+"
    dies_of(signal.SIGPROF, monkeypatch, times=1)
    with pytest.raises(InvalidRequest, match="more than 2 s"):
        examining.examine("regex", "a+")


def test_a_process_that_stands_still_is_replaced(examining: Examiner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examiner, "MAX_WALL_S", 5.0)
    dies_of(signal.SIGSTOP, monkeypatch, times=1)
    assert examining.examine("regex", "a+").constraint.text == "a+"


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


async def test_a_grammar_is_examined_once_for_all_that_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars, go, asked = ExaminedGrammars(fake_engine()[0].tokenizer), threading.Event(), list[str]()

    def examine(self: Examiner, kind: Any, text: str) -> Examined:
        assert go.wait(60.0)
        asked.append(text)
        if asked == ["a"]:
            raise Overloaded("killed twice")
        return Examined(constraint=Constraint(kind=kind, text=text))

    monkeypatch.setattr(Examiner, "examine", examine)
    same = [asyncio.create_task(grammars.of("regex", "a")) for _ in range(MAX_WAITING + 1)]
    others = [asyncio.create_task(grammars.of("regex", f"b{i}")) for i in range(MAX_WAITING)]
    await asyncio.sleep(0)
    same[0].cancel()
    go.set()
    answers = await asyncio.gather(*same, return_exceptions=True)
    assert isinstance(answers[0], asyncio.CancelledError)
    assert all(isinstance(each, Overloaded) for each in answers[1:])
    *good, last = await asyncio.gather(*others, return_exceptions=True)
    assert all(isinstance(each, Examined) for each in good)
    assert "64 grammars wait" in str(last)
    assert isinstance(await grammars.of("regex", "a"), Examined)  # what may be tried again is not kept
    await grammars.of("regex", "a")
    assert sorted(asked) == sorted(["a", "a", *(f"b{i}" for i in range(MAX_WAITING - 1))])
    grammars.close()


async def test_the_examiner_starts_and_ends_with_the_router() -> None:
    grammars, app = ExaminedGrammars(fake_engine()[0].tokenizer), FastAPI()
    app.state.service = SimpleNamespace(examined=grammars)
    async with _lifespan(app):
        grammars._thread.submit(lambda: None).result(60.0)  # behind the start
        process = grammars._examiner._process
        assert process is not None
        assert process.poll() is None
    assert process.poll() is not None
