"""Reads text that comes in pieces, wherever it was cut: the base of the readers of tool calls and reasoning.

A reader is a generator that reads characters and waits (``yield``) where the text has no more of them. It never looks
at where a piece ends, so its parts cannot depend on that.

Owns:      the text that has come and is not read; tags (`Tags`) and JSON values in it, found as they come.
Never:     parses JSON into values and writes it anew: what was generated is passed on as it was.
Invariant: what is kept back is the beginning of a tag, or of what may be a call; the work is linear in the text.
Thread:    the owner of the choice; a Tags is read-only and shared.
"""

import json
import re
from collections.abc import Callable, Generator
from functools import lru_cache
from itertools import groupby
from typing import TypeVar

from deployments.output.parts import ArgumentsPart, CallPart, Part, ReasoningPart, TextPart
from replicas.text.detokenizer import StopStrings

_Result = TypeVar("_Result")
Steps = Generator[None, None, _Result]  # of a program: it waits for text, and returns a result
Sink = Callable[[str], None]

_STRING_ENDS = re.compile(r'["\\]')
_LINE_ENDS = re.compile(r'["\\\n]')
_VALUE_ENDS = re.compile(r'[{}\[\]"<`]')  # outside a string; JSON has neither ``<`` nor a backtick there
_SCALAR_ENDS = re.compile(r"[\s,;\]}<`]")


class Tags:
    """Several texts that are looked for at once; of two that overlap, the one completed first is found."""

    def __init__(self, *texts: str) -> None:
        self.automaton = StopStrings(texts)
        self.begin = re.compile("|".join(sorted({re.escape(text[0]) for text in texts})) or "(?!)")

    @staticmethod
    @lru_cache(maxsize=32)
    def of(*texts: str) -> "Tags":
        """Return the one that all readers of these texts share."""
        return Tags(*texts)


