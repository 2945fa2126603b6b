"""Readers of tool calls, one for each family of formats (tool_formats.py).

Owns:      the separation of tool calls from text, by these rules for all formats:
           - arguments are passed on as they were generated, whatever they are: a string or null too. A call that is
             complete without arguments gets ``{}``; a call that is cut gets what came of them.
           - a call is told with its first argument text. Of one that a limit cuts before that, nothing is told: neither
             a call without arguments, nor its tags as text.
           - what does not continue as the format has it, before a call's name is known, is text; nothing is lost.
             Behind the name, what came is the call, and what does not belong to it is text. The same where the model
             itself ends in the middle of one.
           - a call to an unknown tool is still reported as a call; the client can answer it.
           - whitespace between calls, and before the first where no text is, is dropped.
Thread:    the owner of the choice.
"""

import json
from collections.abc import Mapping
from typing import Any

from pydantic_core import from_json

from deployments.output.parts import ArgumentsPart, CallPart, Part, TextPart
from deployments.output.text_machine import Sink, Steps, Tags, TextMachine
from deployments.output.tools import TEXT, type_of, value_types

_CALL_KEYS = frozenset({"name", "arguments", "parameters", "type", "id"})


class CallReader(TextMachine):
    """Finds text and calls; what a call looks like is its children's.

    Args: schemas: of the parameters of each tool, by the tool's name.
          must_call: the text is held to calls, so that what is cut of it is no answer's text.
    """

    def __init__(self, schemas: Mapping[str, Any], *, must_call: bool = False) -> None:
        super().__init__()
        self._schemas = schemas
        self._must_call = must_call
        self._gap: list[str] | None = []  # whitespace since the beginning, or since a call; None behind other text
        self._name: str | None = None  # of a call that has begun, and has no arguments yet
        self._num_calls = 0

    def end(self, *, is_cut: bool = False) -> list[Part]:
        """Return what was kept back: the text has ended, perhaps in the middle of a call."""
        parts = super().end(is_cut=is_cut)
        if self._name is not None and not is_cut:
            return [*parts, CallPart(self._num_calls, self._name)]
        if self._num_calls or not self._gap or (is_cut and self._must_call):
            return parts
        return [*parts, TextPart("".join(self._gap))]

    def _tag_cut(self, begin: str, sink: Sink) -> None:
        """Drop the beginning of a tag that a limit cut; one character of it alone may well be text."""
        is_of_call = self._must_call or (self._num_calls > 0 and self._gap is not None)
        if not self._was_cut or (len(begin) == 1 and not is_of_call):
            sink(begin)
        elif self._gap is not None:
            self._gap = []

    def _text(self, text: str) -> None:
        if self._ended and self._num_calls and self._gap is not None and "</tool_call>".startswith(text):
            return  # the end tag of a call, cut
        if self._gap is not None:
            self._gap.append(text)
            if not text or text.isspace():
                return
            text, self._gap = "".join(self._gap), None
        self._parts.append(TextPart(text))

    def _call(self, name: str) -> None:
        self._raw, self._gap, self._name = None, [], name

    def _arguments(self, text: str) -> None:
        if self._name is not None:
            self._parts.append(CallPart(self._num_calls, self._name))
            self._num_calls, self._name = self._num_calls + 1, None
        self._parts.append(ArgumentsPart(self._num_calls - 1, text))

    def _close(self) -> None:
        """Drop the whitespace between a call's arguments and its end."""
        self._gap = None if self._gap is None else []

    def _not_a_call(self) -> None:
        """Give what was read since ``_raw`` began as text, unless it has become a call, or is the beginning of one
        that a limit cut."""
        raw, self._raw = "".join(self._raw or ()), None
        if self._was_cut and self._is_over and raw and (self._must_call or self._num_calls or self._begins_call(raw)):
            self._gap = []
        elif raw:
            self._text(raw)

    def _begins_call(self, raw: str) -> bool:
        """Whether ``raw``, to which nothing was wrong when it was cut, can only be the beginning of a call."""
        return True  # a tag began it

    def _object(self, *, is_tagged: bool) -> Steps[bool]:
        """Read an object with a name and arguments, which begins here. Returns: whether it is a call.

        Args: is_tagged: a tag said that a call comes. Without one, an object is a call if it has both, and no
              other keys than calls have, so that an answer in JSON is not kept back.
        """
        name: str | None = None
        has_arguments = is_closed = False
        held: list[str] = []  # arguments that came before the name

        def arguments(piece: str) -> None:
            if self._raw is None:
                self._arguments(piece)
            else:
                held.append(piece)

        def begin(name: str) -> None:
            self._call(name)
            for piece in held:
                self._arguments(piece)

        self._take(1)
        while char := (yield from self._after_spaces()):
            if char in "},":
                self._take(1)
                is_closed = char == "}"
                if is_closed:
                    break
                continue
            key = yield from self._string()
            if key is None or (not is_tagged and key not in _CALL_KEYS) or (yield from self._after_spaces()) != ":":
                break
            self._take(1)
            char = yield from self._after_spaces()
            if key == "name" and name is None:
                name = yield from self._string()
                if not name:
                    break
                if is_tagged or has_arguments:
                    begin(name)
            elif key in ("arguments", "parameters") and not has_arguments:
                has_arguments = char not in ",}"
                if name and self._raw is not None and has_arguments:
                    begin(name)
                yield from self._value(arguments)
            else:
                yield from self._value(None)
        if self._raw is not None:
            return False
        if not has_arguments and (is_closed or not self._is_over):
            self._arguments("{}")
        return True

    def _objects(self, *, is_tagged: bool, end: str = "") -> Steps[None]:
        """Read objects that are divided by commas, semicolons or whitespace, up to and with ``end``."""
        is_found = False
        while char := (yield from self._after_spaces()):
            if is_found and char in ",;":
                self._take(1)
            elif is_found and char == end:
                self._take(1)
                self._raw = None
                return
            elif char == "{" and (yield from self._object(is_tagged=is_tagged)):
                is_found, self._raw = True, []
            else:
                break
        self._not_a_call()


