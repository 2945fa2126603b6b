"""The parts of an answer, as a reader finds them in the text of one choice and an endpoint's form sends them on.

Invariant: a reader's parts depend on the text alone, not on where its pieces were cut: their texts add up to the same.
"""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class TextPart:
    """Some of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPart:
    """Some of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallPart:
    """The beginning of a tool call. Calls are numbered from 0 in each choice; its arguments follow."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsPart:
    """Some of a tool call's arguments: JSON as it was generated, never parsed and written anew."""

    index: int
    text: str


Part = TextPart | ReasoningPart | CallPart | ArgumentsPart


class Reader(Protocol):
    """Reads the text of one choice, piece by piece. It keeps back what may be the beginning of a tag."""

    def push(self, text: str) -> list[Part]:
        """Return the parts that ``text`` completes or adds to."""

    def end(self, *, is_cut: bool = False) -> list[Part]:
        """Return what was kept back: the text has ended, perhaps in the middle of a call.

        Args: is_cut: a limit ended it, or an abort; else the model did.
        """


class TextReader:
    """Reads an answer that is all text."""

    def push(self, text: str) -> list[Part]:
        return [TextPart(text)] if text else []

    def end(self, *, is_cut: bool = False) -> list[Part]:
        return []
