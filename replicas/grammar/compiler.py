"""Compiles constraints for one model, and keeps what was compiled.

Owns:      llguidance's form of the tokenizer, of which a process needs one, and the compiled grammars, the last used of
           them within CACHE_BYTES.
Never:     follows an output: each gets a copy of the compiled matcher (matcher.py).
Invariant: a matcher in the cache has consumed nothing. Grammars have limits (checking.LIMITS), on what a mask costs
           too.
Thread:    any. The tokenizer is converted once (0.3 s), by the first caller; grammars compile without the GIL, and two
           at the same time.
"""

import hashlib
import threading
from collections import OrderedDict

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from replicas.errors import InvalidRequest
from replicas.grammar.checking import LIMITS, grammar_of
from replicas.grammar.matcher import Matcher, Vocabulary, continuing
from replicas.text.tokenizer import Tokenizer
from replicas.types import Constraint

CACHE_BYTES = 64 << 20  # of compiled grammars, as `_bytes_of` estimates them

class GrammarCompiler:
    """The compiled grammars of one model."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """``vocab_size``: of the logits, which may be padded beyond the tokenizer's ids."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._vocabulary: Vocabulary | None = None
        self._lock = threading.Lock()  # of the cache
        self._converting = threading.Lock()
        self._compiled: OrderedDict[bytes, tuple[Matcher, int]] = OrderedDict()  # with its bytes, last used last
        self._num_bytes = 0

    def warm_up(self) -> Vocabulary:
        """Convert the tokenizer, unless that is done. Raises: InvalidRequest for one that llguidance cannot read."""
        with self._converting:
            if self._vocabulary is None:
                self._vocabulary = self._convert()
            return self._vocabulary

    def cached(self, constraint: Constraint) -> Matcher | None:
        """Return a matcher of ``constraint`` if that was compiled before; takes microseconds."""
        digest = _digest(constraint)
        with self._lock:
            found = self._compiled.get(digest)
            if found is None:
                return None
            self._compiled.move_to_end(digest)
            return found[0].copy()

    def compile(self, constraint: Constraint) -> Matcher:
        """Return a matcher of ``constraint``, at its beginning.

        Raises: InvalidRequest with what is wrong in the grammar, or which limit it passes.
        """
        found = self.cached(constraint)
        if found is not None:
            return found
        vocabulary = self.warm_up()
        grammar = grammar_of(constraint)
        core = LLMatcher(vocabulary.tokens, grammar, log_level=0, limits=LIMITS)
        if core.is_error():
            raise InvalidRequest(f"the {constraint.kind} cannot be compiled: {core.get_error()}"[:1000])
        made = Matcher(core, vocabulary, after=constraint.after, opens=constraint.opens)
        for _ in range(2):  # the first fills llguidance's own caches: the second says what a mask costs
            trial = Matcher(core.deep_copy(), vocabulary)
            trial.fill(np.empty(vocabulary.num_words, np.int32))
            if trial.error is not None:
                break
        if trial.error is not None:
            raise InvalidRequest(f"the {constraint.kind} allows no token: {trial.error}"[:1000])
        made._mask_s = trial.mask_s
        if constraint.after and constraint.opens:
            continuing(vocabulary, constraint.opens.encode())  # a loop over the vocabulary, which no step waits for
        with self._lock:
            self._keep(_digest(constraint), made, _bytes_of(grammar))
        return made.copy()

    def _keep(self, digest: bytes, made: Matcher, num_bytes: int) -> None:
        if digest not in self._compiled:
            self._compiled[digest] = made, num_bytes
            self._num_bytes += num_bytes
        while self._num_bytes > CACHE_BYTES and len(self._compiled) > 1:
            _, (_, gone) = self._compiled.popitem(last=False)
            self._num_bytes -= gone

    def _convert(self) -> Vocabulary:
        tokenizer = self._tokenizer
        eos_ids = tokenizer.eos_ids
        if not eos_ids:
            raise InvalidRequest("this model has no token that ends a text, which a constrained output needs")
        size = max(self._vocab_size, tokenizer.vocab_size)
        try:
            tokens = LLTokenizer(tokenizer.serialized(), n_vocab=size, eos_token=sorted(eos_ids))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # what it cannot read is a ValueError or a panic, which is no Exception
            raise InvalidRequest(f"the tokenizer of this model cannot be constrained: {error}") from error
        pieces = tokenizer.pieces(skip_special_tokens=False)
        return Vocabulary(tokens=tokens, size=size, pieces=pieces, eos_ids=eos_ids)


def _digest(constraint: Constraint) -> bytes:
    fields = (constraint.kind, constraint.text, constraint.after, constraint.opens)
    return hashlib.sha256("\0".join(fields).encode(errors="surrogatepass")).digest()


def _bytes_of(grammar: str) -> int:
    """Estimate the memory of a compiled grammar: measured, 9 KB for 12 fields, and a lexer that grows as it is used."""
    return (64 << 10) + 64 * len(grammar)
