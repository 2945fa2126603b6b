"""Examines each grammar in a process of its own, which ends by itself when that takes too long.

Owns:      the examiner: a process that has read the model's tokenizer and forks a child for each grammar, which
           compiles it before a replica has to. A child's death costs a fork (5 ms), no new start (0.7 s of CPU time).
Invariant: no grammar takes more than MAX_CPU_S of a core or MAX_MEMORY. llguidance bounds most of its work, but not
           all: an intersection of thirty patterns took 500 s, a multiple of 999,983 11 s. A thread that is in it
           cannot be stopped; a process can.
           A grammar is blamed for no other death of its process than by these two limits.
Thread:    any; one grammar at a time, others wait. `close` waits for none. The examiner has one thread, or its children
           could inherit a lock that is never released.

The examiner reads one line of JSON from its standard input for each grammar; the child writes one to its standard
output, or the examiner does if the child could not. It ends when its input does, so it does not outlive its parent.
"""

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from threading import Lock, Timer
from typing import TYPE_CHECKING, Any, NoReturn

from llguidance import LLMatcher, LLTokenizer

from replicas.errors import InvalidRequest, Overloaded
from replicas.grammar.checking import LIMITS, ErrorOf, Examined, Problem, examine
from replicas.types import Constraint

if TYPE_CHECKING:  # Transformers takes seconds to import, which the process has no use for
    from replicas.text.tokenizer import Tokenizer

MAX_CPU_S = 2.0
MAX_MEMORY = 2 << 30  # bytes beside what the examiner has when it is ready
MAX_START_S = 60.0
MAX_WALL_S = 10.0  # a process that was stopped, or has no core
# how a child ends at its limits; memory that Rust cannot have is an abort
_LIMITS_PASSED = (-signal.SIGPROF, -signal.SIGABRT)


class Examiner:
    """The process that examines grammars; it is started by `start`, or when the first grammar is examined."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._tokenizer = tokenizer
        self._process: subprocess.Popen[str] | None = None
        self._lock = Lock()
        self._is_closed = False

    def start(self) -> None:
        """Start the process before it is needed. Blocks."""
        with self._lock:
            self._start()

    def examine(self, kind: str, text: str) -> Examined:
        """Find what can be held of ``text``, as `checking.examine`. Blocks.

        Raises: InvalidRequest; Overloaded if the process was killed, and the one after it, or is closed.
        """
        question = {"kind": kind, "text": text}
        with self._lock:
            answer = self._answer(question) or self._answer(question)
        if answer is None:
            raise Overloaded("the process that examines grammars was killed twice; try again later")
        if "error" in answer:
            raise InvalidRequest(answer["error"])
        problems = tuple(Problem(*each) for each in answer["problems"])
        return Examined(constraint=Constraint(kind=answer["kind"], text=answer["text"]), problems=problems)

    def close(self) -> None:
        self._is_closed = True
        if (process := self._process) is not None:
            _kill(process)  # and what waits for its answer lets go of the lock
        with self._lock:
            self._end()

    def _answer(self, question: dict[str, Any]) -> dict[str, Any] | None:
        """Ask the process; None if it or its child has ended, not at a limit. Raises: InvalidRequest if at one."""
        if self._process is not None and self._process.poll() is not None:
            self._end()
        if self._process is None and not self._start():
            return None
        assert self._process is not None
        answer = _asked(self._process, question, MAX_WALL_S)
        if answer is None:
            self._end()
        elif answer.get("ended") in _LIMITS_PASSED:
            limits = f"{MAX_CPU_S:g} s or {MAX_MEMORY >> 30} GB"
            raise InvalidRequest(f"takes more than {limits} to compile: make it simpler")
        elif "ended" in answer:
            return None
        return answer

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            _kill(process)
            process.communicate()

    def _start(self) -> bool:
        """Start a process, unless there is one. Returns: whether it runs. Raises: InvalidRequest, Overloaded."""
        if self._process is not None:
            return True
        tokenizer = {
            "serialized": self._tokenizer.serialized(), "eos": sorted(self._tokenizer.eos_ids), "max_cpu_s": MAX_CPU_S,
        }  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, "-m", "replicas.grammar.examiner"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # where a panic of llguidance's is written
            text=True,
            encoding="utf-8",
            start_new_session=True,
            # NumPy's BLAS would start threads
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OPENBLAS_NUM_THREADS": "1"},
        )
        if self._is_closed:  # `close` may not have seen the process
            self._end()
            raise Overloaded("the server is shutting down")
        answer = _asked(self._process, tokenizer, MAX_START_S)
        if answer is None or "error" in answer:
            self._end()
        if answer is not None and "error" in answer:
            raise InvalidRequest(f"the tokenizer of this model cannot be constrained: {answer['error']}")
        return answer is not None


def _kill(process: "subprocess.Popen[str]") -> None:
    """End the process and its child, which holds its output open."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _asked(process: "subprocess.Popen[str]", question: dict[str, Any], within_s: float) -> dict[str, Any] | None:
    """Ask and wait for the answer; None if the process has ended. It is killed if it does not answer in time."""
    assert process.stdin is not None
    assert process.stdout is not None
    timer = Timer(within_s, _kill, [process])
    timer.daemon = True
    timer.start()
    try:
        process.stdin.write(json.dumps(question) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        return dict(json.loads(line)) if line.endswith("\n") else None
    except (OSError, ValueError):  # a child that was killed may have written half of its answer
        return None
    finally:
        timer.cancel()


def _serve() -> None:
    """Answer until the input ends."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # a parent may have it ignored or blocked
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    tokenizer = json.loads(sys.stdin.readline())
    try:
        tokens = LLTokenizer(tokenizer["serialized"], eos_token=tokenizer["eos"] or None)
    except Exception as error:  # noqa: BLE001 - llguidance's own
        _answer({"error": _said(error)})
        return

    def error_of(grammar: str) -> str:
        matcher = LLMatcher(tokens, grammar, log_level=0, limits=LIMITS)
        if not matcher.is_error():
            # of a grammar that begins with itself, only the first mask is an error; of a{1000000000} the first token
            mask = int.from_bytes(matcher.compute_bitmask(), "little")
            if mask:
                matcher.consume_token((mask & -mask).bit_length() - 1)
        return str(matcher.get_error())

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MAX_MEMORY, used + MAX_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _answer({})
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _answer_one(json.loads(line), error_of, tokenizer["max_cpu_s"])
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if ended:
            _answer({"ended": ended})


def _answer_one(question: dict[str, Any], error_of: ErrorOf, max_cpu_s: float) -> NoReturn:
    """Examine a grammar, answer, and end the process."""
    status = 1
    try:
        signal.setitimer(signal.ITIMER_PROF, max_cpu_s)  # its signal ends the process
        try:
            found = examine(question["kind"], question["text"], error_of)
            answer = {"kind": found.constraint.kind, "text": found.constraint.text, "problems": found.problems}
        except InvalidRequest as error:
            answer = {"error": str(error)}
        except BaseException as error:  # noqa: BLE001 - a panic of Rust's is no Exception
            answer = {"error": f"does not compile: {_said(error)}"}
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        _answer(answer)
        status = 0
    finally:
        os._exit(status)


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:300]


def _answer(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    _serve()
