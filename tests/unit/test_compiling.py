"""Requests whose grammar is compiled beside the engine: they wait for nothing else, and end like any other."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from replicas.engine import compiling
from replicas.engine.compiling import Compilation, Grammars
from replicas.engine.engine import Engine
from replicas.errors import Fault, InvalidRequest, Overloaded
from replicas.grammar import compiler as compilers
from replicas.grammar.compiler import GrammarCompiler
from replicas.grammar.matcher import Matcher
from replicas.types import Constraint, FinishReason, TokenDelta
from tests.harness import Clock, ask, fake_engine, finish_all

WAIT_S = 60.0


class HeldCompiler:
    """Compiles what it is given when the test says so."""

    def __init__(self, inner: GrammarCompiler) -> None:
        self._inner = inner
        self.go = threading.Event()
        self.began = threading.Semaphore(0)

    def cached(self, constraint: Constraint) -> Matcher | None:
        return self._inner.cached(constraint)

    def warm_up(self) -> object:
        return self._inner.warm_up()

    def compile(self, constraint: Constraint) -> Matcher:
        self.began.release()
        assert self.go.wait(WAIT_S)
        return self._inner.compile(constraint)


@pytest.fixture(name="held")
def _held() -> Iterator[tuple[Engine, HeldCompiler, Clock]]:
    clock = Clock()
    engine, _ = fake_engine(clock=clock)
    compiler = HeldCompiler(engine.grammars.compiler)
    engine.grammars.compiler = compiler  # type: ignore[assignment]
    yield engine, compiler, clock
    compiler.go.set()


def constrained(text: str = "[a-z]+", **sampling: object) -> dict[str, object]:
    return {"constraint": Constraint(kind="regex", text=text), **sampling}


def wait_for(engine: Engine, over: Callable[[list[TokenDelta]], bool]) -> list[TokenDelta]:
    """Step until ``over``; grammars are compiled on another thread."""
    told: list[TokenDelta] = []
    deadline_s = time.monotonic() + WAIT_S
    while not over(told):
        assert time.monotonic() < deadline_s, told
        told += engine.step()
        engine.scheduler.check()
        time.sleep(0.001)
    return told


def raising(error: BaseException) -> Callable[..., None]:
    def refuse(*_: object, **__: object) -> None:
        raise error

    return refuse


def ended(told: list[TokenDelta]) -> bool:
    return any(delta.finish is not None for delta in told)


def test_others_run_while_a_grammar_is_compiled(held: tuple[Engine, HeldCompiler, Clock]) -> None:
    engine, compiler, _ = held
    assert engine.submit(ask("slow", range(1, 9), **constrained())) == []
    assert compiler.began.acquire(timeout=WAIT_S)
    engine.submit(ask("plain", range(1, 9)))
    told = wait_for(engine, ended)
    assert {delta.rid for delta in told} == {"plain"}
    assert engine.has_work
    assert engine.stats().num_waiting == 1


def test_a_request_that_waits_for_its_grammar_can_be_aborted(held: tuple[Engine, HeldCompiler, Clock]) -> None:
    engine, compiler, _ = held
    engine.submit(ask("a", range(1, 9), **constrained(), n=2))
    assert compiler.began.acquire(timeout=WAIT_S)
    deltas = engine.abort("a")
    assert [delta.finish.reason for delta in deltas if delta.finish] == [FinishReason.ABORT] * 2
    assert not engine.has_work
    engine.submit(ask("a", range(1, 9)))  # the id is free
    compiler.go.set()
    assert {delta.rid for delta in finish_all(engine)} == {"a"}


def test_a_deadline_ends_a_request_that_waits_for_its_grammar(held: tuple[Engine, HeldCompiler, Clock]) -> None:
    engine, compiler, clock = held
    request = ask("a", range(1, 9), **constrained())
    object.__setattr__(request, "deadline_s", 1.0)
    engine.submit(request)
    assert compiler.began.acquire(timeout=WAIT_S)
    clock.now_s = 1.5
    (delta,) = wait_for(engine, ended)
    assert delta.finish is not None
    assert (delta.finish.reason, delta.finish.fault) == (FinishReason.ABORT, Fault.TIMED_OUT)


@pytest.mark.parametrize("resumed_ids", [(), (5, 6)])
def test_a_grammar_that_takes_too_long_is_left_to_another_replica_and_compiled_all_the_same(
    held: tuple[Engine, HeldCompiler, Clock], resumed_ids: tuple[int, ...]
) -> None:
    """The router has refused grammars that are slow themselves: this one is slow because the machine is busy."""
    engine, compiler, clock = held
    engine.submit(replace(ask("a", range(1, 9), **constrained()), resumed_ids=resumed_ids))
    assert compiler.began.acquire(timeout=WAIT_S)
    clock.now_s = compiling.WAIT_S
    assert engine.poll() == []
    clock.now_s += 1.0
    (delta,) = wait_for(engine, ended)
    assert delta.finish is not None
    assert (delta.finish.fault, delta.finish.retry_as) == (Fault.UNAVAILABLE, "overloaded")
    compiler.go.set()
    constraint = Constraint(kind="regex", text="[a-z]+")
    deadline_s = time.monotonic() + WAIT_S
    while compiler.cached(constraint) is None:
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def test_no_more_grammars_are_compiled_at_once_than_there_are_threads(held: tuple[Engine, HeldCompiler, Clock]) -> None:
    """The fifth waits in line for 30 s."""
    engine, compiler, clock = held
    for number in range(compiling.MAX_THREADS + 1):
        engine.submit(ask(f"r{number}", range(1, 9), **constrained(f"[a-z]{{{number + 1}}}")))
    for _ in range(compiling.MAX_THREADS):
        assert compiler.began.acquire(timeout=WAIT_S)
    assert not compiler.began.acquire(blocking=False)
    clock.now_s = 31.0
    told = wait_for(engine, lambda told: len(told) == compiling.MAX_THREADS + 1)
    faults = {delta.rid: delta.finish.fault for delta in told if delta.finish}
    assert faults == {f"r{number}": Fault.UNAVAILABLE for number in range(compiling.MAX_THREADS + 1)}


def test_a_request_whose_grammar_is_made_between_two_looks_is_not_lost() -> None:
    grammars = Grammars(fake_engine()[0].tokenizer, 1000, Clock())

    class Racing(Compilation):
        @property
        def wanted(self) -> bool:
            waits, self.made = self.made is None, Overloaded("made by a thread after the first look")
            return waits

    task = Racing(ask("a", [1]), [], Constraint(kind="regex", text="a"), since_s=0.0)
    grammars.waiting.append(task)
    found = [grammars.poll(), grammars.poll()]
    assert found == [[], [task]]


class Panic(BaseException):
    """As pyo3 raises a panic of Rust."""


def test_panics_answer_their_requests_and_leave_threads_for_others(held: tuple[Engine, HeldCompiler, Clock]) -> None:
    engine, compiler, _ = held
    compiler.go.set()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(compiler, "compile", raising(Panic("unwrap on None")))
        for number in range(compiling.MAX_THREADS + 1):
            engine.submit(ask(f"r{number}", range(1, 9), **constrained()))
            told = wait_for(engine, ended)
            assert [(delta.finish.fault, str(delta.finish.message)) for delta in told if delta.finish] == [
                (Fault.INVALID, "the grammar cannot be compiled: Panic('unwrap on None')")
            ]
    engine.submit(ask("good", range(1, 9), **constrained()))
    wait_for(engine, ended)


def test_a_tokenizer_over_which_llguidance_panics_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = fake_engine()
    monkeypatch.setattr(compilers, "LLTokenizer", raising(Panic("no merges")))
    with pytest.raises(InvalidRequest, match="cannot be constrained: no merges"):
        GrammarCompiler(engine.tokenizer, 1000).warm_up()


def test_what_nobody_waits_for_is_not_compiled(held: tuple[Engine, HeldCompiler, Clock]) -> None:
    engine, compiler, _ = held
    for number in range(compiling.MAX_THREADS + 3):
        engine.submit(ask(f"r{number}", range(1, 9), **constrained(f"[a-z]{{{number + 1}}}")))
    for _ in range(compiling.MAX_THREADS):
        assert compiler.began.acquire(timeout=WAIT_S)
    engine.abort(f"r{compiling.MAX_THREADS}")
    engine.submit(ask("last", range(1, 9), **constrained("x")))
    assert [task.request.rid for task in engine.grammars._tasks] == ["r5", "r6", "last"]
    engine.close()
    assert not engine.grammars._tasks
    compiler.go.set()
    deadline_s = time.monotonic() + WAIT_S
    while engine.grammars._num_threads:
        assert time.monotonic() < deadline_s
        time.sleep(0.001)
    assert not compiler.began.acquire(blocking=False)


def test_a_grammar_that_was_compiled_before_starts_its_request_at_once() -> None:
    engine, _ = fake_engine()
    engine.grammars.compiler.compile(Constraint(kind="regex", text="[a-z]+"))
    engine.submit(ask("a", range(1, 9), **constrained()))
    assert not engine.grammars.waiting
    assert engine.find("a") is not None
    assert engine.scheduler.queues.waiting


def test_a_token_that_the_grammar_refuses_ends_its_request_alone() -> None:
    """The fake device knows no masks: what it makes does not fit."""
    engine, _ = fake_engine()
    engine.submit(ask("odd", range(1, 9), **constrained("<[0-9]{3}>")))
    engine.submit(ask("plain", range(3, 9)))
    told = wait_for(engine, lambda told: sum(delta.finish is not None for delta in told) == 2)
    ends = {delta.rid: delta.finish for delta in told if delta.finish}
    assert ends["plain"].reason is FinishReason.LENGTH
    assert (ends["odd"].reason, ends["odd"].fault) == (FinishReason.ERROR, Fault.INVALID)
    assert "does not allow token" in str(ends["odd"].message)


def test_a_model_without_an_end_cannot_be_constrained(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = fake_engine()
    compiler = GrammarCompiler(engine.tokenizer, 1000)
    monkeypatch.setattr(engine.tokenizer, "eos_ids", frozenset())
    with pytest.raises(InvalidRequest, match="no token that ends a text"):
        compiler.compile(Constraint(kind="regex", text="a"))
