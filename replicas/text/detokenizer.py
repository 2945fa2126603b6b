"""Token ids to text, incrementally, for one choice of one request.

Owns:      the undecided end of the text: an unfinished character's bytes, and characters that may begin a stop string.
           How a vocabulary spells bytes: byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM), where each character of a token
           is one byte, and SentencePiece (Llama 2, Mistral, Gemma), where U+2581 is a space and ``<0xE2>`` a byte.
Never:     decodes what it has emitted again; knows why a request ends, except for its stop strings; guesses (an unknown
           decoder is refused).
Invariant: emitted text stays: the deltas and the flush add up to ``tokenizer.decode(all ids)``, cut at the stop string
           that is completed first (of several completed by one character, the longest). The text depends on the ids
           alone, not on how they were cut into pushes: a fresh Detokenizer given the same ids emits the same.
Thread:    the owner of the request; a StopStrings is read-only and shared.
Cost:      O(bytes of the new tokens): one incremental UTF-8 step a token and one automaton step a character.
"""

import codecs
import json
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple, Protocol

from replicas.errors import InvalidConfig
from replicas.types import SamplingParams, TokenIds

_new_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class Pieces(Protocol):
    """The part of a Tokenizer that a Detokenizer uses."""

    @property
    def strips_leading_space(self) -> bool: ...

    def pieces(self, skip_special_tokens: bool) -> Sequence[bytes]: ...


class DetokDelta(NamedTuple):
    """The text that one push added."""

    text: str  # never taken back
    matched_stop: str | None  # the stop string that was completed; nothing may be pushed after it
    num_ids_used: int  # ids of this push up to and with the one that completed the stop; all of them without a match


class StopStrings:
    """An automaton that finds the first completed of several strings in a stream of characters.

    A state is the longest end of the text that begins some stop string; ``depth`` is its length, which is how much
    text must be held back.

    Source: Aho and Corasick 1975, "Efficient string matching".
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.depth = [0]
        self.match: list[str | None] = [None]  # the longest stop string that ends in this state
        self._next: list[dict[str, int]] = [{}]
        self._fail = [0]
        for stop in stops:
            self._add(stop)
        self._link()

    def _add(self, stop: str) -> None:
        state = 0
        for char in stop:
            following = self._next[state].get(char)
            if following is None:
                following = len(self.depth)
                self._next[state][char] = following
                self._next.append({})
                self._fail.append(0)
                self.match.append(None)
                self.depth.append(self.depth[state] + 1)
            state = following
        self.match[state] = stop

    def _link(self) -> None:
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            if self.match[state] is None:
                self.match[state] = self.match[self._fail[state]]
            for char, following in self._next[state].items():
                self._fail[following] = self.step(self._fail[state], char)
                queue.append(following)

    def step(self, state: int, char: str) -> int:
        """Return the state after ``char``."""
        while True:
            following = self._next[state].get(char)
            if following is not None:
                return following
            if state == 0:
                return 0
            state = self._fail[state]


@lru_cache(maxsize=8)  # the choices of an n > 1 request share one; a large one takes about 20 MB, so not many
def _stop_strings(stops: tuple[str, ...]) -> StopStrings:
    return StopStrings(stops)


class Detokenizer:
    """The text of one choice, made incrementally from its ids."""

    def __init__(
        self,
        tokenizer: Pieces,
        *,
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_ids: int = 0,
    ) -> None:
        """``min_ids``: a stop string that these first ids complete does not end the text."""
        self._pieces = tokenizer.pieces(skip_special_tokens)
        self._strip_next = tokenizer.strips_leading_space  # the first character is dropped if it is a space
        self._utf8 = _new_utf8_decoder(errors="replace")
        self._stops = _stop_strings(stop) if stop else None
        self._include_stop = include_stop
        self._state = 0
        self._held = ""  # decoded and not emitted: the longest end of the text that begins a stop string
        self._matched: str | None = None
        self._ids_left = min_ids  # negative once a stop string may end the text

    @staticmethod
    def of(sampling: SamplingParams, tokenizer: Pieces) -> "Detokenizer":
        """Make the detokenizer of a choice that is sampled with ``sampling``."""
        return Detokenizer(
            tokenizer,
            stop=sampling.stop,
            include_stop=sampling.include_stop,
            skip_special_tokens=sampling.skip_special_tokens,
            min_ids=sampling.min_new_tokens if sampling.min_holds_stops else 0,
        )

    def push(self, ids: Sequence[int] | TokenIds) -> DetokDelta:
        """Add ``ids``; returns the text that is now certain. Not to be called after a match or a flush."""
        assert self._matched is None, f"pushed {len(ids)} ids after the stop string {self._matched!r} was matched"
        pieces, decode, size = self._pieces, self._utf8.decode, len(self._pieces)
        emitted = []
        for count, token_id in enumerate(ids, start=1):
            self._ids_left -= 1
            fresh = decode(pieces[token_id]) if 0 <= token_id < size else ""
            if fresh:
                emitted.append(self._take(fresh))
                if self._matched is not None:
                    return DetokDelta("".join(emitted), self._matched, count)
        return DetokDelta("".join(emitted), None, len(ids))

    def flush(self) -> str:
        """Return the rest of the text at the end of the sequence: nothing after a match."""
        if self._matched is not None:
            return ""
        text = self._take(self._utf8.decode(b"", True))
        if self._matched is None:
            text, self._held, self._state = text + self._held, "", 0
        return text

    def _take(self, fresh: str) -> str:
        """Account for ``fresh`` characters; returns what may be emitted."""
        if self._strip_next and fresh:
            self._strip_next = False
            fresh = fresh.removeprefix(" ")
        if self._stops is None:
            return fresh
        step, match, state = self._stops.step, self._stops.match, self._state
        text = self._held + fresh
        for end, char in enumerate(fresh, start=len(self._held) + 1):
            state = step(state, char)
            stop = match[state]
            if stop is not None and self._ids_left < 0:
                self._matched, self._held = stop, ""
                return text[: end if self._include_stop else end - len(stop)]
        self._state = state
        certain = len(text) - self._stops.depth[state]
        self._held = text[certain:]
        return text[:certain]

    def check(self) -> None:
        """Assert that the held text is exactly as long as the automaton says."""
        depth = 0 if self._stops is None or self._matched is not None else self._stops.depth[self._state]
        assert len(self._held) == depth, f"holds {len(self._held)} characters back, the stop strings ask for {depth}"


def token_texts(tokenizer: Pieces, ids: Sequence[int] | TokenIds) -> list[str]:
    """Return what each token adds to the text of ``ids``, control tokens included; joined they are that text.

    A character that is split over several tokens belongs to the last of them.
    """
    if not len(ids):
        return []
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
    texts = [detokenizer.push(ids[i : i + 1]).text for i in range(len(ids))]
    texts[-1] += detokenizer.flush()
    return texts


_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[int, str]:
    """Map the code point of a token's character to the byte it stands for, as a Latin-1 character.

    Source: Radford et al. 2019 (GPT-2), byte-level BPE: printable Latin-1 stands for itself, the other bytes follow
    from U+0100 on in their order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {b: chr(b) for b in printable} | {0x100 + n: chr(b) for n, b in enumerate(others)}