class TextMachine:
    """A reader whose parts are made by a program, `_read`, of which each kind of reader has its own."""

    def __init__(self) -> None:
        self._buffer = ""
        self._pos = 0  # in the buffer: what is before it has been read
        self._ended = False
        self._was_cut = False  # ended by a limit, not by the model
        self._raw: list[str] | None = None  # what was read of what may be a call; it is text if it proves to be none
        self._parts: list[Part] = []
        self._program = self._read()

    def _read(self) -> Steps[None]:
        raise NotImplementedError

    def push(self, text: str) -> list[Part]:
        """Return the parts that ``text`` completes or adds to."""
        self._buffer = self._buffer[self._pos :] + text
        self._pos = 0
        next(self._program, None)
        parts, self._parts = self._parts, []
        return _merged(parts)

    def end(self, *, is_cut: bool = False) -> list[Part]:
        """Return what was kept back: the text has ended, perhaps in the middle of a call.

        Args: is_cut: a limit ended it, or an abort; else the model did.
        """
        self._ended, self._was_cut = True, is_cut
        return self.push("")

    @property
    def _is_over(self) -> bool:
        return self._ended and self._pos == len(self._buffer)

    def _tag_cut(self, begin: str, sink: Sink) -> None:
        """Take the beginning of a tag that the end of the text cut: it is text, as it stands."""
        sink(begin)

    def _more(self) -> Steps[bool]:
        """Wait until there is text to read. Returns: False at the end of the text."""
        while self._pos == len(self._buffer):
            if self._ended:
                return False
            yield
        return True

    def _peek(self) -> Steps[str]:
        """Return the next character, unread; empty at the end of the text."""
        return self._buffer[self._pos] if (yield from self._more()) else ""

    def _take(self, length: int, sink: Sink | None = None) -> None:
        """Read ``length`` characters that have come."""
        piece = self._buffer[self._pos : self._pos + length]
        self._pos += length
        if piece and self._raw is not None:
            self._raw.append(piece)
        if piece and sink is not None:
            sink(piece)

    def _after_spaces(self) -> Steps[str]:
        """Read whitespace. Returns: the character behind it, unread; empty at the end of the text."""
        while (char := (yield from self._peek())).isspace():
            self._take(1)
        return char

    def _word(self, ends: str) -> Steps[str]:
        """Read up to whitespace, one of ``ends``, or the end of the text."""
        read: list[str] = []
        while (char := (yield from self._peek())) and not char.isspace() and char not in ends:
            self._take(1, read.append)
        return "".join(read)

    def _literal(self, text: str) -> Steps[bool]:
        """Read ``text``, if it is what comes next, also where the end cuts it; else nothing. Returns: whether all of it
        was there."""
        while not (come := self._buffer[self._pos : self._pos + len(text)]).startswith(text):
            if not text.startswith(come):
                return False
            if self._ended:
                self._take(len(come))
                return False
            yield
        self._take(len(text))
        return True

    def _scan(self, tags: Tags, sink: Sink) -> Steps[str]:
        """Read up to and with the first of ``tags``; what is before it goes to ``sink`` as soon as it cannot be one.

        Returns: the tag that was found; empty at the end of the text.
        """
        step, match, depth = tags.automaton.step, tags.automaton.match, tags.automaton.depth
        state, start, at = 0, self._pos, self._pos
        while True:
            text = self._buffer
            while at < len(text):
                if state == 0:
                    found = tags.begin.search(text, at)
                    at = len(text) if found is None else found.start()
                    if found is None:
                        break
                state = step(state, text[at])
                at += 1
                tag = match[state]
                if tag is not None:
                    self._pos = at
                    if start < at - len(tag):
                        sink(text[start : at - len(tag)])
                    return tag
            certain = at - depth[state]
            if start < certain:
                sink(text[start:certain])
            if self._ended:
                self._buffer, self._pos = "", 0
                if certain < at:
                    self._tag_cut(text[certain:at], sink)
                return ""
            self._buffer, self._pos = text[certain:], 0
            start, at = 0, at - certain
            yield

    def _value(self, sink: Sink | None, *, is_strict: bool = False) -> Steps[None]:
        """Read a JSON value, which goes to ``sink`` as it comes.

        It ends where its brackets and quotes are closed, at a character that JSON cannot have outside a string (as of
        the tag that ends the call), or with the text. What is in it is not checked further.

        Args: is_strict: it ends at a newline in a string too; else that is read on, since models write it.
        """
        string_ends = _LINE_ENDS if is_strict else _STRING_ENDS
        first = yield from self._peek()
        if first not in ("{", "[", '"'):
            while (yield from self._more()):
                found = _SCALAR_ENDS.search(self._buffer, self._pos)
                self._take((len(self._buffer) if found is None else found.start()) - self._pos, sink)
                if found is not None:
                    return
        depth, in_string, is_escaped, is_done = 0, False, False, False
        while not is_done and (yield from self._more()):
            text, at = self._buffer, self._pos
            while at < len(text) and not is_done:
                if is_escaped:
                    is_escaped, at = False, at + 1
                    continue
                found = (string_ends if in_string else _VALUE_ENDS).search(text, at)
                if found is None:
                    at = len(text)
                    break
                char, at = found[0], found.end()
                if char == "\n":
                    at, is_done = at - 1, True
                elif in_string:
                    is_escaped, in_string = char == "\\", char != '"'
                    is_done = not in_string and depth == 0
                elif char == '"':
                    in_string = True
                elif char in "{[":
                    depth += 1
                elif char in "}]":
                    depth -= 1
                    is_done = depth == 0
                else:
                    at, is_done = at - 1, True
            self._take(at - self._pos, sink)

    def _string(self) -> Steps[str | None]:
        """Read a JSON string, if one begins here. Returns: its characters; None if it is none, or not whole."""
        if (yield from self._peek()) != '"':
            return None
        read: list[str] = []
        yield from self._value(read.append)
        try:
            text = str(json.loads("".join(read), strict=False))
            text.encode()
        except ValueError:  # a lone surrogate has no UTF-8 form
            return None
        return text


def _merged(parts: list[Part]) -> list[Part]:
    """Join neighbours of one kind, so that a piece of text gives few parts."""
    merged: list[Part] = []
    for (kind, index), group in groupby(parts, lambda part: (type(part), getattr(part, "index", 0))):
        same = list(group)
        text = "".join(part.text for part in same if not isinstance(part, CallPart))
        if kind is CallPart:
            merged += same
        elif kind is ArgumentsPart:
            merged.append(ArgumentsPart(index, text))
        else:
            merged.append(TextPart(text) if kind is TextPart else ReasoningPart(text))
    return merged
