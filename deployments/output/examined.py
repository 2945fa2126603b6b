"""What clients ask of outputs, examined once: the results of the examiner, by digest.

Owns:      the thread that waits for the examiner (replicas/grammar/examiner.py), and the bounded cache of its results.
Thread:    the router's event loop; `of` does not block it.
"""

import asyncio
import functools
import hashlib
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

from replicas.errors import InvalidRequest, Overloaded
from replicas.grammar.checking import Examined
from replicas.grammar.examiner import Examiner
from replicas.text.tokenizer import Tokenizer

MAX_KEPT = 8 << 20  # characters of the grammars that are kept
MAX_WAITING = 64


class ExaminedGrammars:
    """The grammars that were asked for lately, good or not."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._examiner = Examiner(tokenizer)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="manta-examine")
        self._kept: OrderedDict[bytes, Examined | str] = OrderedDict()
        self._size = 0
        self._waiting: dict[bytes, asyncio.Future[Examined | str]] = {}

    async def of(self, kind: str, text: str) -> Examined:
        """Find what can be held of ``text``, as `examine`. Raises: InvalidRequest; Overloaded if too many wait."""
        key = hashlib.sha256(f"{kind}\0{text}".encode(errors="surrogatepass")).digest()
        found = self._kept.get(key)
        if found is None:
            if key not in self._waiting:
                self._examine(key, kind, text)
            found = await asyncio.shield(self._waiting[key])  # others may wait for it too
        else:
            self._kept.move_to_end(key)
        if isinstance(found, str):
            raise InvalidRequest(found)
        return found

    def start(self) -> None:
        """Start the examiner, so that the first request does not wait for it."""
        self._thread.submit(self._examiner.start)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._examiner.close()

    def _examine(self, key: bytes, kind: str, text: str) -> None:
        if len(self._waiting) >= MAX_WAITING:
            raise Overloaded(f"{len(self._waiting)} grammars wait to be examined; try again later")
        found = asyncio.get_running_loop().run_in_executor(self._thread, self._examined, kind, text)
        self._waiting[key] = found
        found.add_done_callback(functools.partial(self._done, key))

    def _done(self, key: bytes, found: asyncio.Future[Examined | str]) -> None:
        del self._waiting[key]
        if not found.cancelled() and found.exception() is None:
            self._keep(key, found.result())

    def _examined(self, kind: str, text: str) -> Examined | str:
        try:
            return self._examiner.examine(kind, text)
        except InvalidRequest as error:
            return str(error)

    def _keep(self, key: bytes, found: Examined | str) -> None:
        self._kept[key] = found
        self._size += _size(found)
        while self._size > MAX_KEPT and len(self._kept) > 1:
            self._size -= _size(self._kept.popitem(last=False)[1])


def _size(found: Examined | str) -> int:
    return 1000 + (len(found) if isinstance(found, str) else len(found.constraint.text))