class HermesReader(CallReader):
    """Reads ``<tool_call>{"name": ..., "arguments": ...}</tool_call>``."""

    def _read(self) -> Steps[None]:
        outside, inside = Tags.of("<tool_call>"), Tags.of("<tool_call>", "</tool_call>")
        is_call = False
        while tag := (yield from self._scan(inside if is_call else outside, self._text)):
            is_call = False
            if tag == "</tool_call>":
                self._close()
            else:
                self._raw = [tag]
                is_call = (yield from self._after_spaces()) == "{" and (yield from self._object(is_tagged=True))
                self._not_a_call()


class LlamaReader(CallReader):
    """Reads ``{"name": ..., "parameters": ...}`` at the beginning, or behind ``<|python_tag|>``.

    An object without a tag that is cut is a call if it names one of the tools, as far as it goes.
    """

    def _begins_call(self, raw: str) -> bool:
        text = raw.lstrip()
        if not text.startswith("{"):
            return True
        try:
            found = from_json(text, allow_partial="trailing-strings")
        except ValueError:
            return False
        name, others = found.get("name"), found.keys() - {"name", "type"}
        if not name:  # nothing has come that an answer in JSON would miss
            return not others and "function".startswith(str(found.get("type", "")))
        return isinstance(name, str) and any(each.startswith(name) for each in self._schemas)

    def _read(self) -> Steps[None]:
        self._raw = []
        yield from self._objects(is_tagged=False)
        while tag := (yield from self._scan(Tags.of("<|python_tag|>"), self._text)):
            self._raw = [tag]
            yield from self._objects(is_tagged=True)


class MistralReader(CallReader):
    """Reads ``[TOOL_CALLS][{"name": ..., "arguments": ...}, ...]`` and ``[TOOL_CALLS]name[ARGS]{...}``."""

    def _read(self) -> Steps[None]:
        while tag := (yield from self._scan(Tags.of("[TOOL_CALLS]"), self._text)):
            self._raw = [tag]
            char = yield from self._after_spaces()
            if char == "[":
                self._take(1)
                yield from self._objects(is_tagged=True, end="]")
            elif char == "{":
                yield from self._objects(is_tagged=True)
            else:
                yield from self._named()

    def _named(self) -> Steps[None]:
        """Read ``name[ARGS]{...}``; a ``[CALL_ID]id`` may stand before ``[ARGS]``, or ``[ARGS]`` be left out."""
        name, label = (yield from self._word("[{<")), ""
        char = yield from self._after_spaces()
        while name and char == "[" and label != "ARGS":
            self._take(1)
            label = yield from self._word("[]")
            if label not in ("ARGS", "CALL_ID") or not (yield from self._literal("]")):
                return self._not_a_call()
            if label == "CALL_ID":
                yield from self._word("[{")
            char = yield from self._after_spaces()
        if not name or (label != "ARGS" and char != "{"):
            return self._not_a_call()
        self._call(name)
        char = yield from self._after_spaces()
        if char == "{":
            yield from self._value(self._arguments)
        elif not self._is_over:
            self._arguments("{}")
        return None


