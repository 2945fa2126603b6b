"""Reads the deltas of one choice in parts, for every endpoint that shows tool calls and reasoning.

Owns:      the ids of tool calls; the state of reading a choice.
Invariant: the parts of all deltas add up to those of the whole text, wherever it was cut.
Thread:    the router's event loop.
"""

import hashlib
from dataclasses import dataclass

from deployments.output.parts import ArgumentsPart, CallPart, Part, Reader, ReasoningPart, TextPart
from replicas.types import TokenDelta


def call_id(answer_id: str, choice: int, index: int, *, prefix: str = "call_") -> str:
    """Name a tool call: the same in a stream and in the whole answer, and of no other answer."""
    return prefix + hashlib.blake2b(f"{answer_id}/{choice}/{index}".encode(), digest_size=12).hexdigest()


@dataclass(slots=True)
class ChoiceReading:
    """The reading of one choice, delta by delta."""

    reader: Reader
    num_calls: int = 0
    num_reasoning: int = 0  # tokens so far that were reasoning

    def read(self, delta: TokenDelta) -> list[Part]:
        """Return the parts that ``delta`` adds, neighbours of one kind joined."""
        parts = self.reader.push(delta.text) + (self.reader.end() if delta.finish is not None else [])
        self.num_calls += sum(isinstance(part, CallPart) for part in parts)
        return _joined(parts)


def _joined(parts: list[Part]) -> list[Part]:
    """Join neighbours of one kind, so that fewer events are sent."""
    found: list[Part] = []
    for part in parts:
        last = found[-1] if found else None
        if isinstance(part, ArgumentsPart) and isinstance(last, ArgumentsPart) and part.index == last.index:
            found[-1] = ArgumentsPart(part.index, last.text + part.text)
        elif isinstance(part, TextPart) and isinstance(last, TextPart):
            found[-1] = TextPart(last.text + part.text)
        elif isinstance(part, ReasoningPart) and isinstance(last, ReasoningPart):
            found[-1] = ReasoningPart(last.text + part.text)
        else:
            found.append(part)
    return found
