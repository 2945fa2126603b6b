"""What a model's output is made of: how it writes tool calls and reasoning, found in its chat template or set.

Owns:      the choice of both formats, and of the readers for one choice of a request.
Invariant: the format that a grammar is made from (``tools``) is the one that the reader reads.
Thread:    any; it is read-only, and its readers belong to one choice each.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from deployments.output.parts import Reader, TextReader
from deployments.output.reasoning import REASONING_FORMATS, ReasoningFormat, ReasoningReader
from deployments.output.text_machine import Steps, Tags, TextMachine
from deployments.output.tool_formats import ToolFormat, format_of, sniffed
from replicas.text.chat_template import ChatTemplate

_BLOCK = re.compile(r"\{[{%](.*?)[%}]\}", re.DOTALL)
_STRINGS = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", re.DOTALL)


class TemplateSource(Protocol):
    """The part of a Tokenizer from which formats are found."""

    special_ids: frozenset[int]
    template: ChatTemplate

    def token_text(self, token_id: int) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Thought:
    """What an output begins with, and where its answer begins."""

    is_open: bool = False  # it goes on with reasoning that the prompt has begun
    after: str = ""  # the answer begins behind it (`Constraint.after`); empty: at once
    opens: str = ""  # unless the output does not begin with this (`Constraint.opens`)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFormat:
    """How one model writes tool calls and reasoning."""

    tools: ToolFormat | None  # None: it writes none that is known; what it writes is text
    reasoning: ReasoningFormat | None  # None: what it thinks is text
    template_has_tools: bool  # else the tools must be described in a message
    before_answers: tuple[str, ...] = ()  # what the template may write between the last message and the answer
    plain_has_tools: bool = False  # the same of the template for chats without tools
    special_tags: frozenset[str]  # tags of these formats that are special tokens of the model
    dropped: tuple[str, ...]  # the other special tokens, if some tags are: a reader leaves them out

    @staticmethod
    def of(tokenizer: TemplateSource, *, tool_format: str = "auto", reasoning_format: str = "auto") -> "OutputFormat":
        """Find the formats of a model. A template without tools gets hermes, which is the widest known.

        Args: tool_format, reasoning_format: auto, none, or a name in TOOL_FORMATS and REASONING_FORMATS.
        """
        template = tokenizer.template.source(with_tools=True) or ""
        plain = tokenizer.template.source() or ""
        has_tools = names_tools(template)
        if tool_format == "auto":
            tool_format = sniffed(template) or ("none" if has_tools or not template else "hermes")
        tools = None if tool_format == "none" else format_of(tool_format, template)
        if reasoning_format == "auto":
            forms = reversed(REASONING_FORMATS.items())
            found = (name for name, form in forms if (form.marker or form.end) in template + plain)
            reasoning_format = next(found, "none")
        reasoning = None if reasoning_format == "none" else REASONING_FORMATS[reasoning_format]
        tags = {*(tools.tags if tools else ()), *(reasoning.special if reasoning else ())}
        special = {tokenizer.token_text(token_id) for token_id in tokenizer.special_ids} - {""}
        return OutputFormat(
            tools=tools,
            reasoning=reasoning,
            template_has_tools=has_tools,
            before_answers=tokenizer.template.before_answers,
            plain_has_tools=names_tools(plain),
            special_tags=frozenset(tags & special),
            dropped=tuple(sorted(special - tags)) if tags & special else (),
        )

    @property
    def needs_special(self) -> bool:
        """Whether the engine must leave special tokens in the text for a reader (``skip_special_tokens`` False)."""
        return bool(self.special_tags)

    def thought(self, last_tokens: Callable[[int], str], num_tokens: int, *, continues: bool) -> Thought:
        """Tell whether the last turn of a prompt leaves reasoning open, has ended it, or has none, by its last tag.

        Args: last_tokens: gives the text of so many tokens of the prompt's end; num_tokens: of all of it.
              continues: the turn has a beginning of the answer, which the output goes on with.
        """
        form = self.reasoning
        if form is None:
            return Thought()
        turn = self._open_turn(form, last_tokens, num_tokens)
        # a tag within a line is one that the answer tells of
        begin = re.compile(rf"(?:^|{re.escape(form.end)})\s*{re.escape(form.begin)}", re.MULTILINE)
        begun = max((each.end() for each in begin.finditer(turn)), default=-1)
        ended = turn.rfind(form.end)
        if begun > ended:
            return Thought(is_open=True, after=form.end)
        if ended >= 0 or (continues and turn.strip()):
            return Thought()
        return Thought(after=form.end, opens=form.begin)

    def _open_turn(self, form: ReasoningFormat, last_tokens: Callable[[int], str], num_tokens: int) -> str:
        """Return the text behind the last of what the template writes before an answer. Where it is not found, that a
        prompt ends with a tag is all that can be told."""
        plain = (each.partition(form.begin)[0].partition(form.end)[0].strip() for each in self.before_answers)
        heads = [*filter(None, plain)]
        length = 64
        while True:
            text = last_tokens(length)
            found = max((text.rfind(head) + len(head) for head in heads if head in text), default=-1)
            if found >= 0:
                return text[found:]
            if length >= num_tokens or not heads:
                end = text.rstrip()
                return next((tag for tag in (form.begin, form.end) if end.endswith(tag)), "")
            length *= 8

    def reader(
        self,
        *,
        schemas: Mapping[str, Any] | None,
        must_call: bool = False,
        reasoning_open: bool = False,
        separate_reasoning: bool = True,
    ) -> Reader:
        """Make a reader for the text of one choice.

        Args: schemas: of the parameters of each tool, by the tool's name; None: calls are not looked for.
              must_call: the answer is held to calls.
              reasoning_open: the prompt leaves it open (`opens_in_prompt`).
              separate_reasoning: give reasoning in parts of its own; else it is text, with its tags.
        """
        reader: Reader = TextReader()
        if schemas is not None and self.tools is not None:
            reader = self.tools.reader(schemas, must_call=must_call)
        if self.reasoning is not None and self.reasoning.reader is not None:
            reader = self.reasoning.reader(schemas, is_open=reasoning_open, is_separate=separate_reasoning)
        elif self.reasoning is not None:
            reader = ReasoningReader(reader, self.reasoning, is_open=reasoning_open, is_separate=separate_reasoning)
        return WithoutTokens(reader, Tags.of(*self.dropped)) if self.dropped else reader


class WithoutTokens(TextMachine):
    """Leaves some tokens out of the text that another reader reads."""

    def __init__(self, reader: Reader, tokens: Tags) -> None:
        super().__init__()
        self._reader = reader
        self._tokens = tokens

    def _read(self) -> Steps[None]:
        while (yield from self._scan(self._tokens, lambda text: self._parts.extend(self._reader.push(text)))):
            pass
        self._parts += self._reader.end(is_cut=self._was_cut)


def names_tools(template: str) -> bool:
    """Return whether a chat template uses the variable ``tools``."""
    blocks = (_STRINGS.sub("''", block[1]) for block in _BLOCK.finditer(template))
    return any(re.search(r"(?<![.\w])tools\b", block) for block in blocks)