_ALPHABET = _byte_level_alphabet()


@dataclass(frozen=True, slots=True)
class PieceDecoder:
    """The way in which one vocabulary spells bytes."""

    kind: Literal["byte_level", "sentencepiece", "words"]
    replacement: str = ""  # sentencepiece: the character that stands for a space
    byte_fallback: bool = False
    strips_leading_space: bool = False  # the text begins without the first token's space

    @staticmethod
    def of(rust: Any, *, path: str) -> "PieceDecoder":
        """Read the decoder of ``rust`` (a ``tokenizers.Tokenizer``). Raises InvalidConfig if it is not known."""
        if rust.decoder is None:
            return PieceDecoder("words", strips_leading_space=True)
        state = json.loads(rust.decoder.__getstate__())
        steps = state["decoders"] if state["type"] == "Sequence" else [state]
        by_type = {step["type"]: step for step in steps}
        if "ByteLevel" in by_type:
            return PieceDecoder("byte_level")
        if "Metaspace" in by_type:
            metaspace = by_type["Metaspace"]
            strips = metaspace.get("prepend_scheme", "always") != "never"
            return PieceDecoder("sentencepiece", metaspace["replacement"], strips_leading_space=strips)
        if "Replace" in by_type and by_type.keys() <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
            return PieceDecoder(
                "sentencepiece",
                by_type["Replace"]["pattern"]["String"],
                byte_fallback="ByteFallback" in by_type,
                strips_leading_space=bool(by_type.get("Strip", {}).get("start")),
            )
        raise InvalidConfig(
            f"{path}: tokenizer decoder {sorted(by_type)} is not known; known: ByteLevel, Metaspace, "
            "and Replace with ByteFallback, Fuse, Strip"
        )

    def ordinary(self, content: str) -> bytes:
        """Return the bytes of a token of the model's vocabulary."""
        if self.kind == "byte_level":
            return content.translate(_ALPHABET).encode("latin-1", errors="replace")
        if self.kind == "words":
            return b" " + content.encode()
        byte = _BYTE_TOKEN.fullmatch(content) if self.byte_fallback else None
        return bytes.fromhex(byte[1]) if byte else content.replace(self.replacement, " ").encode()

    def added(self, content: str) -> bytes:
        """Return the bytes of an added token; one with characters outside the byte alphabet stands for itself."""
        if self.kind == "byte_level" and not all(ord(char) in _ALPHABET for char in content):
            return content.encode()
        return self.ordinary(content)
