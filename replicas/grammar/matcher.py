"""The place of one output in its grammar: which tokens may come next, which must, and whether it may end here.

Owns:      the state of llguidance for one choice of one request, what stands before a grammar that begins late, and the
           thread that computes masks while a step runs.
Never:     samples, or edits logits (runner/sampler.py).
Invariant: a token that the mask does not allow is refused, and nothing is allowed after an error. llguidance raises
           nothing: after each call it is asked for its error. A mask has one bit for each id of the logits; ids that
           are not in the tokenizer are never set.
Thread:    one at a time. `begin_masks` gives matchers to another thread, until `words` has waited for it.

Masks are computed on three threads: those of a step's rows beside the step, one after the other; those that would take
longer than the step, of running and of waiting requests, on two threads that others of this process go before, and
their rows are in no step meanwhile (scheduler/rounds.py).

A constraint with ``after`` begins behind the first occurrence of that text in the bytes of the output: before, all
tokens are allowed but those that end the output, unless the grammar takes an empty text. The token in which the text
ends may hold more: the grammar takes that if it can; if not, it begins behind the token. With ``opens`` the output's
beginning decides: with all of that text the grammar begins late, with any other it begins at once. Until then both ways
are open, over several tokens if need be.
"""

import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer

from replicas.grammar.checking import explained