class DeepseekReader(CallReader):
    """Reads DeepSeek V3's calls (``function``, separator, name, JSON in a fence) and V3.1's (name, separator, JSON)."""

    def _read(self) -> Steps[None]:
        begin = (all_begin, one_begin) = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")
        end = (all_end, one_end) = ("<｜tool▁calls▁end｜>", "<｜tool▁call▁end｜>")
        outside, inside, behind = Tags.of(*begin), Tags.of(*begin, *end, "```"), Tags.of(*begin, *end)
        tags = outside
        while tag := (yield from self._scan(tags, self._text)):
            if tag in (all_end, one_end):
                self._close()
                tags = outside if tag == all_end else behind
            elif tag in begin:
                self._raw = [tag]
                if tag == all_begin:
                    yield from self._after_spaces()
                if (tag == one_begin or (yield from self._literal(one_begin))) and (yield from self._headed()):
                    tags = inside
                self._not_a_call()

    def _headed(self) -> Steps[bool]:
        """Read a call from behind its first tag to the end of its arguments. Returns: whether it is one."""
        name = yield from self._word("<")
        if not (yield from self._literal("<｜tool▁sep｜>")):
            return False
        char = yield from self._after_spaces()
        if char and char not in "{<":
            name = yield from self._word("<`{")
            if (yield from self._after_spaces()) == "`":
                yield from self._word("<{")
            char = yield from self._after_spaces()
        if not name or not char or char not in "{<`":
            return False
        self._call(name)
        if char == "{":
            yield from self._value(self._arguments)
        else:
            self._arguments("{}")
        return True


class QwenCoderReader(CallReader):
    """Reads ``<tool_call><function=name><parameter=key>value</parameter></function></tool_call>``.

    The arguments become one JSON object, whose values are what the tool's schema says. Text values are passed on as
    they come, others when they are whole. A value ends at ``</parameter>`` only, since it may hold other tags; one that
    is JSON may hold that too.
    """

    def _read(self) -> Steps[None]:
        begin = ("<tool_call>", "<function=")
        inside = Tags.of("<parameter=", "</function>", "</tool_call>", *begin)
        behind, outside = Tags.of("</tool_call>", *begin), Tags.of(*begin)
        tags, separator = outside, ""
        properties: Mapping[str, Any] = {}
        while tag := (yield from self._scan(tags, self._text)):
            if tag == "<parameter=":
                separator = (yield from self._parameter(properties, separator)) or separator
                continue
            if tags is inside:
                self._arguments("}")
            if tags is not outside or tag not in begin:
                self._close()
            tags = behind if tag == "</function>" else outside
            if tag in begin:
                self._raw = [tag]
                yield from self._after_spaces()
                named = tag == "<function=" or (yield from self._literal("<function="))
                name = (yield from self._word("<>")) if named else ""
                if name and (yield from self._literal(">")):
                    self._call(name)
                    self._arguments("{")
                    schema = self._schemas.get(name)
                    given = schema.get("properties") if isinstance(schema, Mapping) else None
                    properties = given if isinstance(given, Mapping) else {}
                    tags, separator = inside, ""
                self._not_a_call()

    def _parameter(self, properties: Mapping[str, Any], separator: str) -> Steps[str]:
        """Read a parameter from behind ``<parameter=``. Returns: what divides it from the next; empty if it is none."""
        self._raw = ["<parameter="]
        letters: list[str] = []
        while (char := (yield from self._peek())) and char not in "<>\r\n":  # it may hold spaces
            self._take(1, letters.append)
        key = "".join(letters)
        if not key or not (yield from self._literal(">")):
            self._not_a_call()
            return ""
        self._raw = None
        self._arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
        if (yield from self._peek()) == "\n":
            self._take(1)
        end, types = Tags.of("\n</parameter>", "</parameter>"), value_types(properties.get(key))
        if types == TEXT:
            self._arguments('"')
            if (yield from self._scan(end, lambda text: self._arguments(json.dumps(text, ensure_ascii=False)[1:-1]))):
                self._arguments('"')
            return ", "
        read: list[str] = []
        if (yield from self._peek()) in ("{", "[", '"'):  # it may be JSON, with the tag in a string of it
            yield from self._value(read.append, is_strict=True)
        is_whole = yield from self._scan(end, read.append)
        self._arguments(as_json("".join(read), types) if is_whole else "".join(read))
        return ", "


_PYTHON = {"True": "true", "False": "false", "None": "null"}  # templates show values so, and models write them


def as_json(text: str, types: frozenset[str]) -> str:
    """Return the text of a tagged parameter as JSON: itself where it is JSON of one of ``types``, else a string."""
    stripped = text.strip()
    written = _PYTHON.get(stripped, stripped)
    try:
        kind = type_of(json.loads(written, parse_constant=_refuse))
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    fits = kind in types or (kind in ("integer", "number") and not types.isdisjoint({"integer", "number"}))
    return written if fits and types != TEXT else json.dumps(text, ensure_ascii=False)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")
