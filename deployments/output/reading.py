"""Reads the deltas of one choice in parts, for every endpoint that shows tool calls and reasoning.

Owns:      the ids of tool calls; the state of reading a choice.
Invariant: the parts of all deltas add up to those of the whole text, wherever it was cut.
Thread:    the router's event loop.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from deployments.output.parts import CallPart, Part, Reader, ReasoningPart
from deployments.output.reasoning import ReasoningCount
from replicas.types import FinishReason, TokenDelta


def call_id(answer_id: str, choice: int, index: int, *, prefix: str = "call_") -> str:
    """Name a tool call: the same in a stream and in the whole answer, and of no other answer."""
    return prefix + hashlib.blake2b(f"{answer_id}/{choice}/{index}".encode(), digest_size=12).hexdigest()


@dataclass(slots=True)
class CalledTools:
    """The tools that the choices of one answer call: told once, when all have ended by themselves."""

    tell: Callable[[str, Sequence[str]], None]  # takes the request's id and the names
    open: set[int]  # choices
    tools: list[str] = field(default_factory=list)

    def ended(self, delta: TokenDelta, tools: Sequence[str]) -> None:
        """Take in the ``tools`` of a choice whose last delta is ``delta``."""
        if delta.index not in self.open:
            return  # it is read anew
        self.open.remove(delta.index)
        self.tools += tools
        if not self.open:
            self.tell(delta.rid, self.tools)


@dataclass(slots=True)
class ChoiceReading:
    """The reading of one choice, delta by delta."""

    reader: Reader
    count: ReasoningCount | None = None  # None for a model that does not reason
    shows_reasoning: bool = True
    called: CalledTools | None = None  # of all choices; None: nobody is told
    tools: list[str] = field(default_factory=list)  # names of those that are called so far

    def read(self, delta: TokenDelta) -> list[Part]:
        """Return the parts that ``delta`` adds."""
        if self.count is not None:
            self.count.consume(delta.token_ids)
        parts = self.reader.push(delta.text)
        if delta.finish is not None:
            parts += self.reader.end(is_cut=delta.finish.reason is not FinishReason.STOP)
        self.tools += [part.name for part in parts if isinstance(part, CallPart)]
        if self.called is not None and delta.finish is not None and delta.finish.reason is FinishReason.STOP:
            self.called.ended(delta, self.tools)
        return [part for part in parts if self.shows_reasoning or not isinstance(part, ReasoningPart)]

    @property
    def num_calls(self) -> int:
        return len(self.tools)

    @property
    def num_reasoning(self) -> int:
        """The tokens so far that were reasoning."""
        return 0 if self.count is None else self.count.num_tokens