log = logging.getLogger(__name__)
Words = npt.NDArray[np.int32]  # [ceil(V / 32)] bit t % 32 of word t // 32: whether token t may come next
NICE = 10  # of the thread of long masks: about a tenth of a core beside a thread of the engine, all of an idle one
MOST_DRAFTED_S = 0.0005  # of a mask: the masks of a draft are computed while its step waits


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Vocabulary:
    """What all matchers of a model share."""

    tokens: LLTokenizer
    size: int  # V, of the logits
    pieces: Sequence[bytes]  # of the tokens, special ones too
    eos_ids: frozenset[int]

    @property
    def num_words(self) -> int:
        return -(-self.size // 32)


class Matcher:
    """The matcher of one output."""

    def __init__(
        self,
        core: LLMatcher,
        vocabulary: Vocabulary,
        *,
        after: str = "",
        opens: str = "",
        stop_ids: frozenset[int] = frozenset(),
    ) -> None:
        """``stop_ids``: ids besides the eos ids that end the output; allowed exactly where the grammar accepts."""
        self._core = core
        self._vocabulary = vocabulary
        self._after = after.encode()
        self._tail = b""  # the last bytes of the output that ``after`` may begin with
        self._stop_ids = stop_ids - vocabulary.eos_ids
        self._opens = opens.encode() if after else b""  # what is left of it, while the output may still go on with it
        self._unread: LLMatcher | None = None  # the grammar at its beginning, while some of ``opens`` has come
        self._begun = not self._after or bool(opens)
        self._filling: tuple[Future[Words], int] | None = None  # the masks of a step, and which of them is this one's
        self._is_apart = False  # ``_filling`` is of this one alone
        self._over = False  # its output ended before a mask was computed that a step under way may ask for
        self._refused: str | None = None
        self._mask_s = 0.0

    def copy(self, stop_ids: frozenset[int] = frozenset()) -> "Matcher":
        """Return a matcher in the same place for another output, which ``stop_ids`` end too."""
        made = Matcher(self._core.deep_copy(), self._vocabulary, stop_ids=stop_ids)
        made._after, made._tail, made._begun, made._opens = self._after, self._tail, self._begun, self._opens
        made._unread = self._unread  # it is copied before it is used
        made._mask_s = self._mask_s
        return made

    @property
    def error(self) -> str | None:
        """Why no further token is allowed: one was refused, or a limit of the grammar was reached; else None."""
        if self._refused is not None or self._opens or not self._core.is_error():
            return self._refused
        return explained(str(self._core.get_error())).split("\n", 1)[0]

    @property
    def _is_sound(self) -> bool:
        return self._refused is None and not self._core.is_error()

    @property
    def is_accepting(self) -> bool:
        """Whether the output may end here."""
        return self._is_sound and bool(self._core.is_accepting())

    def consume(self, token_id: int) -> bool:
        """Take in the next token. Returns: False if the grammar does not allow it; ``error`` says why then."""
        if self._filling is not None:
            self._filling[0].exception()  # waits: llguidance raises where two threads use one matcher
        self._filling = None
        if self._opens and self._may_open(token_id):
            return True
        if not self._begun:
            self._look_for_start(token_id)
            return True
        if self.error is not None:
            return False
        if token_id in self._stop_ids and self._core.is_accepting():
            return True
        if self._core.is_stopped() and token_id not in self._vocabulary.eos_ids:
            self._refused = f"token {token_id} comes after the end of the grammar"
        elif not self._core.consume_token(token_id):
            self._refused = f"the grammar does not allow token {token_id}"
        return self._refused is None

    def along(self, token_ids: Sequence[int]) -> list["Matcher"]:
        """Return matchers that stand behind each of ``token_ids``, the next of the output, up to the first that the
        grammar does not allow or behind which it forces another."""
        places = [self]
        for token_id in token_ids if self.mask_s <= MOST_DRAFTED_S else ():
            place = places[-1].copy(self._stop_ids)
            if not place.consume(token_id) or place.forced() is not None:
                break
            places.append(place)
        return places[1:]

    def forced(self) -> int | None:
        """Return the token that alone may come next, where the grammar knows it without a mask; else None."""
        if not self._begun or self._opens or self.error is not None:
            return None
        if self._core.is_stopped():
            ends = self._vocabulary.eos_ids | self._stop_ids
            return next(iter(ends)) if len(ends) == 1 else None
        ahead = self._core.compute_ff_tokens()
        return int(ahead[0]) if ahead and not (self._stop_ids and self._core.is_accepting()) else None

    def fill(self, row: Words) -> None:
        """Write the mask into ``row`` [ceil(V / 32)], which is contiguous."""
        if not self._begun:
            row.fill(-1)
            for token_id in () if self.is_accepting else self._vocabulary.eos_ids | self._stop_ids:
                row[token_id // 32] &= ~_bit(token_id)
            return
        row.fill(0)
        if self._is_sound:
            try:
                self._compute(row)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # also a panic, which is no Exception: it ends this output, not the engine
                log.exception("a mask could not be computed")
                self._refused = f"no mask can be computed: {error!r}"
        self._finish(row)

    @property
    def mask_s(self) -> float:
        """The CPU seconds of its last mask; of none yet, of the first one of its grammar; 0 before that begins."""
        return self._mask_s if self._begun else 0.0

    @property
    def is_pending(self) -> bool:
        """Whether a thread computes its mask, or will."""
        return self._filling is not None and not self._filling[0].done()

    def drop(self) -> None:
        """Compute no mask of it any more that no other's hangs on: its output is over."""
        if self._filling is not None and self._is_apart and self._filling[0].cancel():
            self._filling, self._over = None, True

    @property
    def due_s(self) -> float:
        """The CPU seconds that the mask of the next token is expected to take; 0 where it is there, or needs none."""
        if self._filling is not None:  # until it is done, another thread has the matcher
            return 0.0 if self._filling[0].done() else self.mask_s
        return self.mask_s if self._begun and self._is_sound else 0.0

    def _compute(self, row: Words) -> None:
        """Let llguidance write the mask into ``row`` [ceil(V / 32)], without the GIL."""
        began_s = time.thread_time()
        self._core.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        self._mask_s = time.thread_time() - began_s

    def words(self) -> Words | None:
        """Return the mask of the next token, once it is computed; None where every token may come, or none counts."""
        if self._over or (not self._begun and self.is_accepting):
            return None
        if self._filling is None or self._filling[0].exception() is not None:  # then the fault of one of the batch
            alone = np.empty(self._vocabulary.num_words, np.int32)
            self.fill(alone)
            return alone
        future, index = self._filling
        row: Words = future.result()[index]
        self._finish(row)
        return row

    def _finish(self, row: Words) -> None:
        """Correct what llguidance wrote: nothing after an error, stop ids where the output may end, and ``opens``."""
        if self.error is not None:
            row.fill(0)
            return
        for token_id in self._stop_ids:
            row[token_id // 32] &= ~_bit(token_id)
            if self._core.is_accepting():
                row[token_id // 32] |= _bit(token_id)
        if self._opens:
            row |= continuing(self._vocabulary, self._opens)

    def _may_open(self, token_id: int) -> bool:
        """Take in a token of an output that has nothing but a part of ``opens`` yet. Returns: whether it goes on with
        that; else it is the grammar's."""
        pieces, opens = self._vocabulary.pieces, self._opens
        piece = pieces[token_id] if token_id < len(pieces) else b""
        if piece.startswith(opens):
            self._core = self._core if self._unread is None else self._unread.deep_copy()
            self._begun, self._opens, self._unread = False, b"", None
            self._look_for_start(token_id)
        elif piece and opens.startswith(piece):
            if self._unread is None:
                self._unread = self._core.deep_copy()
            self._opens = opens[len(piece) :]
            if not self._core.is_error():
                self._core.consume_token(token_id)  # an error here closes the grammar's way alone
        else:
            self._opens, self._unread = b"", None
            return False
        return True

    def _look_for_start(self, token_id: int) -> None:
        pieces = self._vocabulary.pieces
        seen = self._tail + (pieces[token_id] if token_id < len(pieces) else b"")
        at = seen.find(self._after)
        if at < 0:
            self._tail = seen[max(0, len(seen) - len(self._after) + 1) :]
            return
        self._begun, rest = True, seen[at + len(self._after) :]
        if rest:
            tokens = self._vocabulary.tokens.tokenize_bytes(rest)
            trial = self._core.deep_copy()
            if trial.try_consume_tokens(tokens) == len(tokens):
                self._core = trial

    def begin_masks(self, others: Sequence["Matcher"], *, apart: bool = False, first: bool = False) -> None:
        """Start to compute the masks of this matcher and ``others``, on another thread and without the GIL; ``apart``:
        on that of long ones; ``first``: and of requests that wait."""
        ready = [each for each in (self, *others) if each._begun and each._filling is None and each._is_sound]
        if ready:
            thread = (_FIRST if first else _APART) if apart else _BESIDE
            future = thread.submit(_fill_all, ready, self._vocabulary.num_words)
            for row, each in enumerate(ready):
                each._filling, each._is_apart = (future, row), len(ready) == 1


@functools.lru_cache(maxsize=64)
def continuing(vocabulary: Vocabulary, text: bytes) -> Words:
    """Make the mask of the tokens that are a beginning of ``text``, or begin with all of it."""
    row = np.zeros(vocabulary.num_words, np.int32)
    for token_id, piece in enumerate(vocabulary.pieces):
        if piece and (text.startswith(piece) or piece.startswith(text)):
            row[token_id // 32] |= _bit(token_id)
    return row


def _bit(token_id: int) -> np.int32:
    return np.int32(np.uint32(1 << token_id % 32).view(np.int32))


def _fill_all(matchers: Sequence[Matcher], num_words: int) -> Words:
    """Compute the masks of ``matchers`` [R]: [R, ceil(V / 32)]."""
    masks = np.zeros((len(matchers), num_words), np.int32)
    for row, each in zip(masks, matchers, strict=True):
        each._compute(row)
    return masks


def _go_behind() -> None:
    """Let other threads go before this one, where threads have priorities of their own (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)


# one thread each, which starts with its first mask: the other cores run the model
_BESIDE = ThreadPoolExecutor(1, thread_name_prefix="manta-masks")
_APART = ThreadPoolExecutor(1, thread_name_prefix="manta-long-masks", initializer=_go_behind)
_FIRST = ThreadPoolExecutor(1, thread_name_prefix="manta-first-masks", initializer=_go_behind)
