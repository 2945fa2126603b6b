"""Examines each grammar and schema of a client once, and keeps the results by digest.

Owns:      the examiners (replicas/grammar/examiner.py), the line of each caller that waits for them, and the bounded
           cache of their results.
Invariant: what waits for one grammar waits for one examination of it. A caller has at most one examiner at a time, so
           another one's small grammar finds the second. A grammar for which no caller waits leaves the lines; one
           that is being examined goes on to its end, at most 2 s of CPU time.
Thread:    the router's event loop; `of` does not block it. A thread waits for each examiner.
Source:    the order of callers: start-time fair queueing (Goyal et al. 1996), by the time that examiners took.
"""

import asyncio
import functools
import hashlib
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from replicas.errors import Fault, InvalidRequest, MantaError, Overloaded
from replicas.grammar.checking import Examined
from replicas.grammar.examiner import MAX_CPU_S, Examiner
from replicas.text.tokenizer import Tokenizer

MAX_KEPT = 8 << 20  # characters of the grammars that are kept
MAX_WAITING = 64  # grammars of all callers, those that are being examined among them
MAX_OF_CALLER = 16  # in the line of one API key; requests without one share a line, which MAX_WAITING bounds
NUM_EXAMINERS = 2


class TooManyForms(MantaError):
    """Too many grammars of one API key wait to be examined."""

    fault = Fault.TOO_MANY
    retry_after_s = MAX_CPU_S


@dataclass(slots=True, eq=False)
class _Asked:
    """A grammar that waits to be examined, or is."""

    kind: str
    text: str
    answer: asyncio.Future[Examined | str]
    num_waiting: Counter[str] = field(default_factory=Counter)  # by caller
    begun: bool = False


class _Lines:
    """The line of each caller: first come, first served; and whose turn it is."""

    def __init__(self) -> None:
        self._lines: dict[str, dict[bytes, _Asked]] = {}  # a grammar is in the line of each caller that waits for it
        self._used_s: dict[str, float] = {}  # of the examiners' time
        self._floor_s = 0.0  # what the caller whose turn was last had used: one that comes back has used that at least

    def length(self, caller: str) -> int:
        return len(self._lines.get(caller, ()))

    def enter(self, caller: str, key: bytes, asked: _Asked) -> None:
        if caller not in self._lines:
            self._used_s[caller] = max(self._used_s.get(caller, 0.0), self._floor_s)
        self._lines.setdefault(caller, {})[key] = asked

    def leave(self, callers: Collection[str], key: bytes) -> None:
        for caller in callers:
            line = self._lines.get(caller, {})
            line.pop(key, None)
            if not line:
                self._lines.pop(caller, None)

    def clear(self) -> None:
        self._lines.clear()

    def next(self, busy: Collection[str]) -> tuple[str, bytes, _Asked] | None:
        """Find the caller that has used the least time, of those not ``busy``, and the first grammar in its line."""
        waiting = [caller for caller in self._lines if caller not in busy]
        if not waiting:
            return None
        caller = min(waiting, key=self._used_s.__getitem__)
        self._floor_s = self._used_s[caller]
        return caller, *next(iter(self._lines[caller].items()))

    def used(self, caller: str, time_s: float) -> None:
        self._used_s[caller] += time_s


