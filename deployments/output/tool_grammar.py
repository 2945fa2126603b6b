"""The constraint that holds an output to tool calls in the model's own format, with arguments that fit their schemas.

Owns:      when calls are constrained: a call that must be made, a tool that is strict, and calls that must not be many.
Never:     leaves a call that the reader of the format would find to chance, where one is constrained.
Thread:    any; a pure function of the request.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from deployments.output.output_format import OutputFormat
from deployments.output.tool_formats import ToolFormat
from deployments.output.tools import TEXT, Tool, ToolUse, value_types
from replicas.errors import InvalidRequest
from replicas.grammar.checking import ANY_TEXT, Problem, lark_document, lark_text
from replicas.types import Constraint

_NO_CALL = r"/([ \t\r\n]*[^{ \t\r\n](.|\n)*)?/"  # where a call begins without a tag
# keywords that are not held where parameters stand between tags: of all arguments, and of a parameter that is text
_OF_ARGUMENTS = ("$ref", "allOf", "anyOf", "oneOf", "minProperties", "maxProperties")
_OF_TEXT = ("$ref", "allOf", "anyOf", "oneOf", "pattern", "format", "minLength", "maxLength")
_TAGGED_NAME = re.compile(r"[^<>\r\n]+")


def is_constrained(use: ToolUse) -> bool:
    """Whether an output must be held to ``use``."""
    return use.must_call or not use.parallel or any(tool.strict for tool in use.tools)


def tool_constraint(
    output: OutputFormat,
    use: ToolUse,
    *,
    schemas: Mapping[str, Mapping[str, Any]],
    token_id: Callable[[str], int],
    content: Constraint | None = None,
) -> Constraint:
    """Return what holds an output to ``use``.

    Args:   schemas: what a grammar can hold of each tool's `arguments_schema`, by the tool's name.
            token_id: the id of a special token, by its text.
            content: what an answer without a call must be; None: any text.
    Raises: InvalidRequest if the model's format of calls is not known, or ``content`` is no JSON schema.
    """
    if output.tools is None:
        raise InvalidRequest("tools: this model's form of tool calls is not known (model.tool_format)", param="tools")
    if content is not None and content.kind != "json_schema" and not use.must_call:
        raise InvalidRequest(
            "tools: go together with a JSON schema for answers without a call, and with no other constraint; leave "
            'one of them out, or give tool_choice: "none"',
            param="tools",
        )
    rules = _Rules(output.tools, use, schemas, {tag: token_id(tag) for tag in output.special_tags})
    text = rules.text(None if content is None else json.loads(content.text))
    return Constraint(kind="lark", text=text)


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """Return the schema of a tool's arguments; one that names none has none (closing.py)."""
    return {"type": "object", "properties": {}, **tool.parameters}


def problems_of(form: ToolFormat, schema: Mapping[str, Any]) -> list[Problem]:
    """List the keywords of a tool's `arguments_schema` that a grammar holds in JSON, but not in ``form``.

    Raises: InvalidRequest for a parameter whose name cannot be written in ``form``.
    """
    if form.arguments == "json":
        return []
    properties = schema.get("properties", {})
    found = [Problem(keyword, f"/{keyword}") for keyword in _OF_ARGUMENTS if keyword in schema]
    if not properties.keys() >= set(schema.get("required", ())):
        found.append(Problem("required", "/required"))
    for name, each in properties.items():
        if not _TAGGED_NAME.fullmatch(name):
            raise InvalidRequest(
                f"this model writes a parameter's name in a tag, which {name[:64]!r} cannot be in: give it one without "
                "'<', '>' and line breaks"
            )
        if isinstance(each, Mapping) and value_types(each) == TEXT:
            at = f"/properties/{name.replace('~', '~0').replace('/', '~1')}"
            found += [Problem(keyword, f"{at}/{keyword}") for keyword in _OF_TEXT if keyword in each]
    return found


class _Rules:
    """The rules of one grammar, in llguidance's dialect of Lark."""

    def __init__(
        self,
        form: ToolFormat,
        use: ToolUse,
        schemas: Mapping[str, Mapping[str, Any]],
        special_ids: Mapping[str, int],
    ) -> None:
        self._form = form
        self._use = use
        self._schemas = schemas
        self._ids = special_ids
        self._rules: list[str] = []

    def text(self, content: Mapping[str, Any] | None) -> str:
        form, use = self._form, self._use
        begin = form.whole_begin + form.before_name
        more = f"({self._literal(form.between + form.before_name)} named)* " if use.parallel else ""
        rest = f"named {more}{self._literal(form.whole_end)}"
        if use.must_call:
            self._rules.append(f"start: {self._literal(begin)} {rest}")
        elif content is not None:
            self._rules += [f"start: content | {self._literal(begin)} {rest}", f"content: {lark_document(content)}"]
        elif (trigger := form.trigger) is None:  # calls are the whole output
            self._rules += [f"start: FREE | {self._literal(begin)} {rest}", f"FREE: {_NO_CALL}"]
        else:
            head = f"head {self._literal(begin.partition(trigger)[2])}"
            if use.parallel and not form.whole_begin:
                self._rules.append(f"start: ({head} named)* FREE")
            else:
                self._rules.append(f"start: FREE | {head} {rest}")
            is_token = trigger in self._ids
            self._rules.append(f"head{'' if is_token else '[lazy]'}: FREE {self._literal(trigger)}")
            self._rules.append(f"FREE: {ANY_TEXT}")
        tools = [self._named(i, tool) for i, tool in enumerate(use.callable_tools)]
        self._rules.append(f"named: ({' | '.join(tools)}) {self._literal(form.end)}")
        return "\n".join(["%llguidance {}", *self._rules])

    def _named(self, number: int, tool: Tool) -> str:
        begin = self._literal(self._form.begin(tool.name).removeprefix(self._form.before_name))
        if self._form.arguments == "json":
            self._rules.append(f"arguments_{number}: {lark_document(self._schemas[tool.name])}")
        else:
            self._rules.append(f"arguments_{number}: {self._parameters(number, self._schemas[tool.name])}")
        return f"{begin} arguments_{number}"

    def _parameters(self, number: int, whole: Mapping[str, Any]) -> str:
        """Each parameter between its tags, in the order of the schema."""
        needed = whole.get("required", ())
        shared = {name: whole[name] for name in ("$defs", "definitions") if name in whole}
        found = []
        for i, (name, given) in enumerate(whole.get("properties", {}).items()):
            schema = given if isinstance(given, Mapping) else {"type": "string"}
            begin, end = self._literal(self._form.parameter_begin(name)), self._literal(self._form.parameter_end)
            rule = f"value_{number}_{i}"
            values = [schema["const"]] if "const" in schema else schema.get("enum")
            if value_types(schema) != TEXT:
                self._rules.append(f"{rule}: {lark_document({**schema, **shared})} {end}")
            elif values:
                self._rules.append(f"{rule}: ({' | '.join(self._literal(str(value)) for value in values)}) {end}")
            else:
                _, tag, behind = self._form.parameter_end.partition(self._form.parameter_end.strip())
                # the reader ends a text at the first such tag, whatever stands around it
                self._rules.append(f"text_{rule}[lazy]: {ANY_TEXT} {self._literal(tag)}")
                self._rules.append(f"{rule}: text_{rule} {self._literal(behind)}")
            found.append(f"{begin} {rule}" if name in needed else f"({begin} {rule})?")
        return " ".join(found) or '""'

    def _literal(self, text: str) -> str:
        return lark_text(text, self._ids)
