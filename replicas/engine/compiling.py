"""Compiles the grammars of constrained requests beside the engine's thread, and gives each choice its matcher.

Owns:      the requests whose grammar is being compiled, and the threads that compile.
Never:     keeps a request waiting whose grammar was compiled before; runs or ends a request (engine.py does).
Invariant: at most MAX_THREADS grammars are being compiled, including grammars whose requests have ended. `poll` returns
           each request once.
Thread:    engine thread; `_warm_up`, `_work` and `_next` run on threads that compile, which call `on_ready`.
"""

import collections
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from replicas.engine.open_requests import Choice
from replicas.errors import InvalidRequest, MantaError, Overloaded
from replicas.grammar.compiler import GrammarCompiler
from replicas.grammar.matcher import Matcher
from replicas.request import Req
from replicas.scheduler.tokens import not_allowed
from replicas.text.tokenizer import Tokenizer
from replicas.types import Constraint, Finish, GenerateRequest

log = logging.getLogger(__name__)
# for a grammar: for a free thread, for the conversion of the tokenizer, and for the compiler. What takes more than 2 s
# of CPU time was refused before it came here (grammar/examiner.py): the machine is busy where a grammar takes so long
WAIT_S = 30.0
MAX_THREADS = 4


@dataclass(slots=True, eq=False)
class Compilation:
    """A request whose grammar is being compiled."""

    request: GenerateRequest
    choices: Sequence[Choice]
    constraint: Constraint
    since_s: float
    made: Matcher | MantaError | None = None  # set on the thread that compiles it

    @property
    def wanted(self) -> bool:
        """Whether its request still waits for the grammar: it may have been aborted, or be past its deadline."""
        return self.made is None and any(choice.req.finish is None for choice in self.choices)


class Grammars:
    """The grammars of one engine's requests."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, clock: Callable[[], float]) -> None:
        self.compiler = GrammarCompiler(tokenizer, vocab_size)
        self.on_ready: Callable[[], None] = lambda: None
        self._eos_ids = tokenizer.eos_ids
        self._clock = clock
        self.waiting: list[Compilation] = []  # until `poll`
        self._tasks: collections.deque[Compilation] = collections.deque()  # in line for a thread
        self._lock = threading.Lock()  # of the line and of the number of threads
        self._num_threads = 0

    def warm_up(self) -> None:
        """Convert the tokenizer on a thread, so that the first constrained request does not wait for it (0.3 s)."""
        threading.Thread(target=self._warm_up, name="manta-grammar-tokenizer", daemon=True).start()

    def _warm_up(self) -> None:
        try:
            self.compiler.warm_up()
        except InvalidRequest as error:
            log.info("no output can be constrained: %s", error)

    def start(self, request: GenerateRequest, choices: Sequence[Choice], constraint: Constraint) -> None:
        """Compile the grammar of ``request``, which `poll` returns then."""
        task = Compilation(request, choices, constraint, self._clock())
        self.waiting.append(task)
        with self._lock:
            self._tasks = collections.deque((*(each for each in self._tasks if each.wanted), task))
            if self._num_threads < MAX_THREADS:
                self._num_threads += 1
                threading.Thread(target=self._work, name="manta-grammar", daemon=True).start()

    def poll(self) -> list[Compilation]:
        """Return the requests that wait no longer; ``made`` of each is its matcher, or why it has none."""
        now_s = self._clock()
        done, waiting = list[Compilation](), list[Compilation]()
        for task in self.waiting:
            wanted = task.wanted  # read once: a thread may set ``made`` at any time
            if wanted and now_s - task.since_s > WAIT_S:
                task.made = Overloaded(f"its grammar was not compiled within {WAIT_S:g} s: try again later")
                wanted = False
            (waiting if wanted else done).append(task)
        self.waiting = waiting
        return done

    def close(self) -> None:
        """Let the threads end with the grammars that they are compiling."""
        with self._lock:
            self._tasks.clear()

    def guide(self, req: Req, matcher: Matcher) -> Finish | None:
        """Give ``req`` a copy of ``matcher``, and let that consume the output so far. Returns: its end, if that is
        refused."""
        req.eos_ids |= self._eos_ids
        guide = matcher.copy(req.stop_ids)
        for position, token_id in enumerate(req.output_ids.tolist()):
            if not guide.consume(token_id):
                return not_allowed(f"its resumed output does not fit the constraint at token {position}: {guide.error}")
        req.guide = guide
        return None

    def _work(self) -> None:
        """Compile what is in line, and end."""
        while (task := self._next()) is not None:
            try:
                made: Matcher | MantaError = self.compiler.compile(task.constraint)
            except MantaError as error:
                made = error
            except BaseException as error:  # a panic of llguidance is no Exception; its request is answered
                log.exception("a grammar could not be compiled")
                made = InvalidRequest(f"the grammar cannot be compiled: {error!r}")
            if task.made is None:
                task.made = made
            self.on_ready()

    def _next(self) -> Compilation | None:
        with self._lock:
            while self._tasks:
                task = self._tasks.popleft()
                if task.wanted:
                    return task
            self._num_threads -= 1
            return None
