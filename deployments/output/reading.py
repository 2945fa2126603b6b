"""Splits the deltas of one choice into text, reasoning and tool calls, for every endpoint that shows them.

Owns:      the ids of tool calls; the state of reading a choice.
Invariant: the parts of all deltas add up to those of the whole text, wherever it was cut.
Thread:    the router's event loop.
"""

import hashlib
from dataclasses import dataclass

from deployments.output.parts import CallPart, Part, Reader, ReasoningPart
from deployments.output.reasoning import ReasoningCount
from replicas.types import FinishReason, TokenDelta


def call_id(answer_id: str, choice: int, index: int, *, prefix: str = "call_") -> str:
    """Name a tool call: the same in a stream and in the whole answer, and of no other answer."""
    return prefix + hashlib.blake2b(f"{answer_id}/{choice}/{index}".encode(), digest_size=12).hexdigest()


@dataclass(slots=True)
class ChoiceReading:
    """The reading of one choice, delta by delta."""

    reader: Reader
    count: ReasoningCount | None = None  # None for a model that does not reason
    shows_reasoning: bool = True
    num_calls: int = 0  # so far

    def read(self, delta: TokenDelta) -> list[Part]:
        """Return the parts that ``delta`` adds."""
        if self.count is not None:
            self.count.consume(delta.token_ids)
        parts = self.reader.push(delta.text)
        if delta.finish is not None:
            parts += self.reader.end(is_cut=delta.finish.reason is not FinishReason.STOP)
        self.num_calls += sum(isinstance(part, CallPart) for part in parts)
        return [part for part in parts if self.shows_reasoning or not isinstance(part, ReasoningPart)]

    @property
    def num_reasoning(self) -> int:
        """The tokens so far that were reasoning."""
        return 0 if self.count is None else self.count.num_tokens