class ExaminedGrammars:
    """The grammars that were asked for lately, good or not."""

    def __init__(self, tokenizer: Tokenizer, clock: Callable[[], float] = time.monotonic) -> None:
        self._examiners = [Examiner(tokenizer) for _ in range(NUM_EXAMINERS)]
        self._idle = [*self._examiners]  # the last is taken first
        self._threads = ThreadPoolExecutor(NUM_EXAMINERS, thread_name_prefix="manta-examine")
        self._clock = clock
        self._kept: OrderedDict[bytes, Examined | str] = OrderedDict()
        self._size = 0
        self._asked: dict[bytes, _Asked] = {}  # without an answer
        self._lines = _Lines()
        self._busy: set[str] = set()  # callers that have an examiner

    async def of(self, kind: str, text: str, caller: str = "") -> Examined:
        """Find what can be held of ``text``, as `examine`, in the line of ``caller``, the name of an API key.

        Raises: InvalidRequest; Overloaded if too many wait, TooManyForms if too many of this caller do.
        """
        key = hashlib.sha256(f"{kind}\0{text}".encode(errors="surrogatepass")).digest()
        found = self._kept.get(key)
        if found is None:
            found = await self._answer(self._enter(key, kind, text, caller), key, caller)
        else:
            self._kept.move_to_end(key)
        if isinstance(found, str):
            raise InvalidRequest(found)
        return found

    def start(self, *, several_callers: bool) -> None:
        """Start the examiners, so that no request waits for that; of one caller alone no more than one is used."""
        for examiner in self._examiners if several_callers else self._examiners[-1:]:
            self._threads.submit(examiner.start)

    def close(self) -> None:
        self._lines.clear()
        for asked in self._asked.values():
            if not asked.begun:
                asked.answer.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)
        for examiner in self._examiners:
            examiner.close()

    def _enter(self, key: bytes, kind: str, text: str, caller: str) -> _Asked:
        asked = self._asked.get(key)
        if asked is None and len(self._asked) >= MAX_WAITING:
            raise Overloaded(f"{len(self._asked)} grammars wait to be examined; try again later")
        if asked is not None and (asked.begun or caller in asked.num_waiting):
            return asked
        if caller and self._lines.length(caller) >= MAX_OF_CALLER:
            raise TooManyForms(f"{MAX_OF_CALLER} grammars of this API key wait to be examined; try again later")
        if asked is None:
            asked = self._asked[key] = _Asked(kind, text, asyncio.get_running_loop().create_future())
        self._lines.enter(caller, key, asked)
        return asked

    async def _answer(self, asked: _Asked, key: bytes, caller: str) -> Examined | str:
        asked.num_waiting[caller] += 1
        self._begin()
        try:
            return await asyncio.shield(asked.answer)  # others may wait for it too
        except asyncio.CancelledError:
            if not asked.begun:
                asked.num_waiting[caller] -= 1
                if not asked.num_waiting[caller]:
                    self._lines.leave([caller], key)
                    del asked.num_waiting[caller]
                if not asked.num_waiting:
                    del self._asked[key]
            raise

    def _begin(self) -> None:
        """Give the idle examiners what is next."""
        while self._idle and (chosen := self._lines.next(self._busy)) is not None:
            caller, key, asked = chosen
            self._lines.leave(asked.num_waiting, key)
            asked.begun, examiner = True, self._idle.pop()
            self._busy.add(caller)
            done = functools.partial(self._done, caller, key, examiner, self._clock())
            asyncio.get_running_loop().run_in_executor(
                self._threads, _examined, examiner, asked.kind, asked.text
            ).add_done_callback(done)

    def _done(
        self, caller: str, key: bytes, examiner: Examiner, since_s: float, found: asyncio.Future[Examined | str]
    ) -> None:
        asked = self._asked.pop(key)
        self._idle.append(examiner)
        self._busy.remove(caller)
        self._lines.used(caller, self._clock() - since_s)
        if found.cancelled():
            asked.answer.cancel()
        elif (error := found.exception()) is not None:
            asked.answer.set_exception(error)
            asked.answer.exception()  # it is no fault if no caller waits
        else:
            self._keep(key, found.result())
            asked.answer.set_result(found.result())
        self._begin()

    def _keep(self, key: bytes, found: Examined | str) -> None:
        self._kept[key] = found
        self._size += _size(found)
        while self._size > MAX_KEPT and len(self._kept) > 1:
            self._size -= _size(self._kept.popitem(last=False)[1])


def _examined(examiner: Examiner, kind: str, text: str) -> Examined | str:
    try:
        return examiner.examine(kind, text)
    except InvalidRequest as error:
        return str(error)


def _size(found: Examined | str) -> int:
    return 1000 + (len(found) if isinstance(found, str) else len(found.constraint.text))
