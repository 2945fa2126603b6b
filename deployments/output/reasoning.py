"""What a model thinks before it answers: told apart from the answer in its text, and counted in its tokens.

Owns:      where reasoning begins and ends. It begins with the format's tag (``<think>``), at the beginning of the text
           or in the prompt, and ends with the first end tag (``</think>``), or with the text. To add a format:
           docs/extending.md.
Never:     looks for calls in it; what is behind it is another reader's.
Thread:    the owner of the choice.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from deployments.output import harmony
from deployments.output.parts import Reader, ReasoningPart, TextPart, TextReader
from deployments.output.text_machine import Steps, Tags, TextMachine
from replicas.types import TokenIds


class ReadsAll(Protocol):
    """Makes a reader of a whole output, of reasoning, text and calls, where these are messages of one form."""

    def __call__(self, schemas: Mapping[str, Any] | None, *, is_open: bool, is_separate: bool) -> Reader:
        """Args: schemas: of each tool's parameters; None: calls are not looked for. Others: as of `ReasoningReader`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """The tags between which a model reasons; a chat template that names the second one is of this format."""

    begin: str
    end: str
    marker: str = ""  # what a chat template names instead, where others name the second tag too
    tags: tuple[str, ...] = ()  # that are tokens of their own, where begin and end are not
    reader: ReadsAll | None = None  # None: reasoning comes first, and the answer is as the model writes calls

    @property
    def special(self) -> tuple[str, ...]:
        """The texts that may be special tokens."""
        return self.tags or (self.begin, self.end)


THINK = ReasoningFormat(begin="<think>", end="</think>")
HARMONY = ReasoningFormat(
    begin=harmony.ANALYSIS, end=harmony.END, marker=harmony.ANALYSIS, tags=harmony.TAGS, reader=harmony.HarmonyReader
)
# By the name in settings; a template that several fit has the last of them.
REASONING_FORMATS: dict[str, ReasoningFormat] = {"think": THINK, "harmony": HARMONY}


class ReasoningReader(TextMachine):
    """Reads reasoning, and gives what is behind it to the reader of the answer.

    Whitespace around the reasoning, and between it and the answer, is dropped (as SGLang does); unless it is not to be
    told apart: then it is text, with its tags, as it was generated.

    Args: is_open: the prompt ended with the tag that begins it. is_separate: it is to be told apart.
    """

    def __init__(self, answer: Reader, form: ReasoningFormat, *, is_open: bool, is_separate: bool) -> None:
        super().__init__()
        self._answer = answer
        self._form = form
        self.has_begun = is_open  # the text is known to begin with reasoning
        self.is_over = False  # what follows is the answer
        self._is_separate = is_separate
        self._spaces: list[str] = []  # behind what was given; they are dropped where the reasoning ends
        self._is_first = True  # nothing but whitespace came of it

    def _read(self) -> Steps[None]:
        self._raw = []
        yield from self._after_spaces()
        is_tagged = yield from self._literal(self._form.begin)
        head, self._raw = "".join(self._raw), None
        self.has_begun |= is_tagged
        if self.has_begun:
            if not is_tagged or not self._is_separate:
                self._thought(head)
            tag = yield from self._scan(Tags.of(self._form.end), self._thought)
            self.is_over = bool(tag)
            if tag and self._is_separate:
                yield from self._after_spaces()
            elif tag:
                self._parts.append(TextPart(tag))
        else:
            self.is_over = True
            self._parts += self._answer.push(head)
        while (yield from self._more()):
            self._take(len(self._buffer) - self._pos, lambda text: self._parts.extend(self._answer.push(text)))
        self._parts += self._answer.end(is_cut=self._was_cut)

    def _thought(self, text: str) -> None:
        if not self._is_separate:
            self._parts += [TextPart(text)] if text else []
            return
        text = text.lstrip() if self._is_first else text
        body = text.rstrip()
        if body:
            self._parts.append(ReasoningPart("".join(self._spaces) + body))
            self._spaces, self._is_first = [], False
        if len(body) < len(text):
            self._spaces.append(text[len(body) :])


class ReasoningCount:
    """Counts the tokens of a choice that are reasoning, its tags included, as a function of the ids alone.

    Args: pieces: the bytes of each token, special ones too. is_open: the prompt ended with the tag that begins it.
    """

    def __init__(self, pieces: Sequence[bytes], form: ReasoningFormat, *, is_open: bool) -> None:
        self._pieces = pieces
        in_bytes = ReasoningFormat(begin=_in_bytes(form.begin), end=_in_bytes(form.end))
        self._reader = ReasoningReader(TextReader(), in_bytes, is_open=is_open, is_separate=False)
        self._num_read = 0
        self.num_tokens = 0

    def consume(self, ids: Sequence[int] | TokenIds) -> None:
        """Add the ids that were generated next."""
        for token_id in ids:
            if self._reader.is_over:
                return
            if 0 <= token_id < len(self._pieces):
                self._reader.push(self._pieces[token_id].decode("latin-1"))
            self._num_read += 1
            if self._reader.has_begun:
                self.num_tokens = self._num_read


def _in_bytes(tag: str) -> str:
    """Write each byte of ``tag`` as a character, since a token may end within one of the text's."""
    return tag.encode().decode("latin-1")
