"""Examines grammars in a process of its own, which ends by itself when one takes too long.

Owns:      that process: it compiles each grammar for the model's tokenizer before a replica has to.
Invariant: no grammar takes more than MAX_CPU_S of a core or MAX_MEMORY. llguidance bounds most of its work, but not
           all: an intersection of thirty patterns took 500 s, a multiple of 999,983 11 s. A thread that is in it
           cannot be stopped; a process can.
Thread:    any; one grammar at a time, others wait.

The process reads one line of JSON from its standard input for each grammar, and writes one to its standard output. It
ends when its input does, so it does not outlive its parent.
"""

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, LLTokenizer

from replicas.errors import InvalidRequest
from replicas.grammar.checking import LIMITS, Examined, Problem, examine
from replicas.types import Constraint

if TYPE_CHECKING:  # Transformers takes seconds to import, which the process has no use for
    from replicas.text.tokenizer import Tokenizer

MAX_CPU_S = 2.0
MAX_MEMORY = 2 << 30  # bytes beside what the process has when it is ready


class Examiner:
    """The process that examines grammars; it is started when the first is."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._tokenizer = tokenizer
        self._process: subprocess.Popen[str] | None = None
        self._lock = Lock()

    def examine(self, kind: str, text: str) -> Examined:
        """Find what can be held of ``text``, as `checking.examine`. Blocks. Raises: InvalidRequest."""
        with self._lock:
            if self._process is None:
                self._process = self._started()
            answer = _asked(self._process, {"kind": kind, "text": text})
            if answer is None:
                self._end()
                raise InvalidRequest(
                    f"takes more than {MAX_CPU_S:g} s or {MAX_MEMORY >> 30} GB to compile: make it simpler"
                )
        if "error" in answer:
            raise InvalidRequest(answer["error"])
        problems = tuple(Problem(*each) for each in answer["problems"])
        return Examined(constraint=Constraint(kind=answer["kind"], text=answer["text"]), problems=problems)

    def close(self) -> None:
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _started(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "replicas.grammar.examiner"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # where a panic of llguidance's is written
            text=True,
            encoding="utf-8",
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        tokenizer = {"serialized": self._tokenizer.serialized(), "eos": sorted(self._tokenizer.eos_ids)}
        if _asked(process, tokenizer) is None:
            process.kill()
            process.communicate()
            raise InvalidRequest("the tokenizer of this model cannot be constrained")
        return process


def _asked(process: "subprocess.Popen[str]", question: dict[str, Any]) -> dict[str, Any] | None:
    """Ask and wait for the answer; None if the process has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps(question) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
    except OSError:
        return None
    return None if not line else dict(json.loads(line))


def _serve() -> None:
    """Answer until the input ends."""
    tokenizer = json.loads(sys.stdin.readline())
    tokens = LLTokenizer(tokenizer["serialized"], eos_token=tokenizer["eos"] or None)

    def error_of(grammar: str) -> str:
        return str(LLMatcher(tokens, grammar, log_level=0, limits=LIMITS).get_error())

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MAX_MEMORY, used + MAX_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _answer({})
    for line in sys.stdin:
        question = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)  # its signal ends the process
        try:
            found = examine(question["kind"], question["text"], error_of)
        except InvalidRequest as error:
            _answer({"error": str(error)})
        else:
            _answer({"kind": found.constraint.kind, "text": found.constraint.text, "problems": found.problems})
        signal.setitimer(signal.ITIMER_PROF, 0.0)


def _answer(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    _serve()
