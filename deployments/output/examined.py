"""What clients ask of outputs, examined once: the results of the examiner, by digest.

Owns:      the thread that waits for the examiner (replicas/grammar/examiner.py), and the bounded cache of its results.
Thread:    the router's event loop; `of` does not block it.
"""

import asyncio
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
        self._num_waiting = 0

    async def of(self, kind: str, text: str) -> Examined:
        """Find what can be held of ``text``, as `examine`. Raises: InvalidRequest; Overloaded if too many wait."""
        key = hashlib.sha256(f"{kind}\0{text}".encode(errors="surrogatepass")).digest()
        found = self._kept.get(key)
        if found is None:
            if self._num_waiting >= MAX_WAITING:
                raise Overloaded(f"{self._num_waiting} grammars wait to be examined; try again later")
            self._num_waiting += 1
            try:
                found = await asyncio.get_running_loop().run_in_executor(self._thread, self._examined, kind, text)
            finally:
                self._num_waiting -= 1
            self._keep(key, found)
        self._kept.move_to_end(key)
        if isinstance(found, str):
            raise InvalidRequest(found)
        return found

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._examiner.close()

    def _examined(self, kind: str, text: str) -> Examined | str:
        try:
            return self._examiner.examine(kind, text)
        except InvalidRequest as error:
            return str(error)

    def _keep(self, key: bytes, found: Examined | str) -> None:
        if key not in self._kept:
            self._kept[key] = found
            self._size += _size(found)
        while self._size > MAX_KEPT and len(self._kept) > 1:
            self._size -= _size(self._kept.popitem(last=False)[1])


def _size(found: Examined | str) -> int:
    return 1000 + (len(found) if isinstance(found, str) else len(found.constraint.text))
