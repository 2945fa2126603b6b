"""Reads outputs in harmony, which gpt-oss writes: messages, each with a channel and perhaps a recipient.

    <|channel|>analysis<|message|>..<|end|><|start|>assistant<|channel|>final<|message|>..<|return|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{..}<|call|>

Owns:      what is what: ``analysis`` is reasoning, a message to a recipient is a call of it, all else is the answer.
           The prompt ends with ``<|start|>assistant``, so an output begins behind it. A text without a head, as a
           grammar makes it behind the reasoning, or as one that goes on with a message, is the answer too.
Never:     holds an output to this form: calls that must be made are refused (tool_grammar.py).
Thread:    the owner of the choice.
Source:    OpenAI's harmony response format (https://github.com/openai/harmony, docs/format.md).
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from deployments.output.parts import ArgumentsPart, CallPart, Part, ReasoningPart, TextPart
from deployments.output.text_machine import Steps, Tags, TextMachine

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
TAGS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)
ANALYSIS = f"{CHANNEL}analysis{MESSAGE}"
_ENDS = (START, CHANNEL, END, CALL, RETURN)  # of a message
_CHANNEL = re.compile(rf"{re.escape(CHANNEL)}\s*(\w+)")
_RECIPIENT = re.compile(r"(?:^|\s|>)to=(?:functions\.)?([^\s<]+)")


class HarmonyReader(TextMachine):
    """Finds reasoning, text and calls in messages.

    Args: schemas: of the parameters of each tool; None: a message to a recipient is text. is_open: the prompt ended
          within a message of reasoning. is_separate: reasoning is told apart; else it is text, with its tags.
    """

    def __init__(self, schemas: Mapping[str, Any] | None, *, is_open: bool, is_separate: bool) -> None:
        super().__init__()
        self._has_calls, self._is_open, self._is_separate = schemas is not None, is_open, is_separate
        self._num_calls = 0
        self._last: type[Part] | None = None  # of the message before, if it was no call

    def _read(self) -> Steps[None]:
        tag = ""
        if self._is_open:
            tag = yield from self._scan(Tags.of(*_ENDS), self._of_thought)
        while tag in (START, CHANNEL) or (yield from self._more()):
            head = yield from self._head(tag)
            if head is None:  # a limit cut it
                return
            tag = yield from self._body(head)

    def _head(self, tag: str) -> Steps[str | None]:
        """Read what stands before a message, of which ``tag`` has been read. Returns: empty for a text without one."""
        if tag not in (START, CHANNEL):
            self._raw, tag = [], ""
            for begin in (START, CHANNEL, " to="):
                if not tag and (yield from self._literal(begin)):
                    tag = begin
            cut, self._raw = "".join(self._raw), None
            if not tag:
                self._parts += [TextPart(cut)] if cut else []
                return ""
        read = [tag]
        while tag := (yield from self._scan(Tags.of(*TAGS), read.append)):
            if tag == MESSAGE or tag in (END, CALL, RETURN):
                return "".join(read)
            read.append(tag)
        return None

    def _body(self, head: str) -> Steps[str]:
        """Read a message up to the tag that ends it, which is returned; empty at the end of the text."""
        channel, to = _CHANNEL.search(head), _RECIPIENT.search(head)
        if to is not None and self._has_calls:
            return (yield from self._call(to[1]))
        is_thought = channel is not None and channel[1] == "analysis"
        if not is_thought or self._is_separate:
            kind = ReasoningPart if is_thought else TextPart
            return (yield from self._scan(Tags.of(*_ENDS), self._sink(kind)))
        self._parts.append(TextPart(ANALYSIS))
        tag = yield from self._scan(Tags.of(*_ENDS), self._of_thought)
        self._parts += [TextPart(tag)] if tag == END else []
        return tag

    def _of_thought(self, text: str) -> None:
        self._last = ReasoningPart if self._is_separate else None
        self._parts.append(ReasoningPart(text) if self._is_separate else TextPart(text))

    def _sink(self, kind: type[ReasoningPart] | type[TextPart]) -> Callable[[str], None]:
        """Return what takes a message's text; a line divides it from another message of its kind before it."""
        begun = False

        def take(text: str) -> None:
            nonlocal begun
            self._parts.append(kind(f"\n{text}" if self._last is kind and not begun else text))
            self._last, begun = kind, True

        return take

    def _call(self, name: str) -> Steps[str]:
        """Read the arguments of a call, which is told with the first of them, as by other readers of calls."""
        index, begun = self._num_calls, False
        self._last = None

        def take(text: str) -> None:
            nonlocal begun
            if not begun:
                self._parts.append(CallPart(index, name))
                self._num_calls, begun = index + 1, True
            self._parts.append(ArgumentsPart(index, text))

        tag = yield from self._scan(Tags.of(*_ENDS), take)
        if not begun and (tag or not self._was_cut):
            take("{}")
        return tag
